"""The gap between two sides' log-probs of the same tokens (sampler and trainer, old and new), and its explanation.

A pattern explains the gap if it brings all tokens that it covers within rounding (of two sides in bfloat16). It fits,
which is no proof. A pattern that leaves more, but at most a quarter of the gap, is only suggested.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.losses.ratio import not_log_probs, range_in_words
from megatron_rl_loss.losses.sampler_columns import sampled_log_probs

FEWEST = 8  # a pattern must bring so many tokens at least from beyond rounding to within it
_SAME = "both sides need one row per sample and one entry per token. Cut both to the same tokens"
_DUMP = "a dump is a .pt without code or a .jsonl, with a list of log-probs per sample. Write torch.save([tensor, ...])"
#: The sampler's side: slime's and this library's name, NeMo-Gym's, SGLang's.
_OF_ROLLOUT = ("rollout_log_probs", "generation_log_probs", "output_token_logprobs")
Rows = Sequence[Tensor]
Ids = Sequence[Any]


class LogProbGap:
    """The gap of every token and its explanation; `str` gives a table.

    `gaps` of each sample, float64 [length], masked tokens too; `num_tokens` of each, active and finite; texts of
    `patterns` and `suggestions`, by name; texts on samples and tokens that were `left_out`, and on values that are no
    log-probs.
    """

    def __init__(self, ids: Ids, train: Rows, rollout: Rows, masks: Rows) -> None:
        self.ids, self.lengths = ids, [len(row) for row in train]
        gap, trained = _flat(rollout) - _flat(train), _flat(masks) != 0
        self.gaps, self.finite = gap.split(self.lengths), gap.isfinite()
        # Of all entries, end to end:
        self.gap, self.train, self.rollout = (row.where(self.finite, 0) for row in (gap, _flat(train), _flat(rollout)))
        self.active = trained & self.finite
        self.rounding = torch.maximum(self.train.abs(), self.rollout.abs()).clamp(min=1) / 2**8
        self.beyond = self.gap.abs() > self.rounding
        self.num_tokens = torch.tensor([int(on.sum()) for on in self.active.split(self.lengths)])
        self.patterns, self.suggestions = dict[str, str](), dict[str, str]()
        lost = int((trained & ~self.finite).sum())
        self.left_out = [f"left out: {lost} tokens with NaN or infinity"] if lost else []

    def consider(self, name: str, text: str, left: Tensor, among: Tensor) -> None:
        """Name or suggest a pattern, by the gap that it leaves `among` entries, [num_entries]."""
        if (self.beyond & among).sum() < max(FEWEST, int((self.beyond & self.active).sum()) / 2):
            return
        gap, left, beyond = self.gap.abs()[among], left.abs()[among], self.beyond[among]
        text += f" ({len(gap)} tokens, largest |gap| {gap.max():.3g} -> {left.max():.1g})"
        if (left <= self.rounding[among]).all():
            self.patterns[name] = text
        elif left.norm() < gap.norm() / 4 and left[beyond].median() < gap[beyond].median() / 4:
            self.suggestions[name] = text

    def __str__(self) -> str:
        lines = [f"explained: {text}" for text in self.patterns.values()]
        if not lines:
            fits = "no known pattern brings the gap" if self.beyond[self.active].any() else "all gaps are"
            lines = [f"{fits} within rounding", *(f"only suggested: {text}" for text in self.suggestions.values())]
        head, *numbers = self._numbers()
        return "\n  ".join([head, *self.left_out, *numbers, *lines[:3]])

    def _numbers(self) -> list[str]:
        rows = [gap.abs()[on] for gap, on in zip(self.gaps, self.active.split(self.lengths), strict=True)]
        gap, log_ratio = _flat(rows), -self.gap[self.active]
        head = f"log-probs of {len(gap)} tokens in {len(rows)} samples; gap: rollout - train"
        if not len(gap):
            return [head]
        quantiles = gap.sort().values[(len(gap) - 1) * torch.tensor([50, 90, 99, 100]) // 100]
        place = _flat([torch.arange(len(row)) / max(len(row), 1) for row in rows])  # within its sample, 0 to 1
        thirds = [part.mean() for part in gap[place.argsort()].tensor_split(3)]
        of_thirds = "mean |gap|: first third of samples {:.3g}, middle {:.3g}, last {:.3g}".format(*thirds)
        means = {sample_id: row.mean() for sample_id, row in zip(self.ids, rows, strict=True) if len(row)}
        by_size = sorted(means, key=lambda sample_id: -means[sample_id])
        worst = [f"sample {sample_id}: {means[sample_id]:.3g}" for sample_id in by_size[:3]]
        ratio, size = log_ratio.exp().mean(), (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp()
        return [
            head,
            "|gap|: 50 % {:.3g}, 90 % {:.3g}, 99 % {:.3g}, largest {:.3g}".format(*quantiles),
            *([of_thirds] if len(gap) >= 3 else []),
            f"mean |gap|, worst: {', '.join(worst)}",
            f"ratio exp(train - rollout): mean {ratio:.3g}, effective sample size / tokens {size / len(gap):.3g}",
        ]


def compare_log_probs(
    train: Rows, rollout: Rows, loss_masks: Rows = (), *, total_lengths: Ids = (), top: Rows = (), ids: Ids = ()
) -> LogProbGap:
    """Compare log-probs token by token and try the known patterns.

    Args:
        train, rollout: [num_samples] of float [length], tensors or lists; entries of the same tokens in the same order.
        loss_masks: the same shapes; 0 for a token that is not trained. Without masks all tokens count.
        total_lengths: of samples, prompt included, if entries are of responses alone.
        ids: of samples, for the report.
        top: our log-probs of the k most likely tokens, or of the vocabulary, [length, k] each; to fit a temperature.
    """
    train, rollout, loss_masks, top = ([*map(torch.as_tensor, rows)] for rows in (train, rollout, loss_masks, top))
    lengths, ids = [row.numel() for row in train], list(ids) or range(len(train))
    totals = list(total_lengths) or lengths
    if {len(ids), len(totals)} != {len(train)}:
        raise ValueError(
            f"{len(ids)} ids and {len(totals)} total_lengths for {len(train)} samples: every sample needs one of each. "
            "Give all, or leave the argument out."
        )
    masks = loss_masks if len(loss_masks) else [torch.ones(length) for length in lengths]
    sides = {"train": train, "rollout": rollout, "loss_masks": masks, "top": top if len(top) else masks}
    for name, rows in sides.items():
        if len(rows) != len(train):
            raise ValueError(f"{len(rows)} samples of {name}, {len(train)} of train: {_SAME}.")
        for sample_id, row in zip(ids, rows, strict=True):
            if row.dim() != 1 + (rows is top):
                raise ValueError(f"sample {sample_id}: {name} of shape {[*row.shape]}: {_SAME}, as a 1-D tensor.")
        own = [len(row) for row in rows]
        off = [of_sample for of_sample in zip(ids, lengths, own, strict=True) if of_sample[1] != of_sample[2]]
        if off:
            sample_id, length, other = off[0]
            order = " Both sides have the same lengths in another order: give both by sample id." * (
                sorted(lengths) == sorted(own)
            )
            counts = f"{len(off)} of {len(train)} samples, first {sample_id}: train {length}, {name} {other}"
            raise ValueError(f"lengths differ in {counts}: {_SAME}.{order}")
    gap = LogProbGap(ids, train, rollout, masks)
    on = gap.active
    for side, values in (("train", gap.train[on]), ("rollout", gap.rollout[on])):
        if len(values) and not_log_probs(*values.aminmax(), values.dtype):
            gap.left_out.append(f"no log-probs: {side} has {range_in_words(*values.aminmax())}")
    if gap.beyond[on].any():
        for name, text, source in _moves(gap, torch.tensor(totals)):
            among = (source >= 0) & on[source] & (gap.finite if name.startswith("padded") else on)
            gap.consider(name, text, gap.rollout - gap.train[source], among)
        if len(top):
            _fit_temperature(gap, top)
        else:
            _suggest_temperature(gap)
        return gap
    active = {"train": gap.train[on], "rollout": gap.rollout[on]}
    rounded = [name for name, side in active.items() if side.bfloat16().double().equal(side)]
    if len(rounded) == 1 and (gap.gap.abs() > gap.rounding / 2**10)[on].sum() >= FEWEST:
        gap.patterns["bf16_rounding"] = f"{rounded[0]} are rounded to bfloat16"
    if gap.beyond.any():
        gap.patterns["masked_tokens"] = f"only masked tokens differ: {int(gap.beyond.sum())}"
    return gap


def _flat(values: Rows) -> Tensor:
    return torch.cat([torch.zeros(0).double(), *(row.detach().double().cpu() for row in values)])


def _moves(gap: LogProbGap, totals: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Names, texts, and the entry of train at each entry of rollout, [num_entries]; -1 for unknown."""
    lengths, entry, on = torch.tensor(gap.lengths), torch.arange(len(gap.gap)), gap.active
    starts, sample = lengths.cumsum(0) - lengths, torch.arange(len(lengths)).repeat_interleave(lengths)
    position, length, total = entry - starts[sample], lengths[sample], totals[sample]
    first = torch.full_like(lengths, 2**40).scatter_reduce(0, sample[on], position[on], "amin")[sample]
    last = torch.full_like(lengths, -1).scatter_reduce(0, sample[on], position[on], "amax")[sample]
    shifts: dict[str, Any] = {
        "one_token_later": 1,
        "one_token_earlier": -1,
        "padded_left": length - 1 - last,
        "padded_right": -first,
    }
    for name, by in shifts.items():
        inside = (position >= by) & (position - by < length)
        yield name, f"rollout equals train {name.replace('_', ' ')}", (entry - by).where(inside, -1)
    logit = (total - length + position - (total > length).long()).clamp(min=0)  # a response's is one place before
    for cp_size in (2, 4, 8):
        chunk = logit // -(-total // (2 * cp_size))
        rank = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
        order = (sample * cp_size + rank).argsort(stable=True)
        for sides, source in (("rollout equals train", order), ("train equals rollout", order.argsort())):
            yield "cp_order", f"{sides} in zigzag chunks of {cp_size} context-parallel ranks, ordered by rank", source

    def sorted_samples(side: Tensor) -> Tensor:
        """Numbers of the samples, ordered by length, then by the sum of their log-probs."""
        by_sum = torch.zeros(len(lengths)).double().index_add(0, sample, side).argsort()
        return by_sum[lengths[by_sum].argsort(stable=True)]

    if gap.beyond.sum() >= 4 * len(lengths):  # fewer would be found by chance
        twin = sorted_samples(gap.train)[sorted_samples(gap.rollout).argsort()][sample]
        source = (starts[twin] + position).where(length >= FEWEST, -1)
        yield "sample_order", "rollout equals train with the samples in another order", source


def _fit_temperature(gap: LogProbGap, top: Rows) -> None:
    """Fit beta = 1 / temperature by ``rollout = beta * train - logsumexp(beta * top)``, [num_entries]."""
    z = torch.cat([rows.detach().cpu() for rows in top])

    def left(beta: float, at: Any) -> Tensor:
        return gap.rollout[at] - beta * gap.train[at] + (beta * z[at].double()).logsumexp(-1)

    on = gap.active.nonzero().flatten()
    few = on[:: len(on) // 64 + 1]  # all are checked with what fits these
    beta, step = 2.125, 0.09375
    for _ in range(4):
        tried = [beta + k * step for k in range(-20, 21)]
        errors = torch.stack([left(candidate, few) for candidate in tried]).abs().mean(-1)
        beta, step = tried[int(errors.argmin())], step / 16
    text = f"rollout equals train at temperature {1 / beta:.4g}"
    gap.consider("temperature", text, left(beta, slice(None)), gap.active)


def _suggest_temperature(gap: LogProbGap) -> None:
    """Suggest a temperature from the tokens' own log-odds.

    The log-odds of likely tokens must stretch beyond the noise of either side, while unlikely tokens stay.
    """
    train, rollout, move = gap.train[gap.active], gap.rollout[gap.active], gap.gap[gap.active]
    likely, unlikely = (train + rollout > -4) & (torch.maximum(train, rollout) < -1e-4), move[train + rollout < -4]
    odds = [side[likely] - (-side[likely].expm1()).log() for side in (train, rollout)]
    x, y = (side - side.mean() for side in odds)
    slope = y.norm() / x.norm()
    grows = [side @ (y - x) / (side * (y - x)).norm() for side in (x, y)]
    stretches = min(grows) > 4 or max(grows) < -4
    rest = rollout[likely] - torch.nn.functional.logsigmoid(odds[1].mean() + slope * x)
    along = unlikely.mean() * (slope - 1).sign() / unlikely.square().mean().sqrt()
    enough = likely.sum() >= 50 and len(unlikely) >= 10
    if enough and stretches and rest.norm() < 0.85 * move[likely].norm() and along < 0.2:
        near = f"a temperature near {1 / slope:.2g} times that of train, judged by the log-probs alone"
        gap.suggestions["temperature"] = f"rollout is at {near}; fit it with `top`"


def compare_dumps(train: Path, rollout: Path) -> LogProbGap:
    """Compare two files, joined by sample id, with the masks of `train`, else of `rollout`."""
    left, right = _read(rollout), _read(train)
    if not (ids := [sample_id for sample_id in right if sample_id in left]):
        raise ValueError(
            f"{rollout} has samples {[*left][:3]}, {train} {[*right][:3]}: they share none. Dump the same step twice."
        )
    rows, others = ([side[sample_id][0] for sample_id in ids] for side in (right, left))
    masks = [
        torch.tensor(right[sample_id][1] or left[sample_id][1] or [1] * len(row))
        for sample_id, row in zip(ids, rows, strict=True)
    ]
    gap = compare_log_probs(rows, others, masks, total_lengths=[right[sample_id][2] for sample_id in ids], ids=ids)
    if alone := sorted({*left} ^ {*right}):
        counts = f"{len(left) - len(ids)} samples of {rollout} alone, {len(right) - len(ids)} of {train} alone"
        gap.left_out.append(f"left out: {counts}, first {alone[0]}")
    return gap


def _read(path: Path) -> dict[str, tuple[Tensor, list[float], int]]:
    """Log-probs, mask (empty if there is none) and length with the prompt of each sample, by id."""
    by_id: dict[str, Any] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else []
        content: Any = [*map(json.loads, lines)] or torch.load(path, map_location="cpu", weights_only=True)
        samples = content.get("samples", content) if isinstance(content, Mapping) else content  # of slime
        for number, entry in samples.items() if isinstance(samples, Mapping) else enumerate(samples):
            sample = entry if isinstance(entry, Mapping) else {"index": number, "log_probs": entry}
            of_rollout = next((key for key in _OF_ROLLOUT if key in sample), "log_probs")
            trained = "data_parallel_rank" in sample or of_rollout == "log_probs"
            column = sample["log_probs" if trained else of_rollout]
            if isinstance(column, list) and any(isinstance(each, list | tuple | Mapping) for each in column):
                column = sampled_log_probs(column)
            row = torch.as_tensor(column, dtype=torch.float64)
            mask = sample.get("loss_masks", sample.get("loss_mask"))
            name = str(sample.get("sample_index", sample.get("index", number)))
            name += f", entry {number}" if name in by_id else ""
            by_id[name] = row, [] if mask is None else [*map(float, mask)], sample.get("total_lengths", row.numel())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file. Give the paths of two dumps, TRAIN and ROLLOUT.") from None
    except Exception as error:  # of many kinds
        code = str(error).partition("GLOBAL ")[2].split(" ")[0]
        why = f"it holds code, {code}" if code else "no log-probs were found in it"
        if str(error).startswith("a log-prob of "):
            raise ValueError(f"{path}: {error}") from None
        raise ValueError(f"{path}: {why} ({type(error).__name__}); {_DUMP}.") from None
    return by_id

"""The gap between two sides' log-probs of the same tokens (sampler and trainer, old and new), and what explains it.

A pattern is named where it brings all tokens that it covers within rounding (of two sides in bfloat16): a reading that
fits, no proof. One that leaves more, but at most a quarter of the gap, is only suggested.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FEWEST = 8  # a pattern must bring so many tokens at least from beyond rounding to within it
_SAME = "both sides need a row of each sample, and an entry of each token. Cut both to the same tokens"
_DUMP = "a dump is a .pt without code, or a .jsonl: a list of log-probs per sample. Write torch.save([tensor, ...])"
Rows = Sequence[Tensor]
Ids = Sequence[Any]


class LogProbGap:
    """The gap of every token and what explains it; `str` gives a table.

    `gaps` of each sample, float64 [length], masked tokens too; `num_tokens` of each, active and finite; texts of
    `patterns` and `suggestions`, by name; texts on what was `left_out`.
    """

    def __init__(self, ids: Ids, ours: Rows, theirs: Rows, masks: Rows) -> None:
        self.ids, self.lengths, given = ids, [len(row) for row in ours], _flat(masks) != 0
        gap = _flat(theirs) - _flat(ours)
        self.gaps, self.finite = gap.split(self.lengths), gap.isfinite()
        self.gap, self.ours, self.theirs = (_.where(self.finite, 0) for _ in (gap, _flat(ours), _flat(theirs)))
        self.active, lost = given & self.finite, int((given & ~self.finite).sum())
        self.num_tokens = torch.tensor([int(on.sum()) for on in self.active.split(self.lengths)])
        self.rounding = torch.maximum(self.ours.abs(), self.theirs.abs()).clamp(min=1) / 2**8
        self.beyond = self.gap.abs() > self.rounding
        self.patterns, self.suggestions = dict[str, str](), dict[str, str]()
        self.left_out = [f"left out: {lost} tokens with NaN or infinity"] * (lost > 0)

    def consider(self, name: str, text: str, left: Tensor, among: Tensor) -> None:
        """Name a pattern, or suggest it, by the gap that it leaves `among` entries, [num_entries]."""
        if (self.beyond & among).sum() < max(FEWEST, int((self.beyond & self.active).sum()) / 2):
            return
        gap, left, beyond = self.gap.abs()[among], left.abs()[among], self.beyond[among]
        text += f" ({len(gap)} tokens, largest |gap| {gap.max():.3g} -> {left.max():.1g})"
        if (left <= self.rounding[among]).all():
            self.patterns[name] = text
        elif left.norm() < gap.norm() / 4 and left[beyond].median() < gap[beyond].median() / 4:
            self.suggestions[name] = text

    def __str__(self) -> str:
        rows = [gap.abs()[on] for gap, on in zip(self.gaps, self.active.split(self.lengths), strict=True)]
        gap, ratio = _flat(rows), -self.gap[self.active]
        lines = [f"log-probs of {len(gap)} tokens in {len(rows)} samples; gap: theirs - ours"]
        if len(gap):
            order = gap.sort().values[(len(gap) - 1) * torch.tensor([50, 90, 99, 100]) // 100]
            place = _flat([torch.arange(len(row)) / max(len(row), 1) for row in rows])
            thirds = [part.mean() for part in gap[place.argsort()].tensor_split(3)]
            means = {one: row.mean() for one, row in zip(self.ids, rows, strict=True) if len(row)}
            worst = [f"{one} {means[one]:.3g}" for one in sorted(means, key=lambda one: -means[one])[:3]]
            share = (2 * ratio.logsumexp(0) - (2 * ratio).logsumexp(0)).exp() / len(gap)
            lines += [
                "|gap|: 50 % {:.3g}, 90 % {:.3g}, 99 % {:.3g}, largest {:.3g}".format(*order),
                "mean |gap|: first third of samples {:.3g}, middle {:.3g}, last {:.3g}".format(*thirds),
                f"mean |gap|, worst samples: {', '.join(worst)}",
                f"ratio exp(ours - theirs): mean {ratio.exp().mean():.3g}, effective sample size / tokens {share:.3g}",
            ]
        fits = "no known pattern brings the gap" if self.beyond[self.active].any() else "all gaps are"
        maybe = [f"{fits} within rounding", *(f"only suggested: {one}" for one in self.suggestions.values())]
        known = [f"explained: {one}" for one in self.patterns.values()]
        return "\n  ".join([*lines, *(known or maybe)[:3], *self.left_out])


def compare_log_probs(
    ours: Rows, theirs: Rows, loss_masks: Rows = (), *, total_lengths: Ids = (), top: Rows = (), ids: Ids = ()
) -> LogProbGap:
    """Compare log-probs token by token, and try the known patterns.

    Args:
        ours, theirs: [num_samples] of float [length], entry for entry the same tokens; rows of a padded batch will do.
        loss_masks: the same; 0 where a token is not trained. Without masks all tokens count.
        total_lengths, ids: of samples; lengths with the prompt, where entries are of responses alone.
        top: our log-probs of the k most likely tokens, or of the vocabulary, [length, k] each; fit a temperature.
    """
    lengths, ids = [row.numel() for row in ours], ids or range(len(ours))
    masks = loss_masks if len(loss_masks) else [torch.ones(length) for length in lengths]
    for name, rows in {"ours": ours, "theirs": theirs, "loss_masks": masks, "top": top if len(top) else masks}.items():
        if len(rows) != len(ours):
            raise ValueError(f"{len(rows)} samples of {name}, {len(ours)} of ours: {_SAME}.")
        for one, row, length in zip(ids, rows, lengths, strict=True):
            if row.dim() != 1 + (rows is top) or len(row) != length:
                raise ValueError(f"sample {one}: {name} of shape {[*row.shape]}, ours of length {length}: {_SAME}.")
    gap = LogProbGap(ids, ours, theirs, masks)
    if gap.beyond[on := gap.active].any():
        for name, text, source in _moves(gap, torch.tensor(total_lengths or lengths)):
            among = (source >= 0) & on[source] & (gap.finite if name.startswith("padded") else on)
            gap.consider(name, text, gap.theirs - gap.ours[source], among)
        _try_temperature(gap, top)
        return gap
    short = [name for name in ("ours", "theirs") if (side := getattr(gap, name)[on]).bfloat16().double().equal(side)]
    if len(short) == 1 and (gap.gap.abs() > gap.rounding / 2**10)[on].sum() >= FEWEST:
        gap.patterns["bf16_rounding"] = f"{short[0]} are rounded to bfloat16"
    if gap.beyond.any():
        gap.patterns["masked_tokens"] = f"only masked tokens differ: {int(gap.beyond.sum())}"
    return gap


def _flat(values: Rows) -> Tensor:
    return torch.cat([torch.zeros(0).double(), *(one.detach().double().cpu() for one in values)])


def _moves(gap: LogProbGap, totals: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Names, texts, and for each entry of theirs the one of ours that stands there, -1 for unknown, [num_entries]."""
    lengths, place = torch.tensor(gap.lengths), torch.arange(len(gap.gap))
    starts, sample = lengths.cumsum(0) - lengths, torch.arange(len(lengths)).repeat_interleave(lengths)
    length, total, own, at = lengths[sample], totals[sample], place - starts[sample], sample[gap.active]
    right = -torch.full_like(lengths, 2**40).scatter_reduce(0, at, own[gap.active], "amin")[sample]
    left = length - 1 - torch.full_like(lengths, -1).scatter_reduce(0, at, own[gap.active], "amax")[sample]
    for name, by in (("one_token_later", 1), ("one_token_earlier", -1), ("padded_left", left), ("padded_right", right)):
        source = (place - by).where((own >= by) & (own - by < length), -1)
        yield name, f"theirs are ours {name.replace('_', ' ')}", source
    for cp_size in (2, 4, 8):  # a response's tokens go with their logits, one place before
        chunk = (own + total - length - (total > length).long()).clamp(min=0) // -(-total // (2 * cp_size))
        order = (sample * cp_size + torch.minimum(chunk, 2 * cp_size - 1 - chunk)).argsort(stable=True)
        for sides, at in (("theirs are ours", order), ("ours are theirs", order.argsort())):
            yield "cp_order", f"{sides} in zigzag chunks of {cp_size} context-parallel ranks, rank after rank", at
    sums = [torch.zeros(len(lengths)).double().index_add(0, sample, side) for side in (gap.ours, gap.theirs)]
    ours, theirs = (one.argsort()[lengths[one.argsort()].argsort(stable=True)] for one in sums)
    source = (starts[ours[theirs.argsort()]][sample] + own).where(length >= FEWEST, -1)
    if gap.beyond.sum() >= 4 * len(lengths):  # fewer would be found by chance
        yield "sample_order", "theirs are ours with the samples in another order", source


def _try_temperature(gap: LogProbGap, top: Rows) -> None:
    """Fit a temperature to the most likely tokens; without them, suggest one by the tokens' own log-odds.

    The log-odds of likely tokens must stretch, beyond the noise of either side, and unlikely tokens not move along.
    """
    on = gap.active.nonzero().flatten()
    if len(top):
        few, z, beta, step = on[:: len(on) // 64 + 1], torch.cat([rows.detach().cpu() for rows in top]), 2.125, 0.09375
        for _ in range(4):  # all are checked with it
            tried = [beta + k * step for k in range(-20, 21)]
            errors = [gap.theirs[few] - one * gap.ours[few] + (one * z[few].double()).logsumexp(-1) for one in tried]
            beta, step = tried[int(torch.stack(errors).abs().mean(-1).argmin())], step / 16
        left = gap.theirs - beta * gap.ours + (beta * z.double()).logsumexp(-1)
        gap.consider("temperature", f"theirs are ours at temperature {1 / beta:.4g}", left, gap.active)
        return
    ours, theirs, move = gap.ours[on], gap.theirs[on], gap.gap[on]
    likely, unlikely = (ours + theirs > -4) & (torch.maximum(ours, theirs) < -1e-4), move[ours + theirs < -4]
    odds = [side[likely] - (-side[likely].expm1()).log() for side in (ours, theirs)]
    x, y = (side - side.mean() for side in odds)
    grows, slope = [side @ (y - x) / (side * (y - x)).norm() for side in (x, y)], y.norm() / x.norm()
    rest = theirs[likely] - torch.nn.functional.logsigmoid(odds[1].mean() + slope * x)
    along = unlikely.mean() * (slope - 1).sign() / unlikely.square().mean().sqrt()
    enough = likely.sum() >= 50 and len(unlikely) >= 10 and (min(grows) > 4 or max(grows) < -4)
    if enough and rest.norm() < 0.85 * move[likely].norm() and along < 0.2:
        seen = f"a temperature near {1 / slope:.2g} times that of ours, by the log-probs alone"
        gap.suggestions["temperature"] = f"theirs are at {seen}; fit it with `top`"


def compare_dumps(theirs: Path, ours: Path) -> LogProbGap:
    """Compare two files, joined by sample id; the masks are those of ours, or of theirs."""
    left, right = _read(theirs), _read(ours)
    if not (ids := [one for one in right if one in left]):
        raise ValueError(f"{theirs} has samples {[*left][:3]}, {ours} {[*right][:3]}: none is in both. Dump one step.")
    rows, others = ([side[one][0] for one in ids] for side in (right, left))
    masks = [torch.tensor(right[one][1] or left[one][1] or [1] * len(row)) for one, row in zip(ids, rows, strict=True)]
    gap = compare_log_probs(rows, others, masks, total_lengths=[right[one][2] for one in ids], ids=ids)
    if alone := sorted({*left} ^ {*right}):
        counts = f"{len(left) - len(ids)} samples of {theirs} alone, {len(right) - len(ids)} of {ours} alone"
        gap.left_out.append(f"left out: {counts}, first {alone[0]}")
    return gap


def _read(path: Path) -> dict[str, tuple[Tensor, list[float], int]]:
    """Log-probs, mask (empty without) and length with the prompt of each sample, by id."""
    found: dict[str, Any] = {}
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else []
        content: Any = [*map(json.loads, lines)] or torch.load(path, map_location="cpu", weights_only=True)
        samples = content.get("samples", content) if isinstance(content, Mapping) else content  # of slime
        for number, given in samples.items() if isinstance(samples, Mapping) else enumerate(samples):
            sample = given if isinstance(given, Mapping) else {"index": number, "log_probs": given}
            trained = "data_parallel_rank" in sample or "rollout_log_probs" not in sample
            row = torch.as_tensor(sample["log_probs" if trained else "rollout_log_probs"], dtype=torch.float64)
            mask = sample.get("loss_masks", sample.get("loss_mask"))
            name = str(sample.get("sample_index", sample.get("index", number)))
            name += f", entry {number}" if name in found else ""
            found[name] = row, [] if mask is None else [*map(float, mask)], sample.get("total_lengths", row.numel())
    except Exception as error:  # of many kinds
        why = str(error).partition("GLOBAL ")[2].split(" ")[0] or f"{type(error).__name__} {error}"[:41]
        raise ValueError(f"{path}, {why}: {_DUMP}.") from None
    return found

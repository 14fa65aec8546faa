"""The gap between two sides' log-probs of the same tokens (sampler and trainer, old and new), and what explains it.

A pattern is named where it brings all tokens that it covers within rounding (of two sides in bfloat16): a reading that
fits, no proof. One that leaves more, but at most a quarter of the gap, is only suggested.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

FEWEST = 8  # a pattern must bring so many tokens at least from beyond rounding to within it
_SAME = "both sides need a row of each sample, and an entry of each token. Cut both to the same tokens"
_DUMP = "a dump is a .pt without code, or a .jsonl: a list of log-probs per sample. Write torch.save([tensor, ...])"
Rows = Sequence[Tensor]
Ids = Sequence[Any]


class LogProbGap:
    """The gap of every token and what explains it; `str` gives a table.

    `gaps` of each sample (float64 [length], masked tokens too); `num_tokens` of each that are active and finite; texts
    of `patterns` and `suggestions` by name: ``bf16_rounding``, ``masked_tokens``, ``shifted_later``,
    ``shifted_earlier``, ``padding_side``, ``cp_order``, ``sample_order``, ``temperature``; what was `left_out`.
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
        self.left_out = [f"left out: {lost} tokens with NaN or infinity"] if lost else []

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
            ranks = {"50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "largest": 1.0}
            by_place = gap[_flat([torch.arange(len(row)) / max(len(row), 1) for row in rows]).argsort()]
            thirds = zip(("first third of a sample", "middle", "last"), by_place.tensor_split(3), strict=True)
            means = {f"sample {one}": row.mean() for one, row in zip(self.ids, rows, strict=True) if len(row)}
            share = (2 * ratio.logsumexp(0) - (2 * ratio).logsumexp(0)).exp() / len(gap)
            for title, values in {
                "|gap|": {name: gap.sort().values[int(q * (len(gap) - 1))] for name, q in ranks.items()},
                "mean |gap|": {name: part.mean() for name, part in thirds},
                "largest mean |gap|": dict(sorted(means.items(), key=lambda one: -one[1])[:3]),
                "ratio exp(ours - theirs)": {"mean": ratio.exp().mean(), "effective sample size / tokens": share},
            }.items():
                lines.append(f"{title}: " + ", ".join(f"{name} {float(value):.3g}" for name, value in values.items()))
        if not self.beyond[self.active].any():
            lines.append("all gaps are within rounding")
        elif not self.patterns:
            lines.append("no known pattern brings the gap within rounding")
            lines += [f"only suggested: {text}" for text in self.suggestions.values()][:2]
        return "\n  ".join([*lines, *[f"explained: {text}" for text in self.patterns.values()][:3], *self.left_out])


def compare_log_probs(
    ours: Rows, theirs: Rows, loss_masks: Rows = (), *, total_lengths: Ids = (), top: Rows = (), ids: Ids = ()
) -> LogProbGap:
    """Compare log-probs token by token, and try the known patterns.

    Args:
        ours, theirs: [num_samples] of float [length], entry for entry the same tokens; rows of a padded batch will do.
        loss_masks: the same; 0 where a token is not trained. Without masks all tokens count.
        total_lengths: of each sample with its prompt, if entries are of responses alone.
        top: [num_samples] of float [length, k], our log-probs of the k most likely tokens, or of the vocabulary
            (``logits.log_softmax(-1)``); a temperature is fitted to them.
        ids: of the samples; default 0, 1, ...
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
    on, sides = gap.active, {"ours": gap.ours, "theirs": gap.theirs}
    if gap.beyond[on].any():
        for name, text, source in _moves(gap, torch.tensor(total_lengths or lengths)):
            among = (source >= 0) & on[source] & (gap.finite if name == "padding_side" else on)
            gap.consider(name, text, gap.theirs - gap.ours[source], among)
        _try_temperature(gap, top)
        return gap
    short = [name for name, side in sides.items() if side[on].bfloat16().equal(side[on])]
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

    def shifted(by: int | Tensor) -> Tensor:
        return (place - by).where((own >= by) & (own - by < length), -1)

    yield "shifted_later", "theirs are ours one token later", shifted(1)
    yield "shifted_earlier", "theirs are ours one token earlier", shifted(-1)
    first = torch.full_like(lengths, 2**40).scatter_reduce(0, at, own[gap.active], "amin")[sample]
    last = torch.full_like(lengths, -1).scatter_reduce(0, at, own[gap.active], "amax")[sample]
    yield "padding_side", "theirs are padded on the left, ours on the right", shifted(length - 1 - last)
    yield "padding_side", "theirs are padded on the right, ours on the left", shifted(-first)
    for cp_size in (2, 4, 8):  # a response's tokens go with their logits, one place before
        chunk = (own + total - length - (total > length).long()).clamp(min=0) // -(-total // (2 * cp_size))
        order = (sample * cp_size + torch.minimum(chunk, 2 * cp_size - 1 - chunk)).argsort(stable=True)
        text = f"in zigzag chunks of {cp_size} context-parallel ranks, rank after rank"
        yield "cp_order", f"theirs are ours {text}", order
        yield "cp_order", f"ours are theirs {text}", order.argsort()
    if gap.beyond.sum() >= 4 * len(lengths):  # fewer would be found by chance
        sums = [torch.zeros(len(lengths)).double().index_add(0, sample, side) for side in (gap.ours, gap.theirs)]
        ours, theirs = (one.argsort()[lengths[one.argsort()].argsort(stable=True)] for one in sums)
        source = starts[ours[theirs.argsort()]][sample] + own
        yield "sample_order", "theirs are ours with the samples in another order", source.where(length >= FEWEST, -1)


def _try_temperature(gap: LogProbGap, top: Rows) -> None:
    """Fit a temperature to the most likely tokens, or suggest one by the log-odds of the tokens that there are.

    Suggested where those of likely tokens are stretched, and unlikely tokens do not move along. The stretch must grow
    with either side's log-odds, by 4 standard errors: noise of one side grows with its own alone.
    """
    few, everywhere = gap.active.nonzero().flatten(), torch.arange(len(gap.gap))
    ours, theirs = gap.ours[few], gap.theirs[few]
    if len(top):
        z, beta, step = torch.cat([rows.detach().cpu() for rows in top]), 2.125, 0.09375

        def left(beta: float, at: Tensor) -> Tensor:
            return gap.theirs[at] - beta * gap.ours[at] + (beta * z[at].double()).logsumexp(-1)

        for _ in range(4):
            tried, few = [beta + k * step for k in range(-20, 21)], few[:: len(few) // 64 + 1]
            beta, step = min(tried, key=lambda beta: float(left(beta, few).abs().mean())), step / 16
        text = f"theirs are ours at temperature {1 / beta:.4g}"
        gap.consider("temperature", text, left(beta, everywhere), gap.active)
    middle, move = (ours + theirs) / 2, theirs - ours
    likely, unlikely = (middle > -2) & (torch.maximum(ours, theirs) < -1e-4), move[middle < -2]
    if len(top) or likely.sum() < 50 or len(unlikely) < 10:
        return
    odds = [side[likely] - (-side[likely].expm1()).log() for side in (ours, theirs)]
    x, y = (side - side.mean() for side in odds)
    grows, slope = [side @ (y - x) / (side * (y - x)).norm() for side in (x, y)], y.norm() / x.norm()
    rest = theirs[likely] - logsigmoid(odds[1].mean() + slope * x)
    along = unlikely.mean() * (slope - 1).sign() / unlikely.square().mean().sqrt()
    if (min(grows) > 4 or max(grows) < -4) and rest.norm() < 0.85 * move[likely].norm() and along < 0.2:
        text = f"by the log-probs alone, theirs are at a temperature near {1 / slope:.2g} times that of ours"
        gap.suggestions["temperature"] = f"{text}; `top` of compare_log_probs fits it"


def compare_dumps(theirs: Path, ours: Path) -> LogProbGap:
    """Compare two files, joined by sample id; the masks are those of ours, or of theirs."""
    left, right = _read(theirs), _read(ours)
    if not (ids := [one for one in right if one in left]):
        raise ValueError(f"{theirs} has samples {[*left][:3]}, {ours} {[*right][:3]}: none is in both. Dump one step.")
    rows, masks, totals = ([right[one][k] for one in ids] for k in range(3))
    masks = [
        torch.tensor(mask or left[one][1] or [1] * len(row)) for one, row, mask in zip(ids, rows, masks, strict=True)
    ]
    gap = compare_log_probs(rows, [left[one][0] for one in ids], masks, total_lengths=totals, ids=ids)
    for path, side, other in ((theirs, left, right), (ours, right, left)):
        if alone := [one for one in side if one not in other]:
            gap.left_out.append(f"left out: {len(alone)} samples in {path} alone, first {alone[0]}")
    return gap


def _read(path: Path) -> dict[str, tuple[Tensor, list[float], int]]:
    """Log-probs, mask (empty without) and length with the prompt of each sample, by id."""
    found: dict[str, Any] = {}
    number: object = "-"
    try:
        if path.suffix == ".jsonl":
            content: Any = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, Mapping):
            content = content.get("samples", content)  # of slime
        for number, given in content.items() if isinstance(content, Mapping) else enumerate(content):
            sample = given if isinstance(given, Mapping) else {"index": number, "log_probs": given}
            trained = "data_parallel_rank" in sample or "rollout_log_probs" not in sample
            row = torch.as_tensor(sample["log_probs" if trained else "rollout_log_probs"], dtype=torch.float64)
            mask = sample.get("loss_masks", sample.get("loss_mask"))
            name = str(sample.get("sample_index", sample.get("index", number)))
            name = name if name not in found else f"{name}, entry {number}"
            found[name] = row, [] if mask is None else [*map(float, mask)], sample.get("total_lengths", row.numel())
    except Exception as error:  # of many kinds
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds {code[1]}" if code else f"{type(error).__name__} at sample {number}"
        raise ValueError(f"{path}, {why}: {_DUMP}.") from None
    if not found:
        raise ValueError(f"{path}, no samples: {_DUMP}.")
    return found

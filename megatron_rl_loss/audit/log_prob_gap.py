"""The gap between two sides' log-probs of the same tokens (sampler and trainer, old and new), and what explains it.

A pattern is named where it brings all tokens that it covers within rounding: a reading that fits, no proof. One that
leaves more, but at most a quarter of the gap, is only suggested. Rounding is that of two sides in bfloat16.
"""

import itertools
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
_DUMP = (
    "a dump is a .pt without code, or a .jsonl, with a list of log-probs per sample. Write torch.save([tensor, ...])"
)


class LogProbGap:
    """The gap of every token and what explains it; `str` gives a table.

    Attributes:
        gaps: ``theirs - ours`` of each sample, float64 [length], masked tokens too.
        num_tokens: active and finite tokens of each sample, int64 [num_samples].
        patterns: texts of what brings the gap within rounding, by name: ``bf16_rounding``, ``masked_tokens``,
            ``shifted_later``, ``shifted_earlier``, ``padding_side``, ``cp_order``, ``sample_order``, ``temperature``.
        suggestions: the same of what leaves more.
        left_out: texts on samples and tokens that could not be compared.
    """

    def __init__(self, ids: Sequence[Any], ours: Sequence[Tensor], theirs: Sequence[Tensor], masks: Sequence[Tensor]):
        self.ids, self.lengths, given = ids, [len(row) for row in ours], _flat(masks) != 0
        gap = _flat(theirs) - _flat(ours)
        self.gaps, self.finite = gap.split(self.lengths), gap.isfinite()
        self.gap, self.ours, self.theirs = (_.where(self.finite, 0) for _ in (gap, _flat(ours), _flat(theirs)))
        self.active, lost = given & self.finite, int((given & ~self.finite).sum())
        self.num_tokens = torch.tensor([int(on.sum()) for on in self.active.split(self.lengths)])
        self.rounding = torch.maximum(self.ours.abs(), self.theirs.abs()).clamp(min=1) / 2**8
        self.beyond = self.gap.abs() > self.rounding
        self.patterns: dict[str, str] = {}
        self.suggestions: dict[str, str] = {}
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
        gap, ratio = _flat(rows).sort().values, -self.gap[self.active]
        lines = [f"log-probs of {len(gap)} tokens in {len(rows)} samples; gap: theirs - ours"]
        if len(gap):
            quantiles = {"50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "largest": 1.0}
            thirds = {
                name: _flat([row[k * len(row) // 3 : (k + 1) * len(row) // 3] for row in rows])
                for k, name in enumerate(("first third", "middle", "last third"))
            }
            means = {f"sample {one}": row.mean() for one, row in zip(self.ids, rows, strict=True) if len(row)}
            share = (2 * ratio.logsumexp(0) - (2 * ratio).logsumexp(0)).exp() / len(gap)
            for title, values in {
                "|gap|": {name: gap[int(q * (len(gap) - 1))] for name, q in quantiles.items()},
                "mean |gap|": {name: row.mean() for name, row in thirds.items() if len(row)},
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
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    loss_masks: Sequence[Tensor] | None = None,
    *,
    total_lengths: Sequence[int] | None = None,
    top: Sequence[Tensor] | None = None,
    ids: Sequence[Any] | None = None,
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
    lengths, ids = [row.numel() for row in ours], range(len(ours)) if ids is None else ids
    masks = [torch.ones(length) for length in lengths] if loss_masks is None else loss_masks
    for name, rows in {"ours": ours, "theirs": theirs, "loss_masks": masks, "top": top or masks}.items():
        if len(rows) != len(ours):
            raise ValueError(f"{len(rows)} samples of {name}, {len(ours)} of ours: {_SAME}.")
        for one, row, length in zip(ids, rows, lengths, strict=True):
            if row.dim() != 1 + (rows is top) or len(row) != length:
                raise ValueError(f"sample {one}: {name} of shape {[*row.shape]}, ours of length {length}: {_SAME}.")
    gap = LogProbGap(ids, ours, theirs, masks)
    on = gap.active
    if gap.beyond[on].any():
        for name, text, source in _moves(gap, torch.tensor(total_lengths or lengths)):
            among = (source >= 0) & on[source] & (gap.finite if name == "padding_side" else on)
            gap.consider(name, text, gap.theirs - gap.ours[source], among)
        if top:
            _fit_temperature(gap, top)
        else:
            _suggest_temperature(gap, gap.ours[on], gap.theirs[on])
        return gap
    sides = {"ours": gap.ours[on], "theirs": gap.theirs[on]}
    short = [name for name, side in sides.items() if side.bfloat16().equal(side)]
    if len(short) == 1 and (gap.gap.abs() > gap.rounding / 2**10)[on].sum() >= FEWEST:
        gap.patterns["bf16_rounding"] = f"{short[0]} are rounded to bfloat16"
    if gap.beyond.any():
        gap.patterns["masked_tokens"] = f"only masked tokens differ: {int(gap.beyond.sum())}"
    return gap


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0).double(), *(one.detach().double().cpu() for one in values)])


def _moves(gap: LogProbGap, totals: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Names, texts, and for each entry of theirs the one of ours that stands there, -1 for unknown, [num_entries]."""
    lengths, place = torch.tensor(gap.lengths), torch.arange(len(gap.gap))
    starts, sample = lengths.cumsum(0) - lengths, torch.arange(len(lengths)).repeat_interleave(lengths)
    length, own = lengths[sample], place - starts[sample]

    def shifted(by: int | Tensor) -> Tensor:
        return (place - by).where((own >= by) & (own - by < length), -1)

    yield "shifted_later", "theirs are ours one token later", shifted(1)
    yield "shifted_earlier", "theirs are ours one token earlier", shifted(-1)
    ends = [torch.full_like(lengths, no).scatter_reduce(0, sample[gap.active], own[gap.active], how)[sample]
            for no, how in ((2**40, "amin"), (-1, "amax"))]  # fmt: skip
    yield "padding_side", "theirs are padded on the left, ours on the right", shifted(length - 1 - ends[1])
    yield "padding_side", "theirs are padded on the right, ours on the left", shifted(-ends[0])
    for cp_size, shift in itertools.product((2, 4, 8), (0, 1)):  # chunks of tokens, or of their logits
        chunk = (own + totals[sample] - length - shift).clamp(min=0) // -(-totals[sample] // (2 * cp_size))
        order = (sample * cp_size + torch.minimum(chunk, 2 * cp_size - 1 - chunk)).argsort(stable=True)
        text = f"in zigzag chunks of {cp_size} context-parallel ranks, rank after rank"
        yield "cp_order", f"theirs are ours {text}", order
        yield "cp_order", f"ours are theirs {text}", order.argsort()
    if gap.beyond.sum() >= 4 * len(lengths):  # fewer would be found by chance
        sums = [torch.zeros(len(lengths)).double().index_add(0, sample, side) for side in (gap.ours, gap.theirs)]
        ours, theirs = (one.argsort()[lengths[one.argsort()].argsort(stable=True)] for one in sums)
        source = starts[ours[theirs.argsort()]][sample] + own
        yield "sample_order", "theirs are ours with the samples in another order", source.where(length >= FEWEST, -1)


def _fit_temperature(gap: LogProbGap, top: Sequence[Tensor]) -> None:
    tops, low, high = [row for rows in top for row in rows.detach()], 0.25, 4.0
    few = gap.active.nonzero().flatten()
    few = few[:: max(len(few) // 64, 1)]  # all are checked with it
    z = torch.stack([tops[at].double().cpu() for at in few.tolist()])
    for _ in range(12):  # the nearest of a grid, then a grid between its neighbours
        betas = torch.linspace(low, high, 41, dtype=torch.float64)
        left = torch.stack([gap.theirs[few] - beta * gap.ours[few] + (beta * z).logsumexp(-1) for beta in betas])
        best = int(left.abs().mean(-1).argmin())
        low, beta, high = (float(betas[min(max(best + k, 0), 40)]) for k in (-1, 0, 1))
    norms = _flat([(beta * rows.detach().double()).logsumexp(-1) for rows in top])
    text = f"theirs are ours at temperature {1 / beta:.4g}"
    gap.consider("temperature", text, gap.theirs - beta * gap.ours + norms, gap.active)


def _suggest_temperature(gap: LogProbGap, ours: Tensor, theirs: Tensor) -> None:
    """Suggest a temperature where the log-odds of likely tokens are stretched, and unlikely tokens move the other way.

    The stretch must grow with either side's log-odds, by 4 standard errors: noise of one side grows with its own alone.
    """
    middle, move = (ours + theirs) / 2, theirs - ours
    likely, unlikely = (middle > -2) & (torch.maximum(ours, theirs) < -1e-4), move[middle < -2]
    if likely.sum() < 50 or len(unlikely) < 10:
        return
    odds = [side[likely] - (-side[likely].expm1()).log() for side in (ours, theirs)]
    x, y = (side - side.mean() for side in odds)
    below, above = sorted(float(side @ (y - x) / (side * (y - x)).norm()) for side in (x, y))
    beta = y.norm() / x.norm()
    left = theirs[likely] - logsigmoid(odds[1].mean() + beta * x)
    along = float(unlikely.mean() * (1 if beta > 1 else -1) / unlikely.square().mean().sqrt())
    if (below > 4 or above < -4) and left.norm() < 0.85 * move[likely].norm() and along < 0.2:
        text = f"by the log-probs alone, theirs are at a temperature near {1 / beta:.2g} times that of ours"
        gap.suggestions["temperature"] = f"{text}; `top` of compare_log_probs fits it"


def compare_dumps(theirs: Path, ours: Path) -> LogProbGap:
    """Compare two files, joined by sample id; the masks are those of ours, or of theirs."""
    left, right = _read(theirs), _read(ours)
    ids = [one for one in right if one in left]
    if not ids:
        raise ValueError(f"{theirs} has samples {[*left][:3]}, {ours} {[*right][:3]}: none is in both. Dump one step.")
    masks = [right[one][1] or left[one][1] or [1] * len(right[one][0]) for one in ids]
    gap = compare_log_probs(
        [right[one][0] for one in ids],
        [left[one][0] for one in ids],
        [torch.tensor(mask) for mask in masks],
        total_lengths=[right[one][2] or len(right[one][0]) for one in ids],
        ids=ids,
    )
    for path, side in ((theirs, left), (ours, right)):
        if alone := [one for one in side if one not in right or one not in left]:
            gap.left_out.append(f"left out: {len(alone)} samples in {path} alone, first {alone[0]}")
    return gap


def _read(path: Path) -> dict[str, tuple[Tensor, list[float], int]]:
    """Log-probs, mask and length with the prompt of each sample, by id; empty or 0 where unknown."""
    try:
        if path.suffix == ".jsonl":
            content: Any = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        code = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(f"{path}, {f'which holds {code[1]}' if code else type(error).__name__}: {_DUMP}.") from None
    if isinstance(content, Mapping):
        content = content.get("samples", content)  # of slime
    found: dict[str, Any] = {}
    for one, sample in content.items() if isinstance(content, Mapping) else enumerate(content):
        if not isinstance(sample, Mapping):
            sample = {"index": one, "log_probs": sample}
        trained = "data_parallel_rank" in sample or "rollout_log_probs" not in sample
        try:
            row = torch.as_tensor(sample["log_probs" if trained else "rollout_log_probs"], dtype=torch.float64)
            mask = sample.get("loss_masks", sample.get("loss_mask"))
            mask = torch.as_tensor([] if mask is None else mask).tolist()
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{path}, sample {one} has no list of log-probs: {_DUMP}.") from None
        name = str(sample.get("sample_index", sample.get("index", one)))
        found[name if name not in found else f"{name}, entry {one}"] = row, mask, int(sample.get("total_lengths", 0))
    if not found:
        raise ValueError(f"{path} holds no samples: {_DUMP}.")
    return found

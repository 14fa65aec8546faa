"""Two sides' log-probs of the same tokens: the gap of each token, and the patterns that explain it.

Sampler against trainer, old against recomputed, a rank against one process. A pattern is named where it explains the
gap: by it every token that it speaks of is within rounding, and at least `FEWEST` were not without it. That is a
reading that fits, no proof. All that fit are named; where none does, the numbers are what is known.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_int, check_one_each

#: So many tokens at least must be beyond rounding, and within it by a pattern.
FEWEST = 8
#: Both sides rounded to bfloat16, relative: 2 * 2**-9. Below the second, float32.
_BF16, _FLOAT32 = 2.0**-8, 2.0**-18
Reading = Callable[[Tensor, Tensor], Tensor]  # of logits [length, vocabulary] and labels: log-probs
_FEW = 64  # tokens that a temperature or a number of columns is fitted to; all are checked with it


@dataclass(frozen=True)
class GapPattern:
    """What explains a gap.

    Names: ``bf16_rounding``, ``masked_tokens``, ``shifted_later``, ``shifted_earlier``, ``padding_side``,
    ``cp_order``, ``sample_order``, ``temperature``, ``vocabulary_slice``, ``dropout``.
    """

    name: str
    text: str  # in a sentence
    without: float  # the largest |gap| of the tokens that it speaks of
    residual: float  # the largest that it leaves
    tokens: int  # how many it speaks of


@dataclass(frozen=True)
class LogProbGap:
    """``theirs - ours`` of every token, and what explains it."""

    gaps: tuple[Tensor, ...]  # of each sample, float64 [length], masked tokens too
    num_tokens: Tensor  # active ones of each sample, int64 [num_samples]
    mean: Tensor  # of |gap| over them, [num_samples]; 0 without any
    largest: Tensor  # of |gap|, [num_samples]
    total: Tensor  # the sum of gaps, [num_samples]: the log of a sequence's ratio
    patterns: tuple[GapPattern, ...]
    equal: bool  # within float32 rounding, at active tokens

    def __str__(self) -> str:
        tokens, largest = int(self.num_tokens.sum()), max([0.0, *self.largest.tolist()], key=lambda x: (x != x, x))
        mean = float((self.mean * self.num_tokens).sum()) / max(tokens, 1)
        lines = [f"log-probs of {tokens} tokens: |gap| {mean:.3g} on average, {largest:.3g} at most"]
        for one in self.patterns:
            lines.append(f"  fits: {one.text} ({one.tokens} tokens: {one.without:.3g} -> {one.residual:.1g})")
        if not self.equal and not self.patterns:
            lines.append("  no pattern fits: these numbers are what is known")
        return "\n".join(lines)


def compare_log_probs(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    total_lengths: Sequence[int] | None = None,
    logits: Sequence[Tensor] | None = None,
    labels: Sequence[Tensor] | None = None,
    repeat: Sequence[Tensor] | None = None,
    cp_sizes: Sequence[int] = (2, 4, 8),
    tolerance: float = 0.0,
) -> LogProbGap:
    """The gap of each token, ``theirs - ours``, and the patterns that explain it.

    Rounding of a token is ``tolerance + 2**-8 * max(|ours|, |theirs|, 1)``: what two sides differ by that were rounded
    to bfloat16. With logits z it is ``2**-8 * max|z|`` more: of z rounded so, z_y and logsumexp(z) are each within
    2**-9 * max|z|. What bfloat16 does inside a model has no such bound: give a sampler's usual noise as `tolerance`.

    Temperature and vocabulary need `logits`: a token's log-prob alone does not say what it is at another temperature.

    Args:
        ours, theirs: [num_samples] of float [length], entry for entry the same tokens; rows of a padded batch will do.
        loss_masks: the same; 0 where a token is not trained.
        total_lengths: of each sample with its prompt, if entries are of responses alone.
        logits: [num_samples] of float [length, vocabulary], of one side or of a third that is right.
        labels: [num_samples] of int64 [length]; goes with `logits`.
        repeat: what our side says when it is run again, for what chance does (dropout).
        cp_sizes: of the context-parallel orders that are tried.
        tolerance: absolute, further noise that counts as rounding.

    Raises:
        ValueError: one tensor for all samples; samples or lengths that do not go together; logits without labels.
    """
    given = {
        "ours": ours,
        "theirs": theirs,
        "loss_masks": loss_masks,
        "repeat": repeat,
        "logits": logits,
        "labels": labels,
    }
    for name, values in ((name, values) for name, values in given.items() if values is not None):
        if any(one.dim() != 1 + (name == "logits") for one in values):
            shapes = [tuple(one.shape) for one in values]
            raise ValueError(f"{name} of shapes {shapes}: a sample has one entry per token. Pass a row of each.")
        lengths = [len(one) for one in ours]
        check_one_each(name, len(values), "samples of ours", len(lengths))
        if (found := [len(one) for one in values]) != lengths:
            raise ValueError(f"{name} of lengths {found}, ours {lengths}: all must be of the same tokens. Cut them.")
    if (logits is None) != (labels is None):
        raise ValueError("logits without labels, or labels without logits: a log-prob needs both. Pass both.")
    totals = lengths if total_lengths is None else list(total_lengths)
    check_one_each("total_lengths", len(totals), "samples of ours", len(lengths))
    for cp_size in cp_sizes:
        check_int("a CP size", cp_size, 1, "2, 4 and 8 are usual")
    pair = _Pair(lengths, totals, _flat(ours), _flat(theirs), _flat(loss_masks) != 0, tolerance)
    patterns: list[GapPattern] = []
    if logits is not None and labels is not None:
        pair.rounding += _BF16 * _flat([z.detach().abs().where(z.isfinite(), 0).amax(-1) for z in logits])
        patterns += _by_logits(pair, logits, labels)
    patterns += [*_by_rounding(pair), *_by_place(pair, cp_sizes)]
    if repeat is not None:
        patterns += _by_chance(pair, _flat(repeat))
    gaps = pair.gap.split(lengths)
    trained = [gap[active] for gap, active in zip(gaps, pair.active.split(lengths), strict=True)]
    return LogProbGap(
        gaps=gaps,
        num_tokens=torch.tensor([len(gap) for gap in trained]),
        mean=_flat([gap.abs().sum() / max(len(gap), 1) for gap in trained]),
        largest=_flat([torch.cat([gap.abs(), gap.new_zeros(1)]).max() for gap in trained]),
        total=_flat([gap.sum() for gap in trained]),
        patterns=tuple(patterns),
        equal=pair.is_equal,
    )


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0).double(), *(one.detach().reshape(-1).double().cpu() for one in values)])


class _Pair:
    """Both sides in one row, [num_entries], and what counts as rounding."""

    def __init__(
        self, lengths: list[int], totals: list[int], ours: Tensor, theirs: Tensor, active: Tensor, noise: float
    ) -> None:
        self.lengths, self.totals, self.starts = lengths, totals, [0, *accumulate(lengths)][:-1]
        self.ours, self.theirs, self.active, self.gap = ours, theirs, active, theirs - ours
        self.size = torch.maximum(ours.abs(), theirs.abs()).clamp(min=1)
        self.rounding = noise + _BF16 * self.size

    @property
    def is_equal(self) -> bool:
        return bool((self.gap.abs() <= _FLOAT32 * self.size)[self.active].all())

    @property
    def is_rounding(self) -> bool:
        return bool((self.gap.abs() <= self.rounding)[self.active].all())

    def explained(self, name: str, text: str, left: Tensor, among: Tensor) -> Iterator[GapPattern]:
        """The pattern, if it leaves no more than rounding `among` entries, and half of the gaps are there.

        `left`: what it leaves, [num_entries].
        """
        beyond = self.gap.abs() > self.rounding
        enough = max(FEWEST, int((beyond & self.active).sum()) / 2)
        if (beyond & among).sum() >= enough and (left.abs() <= self.rounding)[among].all():
            without, residual = (float(values.abs()[among].max()) for values in (self.gap, left))
            yield GapPattern(name, text, without, residual, int(among.sum()))


def _by_rounding(pair: _Pair) -> Iterator[GapPattern]:
    """Nothing but rounding at active tokens, and whether masked ones are apart."""
    if not pair.is_rounding:
        return
    largest, tokens = float(pair.gap.abs()[pair.active].max()) if pair.active.any() else 0.0, int(pair.active.sum())
    if not pair.is_equal:
        yield GapPattern("bf16_rounding", "no more than rounding to bfloat16", largest, largest, tokens)
    apart = ~pair.active & (pair.gap.abs() > pair.rounding)
    if apart.any():
        text = "only masked tokens are apart: what counts padding or prompts sees a gap, a masked loss does not"
        yield GapPattern("masked_tokens", text, float(pair.gap.abs()[apart].max()), largest, int(apart.sum()))


def _by_chance(pair: _Pair, repeat: Tensor) -> Iterator[GapPattern]:
    """Our side differs from itself by as much as from theirs, in the root mean square."""
    own, gap = (pair.ours - repeat)[pair.active], pair.gap[pair.active]
    apart = int((own.abs() > _FLOAT32 * pair.size[pair.active]).sum())
    if apart >= FEWEST and not pair.is_rounding and (gap.square().sum() <= 1.25**2 * own.square().sum()):
        rms = [math.sqrt(float(values.square().mean())) for values in (own, gap)]
        text = f"ours differ by {rms[0]:.3g} (rms) from ours of a second run, by {rms[1]:.3g} from theirs: dropout on"
        yield GapPattern("dropout", text, float(gap.abs().max()), float(own.abs().max()), len(gap))


# ---- the same values in other places


def _by_place(pair: _Pair, cp_sizes: Sequence[int]) -> Iterator[GapPattern]:
    if pair.is_rounding:
        return
    for name, text, source, both in _moves(pair, cp_sizes):
        among = (source >= 0) & pair.active[source]  # -1 is unknown
        yield from pair.explained(name, text, pair.theirs - pair.ours[source], among & pair.active if both else among)


def _moves(pair: _Pair, cp_sizes: Sequence[int]) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Name, text, and for each entry of theirs the one of ours that stands there, int64 [num_entries], -1 for unknown.

    Last: whether both must be active; else theirs lie where our mask has nothing.
    """
    ids, active = [torch.arange(length) for length in pair.lengths], pair.active.split(pair.lengths)
    first, last = ([int(ends[of]) if len(ends := one.nonzero()) else 0 for one in active] for of in (0, -1))
    ends = [length - 1 - end for length, end in zip(pair.lengths, last, strict=True)]

    def placed(entries: Sequence[Tensor]) -> Tensor:
        """Of entries in a sample their places in the row."""
        of = zip(entries, pair.lengths, pair.starts, strict=True)
        return torch.cat([torch.where((one >= 0) & (one < length), one + start, -1) for one, length, start in of])

    def moved(by: Sequence[int]) -> Tensor:
        return placed([one - k for one, k in zip(ids, by, strict=True)])

    yield "shifted_later", "theirs are ours one token later", moved([1] * len(ids)), True
    yield "shifted_earlier", "theirs are ours one token earlier", moved([-1] * len(ids)), True
    if max(ends) > 1:
        yield "padding_side", "theirs end where rows end, ours have padding there", moved(ends), False
    if max(first) > 1:
        yield "padding_side", "theirs begin where rows begin, ours later", moved([-k for k in first]), False
    for cp_size in cp_sizes:
        pieces = f"the zigzag pieces of {cp_size} context-parallel ranks, one rank after the other"
        for shift in range(1 + (pair.totals != pair.lengths)):
            of = zip(pair.lengths, pair.totals, strict=True)
            order = placed([_rank_order(length, total, cp_size, shift) for length, total in of])
            at = (order >= 0).nonzero().flatten()
            yield "cp_order", f"theirs are {pieces}", order, True
            yield "cp_order", f"ours are {pieces}", torch.full_like(order, -1).index_copy(0, order[at], at), True
    if (source := _sample_order(pair)) is not None:
        yield "sample_order", "theirs are ours with samples in another order", source, True


def _rank_order(length: int, total: int, cp_size: int, shift: int) -> Tensor:
    """Entries of a sample by zigzag rank, int64 [length]; -1 where padding stands there.

    Of a response alone (`total` > `length`) prompt and padding drop out; with `shift` 1 a token goes with its logit.
    """
    chunk = -(-total // (2 * cp_size))
    pieces = torch.tensor([piece for rank in range(cp_size) for piece in (rank, 2 * cp_size - 1 - rank)])
    entry = (pieces[:, None] * chunk + torch.arange(chunk)).flatten() - (total - length) + shift
    inside = (entry >= 0) & (entry < length)
    kept = entry[inside] if total > length else torch.where(inside, entry, -1)
    return torch.cat([kept, torch.full((length,), -1)])[:length]


def _sample_order(pair: _Pair) -> Tensor | None:
    """Where each sample of theirs is in ours, if every one has a place of its own."""

    def fits(here: Tensor, there: Tensor) -> bool:
        if len(there) != len(here):
            return False
        apart = (pair.theirs[here] - pair.ours[there]).abs() > pair.rounding[here]
        return not (apart & pair.active[here] & pair.active[there]).any()

    rows = torch.arange(len(pair.ours)).split(pair.lengths)
    left, found = list(rows), []
    for here in rows:
        if (number := next((k for k, there in enumerate(left) if fits(here, there)), None)) is None:
            return None
        found.append(left.pop(number))
    return torch.cat(found)


# ---- the same logits, read otherwise


def _by_logits(pair: _Pair, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Iterator[GapPattern]:
    """One side is the logits' log-softmax, the other is of the same logits read otherwise."""
    if pair.is_rounding:
        return
    flat_labels = torch.cat([one.cpu() for one in labels]).where(pair.active, 0)  # -100 is usual at others

    def read(change: Reading) -> Tensor:
        of = zip(logits, flat_labels.split(pair.lengths), strict=True)
        return _flat([change(z.detach().double().cpu(), y) for z, y in of])

    plain = read(_log_prob)
    few = pair.active.nonzero().flatten()
    few = few[torch.linspace(0, len(few) - 1, min(len(few), _FEW)).long()]
    rows = [row for of_sample in logits for row in of_sample.detach()]  # views
    z = torch.stack([rows[at].double().cpu() for at in few.tolist()])
    for right, other in (("ours", "theirs"), ("theirs", "ours")):
        wanted = getattr(pair, other)
        if ((getattr(pair, right) - plain).abs() <= pair.rounding)[pair.active].all():
            for name, text, change in _changes(z, flat_labels[few], wanted[few]):
                text = f"{right} are of all logits as they are, {other} {text}"
                yield from pair.explained(name, text, wanted - read(change), pair.active)


def _changes(z: Tensor, label: Tensor, wanted: Tensor) -> Iterator[tuple[str, str, Reading]]:
    """What log-probs `wanted` of a few tokens, [num_few], may be of logits z, [num_few, vocabulary]."""
    low, high = 0.25, 4.0
    for _ in range(12):  # the nearest of a grid, then a grid between its neighbours
        betas = torch.linspace(low, high, 41, dtype=torch.float64)
        best = int(torch.stack([(_log_prob(beta * z, label) - wanted).abs().max() for beta in betas]).argmin())
        low, beta, high = betas[max(best - 1, 0)].item(), betas[best].item(), betas[min(best + 1, 40)].item()
    yield "temperature", f"at temperature {1 / beta:.4g}", lambda z, y: _log_prob(beta * z, y)
    chosen = z.gather(1, label[:, None])
    columns = 1 + int((z.logcumsumexp(-1) - chosen + wanted[:, None]).abs().amax(0).argmin())
    text = f"over columns 0 to {columns - 1} of {z.shape[1]}"
    yield "vocabulary_slice", text, lambda z, y: _log_prob(z, y, z[:, :columns])
    for tp in (2, 4, 8):
        if z.shape[1] % tp == 0:
            text = f"over the label's own of {tp} slices of the vocabulary"
            yield "vocabulary_slice", text, partial(_in_own_slice, tp)


def _log_prob(z: Tensor, label: Tensor, among: Tensor | None = None) -> Tensor:
    return z.gather(1, label[:, None])[:, 0] - (z if among is None else among).logsumexp(-1)


def _in_own_slice(tp: int, z: Tensor, label: Tensor) -> Tensor:
    slices = z.unflatten(1, (tp, -1))
    return _log_prob(z, label, slices[torch.arange(len(z)), label // slices.shape[2]])

"""The gap between two sides' log-probs of the same tokens (sampler and trainer, old and new), and its explanation.

A pattern explains the gap if it brings all tokens that it covers within rounding (of two sides in bfloat16). It fits,
which is no proof. A pattern that leaves more, but at most a quarter of the gap, is only suggested.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.losses.ratio import not_log_probs, range_in_words

_FAR = 1.0  # from 0: a log-prob that a sampler does not round to it
_LEAST_MASS = -1.2  # the log of the least mass that a sampler is taken to keep, 0.3
FEWEST = 8  # a pattern must bring so many tokens at least from beyond rounding to within it
_SAME = "both sides need one row per sample and one entry per token. Cut both to the same tokens"
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
        self.compared = ""  # which columns of which files, of a comparison of files
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
            says = f"{fits} within rounding" if self.active.any() else "no token is left to compare"
            lines = [says, *(f"only suggested: {text}" for text in self.suggestions.values())]
        head, *numbers = self._numbers()
        compared = only_if(self.compared, f"{self.compared}\n")
        return compared + "\n  ".join([head, *self.left_out, *numbers, *lines[:3]])

    def _numbers(self) -> list[str]:
        rows = [gap.abs()[on] for gap, on in zip(self.gaps, self.active.split(self.lengths), strict=True)]
        gap, log_ratio = _flat(rows), -self.gap[self.active]
        head = f"log-probs of {len(gap)} tokens in {len(rows)} samples; gap: rollout - train"
        if not len(gap):
            return [head]
        quantiles = gap.sort().values[(len(gap) - 1) * torch.tensor([50, 90, 99, 100]) // 100]
        place = _flat([torch.arange(len(row)) / max(len(row), 1) for row in rows])  # within its sample, 0 to 1
        thirds = [part.mean() for part in gap[place.argsort()].tensor_split(3)]
        thirds_in_words = "mean |gap|: first third of samples {:.3g}, middle {:.3g}, last {:.3g}".format(*thirds)
        means = {sample_id: row.mean() for sample_id, row in zip(self.ids, rows, strict=True) if len(row)}
        by_size = sorted(means, key=lambda sample_id: -means[sample_id])
        worst = [f"sample {sample_id}: {means[sample_id]:.3g}" for sample_id in by_size[:3]]
        ratio, size = log_ratio.exp().mean(), (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp()
        return [
            head,
            "|gap|: 50 % {:.3g}, 90 % {:.3g}, 99 % {:.3g}, largest {:.3g}".format(*quantiles),
            *([thirds_in_words] if len(gap) >= 3 else []),
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
        off = [
            sample_sizes for sample_sizes in zip(ids, lengths, own, strict=True) if sample_sizes[1] != sample_sizes[2]
        ]
        if off:
            sample_id, length, other = off[0]
            order = only_if(
                sorted(lengths) == sorted(own),
                " Both sides have the same lengths in another order: give both by sample id.",
            )
            counts = f"{len(off)} of {len(train)} samples, first {sample_id}: train {length}, {name} {other}"
            raise ValueError(f"lengths differ in {counts}: {_SAME}.{order}")
    gap = LogProbGap(ids, train, rollout, masks)
    on = gap.active
    for side, values in (("train", gap.train[on]), ("rollout", gap.rollout[on])):
        if len(values) and not_log_probs(*values.aminmax(), values.dtype):
            gap.left_out.append(f"no log-probs: {side} has {range_in_words(*values.aminmax())}")
    if gap.beyond[on].any():
        context = Context(torch.tensor(totals), torch.cat([rows.detach().cpu() for rows in top]) if len(top) else None)
        for pattern in PATTERNS:
            for text, left, among in pattern.tries(gap, context):
                gap.consider(pattern.name, text, left, among)
        if not gap.patterns and not gap.suggestions and not len(top):
            _suggest_from_log_probs_alone(gap)
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


class Context(NamedTuple):
    """What some patterns need beside the gap: lengths with the prompt [num_samples], and our log-probs [entries, k]."""

    totals: Tensor
    top: Tensor | None


#: A text, the gap that the pattern leaves at each entry, and the entries that it covers.
Try = tuple[str, Tensor, Tensor]


class Pattern(NamedTuple):
    """A row of the table: its name, the public case that its test plants, and what it tries."""

    name: str
    case: str
    tries: Callable[[LogProbGap, Context], Iterator[Try]]


def _moved(gap: LogProbGap, source: Tensor, *, finite: bool = False) -> tuple[Tensor, Tensor]:
    """The gap where train's entries are moved: the entry of train at each of rollout, -1 for unknown."""
    on = gap.active
    return gap.rollout - gap.train[source], (source >= 0) & on[source] & (gap.finite if finite else on)


class _Places(NamedTuple):
    """Of each entry its sample, its position there, and the sample's length."""

    starts: Tensor
    sample: Tensor
    position: Tensor
    length: Tensor
    entry: Tensor

    @classmethod
    def of(cls, gap: LogProbGap) -> "_Places":
        lengths, entry = torch.tensor(gap.lengths), torch.arange(len(gap.gap))
        starts, sample = lengths.cumsum(0) - lengths, torch.arange(len(lengths)).repeat_interleave(lengths)
        return cls(starts, sample, entry - starts[sample], lengths[sample], entry)


def _shifts(gap: LogProbGap, _: Context) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Name, text, and what it leaves, of whole samples that are moved."""
    at, on = _Places.of(gap), gap.active
    ends = torch.full((len(gap.lengths),), 2**40), torch.full((len(gap.lengths),), -1)
    first, last = (
        end.scatter_reduce(0, at.sample[on], at.position[on], how)[at.sample]
        for end, how in zip(ends, ("amin", "amax"), strict=True)
    )
    shifts: dict[str, Any] = {
        "one_token_later": 1,
        "one_token_earlier": -1,
        "padded_left": at.length - 1 - last,
        "padded_right": -first,
    }
    for name, by in shifts.items():
        inside = (at.position >= by) & (at.position - by < at.length)
        moved = _moved(gap, (at.entry - by).where(inside, -1), finite=name.startswith("padded"))
        yield name, f"rollout equals train {name.replace('_', ' ')}", *moved


def _shift_of(name: str) -> Callable[[LogProbGap, Context], Iterator[Try]]:
    return lambda gap, context: (shift[1:] for shift in _shifts(gap, context) if shift[0] == name)


def _shifted_behind(gap: LogProbGap, _: Context) -> Iterator[Try]:
    """A token more or fewer on one side: both agree up to a position of the sample, and are shifted behind it."""
    at = _Places.of(gap)
    wrong = gap.beyond & gap.active
    first = torch.full((len(gap.lengths),), 2**40).scatter_reduce(0, at.sample[wrong], at.position[wrong], "amin")
    behind = at.position - first[at.sample]
    for by in (1, -1, 2, -2, 3, -3):
        inside = (at.position >= by) & (at.position - by < at.length)
        # A token that one side alone has is compared with nothing.
        source = at.entry.where(behind < 0, (at.entry - by).where(inside & (behind >= max(by, 0)), -1))
        words = f"{abs(by)} token{only_if(abs(by) > 1, 's')} {'later' if by > 0 else 'earlier'}"
        number = int((first < 2**40).sum())
        if not {*gap.patterns, *gap.suggestions} & {"one_token_later", "one_token_earlier"}:  # of whole samples
            yield f"rollout equals train {words} behind a position, in {number} samples", *_moved(gap, source)


def _cp_order(gap: LogProbGap, context: Context) -> Iterator[Try]:
    at = _Places.of(gap)
    total = context.totals[at.sample]
    # A response's logit is one place before its token.
    logit = (total - at.length + at.position - (total > at.length).long()).clamp(min=0)
    for cp_size in (2, 4, 8):
        chunk = logit // -(-total // (2 * cp_size))
        rank = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
        order = (at.sample * cp_size + rank).argsort(stable=True)
        for sides, source in (("rollout equals train", order), ("train equals rollout", order.argsort())):
            text = f"{sides} in zigzag chunks of {cp_size} context-parallel ranks, ordered by rank"
            yield text, *_moved(gap, source)


def _sample_order(gap: LogProbGap, _: Context) -> Iterator[Try]:
    at, lengths = _Places.of(gap), torch.tensor(gap.lengths)

    def sorted_samples(side: Tensor) -> Tensor:
        """Numbers of the samples, ordered by length, then by the sum of their log-probs."""
        by_sum = torch.zeros(len(lengths)).double().index_add(0, at.sample, side).argsort()
        return by_sum[lengths[by_sum].argsort(stable=True)]

    if gap.beyond.sum() >= 4 * len(lengths):  # fewer would be found by chance
        twin = sorted_samples(gap.train)[sorted_samples(gap.rollout).argsort()][at.sample]
        source = (at.starts[twin] + at.position).where(at.length >= FEWEST, -1)
        yield "rollout equals train with the samples in another order", *_moved(gap, source)


def _placeholders(gap: LogProbGap, _: Context) -> Iterator[Try]:
    """Exact zeros of one side at tokens that the other finds unlikely: nobody computed these."""
    for name, side, other in (("rollout", gap.rollout, gap.train), ("train", gap.train, gap.rollout)):
        empty = (side == 0) & gap.active
        far = empty & (other < -_FAR)
        if far.any():  # then a 0 beside a likely token is one, too
            zeros_in_words = f"{name} is exactly 0 at {int(far.sum())} tokens where the other side is below -{_FAR:g}"
            text = f"{zeros_in_words}: placeholders, such as of tool tokens or a lost answer; mask these tokens"
            yield text, gap.gap.masked_fill(empty, 0), gap.active


def _truncated(gap: LogProbGap, context: Context) -> Iterator[Try]:
    """A sampler that keeps the k likeliest ids, or those of mass p, divides by their mass S: it is log S off."""
    if context.top is None:
        return
    descending = context.top.double().sort(-1, descending=True).values
    mass = descending.exp().cumsum(-1).clamp(max=1)  # of the first k ids
    few = gap.active.nonzero().flatten()
    few = few[:: len(few) // 256 + 1]
    by_k = (gap.gap[few, None] + mass[few].log()).abs().mean(0)
    k = int(by_k.argmin()) + 1
    if k < mass.shape[1]:
        left = gap.gap + mass[:, k - 1].log()
        yield f"rollout is divided by the mass of its {k} likeliest ids (top-k): keep these in train", left, gap.active

    def kept(p: float, at: Any) -> Tensor:
        """The mass of the fewest ids that reach p."""
        number = (mass[at] < p).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1)
        return mass[at].gather(-1, number)[:, 0]

    tried = [n / 200 for n in range(20, 200)] + [0.999]
    p = min(tried, key=lambda p: float((gap.gap[few] + kept(p, few).log()).abs().mean()))
    text = f"rollout is divided by the mass of its likeliest ids up to {p:g} (top-p): keep these in train"
    yield text, gap.gap + kept(p, slice(None)).log(), gap.active


def _temperature(gap: LogProbGap, context: Context) -> Iterator[Try]:
    """Fit beta = 1 / temperature by ``rollout = beta * train - logsumexp(beta * top)``, [num_entries]."""
    if context.top is None:
        return
    z = context.top

    def left(beta: float, at: Any) -> Tensor:
        return gap.rollout[at] - beta * gap.train[at] + (beta * z[at].double()).logsumexp(-1)

    on = gap.active.nonzero().flatten()
    few = on[:: len(on) // 64 + 1]  # all are checked with what fits these
    beta, step = 2.125, 0.09375
    for _ in range(4):
        tried = [beta + k * step for k in range(-20, 21)]
        errors = torch.stack([left(candidate, few) for candidate in tried]).abs().mean(-1)
        beta, step = tried[int(errors.argmin())], step / 16
    yield f"rollout equals train at temperature {1 / beta:.4g}", left(beta, slice(None)), gap.active


#: The table of patterns, tried in this order.
PATTERNS = (
    Pattern("placeholders", "SkyRL#2148", _placeholders),
    Pattern("one_token_later", "labels not shifted by one", _shift_of("one_token_later")),
    Pattern("one_token_earlier", "labels shifted twice", _shift_of("one_token_earlier")),
    Pattern("padded_left", "left-padded rows, compared with right-padded ones", _shift_of("padded_left")),
    Pattern("padded_right", "right-padded rows, compared with left-padded ones", _shift_of("padded_right")),
    Pattern("shifted_behind", "an end-of-turn token that one side dropped", _shifted_behind),
    Pattern("cp_order", "context-parallel ranks' parts joined by rank", _cp_order),
    Pattern("sample_order", "rows of a sorted batch", _sample_order),
    Pattern("truncated_sampler", "TRL#6789", _truncated),
    Pattern("temperature", "a sampler's temperature that the trainer lacks", _temperature),
)


def _suggest_from_log_probs_alone(gap: LogProbGap) -> None:
    """What the log-probs of the sampled tokens hint at, without those of other ids."""
    beyond = gap.beyond & gap.active
    if (gap.gap[beyond] > 0).all() and beyond.sum() >= FEWEST:
        # Truncation never makes a token less likely; a temperature does. Alone it is kept, with log-prob 0.
        single = (gap.rollout == 0) & beyond
        most = gap.gap[gap.active].max()
        if single.sum() >= FEWEST and most <= 1.5 * gap.gap[single].max() and most < -_LEAST_MASS:
            text = f"rollout is never below train, by {most:.3g} at most: a top-p or top-k sampler, whose log-probs are"
            gap.suggestions["truncated_sampler"] = f"{text} divided by the mass that it keeps; fit it with `top`"
        return
    _suggest_temperature(gap)


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

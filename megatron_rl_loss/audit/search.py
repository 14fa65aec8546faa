"""The search behind `check_loss`: random steps, cut in one way after the other, and the smallest that shows a fault."""

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from megatron_rl_loss.audit.drawn_steps import DrawnSample, LossCase, draw_samples
from megatron_rl_loss.audit.mode_table import MODE_TABLE
from megatron_rl_loss.audit.simulation import CallFailed, LossCall, LossFunction, measure
from megatron_rl_loss.audit.tokens import Floats
from megatron_rl_loss.audit.verdict import Verdict, judge
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

#: What weights may be off by, relatively: float32 over some hundred tokens, and the small constants that trainers add
#: to a denominator.
TOLERANCE = 1e-5

#: Weights are wrong, or depend on the losses' values or on chance; a call raises, or returns no loss, a loss without a
#: graph, or NaN.
Kind = Literal["weights", "values", "chance", "raises", "no loss", "no graph", "NaN"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, on the smallest step that shows it."""

    cut: str  # how that step is cut, in words
    kind: Kind
    says: str  # what it is, on a larger step that tells more of its cause
    case: LossCase  # the smallest step: `measure` of the function, its call and this gives `weights` again
    weights: tuple[float, ...] = ()  # of each mask entry of it; empty where there is none
    expected: tuple[float, ...] = ()
    verdict: Verdict | None = None  # on the larger step, with readings; None where no weights were measured
    shape: str = ""  # of wrong weights: factor, spread, masked or padding

    @property
    def factors(self) -> tuple[float, float]:
        """The lowest and the highest of weights / expected, over tokens that should weigh something; NaN if none do."""
        ratios = [weight / wanted for weight, wanted in zip(self.weights, self.expected, strict=True) if wanted]
        return (min(ratios), max(ratios)) if ratios else (float("nan"), float("nan"))

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; of the verdict its readings."""
        plain = dict(vars(self), case=repr(self.case), weights=list(self.weights), expected=list(self.expected))
        verdict, _ = plain.pop("verdict"), plain.pop("shape")
        return plain | {"readings": [] if verdict is None else [reading.text for reading in verdict.readings]}

    def __str__(self) -> str:
        lines = [f"{self.cut}: {self.says}"]
        if self.verdict is not None:
            lines += [f"  {deviation.text}" for deviation in self.verdict.deviations]
            lines += [f"  a reading that fits: {reading.text}" for reading in self.verdict.readings]
        lines.append(f"  smallest step that shows it: {self.case}")
        if self.weights:
            lines.append(f"  its tokens weigh {_shown(self.weights)}")
            lines.append(f"  where they should {_shown(self.expected)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Cut:
    """Over what a step is cut."""

    name: str
    microbatches: bool = False
    dp: bool = False
    cp: bool = False
    padded_masks: bool = False

    def and_over(self, other: "Cut") -> "Cut":
        """Over what either is."""
        return Cut(other.name, self.microbatches or other.microbatches, self.dp or other.dp, self.cp or other.cp)

    def draw(self, rng: random.Random, call: LossCall, seed: int, telling: bool = False) -> LossCase:
        """A random step cut so; never one without an active token. A telling one is cut into 5, 3 and 2 parts."""
        num_microbatches = (5 if telling else rng.randrange(2, 6)) if self.microbatches else 1
        dp_size = (3 if telling else rng.randrange(2, 5)) if self.dp else 1
        number = num_microbatches * dp_size
        most = 4 if number > 1 else 8
        rows = [rng.randrange(1, most)] * number
        if not call.even_microbatches:
            rows = [rng.randrange(1, most) for _ in range(number)]
        samples = draw_samples(rng, call.split_rollouts, sum(rows))
        rng.shuffle(samples)
        for i, sample in enumerate(samples):
            nothing = not any(any(one.mask) for one in samples)
            if not any(sample.mask) and (not call.masked_samples or nothing):
                samples[i] = replace(sample, mask=(1, *sample.mask[1:]))
        cp_size = (2 if telling else rng.choice([2, 3, 4])) if self.cp else 1
        return self._dealt(samples, rows, num_microbatches, cp_size, call, seed)

    def small(self, call: LossCall, seed: int) -> Iterator[LossCase]:
        """The smallest steps cut so, into two where it is cut; one or two rows a part, of one or two tokens."""
        one_each = (1,) * ((1 + self.dp) * (1 + self.microbatches))
        uneven = [] if call.even_microbatches else [(*one_each[1:], 2)]
        for rows in (one_each, *uneven, (2,) * len(one_each)):
            for masks in itertools.islice(itertools.product(_SMALL, repeat=sum(rows)), 60):
                if all(map(any, masks)) or (call.masked_samples and any(map(any, masks))):
                    rollouts = [i // 2 if call.split_rollouts else i for i in range(len(masks))]
                    samples = [DrawnSample(mask, rollouts[i], i // 2) for i, mask in enumerate(masks)]
                    yield self._dealt(samples, rows, 1 + self.microbatches, 1 + self.cp, call, seed)

    def _dealt(
        self, samples: Sequence[DrawnSample], rows: Sequence[int], num_microbatches: int, cp_size: int, call: LossCall,
        seed: int,
    ) -> LossCase:  # fmt: skip
        """So many rows in each micro-batch, rank by rank."""
        left = iter(samples)
        parts = [tuple(itertools.islice(left, number)) for number in rows]
        ranks = tuple(tuple(parts[i : i + num_microbatches]) for i in range(0, len(parts), num_microbatches))
        return LossCase(ranks, cp_size, call.split_rollouts, seed, padded_masks=self.padded_masks)


_SMALL = ((1,), (1, 1), (1, 0), (0, 1), (0,))
UNCUT = Cut("in one micro-batch on one rank")
MICROBATCHES = Cut("over micro-batches", microbatches=True)
CP = Cut("over context-parallel ranks", cp=True)
CUTS = (MICROBATCHES, Cut("over data-parallel ranks", dp=True), CP)
#: For a mode, which is given its masks: they may be as long as the padded slots that the layout speaks of.
PADDED = Cut("with masks as long as padded slots", padded_masks=True)
_TOGETHER = Cut("over all of these together", microbatches=True, dp=True, cp=True)


def two_rows(call: LossCall, first: tuple[int, ...] = (1, 1, 1), poisoned: bool = False) -> LossCase:
    """A plain step."""
    rows = (DrawnSample(first, rollout=0), DrawnSample((1, 1), rollout=1))
    return LossCase(((rows,),), split_rollouts=call.split_rollouts, poisoned=poisoned)


Look = Callable[[LossCase], Finding | None]


class Search:
    """Tries random steps, cut by cut, and shrinks those that show something.

    Weights are compared with those of `base`, times `factor`; without a base with those of the same step uncut.
    """

    def __init__(
        self, loss_fn: LossFunction, call: LossCall, expected: Aggregation | None, draws: int, seed: int
    ) -> None:
        self.call, self.expected = call, expected
        self._measure = functools.partial(measure, loss_fn, call)
        self.draws, self.seed = draws, seed
        self.base, self.factor = expected, 1.0

    def findings(self) -> list[Finding]:
        """Of the uncut step; then of every cut alone; of all together if those show nothing."""
        uncut = self.of_cut(UNCUT, self._depends) or self.of_cut(UNCUT)
        if any(finding.kind != "weights" for finding in uncut):
            return uncut
        if uncut or self.expected is None:
            self.base, self.factor = self._what_it_is()
            if self.expected is not None and self.base == self.expected:
                # A factor that is the same on every step is no count of a step, whatever coincides with it on one.
                says = f"all tokens weigh {self.factor:.4g} times what they should, on every step alike"
                constant = self.expected.divisor is None
                uncut = [replace(one, says=says, verdict=None if constant else one.verdict) for one in uncut]
        of_cuts: list[Finding] = []
        reading_cut = UNCUT
        for cut in (cut for cut in CUTS if not cut.cp or self.call.cp):
            shown = self.of_cut(cut, reading_cut=reading_cut.and_over(cut))
            reading_cut = reading_cut if shown else reading_cut.and_over(cut)
            of_cuts += shown
        return uncut + (of_cuts or self.of_cut(replace(_TOGETHER, cp=self.call.cp is not None)))

    def sums(self) -> tuple[float, float, bool]:
        """The lowest and highest sum of an uncut step's weights, where they are finite, and whether one is below 0."""
        weights = []
        for draw in range(self.draws):
            with contextlib.suppress(CallFailed):  # said by a finding
                weights.append(self._measure(self._drawn(UNCUT, draw)).weights)
        sums = [float(one.sum()) for one in weights if np.isfinite(one).all()] or [math.nan]
        return min(sums), max(sums), any(bool((one < 0).any()) for one in weights)

    def _what_it_is(self) -> tuple[Aggregation | None, float]:
        """The mode that uncut steps follow up to a factor, what they should be first; None if none of the table is."""
        cases = [self._drawn(UNCUT, draw) for draw in range(self.draws)]  # looked at already: none fails
        measured = [(case, self._measure(case).weights) for case in cases]
        modes = [resolve(name, divisor=1.0 if row.takes_divisor else None) for name, row in MODE_TABLE.items()]
        choices = [replace(mode, units=units) for mode in modes for units in get_args(UnitCounting)]
        for base in choices if self.expected is None else [self.expected, *choices]:
            weights = weights_of(base, cases[0])
            at = int(weights.argmax())
            factor = float(measured[0][1][at] / weights[at]) if weights[at] > 0 else 0.0
            if factor and all(same(found, weights_of(base, case) * factor) for case, found in measured):
                return base, factor
        return None, 1.0

    def notes(self) -> list[str]:
        """What is no fault of the weights."""
        with contextlib.suppress(CallFailed):
            if np.isfinite(self._measure(two_rows(self.call, (1, 0, 1), poisoned=True)).weights).all():
                return []
        return ["note: a NaN at a masked token spoils the loss; select by the mask (torch.where) before multiplying"]

    def _drawn(self, cut: Cut, draw: int) -> LossCase:
        return cut.draw(random.Random(f"{self.seed}/{cut.name}/{draw}"), self.call, seed=self.seed + draw)

    def of_cut(self, cut: Cut, look: Look | None = None, reading_cut: Cut | None = None) -> list[Finding]:
        """One finding for each kind that some random step of the cut shows, on the smallest such step.

        Readings are of steps that are cut further, over what shows nothing by itself, where that leaves less doubt.
        """
        look = look or self._differs
        shown: dict[Kind, list[Finding]] = {}
        for draw in range(self.draws):
            if (found := look(self._drawn(cut, draw))) is not None:
                shown.setdefault(found.kind, []).append(found)
        return [self._smallest(cut, reading_cut or cut, found, look) for found in shown.values()]

    def _smallest(self, cut: Cut, reading_cut: Cut, found: list[Finding], look: Look) -> Finding:
        """Of findings of one kind."""
        kind = found[0].kind
        rng = random.Random(f"{self.seed}/{reading_cut.name}/{kind}")
        further = [look(reading_cut.draw(rng, self.call, seed=self.seed + i, telling=True)) for i in range(5)]
        larger = [one for one in further if one is not None and one.kind == kind]
        by_size = sorted([*larger, *found], key=lambda one: (one.shape == "factor", -len(one.case.samples)))
        largest = by_size[0]

        def alike(other: Finding | None) -> bool:
            return other is not None and (other.kind, other.shape) == (kind, largest.shape)

        drawn = [*filter(alike, found)] or found
        smallest = next(filter(alike, map(look, cut.small(self.call, self.seed))), None)
        smallest = smallest or min(drawn, key=lambda one: len(one.case.samples))
        says = largest.says if kind == "weights" else smallest.says
        verdict = self._verdict([one.case for one in by_size[:5]]) if kind in ("weights", "NaN") else None
        return replace(smallest, cut=cut.name, says=says, verdict=verdict)

    def _verdict(self, cases: list[LossCase]) -> Verdict:
        """On the first of the steps that give the reading which most give: sizes may coincide on one."""
        verdicts = []
        for measured in map(self._measure, cases):
            scaled = replace(measured, weights=measured.weights / self.factor)
            verdicts.append(judge(scaled, self.base or self.expected))
        said = [tuple((one.counts, one.formula) for one in verdict.readings[:1]) for verdict in verdicts]
        return verdicts[max(range(len(said)), key=lambda i: said.count(said[i]))]

    def _differs(self, case: LossCase) -> Finding | None:
        """From the mode that it is without a cut, or else from its own weights without a cut."""
        try:
            measured = self._measure(case)
            if self.base is None:
                expected = self._measure(case.uncut()).weights
            else:
                expected = weights_of(self.base, case) * self.factor
        except CallFailed as failure:
            return Finding("", failure.kind, str(failure), case)
        weights = measured.weights
        if not np.isfinite(weights).all():
            number = int((~np.isfinite(weights)).sum())
            says = f"the gradient is NaN or infinite at {number} of {len(weights)} tokens"
            return Finding("", "NaN", says, case)
        places, stray = measured.stray
        if places:
            shape, says = "padding", f"padding weighs {stray:.4g} in all, in {places} places"
        elif not np.isfinite(expected).all() or same(weights, expected):
            return None
        else:
            shape, says = describe(weights, expected)
        return Finding("", "weights", says, case, tuple(weights.tolist()), tuple(expected.tolist()), shape=shape)

    def _depends(self, case: LossCase) -> Finding | None:
        """Whether the weights depend on the losses' values or on chance, which no aggregation's do."""
        try:
            first, others = (self._measure(one).weights for one in (case, replace(case, seed=case.seed + 1000)))
            if not np.isfinite([first, others]).all() or same(first, others):
                return None
            if not same(first, self._measure(case).weights):
                return Finding("", "chance", "called twice with the same losses, it gives tokens other weights", case)
        except CallFailed:
            return None  # looked at elsewhere
        says = "not linear in the losses: a token's weight depends on their values, so no aggregation describes it"
        return Finding("", "values", says, case, tuple(others.tolist()), tuple(first.tolist()))


def weights_of(aggregation: Aggregation, case: LossCase) -> Floats:
    """What an aggregation gives each mask entry of a step, [num_entries]."""
    samples = Samples(case.masks, labels=case.labels, **case.ids())
    totals = case.totals_with(list(aggregation.mode.sums.values()))
    return weigh(aggregation, samples.local(0, 1), totals).double().numpy()


def same(weights: Floats, expected: Floats) -> bool:
    """Whether weights agree: each to `TOLERANCE`, and what should be 0 is small beside the others."""
    largest = np.maximum(np.abs(weights), np.abs(expected))
    largest = np.maximum(largest, TOLERANCE * np.abs(expected).max(initial=0))
    return bool((np.abs(weights - expected) <= TOLERANCE * largest).all())


def describe(weights: Floats, expected: Floats) -> tuple[str, str]:
    """How weights differ: the shape of a `Finding`, and a sentence."""
    active = expected != 0
    outside = np.abs(weights[~active]).sum()
    if outside > TOLERANCE * np.abs(expected).sum():
        return "masked", f"masked tokens weigh {outside:.4g} in all"
    ratios = weights[active] / expected[active]
    low, high = ratios.min(), ratios.max()
    if high - low <= TOLERANCE * abs(high):
        return "factor", f"all tokens weigh {ratios.mean():.4g} times what they should"
    return "spread", f"tokens weigh {low:.4g} to {high:.4g} times what they should"


def _shown(weights: tuple[float, ...]) -> str:
    shown = [f"{weight:.4g}" for weight in weights[:12]]
    return " ".join(shown + ["..."] * (len(weights) > 12))

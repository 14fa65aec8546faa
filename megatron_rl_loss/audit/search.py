"""The search behind `check_loss`: random steps, cut in one way after the other, and the smallest that shows a fault."""

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from megatron_rl_loss.audit.calling import LossCall
from megatron_rl_loss.audit.drawn_steps import DrawnSample, LossCase, draw_samples
from megatron_rl_loss.audit.report import Verdict
from megatron_rl_loss.audit.simulation import CallFailed, LossFunction, measure
from megatron_rl_loss.audit.tokens import Floats
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import MODES, OwnMode
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import UnitCounting

#: What weights may be off by, relatively: float32 over some hundred tokens, and the small constants that trainers add
#: to a denominator.
TOLERANCE = 1e-5

Kind = Literal["weights", "values", "chance", "raises", "no loss", "no graph", "NaN"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, on the smallest step that shows it.

    Attributes:
        cut: how that step is cut, in words.
        kind: ``weights`` that are not what they should be; weights that depend on the losses' ``values``, or on
            ``chance``; a call that ``raises``, or returns ``no loss``, a loss with ``no graph``, or ``NaN``.
        says: what it is, on a larger step that tells more of its cause.
        case: the smallest step. `measure` of the loss function, its call and this gives `weights` again.
        weights, expected: the weight of each mask entry of it; empty where there is none.
        verdict: of the audit, on the larger step, with readings; None where no weights were measured.
    """

    cut: str
    kind: Kind
    says: str
    case: LossCase
    weights: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    verdict: Verdict | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """The lowest and the highest of weights / expected, over tokens that should weigh something; NaN if none do."""
        ratios = [weight / wanted for weight, wanted in zip(self.weights, self.expected, strict=True) if wanted]
        return (min(ratios), max(ratios)) if ratios else (float("nan"), float("nan"))

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; of the verdict its readings."""
        readings = [] if self.verdict is None else [reading.text for reading in self.verdict.readings]
        told = {name: getattr(self, name) for name in ("cut", "kind", "says")}
        weights = {"weights": list(self.weights), "expected": list(self.expected)}
        return told | {"readings": readings, "case": repr(self.case)} | weights

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
        parts = [tuple(samples[sum(rows[:i]) : sum(rows[: i + 1])]) for i in range(number)]
        ranks = tuple(tuple(parts[i : i + num_microbatches]) for i in range(0, number, num_microbatches))
        cp_size = (2 if telling else rng.choice([2, 3, 4])) if self.cp else 1
        return LossCase(ranks, cp_size, call.split_rollouts, seed, padded_masks=self.padded_masks)


UNCUT = Cut("in one micro-batch on one rank")
MICROBATCHES = Cut("over micro-batches", microbatches=True)
CP = Cut("over context-parallel ranks", cp=True)
CUTS = (MICROBATCHES, Cut("over data-parallel ranks", dp=True), CP)
#: For a mode, which is given its masks: they may be as long as the padded slots that the layout speaks of.
PADDED = Cut("with masks as long as padded slots", padded_masks=True)
_TOGETHER = Cut("over all of these together", microbatches=True, dp=True, cp=True)


def plain_case(call: LossCall) -> LossCase:
    rows = (DrawnSample((1, 1, 1), rollout=0), DrawnSample((1, 1), rollout=1))
    return LossCase(((rows,),), 1, call.split_rollouts)


@dataclass(frozen=True)
class _Fault:
    """What is wrong with one step; the shape of wrong weights is ``factor``, ``spread``, ``masked`` or ``padding``."""

    kind: Kind
    says: str
    shape: str = ""
    weights: Floats | None = None
    expected: Floats | None = None


Look = Callable[[LossCase], _Fault | None]


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
            uncut = [self._if_constant(finding) for finding in uncut]
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

    def _if_constant(self, finding: Finding) -> Finding:
        """A factor that is the same on every step is no count of a step, whatever number coincides with it on one."""
        if self.expected is None or self.base != self.expected:
            return finding
        says = f"all tokens weigh {self.factor:.4g} times what they should, on every step alike"
        return replace(finding, says=says, verdict=None if self.expected.divisor is None else finding.verdict)

    def _what_it_is(self) -> tuple[Aggregation | None, float]:
        """The mode that uncut steps follow up to a factor, what they should be first; None if none of the table is."""
        cases = [self._drawn(UNCUT, draw) for draw in range(self.draws)]  # looked at already: none fails
        measured = [(case, self._measure(case).weights) for case in cases]
        modes = [resolve(name, divisor=1.0 if mode.takes_divisor else None) for name, mode in MODES.items()]
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
        rows = (DrawnSample((1, 0, 1), rollout=0), DrawnSample((1, 1), rollout=1))
        case = LossCase(((rows,),), split_rollouts=self.call.split_rollouts, poisoned=True)
        with contextlib.suppress(CallFailed):
            if np.isfinite(self._measure(case).weights).all():
                return []
        return ["note: a NaN at a masked token spoils the loss; select by the mask (torch.where) before multiplying"]

    def _drawn(self, cut: Cut, draw: int) -> LossCase:
        return cut.draw(random.Random(f"{self.seed}/{cut.name}/{draw}"), self.call, seed=self.seed + draw)

    def of_cut(self, cut: Cut, look: Look | None = None, reading_cut: Cut | None = None) -> list[Finding]:
        """One finding for each kind that some random step of the cut shows, on the smallest such step.

        Readings are of steps that are cut further, over what shows nothing by itself, where that leaves less doubt.
        """
        look = look or self._differs
        shown: dict[Kind, list[tuple[LossCase, _Fault]]] = {}
        for draw in range(self.draws):
            case = self._drawn(cut, draw)
            if (fault := look(case)) is not None:
                shown.setdefault(fault.kind, []).append((case, fault))
        return [self._finding(cut, reading_cut or cut, cases, look) for cases in shown.values()]

    def _finding(self, cut: Cut, reading_cut: Cut, cases: list[tuple[LossCase, _Fault]], look: Look) -> Finding:
        kind = cases[0][1].kind
        rng = random.Random(f"{self.seed}/{reading_cut.name}/{kind}")
        further = [reading_cut.draw(rng, self.call, seed=self.seed + i, telling=True) for i in range(5)]
        larger = [(case, fault) for case in further if (fault := look(case)) is not None and fault.kind == kind]
        by_size = sorted([*larger, *cases], key=lambda one: (one[1].shape == "factor", -len(one[0].samples)))
        largest = by_size[0][1]

        def shows(smaller: LossCase) -> bool:
            fault = look(smaller)
            return fault is not None and (fault.kind, fault.shape) == (kind, largest.shape)

        small = [case for case, fault in cases if fault.shape == largest.shape] or [cases[0][0]]
        smallest = min(small, key=lambda one: len(one.samples))
        smallest = shrink(smallest, shows, even=self.call.even_microbatches, masked=self.call.masked_samples)
        fault = look(smallest)
        if fault is None or fault.kind != kind:  # chance may show something else the next time
            fault = largest
        says = largest.says if kind == "weights" else fault.says
        weights, expected = (() if part is None else tuple(part.tolist()) for part in (fault.weights, fault.expected))
        verdict = self._verdict([case for case, _ in by_size[:5]]) if kind in ("weights", "NaN") else None
        return Finding(cut.name, kind, says, smallest, weights, expected, verdict)

    def _verdict(self, cases: list[LossCase]) -> Verdict:
        """On the first of the steps that give the reading which most give: sizes may coincide on one."""
        verdicts = [self._judge(case) for case in cases]
        said = [tuple((one.counts, one.formula) for one in verdict.readings[:1]) for verdict in verdicts]
        return verdicts[max(range(len(said)), key=lambda i: said.count(said[i]))]

    def _judge(self, case: LossCase) -> Verdict:
        measured = self._measure(case)
        return judge(replace(measured, weights=measured.weights / self.factor), self.base or self.expected)

    def _differs(self, case: LossCase) -> _Fault | None:
        """From the mode that it is without a cut, or else from its own weights without a cut."""
        try:
            measured = self._measure(case)
            if self.base is None:
                expected = self._measure(case.uncut()).weights
            else:
                expected = weights_of(self.base, case) * self.factor
        except CallFailed as failure:
            return _Fault(failure.kind, str(failure))
        weights = measured.weights
        if not np.isfinite(weights).all():
            number = int((~np.isfinite(weights)).sum())
            return _Fault("NaN", f"the gradient is NaN or infinite at {number} of {len(weights)} tokens")
        places, stray = measured.stray
        if places:
            says = f"padding weighs {stray:.4g} in all, in {places} places"
            return _Fault("weights", says, "padding", weights, expected)
        if not np.isfinite(expected).all() or same(weights, expected):
            return None
        shape, says = describe(weights, expected)
        return _Fault("weights", says, shape, weights, expected)

    def _depends(self, case: LossCase) -> _Fault | None:
        """Whether the weights depend on the losses' values or on chance, which no aggregation's do."""
        try:
            first, others = (self._measure(one).weights for one in (case, replace(case, seed=case.seed + 1000)))
            if not np.isfinite([first, others]).all() or same(first, others):
                return None
            if not same(first, self._measure(case).weights):
                return _Fault("chance", "called twice with the same losses, it gives tokens other weights")
        except CallFailed:
            return None  # looked at elsewhere
        says = "not linear in the losses: a token's weight depends on their values, so no aggregation describes it"
        return _Fault("values", says, "", others, first)


def weights_of(aggregation: Aggregation, case: LossCase) -> Floats:
    """What an aggregation gives each mask entry of a step, [num_entries]."""
    mode, samples = aggregation.mode, Samples(case.masks, labels=case.labels, **case.ids())
    totals = case.totals_with(mode.statistics if isinstance(mode, OwnMode) else {})
    return weigh(aggregation, samples.local(0, 1), totals).double().numpy()


def same(weights: Floats, expected: Floats) -> bool:
    """Whether weights agree: each to `TOLERANCE`, and what should be 0 is small beside the others."""
    largest = np.maximum(np.abs(weights), np.abs(expected))
    largest = np.maximum(largest, TOLERANCE * np.abs(expected).max(initial=0))
    return bool((np.abs(weights - expected) <= TOLERANCE * largest).all())


def describe(weights: Floats, expected: Floats) -> tuple[str, str]:
    """How weights differ: the shape of a `_Fault`, and a sentence."""
    active = expected != 0
    outside = np.abs(weights[~active]).sum()
    if outside > TOLERANCE * np.abs(expected).sum():
        return "masked", f"masked tokens weigh {outside:.4g} in all"
    ratios = weights[active] / expected[active]
    low, high = ratios.min(), ratios.max()
    if high - low <= TOLERANCE * abs(high):
        return "factor", f"all tokens weigh {ratios.mean():.4g} times what they should"
    return "spread", f"tokens weigh {low:.4g} to {high:.4g} times what they should"


def shrink(case: LossCase, shows: Callable[[LossCase], bool], *, even: bool, masked: bool) -> LossCase:
    """The smallest step to be had from `case` by leaving out, that still has an active token and shows it."""
    while True:
        smaller = (one for one in _smaller(case, even, masked) if any(any(sample.mask) for sample in one.samples))
        found = next((one for one in smaller if shows(one)), None)
        if found is None:
            return case
        case = found


def _smaller(case: LossCase, even: bool, masked: bool) -> Iterator[LossCase]:
    """Steps with a part left out: the prompts, a rank, a micro-batch, a row, tokens, a zero of a mask."""
    ranks = case.ranks
    if any(sample.prompt for sample in case.samples):
        one_prompt = [[tuple(replace(one, prompt=0) for one in microbatch) for microbatch in rank] for rank in ranks]
        yield replace(case, ranks=tuple(map(tuple, one_prompt)))
    for cp_size in range(1, case.cp_size):
        yield replace(case, cp_size=cp_size)
    for i in range(case.dp_size) if case.dp_size > 1 else ():
        yield replace(case, ranks=_with(ranks, i))
    for i in range(case.num_microbatches) if case.num_microbatches > 1 else ():
        yield replace(case, ranks=tuple(_with(rank, i) for rank in ranks))
    num_rows = len(ranks[0][0])
    for i in range(num_rows) if even and num_rows > 1 else ():
        yield replace(case, ranks=tuple(tuple(_with(microbatch, i) for microbatch in rank) for rank in ranks))
    for r, rank in enumerate(ranks):
        for k, microbatch in enumerate(rank):
            for other in _smaller_microbatches(microbatch, even, masked):
                yield replace(case, ranks=_with(ranks, r, _with(rank, k, other)))


def _smaller_microbatches(
    microbatch: tuple[DrawnSample, ...], even: bool, masked: bool
) -> Iterator[tuple[DrawnSample, ...]]:
    for i in range(len(microbatch)) if not even and len(microbatch) > 1 else ():
        yield _with(microbatch, i)
    for i, sample in enumerate(microbatch):
        mask = sample.mask
        smaller = [mask[: len(mask) // 2], mask[:-1], mask[1:]] if len(mask) > 1 else []
        smaller += [_with(mask, at, 1) for at, entry in enumerate(mask) if not entry]
        yield from (_with(microbatch, i, replace(sample, mask=one)) for one in smaller if masked or any(one))


def _with(parts: tuple[Any, ...], i: int, *others: Any) -> tuple[Any, ...]:
    """With others, or nothing, in the place of part i."""
    return (*parts[:i], *others, *parts[i + 1 :])


def _shown(weights: tuple[float, ...]) -> str:
    shown = [f"{weight:.4g}" for weight in weights[:12]]
    return " ".join(shown + ["..."] * (len(weights) > 12))

"""Published bugs planted in the package, one by one: sound code passes the comparison that each of them fails.

Through the real schedule, DDP and reduction, on CP 2 x DP 2 and on DP 4. A bug that is a factor must show just that
factor: a least-squares ratio to the oracle's gradient, and nothing but it. All bugs, as what they do to a token's
weight: test_audit_names.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from published import WHERE
from ranks import run_ranks
from step_samples import DIVISOR, dealt, step_samples
from table_step import Batch, aggregation, one_step, start, table_model
from torch import Tensor

from megatron_rl_loss import Microbatch, Samples, StepTotals
from megatron_rl_loss.core import plan as planning
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.reducers import WeightedSum

pytestmark = pytest.mark.slow

SAMPLES = [replace(sample, mask=(sample.mask > 0).float()) for sample in step_samples(1)]
C, D, K = 2, 2, 3
ONE = torch.ones((), dtype=torch.int32)
ACTIVE, ROLLOUTS = oracle.mask_tokens(SAMPLES), len(oracle.units_of("sample_mean", SAMPLES))
MASKED = sum(not sample.mask.any() for sample in SAMPLES)
Plant = Callable[[pytest.MonkeyPatch], None]


def carrier(formula: Callable[[Tensor, Any, Tensor], tuple[Any, ...]]) -> Plant:
    """Hand Megatron ``formula(share, step, local tokens)`` instead of the carrier's loss and token count."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from megatron_rl_loss.megatron import launch

        sound = vars(Microbatch)["_returned"]

        def returned(self: Any, share: Tensor, report: Any, form: str) -> tuple[Any, ...]:
            sound(self, share, report, form)
            count = torch.tensor(self.tokens.num_active, dtype=torch.int32)
            return (*formula(share, self._record, count), report)

        patch.setattr(Microbatch, "_returned", returned)
        patch.setattr(launch, "check_returned", lambda *_, **__: None)  # the door, which would refuse them all

    return plant


def multiplied_by_mask(patch: pytest.MonkeyPatch) -> None:
    def product(self: Any, values: Tensor) -> Tensor:
        return (values.float() * self.weights_on(values.device)).sum(-1)

    patch.setattr(WeightedSum, "_sum", product)


def at_least_one_token_each(patch: pytest.MonkeyPatch) -> None:
    count = vars(Samples)["mask_sums"].fget
    patch.setattr(Samples, "mask_sums", property(lambda self: count(self).clip(min=1)))


def changed_totals(change: Callable[[StepTotals], StepTotals], of_rank: bool = False) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = vars(planning)["count_step"]

        def count(held: Any, groups: StepGroups, **options: Any) -> StepTotals:
            return change(sound(held, StepGroups() if of_rank else groups, **options))

        patch.setattr(planning, "count_step", count)

    return plant


class Exhibit(NamedTuple):
    row: int
    bug: str
    plant: Plant
    factor: float | None  # of the gradient; None: it depends on the data, and is off by more than a tenth
    mode: str = "token_mean"
    per_token: bool = False
    cp: int = C

    def __str__(self) -> str:
        return f"row {self.row}, {WHERE[self.row]}: {self.bug}"


def times(factor: Callable[[Any], float]) -> Plant:
    """A 3-tuple that counts one token, which Megatron divides by the micro-batches and averages over all ranks."""
    return carrier(lambda share, step, _: (share * factor(step), ONE))


def tokens(step: Any) -> float:
    return float(step.totals.step_active_tokens)


MUSEUM = [
    Exhibit(1, "loss x C on top of 1/(D C)", times(lambda s: s.num_microbatches * D * C**2), C),
    Exhibit(2, "x C although gradients are summed", carrier(lambda x, s, n: (x * tokens(s) * C, n)), C, per_token=True),
    Exhibit(15, "backward before /K", times(lambda s: s.num_microbatches**2 * D * C), K),
    Exhibit(16, "leftover /C", times(lambda s: s.num_microbatches * D), 1 / C, "sample_mean"),
    Exhibit(17, "denominator N D for N/D", times(lambda s: s.num_microbatches * C / D), 1 / D**2, "prompt_mean"),
    Exhibit(18, "sum-norm without x D", times(lambda s: s.num_microbatches * C), 1 / D, "constant"),
    Exhibit(19, "a 2-tuple under per-token loss", carrier(lambda x, s, _: (x * tokens(s),)), ACTIVE * C / K,
            per_token=True),
    Exhibit(25, "corrected by D C in a 2-tuple, which has x C already",
            carrier(lambda x, s, _: (x * s.num_microbatches * D * C,)), C, "token_sum"),
    Exhibit(36, "the schedule's /K not undone", times(lambda s: D * C), 1 / K),
    Exhibit(52, "tokens of all mini-batches / D on a 2-tuple, without x K", carrier(lambda x, s, _: (x * D,)), 1 / K),
    Exhibit(22, "x m for where(m): NaN at masked tokens", multiplied_by_mask, float("nan")),
    Exhibit(42, "clamp(M_i, 1): phantom tokens", at_least_one_token_each, ACTIVE / (ACTIVE + MASKED)),
    Exhibit(18, "sum-norm without /N", changed_totals(
        lambda totals: replace(totals, units={
            **totals.units, "rollout": replace(totals.units["rollout"], number={"all": 1, "active": 1})})),
        ROLLOUTS, "constant"),
    Exhibit(58, "totals of the rank given as the step's", changed_totals(lambda totals: totals, of_rank=True), None,
            cp=1),
    Exhibit(0, "token count summed over D C, where CP ranks hold full masks",
            changed_totals(lambda totals: replace(totals, step_tokens=2 * (totals.step_tokens or 0))), 1 / C),
]  # fmt: skip


def visited(cp: int) -> dict[str, tuple[Tensor, Tensor, float]]:
    """On one of four ranks: of each exhibit of that layout the sound gradient, the mutant's and its logged loss."""
    import megatron_rl_loss.megatron.launch  # noqa: F401  # mutants patch it

    state = start(cp=cp)
    table = [float(loss) for sample in SAMPLES for loss in sample.poisoned().losses] + [0.0]  # NaN at masked tokens
    hands = dealt(SAMPLES, state.get_data_parallel_rank(), state.get_data_parallel_world_size(), K)

    def outcome(exhibit: Exhibit) -> tuple[Tensor, float]:
        divisor = oracle.divisor_of(exhibit.mode, DIVISOR)
        step = aggregation(mode=exhibit.mode, divisor=divisor, with_per_token_loss=True, proof="off")
        model = table_model(table, per_token=exhibit.per_token)
        gradient, logged = one_step(model, [Batch(SAMPLES, chosen, cp) for chosen in hands], step, metric=False)
        return gradient, logged["pg_loss"]

    by_exhibit, sound = {}, dict[Any, Tensor]()
    for exhibit in (exhibit for exhibit in MUSEUM if exhibit.cp == cp):
        launch = exhibit.mode, exhibit.per_token
        if launch not in sound:
            sound[launch], _ = outcome(exhibit)
        with pytest.MonkeyPatch.context() as patch:
            exhibit.plant(patch)
            by_exhibit[str(exhibit)] = sound[launch], *outcome(exhibit)
    return by_exhibit


@pytest.mark.parametrize("cp", [C, 1])
def test_each_mutant_is_caught_and_off_by_the_published_factor(cp: int) -> None:
    for by_exhibit in run_ranks(4, visited, cp):
        for exhibit in (exhibit for exhibit in MUSEUM if exhibit.cp == cp):
            divisor = oracle.divisor_of(exhibit.mode, DIVISOR)
            right = torch.cat([*oracle.step_gradient(exhibit.mode, SAMPLES, divisor), torch.zeros(1)])
            sound, mutant, logged = by_exhibit[str(exhibit)]
            mutant, scale = mutant.double(), right.abs().max()
            assert (sound - right).abs().max() / scale < oracle.EXACT, exhibit
            if exhibit.factor is None:
                assert (mutant - right).abs().max() / scale > 0.1, exhibit
            elif exhibit.factor == exhibit.factor:
                assert abs(exhibit.factor - 1) > 1000 * oracle.EXACT, exhibit
                ratio = float(mutant @ right / (right @ right))
                assert ratio == pytest.approx(exhibit.factor, rel=2 * oracle.EXACT), exhibit
                assert (mutant - ratio * right).abs().max() / (ratio * scale) < 2 * oracle.EXACT, exhibit
            else:
                assert logged != logged, exhibit

"""The adapter against the real Megatron-Core: DDP, schedules, `finalize_model_grads`, process groups, on gloo ranks.

The model is a table with one parameter for every token of the step, which is that token's loss. So the gradient after
Megatron's whole way (schedule scaling, DDP, reduction, per-token division) is the token's weight, to be compared with
the float64 oracle; what that comparison sees of wrong weights, and of Megatron's stock aggregation: `tests/museum`.
Not exercised here: NCCL, GPU kernels, a language model (see test_matrix.py).
"""

from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks
from table_step import ALL_SETTINGS, Batch, aggregation, one_step, relative_error, start, step_samples, table_model
from table_step import dealt as dealt_evenly

slow = pytest.mark.slow
SAMPLES = step_samples(seed=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    world_size: int
    num_microbatches: int = 2
    tp: int = 1
    cp: int = 1
    gathered: bool = False
    extra_microbatch: bool = False  # an empty one, on the first DP rank alone
    ddp_options: dict[str, Any] = field(default_factory=dict)
    samples: list[oracle.Sample] = field(default_factory=lambda: SAMPLES)
    dealt: list[list[list[int]]] | None = None  # numbers of samples by DP rank and micro-batch

    def hands(self, dp_rank: int, dp_size: int) -> list[list[int]]:
        if self.dealt is not None:
            return self.dealt[dp_rank]
        hands = dealt_evenly(self.samples, dp_rank, dp_size, self.num_microbatches)
        return [*hands, []] if self.extra_microbatch and dp_rank == 0 else hands


def edge(samples: list[oracle.Sample], *dealt: list[list[int]]) -> Case:
    return Case(world_size=4, cp=2, samples=samples, dealt=list(dealt))


MASKED = [oracle.sample(s.losses.tolist(), [0] * len(s.mask), s.rollout_id, str(s.prompt_id)) for s in SAMPLES]
CASES = {
    "cp 2": Case(world_size=2, cp=2),
    "dp 1": Case(world_size=1, num_microbatches=3),
    "dp 4": Case(world_size=4, num_microbatches=1),
    "cp 2 x dp 2": Case(world_size=4, cp=2, num_microbatches=3),
    "cp 4": Case(world_size=4, cp=4, num_microbatches=3),
    "tp 2 x cp 2": Case(world_size=4, tp=2, cp=2),
    "an empty micro-batch more on one DP rank": Case(world_size=4, cp=2, extra_microbatch=True),
    "gathered": Case(world_size=4, cp=2, gathered=True),
    "overlap": Case(world_size=4, cp=2, num_microbatches=3, ddp_options={"overlap_grad_reduce": True}),
    "a rank without samples": edge(SAMPLES, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]], [[], []]),
    "5 samples on 2 DP ranks": edge(SAMPLES[:5], [[0, 1], [2]], [[3], [4]]),
    "one sample in the step": edge(SAMPLES[:1], [[], []], [[], [0]]),
    "no active token": edge(MASKED, [[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]),
}
QUICK = "cp 2"


def errors_in(case: Case) -> list[tuple[str, float, float]]:
    """Errors of the gradient, and the larger one of the loss and the metric, for modes, unit counting and carriers."""
    state = start(tp=case.tp, cp=case.cp)
    hands = case.hands(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    table = [float(loss) for sample in case.samples for loss in sample.losses] + [float("nan")]  # padding is NaN
    found = []
    for per_token in (False, True):
        model = table_model(table, per_token=per_token, **case.ddp_options)
        for settings in ALL_SETTINGS:
            batches = [Batch(case.samples, hand, case.cp, case.gathered) for hand in hands]
            gradient, logged = one_step(model, batches, aggregation(**settings, with_per_token_loss=True))
            of_loss: Any = (settings["mode"], case.samples, settings["divisor"], settings["units"])
            of_metric: Any = ("sample_mean", case.samples, None, settings["units"])
            expected = torch.cat([*oracle.step_gradient(*of_loss), torch.zeros(1)])
            value = oracle.worst_of(
                abs(logged["pg_loss"] - float(oracle.step_loss(*of_loss))) / (oracle.step_scale(*of_loss) or 1),
                abs(logged["twice"] / 2 - float(oracle.step_loss(*of_metric))) / (oracle.step_scale(*of_metric) or 1),
            )
            found.append((f"{settings} per_token={per_token}", relative_error(gradient, expected), value))
    return found


@pytest.mark.gpus
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == QUICK else slow) for name in CASES])
def test_gradient_loss_and_metrics_equal_the_oracle(name: str) -> None:
    case = CASES[name]
    of_sums = oracle.sum_error(oracle.num_tokens(case.samples))
    for errors in run_ranks(case.world_size, errors_in, case):
        assert len(errors) == 2 * len(ALL_SETTINGS)
        for settings, gradient, value in errors:
            # Without an active token the gradient must be zero itself: relative to 1e-30, any other fails.
            assert gradient < oracle.EXACT, settings
            assert value < of_sums, settings

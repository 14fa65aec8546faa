"""An error in any function of this package, on one rank of two in Megatron's schedule: no rank waits for another."""

from typing import Any

import pytest
from every_call import Job, check_every_call
from step_samples import dealt
from table_step import Batch, run_step, table_model
from world import STEP, TABLE

from megatron_rl_loss import plan_step

pytestmark = pytest.mark.slow


class MegatronJob(Job):
    def __init__(self, phase: str) -> None:
        from megatron.core import parallel_state

        super().__init__(phase)
        parallel_state.initialize_model_parallel()
        self.batches = [Batch(STEP, hand, 1) for hand in dealt(STEP, self.rank, 2, 2)]

    def plan(self) -> Any:
        self.table = table_model(TABLE)
        return plan_step([batch.samples for batch in self.batches], "prompt_mean", model=self.table)

    def model(self) -> Any:
        return self.table

    def train(self, plan: Any) -> None:
        pairs = list(zip(self.batches, plan, strict=True))
        run_step(self.table, pairs, lambda microbatch, losses: microbatch.loss(losses), fresh=False)


@pytest.mark.parametrize(("phase", "least"), [("proof", 60), ("finish", 8)])
def test_an_error_in_any_function_leaves_no_rank_waiting(phase: str, least: int) -> None:
    check_every_call(MegatronJob, phase, least)

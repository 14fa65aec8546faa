"""The proof of an engine's first training step, which the engine may give up. Imports Megatron-Core."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl_loss.core.collectives import Group, world_rank, world_size
from megatron_rl_loss.core.errors import print_text
from megatron_rl_loss.extend import MegatronFirstStep, PlanUse, groups_of, not_proved


class EngineStep(MegatronFirstStep):
    """`FirstStep` of an engine, in which something may be known to be unprovable before the step runs.

    Attributes:
        doubt: why nothing can be proved, on all ranks alike; said when the next training step begins.
    """

    doubt = ""
    tells_each_rank = True  # an engine's driver passes on the error of one worker, of any rank

    @contextmanager
    def step(self, model: Any, *, trains: bool = True, plan: PlanUse | None = None, **further: Any) -> Iterator[None]:
        if trains and self.doubt:
            self.give_up(self.doubt)
        with super().step(model, trains=trains, plan=plan, **further):
            yield

    def give_up(self, why: str) -> None:
        """Print on the first rank that nothing is proved, unless the level of all ranks is ``off``; all call it."""
        if not self.is_agreed:
            self.agree(_groups_without_model())
        if self.is_over:
            return
        verdict = not_proved(why, self.aim(self.asked))
        self.is_over, self.outcome = True, verdict.outcome.word
        if not world_rank():
            print_text(f"megatron_rl_loss: {verdict.line(self.level)}")


def _groups_without_model() -> list[Group]:
    """The groups over which ranks agree: Megatron's; all ranks of an engine that has not set these up."""
    if not parallel_state.model_parallel_is_initialized():
        return [group for group in [dist.group.WORLD] if group is not None and world_size() > 1]
    return groups_of(None, None).all

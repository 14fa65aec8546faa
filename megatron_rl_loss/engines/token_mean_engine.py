"""What `token_mean` asks of an engine whose workers are classes with a method that trains a step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron_rl_loss.engines.places import Call
from megatron_rl_loss.engines.replacing import Function
from megatron_rl_loss.engines.weighed_batches import BatchEngine, StepArguments


@dataclass(frozen=True, kw_only=True)
class TokenMeanEngine(BatchEngine):
    """An engine whose worker class the user names.

    Attributes:
        step: the name of its step method, called once per optimizer step, and parameters that it must have.
        put: puts a call in place of the loss function, during a call of the step method.
        mends: `put` mends the engine too, and is needed in every step.
        trains: True if an instance of the class trains a policy.
        unmeasured: words for terms beside the policy loss that are not measured.
        further: other methods that are replaced.
        checks: functions of the engine that run where workers train without the class; ours refuse it, or say so.
        runs: another method that calls Megatron's schedule, if the class has it.
    """

    step: tuple[str, Sequence[str]]
    put: Callable[[StepArguments, Call], AbstractContextManager[None]]
    mends: bool = False
    trains: Callable[[Any], bool] = lambda owner: True
    unmeasured: str = ""
    further: Sequence[tuple[str, Sequence[str], Call]] = ()
    checks: Callable[[Any], Sequence[Function]] = lambda owner: ()
    runs: str = ""

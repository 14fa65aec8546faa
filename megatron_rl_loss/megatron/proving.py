"""The proof of a step under Megatron's schedule: a model's groups, and what a launch makes unmeasurable."""

from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import Group
from megatron_rl_loss.core.record import PlanUse
from megatron_rl_loss.megatron.flags import REMAT_SIZES, has_cuda_graphs
from megatron_rl_loss.megatron.model_settings import groups_of
from megatron_rl_loss.proof.first_step import FirstStep
from megatron_rl_loss.proof.megatron_step import MegatronStep


def facts_of(
    model: Any, pg_collection: ProcessGroupCollection | None = None
) -> tuple[ProcessGroupCollection, list[str]]:
    """The groups of a model, or list of chunks, and reasons why a step of it cannot be measured: of `MegatronStep`.

    Args:
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
    """
    chunk = model[0] if isinstance(model, list) else model
    groups = groups_of(chunk, pg_collection)
    return groups, _cannot_know(get_model_config(chunk), groups)


class MegatronFirstStep(FirstStep):
    """`FirstStep` of a Megatron model, whose ``step`` is around the call of the schedule.

    Args:
        asked, loss, further: as of `FirstStep`.
        pg_collection: as of `facts_of`.
        is_own_loop: as of `MegatronStep`.
    """

    def __init__(
        self,
        asked: Aggregation | None,
        loss: str,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        is_own_loop: bool = False,
        **further: Any,
    ) -> None:
        def measure(model: Any, plan: PlanUse | None, then: Callable[[Exception | None], None]) -> MegatronStep:
            groups, unknown = facts_of(model, pg_collection)
            return MegatronStep(model, groups, unknown=unknown, plan=plan, is_own_loop=is_own_loop, then=then)

        def groups_that_agree(model: Any, plan: PlanUse | None) -> list[Group]:
            groups, _ = facts_of(model, pg_collection)
            return [groups.dp_cp, groups.tp, groups.pp]

        super().__init__(asked, loss, measure=measure, groups_of=groups_that_agree, **further)


def _cannot_know(config: Any, groups: ProcessGroupCollection) -> list[str]:
    """Reasons against a verdict in the config: hooks that do not run, groups and reductions that are not followed."""
    finalize = config.finalize_model_grads_func
    later = hasattr(getattr(finalize, "__self__", None), "run_pending_grad_sync")
    has_remat = any((getattr(config, name, 1) or 1) > 1 for name in REMAT_SIZES)
    reasons = {
        "CUDA graphs replay a backward pass without its hooks. Audit a step without CUDA graphs.": bool(
            has_cuda_graphs(config)
        ),
        "Weight-rematerialising TP (GTP) reduces over further groups, which the audit does not follow.": has_remat,
        "The schedule does not finalise gradients: the config has no finalize_model_grads_func.": (
            finalize is None and groups.dp_cp.size() > 1 and not later
        ),
    }  # fmt: skip
    return [reason for reason, holds in reasons.items() if holds]

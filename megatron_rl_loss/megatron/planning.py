"""`plan_step` for a loop that drives Megatron's schedule itself: groups and settings come from the model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.probe import check_contract, check_finalizing, check_model
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.plan import plan as plans
from megatron_rl_loss.plan.plan import Plan, StepGroups
from megatron_rl_loss.step.samples import Samples


def plan_step(
    samples: Sequence[Samples] | Callable[[], Sequence[Samples]] | None,
    mode: str | ModeFunction,
    *,
    model: Any,
    pg_collection: ProcessGroupCollection | None = None,
    num_microbatches: int | None = None,
    **options: Any,
) -> Plan:
    """`megatron_rl_loss.plan.plan_step` with the groups and the `calculate_per_token_loss` of a Megatron model.

        plan = plan_step(describe, "prompt_mean", model=model)  # describe() gives a Samples for each micro-batch
        ...
        return plan[i].carry(plan[i](losses), report)  # in the loss function of micro-batch i

    It first checks that the installed Megatron scales losses as the carriers rely on, for which the host waits for the
    device.

    Args:
        samples, mode, num_microbatches: as there.
        model: the model chunk or list of chunks that the schedule is called with.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        options: its other keyword arguments, but for groups and `per_token_loss`.

    Raises:
        ContractError: Megatron scales losses in another way.
        BadBatchError, ValueError, TypeError: as there; a model config under which the loss would not be exact.
    """
    config, _, ranks = checked_model(model, pg_collection)
    return plans.plan_step(
        samples,
        mode,
        dp_group=ranks.dp_group,
        cp_group=ranks.cp_group,
        replica_groups=ranks.replica_groups,
        per_token_loss=bool(config.calculate_per_token_loss),
        num_microbatches=num_microbatches,
        **options,
    )


def step_groups(groups: ProcessGroupCollection) -> StepGroups:
    """The groups that a step is counted over."""
    return StepGroups(dp_group=groups.dp, cp_group=groups.cp, replica_groups=[groups.tp, groups.pp])


def checked_model(model: Any, pg_collection: ProcessGroupCollection | None) -> tuple[Any, list[Any], StepGroups]:
    """The config, the chunks and the groups of a model under which the loss is exact; raises as `plan_step`."""
    chunks = model if isinstance(model, list) else [model]
    config, groups = get_model_config(chunks[0]), groups_of(chunks[0], pg_collection)
    check_model(config, chunks)
    if torch.is_grad_enabled():
        check_finalizing(config, chunks, groups)
    check_contract(config, chunks, groups, num_microbatches=2)  # any number shows how the schedule scales by it
    return config, chunks, step_groups(groups)

"""`plan_step` for a loop that drives Megatron's schedule itself: groups and settings come from the model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl_loss.megatron.flags import CHANGING_CP
from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.probe import check_contract, check_finalizing, check_model
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.plan import plan as plans
from megatron_rl_loss.plan.checks import StepGroups
from megatron_rl_loss.plan.plan import Plan
from megatron_rl_loss.step.samples import Samples


def plan_step(
    samples: Sequence[Samples] | Callable[[], Sequence[Samples]] | None,
    mode: str | ModeFunction,
    *,
    model: Any,
    pg_collection: ProcessGroupCollection | None = None,
    num_microbatches: int | None = None,
    dynamic_cp: bool = False,
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
        dynamic_cp: whether context-parallel groups change between micro-batches, each of which says its own:
            ``Samples(..., cp_group=...)``. Counts are then summed over DP x CP. On where the model's config says so.
        options: its other keyword arguments, but for groups and `per_token_loss`.

    Raises:
        ContractError: Megatron scales losses in another way.
        BadBatchError, ValueError, TypeError: as there; a model config under which the loss would not be exact.
    """
    config, _, step_groups = checked_model(model, pg_collection, dynamic_cp=dynamic_cp)
    return plans.plan_step(
        samples,
        mode,
        dp_group=step_groups.dp_group,
        cp_group=step_groups.cp_group,
        replica_groups=step_groups.replica_groups,
        per_token_loss=bool(config.calculate_per_token_loss),
        num_microbatches=num_microbatches,
        **options,
    )


def find_step_groups(config: Any, groups: ProcessGroupCollection, dynamic_cp: bool = False) -> StepGroups:
    """The groups that a step is counted over: DP x CP where context-parallel groups change between micro-batches."""
    dynamic_cp = dynamic_cp or any(getattr(config, name, False) for name in CHANGING_CP)
    if dynamic_cp and not config.calculate_per_token_loss:
        raise ValueError(
            "dynamic context parallelism without per-token loss: numbers of micro-batches and sizes of groups differ "
            "between ranks, so no loss may be divided by them. Turn calculate_per_token_loss on."
        )
    hybrid, dynamic = (getattr(config, name, False) for name in CHANGING_CP)
    if hybrid and not dynamic and groups.pp.size() > 1:
        raise ValueError(
            f"--hybrid-context-parallel with {groups.pp.size()} pipeline stages: Megatron's schedules of stages do not "
            "deal samples to groups, and take the step for one micro-batch. Use a packing scheduler, or one stage."
        )
    dp_group, cp_group = (groups.dp_cp, None) if dynamic_cp else (groups.dp, groups.cp)
    return StepGroups(dp_group=dp_group, cp_group=cp_group, replica_groups=[groups.tp, groups.pp])


def checked_model(
    model: Any, pg_collection: ProcessGroupCollection | None, *, dynamic_cp: bool | None = None
) -> tuple[Any, list[Any], StepGroups]:
    """The config, the chunks and the groups of a model under which the loss is exact; raises as `plan_step`.

    Without `dynamic_cp` a model whose context-parallel groups change is refused.
    """
    chunks = model if isinstance(model, list) else [model]
    config, groups = get_model_config(chunks[0]), groups_of(chunks[0], pg_collection)
    step_groups = find_step_groups(config, groups, bool(dynamic_cp))
    check_model(config, chunks, CHANGING_CP if dynamic_cp is None else ())
    if torch.is_grad_enabled():
        check_finalizing(config, chunks, groups)
    check_contract(config, chunks, groups, num_microbatches=2)  # any number shows how the schedule scales by it
    return config, chunks, step_groups

"""Groups and settings of a Megatron model for counting a step, validated so that the loss is exact."""

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_rl_loss.core.carriers import DEFAULT
from megatron_rl_loss.core.collectives import ModelGroups, StepGroups
from megatron_rl_loss.core.record import Trainer
from megatron_rl_loss.megatron.flags import CHANGING_CP
from megatron_rl_loss.megatron.probe import check_ddp, check_finalizing, check_form, check_model
from megatron_rl_loss.proof.schedules import chunks_of

_NEEDED = ("tp", "pp", "cp", "dp", "dp_cp")


def groups_of(chunk: Any, pg_collection: ProcessGroupCollection | None) -> ModelGroups:
    """The user's groups, else the model's own, else those of Megatron's parallel state.

    Raises ValueError for a collection that lacks one of the groups.
    """
    groups = pg_collection
    if groups is None:
        groups = getattr(unwrap_model(chunk), "pg_collection", None)
        # A model's own collection has the groups that its layers use: T5's has no data-parallel ones.
        if groups is None or any(getattr(groups, name, None) is None for name in _NEEDED):
            groups = ProcessGroupCollection.use_mpu_process_groups(list(_NEEDED))
    missing = [name for name in _NEEDED if getattr(groups, name, None) is None]
    if missing:
        raise ValueError(
            f"a ProcessGroupCollection without {', '.join(missing)}: the counts of a step are reduced over these "
            "groups. Set them in the collection."
        )
    return ModelGroups(**{name: getattr(groups, name) for name in _NEEDED}, embd=getattr(groups, "embd", None))


def step_groups(model: Any, pg_collection: ProcessGroupCollection | None = None, *, dynamic_cp: bool) -> StepGroups:
    """The groups that a step of the model is counted over; arguments as in `plan_step`."""
    chunk = chunks_of(model)[0]
    config, groups = get_model_config(chunk), groups_of(chunk, pg_collection)
    # Where CP groups change, each rank of DP x CP may have samples of its own in each micro-batch.
    is_dynamic = dynamic_cp or any(getattr(config, name, False) for name in CHANGING_CP)
    dp_group, cp_group = (groups.dp_cp, None) if is_dynamic else (groups.dp, groups.cp)
    return StepGroups(dp_group, cp_group, (groups.tp, groups.pp))


def trainer_of(
    model: Any,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    dynamic_cp: bool = False,
    looks_ahead: bool = False,
    trains: bool | None = None,
    probed: set[str] | None = None,
) -> Trainer:
    """The trainer of a Megatron model: its groups, settings and device, and a check of a form of return values.

    The check compares the installed schedule's scaling with a form's row. The default form is checked here; a loss
    function that returns another form has it checked then, so that a launch needs no form that it does not return.

    Args:
        model, pg_collection, dynamic_cp: as in `plan_step`.
        looks_ahead: micro-batches are fetched before the schedule, which must not redistribute samples then.
        trains: the step trains the model; default: True where gradients are enabled.
        probed: names of the forms that earlier steps of a launch have checked, which are not checked again and to which
            this step's are added: a check makes the host wait for the device. None: every step checks its own.

    Raises:
        ContractError: the carriers do not undo the scaling of this Megatron.
        ValueError: a model config under which the loss would not be exact; a collection that lacks a group.
    """
    chunks = chunks_of(model)
    config, groups = get_model_config(chunks[0]), groups_of(chunks[0], pg_collection)
    hybrid, dynamic = (getattr(config, name, False) for name in CHANGING_CP)
    dynamic_cp = dynamic_cp or hybrid or dynamic
    check_model(config, chunks, looks_ahead=looks_ahead)
    if dynamic_cp and not config.calculate_per_token_loss:
        raise ValueError(
            "dynamic context parallelism without calculate_per_token_loss: Megatron divides losses by numbers of "
            "micro-batches and sizes of groups, which differ between ranks. Turn calculate_per_token_loss on."
        )
    if hybrid and not dynamic and groups.pp.size() > 1:
        raise ValueError(
            f"--hybrid-context-parallel with {groups.pp.size()} pipeline stages: Megatron's pipeline schedules do not "
            "distribute samples over groups, and treat the step as one micro-batch. Use a packing scheduler."
        )
    if torch.is_grad_enabled() if trains is None else trains:
        check_finalizing(config, chunks, groups)
    probed = set[str]() if probed is None else probed
    check = partial(check_form, config, groups.cp, probed)
    if DEFAULT.name not in probed:
        check_ddp(config, chunks, groups)
        check(DEFAULT)
    return Trainer(
        groups=step_groups(model, pg_collection, dynamic_cp=dynamic_cp),
        per_token_loss=bool(config.calculate_per_token_loss),
        check_form=check,
        device=next(chunks[0].parameters()).device,
    )

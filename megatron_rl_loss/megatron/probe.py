"""Checks before a launch's first step: Megatron's scaling of losses, and the model's config.

A change of Megatron's scaling would be silent: every gradient would be wrong by a constant. The probe sends a known
scalar through the installed `forward_step_calc_loss`, reads DDP's scaling factor, and compares both with the rows of
`core/carriers.py`: with the default one before the first step, with another when a
loss function first returns it.
"""

import copy
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.pipeline_parallel import schedules

from megatron_rl_loss.core.carriers import DEFAULT, Count, Form, Powers, product
from megatron_rl_loss.core.collectives import Group, ModelGroups, device_of, size_of
from megatron_rl_loss.core.errors import ContractError
from megatron_rl_loss.megatron.flags import check_megatron_settings
from megatron_rl_loss.megatron.versions import cp_arguments

_LOSS = 3.0
_NUM_TOKENS = 1  # as without per-token loss, where the schedule divides by it
_NUM_MICROBATCHES = 3  # unlike usual sizes of groups, so that its factor is not taken for theirs


def check_model(config: Any, chunks: Sequence[Any], *, looks_ahead: bool) -> None:
    """Reject a model config under which the loss would not be exact; called in each step, since configs may change."""
    per_token = bool(config.calculate_per_token_loss)
    check_megatron_settings(config, per_token, looks_ahead=looks_ahead)
    for chunk in chunks:
        if per_token and isinstance(chunk, _BaseDataParallel):
            if type(chunk).scale_gradients is _BaseDataParallel.scale_gradients:
                raise ValueError(
                    f"calculate_per_token_loss with {type(chunk).__name__}: this wrapper never divides gradients by "
                    "the token count, so they would be too large. Turn calculate_per_token_loss off."
                )
            average = chunk.ddp_config.average_in_collective
            check_megatron_settings(Namespace(ddp_average_in_collective=average), per_token)


def check_finalizing(config: Any, chunks: Sequence[Any], groups: ModelGroups) -> None:
    """Reject a model under Megatron's DDP whose schedule does not reduce gradients over ranks."""
    several = max(map(size_of, groups.all)) > 1
    ddp = any(isinstance(chunk, _BaseDataParallel) for chunk in chunks)
    if several and ddp and config.finalize_model_grads_func is None:
        raise ValueError(
            "a model config without finalize_model_grads_func, on several ranks: the schedule would not reduce "
            "gradients over ranks. Set it to megatron.core.distributed.finalize_model_grads; if your loop finalises "
            "gradients itself, call plan_step(..., dp_group=...) instead of plan_step(..., model=...)."
        )


def check_form(config: Any, cp_group: Group, checked: set[str], form: Form) -> None:
    """Reject a Megatron whose schedule does not take a loss in that form, or scales it differently from its row.

    Nothing is done for a form that was checked before, and for one that an engine's own loss function turns into
    another before the schedule has it. All ranks of the context-parallel group must call it together: a schedule may
    reduce over them. They do before a step, and in a loss function, which they call for the same micro-batch.

    Raises:
        ContractError: the factor differs; the message has the expected factor and Megatron's.
    """
    if form.name in checked or form.caller != "schedule":
        return
    carrier = form.carriers[bool(config.calculate_per_token_loss)]
    expected = _factor(carrier.schedule, dp_size=1, cp_size=cp_group.size())
    _compare(f"schedule (forward_step_calc_loss, {form.name})", _schedule_factor(config, cp_group, form), expected)
    checked.add(form.name)


def check_ddp(config: Any, chunks: Sequence[Any], groups: ModelGroups) -> None:
    """Reject a Megatron whose DDP scales gradients differently from the default form's carrier for this config.

    Only Megatron-Core's own DDP exposes its scaling; other wrappers are not checked. Raises as `check_form`.
    """
    carrier = DEFAULT.carriers[bool(config.calculate_per_token_loss)]
    expected = _factor(carrier.ddp, dp_size=groups.dp.size(), cp_size=groups.cp.size())
    for chunk in chunks:
        for buffer in chunk.buffers if isinstance(chunk, DistributedDataParallel) else []:
            averaged = groups.dp_cp.size() if chunk.ddp_config.average_in_collective else 1
            factor = buffer.gradient_scaling_factor / averaged
            _compare("DDP (gradient_scaling_factor)", factor, expected)


def _factor(powers: Powers, *, dp_size: int, cp_size: int) -> float:
    counts: dict[Count, float] = {"num_microbatches": _NUM_MICROBATCHES, "dp_size": dp_size, "cp_size": cp_size}
    return product(powers, counts)


def _schedule_factor(config: Any, cp_group: Group, form: Form) -> float:
    """The factor by which the installed schedule multiplies a loss that is returned in that form."""
    # A copy without timers and auxiliary losses: their scales are global and the probe must not set them.
    quiet = copy.copy(config)
    for name in ("timers", "num_moe_experts", "mtp_num_layers", "experimental_attention_variant"):
        setattr(quiet, name, None)
    device = device_of(cp_group)
    count = torch.full((), _NUM_TOKENS, dtype=torch.int32, device=device)
    try:
        loss, num_tokens = schedules.forward_step_calc_loss(
            model=None,
            output_tensor=torch.full((), _LOSS, device=device),
            loss_func=lambda loss: form.assemble({"loss": loss, "report": {}, **dict.fromkeys(form.counts, count)}),
            config=quiet,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=_NUM_MICROBATCHES,
            forward_data_store=[],
            is_last_stage=True,
            **cp_arguments(cp_group),
        )
    except Exception as error:
        returned = f"a return value of ({', '.join(form.parts)})"
        rule = f"{returned} could not be probed ({type(error).__name__}: {error})"
        raise _broken("forward_step_calc_loss", rule, "" if form is DEFAULT else "Leave form out, or use") from error
    if int(count) != _NUM_TOKENS:
        raise _broken("forward_step_calc_loss", "it changes the token count in place, which micro-batches share")
    if "num_tokens" in form.parts and (num_tokens.is_floating_point() or int(num_tokens) != _NUM_TOKENS):
        change = f"it turns a token count of {_NUM_TOKENS} into {num_tokens.item()!r} ({num_tokens.dtype})"
        raise _broken("forward_step_calc_loss", f"{change} and must leave it as it is")
    return float(loss) / _LOSS


def _compare(place: str, factor: float, expected: float) -> None:
    if not abs(factor - expected) <= 1e-6 * expected:
        raise _broken(place, f"it scales losses by {factor:.9g}, and this library relies on {expected:.9g}")


def _broken(place: str, rule: str, use: str = "") -> ContractError:
    return ContractError(
        f"Megatron's {place}: {rule}. {use or 'Use'} megatron-core 0.15 to 0.19, or a megatron_rl_loss made for this "
        "version."
    )

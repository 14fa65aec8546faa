"""Refusals before a launch's first step: another scaling of losses than the carriers undo, and unsafe model configs.

A change of Megatron's scaling would be silent: every gradient off by a constant. So a known scalar goes through the
installed `forward_step_calc_loss`, the scaling that DDP has in force is read, and both are compared with the row of
`carriers` in force.
"""

import copy
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.errors import ContractError
from megatron_rl_loss.megatron.flags import check_megatron_settings
from megatron_rl_loss.megatron.versions import cp_arguments
from megatron_rl_loss.plan.carriers import Count, carriers_of, product
from megatron_rl_loss.step.collectives import Group, device_of

_LOSS = 3.0
_NUM_TOKENS = 1
_NUM_MICROBATCHES = 3


def check_model(config: Any, chunks: Sequence[Any], *, looks_ahead: bool) -> None:
    """Refuse a model configuration under which the loss would not be exact; at each step, since it may change."""
    per_token = bool(config.calculate_per_token_loss)
    check_megatron_settings(config, per_token, looks_ahead=looks_ahead)
    for chunk in chunks:
        if per_token and isinstance(chunk, _BaseDataParallel):
            if type(chunk).scale_gradients is _BaseDataParallel.scale_gradients:
                raise ValueError(
                    f"per-token loss with {type(chunk).__name__}: it never divides gradients by the token count, so "
                    "they would be too large by it. Turn calculate_per_token_loss off."
                )
            average = chunk.ddp_config.average_in_collective
            check_megatron_settings(Namespace(ddp_average_in_collective=average), per_token)


def check_finalizing(config: Any, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
    """Refuse a model under Megatron's DDP whose schedule would leave each rank with its own gradient."""
    several = max(group.size() for group in (groups.dp_cp, groups.tp, groups.pp)) > 1
    ddp = any(isinstance(chunk, _BaseDataParallel) for chunk in chunks)
    if several and ddp and config.finalize_model_grads_func is None:
        raise ValueError(
            "a model config without finalize_model_grads_func, on several ranks: the schedule would sum no gradients "
            "over them, and each rank would train on its own. Set it to "
            "megatron.core.distributed.finalize_model_grads; a loop that finalises gradients itself plans with "
            "plan_step(..., dp_group=...) in the place of model=."
        )


def check_fresh_gradients(chunks: Sequence[Any]) -> None:
    """Refuse gradients that were there before the step: Megatron's DDP adds to them. Waits for a device.

    Not where the buffers hold parameters at that time (mxfp8, gathered while the forward pass runs).
    """
    ddp = [one for one in chunks if isinstance(one, DistributedDataParallel) and not _holds_parameters(one.ddp_config)]
    buffers = [buffer.grad_data for chunk in ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    largest = [torch.linalg.vector_norm(buffer, torch.inf).float() for buffer in buffers if buffer.numel()]
    if largest and bool(torch.stack(largest).any()):  # NaN is no 0 either
        raise ValueError(
            "gradients that are not 0 before the step's first micro-batch: those of an earlier step would be added to "
            "its own. Call zero_grad_buffer() of each model chunk, and the optimizer's zero_grad(), before every step; "
            "add gradients of your own after this schedule."
        )


def _holds_parameters(ddp_config: Any) -> bool:
    return ddp_config.overlap_param_gather and getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)


def check_contract(config: Any, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
    """Refuse a Megatron whose schedule or DDP scales losses in another way than the carriers for this config undo.

    Only Megatron-Core's own DDP says its scaling; of other wrappers the schedule alone is checked. All ranks of a
    context-parallel group must call it together: a schedule may reduce over them.

    Raises:
        ContractError: with the factor that a carrier relies on and the one that Megatron has.
    """
    counts: dict[Count, float | None] = {
        "num_microbatches": _NUM_MICROBATCHES,
        "dp_size": groups.dp.size(),
        "cp_size": groups.cp.size(),
    }
    rows = [row for row in carriers_of(bool(config.calculate_per_token_loss)) if row.form in ("3-tuple", "2-tuple")]
    for carrier in rows:
        factor = _schedule_factor(config, groups.cp, with_count=carrier.form == "3-tuple")
        _compare(f"schedule (forward_step_calc_loss, {carrier.form})", factor, product(carrier.schedule, counts))
    for chunk in chunks:
        for buffer in chunk.buffers if isinstance(chunk, DistributedDataParallel) else []:
            averaged = groups.dp_cp.size() if chunk.ddp_config.average_in_collective else 1
            factor = buffer.gradient_scaling_factor / averaged
            _compare("DDP (gradient_scaling_factor)", factor, product(rows[0].ddp, counts))


def _schedule_factor(config: Any, cp_group: Group, *, with_count: bool) -> float:
    """The factor that the installed schedule multiplies the loss of a 3-tuple, or of a 2-tuple, by."""
    # A copy without timers and auxiliary losses: their scales are global and the probe must not set them.
    quiet = copy.copy(config)
    for name in ("timers", "num_moe_experts", "mtp_num_layers", "experimental_attention_variant"):
        setattr(quiet, name, None)
    device = device_of(cp_group)
    count = torch.tensor(_NUM_TOKENS, dtype=torch.int32, device=device)
    try:
        loss, num_tokens = schedules.forward_step_calc_loss(
            model=None,
            output_tensor=torch.tensor(_LOSS, device=device),
            loss_func=lambda loss: (loss, count, {}) if with_count else (loss, {}),
            config=quiet,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=_NUM_MICROBATCHES,
            forward_data_store=[],
            is_last_stage=True,
            **cp_arguments(cp_group),
        )
    except Exception as error:
        raise _broken("forward_step_calc_loss", f"it could not be probed ({type(error).__name__}: {error})") from error
    if int(count) != _NUM_TOKENS:
        raise _broken("forward_step_calc_loss", "it changes the count it is given, which micro-batches share")
    if with_count and (num_tokens.is_floating_point() or int(num_tokens) != _NUM_TOKENS):
        made = f"it made {num_tokens.item()!r} ({num_tokens.dtype}) of a count of {_NUM_TOKENS} tokens"
        raise _broken("forward_step_calc_loss", f"{made}, relied on is an int")
    return float(loss) / _LOSS


def _compare(place: str, factor: float, expected: float) -> None:
    if not abs(factor - expected) <= 1e-6 * expected:
        scales = f"it scales by {factor:.9g} where {expected:.9g} is relied on"
        raise _broken(place, f"{scales}, and losses would be wrong by that")


def _broken(place: str, rule: str) -> ContractError:
    return ContractError(
        f"Megatron's {place}: {rule}. Use megatron-core 0.15 to 0.19, or a megatron_rl_loss made for this version."
    )

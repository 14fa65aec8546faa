"""The contract probe: what the *installed* Megatron does to a loss, measured before the first step.

The carriers (see `megatron_rl_loss.megatron`) undo what Megatron's schedule and DDP will do. That is Megatron's to
change, and a change would be silent: every gradient off by a constant. So a known scalar is sent through the installed
`forward_step_calc_loss`, the scaling that DDP has in force is read, and both are compared with what is relied on.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules

from megatron_rl_loss.errors import explain

_LOSS = 3.0
_NUM_TOKENS = 1
_REMEDY = "Use megatron-core 0.19, or a megatron_rl_loss made for this version"


class ContractError(ValueError):
    """The installed Megatron does not scale losses as this version of megatron_rl_loss relies on."""


def check_contract(
    config: Any, chunks: Sequence[Any], *, per_token: bool, num_microbatches: int, cp_size: int, dp_cp_size: int
) -> None:
    """Refuse a Megatron whose schedule or DDP scales losses in another way than the carriers undo.

    Relied on: the schedule multiplies a loss that comes with a count of 1 by ``1 / num_microbatches`` (by 1 with
    per-token loss) and hands the count on as an int; DDP multiplies summed gradients by ``1 / dp_cp_size`` (by 1). Only
    Megatron-Core's own DDP says its scaling; of other wrappers the schedule's part alone is checked.

    Raises:
        ContractError: with the factor that was relied on and the one that was found.
    """
    factor = _schedule_factor(config, num_microbatches, cp_size)
    _compare("schedule (forward_step_calc_loss)", factor, 1 if per_token else 1 / num_microbatches)
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in chunk.buffers:
                factor = buffer.gradient_scaling_factor
                if chunk.ddp_config.average_in_collective:
                    factor /= dp_cp_size
                _compare("DDP (gradient_scaling_factor)", factor, 1 if per_token else 1 / dp_cp_size)


def _schedule_factor(config: Any, num_microbatches: int, cp_size: int) -> float:
    """What a loss of a 3-tuple is multiplied by on its way through the installed schedule."""
    # A copy without timers and auxiliary losses: their scales are global and the probe must not set them.
    quiet = copy.copy(config)
    for name in ("timers", "num_moe_experts", "mtp_num_layers", "experimental_attention_variant"):
        setattr(quiet, name, None)
    count = torch.tensor(_NUM_TOKENS, dtype=torch.int32, device="cpu")
    given = "Megatron's forward_step_calc_loss"
    try:
        loss, returned = schedules.forward_step_calc_loss(
            model=None,
            output_tensor=torch.tensor(_LOSS, device="cpu"),
            loss_func=lambda loss: (loss, count, {}),
            config=quiet,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=num_microbatches,
            forward_data_store=[],
            cp_group_size=cp_size,
            is_last_stage=True,
        )
    except Exception as error:
        rule = f"it could not be probed ({type(error).__name__}: {error})"
        raise ContractError(explain(given, rule, _REMEDY)) from error
    if int(count) != _NUM_TOKENS:
        raise ContractError(explain(given, "it changes the count it is given, which micro-batches share", _REMEDY))
    if returned.is_floating_point() or int(returned) != _NUM_TOKENS:
        rule = f"it made {returned.item()!r} ({returned.dtype}) of a count of {_NUM_TOKENS} tokens, relied on is an int"
        raise ContractError(explain(given, rule, _REMEDY))
    return float(loss) / _LOSS


def _compare(where: str, found: float, relied_on: float) -> None:
    if not abs(found - relied_on) <= 1e-6 * relied_on:
        rule = f"it scales by {found:.9g} where {relied_on:.9g} is relied on, and losses would be wrong by that"
        raise ContractError(explain(f"Megatron's {where}", rule, _REMEDY))

"""Differences between the supported versions of Megatron-Core: 0.15 to 0.19, main and dev."""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_rl_loss.core.collectives import Group


def cp_arguments(cp_group: Group) -> dict[str, object]:
    """The CP arguments of `forward_step_calc_loss`: the group's size; Megatron's main takes the group, too."""
    parameters = inspect.signature(schedules.forward_step_calc_loss).parameters
    arguments: dict[str, object] = {"cp_group": cp_group} if "cp_group" in parameters else {}
    if "cp_group_size" in parameters or not arguments:
        arguments["cp_group_size"] = cp_group.size()
    return arguments


def remat_size(output_layer: Any) -> int:
    """Number of ranks over which GTP shards a weight further; Megatron has GTP from 0.19 on."""
    return int(getattr(output_layer, "gtp_remat_size", 1))


def has_plain_forward(output_layer: Any) -> bool:
    """True for ColumnParallelLinear's forward, and for dev's subclass, which runs it unless asked for a loss."""
    classes = [ColumnParallelLinear]
    if importlib.util.find_spec("megatron.core.transformer.linear_cross_entropy") is not None:
        from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule

        classes.append(LinearCrossEntropyModule)
    return type(output_layer).forward in [layer_class.forward for layer_class in classes]


def logged_arguments(training_log: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `training_log` by name; their order differs between versions of Megatron."""
    named = {**inspect.signature(training_log).bind(*args, **kwargs).arguments, **kwargs}
    usual = ("loss_dict", "total_loss_dict", "learning_rate", "iteration")  # where a wrapper of the user's takes any
    return {**dict(zip(usual, args, strict=False)), **named}

"""verl: its `agg_loss`, exact from explicit counts of the whole step, and the installer that puts it everywhere.

    actor_rollout_ref.model.external_lib=megatron_rl_loss.frameworks.verl_install

Importing this module imports no verl; `install` does. verl must pass global counts, as its engine does.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_int, require
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.table import find_mode
from megatron_rl_loss.modes.weights import unit_weights
from megatron_rl_loss.reduction.sums import WeightedSum
from megatron_rl_loss.step.masks import to_array
from megatron_rl_loss.step.samples import Samples

__all__ = ["Installed", "agg_loss", "check_installed", "install"]


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A micro-batch's share of the step loss, times `dp_size`: the mean over DP ranks of their sums is the step loss.

    ===========================  ===============================================================
    ``token-mean``               sum l*m / batch_num_tokens
    ``token-sum``                sum l*m
    ``seq-mean-token-sum``       sum l*m / global_batch_size
    ``seq-mean-token-sum-norm``  sum l*m / (global_batch_size * loss_scale_factor)
    ``seq-mean-token-mean``      sum over rows of (sum l*m / M_row) / global_batch_size
    ===========================  ===============================================================

    Args:
        loss_mat, loss_mask: [rows, response_length], whole rows (gathered over CP); the mask 0/1, bool or weights >= 0.
            Losses at masked positions are never looked at.
        dp_size: ranks over which gradients are averaged afterwards.
        batch_num_tokens, global_batch_size: mask tokens and sequences (masked ones too) of the whole step.
        loss_scale_factor: L of ``seq-mean-token-sum-norm``; with other modes it has no effect, as in verl.

    Returns a 0-dim tensor, at least float32, connected to the graph.

    Raises ValueError for a count that the mode needs and that is None (verl takes the micro-batch's own) or below this
    micro-batch's own, an unknown mode, other shapes; TypeError for losses that are not floats.

    Source: verl 0.9.1, verl/trainer/ppo/core_algos.py `agg_loss`.
    """
    if not loss_mat.is_floating_point():
        raise TypeError(f"loss_mat is {loss_mat.dtype}: it must be a float tensor. Pass unreduced losses.")
    if loss_mat.dim() != 2 or loss_mat.shape != loss_mask.shape:
        raise ValueError(
            f"loss_mat of shape {tuple(loss_mat.shape)}, loss_mask of shape {tuple(loss_mask.shape)}: both must be "
            "[rows, response_length]. Pass unreduced losses and their mask."
        )
    check_int("dp_size", dp_size, 1, "Pass the data-parallel size")
    if (own := find_mode(loss_agg_mode)) is not None and own.sums:
        raise ValueError(
            f"the mode {own.name} in verl: it declares sums over the whole step, which agg_loss cannot make. Fold its "
            "weights into the advantages (fold_into_advantages, with totals of the step), and use token-sum."
        )
    norm = loss_agg_mode == "seq-mean-token-sum-norm"
    if norm and loss_scale_factor is None:
        raise ValueError(
            f"{loss_agg_mode} without loss_scale_factor: verl would divide by the padded length of this micro-batch. "
            "Set actor.loss_scale_factor, e.g. to the maximal response length."
        )
    aggregation = resolve(f"verl:{loss_agg_mode}", divisor=loss_scale_factor if norm else None)
    samples = Samples(list(to_array(loss_mask)))  # one copy
    local = samples.local(0, 1)
    own_size = 1.0 if loss_agg_mode == "token-mean" else aggregation.divisor
    weights = unit_weights(local, None if own_size is None else [own_size] * len(samples))  # None: each row's own
    share = WeightedSum(weights, local, aggregation)(loss_mat)
    share = share.to(torch.promote_types(loss_mat.dtype, torch.float32)) * dp_size
    if loss_agg_mode == "token-mean":
        return share / _count("batch_num_tokens", batch_num_tokens, loss_agg_mode, float(samples.mask_sums.sum()))
    if loss_agg_mode == "token-sum":
        return share
    rows = int((samples.active_tokens > 0).sum())
    return share / _count("global_batch_size", global_batch_size, loss_agg_mode, rows)


def _count(name: str, value: float | Tensor | None, mode: str, here: float) -> float | Tensor:
    """A count of the whole step, at least this micro-batch's own; 1 for a step without anything to count."""
    remedy = "Pass the count of the whole step, over all its micro-batches and DP ranks."
    if value is None:
        raise ValueError(
            f"{mode} without {name}: verl would take this micro-batch's own, and the loss would depend on how the step "
            f"is cut. {remedy}"
        )
    require(
        value * (1 + 1e-6) >= here,  # on a device without making it wait
        lambda: f"{name} is {float(value):g} where this micro-batch alone has {here:g}",
        f"it must be the step's. {remedy}",
    )
    return torch.where(value == 0, 1, value) if isinstance(value, Tensor) else value or 1


@dataclass(frozen=True)
class Installed:
    """Modules whose `agg_loss` is this package's, and trainers, which keep verl's for a metric of a whole batch."""

    patched: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        left = f"; verl's own, for metrics, in {', '.join(self.left)}" if self.left else ""
        return f"megatron_rl_loss aggregates verl's losses in {', '.join(self.patched)}{left}."


_TRAINERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.ray_trainer",
)


def install() -> Installed:
    """Put this package's `agg_loss` into verl, and into every loaded module that took verl's by name.

    Modules that are loaded later take it from verl. The policy loss ``geo_mean``, which calls no `agg_loss`, is refused
    when it is used. A second call finds what was loaded meanwhile. Raises ValueError for a verl whose `agg_loss` has
    other parameters, ImportError without verl.
    """
    from verl.trainer.ppo import core_algos

    if core_algos.agg_loss is not agg_loss:
        theirs, ours = (tuple(inspect.signature(one).parameters) for one in (core_algos.agg_loss, agg_loss))
        if theirs != ours:
            raise ValueError(
                f"a verl whose agg_loss takes {', '.join(theirs)}: the one that this package replaces takes "
                f"{', '.join(ours)}. Use verl 0.9.1, or 1dda039b (2026-08-22), or aggregate with make_pg_loss_reducer."
            )
        core_algos.verls_own_agg_loss = core_algos.agg_loss
    for module in _modules_with(core_algos.verls_own_agg_loss):
        if module.__name__ not in _TRAINERS:
            module.agg_loss = agg_loss
    if "geo_mean" in core_algos.POLICY_LOSS_REGISTRY:
        core_algos.POLICY_LOSS_REGISTRY["geo_mean"] = _refuse_geo_mean
    return check_installed()


def check_installed() -> Installed:
    """Say where this package's `agg_loss` is active. Raises ValueError where a module but a trainer has verl's."""
    from verl.trainer.ppo import core_algos

    if core_algos.agg_loss is not agg_loss:
        raise ValueError(
            "a verl with its own agg_loss: nothing of this package is active in this process. Set "
            "model.external_lib=megatron_rl_loss.frameworks.verl_install, or call install() of "
            "megatron_rl_loss.frameworks.verl."
        )
    left = sorted(module.__name__ for module in _modules_with(core_algos.verls_own_agg_loss))
    if own := [name for name in left if name not in _TRAINERS]:
        raise ValueError(
            f"verl's own agg_loss in {', '.join(own)}: a loss there would depend on how the step is cut. Call "
            "install() of megatron_rl_loss.frameworks.verl once they are loaded."
        )
    patched = sorted(module.__name__ for module in _modules_with(agg_loss) if module.__name__ != __name__)
    return Installed(tuple(patched), tuple(left))


def _modules_with(function: Any) -> list[Any]:
    """Loaded modules that know the function as `agg_loss`."""
    modules = {id(module): module for module in list(sys.modules.values())}
    return [module for module in modules.values() if getattr(module, "__dict__", {}).get("agg_loss") is function]


def _refuse_geo_mean(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "the policy loss geo_mean: it averages the sequences of each micro-batch by itself and never calls agg_loss, "
        "so it depends on how the step is cut. Choose another policy_loss.loss_mode (gspo is a mean over sequences "
        "too), or drop model.external_lib."
    )

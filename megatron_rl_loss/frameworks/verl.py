"""verl: its `agg_loss`, exact from explicit counts of the whole step, and the installer that puts it everywhere.

    actor_rollout_ref.model.external_lib=megatron_rl_loss.frameworks.verl_install

Importing this module imports no verl; `install` does. verl must pass global counts, as its engine does.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_int, require
from megatron_rl_loss.frameworks.replacing import Function, Replaced
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.weights import unit_weights
from megatron_rl_loss.reduction.sums import WeightedSum
from megatron_rl_loss.step.masks import to_array
from megatron_rl_loss.step.samples import Samples

__all__ = ["agg_loss", "install"]


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


_TRAINERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.ray_trainer",
)
_CUT = {
    "geo_mean": "averages the sequences of each micro-batch by itself",
    "clip_cov": "chooses its tokens anew in each micro-batch",
    "kl_cov": "chooses its tokens anew in each micro-batch",
}
_calls = 0


def install() -> Replaced:
    """Put this package's `agg_loss` into verl, and into every loaded module that took verl's, by whatever name.

    Trainers keep verl's for a metric of a whole batch. Modules that are loaded later take ours from verl; a second call
    finds what was loaded meanwhile. With per-token loss verl's Megatron engine then gives Megatron every token. Refused
    when used: policy losses that depend on how the step is cut, and a loss a term of which does not call `agg_loss`.

    Raises ValueError for a verl whose functions have other parameters, ImportError without verl.
    """
    replaced = _replace()
    replaced.put_everywhere()
    return replaced


@cache
def _replace() -> Replaced:
    from verl.trainer.ppo import core_algos

    losses = importlib.import_module("verl.workers.utils.losses")
    parameters = tuple(inspect.signature(agg_loss).parameters)
    functions = [
        Function(core_algos, "agg_loss", parameters, _aggregate, lambda module: module not in _TRAINERS),
        Function(core_algos, "get_policy_loss_fn", ("name",), _uncut, bool),
        Function(losses, "ppo_loss", ("config", "model_output"), partial(_checked, _terms_of_ppo), bool),
        Function(losses, "value_loss", (), partial(_checked, lambda given: 1), bool),
    ]
    try:
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine
    except ImportError:  # no Megatron: its engine cannot run here
        pass
    else:
        needed = ("self", "data", "forward_only", "loss_function")
        functions.append(Function(Engine, "postprocess_micro_batch_func", needed, _with_every_token))
    return Replaced("verl", "0.9.1, or 1dda039b (2026-08-22)", functions)


def _aggregate(stock: Callable[[], Any], given: dict[str, Any]) -> Tensor:
    global _calls
    _calls += 1
    return agg_loss(**given)


def _checked(terms: Callable[[dict[str, Any]], int], stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """verl's loss; refuses one of fewer calls of `agg_loss` than it has terms."""
    before = _calls
    returned = stock()
    if (calls := _calls - before) < terms(given):
        raise ValueError(
            f"a loss of {terms(given)} terms and {calls} calls of agg_loss: a term is aggregated otherwise, and may "
            "depend on how the step is cut. Use a policy loss that calls core_algos.agg_loss, or drop "
            "model.external_lib."
        )
    return returned


def _terms_of_ppo(given: dict[str, Any]) -> int:
    return 1 + (given["model_output"].get("entropy") is not None) + bool(given["config"].use_kl_loss)


def _uncut(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    if given["name"] in _CUT:
        raise ValueError(
            f"the policy loss {given['name']}: it {_CUT[given['name']]}, so it depends on how the step is cut. Choose "
            "another policy_loss.loss_mode (gspo is a mean over sequences too), or drop model.external_lib."
        )
    return stock()


def _with_every_token(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """The engine's return value; with per-token loss its CP ranks share out a micro-batch's tokens without rest.

    verl's own count is rounded down on each of them, and Megatron divides by the sum.
    """
    loss, *tokens, output = stock()
    engine = given["self"]
    if not tokens or engine.engine_config.dynamic_context_parallel:
        return loss, *tokens, output
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    share = (engine._routed_num_tokens(given["data"]) + size - 1 - rank) // size
    return loss, share.to(tokens[0]), output

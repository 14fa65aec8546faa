"""SkyRL on Megatron: any mode for the policy loss, KL penalty, entropy bonus and MTP loss, by a policy loss.

    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from megatron_rl_loss.frameworks.skyrl import AggregatedPolicyLoss

    PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", "prompt_mean", kl="token_mean"))
    # trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=token_mean

SkyRL adds up the policy loss of a mini-batch, and averages other terms over each micro-batch, then over a rank's
micro-batches that hold samples, then over ranks. Here a term is the sum of weight * loss times the number of those
micro-batches and ranks, so its mean is exact. Weights travel as further planes of the advantages. A prompt is its
tokens, those that are real and not response. Imports no SkyRL.
Source: SkyRL a9564572, workers/megatron/megatron_model_wrapper.py (forward_backward_mini_batch), worker_utils.py.
"""

import copy
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.frameworks.columns import MEDIA, plan_of, prompts_of, samples_of
from megatron_rl_loss.frameworks.replacing import Function, Replaced
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

__all__ = ["AggregatedPolicyLoss"]
_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_INSTALLED: list[Replaced] = []
_PLANES: list[Tensor] = []  # weights of the micro-batch whose loss is being computed: of KL, entropy, MTP depths


class AggregatedPolicyLoss:
    """One of SkyRL's policy losses, in a mode; the other terms of the loss follow it, or their own.

    Args:
        loss: its name in SkyRL's registry, such as ``regular``.
        mode, divisor, units: of the policy loss, as in `make_pg_loss_reducer`.
        kl, entropy, mtp: the modes of these terms; default: that of the policy loss.

    Raises:
        ValueError, TypeError: settings that are unusable; a SkyRL without the functions that are replaced.
        BadBatchError: on every rank, when a step is trained on: another ``loss_reduction`` than ``token_mean``; packed
            rows of several samples; a mini-batch of more than one call; a mode by prompt with images.
    """

    def __init__(
        self, loss: str, mode: str | Mode | ModeFunction, *, divisor: float | None = None,
        units: UnitCounting | None = None, kl: str | None = None, entropy: str | None = None, mtp: str | None = None,
    ) -> None:  # fmt: skip
        from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

        terms = {"kl": kl, "entropy": entropy, "mtp": mtp}
        self._modes = LossModes.resolve(mode, divisor=divisor, units=units, terms=terms)
        self._name, self._loss = loss, PolicyLossRegistry.get(loss)
        _install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _install()

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, config: Any, **inputs: Any) -> Any:
        """SkyRL's loss of that name, of a micro-batch; the terms that SkyRL computes after it have its weights."""
        if advantages.dim() != 3:
            raise ValueError(
                "a mini-batch without weights: they come with SkyRL's MegatronModelWrapper. Set "
                "trainer.strategy=megatron."
            )
        policy, *_PLANES[:] = advantages
        config = copy.copy(config)
        config.policy_loss_type = self._name
        return self._loss(log_probs, old, policy[:, -log_probs.shape[1] :], config=config, **inputs)

    def weigh(self, wrapper: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a mini-batch, with weighed advantages and a plane of weights for each other term."""
        from megatron.core import mpu
        from megatron.core.utils import get_model_config

        depths = [f"mtp {i}" for i in range(get_model_config(wrapper.actor_module[0]).mtp_num_layers or 0)]
        group, modes = mpu.get_data_parallel_group(with_context_parallel=False), self._modes
        plan = plan_of(modes, lambda: [self._describe(wrapper, batch, depths) for batch in batches], group, depths)
        tokens = max(plan.totals.step_tokens or 0, 1)  # by which SkyRL has divided advantages
        shares = group.size() * max(1, batches[0].get("num_real_microbatches", len(batches)))
        weighed = []
        for batch, microbatch in zip(batches, plan, strict=True):
            mask, planes = _in_row(batch, "loss_mask"), []
            for term, of_term in [("policy", None), ("kl", None), ("entropy", None), *(("mtp", one) for one in depths)]:
                local = microbatch.samples.with_mask(of_term).local(0, 1)
                weights = weigh(modes.terms.get(term, modes.policy), local, plan.totals.with_mask(of_term))
                outside = 0.0 if of_term is None else math.nan  # where a depth of MTP has no token
                weights[torch.from_numpy(local.mask) == 0] = outside
                plane = mask.new_full(mask.shape, outside, dtype=torch.float32)
                plane[_held(batch)] = weights.to(mask.device).view(-1, mask.shape[1])
                planes.append(plane * (tokens * _in_row(batch, "advantages") if term == "policy" else shares))
            for plane in planes[:2]:  # SkyRL multiplies these losses by the mask
                plane /= mask.where(mask != 0, 1)
            weighed.append({**batch, "advantages": torch.stack(planes)})
        return weighed

    def _describe(self, wrapper: Any, batch: dict[str, Any], depths: list[str]) -> Samples:
        if wrapper.cfg.algorithm.loss_reduction != "token_mean":
            raise ValueError(
                f"loss_reduction={wrapper.cfg.algorithm.loss_reduction} beside a loss aggregation: the advantages are "
                "divided by the mini-batch's tokens first. Set trainer.algorithm.loss_reduction=token_mean."
            )
        if batch.get("sub_seq_lengths") is not None or wrapper._pending_grad_sync is not None:
            raise ValueError(
                "rows of several samples, or gradients of another call: a mini-batch must be one call of "
                "forward_backward, a row per sample. Leave sequences unpacked, and call optim_step after each."
            )
        held = _held(batch)
        ids, real, masks, response = (
            rows[held]
            for rows in (
                batch["sequences"], batch["attention_mask"] != 0, _in_row(batch, "loss_mask"),
                _in_row(batch, "response_mask"),
            )
        )  # fmt: skip
        further = {}
        for shift, name in enumerate(depths, 1):  # where a token and the one that is predicted are real
            further[name] = list(pad(real[:, :-shift] & real[:, shift:], (0, shift)))
        prompts = prompts_of(ids, real & (response == 0)) if batch.get("pixel_values") is None else MEDIA
        return samples_of(self._modes, [list(masks)], [prompts], term_masks=further)[0]


def _in_row(batch: dict[str, Any], name: str) -> Tensor:
    """Values of actions, which are the last tokens of a row, beside all its tokens."""
    return pad(batch[name], (batch["sequences"].shape[1] - batch[name].shape[1], 0))


def _held(batch: dict[str, Any]) -> Tensor:
    """The rows that are samples: a row that SkyRL adds has one real token and an empty mask."""
    held: Tensor = (batch["attention_mask"].sum(-1) > 1) | (batch["loss_mask"] != 0).any(-1)
    return held


def _install() -> None:
    """Replace SkyRL's functions, once; nothing where no Megatron worker was imported."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or _INSTALLED:
        return
    entropies = ("vocab_parallel_entropy_packed_sequences", "from_parallel_hidden_to_entropy_packed_sequences")
    drafts = ["mask", "global_normalization_factor"]
    functions = [
        Function(module.MegatronModelWrapper, "forward_backward_mini_batch", ["micro_batches", "loss_fn"], _mini_batch),
        Function(module, "masked_mean", ["tensor", "mask", "dim"], _mean),
        *(Function(module, name, ["loss_mask"], _entropy) for name in entropies),
        Function(module, "shift_mask_for_mtp", ["mask", "mtp_layer_number"], _shift),
        *(Function(module, name, drafts, _draft) for name in ("draft_soft_ce", "draft_soft_ce_topk")),
    ]
    _INSTALLED.append(Replaced("SkyRL", "a9564572 or 0.4.0", functions))


def _mini_batch(stock: Any, given: dict[str, Any]) -> Any:
    by_name, losses = given.get("loss_fn"), sys.modules[_MODULE].PolicyLossRegistry
    loss = given["self"].policy_loss_fn if by_name is None else losses.get(by_name)
    if hasattr(loss, "weigh"):
        given["micro_batches"] = loss.weigh(given["self"], given["micro_batches"])
    try:
        return stock()
    finally:
        _PLANES.clear()


def _mean(stock: Any, given: dict[str, Any]) -> Any:
    if not _PLANES:
        return stock()
    values, is_entropy = given["tensor"], given.get("dim") is None
    weights = _PLANES[is_entropy][:, -values.shape[1] :]
    return (values * weights).sum() if is_entropy else (values * weights).sum(given["dim"]) * len(values)


def _entropy(stock: Any, given: dict[str, Any]) -> Any:
    if not _PLANES:
        return stock()
    weights = _PLANES[1][:, -given["loss_mask"].shape[1] :]
    total = weights.sum()  # what SkyRL's function divides by is then 1
    given["loss_mask"] = weights / total.where(total != 0, 1)
    whole, mine = (value * total for value in stock())
    return whole, whole.detach() + mine - mine.detach()  # the gradient is that of this CP rank's tokens


def _shift(stock: Any, given: dict[str, Any]) -> Any:
    shifted = stock()
    if not _PLANES:
        return shifted
    weights = _PLANES[2 + given.get("mtp_layer_number", 0)]
    column = torch.zeros_like(shifted, dtype=torch.float32)
    column[shifted != 0] = weights[~weights.isnan()]
    return column


def _draft(stock: Any, given: dict[str, Any]) -> Any:
    if _PLANES:
        given["global_normalization_factor"] = given["mask"].new_ones(())
    return stock()

"""SkyRL on Megatron: any mode for the policy loss, KL penalty, entropy bonus and MTP loss, by a policy loss.

    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from megatron_rl_loss.frameworks.skyrl import AggregatedPolicyLoss

    PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", "prompt_mean", kl="token_mean"))
    # trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=token_mean

SkyRL adds up the policy loss of a mini-batch, and averages other terms and metrics over each micro-batch, then over a
rank's micro-batches that hold samples, then over ranks. Here a term is the sum of weight * loss times the number of
those micro-batches and ranks, so its mean is exact. Imports no SkyRL.
Source: SkyRL a9564572, workers/megatron/megatron_model_wrapper.py (forward_backward_mini_batch), worker_utils.py.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.frameworks.columns import check_text, plan_of
from megatron_rl_loss.frameworks.skyrl_install import WEIGHTS, install
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

__all__ = ["AggregatedPolicyLoss"]


class AggregatedPolicyLoss:
    """One of SkyRL's policy losses, in a mode; the other terms of the loss follow it, or their own.

    Args:
        loss: its name in SkyRL's registry, such as ``regular``.
        mode, divisor, units: of the policy loss, as in `make_pg_loss_reducer`. Prompts are told apart by their tokens.
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
        install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        install()

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, config: Any, **inputs: Any) -> Any:
        """SkyRL's loss of that name, of a micro-batch."""
        if not hasattr(inputs["loss_mask"], WEIGHTS):
            raise ValueError(
                "a mini-batch without weights: they come with SkyRL's MegatronModelWrapper. Set "
                "trainer.strategy=megatron."
            )
        config = copy.copy(config)
        config.policy_loss_type = self._name
        return self._loss(log_probs, old, advantages, config=config, **inputs)

    def weigh(self, wrapper: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a mini-batch, with weighed advantages and the weights of the other terms."""
        from megatron.core import mpu
        from megatron.core.utils import get_model_config

        depths = [f"mtp {i}" for i in range(get_model_config(wrapper.actor_module[0]).mtp_num_layers or 0)]
        group, modes = mpu.get_data_parallel_group(with_context_parallel=False), self._modes
        plan = plan_of(modes, lambda: [self._describe(wrapper, batch, depths) for batch in batches], group, depths)
        totals = plan.totals
        tokens, rollouts = max(totals.step_tokens or 0, 1), max(totals.units["rollout"].all or 0, 1)
        device, shares = (
            batches[0]["loss_mask"].device,
            group.size() * max(1, batches[0].get("num_real_microbatches", len(batches))),
        )

        def weights_of(term: str, samples: Samples, mask: str | None = None) -> Tensor:
            local = samples.with_mask(mask).local(0, 1)
            weights = weigh(modes.terms.get(term, modes.policy), local, totals.with_mask(mask))
            return (weights if mask is None else weights[local.mask != 0]).to(device)

        weighed = []
        for batch, microbatch in zip(batches, plan, strict=True):
            mask, samples = batch["loss_mask"], microbatch.samples
            columns = {name: mask.new_zeros(mask.shape, dtype=torch.float32) for name in ("policy", "kl", "entropy")}
            for name, column in columns.items():
                rows = weights_of(name, samples).view(len(samples), batch["attention_mask"].shape[1])
                column[_held(batch)] = rows[:, -mask.shape[1] :]
            of_policy, of_kl = (columns[name] / mask.where(mask != 0, 1) for name in ("policy", "kl"))
            weights = {
                "kl": of_kl * shares,
                "entropy": columns["entropy"] * shares,
                "mtp": [weights_of("mtp", samples, depth) * shares for depth in depths],
                "tokens": float(samples.mask_sums.sum()) * shares / tokens,
                "rows": len(mask) * shares / rollouts,
            }  # SkyRL has divided advantages by the tokens
            weighed.append({**batch, "advantages": batch["advantages"] * of_policy * tokens, WEIGHTS: weights})
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
        held, real = _held(batch), batch["attention_mask"] != 0
        start = real.shape[1] - batch["loss_mask"].shape[1]
        masks = torch.nn.functional.pad(batch["loss_mask"], (start, 0))[held]
        further = {}
        for shift, name in enumerate(depths, 1):  # where a token and the one that is predicted are real
            both = real[held, :-shift] & real[held, shift:]
            further[name] = list(torch.nn.functional.pad(both, (0, shift)))
        prompts = [str(ids) for ids in batch["sequences"][held, :start].tolist()]
        samples = Samples(list(masks), prompt_ids=prompts, term_masks=further)
        check_text(self._modes, [samples], batch.get("pixel_values") is not None)
        return samples


def _held(batch: dict[str, Any]) -> Tensor:
    """The rows that are samples: a row that SkyRL adds has one real token and an empty mask."""
    held: Tensor = (batch["attention_mask"].sum(-1) > 1) | (batch["loss_mask"] != 0).any(-1)
    return held

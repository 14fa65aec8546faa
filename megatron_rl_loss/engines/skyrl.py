"""SkyRL on Megatron: any mode for the policy loss, KL penalty, entropy bonus and MTP loss, by a policy loss.

    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from megatron_rl_loss.engines.skyrl import AggregatedPolicyLoss

    PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", "prompt_mean", kl="token_mean"))
    # trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=token_mean

SkyRL sums the policy loss over a mini-batch. SkyRL averages other terms over each micro-batch, then over a rank's
micro-batches with samples, then over ranks. This adapter multiplies the sum of weight * loss of such a term by the
number of those micro-batches and ranks, so that SkyRL's mean is exact. Weights travel as further planes of the
advantages. Prompts are identified by their tokens. The first step is proved when gradients are finalised.
Source: SkyRL a9564572, workers/megatron/megatron_model_wrapper.py (forward_backward_mini_batch), worker_utils.py.
"""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.taps import tap
from megatron_rl_loss.engines.columns import MEDIA, at_masked_tokens, plan_of, prompts_of, samples_of
from megatron_rl_loss.engines.log_prob_gradients import tap_output
from megatron_rl_loss.engines.places import wrapped
from megatron_rl_loss.engines.policy_tap import LossPaths, WeighedMicrobatch, tap_policy, tap_sum
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, installed
from megatron_rl_loss.extend import LossModes, ModeFunction, Promises, UnitCounting, is_observed, observed_taps, weigh

__all__ = ["AggregatedPolicyLoss"]
_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_VERSIONS = "a9564572 or 0.4.0"
_PROMPT_IDS = 2**53  # that many fit into float64


_LOSS = LossPaths("log_probs", "advantages", {"old_log_probs": "old", "rollout_logprobs?": "old"})


class _Microbatch(NamedTuple):
    """The micro-batch whose loss is being computed: `Replaced.now`.

    Attributes:
        planes: weights of KL, entropy and each MTP depth, [rows, tokens].
        masks: those of the mini-batch, [rows, tokens], whatever masks SkyRL's functions get.
        ids: of each row's prompt; -1 for rows that are no samples, NaN where prompts are not known.
        coefs: of the terms, by name.
        drafts: the MTP depths so far, each with its samples.
    """

    modes: LossModes
    planes: Sequence[Tensor]
    masks: Tensor
    ids: Tensor
    coefs: dict[str, float]
    drafts: list[tuple[str, Samples]]

    def facts(self, term: str) -> dict[str, Any]:
        """Coefficient and aggregation that the tap of a term declares."""
        name = term.partition(" ")[0]
        return {"coef": self.coefs[name], "aggregation": self.modes.terms.get(name, self.modes.policy)}

    def of_responses(self, width: int, **layout: Any) -> Samples:
        """Samples of the last tokens of each row."""
        return self.samples(self.masks[:, -width:], **layout)

    def samples(self, masks: Tensor | Sequence[Tensor], **layout: Any) -> Samples:
        """Samples of these masks, one mask for each row."""
        bounds = list(accumulate(map(len, masks), initial=0))
        held = (self.ids != -1).tolist()
        ids = None if self.ids.isnan().any() else [int(number) for number in self.ids.tolist() if number >= 0]
        of_samples = [mask.float() for mask, is_sample in zip(masks, held, strict=True) if is_sample]
        slots = Gathered(bounds, filler_slots=held.count(False), **layout)
        return Samples(of_samples, layout=slots, prompt_ids=ids, labels={"row": range(len(of_samples))})


class AggregatedPolicyLoss:
    """One of SkyRL's policy losses, in a mode; other terms of the loss follow the same mode, or their own.

    Args:
        loss: its name in SkyRL's registry, such as ``regular``.
        mode, divisor, units: of the policy loss, as in `make_pg_loss_reducer`.
        group_size: ``generator.n_samples_per_prompt``, which the proof compares.
        kl, entropy, mtp: the modes of these terms; default: that of the policy loss.

    Raises:
        ValueError, TypeError: unusable settings; a SkyRL without the functions that are replaced.
        BadBatchError: on every rank, in a step: another ``loss_reduction`` than ``token_mean``; packed rows of several
            samples; a mini-batch of more than one call; a mode by prompt with images; a first step in which a token
            has a weight that the mode does not ask for.
    """

    def __init__(
        self, loss: str, mode: str | Mode | ModeFunction, *, divisor: float | None = None,
        units: UnitCounting | None = None, kl: str | None = None, entropy: str | None = None, mtp: str | None = None,
        group_size: int | None = None,
    ) -> None:  # fmt: skip
        from skyrl.backends.skyrl_train.utils import ppo_utils

        terms = {"kl": kl, "entropy": entropy, "mtp": mtp}
        self._modes = LossModes.resolve(mode, divisor=divisor, units=units, terms=terms)
        self._group_size = group_size
        self._name, self._loss = loss, ppo_utils.PolicyLossRegistry.get(loss)
        ones, mask = torch.ones(2, 3), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
        shares = ppo_utils.apply_loss_reduction_to_advantages_minibatch(ones, mask, "token_mean", 1, 3)
        if not torch.equal(shares, ones / 5):
            raise ValueError(
                f"SkyRL's token_mean turns advantages of 1 over 5 tokens into {shares.tolist()}: each must be 1/5. Use "
                f"SkyRL {_VERSIONS}."
            )
        _install(self._modes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _install(self._modes)

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, config: Any, **inputs: Any) -> Any:
        """SkyRL's loss of that name for a micro-batch; terms that SkyRL computes afterwards use the same planes."""
        if advantages.dim() != 3 and _MODULE in sys.modules and installed("SkyRL") is None:
            raise ValueError(
                "a mini-batch without weights: this worker took the loss from SkyRL's registry before it imported "
                f"MegatronModelWrapper, which adds the weights. Import {_MODULE} first."
            )
        if advantages.dim() != 3:
            raise ValueError(
                "a mini-batch without weights: SkyRL's MegatronModelWrapper adds the weights. Set "
                "trainer.strategy=megatron."
            )
        width = log_probs.shape[1]
        theirs, factors, *planes, masks, ids = advantages
        factors, planes = factors[:, -width:].float(), [plane.float() for plane in planes]
        config = copy.copy(config)
        config.policy_loss_type = self._name
        coefs = {"kl": config.kl_loss_coef, "entropy": -config.entropy_loss_coef, "mtp": self._mtp_coef}
        now = _Microbatch(self._modes, planes, masks, ids[:, 0], coefs, [])
        installed("SkyRL").now = now

        def tapped(stock: Any, arguments: dict[str, Any]) -> Any:
            def describe() -> WeighedMicrobatch:
                trial = at_masked_tokens(masks[:, -width:], factors, plain)
                return WeighedMicrobatch(now.of_responses(width), *trial, temperature=self._temperature)

            return tap_policy(_LOSS, stock, arguments, describe)

        plain = theirs[:, -width:].float()
        return wrapped(self._loss, tapped)(log_probs, old, plain * factors, config=config, **inputs)

    def weigh(self, wrapper: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a mini-batch, with weighed advantages and a plane of weights for each other term."""
        from megatron.core import mpu
        from megatron.core.utils import get_model_config

        depths = [f"mtp {i}" for i in range(get_model_config(wrapper.actor_module[0]).mtp_num_layers or 0)]
        self._expect(wrapper, depths)
        group, modes = mpu.get_data_parallel_group(with_context_parallel=False), self._modes
        plan = plan_of(modes, lambda: [self._describe(wrapper, batch, depths) for batch in batches], group, depths)
        tokens = max(plan.totals.step_tokens, 1)  # by which SkyRL has divided advantages
        shares = group.size() * max(1, batches[0].get("num_real_microbatches", len(batches)))
        weighed = []
        for batch, microbatch in zip(batches, plan, strict=True):
            mask, planes = _in_row(batch, "loss_mask"), []
            for term, of_term in [
                ("policy", None),
                ("kl", None),
                ("entropy", None),
                *(("mtp", depth) for depth in depths),
            ]:
                local = microbatch.samples.with_mask(of_term).local(0, 1)
                weights = weigh(modes.terms.get(term, modes.policy), local, plan.totals.with_mask(of_term))
                outside = 0.0 if of_term is None else math.nan  # where a depth of MTP has no token
                weights[torch.from_numpy(local.mask == 0)] = outside
                plane = mask.new_full(mask.shape, outside, dtype=torch.float32)
                plane[_held(batch)] = weights.to(mask.device).view(-1, mask.shape[1])
                planes.append(plane if term == "policy" else plane * shares)
            planes[0] /= mask.where(mask != 0, 1)  # SkyRL multiplies this loss by the mask
            ids = torch.full(mask.shape, -1, dtype=torch.float64, device=mask.device)
            prompts = torch.from_numpy(microbatch.samples.ids["prompt"] % _PROMPT_IDS).double()
            ids[_held(batch), 0] = prompts if batch.get("pixel_values") is None else math.nan
            planes = [tokens * _in_row(batch, "advantages"), *planes, mask, ids]
            weighed.append({**batch, "advantages": torch.stack([plane.double() for plane in planes])})
        return weighed

    def _expect(self, wrapper: Any, depths: Sequence[str]) -> None:
        """Tell the proof of the first step which terms must appear. Fused heads hand the schedule no logits."""
        proof, algorithm = installed("SkyRL").proof, wrapper.cfg.algorithm
        self._temperature: float | None = None if getattr(wrapper, "_fused_lm_head", False) else 1.0
        self._mtp_coef = wrapper.cfg.policy.megatron_config.mtp_loss_weight / max(1, len(depths))
        has_kl = algorithm.use_kl_loss and algorithm.kl_loss_coef
        has_entropy = algorithm.use_entropy_loss and algorithm.entropy_loss_coef
        installed("SkyRL").add(["entropy", "kl"] * bool(has_kl or has_entropy) + ["mtp"] * bool(depths))
        proof.asked, proof.promises = self._modes.policy, Promises(self._group_size)
        proof.terms = ["pg", *["kl"] * bool(has_kl), *["entropy"] * bool(has_entropy), *depths]

    def _describe(self, wrapper: Any, batch: dict[str, Any], depths: list[str]) -> Samples:
        if wrapper.cfg.algorithm.loss_reduction != "token_mean":
            raise ValueError(
                f"loss_reduction={wrapper.cfg.algorithm.loss_reduction} with a loss aggregation: SkyRL must "
                "divide advantages by the mini-batch's tokens. Set trainer.algorithm.loss_reduction=token_mean."
            )
        if batch.get("sub_seq_lengths") is not None or wrapper._pending_grad_sync is not None:
            raise ValueError(
                "rows of several samples, or gradients of another call: a mini-batch must be one forward_backward call "
                "with one sample per row. Leave sequences unpacked, and call optim_step after each forward_backward."
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
    """Values of actions, the last tokens of a row, padded to the whole row."""
    return pad(batch[name], (batch["sequences"].shape[1] - batch[name].shape[1], 0))


def _held(batch: dict[str, Any]) -> Tensor:
    """The rows that are samples: a row that SkyRL adds has one real token and an empty mask."""
    held: Tensor = (batch["attention_mask"].sum(-1) > 1) | (batch["loss_mask"] != 0).any(-1)
    return held


def _install(modes: LossModes) -> None:
    """Replace SkyRL's functions once, in a process that imported the Megatron worker."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or installed("SkyRL") is not None:
        return
    log_probs = ("from_parallel_logits_to_logprobs", "from_parallel_logits_to_logprobs_packed_sequences")
    entropies = ("vocab_parallel_entropy_packed_sequences", "from_parallel_hidden_to_entropy_packed_sequences")
    drafts = ["mask", "global_normalization_factor"]
    functions = [
        Function(module.MegatronModelWrapper, "forward_backward_mini_batch", ["micro_batches", "loss_fn"], _mini_batch),
        *(Function(module, name, ["vocab_parallel_logits"], _log_probs) for name in log_probs),
    ]
    of_terms = {
        "kl": [Function(module, "masked_mean", ["tensor", "mask", "dim"], _in_microbatch(_mean))],
        "entropy": [Function(module, name, ["loss_mask"], _in_microbatch(_entropy)) for name in entropies],
        "mtp": [
            Function(module, "shift_mask_for_mtp", ["mask", "mtp_layer_number", "cu_seqlens"], _in_microbatch(_shift)),
            *(
                Function(module, name, drafts, _in_microbatch(_draft))
                for name in ("draft_soft_ce", "draft_soft_ce_topk")
            ),
        ],
    }
    replaced = Replaced("SkyRL", _VERSIONS, functions)
    replaced.later = of_terms
    replaced.proof = prove(
        "SkyRL",
        modes.policy,
        beside="SkyRL's division of advantages by tokens is not measured; SkyRL aggregates MoE losses",
        never="SkyRL trained with another loss. Register ours, and set trainer.algorithm.policy_loss_type to its name.",
        is_ours=lambda: not isinstance(replaced.now, str),
    )


def _mini_batch(stock: Any, arguments: dict[str, Any]) -> Any:
    by_name, losses, replaced = arguments.get("loss_fn"), sys.modules[_MODULE].PolicyLossRegistry, installed("SkyRL")
    loss = arguments["self"].policy_loss_fn if by_name is None else losses.get(by_name)
    if hasattr(loss, "weigh"):
        arguments["micro_batches"] = loss.weigh(arguments["self"], arguments["micro_batches"])
    else:
        replaced.now = by_name  # of another loss that the call asks for
    try:
        return stock()
    finally:
        replaced.now = None


def _in_microbatch(call: Callable[..., Any]) -> Callable[[Any, dict[str, Any]], Any]:
    """The call, with the current micro-batch of our loss; without one, SkyRL's function unchanged."""
    return lambda stock, arguments: (
        call(stock, arguments, now) if isinstance(now := installed("SkyRL").now, _Microbatch) else stock()
    )


def _log_probs(stock: Any, arguments: dict[str, Any]) -> Any:
    arguments["vocab_parallel_logits"] = tap_output(arguments["vocab_parallel_logits"])
    return stock()


def _mean(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    values, mask = arguments["tensor"], arguments["mask"]
    term = "entropy" if arguments.get("dim") is None else "kl"
    weights = now.planes[term == "entropy"][:, -values.shape[1] :]
    if term == "kl":  # SkyRL has multiplied it by the mask
        values = values / mask.where(mask != 0, 1)
    if taps := observed_taps():
        tap(values, term, samples=now.of_responses(values.shape[1]), **now.facts(term))
        if (tapped := taps.find(values)) is not None:
            tapped.at_log_probs = term == "kl"
    return (values * weights).sum() if term == "entropy" else (values * weights).sum(arguments["dim"]) * len(values)


def _entropy(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    mask = arguments["loss_mask"]
    weights = now.planes[1][:, -mask.shape[1] :]
    total = weights.sum()  # what SkyRL's function divides by is then 1
    arguments["loss_mask"] = weights / total.where(total != 0, 1)
    whole, mine = (value * total for value in stock())
    if is_observed():  # each CP rank has the gradient of its own tokens
        samples = now.of_responses(mask.shape[1], backward="slice")
        tap_sum(mine, weights, "entropy", samples=samples, **now.facts("entropy"))
    return whole, whole.detach() + mine - mine.detach()  # the gradient is that of this CP rank's tokens


def _shift(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    shifted, depth, bounds = stock(), arguments.get("mtp_layer_number", 0), arguments.get("cu_seqlens")
    weights = now.planes[2 + depth]
    column = torch.zeros_like(shifted, dtype=torch.float32)
    column[shifted != 0] = weights[~weights.isnan()]
    if is_observed():
        rows = shifted if bounds is None else [shifted[0, begin:end] for begin, end in pairwise(bounds.tolist())]
        now.drafts.append((f"mtp {depth}", now.samples(rows)))
    return column


def _draft(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    arguments["global_normalization_factor"] = arguments["mask"].new_ones(())
    loss = stock()
    if is_observed() and now.drafts:
        term, samples = now.drafts[-1]
        tap_sum(loss, arguments["mask"], term, samples=samples, **now.facts(term))
    return loss

"""SkyRL on Megatron: KL penalty, entropy bonus and MTP loss in any mode; the policy loss as SkyRL's trainer weighs it.

    PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular"))
    # trainer.algorithm.policy_loss_type=mine, and any trainer.algorithm.loss_reduction but token_mean_legacy

Over all tokens t of a mini-batch, with weights w of the mode that `loss_reduction` names, or of the term's own:

    policy loss      sum_t m_t * pg(w_t * A_t)        SkyRL's: its trainer makes w_t * A_t, its workers sum the losses
    KL penalty       kl_loss_coef * sum_t w_t * kl_t
    entropy bonus    -entropy_loss_coef * sum_t w_t * H_t
    MTP loss         mtp_loss_weight / D * sum_d sum_t w_dt * ce_dt, of D depths d

SkyRL averages the last three over each micro-batch, then over a rank's micro-batches with samples, then over ranks. So
their weights are multiplied by the number of these micro-batches and ranks. Prompts are identified by their tokens.
Source: SkyRL a9564572, workers/megatron/megatron_model_wrapper.py (forward_backward_mini_batch), train/trainer.py.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss.core.layouts import Gathered
from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.taps import tap
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.loss_trials import LossPaths, WeighedMicrobatch, tap_sum
from megatron_rl_loss.engines.places import wrapped
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.prompt_tokens import MEDIA, check_prompts, prompt_texts
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, installed
from megatron_rl_loss.engines.skyrl_trainer import ASK, VERSIONS, Division, mode_of_trainer, response_tokens
from megatron_rl_loss.engines.weighed_batches import step_plan
from megatron_rl_loss.extend import (
    Aggregation,
    LossModes,
    ModeFunction,
    Promises,
    is_observed,
    observed_taps,
    part_of_loss,
    resolve,
    tap_output,
)

__all__ = ["AggregatedPolicyLoss"]
_WORKER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_SUM = resolve("token_sum", divisor=1)  # what SkyRL's workers make of losses of weighed advantages
#: Trials as small as weighed advantages, so that a loss that is not linear in these is seen.
_LOSS = LossPaths("log_probs", "advantages", {"old_log_probs": "old", "rollout_logprobs?": "old"}, size=2.0**-6)


@dataclass
class _Microbatch:
    """The micro-batch whose loss is being computed: `Replaced.now`.

    Attributes:
        batch: SkyRL's.
        coefs: of the terms, by name.
        temperature: 1; None with a fused head, which hands the schedule no logits.
        weights: of KL and entropy, at response tokens, and of each MTP depth, at all tokens: [rows * tokens].
        drafts: the MTP depths so far, each with its samples.
    """

    batch: dict[str, Any]
    modes: LossModes
    coefs: dict[str, float]
    temperature: float | None
    weights: dict[str, Tensor] = field(default_factory=dict)
    drafts: list[tuple[str, Samples]] = field(default_factory=list)

    def samples(self, term: str, masks: Sequence[Tensor] | Tensor, **layout: Any) -> Samples:
        """Samples of these masks, one for each row; a row that SkyRL adds has one real token and an empty mask."""
        batch, bounds = self.batch, list(accumulate(map(len, masks), initial=0))
        real, has_media = batch["attention_mask"] != 0, batch.get("pixel_values") is not None
        held = (real.sum(-1) > 1) | (batch["loss_mask"] != 0).any(-1)
        check_prompts(LossModes(self.mode_of(term)), MEDIA if has_media else "")
        prompts = prompt_texts(batch["sequences"][held], (real & ~response_tokens(batch))[held])
        loss_masks = [mask.float() for mask, is_sample in zip(masks, held.tolist(), strict=True) if is_sample]
        slots = Gathered(bounds, filler_slots=len(held) - len(loss_masks), **layout)
        labels = {"row": range(len(loss_masks))}
        return Samples(loss_masks, layout=slots, prompt_ids=None if has_media else prompts, labels=labels)

    def mode_of(self, term: str) -> Aggregation:
        """The aggregation of a term."""
        return _SUM if term == "pg" else self.modes.term_aggregation(term.partition(" ")[0])

    def facts(self, term: str) -> dict[str, Any]:
        """Coefficient and aggregation that the tap of a term declares."""
        return {"coef": self.coefs[term.partition(" ")[0]], "aggregation": self.mode_of(term)}


class _Microbatches(list[dict[str, Any]]):
    """SkyRL's micro-batches; the one that its schedule took last, on the last stage right before its loss, is `now`."""

    def __init__(self, weighed: Sequence[_Microbatch]) -> None:
        super().__init__(now.batch for now in weighed)
        self._weighed = weighed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        replaced = installed("SkyRL")
        for microbatch in self._weighed:
            replaced.now = microbatch
            yield microbatch.batch


class AggregatedPolicyLoss:
    """One of SkyRL's policy losses; KL, entropy and MTP follow the mode that ``loss_reduction`` names, or their own.

    Args:
        loss: its name in SkyRL's registry, such as ``regular``.
        kl, entropy, mtp: the modes of these terms, by name or as a `Mode`; default: that of ``loss_reduction``.
        group_size: ``generator.n_samples_per_prompt``, which the proof compares. If it is not known, a mode by prompt
            is proved in part.

    Raises:
        ValueError, TypeError: unusable settings; a SkyRL without the functions that are replaced; in the trainer's
            first step, a token with another weight than ``loss_reduction`` asks for.
        BadBatchError: on every rank, in a step: packed rows of several samples; a mini-batch of more than one call; a
            mode by prompt with images; a first step in which a token has a weight that its mode does not ask for.
    """

    def __init__(
        self, loss: str, *, kl: str | Mode | ModeFunction | None = None,
        entropy: str | Mode | ModeFunction | None = None, mtp: str | Mode | ModeFunction | None = None,
        group_size: int | None = None,
    ) -> None:  # fmt: skip
        from skyrl.backends.skyrl_train.utils import ppo_utils

        self._terms = {"kl": kl, "entropy": entropy, "mtp": mtp}
        LossModes.resolve("constant", divisor=1, terms=self._terms)  # refuses unknown modes early
        self._name, self._group_size = loss, Promises.checked_size(group_size)
        self._loss = ppo_utils.PolicyLossRegistry.get(loss)
        _install_in_worker()
        Division.register(ppo_utils.AdvantageEstimatorRegistry, self._group_size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _install_in_worker()

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, config: Any, **inputs: Any) -> Any:
        """SkyRL's loss of that name for a micro-batch; terms that SkyRL computes afterwards have its weights."""
        now = getattr(installed("SkyRL"), "now", None)
        if not isinstance(now, _Microbatch):
            remedy = "Set trainer.strategy=megatron."
            if _WORKER in sys.modules:
                remedy = f"This worker took the loss from SkyRL's registry first: import {_WORKER} before."
            raise ValueError(f"a micro-batch without weights: MegatronModelWrapper must bring them. {remedy}")
        config = copy.copy(config)
        config.policy_loss_type = self._name
        now.coefs |= {"kl": config.kl_loss_coef, "entropy": -config.entropy_loss_coef}

        def describe() -> WeighedMicrobatch:
            plain = to_device(now.batch["advantages"], advantages.device)
            samples = now.samples("pg", now.batch["loss_mask"])
            return WeighedMicrobatch(samples, torch.ones_like(plain), plain, temperature=now.temperature, beside={})

        def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **others: Any) -> Any:
            return self._loss(log_probs, old_log_probs, advantages, **others)  # whose parameters may have other names

        tapped = wrapped(loss, lambda stock, arguments: tap_policy(_LOSS, stock, arguments, describe))
        return tapped(log_probs, old, advantages, config=config, **inputs)

    def weigh(self, wrapper: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a mini-batch; with each, the weights of KL, entropy and MTP become current."""
        from megatron.core import mpu
        from megatron.core.utils import get_model_config

        algorithm, group = wrapper.cfg.algorithm, mpu.get_data_parallel_group(with_context_parallel=False)
        modes = LossModes(mode_of_trainer(algorithm)).with_terms(self._terms)
        if batches[0].get("sub_seq_lengths") is not None or wrapper._pending_grad_sync is not None:
            raise ValueError(
                "rows of several samples, or gradients of another call: a mini-batch must be one forward_backward call "
                "with one sample per row. Leave sequences unpacked, and call optim_step after each forward_backward."
            )
        depths = get_model_config(wrapper.actor_module[0]).mtp_num_layers or 0
        coef = wrapper.cfg.policy.megatron_config.mtp_loss_weight / max(1, depths)
        temperature = None if getattr(wrapper, "_fused_lm_head", False) else 1.0
        weighed = [_Microbatch(batch, modes, {"mtp": coef}, temperature) for batch in batches]
        has_kl = bool(algorithm.use_kl_loss and algorithm.kl_loss_coef)
        has_entropy = bool(algorithm.use_entropy_loss and algorithm.entropy_loss_coef)
        masks = {f"mtp {depth}": [_predicted(batch, depth) for batch in batches] for depth in range(depths)}
        if has_kl or has_entropy:  # of which SkyRL reports both
            masks |= {term: [batch["loss_mask"] for batch in batches] for term in ("kl", "entropy")}
        num_shares = group.size() * max(1, batches[0].get("num_real_microbatches", len(batches)))

        def describe(term: str) -> list[Samples]:
            return [now.samples(term, mask) for now, mask in zip(weighed, masks[term], strict=True)]

        for term in masks:
            plan = step_plan(LossModes(weighed[0].mode_of(term)), partial(describe, term), group)
            for now, microbatch in zip(weighed, plan, strict=True):
                now.weights[term] = microbatch.weights * num_shares
        replaced = installed("SkyRL")
        replaced.add([term.partition(" ")[0] for term in masks])
        is_silent = {"kl": not has_kl, "entropy": not has_entropy}
        replaced.proof.terms = ["pg", *(term for term in masks if not is_silent.get(term))]
        replaced.proof.promises = Promises(self._group_size, ask_size=ASK)
        replaced.proof.beside = (
            f"advantages bring the weights of loss_reduction={algorithm.loss_reduction}: SkyRL's trainer proves these "
            "in a line of its own (SkyRL driver), or nobody does; SkyRL aggregates MoE losses"
        )
        return _Microbatches(weighed)


def _predicted(batch: dict[str, Any], depth: int) -> Tensor:
    """True where a token, and the one that an MTP depth predicts of it, are real, bool [rows, tokens]."""
    real, shift = batch["attention_mask"] != 0, depth + 1
    return pad(real[:, :-shift] & real[:, shift:], (0, shift))


def _install_in_worker() -> None:
    """Replace SkyRL's functions once, in a process that imported the Megatron worker."""
    module: Any = sys.modules.get(_WORKER)
    if module is None or installed("SkyRL") is not None:
        return
    log_probs = ("from_parallel_logits_to_logprobs", "from_parallel_logits_to_logprobs_packed_sequences")
    entropies = ("vocab_parallel_entropy_packed_sequences", "from_parallel_hidden_to_entropy_packed_sequences")
    drafts = ("draft_soft_ce", "draft_soft_ce_topk")

    def function(name: str, parameters: Sequence[str], call: Callable[..., Any]) -> Function:
        return Function(module, name, parameters, partial(_in_microbatch, call))

    functions = [
        Function(module.MegatronModelWrapper, "forward_backward_mini_batch", ["micro_batches", "loss_fn"], _mini_batch),
        *(Function(module, name, ["vocab_parallel_logits"], _log_probs) for name in log_probs),
    ]
    replaced = Replaced("SkyRL", VERSIONS, functions)
    replaced.later = {
        "kl": [function("masked_mean", ["tensor", "mask", "dim"], _mean)],
        "entropy": [function(name, ["loss_mask"], _entropy) for name in entropies],
        "mtp": [
            function("shift_mask_for_mtp", ["mask", "mtp_layer_number", "cu_seqlens"], _shift),
            *(function(name, ["mask", "global_normalization_factor"], _draft) for name in drafts),
        ],
    }
    replaced.proof = prove(
        "SkyRL",
        _SUM,
        never="SkyRL trained with another loss. Register an AggregatedPolicyLoss, and set "
        "trainer.algorithm.policy_loss_type to its name.",
        trains_policy=lambda: not isinstance(replaced.now, str),
    )


def _mini_batch(stock: Any, arguments: dict[str, Any]) -> Any:
    by_name, replaced = arguments.get("loss_fn"), installed("SkyRL")
    losses = sys.modules[_WORKER].PolicyLossRegistry
    loss = arguments["self"].policy_loss_fn if by_name is None else losses.get(by_name)
    if isinstance(loss, AggregatedPolicyLoss):
        arguments["micro_batches"] = loss.weigh(arguments["self"], arguments["micro_batches"])
    else:
        replaced.now = by_name  # of another loss that the call asks for
    try:
        return stock()
    finally:
        replaced.now = None


def _in_microbatch(call: Callable[..., Any], stock: Any, arguments: dict[str, Any]) -> Any:
    """The call, with the current micro-batch of our loss; without one, SkyRL's function unchanged."""
    now = installed("SkyRL").now
    return call(stock, arguments, now) if isinstance(now, _Microbatch) else stock()


def _log_probs(stock: Any, arguments: dict[str, Any]) -> Any:
    arguments["vocab_parallel_logits"] = tap_output(arguments["vocab_parallel_logits"])
    return stock()


def _mean(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    values, mask, dim = arguments["tensor"], arguments["mask"], arguments.get("dim")
    term = "entropy" if dim is None else "kl"
    weights = to_device(now.weights[term], values.device).view(values.shape)
    if term == "kl":  # SkyRL has multiplied it by the mask
        values = values / mask.where(mask != 0, 1)
    if taps := observed_taps():
        tap(values, term, samples=now.samples(term, now.batch["loss_mask"]), **now.facts(term))
        if (tapped := taps.find(values)) is not None:
            tapped.at_log_probs = term == "kl"
    total = part_of_loss((values * weights).sum(dim))
    return total if term == "entropy" else total * len(values)  # SkyRL averages over rows


def _entropy(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    mask = arguments["loss_mask"]
    weights = to_device(now.weights["entropy"], mask.device).view(mask.shape)
    total = weights.sum()  # what SkyRL's function divides by is then 1
    arguments["loss_mask"] = weights / total.where(total != 0, 1)
    whole, mine = (value * total for value in stock())
    if is_observed():  # each CP rank has the gradient of its own tokens
        samples = now.samples("entropy", now.batch["loss_mask"], backward="slice")
        tap_sum(mine, weights, "entropy", samples=samples, **now.facts("entropy"))
    return whole, part_of_loss(whole.detach() + mine - mine.detach())  # the gradient is that of this CP rank's tokens


def _shift(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    shifted, depth, bounds = stock(), arguments.get("mtp_layer_number", 0), arguments.get("cu_seqlens")
    term = f"mtp {depth}"
    column = torch.zeros_like(shifted, dtype=torch.float32)
    column[shifted != 0] = to_device(now.weights[term][_predicted(now.batch, depth).flatten()], shifted.device)
    if is_observed():
        rows = shifted if bounds is None else [shifted[0, begin:end] for begin, end in pairwise(bounds.tolist())]
        now.drafts.append((term, now.samples(term, rows)))
    return column


def _draft(stock: Any, arguments: dict[str, Any], now: _Microbatch) -> Any:
    arguments["global_normalization_factor"] = arguments["mask"].new_ones(())
    loss = stock()
    if is_observed() and now.drafts:
        term, samples = now.drafts[-1]
        tap_sum(loss, arguments["mask"], term, samples=samples, **now.facts(term))
    return part_of_loss(loss)

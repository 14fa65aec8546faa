"""Corrections where another policy drew the tokens: importance weights, and masks of rejected tokens.

The log-ratio is the trainer's old log-prob less the inference engine's. The results are detached and multiply a loss
(``importance_weights=``).

A weight of 0 rejects a token, which still counts in every denominator. If only the survivors shall count, their masks
must be known before the step is trained on: `surviving_masks` makes them from data, for `Samples`, `keep_tokens` from
the policy in training.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group
from megatron_rl_loss.core.errors import check_float, check_one_each, check_within, require
from megatron_rl_loss.core.ids import Ids, as_ids
from megatron_rl_loss.core.masks import Mask
from megatron_rl_loss.core.samples import check_values
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.losses.gates import Gate
from megatron_rl_loss.losses.place import Place, tokens_of
from megatron_rl_loss.losses.ratio import at_least_float32, check_shape
from megatron_rl_loss.losses.segments import segment_mean, segment_quantile, segment_sum, to_tokens

logger = logging.getLogger(__name__)

#: So many log-ratios are not all above 0 by chance.
_MANY = 16
#: Of fewer weights most may be lost by chance.
_FEW = 8
#: A mean |log-ratio| above it is no rounding of two sides alike.
_APART = 0.2
#: A weight below it is as good as none.
_NEAR_0 = 0.02


@torch.inference_mode(False)
def importance_weights(
    log_ratio: Tensor,
    gate: Gate,
    local: Place | None = None,
    cp_group: Group | None = None,
    *,
    log_probs: Tensor | None = None,
) -> Tensor:
    """A weight for each token, detached: the ratio within the gate's bounds; outside, the bound (``clamp``) or 0.

    >>> log_ratio = torch.tensor([0.0, 1.0, 3.0])
    >>> importance_weights(log_ratio, Gate(high=5.0, action="clamp"))  # TIS
    tensor([1.0000, 2.7183, 5.0000])
    >>> importance_weights(log_ratio, Gate(low=0.5, high=5.0))  # IcePop
    tensor([1.0000, 2.7183, 0.0000])

    The ratio is the token's, ``exp(log_ratio)``, or, by a gate of sequences or rollouts, their product or geometric
    mean, the same at all of their tokens. A gate of another metric, or of the largest ratio, gives 1 inside and 0
    outside.

    Args:
        log_ratio: ``old_log_probs - rollout_log_probs``, of any shape; with `local` of this rank's tokens, in the shape
            of its losses. Subtract in float32 at least.
        gate: bounds, and what becomes of tokens outside.
        local, cp_group: as in `segment_mean`, for sequences and rollouts: one collective under context parallelism.
        log_probs: ``old_log_probs``, for metrics of probabilities (``binary_kl``, ``both_binary_kl``, ``tv``).

    On the host two things are warned of: values that look like ratios or probabilities, being all above 0, and many,
    or near 1 on average; and weights of which most are near 0 or at a bound, as products over long sequences are.

    Raises ValueError for log-ratios that require grad, a gate of sequences without `local`, a metric without the
    log-probs that it needs, and as `segment_mean`.
    Source: TIS: Ionides 2008; for RL post-training, Yao et al. 2025. Sequence TIS and MIS: Liu, Li et al. 2025, "When
    Speed Kills Stability". IcePop: Ling Team 2025, arXiv:2510.18855.
    """
    _check_gate(gate)
    check_float("log_ratio", log_ratio, "Pass old_log_probs - rollout_log_probs")
    if log_ratio.requires_grad:
        raise ValueError(
            "log-ratios that require grad: a weight is a constant, and the ratio of the policy in training is the "
            "loss's own, which clips it. Pass old_log_probs - rollout_log_probs, or detach the log-ratios."
        )
    if log_probs is not None:
        check_shape("log_probs", log_probs, log_ratio)
        log_probs = log_probs.detach()
    active = None
    if local is not None:
        check_values("log_ratio", log_ratio, tokens_of(local))
        active = on_device(tokens_of(local).mask != 0, log_ratio.device).view(log_ratio.shape)
        log_ratio = log_ratio.masked_fill(~active, 0)
    _warn_of_ratios(log_ratio if active is None or not log_ratio.is_cpu else log_ratio[active])
    judged = gate.token_metric(log_ratio, log_probs)
    if gate.level != "token":
        if local is None:
            raise ValueError(
                f"a gate of a {gate.level} without local: its tokens must be known. Pass the micro-batch, or "
                "Samples(...).local(cp_rank, cp_size)."
            )
        per = "sample" if gate.level == "sequence" else "rollout"
        arguments = judged.to(at_least_float32(log_ratio).dtype), local, cp_group
        if gate.aggregate == "max":
            sequence_metrics = segment_quantile(*arguments, q=1.0, per=per)
        else:
            sequence_metrics = (segment_sum if gate.aggregate == "sum" else segment_mean)(*arguments, per=per)
        _warn_of_lost_weights(gate, sequence_metrics, log_ratio, active, local)
        judged = to_tokens(sequence_metrics, local).view(log_ratio.shape).double()
    else:
        _warn_of_lost_weights(gate, judged, log_ratio, active, local)
    return _weights(gate, judged).to(at_least_float32(log_ratio).dtype)


def _check_gate(gate: object) -> None:
    if not isinstance(gate, Gate):
        raise TypeError(
            f"gate is {gate!r}: it must be a Gate. Pass Gate(high=2.0, action='clamp') for TIS, or Gate(low=0.5, "
            "high=5.0) for IcePop."
        )


def _weights(gate: Gate, judged: Tensor) -> Tensor:
    """The weights of what was judged, of ratios by their logarithms."""
    if not gate.has_weight:
        weights = torch.ones_like(judged).masked_fill(judged.isnan(), math.nan)
    else:
        weights = judged.exp().clamp(0 if gate.low is None else gate.low, gate.high)
    return weights if gate.action == "clamp" else weights.masked_fill(gate.is_outside(judged), 0)


def _warn_of_ratios(log_ratios: Tensor) -> None:
    """Log values that are no log-ratios; of a device they are not read.

    By Jensen's inequality the mean log-ratio of tokens that the other policy drew is below 0, if they are many. So
    not all of them are above 0, as ratios and probabilities are.
    """
    if log_ratios.is_cpu and log_ratios.numel() > 1 and not torch.compiler.is_compiling():
        least, mean = log_ratios.amin(), log_ratios.mean()
        if least > 0 and (log_ratios.numel() >= _MANY or 0.8 < mean < 1.25):
            logger.warning(
                f"log-ratios of {float(least):.3g} at least, and {float(mean):.3g} on average: these look like ratios "
                "or probabilities, of which not one is below 0. Pass old_log_probs - rollout_log_probs, without exp."
            )


def _warn_of_lost_weights(
    gate: Gate, judged: Tensor, log_ratio: Tensor, active: Tensor | None, local: Place | None
) -> None:
    """Log weights of which most are near 0 or at a bound; of a device they are not read.

    They are counted over the micro-batches of the step, and told of once: a micro-batch may hold a sequence or two.

    Args:
        judged: what the gate judges, of tokens or sequences.
        log_ratio: of the tokens, of which `active` count; None for all.
    """
    if not judged.is_cpu or torch.compiler.is_compiling() or not judged.numel():
        return
    on = slice(None) if active is None else active
    judged = judged[on] if gate.level == "token" else judged
    low, high = gate.bounds
    lost = (judged <= max(low, math.log(_NEAR_0))) | (judged >= high) if gate.has_weight else gate.is_outside(judged)
    here = [float(lost.sum()), float(judged.numel())]
    sums, told, add_up = here, 0.0, getattr(local, "add_up", None)  # of the micro-batch of a plan
    if add_up is not None:
        sums, (told,) = add_up(f"weights by {gate}", *here), add_up(f"told of {gate}", 0.0)
    if told or sums[1] < _FEW or sums[0] <= sums[1] / 2:
        return
    if add_up is not None:
        add_up(f"told of {gate}", 1.0)
    most = "near 0 or at a bound" if gate.has_weight else "outside"
    logger.warning(
        f"{sums[0] / sums[1]:.0%} of the weights by {gate} are {most}: few tokens are left to learn from, or a bound "
        f"decides. {_where_the_gap_lies(gate, log_ratio[on])}"
    )


def _where_the_gap_lies(gate: Gate, log_ratios: Tensor) -> str:
    """The reason of lost weights: some tokens, all tokens, or a product over many that are alike."""
    sizes = log_ratios.detach().double().nan_to_num().abs().sort(descending=True).values
    number, mean = len(sizes), float(sizes.mean()) if len(sizes) else 0.0
    few = int((sizes.cumsum(0) < 0.9 * sizes.sum()).sum()) + 1
    compare = "Compare the two sides' log-probs: python -m megatron_rl_loss log-probs."
    if few <= number / 5:
        return f"The gap lies at {few} of {number} tokens, as of placeholders in one side's log-probs. {compare}"
    if gate.aggregate != "sum" or mean > _APART:
        return f"|log-ratio| is {mean:.3g} on average. {compare}"
    return f"|log-ratio| is {mean:.3g} on average: a product over a long sequence is so. Take aggregate='mean'."


@torch.inference_mode(False)
def keep_sequences(mean_kl: Tensor, *, max_kl: float, advantages: Tensor | None = None) -> Tensor:
    """1.0 where a sequence's mean KL is at most `max_kl`, else 0.0; detached, of the shape of `mean_kl`.

    ``mean_kl`` is a `segment_mean`, of samples or, by `to_tokens`, at tokens. Off-policy sequence masking takes that
    of ``old_log_probs - log_probs``. With `advantages`, which broadcast to it, sequences of A >= 0 are always kept.
    NaN stays NaN, and so is the loss that it multiplies.

    Raises ValueError for a `max_kl` that is not finite and above 0, and advantages that do not broadcast.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556; whole sequences for all signs, as trust region
    masking, arXiv:2512.23075, whose criterion is the largest token's divergence, not the mean.
    """
    check_float("mean_kl", mean_kl, "Pass segment_mean(old_log_probs - log_probs, ...)")
    check_within("max_kl", max_kl, "(0, inf)", "around 0.05 is usual")
    rejected = mean_kl.detach() > max_kl
    if advantages is not None:
        check_shape("advantages", advantages, mean_kl, broadcasts=True)
        rejected = rejected & (advantages < 0)
    return (~rejected).to(mean_kl.dtype).masked_fill(mean_kl.isnan(), math.nan)


def surviving_masks(
    loss_masks: Sequence[Mask],
    log_ratios: Sequence[Mask],
    gate: Gate,
    *,
    log_probs: Sequence[Mask] | None = None,
    rollout_ids: Ids | None = None,
) -> list[Tensor]:
    """Loss masks with 0 where a token is rejected: of whole samples, uncut, for `Samples`, so only survivors count.

    They are on the device of the log-ratios.

    >>> surviving_masks([torch.tensor([1, 1, 0])], [torch.tensor([0.1, 3.0, 0.0])], Gate(high=5.0))
    [tensor([1, 0, 0])]

    Args:
        loss_masks: one per sample: a 1-D tensor, array or list.
        log_ratios: per sample, ``old_log_probs - rollout_log_probs`` of its tokens, as long as its mask.
        gate: that masks: of tokens, or of sequences or rollouts, which are rejected whole.
        log_probs: per sample ``old_log_probs``, for metrics of probabilities.
        rollout_ids: for a gate of rollouts: one per sample; all samples of a rollout must be given.

    Raises ValueError for log-ratios that require grad (those of the policy in training are not known before the step's
    first forward: give them weights of 0, or use `keep_tokens`), NaN at active tokens, lengths that differ, a gate that
    clamps, and as `importance_weights`.
    """
    _check_gate(gate)
    check_one_each("log-ratios", len(log_ratios), "loss masks", len(loss_masks))
    if log_probs is not None:
        check_one_each("log-probs", len(log_probs), "loss masks", len(loss_masks))
    if gate.action == "clamp":
        raise ValueError(
            "a gate that clamps: it rejects nothing, so all masks would stay. Pass action='mask', or give tokens "
            "importance_weights."
        )
    if (gate.level == "rollout") != (rollout_ids is not None):
        raise ValueError(
            f"rollout_ids={rollout_ids!r} with a gate of a {gate.level}: these ids say which samples a gate of "
            "rollouts judges together. Pass both, or neither."
        )
    masks, judged, active = list[Tensor](), list[Tensor](), list[Tensor]()
    for i, pair in enumerate(zip(loss_masks, log_ratios, strict=True)):
        mask, log_ratio = (row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu") for row in pair)
        mask = to_device(mask, log_ratio.device)
        check_shape(f"the log-ratios of sample {i}", log_ratio, mask)
        if log_ratio.requires_grad:
            raise ValueError(
                f"log-ratios of sample {i} that require grad: survivors must be known before the step's first forward "
                "pass, which makes these log-probs. Use old_log_probs - rollout_log_probs, or give rejected tokens "
                "importance weights of 0, which leaves them in the counts."
            )
        require(
            ~(log_ratio.isnan() & (mask != 0)).any(),
            lambda i=i: f"log-ratios of sample {i} with NaN at an active token",  # type: ignore[misc]
            "no bound can judge them, so the token would be dropped. Mask the token, or mend its log-probs.",
        )
        row = None if log_probs is None else to_device(torch.as_tensor(log_probs[i]), log_ratio.device)
        masks.append(mask)
        judged.append(gate.token_metric(log_ratio, row))
        if log_ratio.is_cpu:
            active.append(log_ratio.double()[mask != 0])
    if active:
        _warn_of_ratios(torch.cat(active))
    if gate.level != "token" and masks:
        units = np.arange(len(masks))
        if rollout_ids is not None:
            units = np.unique(as_ids("rollout_ids", rollout_ids, len(masks)), return_inverse=True)[1]
        judged = [
            row.expand(len(mask)) for row, mask in zip(_judged_together(gate, masks, judged, units), masks, strict=True)
        ]
    return [mask.masked_fill(gate.is_outside(row), 0) for mask, row in zip(masks, judged, strict=True)]


def _judged_together(gate: Gate, masks: list[Tensor], rows: list[Tensor], units: np.ndarray) -> list[Tensor]:
    """The aggregate of each sample's unit, 0-dim each."""
    pairs = [(row.masked_fill(mask == 0, 0), mask.double()) for row, mask in zip(rows, masks, strict=True)]
    members = [np.flatnonzero(units == unit) for unit in units]
    if gate.aggregate == "max":
        largest = [torch.cat([row[mask != 0], row.new_full((1,), -math.inf)]).amax() for row, mask in pairs]
        return [torch.stack([largest[k] for k in numbers]).amax() for numbers in members]
    sums = [torch.stack([(row * mask).sum(), mask.sum()]) for row, mask in pairs]
    totals = [torch.stack([sums[k] for k in numbers]).sum(0) for numbers in members]
    return [total / count.clamp(min=1e-30) if gate.aggregate != "sum" else total for total, count in totals]

"""Folding the aggregation into the advantages, for trainers that only sum (Tinker, SkyRL).

Every mode is one weight per token, w; the step loss is ``sum_t w_t * loss_t``. A loss that is positively homogeneous in
the advantage, ``loss(w * A) = w * loss(A)`` for w >= 0, can be given ``w * A``: its plain sum then *is* the step loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_one_each
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.modes.weights import token_weights
from megatron_rl_loss.step.ids import Ids
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounting

#: What fold_into_advantages knows by name: None if positively homogeneous, else why it is not.
LOSSES: dict[str, str | None] = {
    **dict.fromkeys(("ppo_clip", "ppo", "regular", "vanilla", "dual_clip", "gspo", "cispo", "sapo", "vespo", "dppo")),
    **dict.fromkeys(("reinforce", "gpg", "importance_sampling", "rollout_is")),
    "kl": "a KL term does not scale with the advantage",
    "entropy": "an entropy term does not scale with the advantage",
    "dro": "its quadratic penalty does not scale with the advantage",
    "clip_cov": "it compares advantages with their mean and fixed bounds to choose tokens",
    "kl_cov": "it compares advantages with their mean to choose tokens, and adds a KL term to them",
    "geo_mean": "it averages a sequence's advantages itself, so it has no loss of a token to be weighted",
    "cross_entropy": "it has no advantage",
}

_MARK = "_folded_by_megatron_rl_loss"


def fold_into_advantages(
    advantages: Sequence[Tensor] | Sequence[float] | Tensor,
    loss_masks: Sequence[Tensor],
    *,
    mode: str | ModeFunction,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    labels: Labels | None = None,
    loss: str | Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """``w_t * A_t`` for every token, so that the plain sum of the per-token losses, over everything, is the step loss.

    >>> masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> fold_into_advantages([6.0, -3.0], masks, mode="token_mean", totals=totals, loss="ppo_clip")
    [tensor([2., 2., 0.]), tensor([-1.])]

    The weight includes the mask: a 0/1 mask may be applied again in the sum, fractional weights may not.

    Args:
        advantages: one 1-D tensor per sample, as long as its mask; or one number per sample (a 1-D tensor or a list).
        loss_masks, rollout_ids, prompt_ids, labels: of all or some of the step's samples, as in `Samples`; not cut for
            CP.
        mode, divisor, units: as in `make_pg_loss_reducer`, other frameworks' names included.
        totals: the step's denominators.
        loss: what the advantages go into, to be checked: a name of `LOSSES`, or several joined by ``+``; or a function
            of flat advantages [sum of mask lengths] that returns as many losses, which is then tried out. None trusts
            the caller.

    Returns:
        One tensor per sample, float32 (float64 if given so), on the advantages' device, 0 where the weight is 0.
        `is_folded` knows them.

    Raises:
        ValueError: advantages that were folded before or do not match the masks, or that are NaN or infinite at an
            active token; a loss that is not positively homogeneous, or unknown; a registered mode with weights below
            0; samples with more tokens, rollouts or prompts than the totals say the whole step has; anything
            `make_pg_loss_reducer` refuses.
        TypeError: advantages of another type.
    """
    if isinstance(loss, str):
        _check_loss_name(loss)
    if is_folded(advantages):
        raise ValueError(
            "advantages that were folded already: folding them again would divide by the step's counts twice. Fold "
            "once per step, before it is cut into micro-batches."
        )
    samples = Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, labels=labels)
    flat = _flat_advantages(advantages, samples)
    weights = token_weights(mode, samples, totals, divisor=divisor, units=units).to(flat.device)
    if bool((weights < 0).any()):
        raise ValueError(
            f"weights below 0 from the mode {mode!r}: a loss is homogeneous in the advantage for weights from 0 on "
            "only. Aggregate the losses with make_pg_loss_reducer."
        )
    if not bool(torch.isfinite(flat[weights != 0]).all()):
        raise ValueError(
            "advantages with NaN or Inf at active tokens: they must be finite. Mask those tokens, or look at the "
            "rewards."
        )
    folded = (flat * weights).masked_fill(weights == 0, 0)
    if callable(loss):
        _check_homogeneous(loss, flat.masked_fill(weights == 0, 0), folded, weights)
    # Each in a storage of its own, so that one sent elsewhere does not take all along.
    parts = [part.clone() for part in folded.split(samples.mask_lengths)]
    for part in parts:
        setattr(part, _MARK, True)
    return parts


def is_folded(advantages: Any) -> bool:
    """Whether these are, or hold, tensors that `fold_into_advantages` returned.

    The mark is on the tensors: it survives other lists, slices of them, reordering, copying and pickling. It does not
    survive whatever makes a new tensor of one (arithmetic, padding, stacking, ``.to(device)``, indexing).
    """
    tensors = [advantages] if isinstance(advantages, Tensor) else advantages
    return any(hasattr(tensor, _MARK) for tensor in tensors)


def _check_loss_name(loss: str) -> None:
    for name in (part.strip() for part in loss.split("+")):
        if name not in LOSSES:
            known = ", ".join(known for known, reason in LOSSES.items() if reason is None)
            raise ValueError(
                f"loss {loss!r}: there is no {name!r} among the known ones. Choose one of {known}, or pass the loss as "
                "a function of the advantages."
            )
        if LOSSES[name]:
            raise ValueError(
                f"loss {loss!r} with folded advantages: {LOSSES[name]}. Aggregate the losses with "
                "make_pg_loss_reducer, or leave that term out of what is summed."
            )


def _flat_advantages(advantages: Sequence[Tensor] | Sequence[float] | Tensor, samples: Samples) -> Tensor:
    """Advantages end to end, a value per mask entry, float32 or float64."""
    if isinstance(advantages, Tensor) and advantages.dim() != 1:
        raise ValueError(
            f"advantages is a tensor of shape {tuple(advantages.shape)}: it must hold one number per sample. Pass "
            "list(advantages) for rows of tokens."
        )
    check_one_each("advantages", len(advantages), "loss masks", len(samples))
    tensors = [one for one in advantages if isinstance(one, Tensor) and one.dim()]
    for i, one in enumerate(advantages if tensors else []):
        length = samples.mask_lengths[i]
        if not isinstance(one, Tensor) or tuple(one.shape) != (length,):
            shown = tuple(one.shape) if isinstance(one, Tensor) else one
            raise ValueError(
                f"the advantages of sample {i} are {shown!r}: they must be a 1-D tensor of its loss mask's {length} "
                "entries. Pass a value per token for every sample, or a number for every one."
            )
    if tensors:
        flat = torch.cat(tensors)
    else:
        numbers = torch.as_tensor(advantages)
        lengths = torch.tensor(samples.mask_lengths, dtype=torch.int64, device="cpu")
        flat = numbers.repeat_interleave(lengths.to(numbers.device))
    if flat.is_complex() or flat.dtype == torch.bool:
        raise TypeError(f"advantages of {flat.dtype}: they must be real numbers. Pass floats.")
    return flat.detach().to(torch.promote_types(flat.dtype, torch.float32))


def _check_homogeneous(loss: Callable[[Tensor], Tensor], flat: Tensor, folded: Tensor, weights: Tensor) -> None:
    """Try ``loss(w * A) = w * loss(A)`` on the advantages and weights at hand."""
    with torch.no_grad():
        plain, of_folded = loss(flat), loss(folded)
    if plain.shape != flat.shape or of_folded.shape != flat.shape:
        raise ValueError(
            f"a loss that returns shape {tuple(plain.shape)} for advantages of shape {tuple(flat.shape)}: it must "
            "return one value per token. Return unreduced losses."
        )
    active = weights != 0
    if not bool(active.any()):
        return
    expected = (plain * weights)[active].double()
    off = (of_folded[active].double() - expected).abs()
    # Rounding of float32 losses; bf16 ones are coarser.
    tolerance = 1e-4 if plain.element_size() >= 4 else 2e-2
    if not bool((off <= tolerance * expected.abs().max().clamp(min=1e-30)).all()):  # NaN too
        worst = int(off.argmax())
        raise ValueError(
            f"a loss whose value is {float(of_folded[active][worst]):g} where w * loss(A) is "
            f"{float(expected[worst]):g}: it is not positively homogeneous in the advantage, so weights cannot be "
            "folded into that. Aggregate the losses with make_pg_loss_reducer, or leave KL, entropy and "
            "penalties out of what is summed."
        )

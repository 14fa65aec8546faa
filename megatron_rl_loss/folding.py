"""Folding the aggregation into the advantages, for trainers that only sum (Tinker, SkyRL).

Every mode is one weight a token, w; the step loss is ``sum_t w_t * loss_t``. A loss that is positively homogeneous in
the advantage, ``loss(w * A) = w * loss(A)`` for w >= 0, can be given ``w * A``: its plain sum then *is* the step loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import explain
from megatron_rl_loss.reducers import Units, make_pg_loss_reducer
from megatron_rl_loss.samples import Ids, Samples
from megatron_rl_loss.totals import StepTotals, UnitTokens

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
    mode: str,
    totals: StepTotals,
    divisor: float | None = None,
    units: Units | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    loss: str | Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """``w_t * A_t`` for every token, so that the plain sum of the per-token losses, over everything, is the step loss.

    >>> masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> fold_into_advantages([6.0, -3.0], masks, mode="token_mean", totals=totals, loss="ppo_clip")
    [tensor([2., 2., 0.]), tensor([-1.])]

    The weight includes the mask: a 0/1 mask may be applied again in the sum, fractional weights may not.

    Args:
        advantages: one 1-D tensor a sample, as long as its mask; or one number a sample (a 1-D tensor or a list).
        loss_masks, rollout_ids, prompt_ids: of all or some of the step's samples, as in `Samples`; never cut for CP.
        mode, divisor, units: as in `make_pg_loss_reducer`, other frameworks' names included.
        totals: the step's denominators.
        loss: what the advantages go into, to be checked: a name of `LOSSES`, or several joined by ``+``; or a function
            of flat advantages [sum of mask lengths] that returns as many losses, which is then tried out. None trusts
            the caller.

    Returns:
        One tensor a sample, float32 (float64 if given so), on the advantages' device, 0 where the weight is 0.
        `is_folded` knows them.

    Raises:
        ValueError: advantages that were folded before or do not match the masks, or that are NaN or infinite at an
            active token; a loss that is not positively homogeneous, or unknown; a registered reducer with weights below
            0; samples with more tokens, rollouts or prompts than the totals say the whole step has; anything
            `make_pg_loss_reducer` refuses.
        TypeError: advantages of another type.
    """
    if isinstance(loss, str):
        _check_loss_name(loss)
    if is_folded(advantages):
        given = "advantages that were folded already"
        rule = "folding them again would divide by the step's counts twice"
        raise ValueError(explain(given, rule, "Fold once a step, before it is cut into micro-batches"))
    samples = Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids)
    flat = _flat_advantages(advantages, samples)
    reducer = make_pg_loss_reducer(
        mode,
        loss_masks,
        totals=totals,
        divisor=divisor,
        units=units,
        rollout_ids=rollout_ids,
        prompt_ids=prompt_ids,
    )
    _check_coverage(samples, totals)
    with torch.enable_grad():  # the weights are the reducer's slope
        zeros = torch.zeros(flat.numel(), device=flat.device, requires_grad=True)
        (weights,) = torch.autograd.grad(reducer(zeros), zeros)
    if bool((weights < 0).any()):
        given = f"weights below 0 from the reducer {mode!r}"
        rule = "a loss is homogeneous in the advantage for weights from 0 on only"
        raise ValueError(explain(given, rule, "Aggregate the losses with make_pg_loss_reducer"))
    if not bool(torch.isfinite(flat[weights != 0]).all()):
        given = "advantages with NaN or Inf at active tokens"
        raise ValueError(explain(given, "they must be finite", "Mask those tokens, or look at the rewards"))
    folded = (flat * weights).masked_fill(weights == 0, 0)
    if callable(loss):
        _check_homogeneous(loss, flat.masked_fill(weights == 0, 0), folded, weights)
    # Each in a storage of its own, so that one sent elsewhere does not take all along.
    parts = [part.clone() for part in folded.split(samples.mask_lengths.tolist())]
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
            known = [known for known, reason in LOSSES.items() if reason is None]
            remedy = f"Choose one of {', '.join(known)}, or pass the loss as a function of the advantages"
            raise ValueError(explain(f"loss {loss!r}", f"there is no {name!r} among the known ones", remedy))
        if reason := LOSSES[name]:
            remedy = "Aggregate the losses with make_pg_loss_reducer, or leave that term out of what is summed"
            raise ValueError(explain(f"loss {loss!r} with folded advantages", reason, remedy))


def _flat_advantages(advantages: Sequence[Tensor] | Sequence[float] | Tensor, samples: Samples) -> Tensor:
    """Advantages end to end, a value a mask entry, float32 or float64."""
    if isinstance(advantages, Tensor) and advantages.dim() != 1:
        given = f"advantages is a tensor of shape {tuple(advantages.shape)}"
        raise ValueError(explain(given, "it must hold one number a sample", "Pass list(advantages) for rows of tokens"))
    if len(advantages) != len(samples):
        given = f"{len(advantages)} advantages for {len(samples)} loss masks"
        raise ValueError(explain(given, "there must be one a sample", "Pass both in order"))
    tensors = [one for one in advantages if isinstance(one, Tensor) and one.dim()]
    for i, one in enumerate(advantages if tensors else []):
        length = int(samples.mask_lengths[i])
        if not isinstance(one, Tensor) or tuple(one.shape) != (length,):
            given = f"the advantages of sample {i} are {tuple(one.shape) if isinstance(one, Tensor) else one!r}"
            rule = f"they must be a 1-D tensor of its loss mask's {length} entries"
            raise ValueError(explain(given, rule, "Pass a value a token for every sample, or a number for every one"))
    if tensors:
        flat = torch.cat(tensors)
    else:
        numbers = torch.as_tensor(advantages)
        flat = numbers.repeat_interleave(samples.mask_lengths.to(numbers.device))
    if flat.is_complex() or flat.dtype == torch.bool:
        raise TypeError(explain(f"advantages of {flat.dtype}", "they must be real numbers", "Pass floats"))
    return flat.detach().to(torch.promote_types(flat.dtype, torch.float32))


def _check_coverage(samples: Samples, totals: StepTotals) -> None:
    """Totals of a part of the step (a micro-batch, one rank) show where these samples alone are more than all of it."""
    sums = samples.mask_sums()
    here: dict[str, float] = {"step_tokens": float(sums.sum())}
    for kind, ids, tokens in (
        ("rollouts", samples.rollout_ids, totals.rollout_tokens),
        ("prompts", samples.prompt_ids, totals.prompt_tokens),
    ):
        unit_sums = sums
        if ids is not None:
            unique, at = ids.unique(return_inverse=True)
            unit_sums = torch.zeros(unique.numel(), dtype=torch.float64, device="cpu").index_add_(0, at, sums)
            if isinstance(tokens, UnitTokens):
                excess = unit_sums - tokens.of(f"{kind[:-1]}_ids", unique) * (1 + 1e-9)
                if bool((excess > 0).any()):
                    given = f"a {kind[:-1]} with {float(unit_sums[excess.argmax()]):g} mask tokens in these samples"
                    raise ValueError(_too_few(given, "the totals say it has fewer in the whole step"))
        elif kind == "prompts":
            continue
        here[f"num_{kind}"] = unit_sums.numel()
        here[f"num_active_{kind}"] = int((unit_sums > 0).sum())
    for name, count in here.items():
        whole = getattr(totals, name)
        if whole is not None and count > whole * (1 + 1e-9):
            raise ValueError(_too_few(f"samples whose {name} alone are {count:g}", f"the totals say {whole:g}"))


def _too_few(given: str, rule: str) -> str:
    return explain(given, rule, "Make the totals from all samples of the step, on all ranks")


def _check_homogeneous(loss: Callable[[Tensor], Tensor], flat: Tensor, folded: Tensor, weights: Tensor) -> None:
    """Try ``loss(w * A) = w * loss(A)`` on the advantages and weights at hand."""
    with torch.no_grad():
        plain, of_folded = loss(flat), loss(folded)
    if plain.shape != flat.shape or of_folded.shape != flat.shape:
        given = f"a loss that returns shape {tuple(plain.shape)} for advantages of shape {tuple(flat.shape)}"
        raise ValueError(explain(given, "it must return one value a token", "Return unreduced losses"))
    active = weights != 0
    if not bool(active.any()):
        return
    expected = (plain * weights)[active].double()
    off = (of_folded[active].double() - expected).abs()
    # Rounding of float32 losses; bf16 ones are coarser.
    tolerance = 1e-4 if plain.element_size() >= 4 else 2e-2
    if not bool((off <= tolerance * expected.abs().max().clamp(min=1e-30)).all()):  # NaN too
        worst = int(off.argmax())
        given = (
            f"a loss whose value is {float(of_folded[active][worst]):g} where w * loss(A) is {float(expected[worst]):g}"
        )
        rule = "it is not positively homogeneous in the advantage, so weights cannot be folded into that"
        remedy = (
            "Aggregate the losses with make_pg_loss_reducer, or leave KL, entropy and penalties out of what is summed"
        )
        raise ValueError(explain(given, rule, remedy))

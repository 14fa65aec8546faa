"""Log-probs at K ids of each token, with that of all other ids: what score centering and divergences compare."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_float, require
from megatron_rl_loss.losses.ratio import check_shape


class AtIds(NamedTuple):
    """Log-probs at K ids of each token, and the log of the probability of all other ids.

    >>> log_probs = torch.tensor([[0.5, 0.25, 0.25]]).log()  # as with rest_without: the last is that of all others
    >>> AtIds(log_probs[..., :-1], log_probs[..., -1])
    AtIds(log_probs=tensor([[-0.6931, -1.3863]]), log_rest=tensor([-1.3863]))

    The rest is made where the logits are: 1 less the sum of K probabilities in float32 is noise below 1e-5, and so are
    the ratio and the gradient that are made of it.

    Attributes:
        log_probs: [..., K], in the whole vocabulary's distribution.
        log_rest: [...], of all ids but those of the K that the other side gave: the last column of
            ``rest_without=other_log_probs > -inf``.
    """

    log_probs: Tensor
    log_rest: Tensor


def check_at_ids(name: str, at_ids: Tensor | AtIds, remedy: str) -> None:
    """Raise TypeError unless log-probs, and a rest beside them, are float tensors, and ValueError for their shapes."""
    log_probs = at_ids.log_probs if isinstance(at_ids, AtIds) else at_ids
    check_float(name, log_probs, remedy)
    if log_probs.dim() == 0 or log_probs.shape[-1] == 0:
        raise ValueError(f"log-probs of shape {tuple(log_probs.shape)}: they must be [..., K], K >= 1. Pass some ids.")
    if isinstance(at_ids, AtIds):
        check_float(f"the rest of {name}", at_ids.log_rest, "Pass the log of a probability")
        check_shape(f"the rest of {name}", at_ids.log_rest, log_probs[..., 0])


def check_has_rest(name: str, at_ids: Tensor | AtIds, setting: str, other: str) -> AtIds:
    """The log-probs with their rest; ValueError without one."""
    if not isinstance(at_ids, AtIds):
        raise ValueError(
            f"{name} without the rest, and {setting}: the probability of all other ids must be made where the logits "
            f"are. Pass rest_without={other} > -inf there, and here AtIds(log_probs[..., :-1], log_probs[..., -1])."
        )
    return at_ids


def check_has_no_rest(name: str, at_ids: Tensor | AtIds, setting: str, remedy: str) -> Tensor:
    """The log-probs alone; ValueError for a rest."""
    if isinstance(at_ids, AtIds):
        raise ValueError(f"{name} with a rest, and {setting}: other ids are in no sum of it. Pass {remedy}.")
    return at_ids


def check_sum(name: str, log_probs: Tensor, log_rest: Tensor | None = None) -> None:
    """ValueError for log-probs at ids [..., K] whose probabilities sum to more than 1, or with a rest not to 1."""
    if log_probs.numel() and not torch.compiler.is_compiling():
        sums = log_probs.exp().sum(-1)
        largest = sums.amax()
        require(
            ~(largest > 1.05),  # NaN passes
            lambda: f"{name} with probabilities of a token's ids that sum to {largest:.4g}",
            "probabilities sum to 1 at most. Give each id once per token, and log-probs, not logits.",
        )
        if log_rest is not None:
            furthest = (sums + log_rest.exp() - 1).abs().amax()
            require(
                ~(furthest > 0.05),  # NaN passes
                lambda: f"{name} whose probabilities and rest sum to 1 only within {furthest:.3g}",
                "the rest is the log of the probability of all ids but those that the other side gave. Pass "
                "rest_without=other_log_probs > -inf where log-probs are made.",
            )


def rest_of(at_ids: Tensor, log_rest: Tensor | None) -> Tensor:
    """The probability of all other ids [...]: that of a rest, or what the K probabilities leave.

    The second is for the side that sends K log-probs and no more, an engine: it is known to the rounding of these.
    """
    return 1 - at_ids.exp().sum(-1) if log_rest is None else log_rest.exp()

"""Under `torch.autocast`, wherever backward runs, gradients are as near to float64 as those of the naive way."""

import contextlib
import functools
import itertools
from typing import Any

import head_oracle
import pytest
import torch
from head_oracle import batch_of, relative
from torch import Tensor

from megatron_rl_loss.logprobs import log_probs_from_hidden, log_probs_from_logits, loss_from_hidden

TOKENS, BONUS = 48, 0.05


@functools.cache
def sharp_batch() -> tuple[head_oracle.Batch, Tensor]:
    """Logits that half precision rounds far; and the gradient of the hidden states."""
    batch = batch_of(TOKENS, 24, 16, torch.bfloat16, sharp=6)
    leaf = batch.hidden.clone().requires_grad_()
    share_of(*head_oracle.log_probs_and_entropy(leaf @ batch.weight.T, batch.labels), batch).backward()
    assert leaf.grad is not None
    return batch, leaf.grad


def losses_of(
    log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    assert entropy is not None
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) - BONUS * entropy, {}


def share_of(log_probs: Tensor, entropy: Tensor | None, batch: head_oracle.Batch) -> Tensor:
    return (losses_of(log_probs, entropy, batch.old_log_probs, batch.advantages)[0] * batch.weights).sum()


def naive(hidden: Tensor, weight: Tensor, batch: head_oracle.Batch) -> Tensor:
    """As one would write it, in the dtypes that it is given or that autocast chooses."""
    log_q = (hidden @ weight.T).float().log_softmax(-1)
    return share_of(log_q.gather(-1, batch.labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1), batch)


def from_logits(hidden: Tensor, weight: Tensor, batch: head_oracle.Batch) -> Tensor:
    return share_of(*log_probs_from_logits(hidden @ weight.T, batch.labels, entropy=True), batch)


def two_passes(hidden: Tensor, weight: Tensor, batch: head_oracle.Batch) -> Tensor:
    return share_of(*log_probs_from_hidden(hidden, weight, batch.labels, entropy=True, token_mask=batch.mask), batch)


def one_pass(hidden: Tensor, weight: Tensor, batch: head_oracle.Batch) -> Tensor:
    inputs = {"old": batch.old_log_probs, "advantages": batch.advantages}
    return loss_from_hidden(hidden, weight, batch.labels, batch.weights, losses_of, inputs, entropy=True).share


PLACES = {"inside": (True, True), "backward outside": (True, False), "backward inside alone": (False, True)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("way", [from_logits, two_passes, one_pass])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_it_is_as_near_as_the_naive_way(to: torch.dtype, way: Any, at: tuple[bool, bool]) -> None:
    forward, backward = (torch.autocast("cpu", dtype=to, enabled=on) for on in at)
    batch, expected = sharp_batch()
    for of_hidden, of_weight in itertools.product(DTYPES, DTYPES):
        if of_hidden != of_weight and not at[0]:
            continue  # refused, as torch does
        errors = []
        for function in (way, naive):
            hidden, weight = batch.hidden.to(of_hidden).requires_grad_(), batch.weight.to(of_weight).requires_grad_()
            with forward:
                share = function(hidden, weight, batch)
            alone = function is naive and way is not from_logits and not at[0]  # ours hands no product to autograd
            with contextlib.nullcontext() if alone else backward:
                share.backward()
            assert hidden.grad is not None
            errors.append(relative(hidden.grad, expected))
        assert errors[0] <= 1.2 * errors[1] + 1e-5, (of_hidden, of_weight, errors)

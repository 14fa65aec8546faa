"""A kernel behind `log_probs_from_logits`, against float64."""

from typing import Any

import head_oracle
import torch
from head_oracle import VOCABULARY, batch_of, relative

from megatron_rl_loss import log_probs_from_logits


def check(kernel: Any, device: str = "cpu", bound: float = 1e-6) -> None:
    """Value and gradient."""
    batch = batch_of(19, VOCABULARY, 8)
    leaf = (batch.hidden @ batch.weight.T).requires_grad_()
    expected, slopes = head_oracle.log_probs_and_entropy(leaf, batch.labels)[0] * batch.mask, torch.linspace(-1, 2, 19)
    (gradient,) = torch.autograd.grad((expected * slopes).sum(), leaf)
    logits = leaf.detach().float().to(device).requires_grad_()
    labels = batch.labels.masked_fill(~batch.mask, -7).int().to(device)
    before = logits.detach().clone()
    found = log_probs_from_logits(logits, labels, token_mask=batch.mask, kernel=kernel)
    (given,) = torch.autograd.grad((found.log_probs * slopes.to(device)).sum(), logits)
    assert found.entropy is None
    assert relative(found.log_probs.cpu(), expected) <= bound
    assert relative(given.cpu(), gradient) <= bound
    assert torch.equal(logits.detach(), before)

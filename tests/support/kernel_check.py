"""A maker of log-probs behind `log_probs_from_logits`, value and gradient against float64."""

from typing import Any

import head_oracle
import torch
from head_oracle import batch_of, relative

from megatron_rl_loss.logprobs import log_probs_from_logits

TOKENS, VOCABULARY = 19, 24


def check(kernel: Any, device: str = "cpu", bound: float = 1e-6) -> None:
    batch = batch_of(TOKENS, VOCABULARY, 8)
    leaf = (batch.hidden @ batch.weight.T).requires_grad_()
    expected, _ = head_oracle.log_probs_and_entropy(leaf, batch.labels)
    expected = expected * batch.mask
    slopes = torch.linspace(-1, 2, TOKENS).double()
    (gradient,) = torch.autograd.grad((expected * slopes).sum(), leaf)
    logits = leaf.detach().float().to(device).requires_grad_()
    labels = batch.labels.masked_fill(~batch.mask, -7).int().to(device)
    before = logits.detach().clone()
    found = log_probs_from_logits(logits, labels, token_mask=batch.mask, kernel=kernel)
    (given,) = torch.autograd.grad((found.log_probs * slopes.float().to(device)).sum(), logits)
    assert found.entropy is None
    assert relative(found.log_probs.cpu(), expected) <= bound
    assert relative(given.cpu(), gradient) <= bound
    assert torch.equal(logits.detach(), before)

"""A kernel behind `log_probs_from_logits` or `log_probs_from_hidden`, against float64."""

from typing import Any

import head_oracle
import torch
from head_oracle import VOCABULARY, batch_of, relative
from ranks import start_process_group

from megatron_rl_loss import OutputLayer, log_probs_from_hidden, log_probs_from_logits
from megatron_rl_loss.logprobs import kernels


def check(kernel: Any, device: str = "cpu", bound: float = 1e-6) -> None:
    """Value and gradient."""
    batch = batch_of(19, VOCABULARY, 8)
    leaf = (batch.hidden @ batch.weight.T).requires_grad_()
    expected, slopes = head_oracle.log_probs_and_entropy(leaf, batch.labels)[0] * batch.mask, torch.linspace(-1, 2, 19)
    (gradient,) = torch.autograd.grad((expected * slopes).sum(), leaf)
    logits = leaf.detach().float().to(device).requires_grad_()
    labels = batch.labels.masked_fill(~batch.mask, -7).int().to(device)
    before = logits.detach().clone()
    outputs = log_probs_from_logits(logits, labels, token_mask=batch.mask, kernel=kernel)
    (slope,) = torch.autograd.grad((outputs.log_probs * slopes.to(device)).sum(), logits)
    assert outputs.entropy is None
    assert relative(outputs.log_probs.cpu(), expected) <= bound
    assert relative(slope.cpu(), gradient) <= bound
    assert torch.equal(logits.detach(), before)


#: Of log-probs, entropy, and the gradients of hidden states and weight.
Errors = tuple[float, ...]


def errors_from_hidden(
    kernel: str | None, group: Any = None, device: str = "cpu", dtype: torch.dtype = torch.float32, **parallel: Any
) -> Errors:
    """Relative errors of this rank's part, at a temperature and with entropy; 32 tokens, some of them masked."""
    batch, temperature = batch_of(32, VOCABULARY, 8, dtype), 0.7
    leaves = [leaf.clone().requires_grad_() for leaf in (batch.hidden, batch.weight)]
    expected_head = head_oracle.log_probs_and_entropy(leaves[0] @ leaves[1].T, batch.labels, temperature)
    log_probs, entropy = (column * batch.mask for column in expected_head)
    slopes = torch.linspace(-1, 2, 32)
    gradients = torch.autograd.grad(((log_probs - 0.3 * entropy) * slopes).sum(), leaves)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    columns = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    part = slice(rank * 32 // size, (rank + 1) * 32 // size) if parallel.get("sequence_parallel") else slice(None)
    hidden, weight = batch.hidden[part], batch.weight[columns]
    mine = [leaf.detach().to(device, dtype).requires_grad_() for leaf in (hidden, weight)]
    labels = batch.labels.masked_fill(~batch.mask, -7).to(device)
    output_layer = OutputLayer(mine[1], tp_group=group, **parallel, temperature=temperature)
    ours: Any = log_probs_from_hidden(mine[0], output_layer, labels, entropy=True, token_mask=batch.mask, kernel=kernel)
    grads = torch.autograd.grad(((ours.log_probs - 0.3 * ours.entropy) * slopes.to(device)).sum(), mine)
    expected = log_probs, entropy, gradients[0][part], gradients[1][columns]
    return tuple(relative(computed.cpu(), right) for computed, right in zip((*ours, *grads), expected, strict=True))


def fallback_on_rank() -> dict[str, Errors]:
    """Liger's torch fallback, which asks for CUDA tensors though it needs none, and ours."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as theirs

    start_process_group()
    theirs._validate_tp_inputs = kernels._unsupported = lambda *_: []
    world = torch.distributed.group.WORLD
    return {
        f"{kernel}, sequence parallel: {cut}": errors_from_hidden(kernel, world, sequence_parallel=cut)
        for kernel in ("liger", None)
        for cut in (False, True)
    }

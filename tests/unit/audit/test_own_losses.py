"""The judge of one's own losses finds backward passes of public reports that are wrong before the losses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_rl_loss import check_loss
from megatron_rl_loss.audit.simulation import LossCall
from megatron_rl_loss.proof.own_losses import OwnLosses, judge_backward

TOKENS, WIDTH, VOCABULARY = 12, 8, 16


class Fused(torch.autograd.Function):
    """Cross-entropies of hidden states and a weight; the gradient is made in the forward pass, as by fused kernels."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, fault: str) -> Tensor:
        z = hidden @ weight.T
        logit_slopes = z.softmax(-1).index_put((torch.arange(len(z)), labels), z.new_tensor(-1.0), accumulate=True)
        ctx.save_for_backward(hidden, weight, logit_slopes)
        ctx.fault = fault
        return cross_entropy(z, labels, reduction="none")

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Any, ...]:
        hidden, weight, logit_slopes = ctx.saved_tensors
        (g,) = above
        if ctx.fault == "the first token's for all":  # Liger-Kernel #680, #1298
            g = g[:1].expand_as(g)
        elif ctx.fault == "ones":
            g = torch.ones_like(g)
        elif ctx.fault == "its sign":
            g = g.sign()
        elif ctx.fault == "the mean":
            g = g.mean().expand_as(g)
        slopes = logit_slopes * g[:, None]
        weight_gradient = slopes.T @ hidden
        return slopes @ weight, weight_gradient * (2 if ctx.fault == "the weight's twice" else 1), None, None


def own(fault: str, dtype: torch.dtype = torch.float32) -> OwnLosses:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return OwnLosses(lambda: Fused.apply(hidden, weight, labels, fault), [hidden, weight])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_backward_passes(dtype: torch.dtype, seed: int) -> None:
    judged = own("", dtype)
    before = [parameter.detach().clone() for parameter in judged.parameters]
    assert judge_backward(judged, seed=seed) == ""
    assert all(map(torch.equal, before, judged.parameters))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("ones", "do not add up"),
        ("its sign", "do not add up"),
        ("the first token's for all", "does not weigh each token by what comes from above"),
        ("the mean", "does not weigh each token by what comes from above"),
        ("the weight's twice", "along a direction in which their gradient says"),
    ],
)
def test_a_wrong_backward_is_found(fault: str, says: str, seed: int) -> None:
    assert says in judge_backward(own(fault), seed=seed)


def share(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens


def test_check_loss_judges_them_where_they_are_given() -> None:
    call = LossCall(dp="sum")
    assert check_loss(share, "token_mean", call=call, draws=2, own_losses=own("")).sound
    report = check_loss(share, "token_mean", call=call, draws=2, own_losses=own("the first token's for all"))
    (finding,) = report.findings
    assert finding.kind == "backward"
    assert not report.sound
    assert "in the losses themselves: the weighted losses change by" in str(report)


def test_losses_that_cannot_be_judged_are_refused() -> None:
    judged = own("")
    with pytest.raises(ValueError, match="own losses without a graph"):
        judge_backward(OwnLosses(lambda: judged.losses().detach(), judged.parameters))
    with pytest.raises(ValueError, match="change from call to call"):
        judge_backward(OwnLosses(lambda: judged.losses() * torch.rand(()), judged.parameters))

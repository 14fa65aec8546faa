"""What holds for every loss: masked tokens, NaN at active ones, second derivatives, half precision."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss import Samples, logprobs, losses
from megatron_rl_loss.losses import POLICY_LOSSES, kl_estimate, policy_loss, value_loss
from megatron_rl_loss.plan import plan_step

Inputs = dict[str, Tensor]
LossOf = Callable[[Inputs, Any], Tensor]
MASKS = [torch.tensor([1, 1, 0, 1, 0]), torch.tensor([0, 0.5, 1])]
MASKED = torch.cat(MASKS) == 0
INF, NAN = float("inf"), float("nan")


def of_policy(name: str, given: Inputs, local: Any) -> Tensor:
    tokens = (given[key] for key in ("log_probs", "old_log_probs", "advantages"))
    return policy_loss(name, *tokens, local, importance_weights=given["importance_weights"]).per_token_loss


LOSSES: dict[str, LossOf] = {name: functools.partial(of_policy, name) for name in POLICY_LOSSES}
LOSSES["kl"] = lambda given, local: kl_estimate(given["log_probs"], given["old_log_probs"], local)
LOSSES["value"] = lambda given, local: value_loss(
    given["log_probs"], given["old_log_probs"], local, old_values=given["advantages"], clip=0.2
)
OF_SEQUENCES = {name for name, loss in POLICY_LOSSES.items() if loss.of_sequence}
#: Losses of sequences always know the mask.
PLACES = [(name, where) for name in LOSSES for where in ("micro-batch", "mask", "nothing")]
everywhere = pytest.mark.parametrize(
    ("name", "where"), [one for one in PLACES if one[0] not in OF_SEQUENCES or one[1] == "micro-batch"]
)


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """Log-ratios on both sides of 0, advantages of both signs, all exact in bfloat16."""
    old = torch.tensor([-2.0, -1.5, -3.0, -2.5, -1.0, -0.5, -4.0, -2.0])
    log_ratio = torch.tensor([0.5, -0.25, 0.125, -0.5, 0.25, 0.25, 0.75, -0.125])
    advantages = torch.tensor([1.0, 1.0, -1.0, -2.0, 1.0, -1.0, -1.0, 0.5])
    weights = torch.tensor([1.0, 0.5, 1.0, 1.5, 1.0, 2.0, 1.0, 1.0])
    made = {"log_probs": old + log_ratio, "old_log_probs": old, "advantages": advantages, "importance_weights": weights}
    return {name: one.to(dtype) for name, one in made.items()}


def share_and_gradient(loss: LossOf, given: Inputs, where: str) -> tuple[Tensor, Tensor]:
    (microbatch,) = plan_step([Samples(MASKS)], "sample_mean", dp_group=None)
    leaf = given["log_probs"].clone().requires_grad_()
    local = {"micro-batch": microbatch, "mask": microbatch.tokens.mask, "nothing": None}[where]
    share = microbatch(loss(given | {"log_probs": leaf}, local))
    share.backward()
    assert leaf.grad is not None
    return share.detach(), leaf.grad


@everywhere
def test_masked_tokens_change_no_bit(name: str, where: str) -> None:
    share, gradient = share_and_gradient(LOSSES[name], inputs(), where)
    assert share.isfinite()
    assert gradient[~MASKED].count_nonzero() > 0
    assert (gradient[MASKED] == 0).all()
    for key in inputs():
        for poison in (NAN, INF, -INF, 1e30):
            if where == "nothing" and poison > 0 and key.endswith("log_probs") and name in POLICY_LOSSES:
                continue  # refused: it may be an active token's
            poisoned = {one: x.masked_fill(MASKED, poison) if one == key else x for one, x in inputs().items()}
            found = share_and_gradient(LOSSES[name], poisoned, where)
            assert torch.equal(found[0], share), (key, poison)
            assert torch.equal(found[1], gradient), (key, poison)


def test_without_a_mask_other_uses_of_the_log_probs_keep_their_gradient() -> None:
    given = inputs()
    leaf = given["log_probs"].clone().requires_grad_()
    ((LOSSES["ppo"](given | {"log_probs": leaf}, None) * 0).sum() + leaf.sum()).backward()
    assert leaf.grad.tolist() == [1] * len(leaf)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_an_active_token_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    at_fault = torch.arange(len(MASKED)) == 6
    given = {key: x.masked_fill(at_fault, NAN) if key == "old_log_probs" else x for key, x in inputs().items()}
    with caplog.at_level(logging.WARNING):
        share, _ = share_and_gradient(LOSSES[name], given, "micro-batch")
    assert share.isnan()
    assert "per_token_loss is nan at token 1 of sample 1 of a micro-batch" in caplog.text


def test_one_of_several_terms_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (microbatch,) = plan_step([Samples(MASKS)], "token_mean", dp_group=None)
    wrong = torch.zeros(8).index_fill_(0, torch.tensor([3]), INF).requires_grad_()
    microbatch.loss({"pg": torch.zeros(8, requires_grad=True), "kl": wrong})
    assert [record.message.split(" of a micro-batch")[0] for record in caplog.records] == [
        "rank 0: the term 'kl' is inf at token 3 of sample 0"
    ]


@everywhere
def test_half_precision_is_float32_of_the_same_inputs(name: str, where: str) -> None:
    given = inputs()
    given["old_log_probs"][6] = -15.5  # with A < 0: its ratio, e^11.75, is more than float16 can hold
    given["log_probs"][6] = -3.75
    share, gradient = share_and_gradient(LOSSES[name], given, where)
    for dtype in (torch.bfloat16, torch.float16):
        found = share_and_gradient(LOSSES[name], {key: x.to(dtype) for key, x in given.items()}, where)
        assert torch.equal(found[0], share)
        assert torch.equal(found[1], gradient.to(dtype))


def test_ratios_of_other_policies_are_made_in_float32() -> None:
    one, other = torch.tensor([-2.0, -0.0078125]).bfloat16(), torch.tensor([-15.5, -2.0]).bfloat16()
    for function in (losses.distillation_advantages, losses.truncated_importance_weights):
        assert torch.equal(function(one, other), function(one.float(), other.float()))
    assert torch.equal(losses.importance_weights(other, high=9.0), losses.importance_weights(other.float(), high=9.0))


def penalised(share_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a share and of the square of its gradient."""
    leaf = inputs(torch.float64)["log_probs"].requires_grad_()
    share = share_of(leaf)
    (gradient,) = torch.autograd.grad(share, leaf, create_graph=True)
    (share + gradient.square().sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_penalty_is_exact_or_refused(name: str) -> None:
    given = inputs(torch.float64)
    (microbatch,) = plan_step([Samples(MASKS)], "sample_mean", dp_group=None)

    def loss(leaf: Tensor, local: Any) -> Tensor:
        return LOSSES[name](given | {"log_probs": leaf}, local)

    if name in OF_SEQUENCES - {"gspo_token"}:
        with pytest.raises(ValueError, match=r"create_graph=True through .+: its gradient has no graph"):
            penalised(lambda leaf: microbatch(loss(leaf, microbatch)))
        return
    weights, local = microbatch.weights.double(), microbatch if name in OF_SEQUENCES else None
    by_hand = penalised(lambda leaf: (weights * loss(leaf, local)).sum())
    found = penalised(lambda leaf: microbatch(loss(leaf, microbatch)))
    torch.testing.assert_close(found, by_hand, rtol=1e-6, atol=1e-9)


def test_every_node_of_the_package_was_tried() -> None:
    """Each custom node refuses a second derivative, but for the reducer's, whose gradient is a constant."""
    nodes = [one for one in torch.autograd.Function.__subclasses__() if one.__module__.startswith("megatron_rl_loss.")]
    assert len(nodes) >= 6, logprobs
    for node in nodes:
        if node.__name__ != "_WithGradient":
            with torch.enable_grad(), pytest.raises(ValueError, match="create_graph=True through"):
                node.backward(None)

"""Wrong uses of losses that once passed in silence: each is refused or warned of, and its right neighbour is not."""

import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import (
    Gate,
    Samples,
    Term,
    ZigzagBSHD,
    importance_weights,
    keep_tokens,
    kl_estimate,
    log_probs_from_logits,
    plan_step,
    policy_loss,
    segment_quantile,
    surviving_masks,
)
from megatron_rl_loss.logprobs.kept_ids import KeptIds

MASK, LOCAL = torch.ones(4), Samples([[1, 1, 1], [1]]).local(0, 1)
IN_ROWS = Samples([[1, 1, 1], [1]], layout=ZigzagBSHD(2, 4, [3, 1])).local(0, 1)
NOW = torch.tensor([-1.0, -2.0, -0.5, -3.0])


def trained() -> Tensor:
    return NOW.clone().requires_grad_()


# --- one token far from the reference


def test_a_bounded_kl_has_no_gradient_beyond_and_the_formulas_within() -> None:
    """In float64 by Schulman's formulas, d clamped; r is not."""
    now = torch.tensor([-60.0, -12.0, -1.0, -0.5], dtype=torch.float64)
    reference, old = torch.tensor([-1.0, -1.0, -1.5, -0.5]).double(), torch.tensor([-59.0, -12.5, -1.0, -1.0]).double()
    d = now - reference
    for estimator, weighted in (("k1", True), ("k2", False), ("k3", False), ("k3", True)):
        clamped, r = d.clamp(-20, 20), (now - old).exp() if weighted else torch.ones(4).double()
        k = {"k1": clamped, "k2": clamped**2 / 2, "k3": (-clamped).exp() - 1 + clamped}[estimator]
        slope = {
            "k1": r * (1 + d),
            "k2": d,
            "k3": r * d if weighted else 1 - (-d).exp(),
        }[estimator] * (d.abs() <= 20)
        leaf = now.clone().requires_grad_()
        settings: dict[str, Any] = {"estimator": estimator, "bound": 20.0, "old_log_probs": old if weighted else None}
        value = kl_estimate(leaf, reference, torch.ones(4), **settings)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        torch.testing.assert_close(value.detach(), r * k, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=0)
    assert (1 - (-d).exp())[0].abs() > 1e25  # what the bound leaves out


def test_without_a_bound_the_token_is_named() -> None:
    far, reference = torch.tensor([-1.0, -2.0, -12.5, -3.0], requires_grad=True), NOW
    for local, name in (
        (LOCAL, "token 2 of sample 0"),
        (MASK, r"the token at \[2\]"),
    ):
        with pytest.warns(UserWarning, match=f"{name} has a log-prob 12 below the reference's"):
            kl_estimate(far, reference, local)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kl_estimate(far, reference, LOCAL, bound=10.0)
        kl_estimate(far.detach(), reference, LOCAL)  # a metric
        kl_estimate(far, reference, torch.tensor([1, 1, 0, 1]))  # masked


# --- weights


def test_the_gradient_of_sapo_far_below_is_that_of_its_formula() -> None:
    for log_ratio in (-10.0, -17.0, -30.0, -60.0):
        old = torch.tensor([-0.5])
        now = (old + log_ratio).requires_grad_()
        (slope,) = torch.autograd.grad(policy_loss("sapo", now, old, torch.ones(1), torch.ones(1)).per_token_loss, now)
        gate = 1 / (1 + math.exp(-math.expm1(log_ratio)))
        right = -4 * gate * (1 - gate) * math.exp(log_ratio)
        assert slope.item() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("tau", [0.3, 1.0, 7.0])
def test_the_gradient_of_sapo_far_above_is_that_of_its_formula(tau: float) -> None:
    """1 less the gate, not of the rounded gate: to the rounding of the exponent, which is up to 80."""
    for ratio in (1.5, 4.0, 8.0, 13.0, 20.0, 60.0):
        place = tau * (ratio - 1)
        if place > 80:  # below float32's smallest normal number
            continue
        old = torch.tensor([-5.0])
        now = (old + math.log(ratio)).requires_grad_()
        inputs = now, old, torch.ones(1), torch.ones(1)
        (slope,) = torch.autograd.grad(policy_loss("sapo", *inputs, tau_positive=tau).per_token_loss, now)
        r = math.exp(float(now.detach().double() - old.double()))
        u = tau * (r - 1)
        right = -4 * r / ((1 + math.exp(-u)) * (1 + math.exp(u)))
        # u is made of an exp and a product, which round twice, relatively; so does its exp.
        assert slope.item() == pytest.approx(right, rel=(4 + 4 * (u + tau)) * 2**-24)


def weights_of_long_sequences(gate: Gate) -> Tensor:
    """Eight sequences of 9,000 tokens, each ratio near 1: the products are near 0, the means are not."""
    generator = torch.Generator().manual_seed(0)
    samples = Samples([[1] * 9000] * 8)
    log_ratio = 0.02 * torch.randn(samples.total_tokens, generator=generator) - 5e-4
    return importance_weights(log_ratio, gate, samples.local(0, 1))


def test_products_over_long_sequences_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mean = weights_of_long_sequences(Gate(level="sequence", high=2.0, action="clamp"))
    assert mean.min() > 0.99
    assert not caplog.records
    product = weights_of_long_sequences(Gate(level="sequence", aggregate="sum", high=2.0, action="clamp"))
    assert product.median() < 0.1
    (record,) = caplog.records
    assert "of the weights" in record.message
    assert "a product over a long sequence is so. Take aggregate='mean'" in record.message


@pytest.mark.parametrize("at", [[3], [1, 7]])
def test_a_short_sequence_is_not_blamed_for_placeholders(at: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """SkyRL#2148: twelve tokens each, of which the sampler gave one or two as 0."""
    log_ratio = torch.full((8, 12), 0.01)
    log_ratio[:, at] = -9.0
    product_gate = Gate(level="sequence", aggregate="sum", high=2.0, low=0.5)
    importance_weights(log_ratio.flatten(), product_gate, Samples([[1] * 12] * 8).local(0, 1))
    (record,) = caplog.records
    few = re.search(r"The gap lies at (\d+) of 96 tokens", record.message)
    assert few is not None
    assert 0.9 * 8 * len(at) <= int(few[1]) <= 8 * len(at)
    assert "long sequence" not in record.message
    caplog.clear()
    importance_weights(torch.full((96,), -1.9), product_gate, Samples([[1] * 12] * 8).local(0, 1))
    (record,) = caplog.records
    assert "|log-ratio| is 1.9 on average. Compare the two sides" in record.message


def test_lost_weights_are_counted_over_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """NeMo-RL#2269: micro-batches of a sequence or two; it is said once in a step, and again in the next."""
    gate = Gate(level="sequence", low=0.5, high=2.0)
    plan = plan_step([Samples([[1] * 12] * size) for size in (1, 2, 3, 1, 4)], "sample_mean", dp_group=None)
    for step in (1, 2):
        for microbatch, size in zip(plan, (1, 2, 3, 1, 4), strict=True):
            importance_weights(torch.full((12 * size,), -1.9), gate, microbatch)
        assert len(caplog.records) == step
        plan.reset()
    few = plan_step([Samples([[1] * 12] * size) for size in (3, 4)], "sample_mean", dp_group=None)
    for microbatch, size in zip(few, (3, 4), strict=True):
        importance_weights(torch.full((12 * size,), -1.9), gate, microbatch)
    assert len(caplog.records) == 2


def test_bounds_that_decide_every_weight_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    log_ratio = torch.tensor([-0.9, 0.9, -0.8, 0.7, 0.01] * 2)
    importance_weights(log_ratio, Gate(low=0.3, high=3.0))
    assert not caplog.records
    importance_weights(log_ratio, Gate(low=0.9, high=1.1))
    importance_weights(log_ratio, Gate(metric="k2", high=0.1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "80% of the weights" in caplog.records[0].message
    assert "are outside" in caplog.records[1].message


# --- advantages and widths


def losses_of(advantages: Any, local: Any = LOCAL, name: str = "ppo", **settings: Any) -> Any:
    return policy_loss(name, trained(), NOW, torch.tensor(advantages), local, **settings)


WARNED: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "advantages of 0 at some tokens": (
        lambda: losses_of([0.0, 1, 1, 1]),
        "sample 0 has advantages of exactly 0 at 1 of 3 active tokens",
        lambda: losses_of([0.0, 0, 0, 1]),  # all of a sample: its group has equal rewards
    ),
    "advantages of 0 in a second sample": (
        lambda: losses_of([1.0, 1, 0, 1], Samples([[1, 1], [1, 1]]).local(0, 1), "cispo"),
        "sample 1 has advantages",
        lambda: losses_of([0.0, 1, 1, 1], Samples([[0, 1, 1], [1]]).local(0, 1)),  # it is masked
    ),
    "widths of tokens in GSPO": (
        lambda: losses_of([1.0] * 4, name="gspo", clip_low=0.2, clip_high=0.28),
        "widths of a token's ratio",
        lambda: losses_of([1.0] * 4, name="gspo", clip_low=0.03, clip_high=0.04),
    ),
    "one width of tokens in LUSPO": (
        lambda: losses_of([1.0] * 4, name="luspo", clip_low=0.2, clip_high=0.2),
        "next to nothing is clipped",
        lambda: losses_of([1.0] * 4, name="luspo"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_warned_of(name: str) -> None:
    wrong, text, right = WARNED[name]
    with pytest.warns(UserWarning, match=text):
        wrong()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right()


# --- refusals


LOGITS, LABELS = torch.zeros(2, 4), torch.tensor([0, 1])


def kept(ids: Any, offsets: Any) -> Any:
    return log_probs_from_logits(LOGITS, LABELS, keep=KeptIds(torch.tensor(ids), torch.tensor(offsets)))


REFUSALS = {
    **refusals(
        lambda log_probs, **more: kl_estimate(log_probs, NOW, MASK, estimator="k1", **more),
        ((trained(),), "k1 of log-probs that require grad, without old_log_probs", (NOW,)),
        ({"log_probs": trained()}, "whatever the reference is", {"log_probs": trained(), "old_log_probs": NOW}),
    ),
    **refusals(
        lambda bound: kl_estimate(trained(), NOW, MASK, bound=bound),
        ((0.0,), r"bound is 0.0: it must be a number in \(0, inf\)", (20.0,)),
        (("20",), "bound is '20'", (20,)),
        ((-5,), "bound is -5", (None,)),
    ),
    **refusals(
        lambda log_ratio, **more: importance_weights(log_ratio, Gate(high=2.0), **more),
        ((trained(),), "log-ratios that require grad: a weight is a constant", (NOW,)),
        ((trained() - NOW,), "Pass old_log_probs - rollout_log_probs, or detach", ((trained() - NOW).detach(),)),
        ({"log_ratio": NOW, "log_probs": NOW[:2]}, r"log_probs of shape \(2,\)", {"log_ratio": NOW, "log_probs": NOW}),
    ),
    **refusals(  # sequence first: the mask would be read in another order
        lambda log_ratio: importance_weights(log_ratio, Gate(high=2.0), IN_ROWS),
        ((torch.zeros(4, 2),), r"log_ratio of shape \(4, 2\): .* transpose to batch first", (torch.zeros(2, 4),)),
        ((torch.zeros(3),), r"log_ratio of shape \(3,\)", (torch.zeros(8),)),
    ),
    **refusals(
        lambda **more: losses_of([1.0] * 4, **more),
        ({"clip_low": 0.8, "clip_high": 0.28}, "clipped at 0.2 and 1.28", {"clip_low": 0.2, "clip_high": 0.28}),
        ({"clip_low": 0.9, "clip_high": 0.1}, "clip_low=0.1 for a bound of 0.9", {"clip_low": 0.9, "clip_high": 3}),
        ({"name": "gspo", "clip_low": 0.999, "clip_high": 1e-3}, "clipped at 0.001", {"name": "gspo"}),
    ),
    **refusals(
        kept,
        (([0, 4, 1], [0, 2, 3]), "KeptIds with ids from 0 to 4 in a vocabulary of 4", ([0, 3, 1], [0, 2, 3])),
        (([0, -1, 1], [0, 2, 3]), "ids from -1 to 1", ([0, 2, 1], [0, 2, 3])),
        (([0, 1, 1], [0, 2, 1]), r"offsets \[0, 2, 1\] for 3 ids: they must never decrease", ([0, 1, 1], [0, 2, 3])),
        (([0, 1, 1], [0, 2, 9]), "to the number of ids", ([0, 1, 1], [0, 3, 3])),
        (([0, 1, 1], [0, 2, 2]), "to the number of ids", ([0, 1], [0, 2, 2])),
        (([0, 1, 1], [-1, 2, 3]), "a leading 0 included", ([0, 1, 1], [0, 0, 3])),
        (([0, 1, 1], [1, 2, 3]), "a leading 0 included", ([0, 1, 1], [0, 2, 3])),
        (([0, 1], [0, 1, 1, 2]), r"offsets of shape \(4,\) for 2 tokens", ([0, 1], [0, 1, 2])),
    ),
    **refusals(
        lambda ids, offsets: log_probs_from_logits(LOGITS, LABELS, keep=KeptIds(ids, offsets)),
        ((LABELS[:, None], [0, 1, 2]), r"ids of torch.int64 \(2, 1\) and offsets of int64", (LABELS, [0, 1, 2])),
        ((LABELS.float(), [0, 1, 2]), "ids must be a tensor of ints", (LABELS.to(torch.uint8), [0, 1, 2])),
        ((LABELS > 0, [0, 1, 2]), r"ids of torch.bool \(2,\)", (LABELS.to(torch.int16), [0, 1, 2])),
        (([0, 1], [0, 1, 2]), "ids of list", (LABELS, np.array([0, 1, 2], np.uint32))),
        ((LABELS, [[0, 1, 2]]), r"offsets of int64 \(1, 3\): .*offsets ints \[tokens \+ 1\]", (LABELS, [0, 1, 2])),
        ((LABELS, 2), r"offsets of int64 \(\): .*cumulative counts", (LABELS, [0, 1, 2])),
        ((LABELS, [0, 1.5, 2]), "offsets of float64: .*cumulative counts", (LABELS, [0, 1, 2])),
        ((LABELS, torch.ones(3) > 0), "offsets of bool", (LABELS, torch.tensor([0, 1, 2]))),
        error=TypeError,
    ),
    **refusals(
        lambda q: segment_quantile(NOW, LOCAL, q=q),
        ((0.0,), r"q is 0.0: it must be a number in \(0, 1\]", (1,)),
        ((50,), "q is 50", (0.5,)),
    ),
    **refusals(
        lambda gate, **more: surviving_masks([[1, 1], [1]], [[0.1, -0.1], [0.2]], gate, **more),
        ((Gate(metric="tv", high=0.1),), "a gate of tv without log_probs", (Gate(metric="k2", high=0.1),)),
        (
            {"gate": Gate(metric="tv", high=0.1), "log_probs": [[-1.0, -1.0]]},
            "1 log-probs for 2 loss masks",
            {"gate": Gate(metric="tv", high=0.1), "log_probs": [[-1.0, -1.0], [-1.0]]},
        ),
        (
            {"gate": Gate(high=2.0, level="sequence"), "rollout_ids": [0, 0]},
            "with a gate of a sequence",
            {"gate": Gate(high=2.0, level="rollout"), "rollout_ids": [0, 0]},
        ),
        (
            {"gate": Gate(high=2.0, level="rollout"), "rollout_ids": [0]},
            "1 rollout_ids for 2 loss masks",
            {"gate": Gate(high=2.0, level="rollout"), "rollout_ids": [0, 1]},
        ),
    ),
    **refusals(
        lambda gate: importance_weights(NOW, gate),
        (({"high": 2.0},), "gate is {'high': 2.0}: it must be a Gate", (Gate(high=2.0),)),
        ((None,), "it must be a Gate", (Gate(high=5.0),)),
        error=TypeError,
    ),
}  # fmt: skip
test_refusals = refusal_tests(REFUSALS)


def test_survivors_of_rollouts_are_judged_together() -> None:
    """By every aggregate, in plain Python: a rollout's samples are one."""
    masks: list[list[float]] = [[1, 0.5, 0], [1, 1], [1]]
    rows, ids = [[0.3, 0.4, 9.0], [-0.6, 0.1], [0.7]], ["a", "b", "a"]
    aggregates: list[Any] = ["mean", "sum", "max"]
    for aggregate, high in itertools.product(aggregates, (1.2, 1.6, 2.1)):
        gate = Gate(level="rollout", aggregate=aggregate, high=high)
        survivors = surviving_masks(masks, rows, gate, rollout_ids=ids)
        for i, rollout in enumerate(ids):
            members = [
                (x, m)
                for k, row in enumerate(rows)
                for x, m in zip(row, masks[k], strict=True)
                if ids[k] == rollout and m
            ]
            total = math.fsum(x * m for x, m in members)
            judged = {
                "sum": total,
                "mean": total / math.fsum(m for _, m in members),
                "max": max(x for x, _ in members),
            }[aggregate]
            kept_whole = survivors[i].tolist() == pytest.approx(masks[i])
            assert kept_whole == (math.exp(judged) <= high)
            assert kept_whole or not survivors[i].any()


def test_a_gate_of_the_policy_in_training_counts_the_step_anew() -> None:
    """Before the step, from a forward pass: only the tokens within count in the term's denominators."""
    old, now = NOW, NOW + torch.tensor([0.1, 1.5, -0.1, 0.2])
    plan = plan_step([Samples([[1, 1, 1], [1]])], "token_mean", dp_group=None)
    gate = Gate(low=0.5, high=2.0)
    keep_tokens(plan, "within", lambda microbatch: importance_weights(now - old, gate, microbatch) > 0)
    losses = torch.tensor([1.0, 100.0, 2.0, 6.0], requires_grad=True)
    plan[0].loss({"pg": Term(losses, mask="within")}).backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])

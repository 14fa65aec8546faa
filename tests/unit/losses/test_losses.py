"""Properties of every loss: masked and rejected tokens, precision, devices, second derivatives."""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from rests import with_rest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_loss import (
    AtIds,
    Gate,
    Gathered,
    Samples,
    divergence_at_ids,
    gae,
    group_relative_advantages,
    importance_weights,
    kl_estimate,
    losses,
    policy_loss,
    segment_mean,
    segment_scan,
    surviving_masks,
    to_tokens,
    value_loss,
)
from megatron_rl_loss.losses.advantages import gdpo_advantages, rloo_advantages
from megatron_rl_loss.losses.by_name import POLICY_LOSSES
from megatron_rl_loss.losses.off_policy import keep_sequences
from megatron_rl_loss.losses.token import dppo_loss

INF, NAN = float("inf"), float("nan")


def test_k3_is_the_default_and_not_negative_in_float32() -> None:
    difference = torch.linspace(-1e-3, 1e-3, 2001)  # exp(-d) - 1 taken naively rounds below zero near d = 0
    tokens = difference, torch.zeros(2001), torch.ones(2001)
    assert float(kl_estimate(*tokens).min()) >= -1e-10
    assert torch.equal(kl_estimate(*tokens), kl_estimate(*tokens, estimator="k3"))


def test_the_gradient_of_k3_times_the_ratio_is_that_of_the_kl() -> None:
    """Over all tokens of a small vocabulary, whatever policy drew them; without the ratio it is another."""
    logits, reference, old = (torch.randn(7, dtype=torch.float64).log_softmax(0) for _ in range(3))
    leaf = logits.requires_grad_()

    def gradient(of_tokens: Callable[[Tensor], Tensor]) -> Tensor:
        now = leaf.log_softmax(0)
        return torch.autograd.grad((old.exp() * of_tokens(now)).sum(), leaf)[0]

    (right,) = torch.autograd.grad((leaf.softmax(0) * (leaf.log_softmax(0) - reference)).sum(), leaf)
    tokens = reference, torch.ones(7)
    for estimator in ("k1", "k3"):
        slopes = gradient(lambda now: kl_estimate(now, *tokens, estimator=estimator, old_log_probs=old))  # noqa: B023
        assert torch.allclose(slopes, right, atol=1e-15)
    assert not torch.allclose(gradient(lambda now: kl_estimate(now, *tokens)), right, atol=1e-3)


#: The reference above the policy by up to 80, or below it; another policy drew the tokens.
GAPS = [(d, gap) for d in (-80.0, -40, -25, -20, -18, -14, -6, -1.1, -0.9, -1e-3, 0, 0.9, 9) for gap in (0, 0.3, -0.7)]
EXACT: dict[Any, Any] = {  # value and gradient by r and d
    ("k1", True): (lambda r, d: r * d, lambda r, d: r * (1 + d)),
    ("k3", False): (lambda r, d: torch.expm1(-d) + d, lambda r, d: -torch.expm1(-d)),
    ("k3", True): (lambda r, d: r * (torch.expm1(-d) + d), lambda r, d: r * d),
}


@pytest.mark.parametrize(("estimator", "times_ratio"), EXACT)
def test_estimates_far_from_the_reference(estimator: Any, times_ratio: bool) -> None:
    """To some roundings of a float32 exp and its argument; autograd's halves of r k3 cancel from d = -18 on."""
    d, gap = torch.tensor(GAPS).t()
    now = -0.75 + d.clamp(max=0)
    reference, old = now - d, now - gap  # exact as float64 takes them
    leaf = now.clone().requires_grad_()
    estimates = kl_estimate(
        leaf, reference, torch.ones(len(d)), estimator=estimator, old_log_probs=old if times_ratio else None
    )
    estimates.sum().backward()
    d, ratio = now.double() - reference.double(), (now.double() - old.double()).exp()
    value, slope = (formula(ratio, d) for formula in EXACT[estimator, times_ratio])
    for computed, right, cancels in (
        (estimates.detach(), value, 1e-7),
        (leaf.grad, slope, 1e-6 if estimator == "k1" else 0),
    ):
        torch.testing.assert_close(computed.double(), right, rtol=1e-5 if right is value else 5e-7, atol=cancels)


OF_TOKEN = st.floats(-200, 0, width=32)


@settings(deadline=None, derandomize=True, max_examples=100)
@for_all(OF_TOKEN, OF_TOKEN, st.floats(-60, 60, width=32))
def test_estimates_of_any_log_probs(now: float, reference: float, gap: float) -> None:
    """Against float64 of the same float32 inputs: an exp errs by the rounding of its argument, a sum by its terms'."""
    old = torch.tensor([min(now - gap, 0.0)]).clamp(min=-60 + max(now, reference))  # exps below e^60
    log_probs = torch.tensor([now]), torch.tensor([reference])
    from_old, reference_from_old = (log_prob.double() - old.double() for log_prob in log_probs)
    d, unit = log_probs[0].double() - log_probs[1].double(), torch.finfo(torch.float32).eps
    for (estimator, times_ratio), (of_value, of_slope) in EXACT.items():
        if not times_ratio and d < -60:
            continue
        leaf = log_probs[0].clone().requires_grad_()
        value = kl_estimate(
            leaf, log_probs[1], torch.ones(1), estimator=estimator, old_log_probs=old if times_ratio else None
        )
        (slope,) = torch.autograd.grad(value, leaf)
        ratio = from_old.exp() if times_ratio else torch.ones_like(from_old)
        terms = ratio * (1 + d.abs()) + (
            (reference_from_old.exp() if times_ratio else (-d).exp()) if estimator == "k3" else 0
        )
        bound = unit * (from_old.abs() + reference_from_old.abs() + d.abs() + 4)
        assert ((value.detach().double() - of_value(ratio, d)).abs() <= bound * terms + 1e-37).all()
        right = of_slope(ratio, d)
        size = ratio if estimator == "k1" else 0  # r + r d may cancel, r d does not
        assert ((slope.double() - right).abs() <= bound * (right.abs() + size) + 1e-37).all()


OF_ANY = st.lists(
    st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32), st.floats(-8, 8, width=32)),
    min_size=8,
    max_size=8,
)


@settings(deadline=None, derandomize=True, max_examples=40)
@for_all(OF_ANY)
def test_finite_inputs_have_finite_losses_and_gradients(tokens: list[tuple[float, float, float]]) -> None:
    """However far the policies are; and no gradient pushes a token against its advantage."""
    now, old, advantages = torch.tensor(tokens).t()
    reference = old.flip(0).clamp(min=-2e3)  # r is at most e^80, and float32 holds 2981 of it
    for drawn in (None, old):
        leaf = now.clamp(min=-2e3).requires_grad_()
        for estimator in ("k2" if drawn is None else "k1", "k3"):
            estimate = kl_estimate(leaf, reference, torch.ones(8), estimator=estimator, old_log_probs=drawn)
            (slope,) = torch.autograd.grad(estimate.sum(), leaf)
            assert torch.cat([estimate.detach(), slope]).isfinite().all(), estimator
    data = inputs() | {"log_probs": now, "old_log_probs": old, "advantages": advantages}
    for name in POLICY_LOSSES:
        leaf = now.clone().requires_grad_()
        loss = LOSSES[name](data | {"log_probs": leaf}, LOCAL)
        loss.sum().backward()
        assert loss.isfinite().all(), name
        assert leaf.grad.isfinite().all(), name
        if name not in OF_SEQUENCES and name != "cfpo":
            assert (leaf.grad * advantages <= 0).all(), name


def test_infinite_log_probs_give_no_nan() -> None:
    """The policy cannot give a token: r d is 0 there, as its limit, and so is the gradient."""
    mask, never = torch.ones(1), torch.tensor([-INF])
    by_old = dict[bool, Any]()
    for old in (None, torch.tensor([-1.0])):
        leaf = never.clone().requires_grad_()
        kl_estimate(leaf, torch.tensor([-3.0]), mask, old_log_probs=old).backward()
        value = kl_estimate(never, torch.tensor([-3.0]), mask, old_log_probs=old)
        by_old[old is None] = value.item(), leaf.grad.item()
    assert by_old[True] == (INF, -INF)
    assert by_old[False] == (pytest.approx(torch.tensor(-2.0).exp().item()), 0)
    for now, reference, drawn in itertools.product((-INF, -1.0), repeat=3):
        leaf = torch.tensor([now], requires_grad=True)
        for estimator in ("k1", "k3"):
            value = kl_estimate(
                leaf, torch.tensor([reference]), mask, estimator=estimator, old_log_probs=torch.tensor([drawn])
            )
            (slope,) = torch.autograd.grad(value, leaf)
            assert not torch.cat([value.detach(), slope]).isnan().any(), (estimator, now, reference, old)


def test_a_gradient_of_the_gradient_of_k3_is_refused() -> None:
    leaf = torch.tensor([-1.0], requires_grad=True)
    value = kl_estimate(leaf, torch.tensor([-3.0]), torch.ones(1), old_log_probs=torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="create_graph=True through kl_estimate"):
        torch.autograd.grad(value, leaf, create_graph=True)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


NEAR = (("tv", 0.1), ("kl", 0.59))  # the KL of p = 1 and q = exp(-0.6) is 0.6


def test_a_certain_token_has_a_divergence() -> None:
    """p = 1 or q = 1, where the other tokens' log-probability is -inf; a log-prob that rounds above 0 is one of 1."""
    likely, advantages, mask = torch.full((2,), -0.6), torch.tensor([1.0, -1.0]), torch.ones(2)
    rounded = torch.full((2,), 0.05, dtype=torch.bfloat16)
    for certain, (divergence, threshold) in itertools.product((torch.zeros(2), rounded), NEAR):
        settings: Any = {"divergence": divergence, "threshold": threshold}
        assert dppo_loss(certain, likely, advantages, mask, **settings).clipped.tolist() == [1, 0]
        assert dppo_loss(likely, certain, advantages, mask, **settings).clipped.tolist() == [0, 1]
        same = dppo_loss(certain, certain, advantages, mask, **settings)
        assert (same.clipped.tolist(), same.per_token_loss.tolist()) == ([0, 0], [-1, 1])


# --- every loss: masks, rejection, precision

Inputs = dict[str, Tensor]
LossOf = Callable[[Inputs, Any], Tensor]
MASKS: list[list[float]] = [[1, 1, 0, 1, 0], [0, 0.5, 1]]
MASK = torch.tensor(MASKS[0] + MASKS[1])
MASKED, LOCAL = MASK == 0, Samples(MASKS).local(0, 1)


def of_policy(name: str, data: Inputs, local: Any) -> Tensor:
    now, old, advantages = (data[key] for key in ("log_probs", "old_log_probs", "advantages"))
    return policy_loss(name, now, old, advantages, local, importance_weights=data["importance_weights"]).per_token_loss


def beside_a_constant(log_probs: Tensor) -> AtIds:
    """One id per token, with a rest that has no graph: a gradient by two paths is rounded twice."""
    return AtIds(log_probs[..., None], with_rest(log_probs.detach()[..., None]).log_rest)


LOSSES: dict[str, LossOf] = {name: functools.partial(of_policy, name) for name in POLICY_LOSSES}
LOSSES["kl"] = lambda data, local: kl_estimate(data["log_probs"], data["old_log_probs"], local)
LOSSES["kl times the ratio"] = lambda data, local: kl_estimate(
    data["log_probs"], -data["advantages"].abs(), local, old_log_probs=data["old_log_probs"]
)
LOSSES["value"] = lambda data, local: value_loss(
    data["log_probs"], data["old_log_probs"], local, old_values=data["advantages"], clip=0.2
)
LOSSES["divergence"] = lambda data, local: divergence_at_ids(
    beside_a_constant(data["log_probs"]), data["old_log_probs"][..., None], local, kind="jsd"
)
OF_SEQUENCES = {name for name, loss in POLICY_LOSSES.items() if loss.per_sequence}
PLACES = [*((name, LOCAL) for name in LOSSES), *((name, MASK) for name in LOSSES if name not in OF_SEQUENCES)]
everywhere = pytest.mark.parametrize(("name", "local"), PLACES)


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """A new copy: log-ratios on both sides of 0, advantages of both signs, all exact in bfloat16."""
    old = torch.tensor([-2.0, -1.5, -3.0, -2.5, -1.0, -0.5, -4.0, -2.0])
    log_ratio = torch.tensor([0.5, -0.25, 0.125, -0.5, 0.25, 0.25, 0.75, -0.125])
    advantages = torch.tensor([1.0, 1.0, -1.0, -2.0, 1.0, -1.0, -1.0, 0.5])
    weights = torch.tensor([1.0, 0.5, 1.0, 1.5, 1.0, 2.0, 1.0, 1.0])
    data = {"log_probs": old + log_ratio, "old_log_probs": old, "advantages": advantages, "importance_weights": weights}
    return {name: column.to(dtype) for name, column in data.items()}


def share_and_gradient(loss: LossOf, data: Inputs, local: Any = LOCAL) -> tuple[Tensor, Tensor]:
    """The masked sum of a loss, and its gradient."""
    leaf = data["log_probs"].clone().requires_grad_()
    share = (loss(data | {"log_probs": leaf}, local) * MASK).sum()
    share.backward()
    assert leaf.grad is not None
    return share.detach(), leaf.grad


@everywhere
def test_masked_tokens_change_no_bit(name: str, local: Any) -> None:
    share, gradient = share_and_gradient(LOSSES[name], inputs(), local)
    assert share.isfinite()
    assert gradient[~MASKED].count_nonzero() > 0
    assert (gradient[MASKED] == 0).all()
    for key, poison in itertools.product(inputs(), (NAN, INF, -INF, 1e30)):
        poisoned = inputs() | {key: inputs()[key].masked_fill(MASKED, poison)}
        of_poisoned = share_and_gradient(LOSSES[name], poisoned, local)
        assert all(map(torch.equal, of_poisoned, (share, gradient))), (key, poison)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("unlikely", [-INF, -95.0])
def test_a_token_of_weight_0_has_loss_and_gradient_0(name: str, unlikely: float) -> None:
    """The ratio does not matter: the engine's log-prob may be -inf. A rejected sequence has no gradient either."""
    for sign, rejected in itertools.product((1, -1), ([5, 6, 7], [1])):
        data = inputs()
        data["advantages"] = sign * data["advantages"].abs()
        data["importance_weights"][rejected] = 0
        right = share_and_gradient(LOSSES[name], data)
        data["old_log_probs"][rejected] = unlikely
        of_unlikely = share_and_gradient(LOSSES[name], data)
        assert of_unlikely[0].isfinite()
        assert of_unlikely[1].isfinite().all()
        if name not in OF_SEQUENCES or len(rejected) > 1:
            assert all(map(torch.equal, of_unlikely, right))
            assert not of_unlikely[1][rejected].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_factors_are_constants_and_multiply_the_loss_alone(name: str) -> None:
    """A rejected token of a finite ratio counts in its sequence's."""
    plain = LOSSES[name](inputs() | {"importance_weights": torch.ones(8)}, LOCAL)
    data = inputs() | {"importance_weights": torch.tensor([0, 2.0, 1, 1, 1, 1, 0.5, 1])}
    leaves = [data[key].requires_grad_() for key in data if key != "advantages"]
    now, old, advantages = list(data.values())[:3]
    loss = policy_loss(name, now, old, advantages, LOCAL, importance_weights=data["importance_weights"])
    assert torch.equal(loss.per_token_loss, plain * data["importance_weights"])
    assert (loss.clipped[0].item(), loss.clipped.requires_grad, loss.ppo_kl.requires_grad) == (0, False, False)
    loss.per_token_loss.sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True]


@everywhere
def test_half_precision_is_float32_of_the_same_inputs(name: str, local: Any) -> None:
    data = inputs()
    data["old_log_probs"][6] = -15.5  # with A < 0: its ratio, e^11.75, is more than float16 can hold
    data["log_probs"][6] = -3.75
    share, gradient = share_and_gradient(LOSSES[name], data, local)
    for dtype in (torch.bfloat16, torch.float16):
        of_half = share_and_gradient(LOSSES[name], {key: column.to(dtype) for key, column in data.items()}, local)
        assert torch.equal(of_half[0], share)
        assert torch.equal(of_half[1], gradient.to(dtype))


HELD, ROW = Samples([[1, 1, 0], [1, 1]]).local(0, 1), torch.ones(1, 5)


#: Losses whose gradient is 0, to the last bit or nearly, where A > 0 and the ratio is beyond every bound.
BOUNDED = {"ppo", "dppo_tv", "dppo_kl", "ipo", "gspo", "gspo_token", "luspo", "gmpo", "vespo", "sapo"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ratios_that_overflow(name: str, dtype: torch.dtype) -> None:
    """exp overflows beyond 11 in float16, beyond 88 (709 in float64) in the others; its square at half of that.

    Advantages broadcast; results have one shape. Where A < 0 a token far above the old policy is pushed down.
    """
    for far, sign in itertools.product((12.0, 44.5, 90.0, 900.0, 3e4), (1, -1)):
        leaf = torch.zeros(1, 5, dtype=dtype, requires_grad=True)
        below = torch.full((1, 5), -far, dtype=dtype)
        data = {"log_probs": leaf, "old_log_probs": below}
        factors = {"advantages": sign * torch.ones(1, 1, dtype=dtype), "importance_weights": torch.ones(5, dtype=dtype)}
        if name in ("kl times the ratio", "value"):  # for the first it is the reference
            factors["advantages"] = -torch.ones(1, 5, dtype=dtype)
        local = HELD if name in OF_SEQUENCES else ROW
        loss = LOSSES[name](data | factors, local)
        assert (loss.shape, loss.dtype) == ((1, 5), torch.promote_types(dtype, torch.float32))
        loss.sum().backward()
        assert loss.isfinite().all()
        assert sign < 0 or name not in BOUNDED or float(leaf.grad.abs().max()) < 1e-30
        if dtype == torch.float16:  # which cannot hold the gradients
            continue
        assert leaf.grad.isfinite().all()
        if sign < 0 and name in ("ppo", "dppo_tv", "gspo", "gmpo", "cfpo"):
            assert (leaf.grad[0, [0, 1, 3, 4]] > 1).all()
        if name == "kl":  # the policy far below its reference is pulled up
            pulled = below.clone().requires_grad_()
            value = kl_estimate(pulled, torch.zeros_like(below), ROW)
            value.sum().backward()
            assert value.isfinite().all()
            assert pulled.grad.isfinite().all()
            assert (pulled.grad < -1e4).all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_infinite_ratio_comes_through(name: str) -> None:
    """It is an input's, and is no number of a loss: nobody may train on it unseen. Clips and gates are bounded."""

    def at(log_ratio: float) -> Tensor:
        data = inputs()
        data["advantages"] = -data["advantages"].abs() if name != "kl times the ratio" else data["advantages"]
        data["old_log_probs"][1] = data["log_probs"][1].detach() - log_ratio
        return LOSSES[name](data, LOCAL).detach()

    is_bounded = torch.allclose(at(20), at(35), rtol=1e-3)
    assert at(INF).isfinite().all() == is_bounded


ONES = torch.ones(8)


def of_two(name: str, first: Tensor, later: Tensor) -> Any:
    return policy_loss(name, first, later, -ONES, LOCAL)


SWAPPED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{name: functools.partial(of_two, name) for name in POLICY_LOSSES},
    "importance weights": lambda first, later: policy_loss(
        "ppo", first, first.detach(), -ONES, LOCAL, importance_weights=later.exp()
    ),
    "k3": lambda first, later: kl_estimate(first, later, LOCAL),
    "k2": lambda first, later: kl_estimate(first, later, LOCAL, estimator="k2"),
    "old": lambda first, later: kl_estimate(first, first.detach(), LOCAL, old_log_probs=later),
    "value": lambda first, later: value_loss(first, later, LOCAL),
    "old values": lambda first, later: value_loss(first, first.detach(), LOCAL, old_values=later, clip=0.2),
    "divergence": lambda first, later: divergence_at_ids(with_rest(first[:, None]), later[:, None], LOCAL, kind="jsd"),
}
ONES = torch.ones(8)


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments_are_refused(name: str) -> None:
    """A constant with a graph, and none behind what is trained. In evaluation, without gradients, nothing is said."""
    trained, constant = (-ONES).requires_grad_(), -2 * ONES
    with pytest.raises(ValueError, match=r"(log_probs|values) without a graph, and \w+ with one"):
        SWAPPED[name](constant, trained)
    SWAPPED[name](trained, constant)
    SWAPPED[name](trained, trained * 1)  # a constant that is not detached is detached here
    SWAPPED[name](constant, constant)
    with torch.no_grad():
        SWAPPED[name](constant, trained)


NODES = {"gspo": LOSSES["gspo"], "gmpo": LOSSES["gmpo"]}
NODES |= {
    "segment_mean": lambda data, local: segment_mean(data["log_probs"], local),
    "segment_scan": lambda data, local: segment_scan(data["log_probs"], local),
}


@pytest.mark.parametrize("name", NODES)
def test_a_gradient_penalty_is_refused(name: str) -> None:
    """The gradients of those nodes have no graph; others are autograd's own."""
    data = inputs(torch.float64)
    leaf = data["log_probs"].requires_grad_()
    (gradient,) = torch.autograd.grad(NODES[name](data, LOCAL).sum(), leaf, retain_graph=True)
    assert gradient.any()
    with pytest.raises(ValueError, match=r"create_graph=True through .+: its gradient has no graph"):
        torch.autograd.grad(NODES[name](data, LOCAL).sum(), leaf, create_graph=True)


# --- devices and modes of torch


class Transfers(TorchDispatchMode):
    """Refuses reading a value back, and a tensor of the host among those of a device but for copies without waiting."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(function)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [leaf for leaf in tensors if leaf.is_cpu]
        assert not re.search("_local_scalar|item|new_full", name), name
        if on_host and "_to_copy" in name and torch.device(kwargs.get("device", "cpu")).type != "cpu":
            assert kwargs.get("non_blocking"), "a copy that the host waits for"
        elif on_host:
            assert len(on_host) == len(tensors), f"{name} of the host's and a device's tensors"
        return function(*args, **kwargs)


@pytest.mark.gpus
@everywhere
def test_losses_on_a_gpu_are_those_on_the_host(name: str, local: Any) -> None:
    share, gradient = share_and_gradient(LOSSES[name], inputs(), local)
    data = {key: column.to(DEVICE) for key, column in inputs().items()}
    leaf = data["log_probs"].requires_grad_()
    there = (LOSSES[name](data, local) * MASK.to(DEVICE)).sum()
    there.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(there.detach().cpu(), share)
    torch.testing.assert_close(leaf.grad.cpu(), gradient)


@everywhere
def test_no_loss_waits_for_a_device(name: str, local: Any) -> None:
    """The meta device has nothing to read; no constant of one number is made on the host and copied."""
    data = {key: column.to("meta") for key, column in inputs().items()}
    data["log_probs"].requires_grad_()
    with Transfers():  # type: ignore[no-untyped-call]
        LOSSES[name](data, local).sum().backward()
    assert data["log_probs"].grad.shape == (8,)


def test_no_statistic_waits_for_a_device() -> None:
    local = Samples([torch.ones(9), torch.ones(4)], rollout_ids=[0, 0], layout=Gathered([0, 9, 13])).local(0, 1)
    values = torch.ones(13, device="meta", requires_grad=True)
    for per in ("sample", "rollout"):
        with Transfers():  # type: ignore[no-untyped-call]
            (to_tokens(segment_mean(values, local, per=per), local) * values).sum().backward()
            segment_scan(values, local, per=per, steps="all", reverse=True).sum().backward()
            gae(values, values, local)


def test_no_copy_to_the_host_is_non_blocking() -> None:
    """The host would read such a copy before it has arrived. All call sites copy from the host."""
    for path in Path(losses.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            assert "non_blocking" not in line or "from_numpy(" in line or "non_blocking=mask.is_cpu" in line, line


def test_what_is_made_in_inference_mode_is_trained_on() -> None:
    on_host = inputs()
    with torch.inference_mode():
        data = {key: column.clone() for key, column in on_host.items()}
        local = Samples(MASKS).local(0, 1)
        ratio = data["log_probs"] - data["old_log_probs"]
        factors = (
            importance_weights(ratio.detach(), Gate(high=2.0, action="clamp")),
            keep_sequences(ratio, max_kl=0.1),
            *gae(ratio, ratio, local),
            group_relative_advantages(ratio, [0] * 8),
            rloo_advantages(ratio, [0] * 8),
            gdpo_advantages([ratio], [0] * 8),
        )
    for name, loss in LOSSES.items():
        right = share_and_gradient(loss, on_host)
        trained = data | {"log_probs": on_host["log_probs"]}
        assert all(map(torch.equal, share_and_gradient(loss, trained, local), right)), name
    for factor in factors:  # a product keeps its factors for the backward
        (on_host["log_probs"].requires_grad_() * factor).sum().backward()


def test_a_default_device_is_not_where_data_goes() -> None:
    held = inputs()

    def results() -> list[Tensor]:
        now, rows = held["log_probs"], list(held["log_probs"].split([5, 3]))
        return [
            *(share_and_gradient(loss, held)[1] for loss in LOSSES.values()),
            segment_scan(now, LOCAL, gamma=0.9),
            *gae(now, now, LOCAL),
            group_relative_advantages(now, [0] * 8),
            rloo_advantages(now, [0] * 8, rollout_ids=list(range(8))),
            *surviving_masks(MASKS, [row.detach() for row in rows], Gate(high=2.0, level="sequence", aggregate="sum")),
        ]

    right = results()
    torch.set_default_device("meta")
    try:
        computed = results()
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, computed, right))

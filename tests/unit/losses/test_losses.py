"""Properties of every loss: masked and rejected tokens, precision, devices; losses by name; refusals.

Their formulas and gradients: test_sequences.py.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_loss import losses
from megatron_rl_loss.losses import (
    POLICY_LOSSES,
    check_goes_with,
    dppo_loss,
    gae,
    importance_weights,
    kl_estimate,
    policy_loss,
    segment_mean,
    segment_scan,
    to_tokens,
    value_loss,
)
from megatron_rl_loss.modes import resolve
from megatron_rl_loss.step import Gathered, Samples

INF, NAN = float("inf"), float("nan")
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant", "token_sum")


def test_k3_is_the_default_and_not_negative_in_float32() -> None:
    difference = torch.linspace(-1e-3, 1e-3, 2001)  # exp(-d) - 1 taken naively rounds below zero near d = 0
    tokens = difference, torch.zeros(2001), torch.ones(2001)
    assert float(kl_estimate(*tokens).min()) >= -1e-10
    assert torch.equal(kl_estimate(*tokens), kl_estimate(*tokens, estimator="k3"))


NEAR = (("tv", 0.1), ("kl", 0.59))  # the KL of p = 1 and q = exp(-0.6) is 0.6


def test_a_certain_token_has_a_divergence() -> None:
    """p = 1 or q = 1, where the other tokens' log-probability is -inf; a log-prob that rounds above 0 is one of 1."""
    likely, advantages, mask = torch.full((2,), -0.6), torch.tensor([1.0, -1.0]), torch.ones(2)
    for certain, (divergence, threshold) in itertools.product(torch.tensor([[0.0, 0], [0.05, 0.05]]), NEAR):
        settings: Any = {"divergence": divergence, "threshold": threshold}
        assert dppo_loss(certain, likely, advantages, mask, **settings).clipped.tolist() == [1, 0]
        assert dppo_loss(likely, certain, advantages, mask, **settings).clipped.tolist() == [0, 1]
        same = dppo_loss(certain, certain, advantages, mask, **settings)
        assert (same.clipped.tolist(), same.per_token_loss.tolist()) == ([0, 0], [-1, 1])


# --- every loss: masks, rejection, precision

Inputs = dict[str, Tensor]
LossOf = Callable[[Inputs, Any], Tensor]
MASKS = [[1, 1, 0, 1, 0], [0, 0.5, 1]]
MASK = torch.tensor(MASKS[0] + MASKS[1])
MASKED, LOCAL = MASK == 0, Samples(MASKS).local(0, 1)


def of_policy(name: str, given: Inputs, local: Any) -> Tensor:
    tokens = (given[key] for key in ("log_probs", "old_log_probs", "advantages"))
    return policy_loss(name, *tokens, local, importance_weights=given["importance_weights"]).per_token_loss


LOSSES: dict[str, LossOf] = {name: functools.partial(of_policy, name) for name in POLICY_LOSSES}
LOSSES["kl"] = lambda given, local: kl_estimate(given["log_probs"], given["old_log_probs"], local)
LOSSES["value"] = lambda given, local: value_loss(
    given["log_probs"], given["old_log_probs"], local, old_values=given["advantages"], clip=0.2
)
OF_SEQUENCES = {name for name, loss in POLICY_LOSSES.items() if loss.of_sequence}
PLACES = [*((name, LOCAL) for name in LOSSES), *((name, MASK) for name in LOSSES if name not in OF_SEQUENCES)]
everywhere = pytest.mark.parametrize(("name", "local"), PLACES)


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    """A new copy: log-ratios on both sides of 0, advantages of both signs, all exact in bfloat16."""
    old = torch.tensor([-2.0, -1.5, -3.0, -2.5, -1.0, -0.5, -4.0, -2.0])
    log_ratio = torch.tensor([0.5, -0.25, 0.125, -0.5, 0.25, 0.25, 0.75, -0.125])
    advantages = torch.tensor([1.0, 1.0, -1.0, -2.0, 1.0, -1.0, -1.0, 0.5])
    weights = torch.tensor([1.0, 0.5, 1.0, 1.5, 1.0, 2.0, 1.0, 1.0])
    made = {"log_probs": old + log_ratio, "old_log_probs": old, "advantages": advantages, "importance_weights": weights}
    return {name: one.to(dtype) for name, one in made.items()}


def share_and_gradient(loss: LossOf, given: Inputs, local: Any = LOCAL) -> tuple[Tensor, Tensor]:
    """The masked sum of a loss, and its gradient."""
    leaf = given["log_probs"].clone().requires_grad_()
    share = (loss(given | {"log_probs": leaf}, local) * MASK).sum()
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
        assert all(map(torch.equal, share_and_gradient(LOSSES[name], poisoned, local), (share, gradient))), (
            key,
            poison,
        )


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("unlikely", [-INF, -95.0])
def test_a_token_of_weight_0_has_loss_and_gradient_0(name: str, unlikely: float) -> None:
    """Whatever its ratio: the engine's log-prob may be -inf. A rejected sequence has no gradient either."""
    for sign, rejected in itertools.product((1, -1), ([5, 6, 7], [1])):
        given = inputs()
        given["advantages"] *= sign
        given["importance_weights"][rejected] = 0
        right = share_and_gradient(LOSSES[name], given)
        given["old_log_probs"][rejected] = unlikely
        found = share_and_gradient(LOSSES[name], given)
        assert found[0].isfinite()
        assert found[1].isfinite().all()
        if name not in OF_SEQUENCES or len(rejected) > 1:
            assert all(map(torch.equal, found, right))
            assert not found[1][rejected].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_factors_are_constants_and_multiply_the_loss_alone(name: str) -> None:
    """A rejected token of a finite ratio counts in its sequence's."""
    plain = LOSSES[name](inputs() | {"importance_weights": torch.ones(8)}, LOCAL)
    given = inputs() | {"importance_weights": torch.tensor([2.0, 0, 1, 1, 1, 1, 0.5, 1])}
    leaves = [given[key].requires_grad_() for key in given if key != "advantages"]
    found = policy_loss(name, *list(given.values())[:3], LOCAL, importance_weights=given["importance_weights"])
    assert torch.equal(found.per_token_loss, plain * given["importance_weights"])
    assert (found.clipped.requires_grad, found.ppo_kl.requires_grad) == (False, False)
    found.per_token_loss.sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True]


@everywhere
def test_half_precision_is_float32_of_the_same_inputs(name: str, local: Any) -> None:
    given = inputs()
    given["old_log_probs"][6] = -15.5  # with A < 0: its ratio, e^11.75, is more than float16 can hold
    given["log_probs"][6] = -3.75
    share, gradient = share_and_gradient(LOSSES[name], given, local)
    for dtype in (torch.bfloat16, torch.float16):
        found = share_and_gradient(LOSSES[name], {key: x.to(dtype) for key, x in given.items()}, local)
        assert torch.equal(found[0], share)
        assert torch.equal(found[1], gradient.to(dtype))


HELD, ACTIVE = Samples([[1, 1, 0], [1, 1]]).local(0, 1), torch.ones(1, 5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ratios_that_overflow(name: str, dtype: torch.dtype) -> None:
    """exp overflows beyond 11 in float16, beyond 88 in the others. Advantages broadcast; results have one shape."""
    for far in (12.0, 90.0, 900.0):
        leaf = torch.zeros(1, 5, dtype=dtype, requires_grad=True)
        given = {"log_probs": leaf, "old_log_probs": torch.full((1, 5), -far, dtype=dtype)}
        factors = {"advantages": torch.ones(1, 1, dtype=dtype), "importance_weights": torch.ones(5, dtype=dtype)}
        local = HELD if name in OF_SEQUENCES else ACTIVE
        if name == "value":
            factors["advantages"] = torch.ones(1, 5, dtype=dtype)
        loss = LOSSES[name](given | factors, local)
        assert (loss.shape, loss.dtype) == ((1, 5), torch.float32)
        loss.sum().backward()
        if name not in ("kl", "value"):
            assert loss.isfinite().all()
            assert leaf.grad.isfinite().all()
            assert name in ("cispo", "sapo") or not leaf.grad.any()


def penalised(share_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a share and of the square of its gradient."""
    leaf = inputs(torch.float64)["log_probs"].requires_grad_()
    share = share_of(leaf)
    (gradient,) = torch.autograd.grad(share, leaf, create_graph=True)
    (share + gradient.square().sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", OF_SEQUENCES - {"gspo_token"} | {"scan"})
def test_a_gradient_penalty_is_refused(name: str) -> None:
    """Those nodes' gradients have no graph; without them autograd's own are exact."""
    given = inputs(torch.float64)
    loss: LossOf = LOSSES.get(name, lambda given, local: segment_scan(given["log_probs"], local))
    with pytest.raises(ValueError, match=r"create_graph=True through .+: its gradient has no graph"):
        penalised(lambda leaf: loss(given | {"log_probs": leaf}, LOCAL).sum())


# --- devices and modes of torch


class Transfers(TorchDispatchMode):
    """Refuses reading a value back, and a tensor of the host among those of a device but for copies without waiting."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(function)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        on_host = [one for one in tensors if one.is_cpu]
        assert not re.search("_local_scalar|item|new_full", name), name
        if on_host and "_to_copy" in name and torch.device(kwargs.get("device", "cpu")).type != "cpu":
            assert kwargs.get("non_blocking"), "a copy that the host waits for"
        elif on_host:
            assert len(on_host) == len(tensors), f"{name} of the host's and a device's tensors"
        return function(*args, **kwargs)


@everywhere
def test_no_loss_waits_for_a_device(name: str, local: Any) -> None:
    """The meta device has nothing to read; no constant of one number is made on the host and copied."""
    given = {key: one.to("meta") for key, one in inputs().items()}
    given["log_probs"].requires_grad_()
    with Transfers():
        LOSSES[name](given, local).sum().backward()
    assert given["log_probs"].grad.shape == (8,)


def test_no_statistic_waits_for_a_device() -> None:
    local = Samples([torch.ones(9), torch.ones(4)], rollout_ids=[0, 0], layout=Gathered([0, 9, 13])).local(0, 1)
    values = torch.ones(13, device="meta", requires_grad=True)
    for per in ("sample", "rollout"):
        with Transfers():
            (to_tokens(segment_mean(values, local, per=per), local) * values).sum().backward()
            segment_scan(values, local, per=per, steps="all", reverse=True).sum().backward()
            gae(values, values, local)


def test_no_copy_to_the_host_is_non_blocking() -> None:
    """It would be read before it has arrived. All call sites copy from the host."""
    for path in Path(losses.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            assert "non_blocking" not in line or "from_numpy(" in line or "non_blocking=given.is_cpu" in line, line


def test_what_is_made_in_inference_mode_is_trained_on() -> None:
    given = inputs()
    with torch.inference_mode():
        data = {key: one.clone() for key, one in given.items()}
        local = Samples(MASKS).local(0, 1)
        ratio = data["log_probs"] - data["old_log_probs"]
        made = (
            importance_weights(ratio, high=2.0),
            losses.keep_sequences(ratio, max_kl=0.1),
            losses.distillation_advantages(data["log_probs"], data["old_log_probs"]),
            *gae(ratio, ratio, local),
            losses.group_relative_advantages(ratio, [0] * 8),
            losses.rloo_advantages(ratio, [0] * 8),
            losses.whiten(ratio, MASK),
        )
    for name, loss in LOSSES.items():
        right = share_and_gradient(loss, given)
        trained = data | {"log_probs": given["log_probs"]}
        assert all(map(torch.equal, share_and_gradient(loss, trained, local), right)), name
    for one in made:  # a product keeps its factors for the backward
        (given["log_probs"].requires_grad_() * one).sum().backward()


def test_a_default_device_is_not_where_data_goes() -> None:
    held = inputs()

    def results() -> list[Tensor]:
        x, rows = held["log_probs"], list(held["log_probs"].split([5, 3]))
        return [
            *(share_and_gradient(loss, held)[1] for loss in LOSSES.values()),
            segment_scan(x, LOCAL, gamma=0.9),
            *gae(x, x, LOCAL),
            losses.whiten(x, MASK),
            losses.group_relative_advantages(x, [0] * 8),
            losses.rloo_advantages(x, [0] * 8, rollout_ids=list(range(8))),
            *losses.surviving_masks(MASKS, rows, high=2.0, level="sequence"),
        ]

    right = results()
    torch.set_default_device("meta")
    try:
        found = results()
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, found, right))


# --- of sequences: what is clipped; by name

OLDS = torch.full((5,), -2.0)
# Mean log-ratios over the masks: 0.2 and -0.1. The third token is masked.
LOG_RATIOS = torch.tensor([0.5, -0.1, 1.0, -0.3, 0.1])


def advantages_of(first: float, second: float) -> Tensor:
    return torch.tensor([first] * 3 + [second] * 2)


@pytest.mark.parametrize(
    ("name", "clip", "advantages", "clipped"),
    [
        ("ppo", (0.2, 0.3), (1, 1), [1, 0, 0, 0]),
        ("ppo", (0.2, 0.3), (-1, 0), [0, 0, 0, 0]),
        ("ppo", (0.09, 0.3), (0, -1), [0, 0, 1, 0]),
        ("cispo", (0.2, 0.3), (-1, 1), [1, 0, 1, 0]),
        ("gspo", (0.5, 0.5), (1, 1), [0, 0, 0, 0]),
        ("gspo", (0.05, 0.1), (1, 1), [1, 1, 0, 0]),
        ("gspo", (0.05, 0.1), (-1, -1), [0, 0, 1, 1]),
        ("gspo_token", (0.05, 0.1), (1, -1), [1, 1, 1, 1]),
        ("gmpo", (0.4, 0.4), (1, 1), [1, 0, 0, 0]),  # 0.5 to 0.4
        ("gmpo", (0.2, 0.4), (-1, -1), [0, 0, 1, 0]),  # -0.3 to -0.2
    ],
)
def test_what_is_clipped(name: str, clip: Any, advantages: Any, clipped: list[float]) -> None:
    place, active = (OLDS + LOG_RATIOS, OLDS, advantages_of(*advantages), HELD), [0, 1, 3, 4]
    found = policy_loss(name, *place, clip_low=clip[0], clip_high=clip[1])
    assert found.clipped[active].tolist() == clipped
    assert found.ppo_kl[active].tolist() == pytest.approx((-LOG_RATIOS[active]).tolist(), abs=1e-6)


#: The only modes that a loss goes with, if it does not go with all.
GOES_WITH = {"gspo": [("sample_mean", None)], "gmpo": [("sample_mean", None)], "luspo": [("constant", 1.0)]}
AGGREGATIONS = [*((mode, 3.0 if mode in ("constant", "token_sum") else None) for mode in MODES), ("constant", 1.0)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_name_is_its_function_and_goes_with_its_modes(name: str) -> None:
    function, tokens = POLICY_LOSSES[name].compute, (OLDS + LOG_RATIOS, OLDS, advantages_of(1, -2), HELD)
    assert torch.equal(policy_loss(name, *tokens, clip_low=None).per_token_loss, function(*tokens).per_token_loss)
    assert ("cp_group" in inspect.signature(function).parameters) == (name in OF_SEQUENCES)
    for mode, divisor in AGGREGATIONS:
        if (mode, divisor) in GOES_WITH.get(name, AGGREGATIONS):
            goes(name, mode, divisor)
        else:
            with pytest.raises(ValueError, match=f"the policy loss {name} aggregated by {mode}, divisor"):
                goes(name, mode, divisor)
    check_goes_with(name, resolve(lambda inputs: 1.0))  # a user's own mode


# --- refusals: what is wrong, the text, and the nearest legal neighbour


def goes(name: str, mode: str = "sample_mean", divisor: float | None = None, **settings: Any) -> None:
    check_goes_with(name, resolve(mode, divisor=divisor), **settings)


FIVE, ONE, COLUMN, NONE, OFTEN = torch.zeros(5), torch.zeros(1), torch.zeros(5, 1), dict[str, Any](), torch.ones(5)
WITH_GRAPH = torch.ones(5, requires_grad=True)
CLIPPED, SAPO = {"returns": FIVE, "clip": 0.1, "old_values": FIVE}, {"name": "sapo", "tau_positive": 0.9}


def call(
    name: str = "ppo", log_probs: Any = FIVE, old_log_probs: Any = FIVE, advantages: Any = FIVE, **changed: Any
) -> Any:
    return policy_loss(name, log_probs, old_log_probs, advantages, changed.pop("local", HELD), **changed)


RANGE = r"it must be a number in"
REFUSALS = {
    **refusals(
        goes,
        (("grpo",), "there is no such policy loss.+Choose one of ppo, cispo", ("ppo",)),
        (SAPO | {"clip_low": 0.2}, "clip_low=0.2 for the policy loss sapo: it takes tau", SAPO | {"clip_low": None}),
        ({"name": "gspo", "dual_clip": 3.0}, "dual_clip=3.0 for the policy loss gspo", {"name": "ppo", "dual_clip": 3}),
        (("gspo", "token_mean"), "gspo aggregated by token_mean.+by sample_mean alone", ("gspo_token", "token_mean")),
        (("luspo", "constant", 2.0), "divisor 2.0.+by constant with divisor 1 alone", ("luspo", "constant", 1.0)),
    ),
    **refusals(
        call,
        ({"old_log_probs": ONE}, r"old_log_probs of shape \(1,\) for values of shape \(5,\)", {"advantages": ONE}),
        ({"advantages": COLUMN}, r"advantages of shape \(5, 1\)", {"advantages": ONE}),
        ({"advantages": WITH_GRAPH}, "advantages that require grad.*Detach them", NONE),
        ({"importance_weights": COLUMN}, r"importance_weights of shape \(5, 1\)", {"importance_weights": FIVE}),
        ({"local": COLUMN}, r"a mask of shape \(5, 1\)", {"local": OFTEN.bool().numpy()}),
        ({"clip_low": 0}, rf"clip_low is 0: {RANGE} \(0, 1\]", {"clip_low": 1e-3}),
        ({"clip_high": 0.0}, rf"clip_high is 0.0: {RANGE} \(0, inf\)", {"clip_high": 3}),
        ({"clip_high": 1.28}, "width: .* clipped at 2.28. Pass 0.28 for a bound of 1.28", {"clip_high": 0.28}),
        ({"dual_clip": 1}, rf"dual_clip is 1: {RANGE} \(1, inf\)", {"dual_clip": 1.001}),
        ({"log_probs": FIVE + 0.2}, "log_probs with values up to 0.2: .*order of the arg", {"log_probs": FIVE + 0.09}),
        ({"old_log_probs": -FIVE.log()}, "old_log_probs with values up to inf", {"log_probs": FIVE.log()}),
        ({"name": "sapo", "tau_negative": 0.0}, rf"tau_negative is 0.0: {RANGE} \[0.1, 100\]", {"name": "sapo"}),
        ({"name": "dppo_tv", "threshold": 1.0}, rf"1.0: {RANGE} \(0, 1\)", {"name": "dppo_kl", "threshold": 1.0}),
        ({"name": "cispo", "clip_low": 0.0}, rf"clip_low is 0.0: {RANGE} \(0, 1\]", {"name": "cispo"}),
        ({"name": "gmpo", "clip_low": 0.0}, rf"clip_low is 0.0: {RANGE} \(0, inf\)", {"name": "gmpo", "clip_low": 1.2}),
        ({"name": "gspo", "level": "step"}, "level='step' for the policy loss gspo", {"name": "gspo"}),
        ({"name": "gspo", "mean_log_ratio": FIVE}, r"a statistic of shape \(5,\)", {"name": "gspo"}),
        (("gspo", FIVE[:4], FIVE[:4], ONE), r"a loss's input of shape \(4,\)", ("gspo", FIVE[None], FIVE[None])),
    ),
    **refusals(
        call,
        ({"log_probs": FIVE.numpy()}, "beside old_log_probs is a ndarray: .+ Wrap it in torch.tensor", NONE),
        ({"advantages": 1.0}, "advantages is a float", {"advantages": torch.tensor(1.0)}),
        ({"local": None}, "local is a NoneType: it says where tokens lie", {"local": OFTEN}),
        ({"name": "gspo", "local": OFTEN}, "local is a Tensor: it says where tokens lie", {"name": "gspo"}),
        error=TypeError,
    ),
    **refusals(
        functools.partial(dppo_loss, FIVE, FIVE, FIVE, OFTEN),
        ({"divergence": "js"}, "there is no such divergence. Choose one of tv, kl", {"divergence": "kl"}),
    ),
    **refusals(
        lambda **more: value_loss(FIVE, **{"returns": FIVE, "local": OFTEN} | more),
        ({"returns": ONE}, r"returns of shape \(1,\) for values of shape \(5,\)", NONE),
        ({"clip": 0.2}, "clip=0.2 with no old_values: values are clipped", NONE),
        ({"old_values": FIVE}, "clip=None with some old_values", NONE),
        (CLIPPED | {"clip": 0.0}, rf"clip is 0.0: {RANGE} \(0, inf\)", CLIPPED),
    ),
    **refusals(
        lambda reference=FIVE, **more: kl_estimate(FIVE, reference, OFTEN, **more),
        ({"estimator": "k4"}, "'k4': there is no such KL estimator. Choose one of", NONE),
        ((COLUMN,), r"ref_log_probs of shape \(5, 1\)", (FIVE,)),
    ),
}  # fmt: skip

test_refusals = refusal_tests(REFUSALS)

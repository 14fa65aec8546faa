"""Losses of tokens against formulas written for one token with Python's ifs in float64; losses by name; refusals.

Losses of sequences: their formulas are in test_losses_over_cp.py.
"""

import functools
import inspect
import itertools
import math
from typing import Any

import oracle
import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import Samples, losses, resolve
from megatron_rl_loss.losses import POLICY_LOSSES, check_goes_with, dppo_loss, kl_estimate, policy_loss, value_loss
from megatron_rl_loss.modes import MODES

INF, NAN = float("inf"), float("nan")

# --- formulas: of a log-prob, the old one and an advantage, the loss and whether it was clipped


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def ppo(x: Tensor, old: float, a: float, low: float, high: float, dual: float | None) -> tuple[Tensor, bool]:
    ratio = bounded = (x - old).exp()
    if ratio < 1 - low:
        bounded = scalar(1 - low)
    elif ratio > 1 + high:
        bounded = scalar(1 + high)
    plain, clipped = -a * ratio, -a * bounded
    loss = clipped if clipped > plain else plain
    if dual is not None and a < 0 and loss > -dual * a:
        loss = scalar(-dual * a)
    return loss, a != 0 and not loss.requires_grad


def cispo(x: Tensor, old: float, a: float, low: float | None, high: float) -> tuple[Tensor, bool]:
    ratio = math.exp(float(x.detach()) - old)
    weight = max(min(ratio, 1 + high), 0 if low is None else 1 - low)
    return -weight * a * x, a != 0 and weight != ratio


def sapo(x: Tensor, old: float, a: float, positive: float, negative: float) -> tuple[Tensor, bool]:
    tau = positive if a > 0 else negative
    return -a * torch.sigmoid(tau * ((x - old).exp() - 1)) * 4 / tau, False


def dppo(x: Tensor, old: float, a: float, divergence: str, threshold: float) -> tuple[Tensor, bool]:
    p, q = float(x.detach().exp()), math.exp(old)
    far = abs(p - q)
    if divergence == "kl":
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    left_out = far > threshold and a * (p - q) > 0
    return (0 * x if left_out else -a * (x - old).exp()), left_out


def critic(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    square = (value - target) ** 2
    if clip is not None and abs(float(value.detach()) - old) > clip:
        bounded = scalar(old + clip if value > old else old - clip)
        square = max((bounded - target) ** 2, square)
    return square / 2, False


KL: dict[Any, Any] = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: (-d).exp() - 1 + d}


def kl(x: Tensor, old: float, _: float, estimator: str) -> tuple[Tensor, bool]:
    return KL[estimator](x - old), False


def value_of(values: Tensor, old: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    return value_loss(values, returns, old_values=None if clip is None else old, clip=clip)


#: The loss by name, its keywords, the formula and its numbers.
CASES: list[tuple[str, dict[str, Any], Any, tuple[Any, ...]]] = [
    ("cispo", {}, cispo, (None, 4.0)),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, cispo, (0.2, 0.28)),
    ("cispo", {"clip_low": 1, "clip_high": 0.2}, cispo, (None, 0.2)),  # 1 is no lower bound
    ("sapo", {}, sapo, (1.0, 1.05)),
    ("sapo", {"tau_positive": 0.3, "tau_negative": 7}, sapo, (0.3, 7.0)),
    ("dppo_tv", {}, dppo, ("tv", 0.15)),
    ("dppo_tv", {"threshold": 0.05}, dppo, ("tv", 0.05)),
    ("dppo_kl", {}, dppo, ("kl", 0.05)),
    ("dppo_kl", {"threshold": 0.01}, dppo, ("kl", 0.01)),
    *(("ppo", {"clip_low": low, "clip_high": high, "dual_clip": dual}, ppo, (low, low if high is None else high, dual))
      for low, high, dual in ((0.2, None, None), (0.2, 0.28, 3.0), (1.0, 5.0, 1.01), (1.0, 5.0, None),
                              (0.01, 0.01, 20.0), (0.1, None, 3.0))),
    *(("value", {"clip": clip}, critic, (clip,)) for clip in (None, 0.2, 5.0)),
    *((f"kl {one}", {"estimator": one}, kl, (one,)) for one in KL),
]  # fmt: skip
# Log-ratio and advantage of every token: below, inside and above the range, and far enough for the dual clip.
TOKENS = list(itertools.product([-2.0, -0.5, -0.15, 0.0, 0.15, 0.24, 0.5, 1.3, 2.0], [-1.5, -0.1, 0.0, 0.3, 2.0]))
OLD = [-2.25 - 0.1 * (i % 7) for i in range(len(TOKENS))]


@pytest.mark.parametrize(
    ("name", "keywords", "formula", "numbers"), CASES, ids=lambda x: None if callable(x) else str(x)
)
def test_losses_of_tokens(name: str, keywords: dict[str, Any], formula: Any, numbers: tuple[Any, ...]) -> None:
    for dtype, w in ((torch.float64, 1.0), (torch.float64, 0.7), (torch.float32, 0.7)):
        if dtype == torch.float32 and name != "ppo":
            continue  # gates and divergences lose more digits
        bound = 1e-12 if dtype == torch.float64 else 3 * oracle.EXACT
        leaf = torch.tensor([old + r for old, (r, _) in zip(OLD, TOKENS, strict=True)], dtype=dtype).requires_grad_()
        old, advantages = (torch.tensor(one, dtype=dtype) for one in (OLD, [a for _, a in TOKENS]))
        weights = torch.full_like(advantages, w, requires_grad=True)
        old.requires_grad_()
        clipped = torch.zeros(len(OLD))
        if name in POLICY_LOSSES:
            found = policy_loss(name, leaf, old, advantages, None, **keywords, importance_weights=weights)
            loss, clipped = found.per_token_loss, found.clipped
            assert (clipped.requires_grad, found.ppo_kl.requires_grad) == (False, False)
            assert found.ppo_kl.tolist() == pytest.approx([-r for r, _ in TOKENS], rel=0, abs=15 * oracle.ROUNDING)
            assert (0 < float(clipped.sum()) < len(TOKENS)) == (name != "sapo")
        elif name == "value":
            loss = value_of(leaf, old, advantages.requires_grad_(), **keywords) * w
        else:
            loss = kl_estimate(leaf, old, **keywords) * w
        loss.sum().backward()
        assert (old.grad, weights.grad, advantages.grad) == (None, None, None)
        for t, (log_ratio, a) in enumerate(TOKENS):
            x = scalar(OLD[t] + log_ratio).requires_grad_()
            value, is_clipped = formula(x, OLD[t], a, *numbers)
            slope = torch.autograd.grad(value, x)[0] if value.requires_grad else scalar(0)
            assert float(loss[t].detach()) == pytest.approx(w * float(value.detach()), rel=bound, abs=1e-14), TOKENS[t]
            assert float(leaf.grad[t]) == pytest.approx(w * float(slope), rel=bound, abs=1e-14), TOKENS[t]
            assert float(clipped[t]) == is_clipped, TOKENS[t]


def test_k3_is_the_default_and_not_negative_in_float32() -> None:
    difference = torch.linspace(-1e-3, 1e-3, 2001)  # exp(-d) - 1 taken naively rounds below zero near d = 0
    estimate = kl_estimate(difference, torch.zeros_like(difference))
    assert float(estimate.min()) >= -1e-10
    assert torch.equal(estimate, kl_estimate(difference, torch.zeros_like(difference), estimator="k3"))


HELD = Samples([torch.tensor([1, 1, 0]), torch.tensor([1, 1])]).local(0, 1)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_shapes_dtypes_devices_and_ratios_that_overflow(name: str) -> None:
    """exp overflows beyond 11 in float16, beyond 88 in the others."""
    of_sequence, place = POLICY_LOSSES[name].of_sequence, HELD if POLICY_LOSSES[name].of_sequence else None
    for dtype, far in itertools.product((torch.float16, torch.bfloat16, torch.float32), (12.0, 90.0, 900.0)):
        leaf = torch.zeros(1, 5, dtype=dtype, requires_grad=True)
        signs = [1.0, 0.0, -1.0 if name in ("cispo", "sapo") else 0.5, 1.0, 1.0]
        advantages = torch.ones(1, 1, dtype=dtype) if of_sequence else torch.tensor([signs], dtype=dtype)
        found = policy_loss(name, leaf, torch.full((1, 5), -far, dtype=dtype), advantages, place)
        for got in (found.per_token_loss, found.clipped, found.ppo_kl, kl_estimate(leaf, leaf), value_loss(leaf, leaf)):
            assert (got.shape, got.dtype) == ((1, 5), torch.float32)
        found.per_token_loss.sum().backward()
        assert found.per_token_loss.isfinite().all()
        assert leaf.grad.isfinite().all()
        if name == "ppo":
            assert found.per_token_loss[0].tolist() == pytest.approx([-1.2, 0, -0.6, -1.2, -1.2], rel=2.0**-8)
        if name.startswith(("ppo", "dppo")) or of_sequence:
            assert not leaf.grad.any()
    if not of_sequence:
        elsewhere = torch.zeros(3, device="meta")  # whatever reads a value there fails, as waiting for a device would
        assert policy_loss(name, *[elsewhere] * 3, None).per_token_loss.shape == (3,)


NEAR = (("tv", 0.1), ("kl", 0.59))  # the KL of p = 1 and q = exp(-0.6) is 0.6


def test_a_certain_token_has_a_divergence() -> None:
    """p = 1 or q = 1, where the other tokens' log-probability is -inf; a log-prob that rounds above 0 is one of 1."""
    likely, advantages = torch.full((2,), -0.6), torch.tensor([1.0, -1.0])
    for certain, (divergence, threshold) in itertools.product(torch.tensor([[0.0, 0], [0.05, 0.05]]), NEAR):
        settings: Any = {"divergence": divergence, "threshold": threshold}
        assert dppo_loss(certain, likely, advantages, **settings).clipped.tolist() == [1, 0]
        assert dppo_loss(likely, certain, advantages, **settings).clipped.tolist() == [0, 1]
        same = dppo_loss(certain, certain, advantages, **settings)
        assert (same.clipped.tolist(), same.per_token_loss.tolist()) == ([0, 0], [-1, 1])


# --- of sequences: what is clipped, whose gradient a token has

OLDS = torch.full((5,), -2.0)
# Mean log-ratios over the masks: 0.2 and -0.1. The third token is masked.
LOG_RATIOS = torch.tensor([0.5, -0.1, 1.0, -0.3, 0.1])


def advantages_of(first: float, second: float) -> Tensor:
    return torch.tensor([first] * 3 + [second] * 2)


@pytest.mark.parametrize(
    ("name", "clip", "advantages", "clipped"),
    [
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


# --- by name

#: The function of a name, and its settings, where they do not follow from the name.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo_clip_loss", {}),
    "dppo_tv": ("dppo_loss", {"divergence": "tv", "threshold": 0.15}),
    "dppo_kl": ("dppo_loss", {"divergence": "kl", "threshold": 0.05}),
    "luspo": ("gspo_loss", {}),
}
GOES_WITH = {"gspo": [("sample_mean", None)], "gmpo": [("sample_mean", None)], "luspo": [("constant", 1.0)]}
AGGREGATIONS = [*((mode, 3.0 if mode in ("constant", "token_sum") else None) for mode in MODES), ("constant", 1.0)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_name_is_its_function_and_goes_with_its_modes(name: str) -> None:
    loss, (function, settings) = POLICY_LOSSES[name], OTHERS.get(name, (f"{name}_loss", {}))
    tokens = (OLDS + LOG_RATIOS, OLDS, advantages_of(1, -2))
    found = policy_loss(name, *tokens, HELD, None, clip_low=None)
    expected = getattr(losses, function)(*tokens, HELD, **settings)
    for part in ("per_token_loss", "clipped", "ppo_kl"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    parameters = inspect.signature(loss.compute).parameters
    assert ("cp_group" in parameters) == loss.of_sequence
    assert set(loss.settings) <= set(parameters) - {"divergence"}
    for mode, divisor in AGGREGATIONS:
        aggregation = resolve(mode, divisor=divisor)
        if (mode, divisor) in GOES_WITH.get(name, AGGREGATIONS):
            check_goes_with(name, aggregation)
        else:
            with pytest.raises(ValueError, match=f"the policy loss {name} aggregated by {mode}, divisor"):
                check_goes_with(name, aggregation)
    check_goes_with(name, resolve(lambda inputs: 1.0))  # a user's own mode


# --- refusals: what is wrong, the text, and the nearest legal neighbour


def goes(name: str, mode: str = "sample_mean", divisor: float | None = None, **settings: Any) -> None:
    check_goes_with(name, resolve(mode, divisor=divisor), **settings)


FIVE, ONE, COLUMN, NONE = torch.zeros(5), torch.zeros(1), torch.zeros(5, 1), dict[str, Any]()
WITH_GRAPH = torch.ones(5, requires_grad=True)


CLIPPED, SAPO = {"returns": FIVE, "clip": 0.1, "old_values": FIVE}, {"name": "sapo", "tau_positive": 0.9}


def call(
    name: str = "ppo", log_probs: Any = FIVE, old_log_probs: Any = FIVE, advantages: Any = FIVE, **changed: Any
) -> Any:
    local = changed.pop("local", HELD if POLICY_LOSSES[name].of_sequence else None)
    return policy_loss(name, log_probs, old_log_probs, advantages, local, **changed)


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
        ({"old_log_probs": ONE}, r"shapes \(5,\) and \(1,\): they must be equal", {"advantages": ONE}),
        ({"advantages": COLUMN}, r"advantages of shape \(5, 1\)", {"advantages": ONE}),
        ({"advantages": WITH_GRAPH}, "advantages that require grad.*Detach them", NONE),
        ({"importance_weights": COLUMN}, r"importance_weights of shape \(5, 1\)", {"importance_weights": FIVE}),
        ({"clip_low": 0}, rf"clip_low is 0: {RANGE} \(0, 1\]", {"clip_low": 1e-3}),
        ({"clip_low": 1.01}, "clip_low is 1.01", {"clip_low": 1}),
        ({"clip_low": "0.2"}, "clip_low is '0.2'", {"clip_low": 0.2}),
        ({"clip_high": 0.0}, rf"clip_high is 0.0: {RANGE} \(0, inf\)", {"clip_high": 3}),
        ({"clip_high": 1.28}, "width: .* clipped at 2.28. Pass 0.28 for a bound of 1.28", {"clip_high": 0.28}),
        ({"clip_high": 1.99}, "width", {"clip_high": 2}),
        ({"dual_clip": 1}, rf"dual_clip is 1: {RANGE} \(1, inf\)", {"dual_clip": 1.001}),
        ({"log_probs": FIVE + 0.2}, "log_probs with values up to 0.2, 100%", {"log_probs": FIVE + 0.09}),
        ({"log_probs": torch.tensor([0.7, -1, 0.2, -1, -1])}, "up to 0.7, 40% of them above 0.*order of the arg", NONE),
        ({"old_log_probs": -FIVE.log()}, "old_log_probs with values up to inf", {"log_probs": FIVE.log()}),
        ({"name": "sapo", "tau_negative": 0.0}, rf"tau_negative is 0.0: {RANGE} \[0.1, 100\]", {"name": "sapo"}),
        ({"name": "dppo_tv", "threshold": 1.0}, rf"1.0: {RANGE} \(0, 1\)", {"name": "dppo_kl", "threshold": 1.0}),
        ({"name": "cispo", "clip_low": 0.0}, rf"clip_low is 0.0: {RANGE} \(0, 1\]", {"name": "cispo"}),
        ({"name": "cispo", "clip_high": 0.0}, rf"clip_high is 0.0: {RANGE} \(0, inf\)", {"name": "cispo"}),
        ({"name": "gmpo", "clip_low": 0.0}, rf"clip_low is 0.0: {RANGE} \(0, inf\)", {"name": "gmpo", "clip_low": 1.2}),
        ({"name": "gspo", "mean_log_ratio": FIVE}, r"a statistic of shape \(5,\)", {"name": "gspo"}),
        (("gspo", FIVE[:4], FIVE[:4], ONE), r"a loss's input of shape \(4,\)", ("gspo", FIVE[None], FIVE[None])),
    ),
    **refusals(
        call,
        ({"log_probs": FIVE.numpy()}, "log-probs with a ndarray: .+ Wrap it in torch.tensor", NONE),
        ({"old_log_probs": None}, "log-probs with a NoneType", NONE),
        ({"advantages": 1.0}, "advantages with a float", {"advantages": torch.tensor(1.0)}),
        ({"importance_weights": 2}, "importance_weights with a int", {"importance_weights": torch.tensor(2)}),
        ({"name": "gspo", "local": 3}, "local is a int: it says where tokens lie", {"name": "gspo"}),
        ({"name": "gspo", "local": HELD.samples}, "local is a Samples: it says where tokens lie", {"name": "gspo"}),
        error=TypeError,
    ),
    **refusals(
        functools.partial(dppo_loss, FIVE, FIVE, FIVE),
        ({"divergence": "js"}, "there is no such divergence. Choose one of tv, kl", {"divergence": "kl"}),
    ),
    **refusals(
        functools.partial(value_loss, FIVE),
        ((ONE,), r"values and returns of shapes \(5,\) and \(1,\)", (FIVE,)),
        ({"returns": FIVE, "clip": 0.2}, "clip=0.2 with no old_values: values are clipped", (FIVE,)),
        ({"returns": FIVE, "old_values": FIVE}, "clip=None with some old_values", (FIVE,)),
        (CLIPPED | {"clip": 0.0}, rf"clip is 0.0: {RANGE} \(0, inf\)", CLIPPED),
    ),
    **refusals(
        functools.partial(kl_estimate, FIVE),
        ({"ref_log_probs": FIVE, "estimator": "k4"}, "'k4': there is no such KL estimator. Choose one of", (FIVE,)),
        ((COLUMN,), r"\(5,\) and \(5, 1\)", (FIVE,)),
    ),
}  # fmt: skip

test_refusals = refusal_tests(REFUSALS)

"""The losses of single tokens, each against its formula written for one token with Python's ifs in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from refusals import Call, Refusal, check_refusal, each_of, refusals
from torch import Tensor

from megatron_rl_loss.losses import cispo_loss, dppo_loss, kl_estimate, ppo_clip_loss, sapo_loss, value_loss

INF, NAN = float("inf"), float("nan")
POLICY_LOSSES = {"ppo": ppo_clip_loss, "cispo": cispo_loss, "sapo": sapo_loss, "dppo": dppo_loss}


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def value_and_slope(formula: Callable[[Tensor], Tensor], at: float) -> tuple[float, float]:
    x = scalar(at).requires_grad_()
    y = formula(x)
    (slope,) = torch.autograd.grad(y, x, materialize_grads=True) if y.requires_grad else (scalar(0),)
    return float(y.detach()), float(slope)


# --- formulas: of a log-prob, the old one and an advantage, the loss and whether it was clipped


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


# The function, its keywords, the formula and its numbers.
CASES: dict[str, tuple[Any, dict[str, Any], Any, tuple[Any, ...]]] = {
    "CISPO": (cispo_loss, {}, cispo, (None, 4.0)),
    "CISPO, narrow above": (cispo_loss, {"clip_high": 0.2}, cispo, (None, 0.2)),
    "CISPO, both": (cispo_loss, {"clip_low": 0.2, "clip_high": 0.28}, cispo, (0.2, 0.28)),
    "CISPO, 1 is no lower bound": (cispo_loss, {"clip_low": 1, "clip_high": 0.28}, cispo, (None, 0.28)),
    "SAPO": (sapo_loss, {}, sapo, (1.0, 1.05)),
    "SAPO, others": (sapo_loss, {"tau_positive": 0.3, "tau_negative": 7}, sapo, (0.3, 7.0)),
    "DPPO tv": (dppo_loss, {"threshold": 0.05}, dppo, ("tv", 0.05)),
    "DPPO tv, usual": (dppo_loss, {}, dppo, ("tv", 0.15)),
    "DPPO kl, usual": (dppo_loss, {"divergence": "kl"}, dppo, ("kl", 0.05)),
    "DPPO kl": (dppo_loss, {"divergence": "kl", "threshold": 0.01}, dppo, ("kl", 0.01)),
}
for low, high in [(0.2, None), (0.1, None), (0.2, 0.28), (1.0, 5.0), (0.01, 0.01)]:
    for dual in (None, 1.01, 3.0, 20.0):
        keywords = {"clip_low": low, "clip_high": high, "dual_clip": dual}
        CASES[f"PPO {low} {high} {dual}"] = (ppo_clip_loss, keywords, ppo, (low, low if high is None else high, dual))

# Log-ratio and advantage of every token: below, inside and above the range, and far enough for the dual clip.
TOKENS = list(itertools.product([-2.0, -0.5, -0.15, 0.0, 0.15, 0.24, 0.5, 1.3, 2.0], [-1.5, -0.1, 0.0, 0.3, 2.0]))
OLD = [-2.25 - 0.1 * (i % 7) for i in range(len(TOKENS))]


@pytest.mark.parametrize("w", [1.0, 0.7], ids=["on-policy", "weighted"])
@pytest.mark.parametrize(("loss", "keywords", "formula", "numbers"), CASES.values(), ids=CASES.keys())
def test_policy_losses(loss: Any, keywords: dict[str, Any], formula: Any, numbers: tuple[Any, ...], w: float) -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 3 * oracle.EXACT)):
        if dtype == torch.float32 and loss is not ppo_clip_loss:
            continue  # gates and divergences lose more digits
        log_probs = torch.tensor([old + r for old, (r, _) in zip(OLD, TOKENS, strict=True)], dtype=dtype)
        old = torch.tensor(OLD, dtype=dtype, requires_grad=True)
        advantages = torch.tensor([a for _, a in TOKENS], dtype=dtype)
        weights = torch.full_like(advantages, w, requires_grad=True)
        log_probs.requires_grad_()
        result = loss(log_probs, old, advantages, importance_weights=None if w == 1 else weights, **keywords)
        result.per_token_loss.sum().backward()
        assert (old.grad, weights.grad) == (None, None)
        assert not result.clipped.requires_grad
        assert not result.ppo_kl.requires_grad
        for t, (log_ratio, a) in enumerate(TOKENS):
            at = OLD[t] + log_ratio
            value, slope = value_and_slope(lambda x, t=t, a=a: formula(x, OLD[t], a, *numbers)[0], at)
            clipped = formula(scalar(at).requires_grad_(), OLD[t], a, *numbers)[1]
            assert float(result.per_token_loss[t].detach()) == pytest.approx(w * value, rel=bound, abs=0), TOKENS[t]
            assert float(log_probs.grad[t]) == pytest.approx(w * slope, rel=bound, abs=0), TOKENS[t]
            assert float(result.clipped[t]) == clipped, TOKENS[t]
            assert float(result.ppo_kl[t]) == pytest.approx(-log_ratio, rel=0, abs=15 * oracle.ROUNDING)
        seen = 0 < float(result.clipped.sum()) < len(TOKENS)
        assert seen == (loss is not sapo_loss)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_shapes_dtypes_and_devices(name: str) -> None:
    loss = POLICY_LOSSES[name]
    for dtype, shape in [(torch.bfloat16, (2, 3)), (torch.float16, (6,)), (torch.float32, (1, 2, 3))]:
        x = torch.zeros(shape, dtype=dtype)
        result = loss(x, x, x[..., :1])  # an advantage per row
        for got in (result.per_token_loss, result.clipped, result.ppo_kl, kl_estimate(x, x), value_loss(x, x)):
            assert (got.shape, got.dtype) == (x.shape, torch.float32)
    elsewhere = torch.zeros(3, device="meta")  # whatever reads a value there fails, as waiting for a device would
    assert loss(elsewhere, elsewhere, elsewhere).per_token_loss.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_ratio_that_overflows_gives_a_finite_loss_and_gradient(dtype: torch.dtype) -> None:
    """exp overflows beyond 11 in float16, beyond 88 in the others."""
    for far, loss in itertools.product((12.0, 90.0, 900.0), (cispo_loss, sapo_loss, ppo_clip_loss, dppo_loss)):
        log_probs = torch.zeros(3, dtype=dtype, requires_grad=True)
        advantages = torch.tensor([1.0, 0.0, -1.0 if loss in (cispo_loss, sapo_loss) else 0.5], dtype=dtype)
        found = loss(log_probs, torch.full((3,), -far, dtype=dtype), advantages)
        found.per_token_loss.sum().backward()
        assert torch.isfinite(found.per_token_loss).all()
        assert torch.isfinite(log_probs.grad).all()
        if loss is ppo_clip_loss:
            assert found.per_token_loss.tolist() == pytest.approx([-1.2, 0, -0.6], rel=2.0**-8)
        if loss in (ppo_clip_loss, dppo_loss):
            assert log_probs.grad.tolist() == [0, 0, 0]


NEAR = (("tv", 0.1), ("kl", 0.59))  # the KL of p = 1 and q = exp(-0.6) is 0.6


def test_a_certain_token_has_a_divergence() -> None:
    """p = 1 or q = 1, where the other tokens' log-probability is -inf; a log-prob that rounds above 0 is one of 1."""
    likely, advantages = torch.full((2,), -0.6), torch.tensor([1.0, -1.0])
    for certain, (divergence, threshold) in itertools.product(torch.zeros(2, 2) + torch.tensor([[0], [0.05]]), NEAR):
        settings: Any = {"divergence": divergence, "threshold": threshold}
        assert dppo_loss(certain, likely, advantages, **settings).clipped.tolist() == [1, 0]
        assert dppo_loss(likely, certain, advantages, **settings).clipped.tolist() == [0, 1]
        same = dppo_loss(certain, certain, advantages, **settings)
        assert (same.clipped.tolist(), same.per_token_loss.tolist()) == ([0, 0], [-1, 1])


# --- a critic, and KL


def critic(value: Tensor, target: float, old: float, clip: float | None) -> Tensor:
    square = (value - target) ** 2
    if clip is not None and abs(float(value.detach()) - old) > clip:
        bounded = scalar(old + clip if value > old else old - clip)
        square = max((bounded - target) ** 2, square)
    return square / 2


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_value_loss(clip: float | None) -> None:
    cases = list(itertools.product([-1.0, -0.1, 0.05, 0.6], [-0.8, 0.3, 2.0], [0.0, 0.4]))
    values, returns, old = (torch.tensor(c, dtype=torch.float64, requires_grad=True) for c in zip(*cases, strict=True))
    loss = value_loss(values, returns, old_values=None if clip is None else old, clip=clip)
    loss.sum().backward()
    assert (returns.grad, old.grad) == (None, None)
    for t, (value, target, before) in enumerate(cases):
        expected, slope = value_and_slope(lambda x, r=target, o=before: critic(x, r, o, clip), value)
        assert float(loss[t].detach()) == pytest.approx(expected, rel=1e-12)
        assert float(values.grad[t]) == pytest.approx(slope, rel=1e-12)


KL: dict[Any, Any] = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: (-d).exp() - 1 + d}


@pytest.mark.parametrize("estimator", KL)
def test_kl_estimate(estimator: Any) -> None:
    for difference in (-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0):
        log_probs = torch.tensor([difference - 2], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
        estimate = kl_estimate(log_probs, reference, estimator=estimator)
        estimate.sum().backward()
        value, slope = value_and_slope(lambda x: KL[estimator](x + 2), difference - 2)
        assert float(estimate.detach()) == pytest.approx(value, rel=1e-9, abs=1e-15)
        assert float(log_probs.grad) == pytest.approx(slope, rel=1e-9, abs=1e-15)
        assert reference.grad is None


def test_k3_is_the_default_and_not_negative_in_float32() -> None:
    difference = torch.linspace(-1e-3, 1e-3, 2001)  # exp(-d) - 1 taken naively rounds below zero near d = 0
    estimate = kl_estimate(difference, torch.zeros_like(difference))
    assert float(estimate.min()) >= -1e-10
    assert torch.equal(estimate, kl_estimate(difference, torch.zeros_like(difference), estimator="k3"))


# --- refusals: what is wrong, the text, and the nearest legal neighbour

THREE, ONE, COLUMN = torch.zeros(3), torch.zeros(1), torch.zeros(3, 1)
Wrong = dict[str, Any]


def refused_by(function: Callable[..., Any], *rows: tuple[Wrong, str, Wrong], **error: Any) -> dict[str, Refusal]:
    """Rows of what is changed in a call with zeros."""
    names = {value_loss: ("values", "returns"), kl_estimate: ("log_probs", "ref_log_probs")}
    plain = dict.fromkeys(names.get(function, ("log_probs", "old_log_probs", "advantages")), THREE)
    return refusals(function, *((plain | wrong, text, plain | right) for wrong, text, right in rows), **error)


REFUSALS: dict[str, Refusal] = {
    **refused_by(
        cispo_loss,
        ({"old_log_probs": torch.zeros(4)}, r"log-probs of shapes \(3,\) and \(4,\)", {}),
        ({"clip_low": 0.0}, r"clip_low is 0.0: it must be a number in \(0, 1\]", {"clip_low": None}),
        ({"clip_high": 0.0}, "clip_high is 0.0", {"clip_high": 1.5}),
        ({"clip_high": None}, r"clip_high is None: it must be a number in \(0, inf\)", {"clip_high": 1}),
    ),
    **refused_by(
        sapo_loss,
        ({"tau_negative": 0.0}, r"tau_negative is 0.0: it must be a number in \[0.1, 100\]", {"tau_negative": 2.0}),
    ),
    **refused_by(
        dppo_loss,
        ({"threshold": 1.0}, r"1.0: it must be a number in \(0, 1\)", {"threshold": 1.0, "divergence": "kl"}),
        ({"divergence": "js"}, "there is no such divergence. Choose one of tv, kl", {"divergence": "kl"}),
    ),
    **refused_by(
        value_loss,
        ({"returns": ONE}, r"values and returns of shapes \(3,\) and \(1,\)", {"returns": torch.ones(3)}),
        ({"clip": 0.2}, "clip=0.2 with no old_values: values are clipped", {"clip": 0.2, "old_values": THREE}),
        ({"old_values": THREE}, "clip=None with some old_values", {}),
        (
            {"clip": 0.0, "old_values": THREE},
            r"clip is 0.0: it must be a number in \(0, inf\)",
            {"clip": 0.1, "old_values": THREE},
        ),
    ),
    **refused_by(
        ppo_clip_loss,
        ({"old_log_probs": ONE}, r"shapes \(3,\) and \(1,\): they must be equal", {"advantages": ONE}),
        ({"advantages": COLUMN}, r"advantages of shape \(3, 1\)", {"advantages": ONE}),
        ({"advantages": torch.ones(3, requires_grad=True)}, "advantages that require grad.*Detach them", {}),
        ({"importance_weights": COLUMN}, r"importance_weights of shape \(3, 1\)", {"importance_weights": THREE}),
        ({"clip_low": 0}, r"clip_low is 0: it must be a number in \(0, 1\]", {"clip_low": 1e-3}),
        ({"clip_low": 1.01}, "clip_low is 1.01", {"clip_low": 1}),
        ({"clip_low": "0.2"}, "clip_low is '0.2'", {"clip_low": 0.2}),
        ({"clip_high": 0.0}, r"clip_high is 0.0: it must be a number in \(0, inf\)", {"clip_high": 3}),
        ({"clip_high": 1.28}, "width: .* clipped at 2.28. Pass 0.28 for a bound of 1.28", {"clip_high": 0.28}),
        ({"dual_clip": 1}, r"dual_clip is 1: it must be a number in \(1, inf\)", {"dual_clip": 1.001}),
        ({"log_probs": THREE + 0.2}, "log_probs with values up to 0.2, 100%", {"log_probs": THREE + 0.09}),
        ({"log_probs": torch.tensor([0.7, -1.0, 0.2])}, "up to 0.7, 67% of them above 0.*order of the arguments", {}),
        ({"old_log_probs": -THREE.log()}, "old_log_probs with values up to inf", {"log_probs": THREE.log()}),
    ),
    **refused_by(
        ppo_clip_loss,
        ({"log_probs": THREE.numpy()}, "log-probs with a ndarray: .+ Wrap it in torch.tensor", {}),
        ({"old_log_probs": None}, "log-probs with a NoneType", {}),
        ({"advantages": 1.0}, "advantages with a float", {"advantages": torch.tensor(1.0)}),
        ({"importance_weights": 2}, "importance_weights with a int", {"importance_weights": torch.tensor(2)}),
        error=TypeError,
    ),
    **refused_by(
        kl_estimate,
        ({"estimator": "k4"}, "'k4': there is no such KL estimator. Choose one of k1, k2, k3", {}),
        ({"ref_log_probs": COLUMN}, r"\(3,\) and \(3, 1\)", {"estimator": "k2"}),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

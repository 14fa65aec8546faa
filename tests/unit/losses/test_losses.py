"""The per-token losses and advantages, each against its formula written for one token with Python's ifs in float64."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Call, Refusal, check_refusal, each_of
from torch import Tensor

from megatron_rl_loss import StepTotals, make_pg_loss_reducer
from megatron_rl_loss.losses import (
    PolicyLoss,
    cispo_loss,
    distillation_advantages,
    dppo_loss,
    group_relative_advantages,
    kl_estimate,
    ppo_clip_loss,
    sapo_loss,
    truncated_importance_weights,
    value_loss,
)

# Equal rewards are told of; test_refusals.py has it.
pytestmark = pytest.mark.filterwarnings("ignore:all rewards are equal")

INF, NAN = float("inf"), float("nan")
Scalar = Callable[[Tensor], Tensor]


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def value_and_slope(formula: Scalar, at: float) -> tuple[float, float]:
    x = scalar(at).requires_grad_()
    y = formula(x)
    (slope,) = torch.autograd.grad(y, x, materialize_grads=True) if y.requires_grad else (scalar(0),)
    return float(y.detach()), float(slope)


# --- the clipped surrogate


def ppo(
    log_prob: Tensor, old: float, advantage: float, low: float, high: float, dual: float | None, w: float
) -> Tensor:
    """w * min(max(-A r, -A clip(r)), -c A if A < 0) for one token."""
    ratio = (log_prob - old).exp()
    bounded = ratio
    if ratio < 1 - low:
        bounded = scalar(1 - low)
    elif ratio > 1 + high:
        bounded = scalar(1 + high)
    plain, clipped = -advantage * ratio, -advantage * bounded
    loss = clipped if clipped > plain else plain
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss = scalar(-dual * advantage)
    return w * loss


# log-ratio and advantage of every token: below, inside and above the range, and far enough for the dual clip
TOKENS = list(itertools.product([-2.0, -0.5, -0.15, 0.0, 0.15, 0.24, 0.5, 1.3, 2.0], [-1.5, -0.1, 0.0, 0.3, 2.0]))
OLD = [-2.25 - 0.1 * (i % 7) for i in range(len(TOKENS))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("w", [1.0, 0.7], ids=["on-policy", "weighted"])
@pytest.mark.parametrize("dual", [None, 1.01, 3.0, 20.0], ids=lambda c: f"dual {c}")
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.1, None), (0.2, 0.28), (1.0, 5.0), (0.01, 0.01)])
def test_ppo_clip_loss(low: float, high: float | None, dual: float | None, w: float, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([old + log_ratio for old, (log_ratio, _) in zip(OLD, TOKENS, strict=True)], dtype=dtype)
    log_probs.requires_grad_()
    old = torch.tensor(OLD, dtype=dtype, requires_grad=True)
    advantages = torch.tensor([advantage for _, advantage in TOKENS], dtype=dtype)
    weights = torch.full_like(advantages, w, requires_grad=True)
    result = ppo_clip_loss(
        log_probs,
        old,
        advantages,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        importance_weights=None if w == 1 else weights,
    )
    result.per_token_loss.sum().backward()
    loss = result.per_token_loss.detach()
    assert old.grad is None
    assert weights.grad is None
    for t, (log_ratio, advantage) in enumerate(TOKENS):
        value, slope = value_and_slope(
            lambda x, t=t, a=advantage: ppo(x, OLD[t], a, low, low if high is None else high, dual, w),
            OLD[t] + log_ratio,
        )
        # Log-probs down to -5 are rounded to float32 and subtracted, their exp is rounded, and its product with A, w.
        assert float(loss[t]) == pytest.approx(value, rel=3 * oracle.EXACT, abs=0), TOKENS[t]
        assert float(log_probs.grad[t]) == pytest.approx(slope, rel=3 * oracle.EXACT, abs=0), TOKENS[t]
        assert float(result.clipped[t]) == (advantage != 0 and slope == 0), TOKENS[t]
        assert float(result.ppo_kl[t]) == pytest.approx(-log_ratio, rel=0, abs=3 * 5 * oracle.ROUNDING)
    assert not result.clipped.requires_grad
    assert not result.ppo_kl.requires_grad


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "keywords", "loss", "clipped"),
    [
        pytest.param(0.0, 2.0, {}, -2.0, 0, id="on-policy"),
        pytest.param(1.0, 2.0, {}, -2.4, 1, id="clipped above"),
        pytest.param(1.0, 2.0, {"clip_high": 0.28}, -2.56, 1, id="clipped above, higher"),
        pytest.param(1.0, 2.0, {"clip_low": 0.1}, -2.2, 1, id="clipped above as below, where it is not said"),
        pytest.param(1.0, 2.0, {"clip_low": 0.1, "clip_high": 0.2}, -2.4, 1, id="clipped above, said apart"),
        pytest.param(-1.0, -2.0, {}, 1.6, 1, id="clipped below"),
        pytest.param(-1.0, -2.0, {"clip_low": 0.1}, 1.8, 1, id="clipped below, tighter"),
        pytest.param(-1.0, 2.0, {}, -2 * 0.36787944, 0, id="not clipped: wrong side"),
        pytest.param(2.0, -2.0, {}, 2 * 7.3890561, 0, id="not clipped: no dual clip"),
        pytest.param(2.0, -2.0, {"dual_clip": 3.0}, 6.0, 1, id="dual clip binds"),
        pytest.param(1.0, -2.0, {"dual_clip": 3.0}, 2 * 2.7182818, 0, id="dual clip does not bind"),
        pytest.param(2.0, 2.0, {"dual_clip": 3.0}, -2.4, 1, id="dual clip leaves A > 0 alone"),
        pytest.param(0.0, 0.0, {"dual_clip": 3.0}, 0.0, 0, id="no advantage"),
    ],
)
def test_ppo_by_hand(
    log_ratio: float, advantage: float, keywords: dict[str, float], loss: float, clipped: float
) -> None:
    old = torch.full((1,), -2.0)
    result = ppo_clip_loss(old + log_ratio, old, torch.tensor([advantage]), **keywords)
    assert float(result.per_token_loss) == pytest.approx(loss)
    assert float(result.clipped) == clipped


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo_clip_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_shapes_and_dtypes_are_kept(name: str) -> None:
    for dtype, shape in [(torch.bfloat16, (2, 3)), (torch.float16, (6,)), (torch.float32, (1, 2, 3))]:
        x = torch.zeros(shape, dtype=dtype)
        result = POLICY_LOSSES[name](x, x, x[..., :1])  # an advantage a row
        for got in (result.per_token_loss, result.clipped, result.ppo_kl, kl_estimate(x, x), value_loss(x, x)):
            assert (got.shape, got.dtype) == (x.shape, dtype)


# --- its relatives: the weight clipped, a soft gate, a trust region of probabilities


def cispo(log_prob: Tensor, old: float, advantage: float, low: float | None, high: float) -> Tensor:
    ratio = min((float(log_prob.detach()) - old), 700.0)
    weight = min(float(scalar(ratio).exp()), 1 + high)
    if low is not None:
        weight = max(weight, 1 - low)
    return -weight * advantage * log_prob


def sapo(log_prob: Tensor, old: float, advantage: float, positive: float, negative: float) -> Tensor:
    tau = positive if advantage > 0 else negative
    return -advantage * torch.sigmoid(tau * ((log_prob - old).exp() - 1)) * 4 / tau


def dppo(log_prob: Tensor, old: float, advantage: float, divergence: str, threshold: float) -> Tensor:
    p, q = float(log_prob.detach().exp()), float(scalar(old).exp())
    far = abs(p - q)
    if divergence == "kl":
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if far > threshold and advantage * (p - q) > 0:
        return 0 * log_prob
    return -advantage * (log_prob - old).exp()


RELATIVES: dict[str, tuple[Callable[..., PolicyLoss], dict[str, Any], Callable[..., Tensor], tuple[Any, ...]]] = {
    "CISPO": (cispo_loss, {}, cispo, (None, 4.0)),
    "CISPO, narrow above": (cispo_loss, {"clip_high": 0.2}, cispo, (None, 0.2)),
    "CISPO, both": (cispo_loss, {"clip_low": 0.2, "clip_high": 0.28}, cispo, (0.2, 0.28)),
    "CISPO, 1 is no lower bound": (cispo_loss, {"clip_low": 1, "clip_high": 0.28}, cispo, (None, 0.28)),
    "SAPO": (sapo_loss, {}, sapo, (1.0, 1.05)),
    "SAPO, others": (sapo_loss, {"tau_positive": 0.3, "tau_negative": 7}, sapo, (0.3, 7.0)),
    "DPPO tv": (dppo_loss, {"threshold": 0.05}, dppo, ("tv", 0.05)),
    "DPPO tv, usual": (dppo_loss, {}, dppo, ("tv", 0.15)),
    "DPPO kl": (dppo_loss, {"divergence": "kl", "threshold": 0.01}, dppo, ("kl", 0.01)),
}


@pytest.mark.parametrize(("loss", "keywords", "formula", "given"), RELATIVES.values(), ids=RELATIVES.keys())
@pytest.mark.parametrize("w", [1.0, 0.7], ids=["on-policy", "weighted"])
def test_relatives_of_ppo(
    loss: Callable[..., PolicyLoss],
    keywords: dict[str, Any],
    formula: Callable[..., Tensor],
    given: tuple[Any, ...],
    w: float,
) -> None:
    """In float64: value, slope, and what is said to be clipped."""
    tokens = [(log_ratio, advantage) for log_ratio, advantage in TOKENS if log_ratio < 2]  # log-probs stay below 0
    log_probs = torch.tensor([old + r for old, (r, _) in zip(OLD, tokens, strict=False)], dtype=torch.float64)
    log_probs.requires_grad_()
    old = torch.tensor(OLD[: len(tokens)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage for _, advantage in tokens], dtype=torch.float64)
    weights = torch.full_like(advantages, w, requires_grad=True)
    result = loss(log_probs, old, advantages, importance_weights=None if w == 1 else weights, **keywords)
    result.per_token_loss.sum().backward()
    assert old.grad is None
    assert weights.grad is None
    clipped = 0
    for t, (log_ratio, advantage) in enumerate(tokens):
        value, slope = value_and_slope(lambda x, t=t, a=advantage: formula(x, OLD[t], a, *given), OLD[t] + log_ratio)
        assert float(result.per_token_loss[t].detach()) == pytest.approx(w * value, rel=1e-12), tokens[t]
        assert float(log_probs.grad[t]) == pytest.approx(w * slope, rel=1e-12), tokens[t]
        assert float(result.ppo_kl[t]) == pytest.approx(-log_ratio, abs=1e-12)
        if loss is dppo_loss:
            assert float(result.clipped[t]) == (advantage != 0 and slope == 0), tokens[t]
        elif loss is cispo_loss:
            low, high = given
            within = 1 - (low or 1) <= math.exp(log_ratio) <= 1 + high
            assert float(result.clipped[t]) == (advantage != 0 and not within), tokens[t]
        clipped += int(result.clipped[t])
    assert (clipped > 0) == (loss is not sapo_loss and given != (None, 4.0))


def test_at_ratio_1_they_have_one_gradient() -> None:
    advantages = torch.tensor([-2.0, -0.5, 0.0, 1.0], dtype=torch.float64)
    for name, loss in POLICY_LOSSES.items():
        log_probs = torch.full((4,), -1.5, dtype=torch.float64, requires_grad=True)
        loss(log_probs, log_probs.detach(), advantages).per_token_loss.sum().backward()
        assert log_probs.grad.tolist() == pytest.approx((-advantages).tolist(), rel=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_large_ratio_gates_to_a_finite_loss_and_gradient(dtype: torch.dtype) -> None:
    for loss in (cispo_loss, sapo_loss):
        log_probs = torch.zeros(2, dtype=dtype, requires_grad=True)
        found = loss(log_probs, torch.full((2,), -900.0, dtype=dtype), torch.tensor([1.0, -1.0], dtype=dtype))
        found.per_token_loss.sum().backward()
        assert torch.isfinite(found.per_token_loss).all()
        assert torch.isfinite(log_probs.grad).all()


def test_a_certain_token_has_a_divergence() -> None:
    """p = 1 or q = 1, where the other tokens' log-probability is -inf."""
    certain, likely = torch.zeros(2), torch.full((2,), -0.5)
    advantages = torch.tensor([1.0, -1.0])
    for divergence in ("tv", "kl"):
        up = dppo_loss(certain, likely, advantages, divergence=divergence, threshold=0.1)  # type: ignore[arg-type]
        assert up.clipped.tolist() == [1, 0]
        down = dppo_loss(likely, certain, advantages, divergence=divergence, threshold=0.1)  # type: ignore[arg-type]
        assert down.clipped.tolist() == [0, 1]
        same = dppo_loss(certain, certain, advantages, divergence=divergence)  # type: ignore[arg-type]
        assert same.clipped.tolist() == [0, 0]
        assert same.per_token_loss.tolist() == [-1, 1]


# --- a critic


def critic(value: Tensor, target: float, old: float, clip: float | None) -> Tensor:
    square = (value - target) ** 2
    if clip is not None:
        within = value
        if value > old + clip:
            within = scalar(old + clip)
        elif value < old - clip:
            within = scalar(old - clip)
        other = (within - target) ** 2
        square = other if other > square else square
    return square / 2


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_value_loss(clip: float | None) -> None:
    cases = list(itertools.product([-1.0, -0.1, 0.05, 0.6], [-0.8, 0.3, 2.0], [0.0, 0.4]))
    values = torch.tensor([value for value, _, _ in cases], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([target for _, target, _ in cases], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([before for _, _, before in cases], dtype=torch.float64, requires_grad=True)
    loss = value_loss(values, returns, old_values=None if clip is None else old, clip=clip)
    loss.sum().backward()
    assert (returns.grad, old.grad) == (None, None)
    for t, (value, target, before) in enumerate(cases):
        expected, slope = value_and_slope(lambda x, r=target, o=before: critic(x, r, o, clip), value)
        assert float(loss[t].detach()) == pytest.approx(expected, rel=1e-12)
        assert float(values.grad[t]) == pytest.approx(slope, rel=1e-12)


def test_distillation_advantages() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = distillation_advantages(log_probs, torch.tensor([-0.5, -4.0]))
    assert advantages.tolist() == [0.5, -2.0]
    assert not advantages.requires_grad


@pytest.mark.parametrize("advantage", [1.0, 0.0], ids=["A=1", "A=0"])
@pytest.mark.parametrize(
    ("dtype", "log_ratio"),
    [(torch.float16, 12.0), (torch.float32, 90.0), (torch.bfloat16, 90.0)],
    ids=["fp16", "fp32", "bf16"],
)
def test_a_large_ratio_is_clipped_to_a_finite_loss_and_gradient(
    advantage: float, dtype: torch.dtype, log_ratio: float
) -> None:
    """Its exp overflows (fp16 beyond 11, the others beyond 88), but the clipped loss is a constant there."""
    log_probs = torch.zeros(1, dtype=dtype, requires_grad=True)
    result = ppo_clip_loss(
        log_probs, torch.full_like(log_probs, -log_ratio).detach(), torch.tensor([advantage], dtype=dtype)
    )
    result.per_token_loss.sum().backward()
    assert float(result.per_token_loss.detach()) == pytest.approx(-1.2 * advantage, rel=2.0**-8)  # bf16
    assert float(log_probs.grad) == 0


def test_masked_tokens_with_finite_log_probs_leave_the_gradient_alone() -> None:
    """As the module's docstring advises, whatever finite numbers they are."""
    mask = [torch.tensor([1.0, 0.0])]
    log_probs = torch.tensor([-0.4, 0.0], requires_grad=True)
    old = torch.tensor([-0.5, -1e4])
    reducer = make_pg_loss_reducer("token_mean", mask, totals=StepTotals.from_loss_masks(mask))
    reducer(ppo_clip_loss(log_probs, old, torch.ones(2)).per_token_loss).backward()
    assert log_probs.grad.tolist() == pytest.approx([-(2.718281828**0.1), 0])


# --- importance weights and KL


@pytest.mark.parametrize(
    ("log_ratio", "cap", "expected"),
    [
        (0.0, 2.0, 1.0),
        (0.5, 2.0, 1.6487213),
        (1.0, 2.0, 2.0),
        (1.0, 5.0, 2.7182818),
        (-3.0, 2.0, 0.0497871),
        (200.0, 2.0, 2.0),
    ],
)
def test_truncated_importance_weights(log_ratio: float, cap: float, expected: float) -> None:
    log_probs = torch.tensor([log_ratio - 1], requires_grad=True)
    behavior = torch.tensor([-1.0], requires_grad=True)
    weights = truncated_importance_weights(log_probs, behavior, cap=cap)
    assert float(weights) == pytest.approx(expected)
    assert not weights.requires_grad


KL: dict[str, Scalar] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}


@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("difference", [-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0])
def test_kl_estimate(estimator: Any, difference: float) -> None:
    log_probs = torch.tensor([difference - 2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_probs, reference, estimator=estimator)
    estimate.sum().backward()
    value, slope = value_and_slope(lambda x: KL[estimator](x + 2), difference - 2)
    assert float(estimate.detach()) == pytest.approx(value, rel=1e-9, abs=1e-15)
    assert float(log_probs.grad) == pytest.approx(slope, rel=1e-9, abs=1e-15)
    assert reference.grad is None


def test_k3_is_the_default_and_not_negative_in_float32() -> None:
    # exp(-d) - 1 taken naively rounds below zero near d = 0.
    difference = torch.linspace(-1e-3, 1e-3, 2001)
    estimate = kl_estimate(difference, torch.zeros_like(difference))
    assert float(estimate.min()) >= -1e-10
    assert torch.equal(estimate, kl_estimate(difference, torch.zeros_like(difference), estimator="k3"))


# --- advantages


def advantages_of(rewards: Sequence[float], groups: Sequence[Any], by_std: bool, epsilon: float) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        std = statistics.stdev(members) if len(members) > 1 else 0.0
        result.append((reward - statistics.fmean(members)) / (std + epsilon if by_std else 1))
    return result


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-4, 4).map(lambda r: r / 2), st.integers(0, 3)), max_size=12),
    st.booleans(),
    st.sampled_from([1e-6, 1e-4, 0.5]),
    st.sampled_from([int, str, lambda i: -i * 2**50]),
)
def test_group_relative_advantages(
    batch: list[tuple[float, int]], by_std: bool, epsilon: float, rename: Callable[[int], Any]
) -> None:
    rewards, groups = [reward for reward, _ in batch], [rename(group) for _, group in batch]
    got = group_relative_advantages(torch.tensor(rewards), groups, normalize_by_std=by_std, epsilon=epsilon)
    assert got.dtype == torch.float32
    # Computed in float64, then rounded once.
    assert got.tolist() == pytest.approx(advantages_of(rewards, groups, by_std, epsilon), rel=2 * oracle.ROUNDING)


@pytest.mark.parametrize(
    ("rewards", "ids", "by_std", "expected"),
    [
        pytest.param([1, 0], [0, 0], True, [0.7071, -0.7071], id="Bessel's correction"),
        pytest.param([1, 0], [0, 0], False, [0.5, -0.5], id="mean only"),
        pytest.param([1, 0, 5, 3, 1], [0, 0, 1, 1, 1], False, [0.5, -0.5, 2, 0, -2], id="uneven groups"),
        pytest.param([1, 5, 0, 3, 1], ["a", "b", "a", "b", "b"], True, [0.7071, 1, -0.7071, 0, -1], id="interleaved"),
        pytest.param([7, 1, 1], [0, 1, 1], True, [0, 0, 0], id="group of one, and equal rewards"),
        pytest.param([0.1] * 7, [0] * 7, True, [0] * 7, id="equal rewards that binary cannot hold"),
        pytest.param([], [], True, [], id="none"),
    ],
)
def test_advantages_by_hand(rewards: list[float], ids: list[Any], by_std: bool, expected: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        got = group_relative_advantages(torch.tensor(rewards, dtype=dtype), ids, normalize_by_std=by_std)
        assert got.tolist() == pytest.approx(expected, abs=1e-4)


def test_large_rewards_keep_their_differences() -> None:
    rewards = torch.tensor([16777216.0, 16777218.0])  # 2^24: float32 sums lose the 2
    got = group_relative_advantages(rewards, [0, 0], normalize_by_std=False)
    assert got.tolist() == [-1, 1]


# --- refusals, each beside its nearest legal neighbour

THREE = torch.zeros(3)


def clip(**keywords: Any) -> Call:
    given = {"log_probs": THREE, "old_log_probs": THREE, "advantages": THREE} | keywords
    return lambda: ppo_clip_loss(**given)


def cap(value: float, behavior: Tensor = THREE) -> Call:
    return lambda: truncated_importance_weights(THREE, behavior, cap=value)


def kl(estimator: Any = "k3", reference: Tensor = THREE) -> Call:
    return lambda: kl_estimate(THREE, reference, estimator=estimator)


def advantages(rewards: Any, ids: Any) -> Call:
    return lambda: group_relative_advantages(torch.tensor(rewards), ids)


def relative(loss: Callable[..., PolicyLoss], **keywords: Any) -> Call:
    given = {"log_probs": THREE, "old_log_probs": THREE, "advantages": THREE} | keywords
    return lambda: loss(**given)


def value(**keywords: Any) -> Call:
    return lambda: value_loss(**{"values": THREE, "returns": THREE, **keywords})


REFUSALS: dict[str, Refusal] = {
    "CISPO, shapes differ": (
        relative(cispo_loss, old_log_probs=torch.zeros(4)),
        ValueError,
        r"log-probs of shapes \(3,\) and \(4,\)",
        relative(cispo_loss),
    ),
    "CISPO, clip_low 0": (
        relative(cispo_loss, clip_low=0.0),
        ValueError,
        r"clip_low is 0.0: it must be in \(0, 1\]",
        relative(cispo_loss, clip_low=None),
    ),
    "CISPO, clip_high 0": (
        relative(cispo_loss, clip_high=0.0),
        ValueError,
        "clip_high is 0.0",
        relative(cispo_loss, clip_high=1.5),
    ),
    "SAPO, a temperature of 0": (
        relative(sapo_loss, tau_negative=0.0),
        ValueError,
        r"tau_negative is 0.0: it must be in \[0.1, 100\]",
        relative(sapo_loss, tau_negative=2.0),
    ),
    "DPPO, a threshold of 1 of tv": (
        relative(dppo_loss, threshold=1.0),
        ValueError,
        "threshold is 1.0: it must be above 0, and below 1 for tv",
        relative(dppo_loss, threshold=1.0, divergence="kl"),
    ),
    "DPPO, an unknown divergence": (
        relative(dppo_loss, divergence="js"),
        ValueError,
        "there is no such divergence. Choose one of tv, kl",
        relative(dppo_loss, divergence="kl"),
    ),
    "values and returns of different shapes": (
        value(returns=torch.zeros(1)),
        ValueError,
        r"values and returns of shapes \(3,\) and \(1,\)",
        value(returns=torch.ones(3)),
    ),
    "a value clip without old values": (
        value(clip=0.2),
        ValueError,
        "clip=0.2 with no old_values: values are clipped around the old ones",
        value(clip=0.2, old_values=THREE),
    ),
    "old values without a clip": (
        value(old_values=THREE),
        ValueError,
        "clip=None with some old_values",
        value(),
    ),
    "a value clip of 0": (
        value(clip=0.0, old_values=THREE),
        ValueError,
        "clip is 0.0: it must be finite and above 0",
        value(clip=0.1, old_values=THREE),
    ),
    "shapes differ": (
        clip(old_log_probs=torch.zeros(4)),
        ValueError,
        r"shapes \(3,\) and \(4,\): they must be equal",
        clip(),
    ),
    "old_log_probs broadcast": (
        clip(old_log_probs=torch.zeros(1)),
        ValueError,
        r"\(3,\) and \(1,\)",
        clip(advantages=torch.zeros(1)),
    ),
    "advantages wider than the tokens": (
        clip(advantages=torch.zeros(3, 1)),
        ValueError,
        r"\(3, 1\)",
        clip(advantages=torch.zeros(1)),
    ),
    "importance weights wider than the tokens": (
        clip(importance_weights=torch.ones(3, 1)),
        ValueError,
        r"\(3, 1\)",
        clip(importance_weights=torch.ones(3)),
    ),
    "clip_low 0": (clip(clip_low=0), ValueError, r"clip_low is 0: it must be in \(0, 1\]", clip(clip_low=1e-3)),
    "clip_low above 1": (clip(clip_low=1.01), ValueError, "clip_low is 1.01", clip(clip_low=1)),
    "clip_low NaN": (clip(clip_low=NAN), ValueError, "clip_low is nan", clip(clip_low=0.2)),
    "clip_high 0": (
        clip(clip_high=0.0),
        ValueError,
        "clip_high is 0.0: it must be finite and above 0",
        clip(clip_high=3),
    ),
    "clip_high infinite": (clip(clip_high=INF), ValueError, "clip_high is inf", clip(clip_high=1e9)),
    "dual_clip 1": (
        clip(dual_clip=1),
        ValueError,
        "dual_clip is 1: it must be finite and above 1",
        clip(dual_clip=1.001),
    ),
    "dual_clip infinite": (clip(dual_clip=INF), ValueError, "dual_clip is inf", clip(dual_clip=None)),
    "cap 0": (cap(0), ValueError, "cap is 0: it must be finite and above 0", cap(0.5)),
    "cap infinite": (cap(INF), ValueError, "cap is inf", cap(1e9)),
    "cap NaN": (cap(NAN), ValueError, "cap is nan", cap(1)),
    "behavior of another shape": (cap(2, torch.zeros(1)), ValueError, r"\(3,\) and \(1,\)", cap(2)),
    "unknown estimator": (
        kl("k4"),
        ValueError,
        "'k4': there is no such KL estimator. Choose one of k1, k2, k3",
        kl("k1"),
    ),
    "reference of another shape": (kl("k2", torch.zeros(3, 1)), ValueError, r"\(3,\) and \(3, 1\)", kl("k2")),
    "rewards 2-D": (
        advantages([[1.0, 2.0]], [0, 0]),
        ValueError,
        r"shape \(1, 2\): they must be 1-D and finite",
        advantages([1.0, 2.0], [0, 0]),
    ),
    "rewards NaN": (advantages([1.0, NAN], [0, 0]), ValueError, "1-D and finite", advantages([1.0, -1e30], [0, 0])),
    "rewards infinite": (advantages([INF], [0]), ValueError, "1-D and finite", advantages([1], [0])),
    "ids of another number": (
        advantages([1.0, 2.0], [0]),
        ValueError,
        "1 prompt_ids for 2",
        advantages([1.0, 2.0], [0, 1]),
    ),
    "ids of another type": (advantages([1.0], [0.5]), TypeError, "prompt_ids holds 0.5", advantages([1.0], ["0.5"])),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

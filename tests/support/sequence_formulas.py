"""Losses and estimates that couple tokens, stated for one whole sequence in float64, with Python's ifs and loops.

`v` has a value for each token by name, `m` is its mask; of a rollout, its samples are one after the other.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

Values = dict[str, Tensor]


def log_ratio(v: Values) -> Tensor:
    return v["log_probs"] - v["old_log_probs"]


def mismatch(v: Values) -> Tensor:
    return v["old_log_probs"] - v["rollout_log_probs"]


def mean(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum() / m.sum() if m.sum() > 0 else 0 * x.sum()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def ppo(v: Values, m: Tensor, low: float = 0.2, high: float = 0.28, dual: float | None = 1.5) -> Tensor:
    return surrogate(log_ratio(v).exp(), v["token_advantages"], low, high, dual)


def cispo(v: Values, m: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    return -log_ratio(v).detach().exp().clamp(1 - low, 1 + high) * v["token_advantages"] * v["log_probs"]


def sapo(v: Values, m: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    tau = negative + (positive - negative) * (v["token_advantages"] > 0).double()
    return -v["token_advantages"] * torch.sigmoid(tau * (log_ratio(v).exp() - 1)) * 4 / tau


def dppo(v: Values, m: Tensor, divergence: str, threshold: float) -> Tensor:
    p, q, a = v["log_probs"].detach().exp(), v["old_log_probs"].exp(), v["token_advantages"]
    far = (p - q).abs() if divergence == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    return torch.where((far > threshold) & (a * (p - q) > 0), 0, -a * log_ratio(v).exp())


def ipo(v: Values, m: Tensor, threshold: float) -> Tensor:
    far = (v["log_probs"].detach().exp() - v["old_log_probs"].exp()).abs() > threshold
    return torch.where(far, 0, -v["token_advantages"] * log_ratio(v).exp())


def cfpo(v: Values, m: Tensor, epsilon: float) -> Tensor:
    r, a = log_ratio(v).exp(), v["token_advantages"]
    return -(r * a - a.abs() / (2 * epsilon) * (r - 1) ** 2)


def weighted_k3(v: Values, m: Tensor) -> Tensor:
    """k3 weighted by the ratio; the rollouts' log-probs stand for the reference's."""
    of_reference = (v["rollout_log_probs"] - v["log_probs"]).exp()
    return log_ratio(v).exp() * (of_reference - of_reference.log() - 1)


def critic(v: Values, m: Tensor, clip: float) -> Tensor:
    value, old, target = v["log_probs"], v["old_log_probs"], v["rollout_log_probs"]
    bounded = torch.where((value - old).abs() > clip, old + clip * (value - old).sign(), value)
    return torch.maximum((value - target) ** 2, (bounded - target) ** 2) / 2


def gspo(v: Values, m: Tensor) -> Tensor:
    return surrogate(mean(log_ratio(v), m).exp().expand(len(m)), v["advantages"], 3e-4, 4e-4)


def gspo_token(v: Values, m: Tensor) -> Tensor:
    s = mean(log_ratio(v), m).exp().detach() * v["log_probs"].exp() / v["log_probs"].exp().detach()
    return surrogate(s, v["token_advantages"], 3e-4, 4e-4)


def gmpo(v: Values, m: Tensor) -> Tensor:
    """sgn(A) * (prod_t |min(r A, clip(r, e^-0.4, e^0.4) A)|^m)^(1/M), of a sample's one advantage."""
    a, r = v["advantages"], log_ratio(v).exp()
    chosen = torch.minimum(r * a, r.clamp(math.exp(-0.4), math.exp(0.4)) * a)
    product = (chosen.abs() ** m).prod()
    return -(a.sign() * (product ** (1 / m.sum()) if m.sum() > 0 else product * a.abs()))


def vespo(
    v: Values, m: Tensor, positive: tuple[float, float] = (2, 3), negative: tuple[float, float] = (3, 2)
) -> Tensor:
    w = (log_ratio(v).detach() * m).sum().exp()
    above, below = (w**k * math.exp(rate) * (-rate * w).exp() for k, rate in (positive, negative))
    return -torch.where(v["token_advantages"] >= 0, above, below) * v["token_advantages"] * v["log_probs"]


def sequence_tis(v: Values, m: Tensor) -> Tensor:
    return (mismatch(v) * m).sum().exp().clamp(max=1.1) * gspo(v, m)


def gated(
    v: Values, m: Tensor, metric: str, aggregate: str | None, low: float, high: float, clamps: bool = False
) -> Tensor:
    """PPO's loss times the weight of a gate: by tokens where nothing is aggregated."""
    x, weights = mismatch(v).tolist(), list[float]()
    p, q = v["old_log_probs"].exp().tolist(), v["rollout_log_probs"].exp().tolist()

    def coins(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    by_metric: dict[str, Callable[[int], float]] = {
        "ratio": lambda t: x[t],
        "k1": lambda t: -x[t],
        "k2": lambda t: x[t] ** 2 / 2,
        "k3": lambda t: math.exp(x[t]) - 1 - x[t],
        "tv": lambda t: abs(p[t] - q[t]),
        "binary_kl": lambda t: coins(q[t], p[t]),
        "both_binary_kl": lambda t: max(coins(q[t], p[t]), coins(p[t], q[t])),
    }
    of_tokens = [by_metric[metric](t) for t in range(len(x))]
    active = [t for t in range(len(x)) if m[t]]
    for t in range(len(x)):
        judged = of_tokens[t]
        if aggregate == "max":
            judged = max([of_tokens[k] for k in active], default=0.0)
        elif aggregate is not None:
            judged = math.fsum(of_tokens[k] * float(m[k]) for k in active)
            judged /= float(m.sum()) if aggregate == "mean" and active else 1
        value = math.exp(judged) if metric == "ratio" else judged
        if clamps:
            weights.append(min(max(value, low), high))
        else:
            has_weight = metric == "ratio" and aggregate != "max"
            weights.append((value if has_weight else 1.0) if low <= value <= high else 0.0)
    return torch.tensor(weights, dtype=torch.float64) * ppo(v, m)


def of_quantiles(v: Values, m: Tensor) -> Tensor:
    """Three quantiles of the masked values, by the definition: the smallest that is enough."""
    total = torch.zeros((), dtype=torch.float64)
    linear = sorted(x for x, w in zip(v["token_advantages"].tolist(), m.tolist(), strict=True) if w)
    if linear:
        total = total + 4 * torch.tensor(linear, dtype=torch.float64).quantile(0.7)
    for n, q in enumerate((0.3, 0.5, 1.0)):
        values = sorted((x, float(w)) for x, w in zip(v["token_advantages"].tolist(), m.tolist(), strict=True) if w)
        enough = [x for i, (x, _) in enumerate(values) if math.fsum(w for _, w in values[: i + 1]) >= q * m.sum()]
        total = total + (n + 1) * (enough[0] if enough else 0.0)
    return total * v["log_probs"]


def off_policy_mask(v: Values, m: Tensor) -> Tensor:
    far = mean(-log_ratio(v), m).detach() > 0.01
    return torch.where((v["advantages"] < 0) & far, 0, ppo(v, m))


def of_sum(v: Values, m: Tensor) -> Tensor:
    return ((v["log_probs"] * m).sum() / 9).sin() * v["log_probs"]


def of_three(v: Values, m: Tensor) -> Tensor:
    a, b, c = (mean(x, m) for x in (v["log_probs"], v["log_probs"].detach().exp(), v["old_log_probs"]))
    return a.square() * b + c * a + v["log_probs"]


# --- formulas along a sequence, by loops over its tokens


def scan(
    x: Tensor, m: Tensor, gamma: float, steps: str = "active", reverse: bool = False, exclusive: bool = False
) -> Tensor:
    """S_t = m_t x_t + gamma S_{t-1} at active tokens, by loops over places; masked ones are steps or not."""
    states, state = [torch.zeros((), dtype=torch.float64)] * len(m), torch.zeros((), dtype=torch.float64)
    for t in range(len(m))[:: -1 if reverse else 1]:
        if m[t] != 0 or steps == "all":
            before, state = state, gamma * state + (m[t] * x[t] if m[t] != 0 else 0)
            states[t] = (before if exclusive else state) if m[t] != 0 else states[t]
    return torch.stack(states)


#: Discount, steps, direction, and whether a token's own value is left out.
SCANS = list(itertools.product((1.0, 0.7, 0.0), ("active", "all"), (False, True), (False, True)))


def of_scans(v: Values, m: Tensor) -> Tensor:
    total = torch.zeros(len(m), dtype=torch.float64)
    for n, (gamma, steps, reverse, exclusive) in enumerate(SCANS):
        total = total + (scan(v["log_probs"], m, gamma, steps, reverse, exclusive) / 9 + n).sin()
    return total


def of_prefix_sum(v: Values, m: Tensor) -> Tensor:
    return (scan(v["log_probs"], m, 1) / 9).sin() * v["log_probs"]


def future_kl(v: Values, m: Tensor) -> Tensor:
    future = scan(log_ratio(v).detach(), m, 0.9, "all", reverse=True)
    return surrogate(log_ratio(v).exp(), v["token_advantages"] * future.exp().clamp(0.8, 1.2), 0.2, 0.2)


def prefix_ratio(v: Values, m: Tensor) -> Tensor:
    a, log, width = v["token_advantages"], scan(log_ratio(v), m, 1), 0.2 * scan(torch.ones_like(m), m, 1).sqrt()
    return torch.maximum(-a * log.exp(), -a * torch.minimum(torch.maximum(log, -width), width).exp())


def prefix_budget(v: Values, m: Tensor) -> Tensor:
    """CPPO's mask, token by token; a mask entry of 0.5 is half a token of a position or a sum, not of a quantile."""
    p, q, a = v["log_probs"].detach().exp().tolist(), v["old_log_probs"].exp().tolist(), v["token_advantages"].tolist()
    length, active = float(m.sum()), [t for t in range(len(m)) if m[t]]
    ascending = sorted(abs(p[t] - q[t]) for t in active)
    usual = 0.0
    if active:
        below, share = divmod(0.9 * (len(ascending) - 1), 1)
        above = ascending[min(int(below) + 1, len(ascending) - 1)]
        usual = ascending[int(below)] * (1 - share) + above * share
    budget = min(max(usual, 0.02), 0.04)
    keep, position, spent, weights = torch.zeros_like(m), 0.0, 0.0, 0.0
    for t in active:
        position += float(m[t])
        weight = 1 - 0.2 * (position - 1) / max(length - 1, 1)
        weighted = weight * abs(p[t] - q[t])
        is_kept = a[t] * (p[t] - q[t]) <= 0 or weighted <= min(0.2, 0.2 + budget * weights - spent)
        keep[t] = float(is_kept)
        spent, weights = spent + float(m[t]) * weighted, weights + float(m[t]) * weight
    return -keep * v["token_advantages"] * log_ratio(v).exp()


def generalised(v: Values, m: Tensor, adaptive: bool = False) -> Tensor:
    r, values, active = v["token_advantages"], v["old_log_probs"], [t for t in range(len(m)) if m[t] != 0]
    lam = max(1 - 1 / (0.3 * float(m.sum())), 0.0) if adaptive and active else 0.8
    advantages, later, value = torch.zeros_like(m), 0.0, 0.0
    for t in reversed(active):
        later = float(r[t]) + 0.9 * value - float(values[t]) + 0.9 * lam * later
        advantages[t], value = later, float(values[t])
    return (advantages + 0.3 * torch.where(m != 0, advantages + values, 0)) * v["log_probs"]


def generalised_of_turns(v: Values, m: Tensor) -> Tensor:
    """Of a sample whose turns are 0, 1, 2, ... by fours; those that are masked whole are no steps."""
    r, values, active = v["token_advantages"], v["old_log_probs"], [t for t in range(len(m)) if m[t] != 0]
    turns: dict[int, list[int]] = {}
    for t in active:
        turns.setdefault(t // 4, []).append(t)
    advantages, returns, later, value = torch.zeros_like(m), torch.zeros_like(m), 0.0, 0.0
    for tokens in reversed(turns.values()):
        own = float(values[tokens[0]])
        later = math.fsum(float(r[t]) for t in tokens) + 0.9 * value - own + 0.72 * later
        value = own
        for t in tokens:
            advantages[t], returns[t] = later, later + own
    return (advantages + 0.3 * returns) * v["log_probs"]

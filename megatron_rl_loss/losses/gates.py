"""`Gate`: bounds of how differently two policies think of a token or a sequence, and what becomes of those outside."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_within, is_number

Level = Literal["token", "sequence", "rollout"]
GateMetric = Literal["ratio", "k1", "k2", "k3", "binary_kl", "both_binary_kl", "tv"]
Action = Literal["clamp", "mask"]
Aggregate = Literal["mean", "sum", "max"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Bounds of a metric of trainer p against sampler q, and what becomes of tokens outside; x is ``log p - log q``.

    >>> Gate(high=5.0, low=0.5).action  # IcePop
    'mask'
    >>> Gate(level="sequence", metric="k3", aggregate="max", high=0.1).aggregate
    'max'

    Attributes:
        metric: of a token: ``ratio`` exp(x); the estimators ``k1`` -x, ``k2`` x^2 / 2 and ``k3`` exp(x) - 1 - x of
            KL(q || p); ``binary_kl``, that of two coins, q log(q / p) + (1 - q) log((1 - q) / (1 - p));
            ``both_binary_kl``, the larger of it and of it with p and q exchanged; ``tv`` |p - q|.
        low, high: bounds of the metric. A ratio has ``0 <= low < 1 <= high``; ``low`` is 0 by default. Other metrics
            have no low bound by default.
        level: what is judged: a ``token``, a ``sequence`` (sample) or a ``rollout``.
        aggregate: of the tokens of a sequence: ``mean`` by the mask (the default; of ratios the geometric one), ``sum``
            (of ratios the product), or ``max``.
        action: ``mask`` gives tokens outside weight 0; ``clamp`` gives them the bound, of a ratio that is not the
            largest.

    Raises ValueError for unknown names, unusable bounds, a clamp of another metric, and an aggregate of single tokens.
    Source: the form is that of AReaL's `RejectionSamplingConfig`; binary divergences, DPPO, arXiv:2602.04879.
    """

    high: float
    low: float | None = None
    level: Level = "token"
    metric: GateMetric = "ratio"
    aggregate: Aggregate | None = None
    action: Action = "mask"

    def __post_init__(self) -> None:
        for name, choices in (("level", Level), ("metric", GateMetric), ("action", Action)):
            check_choice(f"{name} of a gate", getattr(self, name), get_args(choices))
        if self.aggregate is not None:
            check_choice("aggregate of a gate", self.aggregate, get_args(Aggregate))
            if self.level == "token":
                raise ValueError(
                    f"aggregate={self.aggregate!r} of a gate of tokens: a token has nothing to aggregate. Drop it, or "
                    "pass level='sequence'."
                )
        if self.action == "clamp" and not self.has_weight:
            shown = "largest ratio" if self.metric == "ratio" else self.metric
            raise ValueError(
                f"a clamp of the {shown}: a clamped token has the bound as its weight, which must be a ratio of its "
                "own, a product or a mean. Pass action='mask', or metric='ratio'."
            )
        if self.metric == "ratio":
            check_within("high", self.high, "[1, inf)", "2.0 is usual; 5.0 for IcePop")
            check_within("low", 0.0 if self.low is None else self.low, "[0, 1)", "0 is usual; 0.5 for IcePop")
            return
        check_within("high", self.high, "(0, inf)", "around 0.01 to 0.1 is usual")
        if self.low is not None and not (is_number(self.low) and self.low < self.high):
            raise ValueError(
                f"low is {self.low!r}, high {self.high!r}: low must be a number below high. Leave it out for no bound."
            )

    @property
    def has_weight(self) -> bool:
        """True where what is judged is a ratio that can weigh tokens: a token's, a product, or a geometric mean."""
        return self.metric == "ratio" and self.aggregate != "max"

    @property
    def bounds(self) -> tuple[float, float]:
        """low and high of what `token_metric` gives: of a ratio their logarithms."""
        if self.metric != "ratio":
            return (-math.inf if self.low is None else self.low), self.high
        return (math.log(self.low) if self.low else -math.inf), math.log(self.high)

    def token_metric(self, log_ratio: Tensor, log_probs: Tensor | None) -> Tensor:
        """The metric of each token, of a ratio x itself, float64; ValueError without the log-probs that it needs."""
        x = log_ratio.double()
        if self.metric == "ratio":
            return x
        if self.metric in ("k1", "k2"):
            return -x if self.metric == "k1" else x.square() / 2
        if self.metric == "k3":
            return torch.expm1(x) - x
        if log_probs is None:
            raise ValueError(
                f"a gate of {self.metric} without log_probs: it compares probabilities, which a ratio does not tell. "
                "Pass log_probs=, those of the trainer."
            )
        p = log_probs.double()
        q = p - x
        if self.metric == "tv":
            return (p.exp() - q.exp()).abs()
        forward = binary_kl(q, p)
        return forward if self.metric == "binary_kl" else torch.maximum(forward, binary_kl(p, q))

    def is_outside(self, judged: Tensor) -> Tensor:
        """True where the metric, as `token_metric` gives it, is beyond a bound; NaN is not."""
        low, high = self.bounds
        return (judged < low) | (judged > high)


def binary_kl(of: Tensor, against: Tensor) -> Tensor:
    """KL of two coins, float64, from their log-probs of heads; 0 * log 0 is 0."""
    tails_of, tails_against = (torch.expm1(heads.clamp(max=0)).abs() for heads in (of, against))
    tails_kl = tails_of * (tails_of / tails_against).log()
    heads_kl = of.exp() * (of - against).masked_fill(of == -math.inf, 0)
    return heads_kl + tails_kl.masked_fill(tails_of == 0, 0)

"""Metrics of a step that say what they are averaged over and of what kind they are: never means of means.

Sums go with the loss's own pass over a micro-batch. Kinds that no sum over ranks can give (extremes, a variance) keep
their parts until the step's last micro-batch; `finish` then reduces all of them in two collectives per group at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.reduction.sums import WeightedSum
from megatron_rl_loss.step.collectives import Group, several

Over = Literal["samples", "tokens", "prompts", "none"]
Kind = Literal["mean", "min", "max", "variance", "ess"]

#: The mode whose weights make a mean over it; ``none`` is a plain sum by the mask.
MODE_OF: dict[str, str] = {
    "samples": "sample_mean",
    "tokens": "token_mean",
    "prompts": "prompt_mean",
    "none": "token_sum",
}


@dataclass(frozen=True)
class Metric:
    """A metric of the step, not differentiated; w are the weights of what it is over, E[x] = sum w x / sum w.

    Attributes:
        values: one for each token this rank holds, in the layout's order; NaN where masked is ignored.
        over: ``samples``, ``tokens`` or ``prompts`` for a mean over these; ``none`` for the plain sum of m * values.
        kind: ``mean`` (with ``none`` the sum); ``min`` and ``max`` of the tokens of nonzero weight; ``variance``,
            E[v^2] - E[v]^2 of sums in float32, so to about 1e-6 of E[v^2];
            ``ess``, the effective sample size as a share, E[v]^2 / E[v^2].
        mask: one of the samples' ``term_masks`` in place of the loss mask.
    """

    values: Tensor
    over: Over = "samples"
    _: KW_ONLY
    kind: Kind = "mean"
    mask: str | None = None

    def __post_init__(self) -> None:
        check_choice("normaliser of a metric", self.over, get_args(Over))
        check_choice("kind of metric", self.kind, get_args(Kind))

    @property
    def is_sum(self) -> bool:
        """Whether ranks' shares add up to it."""
        return self.kind == "mean"

    @property
    def is_extreme(self) -> bool:
        return self.kind in ("min", "max")

    def rows(self) -> list[Tensor]:
        """What is summed by the weights: the values, or for moments 1, v and v^2."""
        if self.is_extreme:
            return []
        values = self.values.detach()
        return [values] if self.is_sum else [torch.ones_like(values), values, values.square()]

    def extreme(self, reducer: WeightedSum) -> Tensor:
        """The largest of this rank's values (of min: of their negatives), float64 0-dim; -inf where none is active."""
        values = self.values.detach().reshape(-1).double() * (-1 if self.kind == "min" else 1)
        left_out = reducer.weights_on(values.device) == 0
        return torch.cat([values.masked_fill(left_out, -torch.inf), values.new_full((1,), -torch.inf)]).amax()


@dataclass
class Parts:
    """What a step's micro-batches have left to reduce: of each metric its kind, and a part per micro-batch."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    of_microbatches: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, kind: Kind, part: Tensor) -> None:
        self.kinds[name] = kind
        self.of_microbatches.setdefault(name, []).append(part)

    def clear(self) -> None:
        self.kinds.clear()
        self.of_microbatches.clear()

    def finish(self, groups: Sequence[Group | None]) -> dict[str, Tensor]:
        """Each metric over all micro-batches and the ranks of the groups, 0-dim; NaN without an active token."""
        extremes = [name for name, kind in self.kinds.items() if kind in ("min", "max")]
        moments = [name for name in self.kinds if name not in extremes]
        values: dict[str, Tensor] = {}
        if extremes:
            largest = torch.stack([torch.stack(self.of_microbatches[name]).amax(0) for name in extremes])
            _reduce(largest, groups, dist.ReduceOp.MAX)
            for name, value in zip(extremes, largest, strict=True):
                value = value.masked_fill(value == -torch.inf, torch.nan)
                values[name] = -value if self.kinds[name] == "min" else value
        if moments:
            sums = torch.stack([torch.stack(self.of_microbatches[name]).sum(0) for name in moments])
            _reduce(sums, groups, dist.ReduceOp.SUM)
            for name, (weight, first, second) in zip(moments, sums, strict=True):
                mean, square = first / weight, second / weight
                variance = (square - mean.square()).clamp(min=0)  # float32 sums: rounding may leave less
                values[name] = mean.square() / square if self.kinds[name] == "ess" else variance
        return values


def _reduce(values: Tensor, groups: Sequence[Group | None], op: dist.ReduceOp.RedOpType) -> None:
    for group in several(*groups):
        dist.all_reduce(values, op=op, group=group)


def put_in(reports: Sequence[dict[str, Tensor]], values: Mapping[str, Tensor]) -> None:
    """In the reports that Megatron sums and divides: pairs whose quotient is the value, on every rank."""
    for report in reports:
        for name, value in values.items():
            denominator = report[name][1]
            report[name] = torch.stack([value.to(denominator) * denominator, denominator])

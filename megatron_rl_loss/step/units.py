"""Units of a step, rollouts and prompt groups, as they are counted; and further sums by key that modes ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_count
from megatron_rl_loss.step.ids import Ids, as_ids
from megatron_rl_loss.step.samples import Samples

UnitCounting = Literal["all", "active"]
#: What a sum goes over: samples of one id are summed.
By = Literal["step", "rollout", "prompt"] | Callable[[Samples], Ids]


class TokensById:
    """Mask tokens of units (rollouts or prompt groups) by id: at least those of the samples this rank holds."""

    def __init__(self, ids: Tensor, tokens: Tensor) -> None:
        order = ids.argsort()
        self._ids, self._tokens = ids[order], tokens.double()[order]

    @classmethod
    def from_mapping(cls, tokens: Mapping[int | str, float]) -> "TokensById":
        for unit, count in tokens.items():
            check_count(f"the token count of id {unit!r}", count)
        counts = torch.tensor(list(tokens.values()), dtype=torch.float64, device="cpu")
        return cls(as_ids("the ids of token counts", list(tokens), len(tokens)), counts)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<tokens of {len(self)} ids, {float(self.total):g} in all>"

    @property
    def total(self) -> float:
        """Mask tokens of all these units."""
        return float(self._tokens.sum())

    def of(self, name: str, ids: Tensor) -> Tensor:
        """Tokens of the unit of each id, float64; ValueError for an id that is not among them."""
        unknown = ~torch.isin(ids, self._ids)
        if bool(unknown.any()):
            raise ValueError(
                f"the {name} of sample {int(unknown.nonzero()[0])} has no token count in the step's totals: every "
                "unit of the micro-batch must be in them. Make the totals from the whole step, with the same ids."
            )
        return self._tokens[torch.searchsorted(self._ids, ids)]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A sum over the step, by key, that a mode of one's own asks for; it travels with the step's counts.

    Attributes:
        of: one number per sample, [num_samples]; of the samples with their loss masks.
        by: what a sum goes over: the ``step``, each ``rollout``, each ``prompt``; or a function that gives each sample
            an id (int or str), where samples of one id are summed.
    """

    of: Callable[[Samples], Tensor]
    by: By = "step"

    def values(self, samples: Samples) -> Tensor:
        """Of each sample, float64 on the host."""
        values = self.of(samples)
        if not isinstance(values, Tensor) or values.shape != (len(samples),):
            shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"a statistic that returned {shown} for {len(samples)} samples: it must return a tensor with one "
                "number per sample. Return a tensor of shape [num_samples]."
            )
        values = values.detach().double().cpu()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"a statistic that is NaN or infinite for sample {int((~torch.isfinite(values)).nonzero()[0])}: it "
                "must be finite, for fully masked samples too. Return 0 where there is nothing to add."
            )
        return values

    @property
    def of_rollouts(self) -> bool:
        """Whether it is a sum over rollouts, which are samples where these have no rollout ids."""
        return self.by == "rollout"

    def keys(self, name: str, samples: Samples) -> Tensor:
        """The key of each sample, the same on every rank, int64."""
        if callable(self.by):
            ids: Ids | None = self.by(samples)
        elif self.by == "step":
            ids = [0] * len(samples)
        else:
            ids = samples.rollout_ids if self.by == "rollout" else samples.prompt_ids
        if ids is None:
            raise ValueError(
                f"the statistic {name} by {self.by} of samples without {self.by}_ids: it is summed over those of one "
                f"id. Give Samples {self.by}_ids."
            )
        numbers = as_ids(f"keys of {name}", ids, len(samples)).tolist()
        return as_ids(f"keys of {name}", [f"{name}/{number}" for number in numbers], len(samples))


@dataclass(frozen=True, kw_only=True)
class UnitCounts:
    """The step's units of one kind, rollouts or prompt groups. Give what the mode needs, leave the rest None.

    Attributes:
        all: how many there are, fully masked ones included.
        active: how many have a token of nonzero weight.
        tokens: mask tokens of each unit that this rank holds a part of, by id (a mapping is accepted). Needed by
            ``prompt_mean``, and by ``sample_mean`` for rollouts that are split over samples.
    """

    all: int | None = None
    active: int | None = None
    tokens: TokensById | Mapping[int | str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("all", "active"):
            if (count := getattr(self, name)) is not None:
                check_count(f"UnitCounts.{name}", count)
        if None not in (self.all, self.active) and self.active > self.all:  # type: ignore[operator]
            raise ValueError(
                f"{self.active} active units of {self.all}: active ones are among all of them. Count the whole step "
                "for both."
            )
        if isinstance(self.tokens, Mapping):
            object.__setattr__(self, "tokens", TokensById.from_mapping(self.tokens))
        elif self.tokens is not None and not isinstance(self.tokens, TokensById):
            raise TypeError(f"UnitCounts.tokens is {self.tokens!r}: it must map ids to token counts. Pass a dict.")

    def counted(self, units: UnitCounting) -> int | None:
        """How many units count."""
        return self.all if units == "all" else self.active

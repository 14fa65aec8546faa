"""Where the tokens of a loss lie: what this rank holds of a micro-batch, the group it exchanges over, units by id."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice, require
from megatron_rl_loss.reduction.sums import check_values
from megatron_rl_loss.step.collectives import Group, size_of
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, TokensById

Per = Literal["sample", "rollout", "prompt"]


class InMicrobatch(Protocol):
    """What a `Microbatch` says of the place of its tokens."""

    @property
    def tokens(self) -> LocalTokens: ...
    @property
    def cp_group(self) -> Group | None: ...
    @property
    def totals(self) -> StepTotals: ...


#: Where the tokens of a loss lie: a `Microbatch`, or what this rank holds of one.
Place = LocalTokens | InMicrobatch


def located(
    local: Place, cp_group: Group | None = None, totals: StepTotals | None = None
) -> tuple[LocalTokens, Group | None, StepTotals | None]:
    """What this rank holds, the group and the totals: a `Microbatch` knows all three."""
    if isinstance(local, LocalTokens):
        return local, local.samples.cp_group if cp_group is None else cp_group, totals
    if isinstance(local, Samples) or not hasattr(local, "tokens"):
        raise TypeError(
            f"local is a {type(local).__name__}: it says where tokens lie. Pass the micro-batch of a plan, or "
            "Samples(...).local(cp_rank, cp_size)."
        )
    return local.tokens, local.cp_group if cp_group is None else cp_group, totals or local.totals


@dataclass(frozen=True)
class Sequences:
    """Values of this rank's tokens, checked, and where the rest of their sequences is.

    Attributes:
        rows: float64 [len(values), num_local_tokens]; None of no values.
        wanted: the rows that require grad.
        mask: float64 [num_local_tokens], on the device of the values.
        units: the number of each sample's rollout or prompt, int64 [num_samples] on the host; None if each is its own.
        group: to exchange over; None where this rank has all tokens.
        shape, dtype: of a result for each token.
    """

    tokens: LocalTokens
    rows: Tensor | None
    wanted: list[int]
    mask: Tensor
    units: Tensor | None
    group: Group | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        what: str,
        values: Tensor | Sequence[Tensor],
        local: Place,
        cp_group: Group | None,
        per: Per,
        totals: StepTotals | None,
    ) -> "Sequences":
        tokens, cp_group, totals = located(local, cp_group, totals)
        given = [values] if isinstance(values, Tensor) else list(values)
        for row in given:
            check_values(f"a segment {what}'s values", row, tokens)
        shape = values.shape if isinstance(values, Tensor) else (len(given), *(given[0].shape if given else ()))
        device = given[0].device if given else tokens.mask.device
        return cls(
            tokens,
            torch.stack([row.reshape(-1).double() for row in given]) if given else None,
            [k for k, row in enumerate(given) if row.requires_grad],
            tokens.mask.to(device, non_blocking=True).double(),
            units_of(tokens.samples, per, totals),
            exchange_group(tokens, cp_group),
            shape,
            torch.float64 if any(row.dtype == torch.float64 for row in given) else torch.float32,
        )


def units_of(samples: Samples, per: Per, totals: StepTotals | None) -> Tensor | None:
    """As `Sequences.units`; with totals, all of a unit must be here."""
    check_choice("unit of a segment sum", per, get_args(Per))
    ids = {"sample": None, "rollout": samples.rollout_ids, "prompt": samples.prompt_ids}[per]
    if ids is None:
        if per == "prompt":
            raise ValueError(
                "per='prompt' of samples without prompt_ids: they say which are one prompt's. Give Samples prompt_ids."
            )
        return None
    unique, units = ids.unique(return_inverse=True)
    _check_whole(samples, per, unique, units, totals)
    return units


def exchange_group(local: LocalTokens, cp_group: Group | None) -> Group | None:
    """The group to add sums over, or None where this rank has all tokens."""
    if cp_group is not None and size_of(cp_group) != local.cp_size:
        raise ValueError(
            f"a cp_group of {size_of(cp_group)} ranks: the micro-batch is cut for {local.cp_size}. Pass the group that "
            "it is cut for."
        )
    if local.copies == local.cp_size:
        return None
    if cp_group is None:
        raise ValueError(
            f"no cp_group: a sample's tokens lie on {local.cp_size} ranks, and their sums must be added up. Pass "
            "cp_group=, the context-parallel group."
        )
    return cp_group


def _check_whole(samples: Samples, per: Per, ids: Tensor, units: Tensor, totals: StepTotals | None) -> None:
    """Refuse a rollout or prompt that has tokens in another micro-batch or on another data-parallel rank."""
    if totals is None:
        return
    counted = (totals.rollouts if per == "rollout" else totals.prompts).tokens
    if not isinstance(counted, TokensById):
        if per == "rollout":
            return
        raise ValueError(
            "per='prompt' in a step whose totals count no prompts: whether all of a prompt is here cannot be seen. Use "
            "a mode that groups by prompt, or declare a term that does, terms={'pg': 'prompt_mean'}."
        )
    sums = samples.mask_sums
    here = sums.new_zeros(len(ids)).index_add_(0, units.to(sums.device), sums)
    whole = counted.of(f"{per}_ids", ids).to(sums.device, non_blocking=True)
    missing = whole * (1 - 1e-9) - here  # sums of fractional masks may differ in the last bit

    def given() -> str:
        i = int(missing.argmax())
        tokens = f"{float(here[i]):g} of whose {float(whole[i]):g} mask tokens are in this micro-batch"
        return f"the {per} of sample {int((units == i).nonzero()[0])}, {tokens}"

    require(
        (missing <= 0).all(),
        given,
        f"what is taken over a {per} needs all of it in one micro-batch. Keep a {per}'s samples together in a "
        "micro-batch, take it per sample, or sum it before the step by plan.sum_by.",
    )

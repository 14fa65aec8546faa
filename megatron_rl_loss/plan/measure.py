"""Statistics of the policy in training over the whole step, before it is trained on: `Plan.measure`, `Plan.keep`."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_within
from megatron_rl_loss.losses.segments import in_order
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.reduction.sums import check_values
from megatron_rl_loss.step.collectives import all_reduce, attempt, if_several, raise_together, several, size_of
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import By, Statistic, StepTotals, reduce_step_totals

if TYPE_CHECKING:
    from megatron_rl_loss.plan.plan import Plan

#: A micro-batch -> a value for each token that this rank holds; or whether to keep it.
TokenFunction = Callable[[Microbatch], Tensor]
#: A micro-batch -> a number for each of its samples, [num_samples].
SampleFunction = Callable[[Microbatch], Tensor]


class Measurement:
    """One value per token, over all active tokens of the step: the same numbers on every rank, in every layout.

    Attributes:
        tokens: sum of the mask's entries.
        sum: of entry times value, in float64.
    """

    def __init__(self, plan: "Plan", values: TokenFunction | None, mask: str | None = None) -> None:
        tokens = None if values is None or plan.samples is None else attempt(lambda: _active_tokens(plan, values, mask))
        nothing = torch.zeros(2, 0, dtype=torch.float64, device="cpu")
        self._values, self._entries = tokens if isinstance(tokens, Tensor) else nothing
        self._plan = plan
        self.tokens, self.sum = _begin(plan, tokens, self._entries.sum(), self._entries @ self._values)

    @property
    def mean(self) -> float:
        """NaN without an active token."""
        return self.sum / self.tokens if self.tokens else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share q of the tokens does not exceed; `inf` without an active token.

        Of N tokens that count 1 it is the ceil(q N)-th smallest, never a mean of two; at most a share 1 - q is larger.
        Costs what `smallest` does. Raises ValueError for a q that is not in (0, 1].
        """
        check_within("q", q, "(0, 1]", "0.8 has at most 20 % of the tokens above it")
        share = q * self.tokens * (1 - 1e-12)  # in floating point 0.07 * 100 is above 7
        return self.smallest(lambda tokens, _: tokens >= share)

    def smallest(self, where: Callable[[float, float], bool]) -> float:
        """The smallest value v where ``where(tokens, sum)`` of all values up to v is true; `inf` if it never is.

        It must stay true for larger values. ``lambda tokens, sum: sum > 0.04 * tokens`` gives the value from which on
        tokens must go if the mean of the others is to be at most 0.04. Exact, but for the rounding of float64 sums. It
        takes four rounds of 4 kB in each group: eight bits of the value in each.
        """
        values, entries, before, key = self._values, self._entries, [0.0, 0.0], 0
        keys = _keys(values)
        for shift in (24, 16, 8, 0):
            bins = (keys >> shift) & 255
            of_bins = entries.new_zeros(256, 2).index_add_(0, bins, torch.stack([entries, entries * values], 1))
            table = _over_step(self._plan, of_bins)
            filled = (table[:, 0] > 0).nonzero().flatten().tolist()
            sums = (table.cumsum(0) + table.new_tensor(before)).tolist()
            found = next((k for k in filled if where(*sums[k])), None)
            if found is None and shift == 24:
                return math.inf
            found = filled[-1] if found is None else found  # sums in another order differ in the last bit
            before = sums[found - 1] if found else before
            key = key << 8 | found
            values, entries, keys = (of[bins == found] for of in (values, entries, keys))
        return _value(key)


def keep(plan: "Plan", name: str, flags: TokenFunction | None) -> None:
    """`Plan.keep`."""
    flagged = None if flags is None or plan.samples is None else attempt(lambda: _flags_in_buffer(plan, name, flags))
    _begin(plan, flagged)
    samples = None
    if isinstance(flagged, Tensor):
        of_each = flagged.split([one.samples.total_tokens for one in plan])
        by_group = [(kept, one.cp_group) for kept, one in zip(of_each, plan, strict=True)]
        for kept, group in by_group if plan.dynamic_cp else [(flagged, plan.cp_group)]:
            all_reduce(kept, if_several(group), dist.ReduceOp.MAX)
        samples = [one.samples.with_kept_tokens(name, kept.bool()) for one, kept in zip(plan, of_each, strict=True)]
    totals = _count_anew(
        plan,
        samples,
        count_prompts=plan.modes.uses_prompt_ids,
        masks=[name],
        settings=f"tokens to keep as {name!r}",
    )
    for microbatch, of_microbatch in zip(plan, samples, strict=True) if samples is not None else ():
        microbatch._add_mask(name, of_microbatch, totals.by_mask[name])


def sum_by(plan: "Plan", by: By, values: SampleFunction | None) -> list[Tensor]:
    """`Plan.sum_by`."""
    microbatches = None if values is None or plan.samples is None else list(plan)
    given = attempt(lambda: {id(one.samples): values(one) for one in microbatches or ()} if values else {})
    of_each = {} if isinstance(given, Exception) else given
    statistic = Statistic(of=lambda samples: of_each[id(samples)], by=by)
    samples = None if microbatches is None else [one.samples for one in microbatches]
    settings = f"sums by {by}" if isinstance(by, str) else "sums by a function"
    totals = _count_anew(
        plan, given if isinstance(given, Exception) else samples, statistics={"sums": statistic}, settings=settings
    )
    sums = totals.statistics.get("sums")  # None where each sample is a rollout
    if sums is None:
        return list(of_each.values())
    return [sums.of("key", statistic.keys("sums", one)).to(of_each[id(one)]) for one in samples or ()]


def _count_anew(
    plan: "Plan", samples: Sequence[Samples] | Exception | None, *, count_prompts: bool = False, **options: Any
) -> StepTotals:
    """`reduce_step_totals` over the groups of the plan."""
    replicas = several(plan.cp_group, *plan.replica_groups)
    groups: dict[str, Any] = {"dp_group": plan.dp_group, "replica_groups": replicas}
    return reduce_step_totals(samples, count_prompts=count_prompts, **groups, **options)


# --- over the step


def _begin(plan: "Plan", mine: Tensor | Exception | None, *sums: Tensor) -> list[float]:
    """One round: the sums of all ranks that compute the loss; an error of any raises on all."""
    failure = mine if isinstance(mine, Exception) else None
    of_rank = torch.tensor([mine is not None, failure is not None, *sums], dtype=torch.float64, device="cpu")
    ranks, failures, *totals = _over_step(plan, of_rank).tolist()
    raise_together(failures > 0, failure, several(plan.dp_group, plan.cp_group, *plan.replica_groups))
    if ranks != (expected := size_of(plan.dp_group) * size_of(plan.cp_group)):
        given = f"values of {max(ranks, 0):.0f} of {expected} ranks of a pipeline stage"
        raise ValueError(f"{given}: all that compute the loss must give theirs. Pass None on other stages alone.")
    return totals


def _over_step(plan: "Plan", numbers: Tensor) -> Tensor:
    """Sums over the ranks of a stage, told to stages that have none; the first number, or column, is a count."""
    for group in several(plan.dp_group, plan.cp_group):
        all_reduce(numbers, group)
    if not numbers[..., 0].sum() > 0:
        numbers.fill_(-math.inf)
    for group in several(*plan.replica_groups):
        all_reduce(numbers, group, dist.ReduceOp.MAX)
    return numbers


def _active_tokens(plan: "Plan", values: TokenFunction, mask: str | None) -> Tensor:
    """Value and mask entry of each active token of this rank, float64 [2, active tokens] on the host."""
    parts = [torch.zeros(2, 0, dtype=torch.float64, device="cpu")]
    for microbatch in plan:
        local = microbatch._tokens_of(mask)
        given = _of_tokens("values to measure", values(microbatch), local).float()
        if local.copies > 1 and microbatch.cp_rank > 0:
            continue  # counted on the first of the ranks that all hold them
        entries = local.mask.cpu()
        parts.append(torch.stack([given, entries])[:, entries != 0].double())
    active = torch.cat(parts, 1)
    for wrong in active[~active.isfinite()]:
        raise ValueError(f"a value of {wrong:g} at an active token: it would hide all others. Clamp it, or mask it.")
    return active


def _flags_in_buffer(plan: "Plan", name: str, flags: TokenFunction) -> Tensor:
    """1 for each token that this rank keeps, uint8, in the buffers of all its micro-batches, on the host."""
    parts = []
    if any(name in one.by_mask for one in plan.samples or ()):
        raise ValueError(
            f"tokens to keep as {name!r}, which is a mask of the Samples: it would be replaced. Choose another name."
        )
    for microbatch in plan:
        given = flags(microbatch)
        if (kind := getattr(given, "dtype", type(given).__name__)) != torch.bool:
            raise TypeError(f"tokens to keep are {kind}: they must be bools. Pass a comparison.")
        of_tokens = _of_tokens("tokens to keep", given.float(), microbatch.tokens).byte()
        parts.append(of_tokens.new_zeros(microbatch.samples.total_tokens))
        parts[-1][microbatch.tokens.positions.cpu()] = of_tokens
    return torch.cat(parts)


def _of_tokens(what: str, given: Tensor, local: LocalTokens) -> Tensor:
    """[num_local_tokens] on the host; refuses another number of tokens."""
    check_values(what, given, local)
    return given.detach().flatten().cpu()


def _keys(values: Tensor) -> Tensor:
    """float32 values -> ints from 0 to 2^32 - 1 in the same order."""
    return in_order((values.float() + 0.0).view(torch.int32)).long() + 2**31  # -0.0 becomes 0.0


def _value(key: int) -> float:
    return float(in_order(torch.tensor(key - 2**31, dtype=torch.int32, device="cpu")).view(torch.float32))

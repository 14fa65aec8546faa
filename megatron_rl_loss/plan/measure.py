"""Statistics of the policy in training over the whole step, before it is trained on: `Plan.measure`, `Plan.keep`."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_within
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.reduction.sums import check_values
from megatron_rl_loss.step.collectives import Group, all_reduce, attempt, if_several, raise_together, size_of
from megatron_rl_loss.step.counting import reduce_step_totals
from megatron_rl_loss.step.samples import LocalTokens

if TYPE_CHECKING:
    from megatron_rl_loss.plan.plan import Plan

#: A micro-batch -> a value for each token that this rank holds; or whether to keep it.
OfTokens = Callable[[Microbatch], Tensor]


class Measurement:
    """One value per token, over all active tokens of the step: the same numbers on every rank, in every layout.

    Attributes:
        tokens: sum of the mask's entries.
        sum: of entry times value, in float64.
    """

    def __init__(self, plan: "Plan", values: OfTokens | None, mask: str | None = None) -> None:
        self._plan = plan
        outcome = _call(plan, values, lambda of_tokens: _active_tokens(plan, of_tokens, mask))
        nothing = torch.zeros(2, 0, dtype=torch.float64, device="cpu")
        self._values, self._entries = outcome if isinstance(outcome, Tensor) else nothing
        sums = [float(self._entries.sum()), float(self._entries @ self._values)]
        self._takes_part, self.tokens, self.sum = _begin(plan, outcome, sums)

    @property
    def mean(self) -> float:
        """NaN without an active token."""
        return self.sum / self.tokens if self.tokens else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share q of the tokens does not exceed; `inf` without an active token.

        Of N tokens that count 1 it is the ceil(q N)-th smallest, never a mean of two. At most a share 1 - q lies above
        it; tokens that tie with it do not. Costs what `smallest` does.

        Raises ValueError for a q that is not in (0, 1].
        """
        check_within("q", q, "(0, 1]", "0.8 has at most 20 % of the tokens above it")
        share = q * self.tokens * (1 - 1e-12)  # in floating point 0.07 * 100 is above 7
        return self.smallest(lambda tokens, _: tokens >= share)

    def smallest(self, where: Callable[[float, float], bool]) -> float:
        """The smallest value v where ``where(tokens, sum)`` of all values up to v is true; `inf` if it never is.

        Where it is true it must be so for all larger values. ``lambda tokens, sum: sum > 0.04 * tokens`` is the value
        from which on tokens must go if the mean of the others is to be at most 0.04. The value is found by its bits,
        exactly, in four rounds of 4 kB in each group. Sums are float64: a bound that is met to the last bit may fall on
        either side.
        """
        values, entries, before, key = self._values, self._entries, [0.0, 0.0], 0
        keys = _keys(values)
        for shift in (24, 16, 8, 0):
            bins = (keys >> shift) & 255
            of_bins = entries.new_zeros(256, 2).index_add_(0, bins, torch.stack([entries, entries * values], 1))
            table = _tell_stages(self._plan, _sum_over_ranks(self._plan, of_bins), self._takes_part)
            filled = table[:, 0].nonzero().flatten().tolist()
            sums = (table.cumsum(0) + table.new_tensor(before)).tolist()
            found = next((k for k in filled if where(*sums[k])), None)
            if found is None:
                if shift == 24:
                    return math.inf
                found = filled[-1]  # sums in another order differ in the last bit
            before = sums[found - 1] if found else before
            key = key << 8 | found
            values, entries, keys = (of[bins == found] for of in (values, entries, keys))
        return _value(key)


def keep(plan: "Plan", name: str, flags: OfTokens | None) -> None:
    """`Plan.keep`."""
    outcome = _call(plan, flags, lambda of_tokens: _flags_in_buffer(plan, of_tokens))
    _begin(plan, outcome)
    samples = None
    if isinstance(outcome, Tensor):
        all_reduce(outcome, if_several(plan.cp_group), dist.ReduceOp.MAX)
        of_each = outcome.bool().split([one.samples.total_tokens for one in plan])
        samples = [one.samples.with_kept_tokens(name, kept) for one, kept in zip(plan, of_each, strict=True)]
    totals = reduce_step_totals(
        samples,
        dp_group=plan.dp_group,
        replica_groups=_replicas(plan),
        count_prompts=plan.modes.uses_prompt_ids,
        masks=[name],
    )
    for microbatch, of_microbatch in zip(plan, samples, strict=True) if samples is not None else ():
        microbatch._add_mask(name, of_microbatch, totals.by_mask[name])


# --- over the step


def _call(plan: "Plan", given: OfTokens | None, make: Callable[[OfTokens], Tensor]) -> Tensor | Exception | None:
    """What this rank makes of a user's function; None where it computes no loss."""
    return None if given is None or plan.samples is None else attempt(lambda: make(given))


def _begin(plan: "Plan", outcome: Tensor | Exception | None, sums: Sequence[float] = ()) -> tuple[Any, ...]:
    """One round: whether the ranks of this stage take part, and the sums over all that do; errors go to every rank."""
    failure = outcome if isinstance(outcome, Exception) else None
    numbers = torch.tensor([failure is not None, outcome is not None, *sums], dtype=torch.float64, device="cpu")
    _sum_over_ranks(plan, numbers)
    takes_part = bool(numbers[1] > 0)
    if takes_part and numbers[1] < size_of(plan.dp_group) * size_of(plan.cp_group):
        numbers[0] = 1
        if outcome is None:
            failure = ValueError("None on this rank alone: all ranks of a stage give values, or none. Pass a function.")
    _tell_stages(plan, numbers, takes_part)
    groups = [group for group in (plan.dp_group, *_replicas(plan)) if group is not None and group.size() > 1]
    raise_together(bool(numbers[0] > 0), failure, groups)
    if numbers[0] < 0:
        raise ValueError("no rank gives values: those that compute the loss must. Pass None on other stages alone.")
    return takes_part, *numbers[2:].tolist()


def _sum_over_ranks(plan: "Plan", numbers: Tensor) -> Tensor:
    """Over the ranks that hold different tokens."""
    for group in (plan.dp_group, plan.cp_group):
        all_reduce(numbers, if_several(group))
    return numbers


def _tell_stages(plan: "Plan", numbers: Tensor, takes_part: bool) -> Tensor:
    """The sums, also on ranks that hold no tokens."""
    if not takes_part:
        numbers.fill_(-math.inf)
    for group in plan.replica_groups:
        all_reduce(numbers, if_several(group), dist.ReduceOp.MAX)
    return numbers


def _replicas(plan: "Plan") -> list[Group]:
    return [group for group in (plan.cp_group, *plan.replica_groups) if group is not None]


def _active_tokens(plan: "Plan", values: OfTokens, mask: str | None) -> Tensor:
    """Value and mask entry of each active token of this rank, float64 [2, active tokens] on the host."""
    parts = [torch.zeros(2, 0, dtype=torch.float64, device="cpu")]
    for microbatch in plan:
        local = microbatch._tokens_of(mask)
        given = _of_tokens("values to measure", values(microbatch), local).float()
        if local.copies > 1 and plan.cp_rank > 0:
            continue  # counted on the first of the ranks that all hold them
        entries = local.mask.cpu()
        parts.append(torch.stack([given, entries])[:, entries != 0].double())
    active = torch.cat(parts, 1)
    if not active.isfinite().all():
        wrong = active[~active.isfinite()][0]
        raise ValueError(
            f"a value to measure of {float(wrong)} at an active token: it would hide all others. Clamp it, or mask it."
        )
    return active


def _flags_in_buffer(plan: "Plan", flags: OfTokens) -> Tensor:
    """1 for each token that this rank keeps, uint8, in the buffers of all its micro-batches, on the host."""
    parts = []
    for microbatch in plan:
        given = flags(microbatch)
        if given.dtype != torch.bool:
            raise TypeError(f"tokens to keep are {given.dtype}: they must be bools. Pass a comparison.")
        buffer = torch.zeros(microbatch.samples.total_tokens, dtype=torch.uint8, device="cpu")
        of_tokens = _of_tokens("tokens to keep", given.float(), microbatch.tokens)
        buffer[microbatch.tokens.positions.cpu()] = of_tokens.byte()
        parts.append(buffer)
    return torch.cat(parts)


def _of_tokens(what: str, given: Tensor, local: LocalTokens) -> Tensor:
    """[num_local_tokens] on the host; refuses another number of tokens."""
    check_values(what, given, local.samples.loss_shapes(len(local), local.cp_size), len(local), local.samples)
    return given.detach().flatten().cpu()


def _keys(values: Tensor) -> Tensor:
    """float32 values -> ints from 0 to 2^32 - 1 in the same order."""
    bits = (values.float() + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    return torch.where(bits < 0, ~bits, bits + 2**31)


def _value(key: int) -> float:
    bits = key - 2**31 if key >= 2**31 else ~key
    return float(torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32))

"""Statistics of the policy in training over the whole step, before it is trained on."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.collectives import all_reduce, attempt, failure_of, raise_together, several, warn_on_one_rank
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.core.errors import check_callable, check_within
from megatron_rl_loss.core.masks import Array, Floats, to_array
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.plan import Plan, check_plan
from megatron_rl_loss.core.record import StepRecord
from megatron_rl_loss.core.samples import LocalTokens, Samples, check_values
from megatron_rl_loss.core.transfers import on_device

#: A micro-batch -> a value for each token that this rank holds; or bools, true for those to keep.
TokenFunction = Callable[[Microbatch], Tensor]
_RULE, _REMEDY = "it must be a function of a micro-batch", "Pass a function that gives a value for each token"


class Measurement:
    """One value per token, over all active tokens of the step: the same numbers on every rank, in every layout.

    Attributes:
        tokens: sum of the mask's entries.
        sum: of entry times value, in float64.
    """

    def __init__(self, plan: Plan, values: TokenFunction | None, mask: str | None) -> None:
        self._record = record = plan.record
        tokens = None
        if plan.samples is not None and values is not None:
            tokens = _attempt_alone(record, partial(_active_tokens, plan.microbatches, values, mask))
        self._values, self._entries = tokens if isinstance(tokens, np.ndarray) else np.zeros((2, 0))
        self.tokens, self.sum = _add_up(record, tokens, self._entries.sum(), self._entries @ self._values)

    @property
    def mean(self) -> float:
        """NaN without an active token."""
        return self.sum / self.tokens if self.tokens else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share q of the tokens does not exceed; `inf` without an active token.

        Of N tokens that count 1 it is the ceil(q N)-th smallest, never a mean of two; at most a share 1 - q is larger.
        Exact. Four rounds of 2 kB in each group: eight bits of the value in each. Raises ValueError for a q that is
        not in (0, 1].
        """
        check_within("q", q, "(0, 1]", "0.8 has at most 20 % of the tokens above it")
        if not self.tokens:
            return math.inf
        share = q * self.tokens * (1 - 1e-12)  # in floating point 0.07 * 100 is above 7
        entries, ints, before, leading = self._entries, _to_ints(self._values), 0.0, 0
        # Each round counts the next eight bits of the values that have the leading bits of the one that is looked for.
        for shift in (24, 16, 8, 0):
            bins = (ints >> shift) & 255
            counted = np.bincount(bins, entries, 256).astype(np.float64)  # without a token NumPy counts ints
            table = _over_step(self._record, torch.from_numpy(counted)).numpy()
            sums = before + np.cumsum(table)
            filled = np.flatnonzero(table > 0)
            reached = filled[sums[filled] >= share]
            byte = int(reached[0] if len(reached) else filled[-1])  # sums in another order differ in the last bit
            before = float(sums[byte] - table[byte])
            leading = leading << 8 | byte
            entries, ints = entries[bins == byte], ints[bins == byte]
        return _from_int(leading)


def measure_tokens(plan: Plan, values: TokenFunction | None, *, mask: str | None = None) -> Measurement:
    """Sums, mean and thresholds of one value per token, over the whole step; all ranks call it together.

    Args:
        values: a micro-batch -> a finite float, rounded to float32, for each token of this rank, shaped as losses.
            None on a pipeline stage that computes no loss: the stage receives the results.
        mask: one of the samples' further masks in place of the loss mask.

    One round of 32 bytes over the data-, context-, tensor- and pipeline-parallel groups. Raises BadBatchError on
    every rank (the error itself where there is one) if `values` raises or gives anything else on any, and ValueError
    if it is None on a part of a stage. Under context parallelism an error of `values` is raised on its own rank at
    once, because other ranks may wait in a collective of `values`: the launcher ends these.
    """
    check_plan(plan)
    return Measurement(plan, values, mask)


def keep_tokens(plan: Plan, name: str, flags: TokenFunction | None) -> None:
    """Count the step anew by the tokens for which `flags` gives true; all ranks call it together.

    Every micro-batch then has a further mask `name`, for `Term` and `Metric`: the loss mask at tokens that are kept,
    else 0. In evaluation, which no `before_step` precedes, there is none. Costs a byte per token over the
    context-parallel group, in one collective (one per micro-batch where groups change), and the round of `plan_step`.
    `flags` and errors as `values` of `measure_tokens`.
    """
    check_plan(plan)
    record, kept = plan.record, None
    microbatches = None if flags is None or plan.samples is None else plan.microbatches
    if microbatches is not None and flags is not None:
        kept = _attempt_alone(record, partial(_flags_in_buffer, microbatches, flags, name))
    _add_up(record, kept)
    samples = None
    if isinstance(kept, np.ndarray) and microbatches is not None:
        flat = torch.from_numpy(kept)
        sizes = [microbatch.samples.total_tokens for microbatch in microbatches]
        pairs = list(zip(microbatches, flat.split(sizes), strict=True))
        exchanges = [(flat, record.groups.cp_group)]
        if record.dynamic_cp:
            exchanges = [(part, microbatch.cp_group) for microbatch, part in pairs]
        for part, cp_group in exchanges:
            for group in several(cp_group):
                all_reduce(part, group, dist.ReduceOp.MAX)
        samples = [_with_kept_tokens(microbatch.samples, name, part.numpy().astype(bool)) for microbatch, part in pairs]
    counted = count_step(
        samples, record.groups, masks=[name], sums=record.modes.sums, settings=f"tokens to keep as {name!r}"
    )
    record.totals = replace(record.totals, by_mask={**record.totals.by_mask, name: counted.by_mask[name]})
    for microbatch, masked in zip(microbatches or (), samples or (), strict=True):
        microbatch.keep(name, masked)


def _with_kept_tokens(samples: Samples, name: str, kept: Array) -> Samples:
    """The samples with a further mask: the loss mask where ``kept``, bools [total_tokens], is true, else 0."""
    mask = torch.from_numpy(samples.buffer * kept)
    pairs = zip(samples.mask_starts, samples.mask_lengths, strict=True)
    with_mask = copy(samples)
    with_mask.by_mask = {
        **samples.by_mask,
        name: samples.masked_by(name, [mask[start : start + length] for start, length in pairs]),
    }
    return with_mask


def pass_gap(microbatch: Microbatch, name: str, values: Tensor) -> Tensor:
    """The largest ``|values - microbatch.log_probs[name]|`` at this rank's active tokens, 0-dim; 0 without one.

    The gap is 0 where the training pass runs the kernels of the forward pass before the step, without dropout. On the
    host a gap above 1e-4 warns: the measured policy is then not the one in training. Raises ValueError for values of
    another shape, and for a name of no forward pass.
    """
    if not isinstance(microbatch, Microbatch):
        raise TypeError(
            f"microbatch is a {type(microbatch).__name__}: it must be a micro-batch of a plan. Pass plan[k], or what "
            "next_microbatch returns."
        )
    if name not in microbatch.log_probs:
        raise ValueError(
            f"pass_gap of {name!r}, but forward passes gave {', '.join(microbatch.log_probs) or 'nothing'}: the pass "
            f"of that name must run before the step. Call forward.log_probs({name!r}, ...) in before_step."
        )
    check_values(f"values to compare with log_probs[{name!r}]", values, microbatch.tokens)
    gaps = (values.detach().float() - microbatch.log_probs[name].float().view_as(values)).abs().flatten()
    active = on_device(microbatch.tokens.mask != 0, gaps.device)
    largest = torch.cat([gaps.new_zeros(1), gaps.masked_fill(~active, 0)]).max()
    if largest.is_cpu and not largest <= 1e-4:
        warn_on_one_rank(
            f"{name} of the training pass and of the forward pass before it differ by up to {float(largest):.2g} at a "
            "token: thresholds and survivors come from the earlier pass. Switch dropout off, and run the same "
            "kernels in both."
        )
    return largest


# --- over the step


def _attempt_alone(record: StepRecord, make: Callable[[], Floats]) -> Floats | Exception:
    """This rank's values, or their error for `_add_up` to raise on all ranks; under CP the error is raised at once."""
    return make() if record.cp_size > 1 or record.dynamic_cp else attempt(make)


def _add_up(record: StepRecord, mine: Floats | Exception | None, *sums: float) -> list[float]:
    """One round: the sums of all ranks that compute the loss; an error of any raises on all."""
    failure = failure_of(mine)
    numbers = torch.tensor([mine is not None, failure is not None, *sums], dtype=torch.float64, device="cpu")
    ranks, failures, *totals = _over_step(record, numbers).tolist()
    raise_together(failures > 0, failure, record.groups.all)
    if ranks != (expected := record.dp_size * record.cp_size):
        counted = f"values of {max(ranks, 0):.0f} of {expected} ranks of a pipeline stage"
        raise ValueError(f"{counted}: all ranks that compute the loss must give values. Pass None on other stages.")
    return totals


def _over_step(record: StepRecord, numbers: Tensor) -> Tensor:
    """Sums over the ranks of a stage, broadcast to stages without values, whose numbers are 0."""
    for group in record.groups.loss_groups:
        all_reduce(numbers, group)
    # Stages without values enter the maximum below with what loses against every number. Where there are values, a
    # number of ranks or of tokens is above 0; their sum may be negative.
    if not numbers.max() > 0:
        numbers.fill_(-math.inf)
    for group in several(*record.groups.replica_groups):
        all_reduce(numbers, group, dist.ReduceOp.MAX)
    return numbers


def _active_tokens(microbatches: Sequence[Microbatch], values: TokenFunction, mask: str | None) -> Floats:
    """Value and mask entry of each active token of this rank, float64 [2, active tokens]."""
    check_callable("values to measure", values, _RULE, _REMEDY)
    parts = [np.zeros((2, 0))]
    for microbatch in microbatches:
        local = microbatch.tokens_of(mask)
        measured = _on_host("values to measure", values(microbatch), local)
        if local.copies > 1 and microbatch.cp_rank > 0:
            continue  # counted on the first of the ranks that all hold them
        parts.append(np.stack([measured.astype(np.float32), local.mask])[:, local.mask != 0].astype(np.float64))
    active = np.concatenate(parts, 1)
    if not np.isfinite(active).all():
        wrong = active[~np.isfinite(active)][0]
        raise ValueError(f"a value of {wrong:g} at an active token: values must be finite. Clamp or mask it.")
    return active


def _flags_in_buffer(microbatches: Sequence[Microbatch], flags: TokenFunction, name: str) -> Floats:
    """1 for each token that this rank keeps, uint8, in the buffers of all its micro-batches."""
    check_callable("tokens to keep", flags, _RULE, _REMEDY)
    parts = [np.zeros(0, np.uint8)]
    if any(name in microbatch.samples.by_mask and name not in microbatch.kept for microbatch in microbatches):
        raise ValueError(
            f"tokens to keep as {name!r}, which is a mask of the Samples: keep needs a new name. Choose another."
        )
    for microbatch in microbatches:
        kept = flags(microbatch)
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
            kind = kept.dtype if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
            raise TypeError(f"tokens to keep are {kind}: they must be a tensor of bools. Return a comparison.")
        parts.append(np.zeros(microbatch.samples.total_tokens, np.uint8))
        parts[-1][microbatch.tokens.positions] = _on_host("tokens to keep", kept.float(), microbatch.tokens)
    return np.concatenate(parts)


def _on_host(what: str, values: Tensor, local: LocalTokens) -> Floats:
    """The values on the host, [num_local_tokens]; ValueError for another number of tokens."""
    check_values(what, values, local)
    return to_array(values).reshape(-1)


def _to_ints(values: Floats) -> np.ndarray:
    """float32 values -> ints from 0 to 2^32 - 1 in the same order."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0
    return np.where(bits < 0, bits ^ np.int32(2**31 - 1), bits).astype(np.int64) + 2**31


def _from_int(number: int) -> float:
    bits = np.int32(number - 2**31)
    return float((bits ^ np.int32(2**31 - 1) if bits < 0 else bits).view(np.float32))

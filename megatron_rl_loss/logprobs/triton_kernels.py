"""Triton kernels for rows of logits: statistics in one read, the gradient in one read and one write.

`reading.py` has the formulas, and the same three steps in plain torch: `statistics`, `combine`, `differentiate`.

    z = (x - top) * scale / log 2            q = 2^z

Each lane of the first kernel adds up a few columns at a time, relative to its own largest logit, so that its loop has
no barrier; lanes are brought to the row's largest logit once, at the end. Importing this file imports Triton.
"""

# ruff: noqa: SIM102 -- an `if` of a constant, around one of a value, is dropped when Triton compiles
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl_loss.logprobs import kept_ids
from megatron_rl_loss.logprobs.kept_ids import Kept

LN_2 = tl.constexpr(0.6931471805599453)
#: The least float32: a lane begins with it, since -inf less -inf would be NaN. That nothing counts is a sum of 0.
LEAST = tl.constexpr(-3.4028234663852886e38)
#: 2 to it is 0, and products with it are finite.
NEVER = tl.constexpr(-1.0e4)

#: Launch settings, chosen by what the compiler makes of them (tools/compile_kernels.py). A lane reads 16 bytes at once.
FORWARD = {"LANES": 1024, "num_warps": 8}
BACKWARD = {"BLOCK": 4096, "num_warps": 8}
#: Numbers that change with the tokens of a micro-batch: a kernel is not compiled anew for them.
COUNTS = ("rows", "norm_stride", "g_stride", "h_stride")

#: Rows that a program combines.
COMBINED_ROWS = 64
#: Kept ids that a program reads at once, and columns that it clears at once.
KEPT = {"BLOCK": 128}
CLEARED = 4096
#: Stands among kept ids for an id that the token has named before.
NO_ID = tl.constexpr(kept_ids.NO_ID)


@triton.jit
def _label_columns(labels, row, offs_k, K, first, held):
    """The labels, whether each is there, and whether its column is on this rank, and the column."""
    label = tl.load(labels + row * K + offs_k, mask=offs_k < K, other=-1).to(tl.int64)
    column = label - first
    here = (offs_k < K) & (column >= 0) & (column < held)
    return label, here, tl.where(here, column, -1).to(tl.int32)


@triton.jit
def _logits(x, keep, columns, width, held, KEEP: tl.constexpr, PADDED: tl.constexpr):
    """Float32 logits at these columns; -inf where an id does not count."""
    # The bound of the load is the tensor's own width, which 16 divides: loads are as wide as they can be.
    values = tl.load(x + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    if PADDED:
        values = tl.where(columns < held, values, float("-inf"))
    if KEEP:
        kept = tl.load(keep + columns, mask=columns < width, other=0) != 0
        values = tl.where(kept, values, float("-inf"))
    return values


@triton.jit
def _look_for_probabilities(x, flags, width, LANES: tl.constexpr, PER_LANE: tl.constexpr):
    """Are the logits of the first row above 0, with a sum of 1?"""
    row_sums = tl.zeros([LANES], tl.float32)
    least = tl.full([LANES], float("inf"), tl.float32)
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    for begin in range(0, width, LANES * PER_LANE):
        columns = begin + offsets
        values = tl.load(x + columns, mask=columns < width, other=0).to(tl.float32)
        row_sums += tl.sum(values, 1)
        least = tl.minimum(least, tl.min(tl.where(columns < width, values, float("inf")), 1))
    is_probability = (tl.min(least, 0) > 0) & (tl.abs(tl.sum(row_sums, 0) - 1) < 1e-2)
    tl.store(flags + 3, 1, mask=is_probability)


@triton.jit
def _counts(mask, flags, row):
    """The token's number in the mask; one below 0, or NaN, is flagged."""
    counts = tl.load(mask + row).to(tl.float64)
    tl.store(flags + 4, 1, mask=(counts >= 0) == 0)
    return counts


@triton.jit
def _leave_out(table, offs_k, K, first):
    """Log-probs and entropy of a token are 0: one rank of the vocabulary has sum 1, and the others none."""
    is_one = first == 0
    tl.store(table, tl.where(is_one, 0.0, float("-inf")))
    tl.store(table + 1, 0.0)
    tl.store(table + 2, tl.where(is_one, 1.0, 0.0))
    tl.store(table + 3 + offs_k, tl.where(is_one, 0.0, float("-inf")), mask=offs_k < K)


@triton.jit
def _checked_labels(labels, flags, row, offs_k, K, first, held, size):
    """Where labels are on this rank, their columns, and whether one is wrong, which is flagged."""
    id_of_label, here, column = _label_columns(labels, row, offs_k, K, first, held)
    wrong = (offs_k < K) & ((id_of_label < 0) | (id_of_label >= size))
    is_wrong = tl.max(wrong.to(tl.int32), 0) != 0
    tl.store(flags, 1, mask=is_wrong)
    tl.store(flags + 1, tl.max(tl.where(wrong, id_of_label, -(2**62)), 0), mask=is_wrong)
    tl.store(flags + 2, size, mask=is_wrong)
    return here, column, is_wrong


@triton.jit
def _is_first(column, offs_k):
    """False for a label that another one before it names too."""
    is_named_before = (column[:, None] == column[None, :]) & (offs_k[None, :] < offs_k[:, None])
    return tl.max(is_named_before.to(tl.int32), 1) == 0


@triton.jit
def _statistics(
    x, labels, mask, keep, table, flags,
    width, held, first, size, x_stride, keep_stride, scale, K,
    MASK: tl.constexpr, KEEP: tl.constexpr, PADDED: tl.constexpr, ENTROPY: tl.constexpr, FIRST_ROW: tl.constexpr,
    LABELS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """A row of the table for each row of logits. `flags`: see `logprobs.flags`."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, LABELS)
    x += row * x_stride
    table += row * (3 + K)
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    if FIRST_ROW:
        if row == 0:
            _look_for_probabilities(x, flags, width, LANES, PER_LANE)
    if MASK:
        if _counts(mask, flags, row) == 0:
            _leave_out(table, offs_k, K, first)
            return
    if KEEP:
        keep += row * keep_stride
    here, column, is_wrong = _checked_labels(labels, flags, row, offs_k, K, first, held, size)
    label = tl.load(x + column, mask=here, other=0).to(tl.float32)
    factor = scale / LN_2
    top = tl.full([LANES], LEAST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for begin in range(0, held, LANES * PER_LANE):
        values = _logits(x, keep, begin + offsets, width, held, KEEP, PADDED)
        higher = tl.maximum(top, tl.max(values, 1))
        shift = tl.maximum((top - higher) * factor, NEVER)
        brought = tl.exp2(shift)
        z = (values - higher[:, None]) * factor
        q = tl.exp2(z)
        if ENTROPY:
            weighted = (weighted + total * shift) * brought + tl.sum(tl.maximum(z, NEVER) * q, 1)
        total = total * brought + tl.sum(q, 1)
        top = higher
    highest = tl.max(top, 0)
    if KEEP:  # a label counts, even where it is not kept: once, if a token names it twice
        kept = tl.load(keep + column, mask=here, other=0) != 0
        alone = here & (kept == 0) & _is_first(column, offs_k)
        highest = tl.maximum(highest, tl.max(tl.where(alone, label, LEAST), 0))
    shift = tl.maximum((top - highest) * factor, NEVER)
    brought = tl.exp2(shift)
    sum_q = tl.sum(total * brought, 0)
    weight = 0.0
    if ENTROPY:
        weight += tl.sum((weighted + total * shift) * brought, 0) * LN_2
    if KEEP:
        z = tl.where(alone, (label - highest) * factor, float("-inf"))
        sum_q += tl.sum(tl.exp2(z), 0)
        if ENTROPY:
            weight += tl.sum(tl.maximum(z, NEVER) * tl.exp2(z), 0) * LN_2
    tl.store(table, tl.where(sum_q == 0, float("-inf"), highest))
    tl.store(table + 1, weight)
    tl.store(table + 2, tl.where(is_wrong, float("nan"), sum_q))  # so no step trains on a wrong label
    tl.store(table + 3 + offs_k, tl.where(here, (label - highest) * scale, float("-inf")), mask=offs_k < K)


@triton.jit
def _kept_logits(x, ids, place, end, first, held):
    """The ids at these places, whether each is on this rank, and their logits; -inf elsewhere."""
    id_kept = tl.load(ids + place, mask=place < end, other=NO_ID).to(tl.int64)
    column = id_kept - first
    here = (place < end) & (column >= 0) & (column < held)
    return id_kept, here, tl.load(x + column, mask=here, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=("bounds_stride",))
def _statistics_of_kept(
    x, labels, mask, ids, bounds, table, flags,
    width, held, first, size, x_stride, bounds_stride, scale, K,
    MASK: tl.constexpr, ENTROPY: tl.constexpr, FIRST_ROW: tl.constexpr,
    LABELS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_statistics` of tokens with ids from bounds[0, row] to bounds[1, row] of `ids`, which alone are read."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, LABELS)
    x += row * x_stride
    table += row * (3 + K)
    if FIRST_ROW:
        if row == 0:
            _look_for_probabilities(x, flags, width, LANES, PER_LANE)
    if MASK:
        if _counts(mask, flags, row) == 0:
            _leave_out(table, offs_k, K, first)
            return
    here, column, is_wrong = _checked_labels(labels, flags, row, offs_k, K, first, held, size)
    label = tl.load(x + column, mask=here, other=float("-inf")).to(tl.float32)
    begin = tl.load(bounds + row)
    end = tl.load(bounds + bounds_stride + row)
    block = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    named = tl.zeros([LABELS], tl.int32)
    for at in range(begin, end, BLOCK):  # twice: the second time a row's kept logits come from the cache
        id_kept, is_here, values = _kept_logits(x, ids, at + block, end, first, held)
        top = tl.maximum(top, values)
        for k in range(0, K):
            is_label = is_here & (id_kept == tl.load(labels + row * K + k).to(tl.int64))
            named = tl.where(offs_k == k, tl.maximum(named, tl.max(is_label.to(tl.int32), 0)), named)
        wrong = (at + block < end) & (id_kept != NO_ID) & ((id_kept < 0) | (id_kept >= size))
        is_id_wrong = tl.max(wrong.to(tl.int32), 0) != 0
        tl.store(flags + 5, 1, mask=is_id_wrong)
        tl.store(flags + 6, tl.max(tl.where(wrong, id_kept, -(2**62)), 0), mask=is_id_wrong)
        tl.store(flags + 2, size, mask=is_id_wrong)
    alone = here & (named == 0) & _is_first(column, offs_k)  # a label counts, even where it is not kept
    highest = tl.maximum(tl.max(top, 0), tl.max(tl.where(alone, label, float("-inf")), 0))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    factor = scale / LN_2
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for at in range(begin, end, BLOCK):
        _id, _here, values = _kept_logits(x, ids, at + block, end, first, held)
        z = (values - finite) * factor
        q = tl.exp2(z)
        total += q
        if ENTROPY:
            weighted += tl.maximum(z, NEVER) * q
    z = tl.where(alone, (label - finite) * factor, float("-inf"))
    q = tl.exp2(z)
    weight = 0.0
    if ENTROPY:
        weight += (tl.sum(weighted, 0) + tl.sum(tl.maximum(z, NEVER) * q, 0)) * LN_2
    tl.store(table, highest)
    tl.store(table + 1, weight)
    tl.store(table + 2, tl.where(is_wrong, float("nan"), tl.sum(total, 0) + tl.sum(q, 0)))
    tl.store(table + 3 + offs_k, tl.where(here, (label - finite) * scale, float("-inf")), mask=offs_k < K)


@triton.jit(do_not_specialize=COUNTS)
def _combine(
    tables, log_probs, norm, rows, ranks, scale, K, LABELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tables of all ranks, [ranks, rows, 3 + K], to log-probs [rows, K] and norm [3 + K, rows]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, LABELS)
    valid = row < rows
    is_label = valid[:, None] & (offs_k < K)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for rank in range(ranks):
        top = tl.maximum(top, tl.load(tables + (rank * rows + row) * (3 + K), mask=valid, other=0))
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    label = tl.full([ROWS, LABELS], float("-inf"), tl.float32)
    for rank in range(ranks):
        table = tables + (rank * rows + row) * (3 + K)
        shift = (tl.load(table, mask=valid, other=0) - top) * scale
        finite = tl.maximum(shift, NEVER)
        factor = tl.exp2(finite / LN_2)
        rank_sum = tl.load(table + 2, mask=valid, other=1)
        weighted += (tl.load(table + 1, mask=valid, other=0) + rank_sum * finite) * factor
        total += rank_sum * factor
        at_label = tl.load(table[:, None] + 3 + offs_k[None, :], mask=is_label, other=0)
        label = tl.maximum(label, at_label + shift[:, None])  # -inf on the ranks without the label
    log_total = tl.log(total)
    tl.store(log_probs + row[:, None] * K + offs_k[None, :], label - log_total[:, None], mask=is_label)
    tl.store(norm + row, top, mask=valid)
    tl.store(norm + rows + row, total, mask=valid)
    tl.store(norm + 2 * rows + row, log_total - weighted / total, mask=valid)
    tl.store(norm + (3 + offs_k)[None, :] * rows + row[:, None], label, mask=is_label)


@triton.jit(do_not_specialize=COUNTS)
def _gradient(
    x, into, mask, keep, norm, g_ptr, h_ptr,
    width, held, norm_stride, x_stride, into_stride, keep_stride, g_stride, g_step, h_stride, scale, K,
    MASK: tl.constexpr, KEEP: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    LABELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of a row of the gradient, as if no column were a label's; `into` may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    into += row * into_stride
    if MASK:
        if tl.load(mask + row).to(tl.float64) == 0:
            tl.store(into + columns, tl.zeros([BLOCK], tl.float32).to(into.dtype.element_ty), mask=columns < width)
            return
    level, slope, _ = _level_and_slope(
        norm, g_ptr, h_ptr, row, norm_stride, g_stride, g_step, h_stride, scale, K, G, H, LABELS
    )
    values = _logits(x + row * x_stride, keep + row * keep_stride if KEEP else keep, columns, width, held, KEEP, PADDED)
    z = (values - tl.load(norm + row)) * (scale / LN_2)
    gradient = tl.exp2(z)
    if H:
        gradient *= slope * tl.maximum(z, NEVER) + level
    else:
        gradient *= level
    tl.store(into + columns, gradient.to(into.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=(*COUNTS, "bounds_stride"))
def _gradient_of_kept(
    x, into, mask, ids, bounds, entries, norm, g_ptr, h_ptr,
    width, held, first, bounds_stride, norm_stride, x_stride, into_stride, g_stride, g_step, h_stride, scale, K,
    MASK: tl.constexpr, G: tl.constexpr, H: tl.constexpr, LABELS: tl.constexpr,
    CLEARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of zeros with the gradient at its kept ids; `into` may be the logits, so `entries` hold it meanwhile."""
    row = tl.program_id(0).to(tl.int64)
    into += row * into_stride
    columns = tl.arange(0, CLEARED)
    block = tl.arange(0, BLOCK)
    begin = tl.load(bounds + row)
    end = tl.load(bounds + bounds_stride + row)
    if MASK:
        if tl.load(mask + row).to(tl.float64) == 0:
            end = begin
    x += row * x_stride
    level, slope, _ = _level_and_slope(
        norm, g_ptr, h_ptr, row, norm_stride, g_stride, g_step, h_stride, scale, K, G, H, LABELS
    )
    top = tl.load(norm + row)
    for at in range(begin, end, BLOCK):
        _id, is_here, values = _kept_logits(x, ids, at + block, end, first, held)
        z = (values - top) * (scale / LN_2)
        gradient = tl.exp2(z)
        if H:
            gradient *= slope * tl.maximum(z, NEVER) + level
        else:
            gradient *= level
        tl.store(entries + at + block, gradient, mask=is_here)
    tl.debug_barrier()  # other lanes clear what one has read
    for at in range(0, width, CLEARED):
        tl.store(
            into + at + columns, tl.zeros([CLEARED], tl.float32).to(into.dtype.element_ty), mask=at + columns < width
        )
    tl.debug_barrier()
    for at in range(begin, end, BLOCK):
        place = at + block
        column = tl.load(ids + place, mask=place < end, other=NO_ID).to(tl.int64) - first
        is_here = (place < end) & (column >= 0) & (column < held)
        gradient = tl.load(entries + place, mask=is_here, other=0)
        tl.store(into + column, gradient.to(into.dtype.element_ty), mask=is_here)


@triton.jit(do_not_specialize=COUNTS)
def _gradient_at_labels(
    into, labels, mask, norm, g_ptr, h_ptr,
    held, first, norm_stride, into_stride, g_stride, g_step, h_stride, scale, K,
    MASK: tl.constexpr, G: tl.constexpr, H: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """A row's entries at its labels, which count even where they are not kept."""
    row = tl.program_id(0).to(tl.int64)
    if MASK:
        if tl.load(mask + row).to(tl.float64) == 0:
            return
    offs_k = tl.arange(0, LABELS)
    _, here, column = _label_columns(labels, row, offs_k, K, first, held)
    level, slope, g = _level_and_slope(
        norm, g_ptr, h_ptr, row, norm_stride, g_stride, g_step, h_stride, scale, K, G, H, LABELS
    )
    z = tl.load(norm + (3 + offs_k) * norm_stride + row, mask=here, other=0) / LN_2
    entries = tl.exp2(z) * (slope * tl.maximum(z, NEVER) + level)
    if G:  # several labels may be one id: each writes the same
        entries += scale * tl.sum(tl.where(column[:, None] == column[None, :], g[None, :], 0.0), 1)
    tl.store(into + row * into_stride + column, entries.to(into.dtype.element_ty), mask=here)


@triton.jit
def _level_and_slope(
    norm, g_ptr, h_ptr, row, norm_stride, g_stride, g_step, h_stride, scale, K,
    G: tl.constexpr, H: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Where no label is, the gradient is q (level + slope z). And the gradients of the row's log-probs."""
    total = tl.load(norm + norm_stride + row)
    offs_k = tl.arange(0, LABELS)
    g = tl.zeros([LABELS], tl.float32)
    level, slope = 0.0, 0.0
    if G:
        g = tl.load(g_ptr + row * g_stride + offs_k * g_step, mask=offs_k < K, other=0).to(tl.float32)
        level += tl.sum(g, 0)
    if H:
        h = tl.load(h_ptr + row * h_stride).to(tl.float32)
        level += h * (tl.load(norm + 2 * norm_stride + row) - tl.log(total))
        slope = -scale / total * h * LN_2
    return level * (-scale / total), slope, g


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _stride_of(keep: Tensor | None) -> int:
    return 0 if keep is None or len(keep) == 1 else keep.stride(0)


def statistics(
    logits: Tensor, labels: Tensor, *, first: int, held: int, size: int, scale: float, entropy: bool,
    mask: Tensor | None, keep: Tensor | None, kept: Kept | None, check_first_row: bool, flags: Tensor,
) -> Tensor:  # fmt: skip
    """`Reading.statistics` of logits [n, columns] and labels [n, K]; the label is -inf on the ranks without it.

    `keep` is a mask of ids that count, or `kept` their list.
    """
    rows, k = labels.shape
    table = torch.empty(rows, 3 + k, dtype=torch.float32, device=logits.device)
    wanted: dict[str, Any] = {"MASK": mask is not None, "ENTROPY": entropy, "FIRST_ROW": check_first_row}
    wanted |= {"LABELS": triton.next_power_of_2(k), "LANES": FORWARD["LANES"], "PER_LANE": 16 // logits.element_size()}
    shard = logits.shape[1], held, first, size, logits.stride(0)
    if rows and kept is not None:
        with _on(logits.device):
            _statistics_of_kept[(rows,)](
                logits, labels, mask, kept.ids, kept.bounds, table, flags,
                *shard, kept.bounds.stride(0), scale, k, **wanted, **KEPT, num_warps=2,
            )  # fmt: skip
    elif rows:
        with _on(logits.device):
            _statistics[(rows,)](
                logits, labels, mask, keep, table, flags, *shard, _stride_of(keep), scale, k,
                **wanted, KEEP=keep is not None, PADDED=held < logits.shape[1], num_warps=FORWARD["num_warps"],
            )  # fmt: skip
    return table


def combine(tables: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`Reading.combine` of [ranks, n, 3 + K]: log-probs [n, K] and norm, [3 + K, n] with the labels' z."""
    ranks, rows, columns = tables.shape
    log_probs, norm = tables.new_empty(rows, columns - 3), tables.new_empty(columns, rows)
    if rows:
        with _on(tables.device):
            _combine[(triton.cdiv(rows, COMBINED_ROWS),)](
                tables, log_probs, norm, rows, ranks, scale, columns - 3,
                LABELS=triton.next_power_of_2(columns - 3), ROWS=COMBINED_ROWS,
            )  # fmt: skip
    return log_probs, norm


def differentiate(
    logits: Tensor, into: Tensor, labels: Tensor, norm: Tensor, g: Tensor | None, h: Tensor | None, *,
    first: int, held: int, scale: float, mask: Tensor | None, keep: Tensor | None, kept: Kept | None,
) -> bool:  # fmt: skip
    """`Reading.differentiate` of logits [n, columns], labels [n, K], norm [3 + K, n], g [n, K] and h [n]; True."""
    (rows, k), width = labels.shape, logits.shape[1]
    if not rows:
        return True
    g_strides = (0, 0) if g is None else (g.stride(0), g.stride(1))
    row_arguments = *g_strides, 0 if h is None else h.stride(0), scale, k
    wanted = {"MASK": mask is not None, "G": g is not None, "H": h is not None, "LABELS": triton.next_power_of_2(k)}
    with _on(logits.device):
        if kept is not None:
            entries = torch.empty(len(kept.ids), dtype=torch.float32, device=logits.device)
            _gradient_of_kept[(rows,)](
                logits, into, mask, kept.ids, kept.bounds, entries, norm, g, h, width, held, first,
                kept.bounds.stride(0), norm.stride(0), logits.stride(0), into.stride(0), *row_arguments,
                **wanted, CLEARED=CLEARED, **KEPT, num_warps=4,
            )  # fmt: skip
        else:
            _gradient[(rows, triton.cdiv(width, BACKWARD["BLOCK"]))](
                logits, into, mask, keep, norm, g, h,
                width, held, norm.stride(0), logits.stride(0), into.stride(0), _stride_of(keep), *row_arguments,
                **wanted, KEEP=keep is not None, PADDED=held < width, **BACKWARD,
            )  # fmt: skip
        if g is not None or keep is not None or kept is not None:
            _gradient_at_labels[(rows,)](
                into, labels, mask, norm, g, h, held, first, norm.stride(0), into.stride(0), *row_arguments,
                **wanted, num_warps=1 if k <= 32 else 4,
            )  # fmt: skip
    if into.data_ptr() == logits.data_ptr():  # autograd does not see what a kernel writes
        torch.autograd.graph.increment_version(into)
    return True

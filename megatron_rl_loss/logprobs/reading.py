"""Arithmetic of log-probs: a chunk's statistics, their sums over the ranks of a vocabulary, and the chunk's gradient.

With z = logits / temperature and q = softmax(z) over the vocabulary of all tensor-parallel (TP) ranks,

    log_prob = z[label] - logsumexp(z)        d log_prob / d z[j] = [j = label] - q[j]      for each label of a token
    entropy  = - sum_j q[j] log q[j]          d entropy / d z[j]  = - q[j] (log q[j] + entropy)
    log_rest = log sum_{j in rest} q[j]       d log_rest / d z[j] = [j in rest] q[j] / rest - q[j]

No [tokens, vocabulary] tensor is made or kept beside the logits and their gradient. Forward reads a block of tokens
once, each rank against its own maximum; the ranks then take one maximum and one sum of a few numbers per token.
Backward makes the softmax again from the logits, and takes no collective. Nothing is read back from a device.

Gradients are written by hand for speed. Plain torch that reads each block twice, and leaves gradients to autograd,
takes 1.35 times as long with entropy and as long without, for a vocabulary on one rank (`tools/bench/logprobs.py
--tables logits --sizes 64x32768`, *read twice*; CPU time on a busy Intel host). It is fast by torch's fused
`log_softmax`, which cannot serve where ranks must add up sums before the logarithm.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, rank_in, size_of
from megatron_rl_loss.core.errors import check_within, is_int, require
from megatron_rl_loss.core.masks import Array, on_device, to_array
from megatron_rl_loss.logprobs.kept_ids import Keep, KeptIds, check_keep

#: Bool or numbers, one per token. On the host best: one on a device is read, and the host waits for it.
TokenMask = Tensor | Array | Sequence[Any]

#: Some tokens of the batch.
Places = Tensor | slice

#: Exponentials are taken to base 2. Whether `torch.exp2` or `torch.exp` takes less time depends on torch's vector code
#: for the host; neither does on all.
LN_2 = math.log(2)

#: Below it exp and exp2 are 0 in float32 and float64 alike, and products with it are finite: a stand-in for -inf.
_NEVER = -1e4

#: Entries of scratch: on the host as many as caches hold for a thread, on a device enough to fill it.
_HOST_BLOCK, _HOST_MOST, _DEVICE_BLOCK = 2**19, 2**23, 2**25


def check_rows(what: str, rows: Tensor) -> None:
    """Raise ValueError for one row without a dimension of tokens: labels [K] could be those of K tokens."""
    if rows.dim() < 2:
        raise ValueError(
            f"{what} of shape {tuple(rows.shape)}: there must be a dimension of tokens before the last. Pass row[None] "
            "for a single token, with labels [1] or [1, K]."
        )


class LogProbs(NamedTuple):
    """Log-probs in the shape of the labels, entropy one per token, float32 (float64 of float64 logits).

    Both are 0 where the token mask is 0.
    """

    log_probs: Tensor
    entropy: Tensor | None


class Reading:
    """The tokens of a batch that are read, and the arithmetic on a chunk of their logits.

    `statistics` reduces a chunk's logits, `combine` adds up statistics over ranks, `differentiate` makes the gradient.

    The last arguments are those of `log_probs_from_logits`.

    Attributes:
        labels: int64 [n] or [n, K], of the tokens that are read; without labels [n, 0].
        rows: their places in the batch, on the labels' device; None for all.
        shape: of one value per token of the batch.
        scale: 1 / temperature.
        entropy: whether it is asked for.
        keep: the ids that count, bool [tokens, columns] or [1, columns], or `KeptIds`; None for all.
    """

    def __init__(
        self,
        labels: Tensor | None,
        shape: tuple[int, ...],
        columns: int,
        tp_group: Group | None,
        device: torch.device,
        *,
        temperature: float,
        keep: Keep | None,
        vocab_size: int | None,
        entropy: bool,
        token_mask: TokenMask | None,
        chunk_tokens: int | None,
        rest_without: Tensor | None,
    ) -> None:
        check_within("temperature", temperature, "(0, inf)", "Greedy sampling has no ratio of policies")
        self.shape, self.entropy = torch.Size(shape), entropy
        if labels is None:
            labels = torch.zeros(*shape, 0, dtype=torch.int64, device=device)
        else:
            _check_labels(labels, self.shape)
        size = columns * size_of(tp_group)  # Megatron's shards are equal: it pads the vocabulary
        if vocab_size is not None:
            if not is_int(vocab_size) or not 1 <= vocab_size <= size:
                raise ValueError(
                    f"vocab_size {vocab_size!r} for logits of {size} columns on all TP ranks: it must be an int from 1 "
                    "to that, the size without padding. Leave it out if all columns count, and pass the tp_group if "
                    "the vocabulary is cut."
                )
            size = vocab_size
        self.tp_group = tp_group if size_of(tp_group) > 1 else None
        self.labels, self.rows = labels.reshape(self.shape.numel(), *labels.shape[len(shape) :]).long(), None
        self._host_rows = _rows_of(token_mask, self.shape)
        if self._host_rows is not None:
            self.rows = on_device(self._host_rows, labels.device)
            self.labels = self.labels[self.rows]
        self._without = None
        if rest_without is not None:
            _check_rest(rest_without, labels, self.shape)
            self._without = self.select(rest_without.to(labels.device, torch.bool))
        # After the mask: labels of tokens that are passed over may be anything, such as -100.
        if self.labels.numel():
            require(
                ((self.labels >= 0) & (self.labels < size)).all(),
                lambda: (
                    f"a label {next(label for label in self.labels.ravel().tolist() if not 0 <= label < size)} "
                    f"in a vocabulary of {size}"
                ),
                "labels must be ids from 0 to the size of the vocabulary. Pass token_mask with 0 at tokens that do not "
                "count; their labels may be anything.",
            )
        self.keep = check_keep(keep, self.shape, columns)
        self.scale = 1 / temperature
        self._first = columns * rank_in(tp_group)  # the id of this rank's first column
        self._held = min(max(size - self._first, 0), columns)  # this rank's columns without padding
        self._chunk_tokens = chunk_tokens or self._block_tokens(device)

    def at(self, temperature: float | None) -> "Reading":
        """The same tokens without entropy, at another temperature if one is given."""
        other = copy.copy(self)  # shares labels and rows; the checks have been made
        other._without = None
        other.scale, other.entropy = self.scale if temperature is None else 1 / temperature, False
        return other

    # --- tokens

    def chunks(self) -> Iterator[tuple[slice, Places]]:
        """Places among the tokens that are read, and the same tokens' places in the batch; at least one chunk."""
        for begin in range(0, max(len(self.labels), 1), self._chunk_tokens):
            part = slice(begin, min(begin + self._chunk_tokens, len(self.labels)))
            yield part, part if self.rows is None else self.rows[part]

    def spread(self, values: Tensor) -> Tensor:
        """Values of the tokens that are read, [n] or [n, K], among all tokens of the batch, with 0 at the others."""
        if self.rows is not None:
            values = values.new_zeros(self.shape.numel(), *values.shape[1:]).index_copy_(0, self.rows, values)
        return values.view(*self.shape, *values.shape[1:])

    def select(self, values: Tensor | None) -> Tensor | None:
        """The inverse of `spread`."""
        if values is None:
            return None
        values = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return values if self.rows is None else values[self.rows]

    # --- arithmetic

    def statistics(self, logits: Tensor, part: slice) -> Tensor:
        """[chunk, 3 + K] of this rank's columns: top, the largest logit; sum z exp z; sum exp z; z of each label.

        z = scale * (logits - top). The second is 0 unless entropy is asked for, the labels' are arbitrary where another
        rank has the label. Where no id counts here, top is -inf and the sums 0. With a rest one more column has the
        sum of exp z over it.
        """
        column, in_rest = self._columns(part)[0], self._in_rest(part)
        exact = torch.promote_types(logits.dtype, torch.float32)
        columns = 3 + column.shape[1] + (in_rest is not None)
        statistics = logits.new_zeros(len(column), columns, dtype=exact)
        (top, weighted, total), label = statistics[:, :3].unbind(1), statistics[:, 3 : 3 + column.shape[1]]
        top.fill_(-math.inf)
        for rows, x, z, q in self._blocks(logits, part, top.dtype):
            top[rows] = x.amax(-1)
            # Where no id counts here, -inf - -inf would be NaN; another rank has ids that count.
            finite = top[rows].masked_fill(top[rows] == -math.inf, 0)
            label[rows] = (x.gather(1, column[rows]) - finite[:, None]) * self.scale
            self._centre(x, finite, z)
            total[rows] = torch.exp2(z, out=q).sum(-1)
            if self.entropy:
                weighted[rows] = z.mul_(q).sum(-1) * LN_2
            if in_rest is not None:  # summed itself: the difference of two sums near 1 would have few digits
                statistics[rows, -1] = q.scatter_reduce_(1, column[rows], in_rest[rows].to(q), "amin").sum(-1)
        return statistics

    def combine(self, statistics: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Log-probs like the labels, with a rest another column; and the norm [3, tokens], with a rest [4, tokens].

        The norm: top, sum exp z of the whole vocabulary, entropy, and sum exp z of the rest.
        """
        (top, weighted, total), label = statistics[:, :3].unbind(1), statistics[:, 3:]
        labels = self.labels[part]
        # Two rounds for all tokens: the largest logit of all ranks, then the sums, each brought to it.
        # Without tokens there is none: all ranks of the vocabulary have the same tokens, so all skip it.
        if self.tp_group is not None and top.numel():
            own, top = top, top.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.tp_group)
            shift = (own - top) * self.scale
            # -inf where no id counts here: the factor is then 0, and its product with the shift must be 0, not NaN.
            factor, finite = shift.exp(), shift.clamp(min=_NEVER)
            here = self._columns(part)[1]
            of_labels = torch.where(here, label[:, : here.shape[1]] + shift[:, None], 0)
            label = torch.cat([of_labels, label[:, here.shape[1] :] * factor[:, None]], 1)
            sums = torch.cat([((weighted + total * finite) * factor)[None], (total * factor)[None], label.t()])
            dist.all_reduce(sums if self.entropy else sums[1:], group=self.tp_group)  # unasked, its sum is not sent
            (weighted, total), label = sums[:2], sums[2:].t()
        log_total = total.log()
        norm = [top, total, log_total - weighted / total]
        if self._without is not None:
            # A rest that vanishes has the smallest normal number as probability: log 0 would make its gradient NaN.
            label, others = label[:, :-1], torch.maximum(label[:, -1], total * torch.finfo(total.dtype).tiny)
            log_probs = torch.cat([label - log_total[:, None], (others / total).log()[:, None]], 1)
            return log_probs, torch.stack([*norm, others])
        return (label - log_total[:, None]).contiguous().view(labels.shape), torch.stack(norm)

    def probabilities(self, logits: Tensor, norm: Tensor, part: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows at a time: log2 of each id's probability, -inf for none, and the probability; both are scratch."""
        for rows, x, z, q in self._blocks(logits, part, norm.dtype):
            torch.sub(x, norm[0, rows, None], out=z).mul_(self.scale / LN_2).sub_(norm[1, rows, None].log2())
            yield rows, z, torch.exp2(z, out=q)

    def differentiate(
        self,
        logits: Tensor,
        part: slice,
        norm: Tensor,
        g: Tensor | None,
        h: Tensor | None,
        into: Tensor,
        more: Iterator[Tensor] | None = None,
    ) -> None:
        """Write ``scale (sum_k g_k [j = label_k] - q (sum_k g_k + h (log q + entropy)))`` into `into`.

        g, like the chunk's log-probs, and h, [chunk], are the gradients of log-probs and entropy, None for 0; `norm` is
        the chunk's. `into` may be the logits. `more` is added, a block's part at a time. Of a rest with gradient r,
        ``scale r ([j in rest] exp z_j / sum exp z of the rest - q)`` is written too.
        """
        (top, total, entropy), (column, here), in_rest = norm[:3], self._columns(part), self._in_rest(part)
        into[:, self._held :] = 0  # padding of the vocabulary takes no part
        is_divergence_alone = g is None and h is None
        g = top.new_zeros(column.shape) if g is None else g if g.dim() == 2 else g[:, None]
        factor, of_all, tilt = -self.scale / total, g.sum(1), None
        if in_rest is not None and g.shape[1] > column.shape[1]:
            g, tilt = g[:, :-1], (self.scale * g[:, -1] / norm[3])[:, None]
        level = (factor * (of_all if h is None else of_all + h * (entropy - total.log())))[:, None]
        slope = None if h is None else (factor * h * LN_2)[:, None]
        at_label = g * here * self.scale
        for rows, x, z, q in self._blocks(logits, part, norm.dtype, into):
            added = None if more is None else next(more)  # reads logits, which `into` may overwrite: so first
            self._centre(x, top[rows], z)
            if tilt is not None:
                torch.exp2(z, out=q)
            if is_divergence_alone:
                z.zero_()
            elif slope is None:
                z.exp2_().mul_(level[rows])
            else:
                torch.exp2(z, out=q)
                z.mul_(slope[rows]).add_(level[rows]).mul_(q)
            if tilt is not None and in_rest is not None:
                z.add_(q.scatter_reduce_(1, column[rows], in_rest[rows].to(q), "amin").mul_(tilt[rows]))
            z.scatter_add_(1, column[rows], at_label[rows])
            if added is not None:
                z.add_(added)
            if into.dtype != z.dtype:  # otherwise z is that part of `into`
                into[rows, : self._held] = z

    def _centre(self, x: Tensor, top: Tensor, z: Tensor) -> None:
        """z = scale * (x - top) / log 2, finite, for exp2."""
        torch.sub(x, top[:, None], out=z).mul_(self.scale / LN_2).clamp_(min=_NEVER)

    def _blocks(
        self, logits: Tensor, part: slice, dtype: torch.dtype, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Rows at a time: logits, -inf where an id is not kept, and two pieces of scratch.

        The first is a part of `into` where the dtype allows it, and holds the logits where ids are kept.
        """
        column, here = self._columns(part)
        size = min(self._block_tokens(logits.device), max(len(logits), 1))
        into = into if into is not None and into.dtype == dtype else None
        scratch = logits.new_empty(1 if into is not None else 2, size, self._held, dtype=dtype)
        for begin in range(0, len(logits) if self._held else 0, size):
            rows = slice(begin, min(begin + size, len(logits)))
            number = rows.stop - rows.start
            z = scratch[0, :number] if into is None else into[rows, : self._held]
            yield rows, self._kept(logits[rows, : self._held], z, part, rows, column, here), z, scratch[-1, :number]

    def _block_tokens(self, device: torch.device) -> int:
        """Tokens of a block, whose scratch fits."""
        entries, threads = _DEVICE_BLOCK, torch.get_num_threads()
        if device.type == "cpu":  # threads wait for each other after each operation: for several, fewer and larger ones
            entries = _HOST_BLOCK if threads == 1 else min(2 * threads * _HOST_BLOCK, _HOST_MOST)
        return max(1, entries // max(self._held, 1))

    def _columns(self, part: slice) -> tuple[Tensor, Tensor]:
        """The labels' columns [n, K], and True where this rank has them; otherwise the column is arbitrary."""
        labels = self.labels[part]
        column = (labels if labels.dim() == 2 else labels[:, None]) - self._first
        here = (column >= 0) & (column < self._held)
        return column.clamp(0, max(self._held - 1, 0)), here

    def _in_rest(self, part: slice) -> Tensor | None:
        """False where a label's column is here and not in the rest, [n, K]; None without a rest.

        Probabilities relative to the largest are at most 1, so the smaller of both is 0 at the marked labels, and the
        probability at others: also where an arbitrary column is that of another label.
        """
        return None if self._without is None else ~(self._columns(part)[1] & self._without[part])

    def _kept(self, x: Tensor, z: Tensor, part: slice, rows: slice, column: Tensor, here: Tensor) -> Tensor:
        """The logits, in `z` with -inf where an id is not kept."""
        if self.keep is None:
            return x
        block = slice(part.start + rows.start, part.start + rows.stop)
        if isinstance(self.keep, KeptIds):
            tokens = np.arange(block.start, block.stop) if self._host_rows is None else self._host_rows[block]
            kept = self.keep.mask(tokens, self._first, self._first + self._held, z.device)
        elif len(self.keep) == 1:
            kept = self.keep[:, : self._held].expand(len(z), -1)
        else:
            kept = self.keep[block if self.rows is None else self.rows[block], : self._held]
        label = x.gather(1, column[rows]).to(z.dtype).masked_fill_(~here[rows], -math.inf)
        return z.copy_(x).masked_fill_(~kept, -math.inf).scatter_reduce_(1, column[rows], label, "amax")


def _check_labels(labels: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless labels are [...] or [..., K] for tokens [...], and TypeError unless they are integers."""
    of_token = labels.shape[len(shape) :]
    if labels.shape[: len(shape)] != shape or len(of_token) > 1 or not of_token.numel():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: for these tokens they must be {tuple(shape)}, or for several "
            f"ids each ({', '.join(map(str, (*shape, 'K')))}), K >= 1. Labels are in the order of the tokens: "
            "transpose them to [s, b] or [s, b, K] where hidden states are [s, b, h]."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels of {labels.dtype}: they must be integers, ids of the vocabulary. Pass token ids.")


def _check_rest(rest_without: object, labels: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the ids that a rest leaves out are marked among K labels per token."""
    marked = tuple(rest_without.shape) if isinstance(rest_without, Tensor) else type(rest_without).__name__
    if marked != tuple(labels.shape) or labels.dim() == len(shape):
        raise ValueError(
            f"rest_without of {marked} for labels of shape {tuple(labels.shape)}: it must be a tensor in the shape of "
            "labels [..., K], true for the ids that are not in the rest. Pass teacher_log_probs > -inf."
        )


def _rows_of(token_mask: TokenMask | None, shape: torch.Size) -> npt.NDArray[np.intp] | None:
    """Places of the tokens that are read; None for all of them."""
    if token_mask is None:
        return None
    numbers = to_array(token_mask)
    if numbers.dtype.kind not in "biuf" or not (numbers >= 0).all():
        raise ValueError(
            f"a token mask with {numbers.min() if numbers.dtype.kind in 'iuf' else numbers.dtype}: it must hold bools, "
            "or numbers >= 0. Pass the loss mask, neither labels nor an attention mask that is added to scores."
        )
    mask = numbers != 0
    if mask.shape != shape:
        raise ValueError(
            f"a token mask of shape {mask.shape}: it must have one entry per token, {tuple(shape)}. Cut it for this "
            "context-parallel rank as the labels are."
        )
    return None if mask.all() else np.flatnonzero(mask)

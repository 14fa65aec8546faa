"""Log-probabilities and entropy of tokens from logits that are cut over the vocabulary.

With z = logits / temperature and q = softmax(z) over the vocabulary of all tensor-parallel (TP) ranks,

    log_prob = z[label] - logsumexp(z)        d log_prob / d z[j] = [j = label] - q[j]
    entropy  = - sum_j q[j] log q[j]          d entropy / d z[j]  = - q[j] (log q[j] + entropy)

No [tokens, vocabulary] tensor is made or kept beside the logits and, on the way back, their gradient. A block of tokens
at a time, small enough for a CPU's caches, is read once forward (each rank against its own maximum) and once
backward, where the softmax is made again from the logits. The ranks' parts meet in one maximum and one sum of a few
numbers a token, whatever the number of blocks; backward needs no collective.

Reductions are in float32 (float64 of float64 logits). Megatron's own path is
`core/tensor_parallel/cross_entropy.py`: log-probs alone, at temperature 1, which keeps the softmax.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_int, check_within, require
from megatron_rl_loss.step.collectives import Group, if_several, rank_in, size_of


class LogProbs(NamedTuple):
    """Of each token, in the shape of the labels, float32 (float64 of float64 logits); 0 where the token mask is."""

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class KeptIds:
    """The ids that sampling kept of each token's vocabulary (top-p, top-k), as a rollout engine records them.

    Attributes:
        ids: int64 [all kept], those of the first token, then of the second, and so on.
        offsets: int64 [tokens + 1]; token t has ``ids[offsets[t]:offsets[t + 1]]``.
    """

    ids: Tensor
    offsets: Tensor

    def mask(self, tokens: Tensor, first: int, last: int) -> Tensor:
        """bool [len(tokens), last - first]: what is kept of the ids first to last."""
        counts = self.offsets[tokens + 1] - self.offsets[tokens]
        row = torch.repeat_interleave(torch.arange(len(tokens), device=counts.device), counts)
        before = counts.cumsum(0) - counts
        columns = self.ids[self.offsets[tokens][row] + torch.arange(len(row), device=row.device) - before[row]] - first
        here = (columns >= 0) & (columns < last - first)
        kept = torch.zeros(len(tokens), last - first, dtype=torch.bool, device=columns.device)
        kept[row[here], columns[here]] = True
        return kept


#: Which ids count: bool [tokens..., vocabulary / TP] or [vocabulary / TP], or `KeptIds`. A label always does.
Keep = Tensor | KeptIds


#: Another maker of log-probs: (logits [n, vocabulary / TP], int64 labels [n], tp_group) -> float32 [n], differentiable.
LogProbKernel = Callable[[Tensor, Tensor, Group | None], Tensor]


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: Group | None = None,
    temperature: float = 1.0,
    keep: Keep | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    token_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    gradient_in_place: bool = False,
    kernel: LogProbKernel | None = None,
) -> LogProbs:
    """Log-probability of each label and, if asked, the entropy of its distribution; both differentiable.

    >>> log_probs, entropy = log_probs_from_logits(torch.zeros(3, 4), torch.tensor([0, 1, 3]), entropy=True)
    >>> log_probs, entropy  # log(1/4) and log(4)
    (tensor([-1.3863, -1.3863, -1.3863]), tensor([1.3863, 1.3863, 1.3863]))

    Args:
        logits: [..., vocabulary / TP], float; on TP rank r the r-th part of the vocabulary.
        labels: integers [...], ids in the whole vocabulary; the same on all TP ranks, as all further arguments are.
        tp_group: the ranks that hold the vocabulary together; None for one.
        temperature: > 0; what the logits were divided by when the tokens were sampled.
        keep: ids outside have probability 0, but a label always counts: a set that is empty, or lacks the label, is
            the set with the label added. Entropy is that of the distribution over the kept ids.
        vocab_size: ids from there on are padding, and left out; default: all columns count, as in Megatron.
        entropy: whether it is made. Its gradient costs nothing where nobody asks for it.
        token_mask: [...], bool or numbers; tokens with 0 are passed over: their log-prob, entropy and gradient are 0,
            and their label may be anything. On a device the host waits for it; give it on the host where it is known.
        chunk_tokens: tokens worked on at a time; default: by the size of the vocabulary. Changes no result but by
            rounding.
        gradient_in_place: the gradient overwrites the logits. Autograd refuses a second backward then, and any other
            use of the logits that needs them after.
        kernel: makes the log-probs in this function's place: one of `kernels`, where it is installed, or your own. It
            makes log-probs of plain logits alone.

    Raises:
        ValueError, TypeError: a temperature that is not finite and > 0, labels of another shape, not integers or
            outside the vocabulary where the token mask is not 0 (on a device: a device assertion), a keep-mask or
            token mask of another shape, a `vocab_size` beyond the columns, a kernel with what it cannot do.
    """
    if not logits.is_floating_point() or logits.dim() < 1:
        raise TypeError(
            f"logits of {logits.dtype}, shape {tuple(logits.shape)}: they must be floating, [..., vocabulary / TP]. "
            "Pass what the output layer gives."
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: for the logits they must be {tuple(logits.shape[:-1])}. Labels "
            "are in the order of the tokens, one each: transpose them to [s, b] where hidden states are [s, b, h]."
        )
    read = Reading.of(
        labels, logits.shape[-1], tp_group, temperature, keep, vocab_size, entropy, token_mask, chunk_tokens
    )
    if kernel is not None:
        asked = {"temperature": temperature != 1, "keep": keep is not None, "vocab_size": vocab_size is not None}
        asked |= {"entropy": entropy, "chunk_tokens": chunk_tokens is not None, "gradient_in_place": gradient_in_place}
        if any(asked.values()):
            raise ValueError(
                f"a kernel with {', '.join((name for name, given in asked.items() if given))}: other kernels make "
                "log-probs of plain logits alone. Leave the kernel out: plain torch can do it."
            )
        of_rows = logits.reshape(-1, logits.shape[-1])
        of_rows = of_rows if read.rows is None else of_rows[read.rows]
        return read.in_shape(read.spread(kernel(of_rows, read.labels, if_several(tp_group)).float()), None)
    found = _FromLogits.apply(logits.reshape(-1, logits.shape[-1]), read, gradient_in_place)  # type: ignore[no-untyped-call]
    return read.in_shape(*found)


# --- what is read of a token's logits


@dataclass(eq=False)
class Reading:
    """Which tokens of a batch are read, and how; shared by everything that makes log-probs.

    Attributes:
        labels: int64 [num_read], of the tokens that are read.
        rows: int64 [num_read], where they are in the batch; None if all tokens are read.
        first: the id of this rank's first column.
        held: this rank's columns without padding.
        columns: this rank's columns.
        scale: what logits are multiplied by: 1 / temperature.
        keep: bool [tokens, columns] or [1, columns], or `KeptIds`.
        chunk_tokens: tokens at a time, or None.
    """

    labels: Tensor
    rows: Tensor | None
    shape: torch.Size
    tp_group: Group | None
    first: int
    held: int
    columns: int
    scale: float
    keep: Keep | None
    entropy: bool
    chunk_tokens: int | None

    @classmethod
    def of(
        cls,
        labels: Tensor,
        columns: int,
        tp_group: Group | None,
        temperature: float,
        keep: Keep | None,
        vocab_size: int | None,
        entropy: bool,
        token_mask: Tensor | None,
        chunk_tokens: int | None,
    ) -> "Reading":
        """Checks what `log_probs_from_logits` is given."""
        sound = isinstance(temperature, int | float) and 0 < temperature < math.inf
        check_within("temperature", temperature, sound, "a finite number > 0", "For greedy sampling there is no ratio")
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise TypeError(f"labels of {labels.dtype}: they must be integers, ids of the vocabulary. Pass token ids.")
        if chunk_tokens is not None:
            check_int("chunk_tokens", chunk_tokens, at_least=1, remedy="Leave it out for a default")
        whole = columns * size_of(tp_group)
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, at_least=1, remedy="Leave it out if all columns count")
            if vocab_size > whole:
                raise ValueError(
                    f"vocab_size {vocab_size} for logits of {whole} columns on all TP ranks: it is the size without "
                    "padding. Leave it out if all columns count, and pass the tp_group if the vocabulary is cut."
                )
        size = vocab_size or whole
        first = columns * rank_in(tp_group)
        flat, rows = labels.reshape(-1).long(), None
        if token_mask is not None:
            if token_mask.shape != labels.shape:
                raise ValueError(
                    f"a token mask of shape {tuple(token_mask.shape)}: it must have the labels' shape, "
                    f"{tuple(labels.shape)}. Cut it for this context-parallel rank as the labels are."
                )
            rows = token_mask.reshape(-1).nonzero()[:, 0].to(flat.device, non_blocking=True)
            rows = None if len(rows) == flat.numel() else rows
            flat = flat if rows is None else flat[rows]
        _check_labels(flat, size)
        return cls(
            labels=flat,
            rows=rows,
            shape=labels.shape,
            tp_group=if_several(tp_group),
            first=first,
            held=min(max(size - first, 0), columns),
            columns=columns,
            scale=1 / temperature,
            keep=_keep_by_token(keep, labels.shape, columns),
            entropy=entropy,
            chunk_tokens=chunk_tokens,
        )

    def chunks(self, chunk_tokens: int) -> Iterator[tuple[slice, Tensor | slice]]:
        """Places in what is read, and the same tokens' places in the batch."""
        for begin in range(0, max(len(self.labels), 1), chunk_tokens):  # one at least, for what has to be named
            part = slice(begin, min(begin + chunk_tokens, len(self.labels)))
            yield part, part if self.rows is None else self.rows[part]

    def spread(self, values: Tensor) -> Tensor:
        """Of the tokens that are read -> of the batch, 0 elsewhere."""
        if self.rows is None:
            return values
        batch = values.new_zeros(self.shape.numel(), *values.shape[1:])
        return batch.index_copy_(0, self.rows, values)

    def gathered(self, values: Tensor) -> Tensor:
        """Of the batch -> of the tokens that are read."""
        return values.reshape(-1) if self.rows is None else values.reshape(-1)[self.rows]

    def in_shape(self, log_probs: Tensor, entropy: Tensor | None) -> LogProbs:
        return LogProbs(log_probs.view(self.shape), None if entropy is None else entropy.view(self.shape))

    # The three steps: of a chunk's logits, over the ranks, and back.

    def statistics(self, logits: Tensor, part: slice) -> Tensor:
        """[4, chunk] of this rank's columns, with z = scale * (logits - top): top, the largest logit; sum exp z;
        z[label]; and sum z exp z. The third is any where another rank has the label, the fourth 0 where no entropy is
        asked for. One pass. Where no id counts here, top is -inf and the sums are 0.
        """
        column, here = self._columns(self.labels[part])
        found = logits.new_zeros(4, len(column), dtype=_accumulator(logits.dtype))
        if self.held == 0:
            found[0] = -math.inf
            return found
        for rows, z, q in self._blocks(logits, found.dtype):
            x = logits[rows, : self.held]
            if self.keep is not None:
                x = self._dropped(x, z, part, rows, column[rows], here[rows])
            found[0, rows] = top = x.amax(-1).to(found.dtype)
            self._centre(x, top.masked_fill(top == -math.inf, 0), z)
            found[1, rows] = torch.exp2(z, out=q).sum(-1)
            if self.entropy:
                found[3, rows] = z.mul_(q).sum(-1)
        found[3] *= _LN_2
        top = found[0]
        nothing = top == -math.inf
        label = logits[:, : self.held].gather(1, column)[:, 0].to(found.dtype)
        found[2] = (label - top.masked_fill(nothing, 0)) * self.scale
        return found

    def combine(self, statistics: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor | None]:
        """Over all ranks' statistics of a part's tokens: what normalises them, log_prob and entropy.

        The first is [2, tokens]: top and sum exp z of the whole vocabulary. One maximum and one sum over the ranks.
        """
        mine, total, label, weighted = statistics
        top = mine
        if self.tp_group is not None and mine.numel():
            top = mine.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.tp_group)
            shift = (mine - top) * self.scale
            factor, small = shift.exp(), shift.clamp(min=_NEVER)  # 0 and finite where nothing counts
            _, here = self._columns(self.labels[part])
            label = torch.where(here, label + shift, 0)
            sums = torch.stack([total * factor, label, (weighted + total * small) * factor])
            sums = sums if self.entropy else sums[:2]
            dist.all_reduce(sums, group=self.tp_group)
            total, label = sums[0], sums[1]
            weighted = sums[2] if self.entropy else weighted
        log_total = total.log()
        entropy = log_total - weighted / total if self.entropy else None
        return torch.stack([top, total]), label - log_total, entropy

    def gradient(
        self,
        logits: Tensor,
        part: slice,
        norm: Tensor,
        entropy: Tensor | None,
        of_log_probs: Tensor | None,
        of_entropy: Tensor | None,
        into: Tensor,
    ) -> None:
        """Write a chunk's gradient towards its logits into `into`, [chunk, columns], which may be the logits.

        The other tensors are [chunk], `norm` is [2, chunk]; a gradient that is None is 0, but not both. With g and h
        the gradients of log-prob and entropy: scale (g [j = label] - q (g + h (log q + entropy))).
        """
        top, total = norm
        column, here = self._columns(self.labels[part])
        into[:, self.held :] = 0
        factor = -self.scale / total
        g, h = of_log_probs, None if entropy is None else of_entropy
        slope = at_label = None
        level = 0 if g is None else g
        if h is not None and entropy is not None:
            slope, level = (factor * h * _LN_2)[:, None], level + h * (entropy - total.log())
        level = (factor * level)[:, None]
        if g is not None:
            at_label = (g * here * self.scale)[:, None]
        for rows, z, q in self._blocks(logits, norm.dtype, into):
            x = logits[rows, : self.held]
            if self.keep is not None:
                x = self._dropped(x, z, part, rows, column[rows], here[rows])
            self._centre(x, top[rows], z)
            if slope is None:
                z.exp2_().mul_(level[rows])
            else:
                torch.exp2(z, out=q)
                z.mul_(slope[rows]).add_(level[rows]).mul_(q)
            if at_label is not None:
                z.scatter_add_(1, column[rows], at_label[rows])
            if into.dtype != z.dtype:
                into[rows, : self.held] = z

    def _centre(self, x: Tensor, top: Tensor, z: Tensor) -> None:
        """scale * (x - top) / log 2, finite, for exp2, which on the host takes a quarter of the time of `torch.exp`."""
        torch.sub(x, top[:, None], out=z).mul_(self.scale / _LN_2).clamp_(min=_NEVER)

    def _blocks(
        self, logits: Tensor, dtype: torch.dtype, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows at a time, with two pieces of scratch of their size; the first is a part of `into` where that can be."""
        size = block_tokens(self.held, logits.device) if self.chunk_tokens is None else self.chunk_tokens
        size = min(size, block_tokens(self.held, logits.device), max(len(logits), 1))
        in_place = into is not None and into.dtype == dtype
        scratch = logits.new_empty(1 if in_place else 2, size, self.held, dtype=dtype)
        for begin in range(0, len(logits) if self.held else 0, size):
            rows = slice(begin, min(begin + size, len(logits)))
            number = rows.stop - rows.start
            z = into[rows, : self.held] if in_place and into is not None else scratch[0, :number]
            yield rows, z, scratch[-1, :number]

    def _columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The label's column [n, 1], and whether it is this rank's; another rank's is any."""
        column = labels - self.first
        here = (column >= 0) & (column < self.held)
        return column.clamp(0, max(self.held - 1, 0))[:, None], here

    def _dropped(self, x: Tensor, z: Tensor, part: slice, rows: slice, column: Tensor, here: Tensor) -> Tensor:
        """The logits in `z`, -inf where an id is not kept."""
        tokens = torch.arange(part.start + rows.start, part.start + rows.stop, device=z.device)
        tokens = tokens if self.rows is None else self.rows[tokens]
        if isinstance(self.keep, KeptIds):
            kept = self.keep.mask(tokens, self.first, self.first + self.held)
        else:
            assert self.keep is not None
            kept = self.keep[tokens if len(self.keep) > 1 else tokens * 0, : self.held]
        kept = kept.scatter(1, column, kept.gather(1, column) | here[:, None])
        return z.copy_(x).masked_fill_(~kept, -math.inf)


_LN_2 = math.log(2)

#: Below it exp and exp2 are 0 in float32 and float64 alike, and products with it are finite: a stand-in for -inf.
_NEVER = -1e4

#: Entries of scratch: on the host what its caches hold for a thread, on a device enough to fill it.
_HOST_BLOCK, _HOST_MOST, _DEVICE_BLOCK = 2**19, 2**23, 2**25


def block_tokens(columns: int, device: torch.device) -> int:
    """Tokens whose logits are worked on at a time."""
    if device.type != "cpu":
        entries = _DEVICE_BLOCK
    elif (threads := torch.get_num_threads()) == 1:
        entries = _HOST_BLOCK
    else:  # they wait for each other after every operation, so fewer and larger ones
        entries = min(2 * threads * _HOST_BLOCK, _HOST_MOST)
    return max(1, entries // max(columns, 1))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_labels(labels: Tensor, size: int) -> None:
    if labels.numel() == 0:
        return
    sound: bool | Tensor = ((labels >= 0) & (labels < size)).all()
    require(
        sound if not labels.is_cpu else bool(sound),
        lambda: f"a label {next(int(one) for one in labels if not 0 <= one < size)} in a vocabulary of {size}",
        "labels must be ids from 0 to the size of the vocabulary. Pass token_mask with 0 at tokens that do not count; "
        "their labels may be anything.",
    )


def _keep_by_token(keep: Keep | None, tokens: Sequence[int], columns: int) -> Keep | None:
    if isinstance(keep, KeptIds):
        if keep.offsets.shape != (math.prod(tokens) + 1,):
            raise ValueError(
                f"KeptIds with offsets of shape {tuple(keep.offsets.shape)} for {math.prod(tokens)} tokens: there must "
                "be one offset more than tokens. Give tokens that keep nothing an empty range."
            )
        return keep
    if keep is None:
        return None
    if keep.dtype != torch.bool or tuple(keep.shape) not in ((*tokens, columns), (columns,)):
        raise ValueError(
            f"a keep-mask of {keep.dtype}, shape {tuple(keep.shape)}: it must be bool, {(*tokens, columns)} or "
            f"[{columns}]. Cut it over the vocabulary as the logits are, or pass KeptIds."
        )
    return keep.reshape(-1, columns)


# --- the function


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, read: Reading, in_place: bool) -> tuple[Tensor, Tensor | None]:
        whole = len(logits) if read.rows is None else block_tokens(read.held, logits.device)
        size = read.chunk_tokens or max(whole, 1)
        parts = [read.statistics(logits[places], part) for part, places in read.chunks(size)]
        norm, log_probs, entropy = read.combine(torch.cat(parts, 1))
        ctx.save_for_backward(logits, norm, entropy)
        ctx.read, ctx.in_place, ctx.size = read, in_place, size
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), None if entropy is None else read.spread(entropy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        logits, norm, entropy = ctx.saved_tensors
        read: Reading = ctx.read
        g, h = (None if one is None else read.gathered(one) for one in gradients)
        into = logits if ctx.in_place else torch.empty_like(logits)
        for part, places in read.chunks(ctx.size):
            chunk = logits[places]
            target = into[places] if isinstance(places, slice) else torch.empty_like(chunk)
            of_entropy, of_g, of_h = (None if one is None else one[part] for one in (entropy, g, h))
            read.gradient(chunk, part, norm[:, part], of_entropy, of_g, of_h, target)
            if not isinstance(places, slice):
                into[places] = target
        if read.rows is not None:
            passed_over = torch.ones(len(into), dtype=torch.bool, device=into.device).index_fill_(0, read.rows, False)
            into.masked_fill_(passed_over[:, None], 0)
        return into, None, None

"""Log-probabilities and entropy of tokens, from logits whose vocabulary lies on several ranks.

With z = logits / temperature and q = softmax(z) over the vocabulary of all tensor-parallel (TP) ranks,

    log_prob = z[label] - logsumexp(z)        d log_prob / d z[j] = [j = label] - q[j]
    entropy  = - sum_j q[j] log q[j]          d entropy / d z[j]  = - q[j] (log q[j] + entropy)

No [tokens, vocabulary] tensor is made or kept beside the logits and their gradient. Forward reads a block of tokens
once, each rank against its own maximum; the ranks then take one maximum and one sum of a few numbers per token.
Backward makes the softmax again from the logits, and takes no collective.

Reductions are in float32 (float64 of float64 logits). Megatron's own path, `core/tensor_parallel/cross_entropy.py`,
makes log-probs alone, at temperature 1, and keeps the softmax.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_callable, check_int, check_within, first_order, require
from megatron_rl_loss.logprobs.kept_ids import Keep, KeptIds, check_keep
from megatron_rl_loss.step.collectives import Group, if_several, rank_in, size_of


class LogProbs(NamedTuple):
    """Per token, in the shape of the labels, float32 (float64 of float64 logits); 0 where the token mask is 0."""

    log_probs: Tensor
    entropy: Tensor | None


#: (logits [n, vocabulary / TP], int64 labels [n], tp_group) -> log-probs, float32 [n], differentiable.
LogProbKernel = Callable[[Tensor, Tensor, Group | None], Tensor]


class Settings(NamedTuple):
    """What all makers of log-probs take, as `log_probs_from_logits` says."""

    temperature: float
    keep: Keep | None
    vocab_size: int | None
    entropy: bool
    token_mask: Tensor | None


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
    """The log-probability of each label and, if asked, the entropy of its distribution; both differentiable.

    >>> log_probs, entropy = log_probs_from_logits(torch.zeros(3, 4), torch.tensor([0, 1, 3]), entropy=True)
    >>> log_probs, entropy  # log(1/4) and log(4)
    (tensor([-1.3863, -1.3863, -1.3863]), tensor([1.3863, 1.3863, 1.3863]))

    Args:
        logits: [..., vocabulary / TP], float; on TP rank r the r-th part of the vocabulary.
        labels: integers [...], ids in the whole vocabulary; these and all further arguments are the same on all TP
            ranks.
        tp_group: the ranks that hold the vocabulary together; None for one.
        temperature: > 0; what the logits were divided by when the tokens were sampled.
        keep: ids outside have probability 0. A label always counts: a set without the label is read as if it had it.
            Entropy is that of the distribution over the kept ids.
        vocab_size: ids from there on are padding, and left out; default: all columns count, as in Megatron.
        entropy: whether to make it. Backward does no work for it where nobody uses it.
        token_mask: [...], bool or numbers; at 0 a token is passed over: its log-prob, entropy and gradient are 0, and
            its label may be anything. The host waits for a mask on a device; pass it on the host where you can.
        chunk_tokens: tokens to work on at a time; default: by the size of the vocabulary.
        gradient_in_place: the gradient overwrites the logits. Autograd then refuses a second backward, and any later
            use of the logits that needs them.
        kernel: makes the log-probs of plain logits in this function's place: one of `kernels`, or your own.

    Raises:
        ValueError, TypeError: a temperature that is not finite and > 0; labels of another shape, not integers or
            outside the vocabulary where the token mask is not 0 (on a device: a device assertion); a keep-mask or
            token mask of another shape; a `vocab_size` beyond the columns; a kernel with what it cannot do.
    """
    if not logits.is_floating_point() or logits.dim() < 1:
        raise TypeError(
            f"logits of {logits.dtype}, shape {tuple(logits.shape)}: they must be floating, [..., vocabulary / TP]. "
            "Pass what the output layer gives."
        )
    check_labels_shape(labels, logits.shape[:-1], "the logits")
    rows = logits.reshape(-1, logits.shape[-1])
    read = Reading(labels, rows.shape[1], tp_group, Settings(temperature, keep, vocab_size, entropy, token_mask))
    if chunk_tokens is not None:
        check_int("chunk_tokens", chunk_tokens, at_least=1, remedy="Leave it out for a default")
    if kernel is None:
        return read.in_shape(*_FromLogits.apply(rows, read, chunk_tokens, gradient_in_place))  # type: ignore[no-untyped-call]
    extras = {"temperature": temperature != 1, "keep": keep is not None, "vocab_size": vocab_size is not None}
    extras |= {"entropy": entropy, "chunk_tokens": chunk_tokens is not None, "gradient_in_place": gradient_in_place}
    if any(extras.values()):
        raise ValueError(
            f"a kernel with {', '.join(name for name, used in extras.items() if used)}: other kernels make log-probs "
            "of plain logits alone. Leave the kernel out: plain torch can do it."
        )
    check_callable("kernel", kernel, "it must make log-probs of logits", "Pass one of logprobs.kernels")
    rows = rows if read.rows is None else rows[read.rows]
    return read.in_shape(read.spread(kernel(rows, read.labels, read.tp_group).float()), None)


def check_labels_shape(labels: Tensor, expected: tuple[int, ...], what: str) -> None:
    if tuple(labels.shape) != tuple(expected):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: for {what} they must be {tuple(expected)}. Labels are in the "
            "order of the tokens, one each: transpose them to [s, b] where hidden states are [s, b, h]."
        )


class Reading:
    """Which tokens of a batch are read, and how; all makers of log-probs share it.

    Its three steps: `statistics` of a chunk's logits, `combine` over the ranks, and `gradient` back. `labels` are those
    of the tokens read, `rows` their places in the batch, None for all; `columns` are this rank's of the logits.
    """

    def __init__(self, labels: Tensor, columns: int, tp_group: Group | None, settings: Settings) -> None:
        temperature, keep, vocab_size, self.entropy, token_mask = settings
        check_within("temperature", temperature, "(0, inf)", "For greedy sampling there is no ratio")
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise TypeError(f"labels of {labels.dtype}: they must be integers, ids of the vocabulary. Pass token ids.")
        size = columns * size_of(tp_group)
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, at_least=1, remedy="Leave it out if all columns count")
            if vocab_size > size:
                raise ValueError(
                    f"vocab_size {vocab_size} for logits of {size} columns on all TP ranks: it is the size without "
                    "padding. Leave it out if all columns count, and pass the tp_group if the vocabulary is cut."
                )
            size = vocab_size
        self.shape, self.tp_group = labels.shape, if_several(tp_group)
        self.labels, self.rows = labels.reshape(-1).long(), None
        if token_mask is not None:
            if token_mask.shape != labels.shape:
                raise ValueError(
                    f"a token mask of shape {tuple(token_mask.shape)}: it must have the labels' shape, "
                    f"{tuple(labels.shape)}. Cut it for this context-parallel rank as the labels are."
                )
            rows = token_mask.reshape(-1).nonzero()[:, 0].to(labels.device, non_blocking=True)
            if len(rows) < labels.numel():
                self.labels, self.rows = self.labels[rows], rows
        if self.labels.numel():
            require(
                ((self.labels >= 0) & (self.labels < size)).all(),
                lambda: (
                    f"a label {next(x for x in self.labels.tolist() if not 0 <= x < size)} in a vocabulary of {size}"
                ),
                "labels must be ids from 0 to the size of the vocabulary. Pass token_mask with 0 at tokens that do not "
                "count; their labels may be anything.",
            )
        self._keep = check_keep(keep, labels.shape, columns)
        self._scale = 1 / temperature
        self._first = columns * rank_in(tp_group)  # the id of this rank's first column
        self._held = min(max(size - self._first, 0), columns)  # this rank's columns without padding

    def chunks(self, chunk_tokens: int) -> Iterator[tuple[slice, Tensor | slice]]:
        """Places among the tokens that are read, and the same tokens' places in the batch; at least one chunk."""
        for begin in range(0, max(len(self.labels), 1), chunk_tokens):
            part = slice(begin, min(begin + chunk_tokens, len(self.labels)))
            yield part, part if self.rows is None else self.rows[part]

    def spread(self, values: Tensor) -> Tensor:
        """Of the tokens that are read -> of the batch, 0 elsewhere."""
        if self.rows is None:
            return values
        return values.new_zeros(self.shape.numel()).index_copy_(0, self.rows, values)

    def gather(self, values: Tensor | None) -> Tensor | None:
        """Of the batch -> of the tokens that are read."""
        if values is None or self.rows is None:
            return values
        return values[self.rows]

    def in_shape(self, log_probs: Tensor, entropy: Tensor | None) -> LogProbs:
        return LogProbs(log_probs.view(self.shape), None if entropy is None else entropy.view(self.shape))

    def statistics(self, logits: Tensor, part: slice) -> Tensor:
        """[4, chunk] of this rank's columns: top, the largest logit; sum exp z; z[label]; sum z exp z.

        z = scale * (logits - top). The third is arbitrary where another rank has the label, the fourth 0 unless entropy
        is asked for. Where no id counts here, top is -inf and the sums 0.
        """
        column, here = self._columns(self.labels[part])
        statistics = logits.new_zeros(4, len(column), dtype=torch.promote_types(logits.dtype, torch.float32))
        top, total, label, weighted = statistics
        if self._held == 0:
            top.fill_(-math.inf)
            return statistics
        for rows, z, q in self._blocks(logits, top.dtype):
            x = self._kept(logits[rows, : self._held], z, part, rows, column, here)
            top[rows] = x.amax(-1)
            self._centre(x, _finite(top[rows]), z)
            total[rows] = torch.exp2(z, out=q).sum(-1)
            if self.entropy:
                weighted[rows] = z.mul_(q).sum(-1) * _LN_2
        of_label = logits[:, : self._held].gather(1, column)[:, 0]
        label.copy_((of_label.to(top.dtype) - _finite(top)) * self._scale)
        return statistics

    def combine(self, statistics: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Log_prob [tokens], and the norm [3, tokens]: top and sum exp z of the whole vocabulary, and the entropy."""
        top, total, label, weighted = statistics
        if self.tp_group is not None and top.numel():
            own, top = top, top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.tp_group)
            shift = (own - top) * self._scale
            factor, small = shift.exp(), shift.clamp(min=_NEVER)  # 0 and finite where nothing counts
            label = torch.where(self._columns(self.labels[part])[1], label + shift, 0)
            sums = torch.stack([total * factor, label, (weighted + total * small) * factor])
            dist.all_reduce(sums if self.entropy else sums[:2], group=self.tp_group)
            total, label, weighted = sums
        log_total = total.log()
        return label - log_total, torch.stack([top, total, log_total - weighted / total])

    def gradient(
        self, logits: Tensor, part: slice, norm: Tensor, g: Tensor | None, h: Tensor | None, into: Tensor
    ) -> None:
        """Write ``scale (g [j = label] - q (g + h (log q + entropy)))`` into `into`, which may be the logits.

        g and h, [chunk], are the gradients of log-prob and entropy, None for 0; `norm` is the chunk's.
        """
        top, total, entropy = norm
        column, here = self._columns(self.labels[part])
        into[:, self._held :] = 0
        g = torch.zeros_like(top) if g is None else g
        factor = -self._scale / total
        level = (factor * (g if h is None else g + h * (entropy - total.log())))[:, None]
        slope = None if h is None else (factor * h * _LN_2)[:, None]
        at_label = (g * here * self._scale)[:, None]
        for rows, z, q in self._blocks(logits, norm.dtype, into):
            x = self._kept(logits[rows, : self._held], z, part, rows, column, here)
            self._centre(x, top[rows], z)
            if slope is None:
                z.exp2_().mul_(level[rows])
            else:
                torch.exp2(z, out=q)
                z.mul_(slope[rows]).add_(level[rows]).mul_(q)
            z.scatter_add_(1, column[rows], at_label[rows])
            if into.dtype != z.dtype:
                into[rows, : self._held] = z

    def _centre(self, x: Tensor, top: Tensor, z: Tensor) -> None:
        """z = scale * (x - top) / log 2, finite, for exp2, which on the host takes a quarter of `torch.exp`'s time."""
        torch.sub(x, top[:, None], out=z).mul_(self._scale / _LN_2).clamp_(min=_NEVER)

    def _blocks(
        self, logits: Tensor, dtype: torch.dtype, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows at a time, with two pieces of scratch; the first is a part of `into` where that can be."""
        size = min(self.block_tokens(logits.device), max(len(logits), 1))
        in_place = into is not None and into.dtype == dtype
        scratch = logits.new_empty(1 if in_place else 2, size, self._held, dtype=dtype)
        for begin in range(0, len(logits) if self._held else 0, size):
            rows = slice(begin, min(begin + size, len(logits)))
            number = rows.stop - rows.start
            z = into[rows, : self._held] if in_place and into is not None else scratch[0, :number]
            yield rows, z, scratch[-1, :number]

    def block_tokens(self, device: torch.device) -> int:
        entries, threads = _DEVICE_BLOCK, torch.get_num_threads()
        if device.type == "cpu":  # threads wait for each other after each operation: for several, fewer and larger ones
            entries = _HOST_BLOCK if threads == 1 else min(2 * threads * _HOST_BLOCK, _HOST_MOST)
        return max(1, entries // max(self._held, 1))

    def _columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The label's column [n, 1], and whether this rank has it; otherwise the column is arbitrary."""
        column = labels - self._first
        here = (column >= 0) & (column < self._held)
        return column.clamp(0, max(self._held - 1, 0))[:, None], here

    def _kept(self, x: Tensor, z: Tensor, part: slice, rows: slice, column: Tensor, here: Tensor) -> Tensor:
        """The logits, in `z` with -inf where an id is not kept."""
        if self._keep is None:
            return x
        tokens = torch.arange(part.start + rows.start, part.start + rows.stop, device=z.device)
        tokens = tokens if self.rows is None else self.rows[tokens]
        if isinstance(self._keep, KeptIds):
            kept = self._keep.mask(tokens, self._first, self._first + self._held)
        else:
            kept = self._keep[tokens if len(self._keep) > 1 else tokens * 0, : self._held]
        column = column[rows]
        kept = kept.scatter(1, column, kept.gather(1, column) | here[rows, None])
        return z.copy_(x).masked_fill_(~kept, -math.inf)


_LN_2 = math.log(2)

#: Below it exp and exp2 are 0 in float32 and float64 alike, and products with it are finite: a stand-in for -inf.
_NEVER = -1e4

#: Entries of scratch: on the host what its caches hold for a thread, on a device enough to fill it.
_HOST_BLOCK, _HOST_MOST, _DEVICE_BLOCK = 2**19, 2**23, 2**25


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -math.inf, 0)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, read: Reading, chunk_tokens: int | None, in_place: bool
    ) -> tuple[Tensor, Tensor | None]:
        whole = len(logits) if read.rows is None else read.block_tokens(logits.device)
        ctx.size = chunk_tokens or max(whole, 1)
        parts = [read.statistics(logits[places], part) for part, places in read.chunks(ctx.size)]
        log_probs, norm = read.combine(torch.cat(parts, 1))
        ctx.save_for_backward(logits, norm)
        ctx.read, ctx.in_place = read, in_place
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), read.spread(norm[2]) if read.entropy else None

    @staticmethod
    @first_order("log_probs_from_logits")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, norm = ctx.saved_tensors
        read: Reading = ctx.read
        g, h = map(read.gather, gradients)
        into = logits if ctx.in_place else torch.empty_like(logits)
        for part, places in read.chunks(ctx.size):
            chunk = logits[places]
            target = into[places] if isinstance(places, slice) else torch.empty_like(chunk)
            of_g, of_h = (None if one is None else one[part] for one in (g, h))
            read.gradient(chunk, part, norm[:, part], of_g, of_h, target)
            if not isinstance(places, slice):
                into[places] = target
        if read.rows is not None:
            masked = torch.ones(len(into), dtype=torch.bool, device=into.device).index_fill_(0, read.rows, False)
            into.masked_fill_(masked[:, None], 0)
        return into, None, None, None

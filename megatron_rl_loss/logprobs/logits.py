"""Log-probabilities and entropy of tokens, from logits whose vocabulary lies on several ranks.

Reductions are in float32 (float64 of float64 logits). Megatron's own path, `core/tensor_parallel/cross_entropy.py`,
makes log-probs alone, at temperature 1, and keeps the softmax.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_callable, check_int, first_order
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.reading import LogProbs, Reading, Settings, TokenMask, check_labels_shape
from megatron_rl_loss.step.collectives import Group

#: (logits [n, vocabulary / TP], int64 labels [n], tp_group) -> log-probs, float32 [n], differentiable.
LogProbKernel = Callable[[Tensor, Tensor, Group | None], Tensor]

Places = Tensor | slice
Gradients = tuple[Tensor | None, ...]


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: Group | None = None,
    temperature: float = 1.0,
    keep: Keep | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
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
        entropy: make it too. Backward does no work for it where nobody uses it.
        token_mask: [...], bool or numbers; at 0 a token is passed over: its log-prob, entropy and gradient are 0, and
            its label may be anything. Pass it on the host: the host reads it, and waits for one on a device.
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
        whole = len(rows) if read.rows is None else read.block_tokens(rows.device)
        return make_log_probs(read, partial(_Rows, read, gradient_in_place), chunk_tokens or max(whole, 1), rows)
    extras = {"temperature": temperature != 1, "keep": keep is not None, "vocab_size": vocab_size is not None}
    extras |= {"entropy": entropy, "chunk_tokens": chunk_tokens is not None, "gradient_in_place": gradient_in_place}
    if any(extras.values()):
        raise ValueError(
            f"a kernel with {', '.join(name for name, used in extras.items() if used)}: other kernels make log-probs "
            "of plain logits alone. Leave the kernel out: plain torch can do it."
        )
    check_callable("kernel", kernel, "it must make log-probs of logits", "Pass one of logprobs.kernels")
    rows = rows if read.rows is None else rows[read.rows]
    return LogProbs(read.spread(kernel(rows, read.labels, read.tp_group).float()), None)


class Source(Protocol):
    """Leaves of the graph: the logits of tokens at some places of the batch, and the sums of gradients made of theirs.

    Between `logits` and `add` the logits may be overwritten, by their gradient.
    """

    def logits(self, places: Places) -> Tensor: ...
    def add(self, gradient: Tensor, places: Places) -> None: ...
    def gradients(self) -> Gradients: ...


#: (leaves, True for those that want a gradient) -> a source.
OpenSource = Callable[[Sequence[Any], Sequence[bool]], Source]


def make_log_probs(read: Reading, source: OpenSource, chunk_tokens: int, *leaves: Tensor | None) -> LogProbs:
    """Log-probs and entropy, in the labels' shape, of logits that are made a chunk at a time, and again backward."""
    return LogProbs(*_MakeLogProbs.apply(read, source, chunk_tokens, *leaves))  # type: ignore[no-untyped-call]


class _MakeLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Reading, source: OpenSource, chunk_tokens: int, *leaves: Any) -> Gradients:
        opened = source(leaves, [False] * len(leaves))
        parts = [read.statistics(opened.logits(places), part) for part, places in read.chunks(chunk_tokens)]
        log_probs, norm = read.combine(torch.cat(parts, 1))
        ctx.save_for_backward(norm, *leaves)
        ctx.read, ctx.source, ctx.chunk_tokens = read, source, chunk_tokens
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), read.spread(norm[2]) if read.entropy else None

    @staticmethod
    @first_order("log-probs")
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        norm, *leaves = ctx.saved_tensors
        read: Reading = ctx.read
        g, h = map(read.select, gradients)
        source: Source = ctx.source(leaves, ctx.needs_input_grad[3:])
        for part, places in read.chunks(ctx.chunk_tokens):
            logits = source.logits(places)
            of_g, of_h = (None if one is None else one[part] for one in (g, h))
            read.differentiate(logits, part, norm[:, part], of_g, of_h)
            source.add(logits, places)
            del logits  # before the next chunk's are made
        return None, None, None, *source.gradients()


class _Rows:
    """Logits that are there; in the end their gradient is in their place, or in a copy's."""

    def __init__(self, read: Reading, in_place: bool, leaves: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._read = read
        self._rows: Tensor = leaves[0].clone() if wanted[0] and not in_place else leaves[0]

    def logits(self, places: Places) -> Tensor:
        return self._rows[places]

    def add(self, gradient: Tensor, places: Places) -> None:
        if not isinstance(places, slice):  # a slice is a view
            self._rows[places] = gradient

    def gradients(self) -> Gradients:
        if self._read.rows is not None:
            masked = torch.ones(len(self._rows), dtype=torch.bool, device=self._rows.device)
            self._rows.masked_fill_(masked.index_fill_(0, self._read.rows, False)[:, None], 0)
        return (self._rows,)

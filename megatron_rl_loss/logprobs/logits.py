"""Log-probabilities and entropy of tokens, from logits whose vocabulary lies on several ranks.

Reductions are in float32 (float64 of float64 logits). Megatron's own path, `core/tensor_parallel/cross_entropy.py`,
makes log-probs alone, at temperature 1, and keeps the softmax.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, size_of
from megatron_rl_loss.core.errors import check_callable, check_choice, check_float, check_int, require
from megatron_rl_loss.logprobs import flags
from megatron_rl_loss.logprobs.choice import choose
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.kernels import KERNELS
from megatron_rl_loss.logprobs.layer import make_log_probs
from megatron_rl_loss.logprobs.of_edges import OfEdges
from megatron_rl_loss.logprobs.reading import LogProbs, Reading, TokenMask, check_rows
from megatron_rl_loss.trees.edges import Edges

#: (logits [n, vocabulary / TP], int64 labels [n], tp_group) -> log-probs, float32 [n], differentiable.
LogProbKernel = Callable[[Tensor, Tensor, Group | None], Tensor]


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor | Edges,
    *,
    tp_group: Group | None = None,
    temperature: float = 1.0,
    keep: Keep | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
    chunk_tokens: int | None = None,
    rest_without: Tensor | None = None,
    gradient_in_place: bool = False,
    kernel: LogProbKernel | str | None = None,
) -> LogProbs:
    """The log-probability of each label and, if asked, the entropy of each token's distribution; both differentiable.

    >>> log_probs, entropy = log_probs_from_logits(torch.zeros(3, 4), torch.tensor([0, 1, 3]), entropy=True)
    >>> log_probs, entropy  # log(1/4) and log(4)
    (tensor([-1.3863, -1.3863, -1.3863]), tensor([1.3863, 1.3863, 1.3863]))

    Args:
        logits: [tokens..., vocabulary / TP], float; on TP rank r the r-th part of the vocabulary.
        labels: integers [tokens...], ids in the whole vocabulary, or [tokens..., K] for K >= 1 ids per token;
            these and all further arguments are the same on all TP ranks. Or a tree's edges, as in
            `log_probs_from_hidden`, which makes no copy of logits.
        tp_group: the ranks that hold the vocabulary together; None for one.
        temperature: > 0; the sampling temperature, by which logits are divided.
        keep: ids outside have probability 0. A label always counts, even if the set lacks it. Entropy is that of the
            distribution over the kept ids. All K labels count: fill up a token with fewer labels by repeating one.
        vocab_size: ids from there on are padding, and left out; default: all columns count, as in Megatron.
        entropy: return the entropy too. Backward does no work for an entropy that no loss uses.
        token_mask: [...], bool or numbers; at 0 a token is passed over: its log-prob, entropy and gradient are 0, and
            its label may be anything. Plain torch reads it on the host, and waits for one on a device.
        chunk_tokens: tokens to work on at a time; default: all for kernels, else by the size of the vocabulary.
        rest_without: bool, in the shape of labels [..., K]. With it log-probs are [..., K + 1]: the last is the log of
            the probability of all ids but the marked ones, exact however small, for `divergence_at_ids`. Where no
            other id counts it is that of the smallest normal number, without a gradient.
        gradient_in_place: the gradient overwrites the logits, which must be a result of their own: no leaf, and not
            expanded. Autograd then refuses a second backward, and any later use of the logits that needs them.
        kernel: by default `choice.choose` takes this package's Triton kernels for logits on an NVIDIA GPU, and plain
            torch for what these lack; "torch" forces plain torch. "triton" takes the kernels without comparing them
            with plain torch at their first launch. Your own function, one of `kernels`, or its name
            makes the log-probs of plain logits, of one id per token, in this function's place.

    Raises:
        ValueError, TypeError: logits that are probabilities, as their first row shows where one rank has the
            vocabulary; a temperature that is not finite and > 0; labels of another shape, not integers or
            outside the vocabulary where the token mask is not 0; a keep-mask or token mask of another shape; a
            `vocab_size` beyond the columns; a kernel with settings that it lacks. Of values on a device the host is
            told late: by a later pass (kernels; the log-prob is NaN), or a device assertion (plain torch).
    """
    check_float("logits", logits, "Pass the output layer's result")
    check_rows("logits", logits)
    if isinstance(labels, Edges):
        of_edges = OfEdges.of(labels, logits.device, keep, token_mask, rest_without)
        values = log_probs_from_logits(
            of_edges.rows_of(logits),
            of_edges.labels,
            tp_group=tp_group,
            temperature=temperature,
            keep=of_edges.keep,
            vocab_size=vocab_size,
            entropy=entropy,
            chunk_tokens=chunk_tokens,
            rest_without=of_edges.rest_without,
            gradient_in_place=gradient_in_place,
            kernel=kernel,
        )
        return LogProbs(*map(of_edges.to_tokens, values))
    rows = logits.reshape(-1, logits.shape[-1])
    ids = labels.shape[-1] if labels.dim() == logits.dim() else 1
    if gradient_in_place and logits.requires_grad and torch.is_grad_enabled():
        _check_own(logits)
    asked = kernel if kernel is None or kernel == "triton" else "torch"
    choice = choose(rows, ids, kernel=asked, rest=rest_without is not None)
    is_checked = choice.kernels is None and not torch.compiler.is_compiling()  # kernels check it themselves
    if is_checked and size_of(tp_group) == 1 and rows.shape[1] > 1 and len(rows):
        first = rows[0].detach().float()
        require(
            ~((first > 0).all() & ((first.sum() - 1).abs() < 1e-2)),
            lambda: flags.PROBABILITIES,
            flags.PROBABILITY_RULE,
        )
    read = Reading(
        labels,
        logits.shape[:-1],
        rows.shape[1],
        tp_group,
        rows.device,
        choice,
        from_logits=True,
        temperature=temperature,
        keep=keep,
        vocab_size=vocab_size,
        entropy=entropy,
        token_mask=token_mask,
        chunk_tokens=chunk_tokens,
        rest_without=rest_without,
    )
    if chunk_tokens is not None:
        check_int("chunk_tokens", chunk_tokens, at_least=1, remedy="Leave it out for a default")
    if kernel in (None, "torch", "triton"):
        return make_log_probs(read, (rows, None, None), in_place=gradient_in_place)[0]
    settled = (temperature, keep, vocab_size, entropy, chunk_tokens, gradient_in_place, read.labels.dim())
    if settled != (1, None, None, False, None, False, 1):
        raise ValueError(
            "a kernel with a temperature, kept ids, vocab_size, entropy, chunk_tokens, gradient_in_place or K labels: "
            "other kernels make log-probs of plain logits alone. Leave the kernel out: plain torch supports them all."
        )
    if isinstance(kernel, str):
        check_choice("kernel", kernel, ["torch", "triton", *KERNELS])
        kernel = KERNELS[kernel]
    check_callable("kernel", kernel, "it must make log-probs of logits", "Pass one of logprobs.kernels")
    rows = rows if read.rows is None else rows[read.rows]
    return LogProbs(read.spread(kernel(rows, read.labels, read.tp_group).float()), None)


def _check_own(logits: Tensor) -> None:
    """Raise ValueError for logits that a gradient cannot overwrite: a leaf, or entries that share memory."""
    shares = any(size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True))
    if logits.is_leaf or shares:
        raise ValueError(
            f"gradient_in_place with logits that are {'expanded' if shares else 'a leaf'}: the gradient would "
            "overwrite values that others read. Pass the output layer's own result, or leave gradient_in_place out."
        )

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
from megatron_rl_loss.logprobs.edge_inputs import EdgeInputs
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.kernels import KERNELS
from megatron_rl_loss.logprobs.layer import make_log_probs
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
        labels: ids in the whole vocabulary [tokens...], or K of them [tokens..., K]; or a tree's edges.
        tp_group: the ranks that hold the vocabulary together; None for one. Further arguments are the same on all.
        temperature: > 0; the sampling temperature, by which logits are divided.
        keep: ids outside have probability 0; a label always counts.
        vocab_size: ids from there on are padding, and left out; default: all columns count.
        entropy: return the entropy too, of the distribution over the kept ids.
        token_mask: [...]; at 0 a token's log-prob, entropy and gradient are 0, and its label may be anything.
        chunk_tokens: tokens to work on at a time; default: all for kernels, else by the size of the vocabulary.
        rest_without: bool, as labels [..., K]: adds the log of the probability of all ids but the marked ones.
        gradient_in_place: the gradient overwrites the logits, which must be no leaf and not expanded.
        kernel: ``torch``, ``triton``, one of `kernels` by name, or your function; default: `choice.choose`.

    Raises:
        ValueError, TypeError: probabilities in the place of logits; an unusable temperature, vocabulary size or kernel;
            labels outside the vocabulary, not integers or of another shape, as masks. Of values on a device the host is
            told late, in a later pass or by a device assertion.

    docs/logprobs.md, "Functions of tensors" and "On a GPU", have each argument at length.
    """
    check_float("logits", logits, "Pass the output layer's result")
    check_rows("logits", logits)
    if isinstance(labels, Edges):
        per_edge = EdgeInputs.of(labels, logits.device, keep, token_mask, rest_without)
        values = log_probs_from_logits(
            per_edge.rows_of(logits),
            per_edge.labels,
            tp_group=tp_group,
            temperature=temperature,
            keep=per_edge.keep,
            vocab_size=vocab_size,
            entropy=entropy,
            chunk_tokens=chunk_tokens,
            rest_without=per_edge.rest_without,
            gradient_in_place=gradient_in_place,
            kernel=kernel,
        )
        return LogProbs(*map(per_edge.to_tokens, values))
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

"""From hidden states to log-probs, entropy or a whole loss, a chunk of tokens at a time.

The logits of all tokens and their gradient, [tokens, vocabulary / TP] each, are the largest tensors of a training step.
Here they never are: the output layer runs on a chunk of tokens, `logprobs` reads the chunk's logits, and they are
dropped. There are two ways back:

| function                | logits are made | for                                                                      |
|-------------------------|-----------------|--------------------------------------------------------------------------|
| `log_probs_from_hidden` | forward, again  | any loss: its gradient is known after the forward pass alone (a ratio of |
|                         | backward        | whole sequences, an auxiliary term)                                      |
| `loss_from_hidden`      | once            | losses of one token each, with weights that are known beforehand, as     |
|                         |                 | those of all our modes are: forward makes the gradient too               |

One pass is how Liger's fused linear cross-entropy and Apple's cut cross-entropy (2411.09009) work for plain
cross-entropy. It keeps the gradients of hidden states and weight from forward to backward, where they are only scaled.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_int
from megatron_rl_loss.logprobs.logits import Keep, LogProbs, Reading
from megatron_rl_loss.step.collectives import Group, if_several, size_of

# Newer names of torch's, where it has them: it warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

#: Tokens of a chunk: enough that products with the weight run at full speed.
CHUNK_TOKENS = 1024

#: (log_probs, entropy or None, **inputs), each [tokens] of a chunk -> the tokens' losses, and metrics by name.
PerTokenLoss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


class MainGradient(Protocol):
    """Takes the gradient of the weight instead of autograd, as Megatron's gradient-accumulation fusion does."""

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        """Add ``of_logits.T @ hidden``, of [tokens, vocabulary / TP] and [tokens, hidden]."""

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``scale * gradient``, a number and float32 [vocabulary / TP, hidden]."""

    def placeholder(self) -> Tensor | None:
        """What autograd is given as the gradient."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How hidden states and vocabulary lie on the ranks of a tensor-parallel group.

    Attributes:
        group: the ranks that hold the vocabulary together; None for one.
        sequence_parallel: hidden states are this rank's part of the tokens: they are gathered, and their gradient is
            summed and scattered. Else all ranks hold all tokens, and their gradient is summed.
        sum_gradient: False leaves the sum of the gradient over the ranks to the caller; without sequence parallelism.
    """

    group: Group | None = None
    sequence_parallel: bool = False
    sum_gradient: bool = True

    def gathered(self, hidden: Tensor) -> Tensor:
        """All tokens."""
        group = if_several(self.group)
        if group is None or not self.sequence_parallel:
            return hidden
        whole = hidden.new_empty(len(hidden) * group.size(), *hidden.shape[1:])
        _all_gather(whole, hidden.contiguous(), group=group)
        return whole

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradient of all tokens -> that of this rank's hidden states."""
        group = if_several(self.group)
        if group is None:
            return gradient
        if self.sequence_parallel:
            mine = gradient.new_empty(len(gradient) // group.size(), *gradient.shape[1:])
            _reduce_scatter(mine, gradient, group=group)
            return mine
        if self.sum_gradient:
            dist.all_reduce(gradient, group=group)
        return gradient


ALONE = TensorParallel()


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tensor_parallel: TensorParallel = ALONE,
    temperature: float = 1.0,
    keep: Keep | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    token_mask: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    main_gradient: MainGradient | None = None,
) -> LogProbs:
    """`log_probs_from_logits` of ``hidden @ weight.T + bias``, whose logits are never held for more than a chunk.

    Args:
        hidden: [..., hidden], float; with sequence parallelism its first dimension is this rank's part of the tokens.
        weight: [vocabulary / TP, hidden], in the dtype of `hidden`.
        labels: integers [...], of all tokens, in the order of the gathered hidden states.
        bias: [vocabulary / TP].
        tensor_parallel: how both lie on ranks.
        temperature, keep, vocab_size, entropy: as in `log_probs_from_logits`.
        token_mask: as there; tokens with 0 are not put through the output layer either.
        chunk_tokens: tokens whose logits are held at a time; the peak of memory is theirs, in float32.
        main_gradient: takes the weight's gradient. Without it, that is summed in float32 and given to autograd.

    Returns:
        `LogProbs`, differentiable towards hidden, weight and bias. Under ``torch.no_grad`` nothing is kept.

    Raises:
        ValueError, TypeError: as `log_probs_from_logits`; hidden states, weight and labels that do not fit each other.
    """
    read = _read(
        hidden, weight, bias, labels, tensor_parallel, temperature, keep, vocab_size, entropy, token_mask, chunk_tokens
    )
    head = _Head(read, tensor_parallel, chunk_tokens, main_gradient)
    return read.in_shape(*_FromHidden.apply(hidden, weight, bias, head))  # type: ignore[no-untyped-call]


class FoldedLoss(NamedTuple):
    """What one pass gives.

    Attributes:
        share: 0-dim, differentiable: the sum of weight * loss over the tokens.
        values: detached, in the shape of the labels: ``log_probs``, ``entropy`` if asked for, and the metrics; 0 where
            the token mask is.
    """

    share: Tensor
    values: dict[str, Tensor]


def loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    per_token_loss: PerTokenLoss,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    bias: Tensor | None = None,
    tensor_parallel: TensorParallel = ALONE,
    temperature: float = 1.0,
    keep: Keep | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    token_mask: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    main_gradient: MainGradient | None = None,
) -> FoldedLoss:
    """``sum_t weights[t] * loss_t`` in one pass: forward makes the gradients, backward scales them.

    A token's loss may depend on its own log-prob, entropy and inputs alone. What couples tokens (a ratio of whole
    sequences) needs `log_probs_from_hidden`. Under ``torch.no_grad`` no gradient is made.

    Args:
        hidden, weight, labels: as in `log_probs_from_hidden`.
        weights: [number of tokens], float: of `token_weights`, say. Tokens of weight 0 are ignored in the sum.
        per_token_loss: ``(log_probs, entropy, **inputs) -> (losses, metrics)``, all [tokens of a chunk]; entropy is
            None unless asked for. Its gradient is taken towards log_probs and entropy alone.
        inputs: what else it needs, a value a token, in the shape of the labels.
        entropy: whether it is made.
        token_mask: default: where `weights` are not 0. Say the loss mask to have metrics at other tokens too.
        others: as in `log_probs_from_hidden`.

    Raises:
        ValueError, TypeError: as `log_probs_from_hidden`; weights, inputs, losses or metrics of another shape.
    """
    flat = {name: one.reshape(-1) for name, one in (inputs or {}).items()}
    for name, one in {"weights": weights.reshape(-1), **flat}.items():
        if one.shape != (labels.numel(),):
            raise ValueError(
                f"{name}: {one.numel()} values for {labels.numel()} tokens: there must be one a token. Pass them "
                "unreduced, in the shape of the labels."
            )
    if token_mask is None:
        token_mask = (weights != 0).view(labels.shape)
    read = _read(
        hidden, weight, bias, labels, tensor_parallel, temperature, keep, vocab_size, entropy, token_mask, chunk_tokens
    )
    head = _Head(read, tensor_parallel, chunk_tokens, main_gradient)
    fold = _Fold(weights.detach().reshape(-1).to(hidden.device, torch.float32), per_token_loss, flat)
    share = _Folded.apply(hidden, weight, bias, head, fold)  # type: ignore[no-untyped-call]
    return FoldedLoss(share, {name: one.view(read.shape) for name, one in fold.values.items()})


def _read(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tensor_parallel: TensorParallel,
    temperature: float,
    keep: Keep | None,
    vocab_size: int | None,
    entropy: bool,
    token_mask: Tensor | None,
    chunk_tokens: int,
) -> Reading:
    check_int("chunk_tokens", chunk_tokens, at_least=1, remedy=f"The default is {CHUNK_TOKENS}")
    ranks = size_of(tensor_parallel.group) if tensor_parallel.sequence_parallel else 1
    expected = (hidden.shape[0] * ranks, *hidden.shape[1:-1])
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: for the hidden states they must be {expected}. Labels are in the "
            "order of the tokens, one each: transpose them to [s, b] where hidden states are [s, b, h]."
        )
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.dtype == weight.dtype
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = " and ".join(f"{tuple(one.shape)} ({one.dtype})" for one in (hidden, weight, bias) if one is not None)
        raise ValueError(
            f"hidden states, weight and bias of {shapes}: they must be [..., hidden], [vocabulary / TP, hidden] and "
            "[vocabulary / TP], hidden states and weight of one dtype. Cast one of them, or pass the weight as the "
            "output layer has it."
        )
    return Reading.of(
        labels, len(weight), tensor_parallel.group, temperature, keep, vocab_size, entropy, token_mask, None
    )


# --- the two functions


@dataclass(frozen=True, eq=False)
class _Head:
    """An output layer, to be run in chunks."""

    read: Reading
    parallel: TensorParallel
    chunk_tokens: int
    main_gradient: MainGradient | None

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden]."""
        return self.parallel.gathered(hidden).reshape(-1, hidden.shape[-1])

    def chunks(self) -> Iterable[tuple[slice, Tensor | slice]]:
        return self.read.chunks(self.chunk_tokens)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As Megatron's linear layers: the product in their dtype, the bias added to what that rounds to."""
    logits = hidden @ weight.t()
    return logits if bias is None else logits.add_(bias)


class _Gradients:
    """Gradients of hidden states, weight and bias, a chunk of tokens at a time."""

    def __init__(
        self, ctx: Any, head: _Head, hidden: Tensor, weight: Tensor, main_gradient: MainGradient | None
    ) -> None:
        self.weight, self._main = weight, main_gradient
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        new = torch.zeros if head.read.rows is not None else torch.empty
        self.of_hidden = new(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
        sums: dict[str, Any] = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        own = wants_weight and main_gradient is None
        self.of_weight = torch.zeros(weight.shape, **sums) if own else None
        self.of_bias = torch.zeros(len(weight), **sums) if wants_bias else None
        self._wants_weight = wants_weight

    def add(self, of_logits: Tensor, hidden: Tensor, places: Tensor | slice) -> None:
        """Add a chunk's, whose gradient of the logits is `of_logits`."""
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=self.of_bias.dtype)
        if self.of_hidden is not None and isinstance(places, slice):
            torch.mm(of_logits, self.weight, out=self.of_hidden[places])
        elif self.of_hidden is not None:
            self.of_hidden[places] = of_logits @ self.weight
        if self.of_weight is not None:
            add_product(self.of_weight, of_logits, hidden)
        elif self._wants_weight and self._main is not None:
            self._main.add_product(of_logits, hidden)


def add_product(total: Tensor, of_logits: Tensor, hidden: Tensor) -> None:
    """``total += of_logits.T @ hidden``; with other dtypes, a block of rows at a time through their own."""
    if total.dtype == hidden.dtype:
        total.addmm_(of_logits.t(), hidden)
        return
    for rows in torch.arange(len(total)).split(_PRODUCT_ROWS):
        block = slice(int(rows[0]), int(rows[-1]) + 1)
        total[block] += of_logits[:, block].t() @ hidden


#: Rows of the weight's gradient that are made in a lower precision before they are added.
_PRODUCT_ROWS = 4096


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        read, tokens = head.read, head.all_tokens(hidden)
        statistics = [read.statistics(_logits(tokens[places], weight, bias), part) for part, places in head.chunks()]
        norm, log_probs, entropy = read.combine(torch.cat(statistics, 1))
        ctx.save_for_backward(hidden, weight, bias, norm, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), None if entropy is None else read.spread(entropy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, norm, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        read, tokens = head.read, head.all_tokens(hidden)
        g, h = (None if one is None else read.gathered(one) for one in gradients)
        found = _Gradients(ctx, head, tokens, weight, head.main_gradient)
        for part, places in head.chunks():
            chunk = tokens[places]
            logits = _logits(chunk, weight, bias)
            of_entropy, of_g, of_h = (None if one is None else one[part] for one in (entropy, g, h))
            read.gradient(logits, part, norm[:, part], of_entropy, of_g, of_h, into=logits)
            found.add(logits, chunk, places)
            del logits  # before the next chunk's are made
        of_hidden = found.of_hidden
        if of_hidden is not None:
            of_hidden = head.parallel.summed(of_hidden.view(-1, *hidden.shape[1:])).view(hidden.shape)
        return of_hidden, _given(ctx, found.of_weight, weight), _in_dtype(found.of_bias, weight), None


@dataclass(eq=False)
class _Fold:
    """A weighted sum of losses of single tokens; `values` are what forward found of each token."""

    weights: Tensor
    per_token_loss: PerTokenLoss
    inputs: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def of_chunk(
        self, log_probs: Tensor, entropy: Tensor | None, places: Tensor | slice, differentiate: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], dict[str, Tensor]]:
        """The chunk's sum, its gradient towards log-probs and entropy, and what it found of each token."""
        weights = self.weights[places]
        with torch.set_grad_enabled(differentiate):
            leaves = [one.detach().requires_grad_(differentiate) for one in (log_probs, entropy) if one is not None]
            inputs = {name: one[places] for name, one in self.inputs.items()}
            losses, metrics = self.per_token_loss(leaves[0], leaves[1] if len(leaves) > 1 else None, **inputs)
            for name, one in {"the losses": losses, **metrics}.items():
                if one.shape != log_probs.shape:
                    raise ValueError(
                        f"{name}: {one.numel()} values for {len(log_probs)} tokens: there must be one a token. Pass "
                        "them unreduced, in the shape of the labels."
                    )
            total = (losses.masked_fill(weights == 0, 0) * weights).sum()
            found: list[Tensor | None] = [None, None]
            if differentiate and total.requires_grad:
                found[: len(leaves)] = torch.autograd.grad(total, leaves, allow_unused=True)
        values = {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy}) | dict(metrics)
        return total.detach(), (found[0], found[1]), {name: one.detach() for name, one in values.items()}


class _Folded(torch.autograd.Function):
    """Gradients are kept as those of `gain` times the share: small weights would vanish in float16."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, fold: _Fold) -> Tensor:
        read, tokens = head.read, head.all_tokens(hidden)
        differentiate = any(ctx.needs_input_grad[:3])
        gain = 1 / fold.weights.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny) if differentiate else None
        found = _Gradients(ctx, head, tokens, weight, None) if differentiate else None
        totals, values = [], []
        for part, places in head.chunks():
            total, of_chunk = _fold_chunk(tokens[places], weight, bias, head, fold, part, places, found, gain)
            totals.append(total)
            values.append(of_chunk)
        fold.values = {name: read.spread(torch.cat([of_chunk[name] for of_chunk in values])) for name in values[0]}
        ctx.head = head
        if found is not None:
            of_hidden = found.of_hidden
            if of_hidden is not None:
                of_hidden = head.parallel.summed(of_hidden.view(-1, *hidden.shape[1:])).view(hidden.shape)
            ctx.save_for_backward(weight, of_hidden, found.of_weight, found.of_bias, gain)
        return torch.stack(totals).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, of_hidden, of_weight, of_bias, gain = ctx.saved_tensors
        head: _Head = ctx.head
        scale = (gradient / gain).to(torch.float32)
        if of_hidden is not None:
            of_hidden = _scaled(of_hidden, scale)
        if of_weight is not None and head.main_gradient is not None:
            head.main_gradient.add_scaled(of_weight, scale)
        elif of_weight is not None:
            of_weight = _scaled(of_weight, scale)
        of_bias = None if of_bias is None else _scaled(of_bias, scale)
        return of_hidden, _given(ctx, of_weight, weight), _in_dtype(of_bias, weight), None, None


def _fold_chunk(
    chunk: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: _Head,
    fold: _Fold,
    part: slice,
    places: Tensor | slice,
    found: _Gradients | None,
    gain: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A chunk's sum and what it found of each token; its gradients are added to `found`. Its logits end here."""
    read, logits = head.read, _logits(chunk, weight, bias)
    norm, log_probs, entropy = read.combine(read.statistics(logits, part), part)
    total, gradients, values = fold.of_chunk(log_probs, entropy, places, found is not None)
    if found is not None and gain is not None and any(one is not None for one in gradients):
        of_log_probs, of_entropy = (None if one is None else one * gain for one in gradients)
        read.gradient(logits, part, norm, entropy, of_log_probs, of_entropy, into=logits)
        found.add(logits, chunk, places)
    elif found is not None and found.of_hidden is not None:
        found.of_hidden[places] = 0
    return total, values


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """In place where the dtype can hold the scale: autograd then refuses a second backward."""
    if gradient.dtype in (torch.float32, torch.float64):
        return gradient.mul_(scale)
    return (gradient * scale[None]).to(gradient.dtype)


def _given(ctx: Any, of_weight: Tensor | None, weight: Tensor) -> Tensor | None:
    """What autograd is given as the weight's gradient."""
    main: MainGradient | None = ctx.head.main_gradient
    if main is not None and ctx.needs_input_grad[1]:
        return main.placeholder()
    return _in_dtype(of_weight, weight)


def _in_dtype(gradient: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(weight.dtype)

"""From hidden states to log-probs, entropy or a whole loss, a chunk of tokens at a time.

The logits of all tokens and their gradient, [tokens, vocabulary / TP] each, are the largest tensors of a training step.
Here they never exist: the output layer runs on a chunk of tokens, `Reading` reads the chunk's logits, and they are
dropped. `log_probs_from_hidden`, for any loss, makes them again backward. `loss_from_hidden` makes them once, and their
gradient with them, for losses of single tokens whose weights are known beforehand; as Liger's fused linear
cross-entropy and Apple's cut cross-entropy (arXiv:2411.09009) do for plain cross-entropy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_callable, check_int, first_order
from megatron_rl_loss.logprobs.autocast import as_autocast, no_autocast
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.logits import LogProbs, Reading, Settings, check_labels_shape
from megatron_rl_loss.step.collectives import Group, if_several, size_of

# Where torch has the newer names, it warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

#: Tokens of a chunk: enough that products with the weight run at full speed.
CHUNK_TOKENS = 1024

#: Rows of the weight's gradient that are made in a lower precision before they are added.
_PRODUCT_ROWS = 4096

#: (log_probs, entropy or None, **inputs), each [tokens] of a chunk -> the tokens' losses, and metrics by name.
PerTokenLoss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


class MainGradient(Protocol):
    """Takes the gradient of the weight instead of autograd, as Megatron's gradient-accumulation fusion does."""

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        """Add ``of_logits.T @ hidden``, of [tokens, vocabulary / TP] and [tokens, hidden]."""

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``scale * gradient``, a number and float32 [vocabulary / TP, hidden]."""

    def placeholder(self) -> Tensor | None:
        """What autograd gets as the gradient."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How hidden states and vocabulary lie on the ranks of a tensor-parallel group.

    Attributes:
        group: the ranks that hold the vocabulary together; None for one.
        sequence_parallel: each rank has its part of the tokens' hidden states: they are gathered, and their gradient is
            summed and scattered. Otherwise all ranks have all tokens, and their gradient is summed.
        sum_gradient: False leaves the sum of the gradient over the ranks to the caller; without sequence parallelism.
    """

    group: Group | None = None
    sequence_parallel: bool = False
    sum_gradient: bool = True

    def gather(self, hidden: Tensor) -> Tensor:
        """The hidden states of all tokens, [tokens, hidden]."""
        group = if_several(self.group)
        if group is not None and self.sequence_parallel:
            mine = hidden.contiguous()
            hidden = mine.new_empty(len(mine) * group.size(), *mine.shape[1:])
            _all_gather(hidden, mine, group=group)
        return hidden.reshape(-1, hidden.shape[-1])

    def sum(self, gradient: Tensor | None, hidden: Tensor) -> Tensor | None:
        """The gradient of all tokens -> that of this rank's hidden states, in their shape."""
        if gradient is None:
            return None
        group, gradient = if_several(self.group), gradient.view(-1, *hidden.shape[1:])
        if group is not None and self.sequence_parallel:
            whole, gradient = gradient, gradient.new_empty(hidden.shape)
            _reduce_scatter(gradient, whole, group=group)
        elif group is not None and self.sum_gradient:
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
    """`log_probs_from_logits` of ``hidden @ weight.T + bias``, never with the logits of more than a chunk of tokens.

    Args:
        hidden: [..., hidden], float; with sequence parallelism its first dimension is this rank's part of the tokens.
        weight: [vocabulary / TP, hidden], in the dtype of `hidden`; inside ``torch.autocast`` both are cast as there.
        labels: integers [...], of all tokens, in the order of the gathered hidden states.
        bias: [vocabulary / TP].
        tensor_parallel: how hidden states and vocabulary lie on the ranks.
        temperature, keep, vocab_size, entropy: as in `log_probs_from_logits`.
        token_mask: as there; the output layer does not run on tokens with 0 either.
        chunk_tokens: tokens whose logits are held at a time; they, in float32, are the peak of memory.
        main_gradient: takes the weight's gradient. Without it, autograd gets that gradient, summed in float32.

    Returns:
        `LogProbs`, differentiable towards hidden, weight and bias. Under ``torch.no_grad`` nothing is kept.

    Raises:
        ValueError, TypeError: as `log_probs_from_logits`; hidden states, weight and labels that do not fit each other.
    """
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), None if bias is None else as_autocast(bias)
    settings = Settings(temperature, keep, vocab_size, entropy, token_mask)
    head = _Head(hidden, weight, bias, labels, settings, tensor_parallel, chunk_tokens, main_gradient)
    return head.read.in_shape(*_FromHidden.apply(hidden, weight, bias, head))  # type: ignore[no-untyped-call]


class FoldedLoss(NamedTuple):
    """What one pass gives.

    Attributes:
        share: 0-dim, differentiable: the sum of weight * loss over the tokens.
        values: detached, as labels: ``log_probs``, ``entropy`` if asked for, ``losses``, metrics; 0 where masked.
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

    Each token's loss may depend on its own log-prob, entropy and inputs alone. What couples tokens (a ratio of whole
    sequences) needs `log_probs_from_hidden`. Under ``torch.no_grad`` no gradient is made. `OutputHead`
    names the first NaN in the log; elsewhere ``reducer.report_not_finite(None, values["losses"], share)`` does.

    Args:
        hidden, weight, labels: as in `log_probs_from_hidden`.
        weights: one float per token, such as `token_weights`. The sum ignores tokens of weight 0, and has their dtype,
            float32 at least.
        per_token_loss: ``(log_probs, entropy, **inputs) -> (losses, metrics)``, all [tokens of a chunk]; entropy is
            None unless asked for. It is differentiated towards log_probs and entropy alone.
        inputs: what else it needs, one value per token, in the shape of the labels.
        token_mask: default: where `weights` are not 0. Pass the loss mask to have metrics at other tokens too.
        others: as in `log_probs_from_hidden`.

    Raises:
        ValueError, TypeError: as `log_probs_from_hidden`; weights, inputs, losses or metrics of another shape; a metric
            with a name that `values` has already.
    """
    check_callable("per_token_loss", per_token_loss, "it must give losses and metrics of a chunk", "Pass a function")
    inputs = {name: one.reshape(-1) for name, one in (inputs or {}).items()}
    _check_per_token({"weights": weights.reshape(-1), **inputs}, labels.numel())
    if token_mask is None:
        token_mask = (weights != 0).view(labels.shape)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), None if bias is None else as_autocast(bias)
    settings = Settings(temperature, keep, vocab_size, entropy, token_mask)
    head = _Head(hidden, weight, bias, labels, settings, tensor_parallel, chunk_tokens, main_gradient)
    leaves = (hidden, weight, bias)
    wanted = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in leaves]
    weights = weights.detach().reshape(-1).to(hidden.device, torch.promote_types(weights.dtype, torch.float32))
    with torch.no_grad():
        share, values, gradients = _fold(head, leaves, wanted, weights, per_token_loss, inputs)
    if any(wanted):
        share = _Folded.apply(*leaves, head, share, *gradients)  # type: ignore[no-untyped-call]
    return FoldedLoss(share, {name: head.read.spread(one).view(labels.shape) for name, one in values.items()})


def _check_per_token(values: Mapping[str, Tensor], tokens: int) -> None:
    for name, one in values.items():
        if one.shape != (tokens,):
            raise ValueError(
                f"{name}: {one.numel()} values for {tokens} tokens: there must be one per token. Pass them unreduced, "
                "in the shape of the labels."
            )


class _Head:
    """How an output layer runs in chunks, and where its weight's gradient goes."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: Settings,
        parallel: TensorParallel,
        chunk_tokens: int,
        main_gradient: MainGradient | None,
    ) -> None:
        check_int("chunk_tokens", chunk_tokens, at_least=1, remedy=f"The default is {CHUNK_TOKENS}")
        ranks = size_of(parallel.group) if parallel.sequence_parallel else 1
        check_labels_shape(labels, (hidden.shape[0] * ranks, *hidden.shape[1:-1]), "the hidden states")
        fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.dtype == weight.dtype
        if not fits or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = " and ".join(
                f"{tuple(one.shape)} ({one.dtype})" for one in (hidden, weight, bias) if one is not None
            )
            raise ValueError(
                f"hidden states, weight and bias of {shapes}: they must be [..., hidden], [vocabulary / TP, hidden] "
                "and [vocabulary / TP], hidden states and weight of one dtype. Cast one of them, or pass the weight as "
                "the output layer has it."
            )
        self.read = Reading(labels, len(weight), parallel.group, settings)
        self.parallel, self.chunk_tokens, self.main_gradient = parallel, chunk_tokens, main_gradient

    def weight_gradient(
        self, wanted: bool, total: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor | None:
        """What autograd gets as the weight's gradient, `total` times `scale`."""
        if not wanted or self.main_gradient is None:
            return _in_dtype(total, dtype, scale)
        if total is not None and scale is not None:
            self.main_gradient.add_scaled(total, scale)
        return self.main_gradient.placeholder()


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor | None:
    """Times `scale`; in place where the dtype can hold it: autograd then refuses a second backward."""
    if gradient is not None and scale is not None:
        exact = gradient.dtype in (torch.float32, torch.float64)
        gradient = gradient.mul_(scale) if exact else gradient * scale[None]
    return None if gradient is None else gradient.to(dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As Megatron's linear layers: the product in their dtype, the bias added to what that rounds to."""
    logits = hidden @ weight.t()
    return logits if bias is None else logits.add_(bias)


class _Gradients:
    """Sums of the gradients of hidden states, weight and bias over chunks of tokens."""

    def __init__(
        self, tokens: Tensor, weight: Tensor, wanted: Sequence[bool], main_gradient: MainGradient | None = None
    ) -> None:
        exact = torch.promote_types(weight.dtype, torch.float32)
        own = wanted[1] and main_gradient is None
        self.of_hidden = torch.zeros_like(tokens) if wanted[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=exact) if own else None
        self.of_bias = torch.zeros_like(weight[:, 0], dtype=exact) if wanted[2] else None
        self._weight, self._main = weight, main_gradient if wanted[1] else None

    def add(self, of_logits: Tensor, hidden: Tensor, places: Tensor | slice) -> None:
        """Add a chunk's, whose gradient of the logits is `of_logits`."""
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=self.of_bias.dtype)
        if self.of_hidden is not None and isinstance(places, slice):
            torch.mm(of_logits, self._weight, out=self.of_hidden[places])
        elif self.of_hidden is not None:
            self.of_hidden[places] = of_logits @ self._weight
        if self.of_weight is not None:
            add_product(self.of_weight, of_logits, hidden)
        elif self._main is not None:
            self._main.add_product(of_logits, hidden)


def add_product(total: Tensor, of_logits: Tensor, hidden: Tensor) -> None:
    """``total += of_logits.T @ hidden``; with other dtypes, a block of rows at a time through their own."""
    if total.dtype == hidden.dtype:
        total.addmm_(of_logits.t(), hidden)
        return
    for begin in range(0, len(total), _PRODUCT_ROWS):
        rows = slice(begin, begin + _PRODUCT_ROWS)
        total[rows] += of_logits[:, rows].t() @ hidden


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        read, tokens = head.read, head.parallel.gather(hidden)
        chunks = read.chunks(head.chunk_tokens)
        statistics = [read.statistics(_logits(tokens[places], weight, bias), part) for part, places in chunks]
        log_probs, norm = read.combine(torch.cat(statistics, 1))
        ctx.save_for_backward(hidden, weight, bias, norm)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), read.spread(norm[2]) if read.entropy else None

    @staticmethod
    @first_order("log_probs_from_hidden")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, norm = ctx.saved_tensors
        head: _Head = ctx.head
        read, tokens = head.read, head.parallel.gather(hidden)
        g, h = map(read.gather, gradients)
        sums = _Gradients(tokens, weight, ctx.needs_input_grad, head.main_gradient)
        with no_autocast(hidden.device):  # it may be on here alone
            for part, places in read.chunks(head.chunk_tokens):
                chunk = tokens[places]
                logits = _logits(chunk, weight, bias)
                of_g, of_h = (None if one is None else one[part] for one in (g, h))
                read.gradient(logits, part, norm[:, part], of_g, of_h, into=logits)
                sums.add(logits, chunk, places)
                del logits  # before the next chunk's are made
        of_weight = head.weight_gradient(ctx.needs_input_grad[1], sums.of_weight, weight.dtype)
        return head.parallel.sum(sums.of_hidden, hidden), of_weight, _in_dtype(sums.of_bias, weight.dtype), None


def _fold(
    head: _Head,
    leaves: tuple[Tensor, Tensor, Tensor | None],
    wanted: Sequence[bool],
    weights: Tensor,
    per_token_loss: PerTokenLoss,
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
    """The share, values of the tokens that are read, and for `_Folded`: a gain, and gradients of gain * share.

    The gain brings the largest weight to 1: small weights would vanish in float16.
    """
    hidden, weight, bias = leaves
    read, tokens, differentiate = head.read, head.parallel.gather(hidden), any(wanted)
    sums = _Gradients(tokens, weight, wanted)
    largest = torch.cat([weights.abs(), weights.new_full((1,), torch.finfo(torch.float32).tiny)]).amax()
    gain = 1 / largest if differentiate else None
    totals, values = [], []
    for part, places in read.chunks(head.chunk_tokens):
        chunk, of_loss = tokens[places], weights[places]
        logits = _logits(chunk, weight, bias)
        log_probs, norm = read.combine(read.statistics(logits, part), part)
        with torch.set_grad_enabled(differentiate):
            outputs = {"log_probs": log_probs} | ({"entropy": norm[2]} if read.entropy else {})
            outputs = {name: one.detach().requires_grad_(differentiate) for name, one in outputs.items()}
            own_inputs = {name: one[places] for name, one in inputs.items()}
            losses, metrics = per_token_loss(outputs["log_probs"], outputs.get("entropy"), **own_inputs)
            _check_per_token({"the losses": losses, **metrics}, len(log_probs))
            own = {**outputs, "losses": losses}
            if clash := sorted(own.keys() & metrics.keys()):
                raise ValueError(f"a metric named {clash[0]!r}: values have one of that name. Choose another name.")
            total = (losses.masked_fill(of_loss == 0, 0) * of_loss).sum()
        if gain is not None:
            slopes: Sequence[Tensor | None] = ()
            if total.requires_grad:
                slopes = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
            g, h, *_ = *(None if one is None else one.masked_fill(of_loss == 0, 0) * gain for one in slopes), None, None
            read.gradient(logits, part, norm, g, h, into=logits)
            sums.add(logits, chunk, places)
        del logits  # before the next chunk's are made
        totals.append(total.detach())
        values.append({name: one.detach() for name, one in {**own, **metrics}.items()})
    of_tokens = {name: torch.cat([of_chunk[name] for of_chunk in values]) for name in values[0]}
    gradients = gain, head.parallel.sum(sums.of_hidden, hidden), sums.of_weight, sums.of_bias
    return torch.stack(totals).sum(), of_tokens, gradients


class _Folded(torch.autograd.Function):
    """The share, with the gradients that `_fold` has made."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, share: Tensor, *gradients: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.head, ctx.dtype = head, weight.dtype
        return share.clone()

    @staticmethod
    @first_order("loss_from_hidden")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gain, of_hidden, of_weight, of_bias = ctx.saved_tensors
        head: _Head = ctx.head
        scale = (gradient / gain).to(torch.promote_types(ctx.dtype, torch.float32))
        of_hidden, of_bias = (_in_dtype(one, ctx.dtype, scale) for one in (of_hidden, of_bias))
        of_weight = head.weight_gradient(ctx.needs_input_grad[1], of_weight, ctx.dtype, scale)
        return of_hidden, of_weight, of_bias, *[None] * 6

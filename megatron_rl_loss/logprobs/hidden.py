"""From hidden states to log-probs, entropy or a whole loss, a chunk of tokens at a time.

The logits of all tokens and their gradient are the largest tensors of a training step. Here they never exist: the
output layer runs on a chunk of tokens, whose logits are read and dropped. `log_probs_from_hidden`, for any loss, makes
them again backward. `loss_from_hidden` makes them once, and their gradient with them, for losses of single tokens whose
weights are known beforehand; as Liger's fused linear cross-entropy and Apple's (arXiv:2411.09009) do.
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
        """Add ``of_logits.T @ hidden``."""

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``scale * gradient``."""

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
        temperature, keep, vocab_size, entropy: as in `log_probs_from_logits`.
        token_mask: as there; the output layer does not run on tokens with 0 either.
        chunk_tokens: tokens whose logits are held at a time; they, in float32, are the peak of memory.
        main_gradient: takes the weight's gradient. Without it, autograd gets that gradient, summed in float32.

    Differentiable towards hidden, weight and bias. Raises ValueError and TypeError as `log_probs_from_logits`, and for
    hidden states, weight and labels that do not fit each other.
    """
    leaves = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    settings = Settings(temperature, keep, vocab_size, entropy, token_mask)
    head = _Head(leaves, labels, settings, tensor_parallel, chunk_tokens, main_gradient)
    return head.read.in_shape(*_FromHidden.apply(head, *leaves))  # type: ignore[no-untyped-call]


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

    Each token's loss may depend on its own log-prob, entropy and inputs alone. Under ``torch.no_grad`` no gradient is
    made. `OutputHead` names the first NaN in the log; elsewhere ``reducer.report_not_finite(None, values["losses"],
    share)`` does.

    Args:
        hidden, weight, labels: as in `log_probs_from_hidden`.
        weights: one float per token, such as `token_weights`. The sum ignores tokens of weight 0, and has their dtype,
            float32 at least.
        per_token_loss: ``(log_probs, entropy, **inputs) -> (losses, metrics)``, all [tokens of a chunk], differentiated
            towards log_probs and entropy alone; entropy is None unless asked for.
        inputs: what else it needs, one value per token, in the shape of the labels.
        token_mask: default: where `weights` are not 0. Pass the loss mask to have metrics at other tokens too.
        others: as in `log_probs_from_hidden`.

    Raises ValueError and TypeError as `log_probs_from_hidden`, for weights, inputs, losses or metrics of another shape,
    and for a metric with a name that `values` has already.
    """
    check_callable("per_token_loss", per_token_loss, "it must give losses and metrics of a chunk", "Pass a function")
    inputs = {name: one.reshape(-1) for name, one in (inputs or {}).items()}
    _check_per_token({"weights": weights.reshape(-1), **inputs}, labels.numel())
    if token_mask is None:
        token_mask = (weights != 0).view(labels.shape)
    leaves = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    settings = Settings(temperature, keep, vocab_size, entropy, token_mask)
    head = _Head(leaves, labels, settings, tensor_parallel, chunk_tokens, main_gradient)
    wanted = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in leaves]
    weights = weights.detach().reshape(-1).to(hidden.device, torch.promote_types(weights.dtype, torch.float32))
    with torch.no_grad():
        share, values, gradients = _fold(head, leaves, wanted, weights, per_token_loss, inputs)
    if any(wanted):
        share = _Folded.apply(head, share, gradients, *leaves)  # type: ignore[no-untyped-call]
    return FoldedLoss(share, {name: head.read.spread(one).view(labels.shape) for name, one in values.items()})


def _check_per_token(values: Mapping[str, Tensor], tokens: int) -> None:
    for name, one in values.items():
        if one.shape != (tokens,):
            raise ValueError(
                f"{name}: {one.numel()} values for {tokens} tokens: there must be one per token. Pass them unreduced, "
                "in the shape of the labels."
            )


#: Hidden states, weight and bias, as autocast has them; or their gradients.
_Leaves = tuple[Tensor, Tensor, Tensor | None]
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Head:
    """How an output layer runs in chunks, and where its weight's gradient goes."""

    def __init__(
        self,
        leaves: _Leaves,
        labels: Tensor,
        settings: Settings,
        parallel: TensorParallel,
        chunk_tokens: int,
        main_gradient: MainGradient | None,
    ) -> None:
        check_int("chunk_tokens", chunk_tokens, at_least=1, remedy=f"The default is {CHUNK_TOKENS}")
        hidden, weight, bias = leaves
        ranks = size_of(parallel.group) if parallel.sequence_parallel else 1
        check_labels_shape(labels, (hidden.shape[0] * ranks, *hidden.shape[1:-1]), "the hidden states")
        fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.dtype == weight.dtype
        if not fits or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = " and ".join(f"{tuple(one.shape)} ({one.dtype})" for one in leaves if one is not None)
            raise ValueError(
                f"hidden states, weight and bias of {shapes}: they must be [..., hidden], [vocabulary / TP, hidden] "
                "and [vocabulary / TP], hidden states and weight of one dtype. Cast one of them, or pass the weight as "
                "the output layer has it."
            )
        self.read = Reading(labels, len(weight), parallel.group, settings)
        self.parallel, self.chunk_tokens, self.main_gradient = parallel, chunk_tokens, main_gradient

    def hand_on(
        self, gradients: _Gradients, wanted: Sequence[bool], dtype: torch.dtype, scale: Tensor | None = None
    ) -> _Gradients:
        """What autograd gets: the gradients times `scale`, the weight's elsewhere if there is a main gradient."""
        of_hidden, of_weight, of_bias = gradients
        if self.main_gradient is None or not wanted[1]:
            of_weight = _in_dtype(of_weight, dtype, scale)
        else:
            if of_weight is not None and scale is not None:
                self.main_gradient.add_scaled(of_weight, scale)
            of_weight = self.main_gradient.placeholder()
        return _in_dtype(of_hidden, dtype, scale), of_weight, _in_dtype(of_bias, dtype, scale)


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor | None:
    """Times `scale`; in place where the dtype can hold it: autograd then refuses a second backward."""
    if gradient is not None and scale is not None:
        exact = gradient.dtype in (torch.float32, torch.float64)
        gradient = gradient.mul_(scale) if exact else gradient * scale[None]
    return None if gradient is None else gradient.to(dtype)


def _sum_gradients(
    head: _Head,
    leaves: _Leaves,
    wanted: Sequence[bool],
    slopes_of: Callable[[Tensor, slice, Tensor | slice], tuple[Tensor | None, ...]],
    main_gradient: MainGradient | None = None,
) -> _Gradients:
    """Of hidden states, weight and bias, over all chunks; none are made where `slopes_of` gives none.

    It reads a chunk's logits, and gives their norm and the gradients of log-probs and entropies.
    """
    hidden, weight, bias = leaves
    tokens, exact = head.parallel.gather(hidden), torch.promote_types(weight.dtype, torch.float32)
    of_hidden = torch.zeros_like(tokens) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] and main_gradient is None else None
    of_bias = torch.zeros_like(weight[:, 0], dtype=exact) if wanted[2] else None
    for part, places in head.read.chunks(head.chunk_tokens):
        chunk = tokens[places]
        logits = chunk @ weight.t()
        if bias is not None:
            logits += bias  # to what the product rounds to, as Megatron's linear layers
        norm, g, h = slopes_of(logits, part, places)
        if norm is not None:
            head.read.gradient(logits, part, norm, g, h, into=logits)
            if of_bias is not None:
                of_bias += logits.sum(0, dtype=exact)
            if of_hidden is not None:
                of_hidden[places] = logits @ weight
            if of_weight is not None:
                add_product(of_weight, logits, chunk)
            elif main_gradient is not None and wanted[1]:
                main_gradient.add_product(logits, chunk)
        del logits  # before the next chunk's are made
    return head.parallel.sum(of_hidden, hidden), of_weight, of_bias


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
    def forward(ctx: Any, head: _Head, *leaves: Any) -> tuple[Tensor, Tensor | None]:
        read, statistics = head.read, list[Tensor]()

        def look(logits: Tensor, part: slice, _: Tensor | slice) -> tuple[None, ...]:
            statistics.append(read.statistics(logits, part))
            return None, None, None

        _sum_gradients(head, leaves, (False, False, False), look)
        log_probs, norm = read.combine(torch.cat(statistics, 1))
        ctx.save_for_backward(norm, *leaves)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return read.spread(log_probs), read.spread(norm[2]) if read.entropy else None

    @staticmethod
    @first_order("log_probs_from_hidden")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        norm, *leaves = ctx.saved_tensors
        head, (_, *wanted) = ctx.head, ctx.needs_input_grad
        g, h = map(head.read.gather, gradients)

        def slopes_of(_: Tensor, part: slice, __: Tensor | slice) -> tuple[Tensor | None, ...]:
            return norm[:, part], None if g is None else g[part], None if h is None else h[part]

        with no_autocast(norm.device):  # it may be on here alone
            found = _sum_gradients(head, leaves, wanted, slopes_of, head.main_gradient)
        return None, *head.hand_on(found, wanted, leaves[1].dtype)


def _fold(
    head: _Head,
    leaves: _Leaves,
    wanted: Sequence[bool],
    weights: Tensor,
    per_token_loss: PerTokenLoss,
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
    """The share, values of the tokens that are read, and for `_Folded`: a gain, and gradients of gain * share.

    The gain brings the largest weight to 1: small weights would vanish in float16.
    """
    read, differentiate = head.read, any(wanted)
    gain = 1 / torch.cat([weights.abs(), weights.new_full((1,), torch.finfo(torch.float32).tiny)]).amax()
    totals, values = list[Tensor](), list[dict[str, Tensor]]()

    def slopes_of(logits: Tensor, part: slice, places: Tensor | slice) -> tuple[Tensor | None, ...]:
        of_loss = weights[places]
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
        totals.append(total.detach())
        values.append({name: one.detach() for name, one in {**own, **metrics}.items()})
        slopes: Sequence[Tensor | None] = ()
        if total.requires_grad:
            slopes = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
        g, h, *_ = *(None if one is None else one.masked_fill(of_loss == 0, 0) * gain for one in slopes), None, None
        return norm if differentiate else None, g, h

    gradients = _sum_gradients(head, leaves, wanted, slopes_of)
    of_tokens = {name: torch.cat([of_chunk[name] for of_chunk in values]) for name in values[0]}
    return torch.stack(totals).sum(), of_tokens, (gain, *gradients)


class _Folded(torch.autograd.Function):
    """The share, with the gradients that `_fold` has made."""

    @staticmethod
    def forward(ctx: Any, head: _Head, share: Tensor, gradients: tuple[Tensor | None, ...], *leaves: Any) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.head, ctx.dtype = head, leaves[1].dtype
        return share.clone()

    @staticmethod
    @first_order("loss_from_hidden")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gain, *gradients = ctx.saved_tensors
        scale = (gradient / gain).to(torch.promote_types(ctx.dtype, torch.float32))
        return None, None, None, *ctx.head.hand_on(gradients, ctx.needs_input_grad[3:], ctx.dtype, scale)

"""From hidden states to log-probs, entropy, divergence or a whole loss, a chunk of tokens at a time.

The logits of all tokens and their gradient are the largest tensors of a training step. Here they never exist: the
output layer runs on a chunk of tokens, whose logits are read and dropped. `log_probs_from_hidden`, for any loss, makes
them again backward. `loss_from_hidden` makes them once, and their gradient with them, for losses of single tokens whose
weights are known beforehand; as Liger's fused linear cross-entropy and Apple's (arXiv:2411.09009) do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import size_of
from megatron_rl_loss.core.errors import check_callable, check_choice, check_float, first_order
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.logprobs.choice import choose
from megatron_rl_loss.logprobs.edge_inputs import EdgeInputs
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.kernels import run_from_hidden
from megatron_rl_loss.logprobs.layer import (
    ALONE,
    Chunks,
    Gradients,
    OutputLayer,
    WeightGradient,
    default_chunk_tokens,
    in_autocast,
    make_log_probs,
)
from megatron_rl_loss.logprobs.reading import LogProbs, Reading, TokenMask, check_rows
from megatron_rl_loss.logprobs.teacher import Comparison, Teacher, check_teacher
from megatron_rl_loss.trees.edges import Edges

#: (log_probs, entropy or None, **inputs) of a chunk's tokens -> their losses [tokens], and metrics by name.
PerTokenLoss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


class Divergence(NamedTuple):
    """Log-probs (None without labels), entropy, and per token the divergence from a teacher; as `LogProbs`."""

    log_probs: Tensor | None
    entropy: Tensor | None
    divergence: Tensor


@overload
def log_probs_from_hidden(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | Edges,
    *,
    keep: Keep | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
    rest_without: Tensor | None = None,
    kernel: str | None = None,
) -> LogProbs: ...


@overload
def log_probs_from_hidden(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | Edges | None = None,
    *,
    teacher: Teacher,
    keep: Keep | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
    rest_without: Tensor | None = None,
    kernel: str | None = None,
) -> Divergence: ...


def log_probs_from_hidden(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | Edges | None = None,
    *,
    teacher: Teacher | None = None,
    keep: Keep | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
    rest_without: Tensor | None = None,
    kernel: str | None = None,
) -> LogProbs | Divergence:
    """`log_probs_from_logits` of ``hidden @ weight.T + bias``, never with the logits of more than a chunk of tokens.

    Args:
        hidden: [tokens..., hidden], float; with sequence parallelism the first dimension is this rank's part of them.
        output_layer: its weight and bias, on this rank.
        labels: integers [...] or [..., K], of all tokens, in the order of the gathered hidden states; None for a
            divergence alone. Or the edges of a `PrefixTree`, of whose slots the hidden states are: each edge is read
            once. Then `keep` and `rest_without` are of this rank's tokens, in the order of the samples, and so are the
            results, [num_local_tokens].
        teacher: adds each token's divergence of student from teacher, by the formulas of `divergence_at_ids`, over all
            ids that count; the teacher gets no gradient. ``reverse_kl`` is infinite where the teacher's logit alone is
            -inf, ``forward_kl`` where the student's alone is. With edges the teacher is of the slots, too.
        keep, entropy, rest_without: as in `log_probs_from_logits`.
        token_mask: as there; the output layer does not run on tokens with 0 either.
        kernel: "torch" forces plain torch where `choice.choose` would take Triton kernels for the chunks' logits.
            "liger" is Liger-Kernel's in this function's place, with chunks of its own: on a GPU, for one id per token,
            without bias, kept ids, vocab_size, main_gradient and teacher.

    Returns (log_probs, entropy), and with a teacher (log_probs, entropy, divergence). Differentiable towards hidden,
    weight and bias. Raises ValueError and TypeError as `log_probs_from_logits`, and for hidden states, weight, labels
    and teacher that do not fit each other.
    """
    if teacher is not None:
        if kernel not in (None, "torch"):
            raise ValueError(
                f"kernel={kernel!r} with a teacher: a divergence reads two sets of logits, which plain torch computes. "
                "Leave kernel out."
            )
        return _with_teacher(hidden, output_layer, labels, teacher, keep, entropy, token_mask, rest_without)
    if labels is None:
        raise ValueError("no labels, and no teacher: nothing would be read of the logits. Pass labels, or a teacher.")
    if isinstance(labels, Edges):
        per_edge = EdgeInputs.of(labels, hidden.device, keep, token_mask, rest_without)
        values = log_probs_from_hidden(
            *per_edge.hidden_of(hidden, output_layer),
            per_edge.labels,
            keep=per_edge.keep,
            entropy=entropy,
            rest_without=per_edge.rest_without,
            kernel=kernel,
        )
        return LogProbs(*map(per_edge.to_tokens, values))
    read, leaves = _read(hidden, output_layer, labels, keep, entropy, token_mask, rest_without, kernel)
    if kernel not in (None, "torch", "triton"):
        return run_from_hidden(kernel, read, leaves, output_layer)
    return make_log_probs(read, leaves, output_layer.tensor_parallel, output_layer.main_gradient)[0]


def _with_teacher(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | Edges | None,
    teacher: Teacher,
    keep: Keep | None,
    entropy: bool,
    token_mask: TokenMask | None,
    rest_without: Tensor | None,
) -> Divergence:
    """The log-probs and the divergence, of the same logits; the divergence alone where there are no labels."""
    if isinstance(labels, Edges):
        check_teacher(teacher)
        per_edge = EdgeInputs.of(labels, hidden.device, keep, token_mask, rest_without)
        values = _with_teacher(
            *per_edge.hidden_of(hidden, output_layer),
            per_edge.labels,
            per_edge.teacher_of(teacher, hidden, output_layer.tensor_parallel),
            per_edge.keep,
            entropy,
            None,
            per_edge.rest_without,
        )
        return Divergence(*map(per_edge.to_tokens, values))
    read, leaves = _read(hidden, output_layer, labels, keep, entropy, token_mask, rest_without, teacher=teacher)
    comparison = _compare(read, teacher, hidden, output_layer)
    parallel, main_gradient = output_layer.tensor_parallel, output_layer.main_gradient
    (log_probs, entropies), divergence = make_log_probs(read, leaves, parallel, main_gradient, comparison)
    return Divergence(None if labels is None else log_probs, entropies, divergence)  # type: ignore[arg-type]


def loss_from_hidden(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | Edges,
    weights: Tensor,
    per_token_loss: PerTokenLoss,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    keep: Keep | None = None,
    entropy: bool = False,
    token_mask: TokenMask | None = None,
    rest_without: Tensor | None = None,
    teacher: Teacher | None = None,
    kernel: Literal["torch", "triton"] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_t weights[t] * loss_t`` in one pass: forward makes the gradients, backward scales them.

    Each token's loss may depend on its own log-prob, entropy and inputs alone. Under ``torch.no_grad`` no gradient is
    made.

    Args:
        hidden, output_layer: as in `log_probs_from_hidden`.
        labels: as there, and never None; an edge of a tree is read for each sample that asks for it, whose loss may be
            its own.
        weights: one float per token, such as `microbatch.weights`. The sum ignores tokens of weight 0, and has their
            dtype, float32 at least.
        per_token_loss: ``(log_probs, entropy, **inputs) -> (losses, metrics)``, all [tokens of a chunk], differentiated
            towards log_probs and entropy alone; entropy is None unless asked for. For labels [..., K] log_probs are
            [tokens, K].
        teacher: makes the tokens' ``divergence`` an argument of `per_token_loss` as well, and one of the values.
        inputs: further arguments of it, [...] or with further dimensions, such as a teacher's log-probs [..., K].
        token_mask: default: where `weights` are not 0, for which the host waits if they are on a device. Pass the loss
            mask to have metrics at other tokens too.
        kernel: "torch" forces plain torch.
        others: as in `log_probs_from_hidden`.

    Returns:
        The share, 0-dim, differentiable; and values, detached, 0 where masked: ``log_probs`` in the labels' shape,
        and one per token ``entropy`` if asked for, ``losses``, and the metrics.

    Raises ValueError and TypeError as `log_probs_from_hidden`, for weights, inputs, losses or metrics of another shape,
    and for a metric with a name that `values` has already.
    """
    check_callable("per_token_loss", per_token_loss, "it must give losses and metrics of a chunk", "Pass a function")
    if kernel is not None:
        check_choice("kernel", kernel, ["torch", "triton"])
    inputs = inputs or {}
    if teacher is not None and "divergence" in inputs:
        raise ValueError(
            "an input named 'divergence', with a teacher: the teacher's divergence has that name. Rename the input."
        )
    check_rows("hidden states", hidden)
    if isinstance(labels, Edges):
        per_edge = EdgeInputs.of(labels, hidden.device, keep, token_mask, rest_without, is_each_apart=True)
        _check_per_token({"weights": weights.reshape(-1)}, len(labels.token_edges))
        share, values = loss_from_hidden(
            *per_edge.hidden_of(hidden, output_layer),
            per_edge.labels,
            per_edge.edges.from_tokens(weights.reshape(-1)),
            per_token_loss,
            {
                name: per_edge.edges.from_tokens(_in_one_row(column, len(labels.token_edges)))
                for name, column in inputs.items()
            },
            keep=per_edge.keep,
            entropy=entropy,
            token_mask=np.ones(len(per_edge.edges), bool),
            rest_without=per_edge.rest_without,
            teacher=None if teacher is None else per_edge.teacher_of(teacher, hidden, output_layer.tensor_parallel),
            kernel=kernel,
        )
        return share, {name: per_edge.to_tokens(value) for name, value in values.items()}
    shape = labels.shape[: hidden.dim() - 1]
    _check_order({"weights": weights, **inputs}, shape)
    _check_per_token({"weights": weights.reshape(-1)}, shape.numel())
    inputs = {name: values.reshape(-1, *values.shape[len(shape) :]) for name, values in inputs.items()}
    _check_per_token(inputs, shape.numel(), several=True)
    token_mask = (weights != 0).view(shape) if token_mask is None else token_mask
    read, leaves = _read(hidden, output_layer, labels, keep, entropy, token_mask, rest_without, kernel, teacher)
    comparison = None if teacher is None else _compare(read, teacher, hidden, output_layer)
    needs_gradient = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves]
    exact = torch.promote_types(weights.dtype, torch.float32)
    weights = to_device(weights.detach().reshape(-1), hidden.device, exact)
    # Gradients are made of gain * share, which brings the largest weight to 1: small ones would vanish in float16.
    gain = 1 / torch.cat([weights.abs(), weights.new_full((1,), torch.finfo(torch.float32).tiny)]).amax()
    totals, values_of_chunks = list[Tensor](), list[dict[str, Tensor]]()
    with torch.no_grad():
        chunks = Chunks(output_layer.tensor_parallel, leaves, needs_gradient)
        for part, places in read.chunks():
            logits, chunk_weights = chunks.logits(places), weights[places]
            log_probs, norm = read.combine(read.statistics(logits, part), part)
            outputs = {"log_probs": log_probs} | ({"entropy": norm[2]} if entropy else {})
            if comparison:
                teacher_logits = comparison.logits(places)
                compared = comparison.compare(logits, norm, teacher_logits, part)
                outputs["divergence"] = compared[0]
            # The loss is differentiated by autograd, towards its few numbers per token; from there to the logits the
            # gradient is known, so that no graph holds logits.
            with torch.set_grad_enabled(any(needs_gradient)):
                outputs = {
                    name: output.detach().requires_grad_(any(needs_gradient)) for name, output in outputs.items()
                }
                values = _evaluate(per_token_loss, outputs, {name: column[places] for name, column in inputs.items()})
                total = (values["losses"].masked_fill(chunk_weights == 0, 0) * chunk_weights).sum()
            totals.append(total.detach())
            values_of_chunks.append({name: value.detach() for name, value in values.items()})
            if total.requires_grad:  # not where the loss of this chunk is constant
                gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
                # A token of weight 0 has no gradient, even where that of its loss is not finite: 0 * inf is NaN.
                gradients_of = {
                    name: None if gradient is None else gradient.t().masked_fill(chunk_weights == 0, 0).t() * gain
                    for name, gradient in zip(outputs, gradients, strict=True)
                }
                divergence_gradient, more = gradients_of.get("divergence"), None
                if comparison and divergence_gradient is not None:
                    more = comparison.slopes(logits, norm, teacher_logits, compared, divergence_gradient, part)
                value_gradients = gradients_of["log_probs"], gradients_of.get("entropy")
                read.differentiate(logits, part, norm, *value_gradients, into=logits, more=more)
                chunks.add(logits, places)
            # Before the next chunk's are made: two chunks of logits at a time would double the peak of memory.
            logits = teacher_logits = more = None  # type: ignore[assignment]
        share = torch.stack(totals).sum()
    if any(needs_gradient):
        leaf_gradients = gain, *chunks.gradients(read)
        share = _Folded.apply(share, leaf_gradients, output_layer.main_gradient, *leaves)
    names = values_of_chunks[0]
    return share, {name: read.spread(torch.cat([values[name] for values in values_of_chunks])) for name in names}


def _in_one_row(column: Tensor, tokens: int) -> Tensor:
    """[1, tokens, ...] -> [tokens, ...]; other columns as they are."""
    return column[0] if column.dim() > 1 and column.shape[:2] == (1, tokens) else column


def _evaluate(per_token_loss: PerTokenLoss, outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of a chunk's tokens by name: the outputs, their losses, and metrics; ValueError for unusable ones."""
    divergence = {name: output for name, output in outputs.items() if name == "divergence"}
    losses, metrics = per_token_loss(outputs["log_probs"], outputs.get("entropy"), **inputs, **divergence)
    _check_per_token({"the losses": losses, **metrics}, len(outputs["log_probs"]))
    values = {**outputs, "losses": losses}
    if clash := sorted(values.keys() & metrics.keys()):
        raise ValueError(f"a metric named {clash[0]!r}: values have that name already. Choose another name.")
    return {**values, **metrics}


def _check_order(columns: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise ValueError for values [b, s] with labels [s, b]: end to end, values would belong to other tokens."""
    for name, column in columns.items():
        if len(shape) > 1 and column.shape[: len(shape)] == shape[::-1] != shape and 1 not in shape:
            raise ValueError(
                f"{name} of shape {tuple(column.shape)} for labels of tokens {tuple(shape)}: both must have one order "
                "of tokens. Transpose the first."
            )


def _check_per_token(columns: Mapping[str, Tensor], tokens: int, several: bool = False) -> None:
    """Raise ValueError unless values are [tokens], or, with `several`, [tokens, ...]."""
    for name, column in columns.items():
        if column.shape[:1] != (tokens,) or (column.dim() > 1 and not several):
            raise ValueError(
                f"{name} of {column.numel()} values for {tokens} tokens: each token must have one. Pass unreduced "
                "values, in the order of the labels."
            )


def _read(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor | None,
    keep: Keep | None,
    entropy: bool,
    token_mask: TokenMask | None,
    rest_without: Tensor | None,
    kernel: str | None = None,
    teacher: Teacher | None = None,
) -> tuple[Reading, list[Tensor | None]]:
    """The tokens to read, and the leaves as autocast casts them; ValueError where these do not fit each other."""
    if not isinstance(output_layer, OutputLayer):
        raise TypeError(
            f"output_layer is a {type(output_layer).__name__}: it must be an OutputLayer. Pass OutputLayer(weight), "
            "with bias, temperature and the like as its keywords."
        )
    check_float("hidden", hidden, "Pass the hidden states of the last layer")
    check_rows("hidden states", hidden)
    leaves = [in_autocast(leaf) for leaf in (hidden, output_layer.weight, output_layer.bias)]
    assert leaves[0] is not None
    _check_leaves(leaves)
    parallel, columns = output_layer.tensor_parallel, len(output_layer.weight)
    ranks = size_of(parallel.group) if parallel.sequence_parallel else 1
    shape = (hidden.shape[0] * ranks, *hidden.shape[1:-1])
    ids = 0 if labels is None else labels.shape[-1] if labels.dim() > len(shape) else 1
    wanted = kernel if kernel is None or kernel == "triton" else "torch"
    choice = choose(leaves[0], ids, kernel=wanted, rest=rest_without is not None, teacher=teacher is not None)
    read = Reading(
        labels,
        shape,
        columns,
        parallel.group,
        hidden.device,
        choice,
        from_logits=False,
        temperature=output_layer.temperature,
        keep=keep,
        vocab_size=output_layer.vocab_size,
        entropy=entropy,
        token_mask=token_mask,
        chunk_tokens=output_layer.chunk_tokens or default_chunk_tokens(hidden.device),
        rest_without=rest_without,
    )
    return read, leaves


def _check_leaves(leaves: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless shapes and dtypes of hidden states, weight and bias fit."""
    hidden, weight, *biases = (leaf for leaf in leaves if leaf is not None)
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.dtype == weight.dtype
    if not fits or any(bias.shape != weight.shape[:1] for bias in biases):
        shapes = " and ".join(f"{tuple(leaf.shape)} ({leaf.dtype})" for leaf in (hidden, weight, *biases))
        raise ValueError(
            f"hidden states, weight and bias of {shapes}: they must be [..., hidden], [vocabulary / TP, hidden] and "
            "[vocabulary / TP], hidden states and weight float, of one dtype. Cast one of them, or pass the output "
            "layer's own weight."
        )


def _compare(read: Reading, teacher: Teacher, hidden: Tensor, output_layer: OutputLayer) -> Comparison:
    """The teacher beside a student's hidden states; ValueError for other tokens or another vocabulary shard."""
    check_teacher(teacher)
    tensors = teacher.hidden, teacher.weight, teacher.bias
    leaves = [tensor if tensor is None else in_autocast(tensor.detach()) for tensor in tensors]
    columns, shape, ids, is_part = len(output_layer.weight), teacher.hidden.shape[:-1], teacher.hidden.shape[-1], False
    if teacher.weight is not None:
        _check_leaves(leaves)
        ids, is_part = len(teacher.weight), shape == hidden.shape[:-1]
    if ids != columns or not (is_part or shape == read.shape):
        raise ValueError(
            f"a teacher of {ids} ids on this rank for tokens {tuple(shape)}: the student has {columns} ids and "
            f"tokens {tuple(read.shape)}. Cut the teacher's vocabulary and tokens as the student's are."
        )
    # Hidden states of a sequence-parallel part are gathered as the student's; logits of all tokens lie here already.
    return Comparison(read, teacher, Chunks(output_layer.tensor_parallel if is_part else ALONE, leaves).logits)


class _Folded(torch.autograd.Function):
    """The share, with a gain and the gradients of gain * share."""

    @staticmethod
    def forward(
        ctx: Any, share: Tensor, gradients: Sequence[Tensor | None], main: WeightGradient | None, *leaves: Any
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.main = main
        return share.clone()

    @staticmethod
    @first_order("loss_from_hidden")
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        gain, *gradients = ctx.saved_tensors
        scale = (gradient / gain)[None]
        for leaf_gradient in gradients:
            if leaf_gradient is not None:
                # Rounded once: one factor, of one dimension, so that torch multiplies in the wider dtype of both. In
                # place, which spares a copy of the weight's gradient; autograd then refuses a second backward.
                torch.mul(leaf_gradient, scale, out=leaf_gradient)
        hidden_gradient, weight_gradient, bias_gradient = gradients
        if weight_gradient is not None and ctx.main is not None:
            ctx.main.total.add_(weight_gradient)
            weight_gradient = ctx.main.for_autograd()
        return None, None, None, hidden_gradient, weight_gradient, bias_gradient

"""The output layer of a Megatron model, run in chunks of tokens in the place of the layer itself.

    head = OutputHead(temperature=1.0, entropy=True)
    log_probs, entropy = head(model, tokens, positions, None, labels=labels)  # [b, s] each

The models of every Megatron (GPT, Hybrid, Mamba) end with the same two calls on the last pipeline stage: that of
``self.output_layer``, and that of ``self.compute_language_model_loss`` on its logits. For one call of the model the
head stands in the place of both (`_Call`): it runs where the layer runs, so between the layer's own hooks, and the
model returns its values as it would return losses. `logprobs.hidden` follows the settings of the output layer
(`core/tensor_parallel/layers.py`). MuP's scale of logits is folded into the temperature.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl_loss.core.errors import check_int
from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.microbatch import Microbatch, Summed
from megatron_rl_loss.logprobs.hidden import PerTokenLoss, log_probs_from_hidden, loss_from_hidden
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.layer import OutputLayer, WeightGradient
from megatron_rl_loss.logprobs.teacher import Teacher, check_teacher
from megatron_rl_loss.megatron.flags import has_cuda_graphs
from megatron_rl_loss.megatron.versions import has_plain_forward, remat_size
from megatron_rl_loss.trees.edges import Edges


@dataclass(frozen=True)
class Tokens:
    """The ``context`` of a call of an `OutputHead` that needs more of a micro-batch than the labels.

    Attributes:
        mask: [b, s], or flat in that order: tokens with 0 are skipped; their log-prob and entropy are 0. Best on the
            host, as ``microbatch.tokens.mask`` is: the host waits for a mask on a device.
        keep: bool [b, s, vocabulary / TP], or `KeptIds` in the order of [s, b]: the ids that sampling kept.
        teacher: makes the head return (log_probs, entropy, divergence). The teacher's hidden states are
            [b, s, teacher width], such as ``microbatch.local(column)``, or this rank's part of s under sequence
            parallelism.
        rest_without: bool [b, s, K], of labels [b, s, K], as in `log_probs_from_logits`.
    """

    mask: Tensor | Array | None = None
    keep: Keep | None = None
    teacher: Teacher | None = None
    rest_without: Tensor | None = None


@dataclass(frozen=True)
class Folded:
    """A ``context`` that computes the loss in the same pass: the head returns (summed, values).

    Give Megatron ``microbatch.loss(summed, values)``.

    Attributes:
        microbatch: aggregates the losses as its step asks.
        per_token_loss, inputs: as in `loss_from_hidden`; inputs are [b, s] or [b, s, ...].
        mask, keep, teacher, rest_without: as in `Tokens`; the default mask is the loss mask.
    """

    microbatch: Microbatch
    per_token_loss: PerTokenLoss
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    _: KW_ONLY
    mask: Tensor | Array | None = None
    keep: Keep | None = None
    teacher: Teacher | None = None
    rest_without: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The output layer of a Megatron model that holds the logits of one chunk of tokens at a time.

    ``head(model, ..., labels=labels)`` calls the model. With labels [b, s] it returns (log_probs, entropy), float32 [b,
    s], for the labels that this context-parallel rank holds; with labels [b, s, K] the log-probs are [b, s, K]. With a
    tree's edges for labels (``tree.edges(microbatch.tokens)``) both are of samples' tokens, [num_local_tokens]; what a
    context has beside them is in that order. Without ``entropy=True`` the entropy is None. With ``context=Folded(...)``
    it returns (share, values) of `loss_from_hidden`, without losses. Other pipeline stages return their hidden states.
    Nothing is read back from a device, and the model is as before after the call, also after an error inside.

    Attributes:
        chunk_tokens, temperature, vocab_size: as in `OutputLayer`.
        entropy, kernel: as in `log_probs_from_hidden`.

    Raises:
        ValueError: in a call, an output layer that does more than Megatron's ColumnParallelLinear, also by a hook; a
            model that calls its output layer otherwise, or replays CUDA graphs; a kernel with unsupported inputs.
    """

    chunk_tokens: int | None = None
    temperature: float = 1.0
    entropy: bool = False
    vocab_size: int | None = None
    kernel: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None:
            check_int("chunk_tokens", self.chunk_tokens, at_least=1, remedy="Leave it out for a default")

    def __call__(
        self,
        model: Any,
        *args: Any,
        labels: Tensor | Edges | None,
        context: Tokens | Folded | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``model(*args, labels=labels, **kwargs)`` with this head in the place of its output layer.

        The model may be wrapped, as by Megatron's DDP. Hidden states of other pipeline stages pass unchanged.
        """
        inner = unwrap_model(model)
        check_model(inner)
        if not inner.post_process:
            return model(*args, labels=labels, **kwargs)
        call = _Call(self, inner, labels, context or Tokens())
        with (
            _in_place_of(inner.output_layer, "forward", call.forward),
            _in_place_of(inner, "compute_language_model_loss", call.loss),
        ):
            values = model(*args, labels=labels, **kwargs)
        call.check_finished()
        return values

    def values(
        self, hidden_states: Tensor, output_layer: Any, weight: Tensor, labels: Tensor | Edges, context: Tokens | Folded
    ) -> tuple[Tensor | None, ...] | tuple[Summed, dict[str, Tensor]]:
        """What the head returns, of hidden states [s, b, h], or [s / TP, b, h] under sequence parallelism."""
        config, mask, is_tree = output_layer.config, context.mask, isinstance(labels, Edges)
        if isinstance(context, Folded) and mask is None and not is_tree:
            mask = context.microbatch.tokens.mask
        keep, teacher = context.keep, context.teacher
        is_foreign = self.kernel not in (None, "torch", "triton")
        if is_foreign and (teacher is not None or isinstance(context, Folded)):
            raise ValueError(
                f"OutputHead(kernel={self.kernel!r}) with a teacher or Folded: a kernel computes log-probs and entropy "
                "only. Leave the kernel out, or the teacher and Folded."
            )
        if teacher is not None:
            check_teacher(teacher)
            its_temperature = self.temperature if teacher.temperature is None else teacher.temperature
            teacher = replace(teacher, hidden=teacher.hidden.transpose(0, 1), temperature=its_temperature)
        # Megatron's own layer adds the gradient to `main_grad` under the same two conditions.
        fused = output_layer.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        # MuP multiplies the logits by a number; Megatron has it from 0.17 on.
        mup = config.mup_output_mult if getattr(config, "use_mup", False) else 1.0
        layer = OutputLayer(
            weight,
            output_layer.bias,
            tp_group=output_layer.tp_group,
            sequence_parallel=output_layer.sequence_parallel,
            sum_gradient=not output_layer.disable_grad_reduce,
            temperature=self.temperature / mup,
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            main_gradient=FusedMainGradient(weight) if fused else None,
        )
        # Megatron's hidden states are [s, b, h], its labels [b, s]; the functions below take one order of tokens.
        # What goes with a tree's edges is of this rank's tokens, in the order of the samples.
        turned: Callable[[Any], Any] = lambda values: values if is_tree else values.transpose(0, 1)  # noqa: E731
        batch: Any = (-1,) if isinstance(labels, Edges) else labels.shape[:2]
        labels = turned(labels)
        reading: dict[str, Any] = {
            "keep": turned(keep) if isinstance(keep, Tensor) and keep.dim() == 3 else keep,
            "entropy": self.entropy,
            "token_mask": None if mask is None else mask.reshape(batch).T,
            "rest_without": None if context.rest_without is None else turned(context.rest_without),
        }
        if not isinstance(context, Folded):
            values: tuple[Tensor | None, ...]
            if teacher is None:
                values = log_probs_from_hidden(hidden_states, layer, labels, kernel=self.kernel, **reading)
            else:
                values = log_probs_from_hidden(hidden_states, layer, labels, teacher=teacher, **reading)
            return tuple(None if value is None else turned(value) for value in values)
        weights = context.microbatch.weights_on(hidden_states.device).view(batch).t()
        inputs = dict(context.inputs)
        if not is_tree:
            inputs = {name: turned(column.reshape(*batch, *column.shape[2:])) for name, column in inputs.items()}
        loss_of = context.per_token_loss
        kernel: Any = self.kernel
        share, by_name = loss_from_hidden(
            hidden_states, layer, labels, weights, loss_of, inputs, teacher=teacher, kernel=kernel, **reading
        )
        by_name = {name: turned(value) for name, value in by_name.items()}
        return context.microbatch.summed(share, by_name.pop("losses")), by_name


class _Call:
    """One call of a model whose output layer is a head: the layer's forward pass, and the loss of its logits.

    Multi-token prediction calls both first, as often as it has depths, and gets the model's own.
    """

    def __init__(self, head: OutputHead, model: Any, labels: Tensor | Edges | None, context: Tokens | Folded) -> None:
        if labels is None:
            raise ValueError(
                "an OutputHead called without labels: the head computes log-probs of labels. Pass labels=..., or call "
                "the model itself for logits."
            )
        depths = model.config.mtp_num_layers or 0
        if depths and (isinstance(labels, Edges) or labels.dim() != 2):
            shown = "of a tree's edges" if isinstance(labels, Edges) else list(labels.shape)
            raise ValueError(
                f"an OutputHead with labels {shown} on a model of multi-token prediction: its losses take "
                "one label of each token. Pass labels [b, s]."
            )
        self._head, self._labels, self._context = head, labels, context
        self._layer, self._layer_forward = model.output_layer, model.output_layer.forward
        self._loss_of_logits = model.compute_language_model_loss
        self._calls_before = depths
        self._values: Any = None

    def forward(self, input_: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """In the place of the layer's."""
        if self._calls_before > 0:
            self._calls_before -= 1
            return self._layer_forward(input_, weight, *args, **kwargs)
        if self._values is not None:
            raise ValueError(
                "an OutputHead on a model that calls its output layer more than 1 + mtp_num_layers times: the head "
                "takes the last for that of the policy. Call the model itself (in the example: --log-probs stock)."
            )
        weight = self._layer.weight if weight is None else weight
        self._values = self._head.values(input_, self._layer, weight, self._labels, self._context)
        if kwargs.get("output_cross_entropy_loss"):  # of Megatron's dev, whose layer computes the loss itself
            return self._values
        # The values themselves, so that hooks of a wrapper find what backward begins with; MuP scales the first.
        first, *rest = self._values
        return first.share if isinstance(first, Summed) else first, rest

    def loss(self, labels: Tensor, logits: Tensor) -> Any:
        """In the place of the model's."""
        return self._loss_of_logits(labels, logits) if self._values is None else self._values

    def check_finished(self) -> None:
        """Reject a model that returned something else than the head's values."""
        if self._values is None:
            raise ValueError(
                "an OutputHead on a model that called its output layer no more than mtp_num_layers times: the head "
                "takes the next call for that of the policy. Call the model itself (in the example: --log-probs stock)."
            )


@contextmanager
def _in_place_of(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """One object's method is another one inside the ``with``."""
    if name in vars(owner):
        raise ValueError(
            f"an OutputHead where {name} of {type(owner).__name__} is replaced already: the head would undo it. "
            "Call one head at a time, or the model itself."
        )
    vars(owner)[name] = method
    try:
        yield
    finally:
        del vars(owner)[name]


def check_model(model: Any) -> None:
    """Reject what the head cannot serve before the model is called: an error inside leaves the other stages waiting."""
    if not hasattr(model, "post_process") or not hasattr(model, "compute_language_model_loss"):
        raise ValueError(
            f"an OutputHead on a {type(model).__name__}: the head takes the place of the output layer of a language "
            "model of Megatron, such as GPTModel or HybridModel. Pass that part of your model (such as its "
            "language_model), or call log_probs_from_hidden on its hidden states."
        )
    if getattr(model.config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "an OutputHead with --overlap-moe-expert-parallel-comm: its schedule runs the layers of a model after the "
            "call in which the head stands. Drop the flag, or call the model itself (in the example: --log-probs "
            "stock)."
        )
    if has_cuda_graphs(model.config):
        raise ValueError(
            "an OutputHead on a model with CUDA graphs of its layers (--cuda-graph-impl): a graph replays what was "
            "captured instead of calling what stands in a layer's place, and the two were never run together. Give "
            "--cuda-graph-impl none, or call the model itself (in the example: --log-probs stock)."
        )
    if model.post_process:
        own = model.output_layer.weight  # None where it is the embedding's
        check_layer(model.output_layer, model.shared_embedding_or_output_weight() if own is None else own)


def check_layer(output_layer: Any, weight: Tensor) -> None:
    """Reject output layers that do more than the chunked head."""
    config, fused = output_layer.config, output_layer.gradient_accumulation_fusion
    hooks = [*output_layer._forward_hooks.values(), *output_layer._backward_hooks.values()]
    hooks += output_layer._backward_pre_hooks.values()
    refused = {
        type(output_layer).__name__: not has_plain_forward(output_layer),
        "one whose weight is sharded further (GTP)": remat_size(output_layer) > 1,
        "one with defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "one with skip_bias_add": output_layer.skip_bias_add and output_layer.bias is not None,
        "one under CPU offloading": config.cpu_offloading,
        "one of Megatron-FSDP with gradient-accumulation fusion": fused and hasattr(weight, "__fsdp_param__"),
        # Megatron-FSDP's own hook that is let through frees memory, and changes nothing.
        "one with a forward or backward hook": any(
            getattr(hook, "__name__", "") != "_release_module_fp8_transpose_cache" for hook in hooks
        ),
    }
    for layer, is_present in refused.items():
        if is_present:
            raise _other_layer(layer)


def _other_layer(layer: str) -> ValueError:
    return ValueError(
        f"an OutputHead on an unsupported output layer, {layer}: the head replaces Megatron's plain "
        "ColumnParallelLinear alone. Call the model itself (in the example: --log-probs stock)."
    )


class FusedMainGradient(WeightGradient):
    """Adds the weight's gradient to `weight.main_grad`, with Megatron's kernel if it is installed."""

    def __init__(self, weight: Any) -> None:
        super().__init__(weight.main_grad)
        self._weight = weight

    def add_product(self, logits_gradient: Tensor, hidden: Tensor) -> None:
        kernel = getattr(layers, "fused_weight_gradient_mlp_cuda", None) if self.total.is_cuda else None
        # torch adds a product of the sum's own dtype in place; only for another one is Megatron's kernel needed.
        if kernel is None or hidden.dtype == self.total.dtype:
            super().add_product(logits_gradient, hidden)
        elif self.total.dtype == torch.float32:
            kernel.wgrad_gemm_accum_fp32(hidden, logits_gradient, self.total)
        else:
            kernel.wgrad_gemm_accum_fp16(hidden, logits_gradient, self.total)

    def for_autograd(self) -> Tensor | None:
        """A gradient that triggers the hooks of `DistributedDataParallel`; zeros if Megatron would add it."""
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        new = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return new(weight.shape, dtype=weight.dtype, device=weight.device)

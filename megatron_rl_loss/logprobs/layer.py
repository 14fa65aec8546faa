"""Logits of a chunk of tokens, by an output layer or given; and the way of their gradient back to its leaves."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import (
    Group,
    all_gather_single,
    reduce_in_place,
    reduce_scatter_single,
    size_of,
)
from megatron_rl_loss.core.errors import check_float, check_int, first_order
from megatron_rl_loss.logprobs.reading import LogProbs, Places, Reading
from megatron_rl_loss.logprobs.teacher import Comparison

logger = logging.getLogger(__name__)

#: Tokens of a chunk: enough that products with the weight run at full speed. Each chunk adds its part of the weight's
#: gradient, which moves 8 bytes per weight: on a GPU, products of fewer tokens would wait for memory.
HOST_CHUNK, DEVICE_CHUNK = 1024, 4096

#: Why no product of this process adds to another dtype.
_narrow: list[str] = []

#: Rows of the weight's gradient that are made in a lower precision before they are added.
_PRODUCT_ROWS = 4096

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The layout of hidden states and vocabulary on the ranks of a tensor-parallel group; attributes: `OutputLayer`."""

    group: Group | None = None
    sequence_parallel: bool = False
    sum_gradient: bool = True

    def gather(self, hidden: Tensor) -> Tensor:
        """The hidden states of all tokens, [tokens, hidden]."""
        if self.sequence_parallel and self.group is not None and size_of(self.group) > 1:
            mine = hidden.contiguous()
            hidden = mine.new_empty(len(mine) * size_of(self.group), *mine.shape[1:])
            all_gather_single(hidden, mine, group=self.group)
        return hidden.reshape(-1, hidden.shape[-1])

    def sum(self, gradient: Tensor, hidden: Tensor) -> Tensor:
        """The gradient of all tokens -> that of this rank's hidden states, in their shape."""
        gradient = gradient.view(-1, *hidden.shape[1:])
        if self.group is None or size_of(self.group) == 1:
            return gradient
        if self.sequence_parallel:
            whole, gradient = gradient, gradient.new_empty(hidden.shape)
            reduce_scatter_single(gradient, whole, self.group)
        elif self.sum_gradient:
            reduce_in_place(gradient, self.group)
        return gradient


ALONE = TensorParallel()


class WeightGradient:
    """The sum of the weight's gradient over chunks, in `total`.

    As ``main_gradient`` it takes that gradient instead of autograd, like Megatron's gradient-accumulation fusion.
    """

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add_product(self, logits_gradient: Tensor, hidden: Tensor) -> None:
        """``total += logits_gradient.T @ hidden``; with other dtypes, a block of rows at a time through their own."""
        if self.total.dtype == hidden.dtype:
            self.total.addmm_(logits_gradient.t(), hidden)
            return
        if (
            self.total.is_cuda
            and self.total.dtype == torch.float32
            and add_wider(self.total, logits_gradient.t(), hidden)
        ):
            return
        # A block at a time, the product before the sum needs no second tensor of the weight's size.
        for begin in range(0, len(self.total), _PRODUCT_ROWS):
            rows = slice(begin, begin + _PRODUCT_ROWS)
            self.total[rows] += logits_gradient[:, rows].t() @ hidden

    def for_autograd(self) -> Tensor | None:
        """The gradient that autograd gets: the sum, unless it stays here."""
        return self.total


@dataclass(frozen=True)
class OutputLayer:
    """The model's output layer, and how its logits are read: what all functions of hidden states take.

    Attributes:
        weight: [vocabulary / TP, hidden], in the dtype of the hidden states; inside ``torch.autocast`` both are cast as
            there.
        bias: [vocabulary / TP].
        tp_group: the ranks that hold the vocabulary together; None for one.
        sequence_parallel: each rank has its part of the tokens' hidden states: they are gathered, and their gradient is
            summed and scattered. Otherwise all ranks have all tokens, and their gradient is summed.
        sum_gradient: False leaves the sum of the gradient over the ranks to the caller; without sequence parallelism.
        temperature, vocab_size: as in `log_probs_from_logits`.
        chunk_tokens: tokens whose logits are held at a time; they are the peak of memory (in plain torch with scratch
            in float32). Default: 1024 on a host, 4096 on a GPU.
        main_gradient: takes the weight's gradient. Without it, autograd gets that gradient, summed in float32.

    Raises TypeError for a weight or a bias that is no float tensor, and ValueError for chunks without a token.
    """

    weight: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    tp_group: Group | None = None
    sequence_parallel: bool = False
    sum_gradient: bool = True
    temperature: float = 1.0
    vocab_size: int | None = None
    chunk_tokens: int | None = None
    main_gradient: WeightGradient | None = None

    def __post_init__(self) -> None:
        check_float("the output layer's weight", self.weight, "Pass layer.weight")
        if self.bias is not None:
            check_float("the output layer's bias", self.bias, "Pass layer.bias, or leave it out")
        if self.chunk_tokens is not None:
            check_int("chunk_tokens", self.chunk_tokens, at_least=1, remedy="Leave it out for a default")

    @property
    def tensor_parallel(self) -> TensorParallel:
        """How hidden states and vocabulary lie on ranks."""
        return TensorParallel(
            group=self.tp_group, sequence_parallel=self.sequence_parallel, sum_gradient=self.sum_gradient
        )


class Chunks:
    """The output layer on chunks of the gathered hidden states, and the sums of the gradients that are wanted.

    Leaves are hidden states, weight and bias; without a weight, the hidden states are the logits. `skips`: some tokens
    may be in no chunk, and their gradient is 0. `is_one`: there is one chunk, so that nothing is summed.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        leaves: Sequence[Any],
        wanted: Sequence[bool] = (False, False, False),
        main_gradient: WeightGradient | None = None,
        in_place: bool = False,
        skips: bool = True,
        is_one: bool = False,
    ) -> None:
        self._hidden, self._weight, self._bias = leaves
        self._parallel, self._tokens, self._in_place = parallel, parallel.gather(self._hidden), in_place
        # Sums over chunks: in bfloat16 a sum of many equal terms stops growing at 256 of them.
        exact = torch.promote_types(self._tokens.dtype, torch.float32)
        self._hidden_gradient = self._bias_gradient = None
        self._weight_gradient = main_gradient if wanted[1] else None
        self._dtype_of_weight = (self._weight.dtype if is_one else exact) if wanted[1] else None
        if wanted[0]:
            new = torch.zeros_like if skips else torch.empty_like
            self._hidden_gradient = self._tokens if in_place else new(self._tokens)
        if wanted[2]:
            self._bias_gradient = torch.zeros_like(self._weight[:, 0], dtype=exact)

    def logits(self, places: Places) -> Tensor:
        tokens = self._tokens[places]
        if self._weight is None:
            return tokens
        # The leaves are cast already (`in_autocast`); backward may run outside the autocast of forward, or inside one.
        with _no_autocast(tokens.device):
            logits: Tensor = tokens @ self._weight.t()
            return logits if self._bias is None else logits.add_(self._bias)  # rounded as in Megatron's linear layers

    def target(self, logits: Tensor, places: Places) -> Tensor:
        """A tensor for the gradient of these logits."""
        # Of given logits, a slice of the gradient that is returned: no copy is made. Places by index are a copy anyway.
        is_view = self._weight is None and isinstance(places, slice)
        return self._hidden_gradient[places] if is_view and self._hidden_gradient is not None else logits

    def add(self, gradient: Tensor, places: Places) -> None:
        """Take the gradient that was written into the target."""
        with _no_autocast(gradient.device):
            if self._bias_gradient is not None:
                self._bias_gradient += gradient.sum(0, dtype=self._bias_gradient.dtype)
            if self._weight_gradient is not None:
                self._weight_gradient.add_product(gradient, self._tokens[places])
            elif self._dtype_of_weight is not None:  # written, not added to zeros
                self._weight_gradient = WeightGradient(product(gradient, self._tokens[places], self._dtype_of_weight))
            if self._hidden_gradient is not None and self._weight is not None and isinstance(places, slice):
                torch.mm(gradient, self._weight, out=self._hidden_gradient[places])
            elif self._hidden_gradient is not None and self._weight is not None:
                self._hidden_gradient[places] = gradient @ self._weight
            elif self._hidden_gradient is not None and isinstance(places, Tensor):
                self._hidden_gradient[places] = gradient

    def gradients(self, read: Reading) -> Gradients:
        hidden_gradient = self._hidden_gradient
        # In place the gradient's tensor is that of the logits, which still stand where no token was read.
        if hidden_gradient is not None and self._in_place and read.rows is not None:
            skipped = torch.ones(len(hidden_gradient), dtype=torch.bool, device=hidden_gradient.device)
            hidden_gradient.masked_fill_(skipped.index_fill_(0, read.rows, False)[:, None], 0)
        hidden_gradient = None if hidden_gradient is None else self._parallel.sum(hidden_gradient, self._hidden)
        if self._weight_gradient is None and self._dtype_of_weight is not None:  # no chunk had a gradient
            self._weight_gradient = WeightGradient(torch.zeros_like(self._weight, dtype=self._dtype_of_weight))
        return (
            hidden_gradient,
            None if self._weight_gradient is None else self._weight_gradient.for_autograd(),
            self._bias_gradient,
        )


def make_log_probs(
    read: Reading,
    leaves: Sequence[Tensor | None],
    parallel: TensorParallel = ALONE,
    main_gradient: WeightGradient | None = None,
    comparison: Comparison | None = None,
    in_place: bool = False,
) -> tuple[LogProbs, Tensor | None]:
    """Log-probs and divergence of all tokens; logits are made a chunk at a time, and again backward."""
    chunks = partial(Chunks, parallel, main_gradient=main_gradient, in_place=in_place)
    log_probs, entropy, divergence = _MakeLogProbs.apply(read, chunks, comparison, *leaves)
    return LogProbs(log_probs, entropy), divergence


class _MakeLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, read: Reading, chunks_of: partial[Chunks], comparison: Comparison | None, *leaves: Any
    ) -> Gradients:
        chunks = chunks_of(leaves)
        statistics_of_chunks, compared_of_chunks = list[Tensor](), list[Tensor]()
        for part, places in read.chunks():
            logits = chunks.logits(places)
            statistics = read.statistics(logits, part)
            statistics_of_chunks.append(statistics)
            if comparison is not None:
                norm = read.combine(statistics, part)[1]
                compared_of_chunks.append(comparison.compare(logits, norm, comparison.logits(places), part))
            del logits  # before the next chunk's are made: two at a time would double the peak of memory
        # Once for all chunks, so that ranks of the vocabulary wait for each other once, however many chunks there are.
        # A comparison needs the norm of its chunk at once, and pays three rounds more for each.
        whole = statistics_of_chunks[0] if len(statistics_of_chunks) == 1 else torch.cat(statistics_of_chunks)
        log_probs, norm = read.combine(whole)
        compared = torch.cat(compared_of_chunks, 1) if compared_of_chunks else None
        further = read.read_in_backward + ([] if comparison is None else comparison.read_in_backward)
        is_needed = any(ctx.needs_input_grad)  # a tensor of inference mode cannot be saved, nor changed outside it
        saved = [tensor for tensor in further if is_needed and not tensor.is_inference()]
        ctx.save_for_backward(norm, compared, *leaves, *saved)
        ctx.num_leaves = len(leaves)
        ctx.read, ctx.chunks_of, ctx.comparison = read, chunks_of, comparison
        # An entropy that no loss uses has gradient None, not zeros: backward leaves its terms out.
        ctx.set_materialize_grads(False)
        values = log_probs, norm[2] if read.entropy else None, None if compared is None else compared[0]
        return tuple(None if value is None else read.spread(value) for value in values)

    @staticmethod
    @first_order("log-probs")
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        norm, compared, *leaves = ctx.saved_tensors  # raises if one was changed in place
        leaves = leaves[: ctx.num_leaves]
        read: Reading = ctx.read
        read.begin_pass()
        gradients = tuple(read.select(gradient) for gradient in gradients)
        wanted = ctx.needs_input_grad[3:]
        chunks: Chunks = ctx.chunks_of(leaves, wanted, skips=read.rows is not None, is_one=read.is_one_chunk)
        for part, places in read.chunks():
            logits, chunk_norm = chunks.logits(places), norm[:, part]
            target = chunks.target(logits, places)
            log_probs_gradient, entropy_gradient, divergence_gradient = (
                None if gradient is None else gradient[part] for gradient in gradients
            )
            more = None
            if divergence_gradient is not None:
                teacher_logits = ctx.comparison.logits(places)
                chunk_compared = compared[:, part]
                more = ctx.comparison.slopes(
                    logits, chunk_norm, teacher_logits, chunk_compared, divergence_gradient, part
                )
            read.differentiate(logits, part, chunk_norm, log_probs_gradient, entropy_gradient, into=target, more=more)
            chunks.add(target, places)
            # Before the next chunk's are made; `more` holds the teacher's logits too.
            teacher_logits = more = None
            del logits, target
        return None, None, None, *chunks.gradients(read)


def default_chunk_tokens(device: torch.device) -> int:
    return HOST_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def product(logits_gradient: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """``logits_gradient.T @ hidden`` in that dtype: the weight's gradient of one chunk, each entry written once."""
    left = logits_gradient.t()
    if dtype == hidden.dtype:
        return left @ hidden
    total = hidden.new_empty(left.shape[0], hidden.shape[1], dtype=dtype)
    if total.is_cuda and dtype == torch.float32 and _wider("mm", (left, hidden), total):
        return total
    for begin in range(0, len(total), _PRODUCT_ROWS):
        rows = slice(begin, begin + _PRODUCT_ROWS)
        total[rows] = left[rows] @ hidden
    return total


def add_wider(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """``total += left @ right`` in the sum's precision: no product is rounded to the factors' dtype, or stored.

    False, and nothing done, where torch or the device has no such product. `addmm` takes an output type since torch
    2.8, and a sum of that type since PyTorch's pull request 167931.
    """
    return _wider("addmm", (total, left, right), total)


def _wider(name: str, factors: tuple[Tensor, ...], total: Tensor) -> bool:
    """A product of factors into a tensor of a wider dtype; False, and nothing done, where there is none."""
    operation = getattr(torch.ops.aten, name)
    if _narrow or not hasattr(operation, "dtype_out"):
        return False
    try:
        operation.dtype_out(*factors, total.dtype, out=total)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _narrow.append(str(error)[:500])
        logger.info("the weight's gradient is added in blocks: torch has no product that adds wider (%s)", _narrow[0])
        return False
    return True


def in_autocast(factor: Tensor | None) -> Tensor | None:
    """A product's factor as `torch.autocast` casts it: once, so that backward has the same, wherever it runs."""
    # autocast leaves float64 alone, and `meta` tensors have none.
    if factor is None or factor.dtype == torch.float64 or not torch.amp.is_autocast_available(factor.device.type):
        return factor
    device = factor.device.type
    return factor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else factor


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the dtypes of their factors, whatever autocast is on."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()

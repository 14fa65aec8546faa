"""Gradients of a model in Megatron-Core's DistributedDataParallel, as a source of sketches.

What backward gives is seen by a hook of each parameter. Where none is called, as for weight gradients that are fused
with their accumulation, `main_grad` is seen when a bucket group starts its reduction. The final gradient is the part
of `main_grad` that the rank's optimizer owns. Gradients are summed over DP x CP, those of experts over their own
data-parallel ranks, and those of tied embeddings over the stages that hold them.

Whether a sum over tensor-parallel ranks is due is what Megatron's marks claim, and the numbers check it. A parameter
marked `tensor_model_parallel` is cut; one marked `sequence_parallel` or `average_gradients_across_tp_domain` is whole,
and each rank saw a part of its tokens. Of an unmarked one that is whole everywhere, backward's gradients tell: equal
ones are copies, others are parts. Where values differ without a mark, or numbers cannot tell, it is undecided.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, ModelGroups, attempt, ranks_of, size_of, world_rank
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.factor import Alike, Fit, Parameter, no_factor
from megatron_rl_loss.proof.hooks import Failure, watch
from megatron_rl_loss.proof.sketches import Backward, Signs, num_patterns

#: Replicas compute their gradients each on its own; where a reduction lacks, they differ by about their norm.
_REPLICAS = 2.0**-4
#: Megatron's mark of parameters of which each tensor-parallel rank has a part.
_CUT = "tensor_model_parallel"
#: Its marks of whole parameters whose gradients on tensor-parallel ranks are parts, to be summed or averaged.
_PARTS = ("sequence_parallel", "average_gradients_across_tp_domain")
_NOT_HELD = (
    "Megatron's DDP does not hold it, so nothing reduces its gradient: wrap the model after the parameter is added"
)
_NO_MARK = "its values differ between tensor-parallel ranks, and no mark of Megatron says that it is cut"
_UNTOLD = (
    "its gradients differ between tensor-parallel ranks and its values are all one number: without a mark of Megatron "
    "it may be cut or whole"
)
_EQUAL_PARTS = "its gradients are equal on tensor-parallel ranks, and no mark of Megatron says whether their sum is due"
#: Marks of parameters whose gradients are summed over further ranks, by rules that are not followed.
_FURTHER = {"pipeline_parallel": "summed over pipeline stages", "is_gtp_weight_remat": "sharded further (GTP)"}


def unseen(chunks: Sequence[Any]) -> str:
    """Why the gradients of these model chunks cannot be measured; empty if they can."""
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            return no_factor(f"{type(chunk).__name__} is not Megatron-Core's own DistributedDataParallel")
    return ""


def check_fresh_gradients(chunks: Sequence[Any]) -> None:
    """Reject nonzero gradients before the step, since Megatron's DDP adds to them. Waits for the device.

    Buffers that hold parameters at that time (mxfp8, gathered during the forward pass) are not checked.
    """
    ddp = [
        chunk
        for chunk in chunks
        if isinstance(chunk, DistributedDataParallel) and not _holds_parameters(chunk.ddp_config)
    ]
    buffers = [buffer.grad_data for chunk in ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    largest = [torch.linalg.vector_norm(buffer, torch.inf).float() for buffer in buffers if buffer.numel()]
    if largest and bool(torch.stack(largest).any()):  # NaN is no 0 either
        raise ValueError(
            "gradients that are not 0 before the step's first micro-batch: Megatron's DDP would add the step's "
            "gradients to them. Call zero_grad_buffer() of each model chunk, and the optimizer's zero_grad(), before "
            "every step; add gradients of your own after this schedule."
        )


def _holds_parameters(ddp_config: Any) -> bool:
    return ddp_config.overlap_param_gather and getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)


class BucketGroups:
    """The trainable parameters of a rank's model chunks; a `measurement.Source`."""

    def __init__(self, chunks: Sequence[Any], groups: ModelGroups) -> None:
        trained = [
            (name, parameter, chunk)
            for chunk in chunks
            for name, parameter in chunk.module.named_parameters()
            if parameter.requires_grad  # or it was frozen later
        ]
        named = [row for row in trained if row[1] in row[2].param_to_bucket_group]
        self._not_held = [name for name, parameter, chunk in trained if parameter not in chunk.param_to_bucket_group]
        self._groups, self._chunks = groups, chunks
        self._trained: list[tuple[Any, Any]] = [(parameter, chunk) for _, parameter, chunk in named]
        self.parameters = [
            Parameter.of(name, parameter, [tensor.dtype for tensor in _buffers(parameter)])
            for name, parameter, _ in named
        ]
        for known, (parameter, _) in zip(self.parameters, self._trained, strict=True):
            known.why = next((why for mark, why in _FURTHER.items() if getattr(parameter, mark, False)), "")
        # Ranks of a tied embedding are of different stages, which must take as many patterns.
        self._signs = Signs(num_patterns(len(named)) if groups.pp.size() == 1 else num_patterns(2**10))
        device = named[0][1].device if named else torch.device("cpu")
        self._backward = Backward.of(self._signs, len(named), device)
        self._fused, self._before = set[int](), dict[int, Tensor]()
        self._final, self._values = list[Tensor](), dict[int, tuple[float, bool]]()
        self._number_of = {parameter: number for number, (parameter, _) in enumerate(self._trained)}
        self._undo: list[Callable[[], object]] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [parameter for parameter, _ in self._trained]

    def open(self, take: Callable[[], None], fail: Failure) -> None:
        for group in _bucket_groups(self._chunks):
            start = group.start_grad_sync
            group.start_grad_sync = partial(self._start, group, start, fail)
            self._undo.append(partial(_restore, group, group.start_grad_sync))
        for number, (parameter, _) in enumerate(self._trained):
            self._undo.append(watch(parameter, partial(self._see, number), partial(self._take, number, take), fail))

    def close(self) -> None:
        undo, self._undo = self._undo, []
        for restore in undo:
            restore()

    def _see(self, number: int, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        if getattr(self._trained[number][0], "grad_added_to_main_grad", False):
            self._fused.add(number)  # the gradient is a placeholder
        else:
            self._backward.see(number, gradient, self._trained[number][0])

    def _take(self, number: int, take: Callable[[], None]) -> None:
        take()
        self._backward.take(number)

    def _start(self, group: Any, start: Callable[..., Any], fail: Failure, *args: Any, **kwargs: Any) -> Any:
        """`start_grad_sync`, after a look at those gradients that no hook saw."""
        if getattr(group, "grad_reduce_handle", None) is None:
            numbers = [self._number_of[parameter] for parameter in group.params if parameter in self._number_of]
            failure = attempt(lambda: self.see_unlinked(numbers))
            if isinstance(failure, Exception):
                fail(failure)
        return start(*args, **kwargs)

    def see_unlinked(self, numbers: Sequence[int] | None = None) -> None:
        """Sketch those gradients that no hook saw, before ranks are added up; later looks change nothing."""
        for number in range(len(self._trained)) if numbers is None else numbers:
            if not self._is_linked(number) and number not in self._before:
                self._before[number] = self._signs.sketch(self._trained[number][0].main_grad)

    def _is_linked(self, number: int) -> bool:
        return self._backward.num_terms[number] > 0 and number not in self._fused

    def sketch(self) -> int:
        self._backward.flush()
        for number in self._backward.changed:
            self.parameters[number].why = "a hook changes its gradient in place"
        for number, (parameter, chunk) in enumerate(self._trained):
            flat, mine = parameter.main_grad.reshape(-1), owned_by(parameter, chunk)
            self._final.append(self._signs.sketch_slice(flat[mine], parameter.shape, mine.start))
            if not self._is_linked(number):
                # DDP may never have begun to reduce it; then it holds the rank's own sum.
                before = self._before.get(number)
                self._backward.table[number] = self._signs.sketch(parameter.main_grad) if before is None else before
        for number in self._replicas().tolist() if self._groups.tp.size() > 1 else ():
            values = self._trained[number][0].detach()
            is_one_number = bool((values == values.reshape(-1)[0]).all()) if values.numel() else True
            self._values[number] = float(self._signs.sketch(values)[0]), is_one_number
        return max([1, *self._backward.num_terms])

    def _replicas(self) -> Tensor:
        """Numbers of the parameters that may be whole on each tensor-parallel rank."""
        whole = [
            getattr(p, "allreduce", True) and not _is_tied(p, self._groups) and not getattr(p, _CUT, False)
            for p, _ in self._trained
        ]
        return torch.tensor(whole, dtype=torch.bool).nonzero()[:, 0]

    def alike(self, exchange: Exchange, num_terms: int, where: str) -> Alike:
        groups, own = self._groups, self._backward.table.cpu()
        final = torch.stack(self._final).cpu() if self._final else own.clone()
        for parameter in self.parameters:
            parameter.roundings = 3.0 + num_terms  # a cast, two products
        expert_flags = torch.tensor([not getattr(p, "allreduce", True) for p, _ in self._trained], dtype=torch.bool)
        for is_expert in (False, True):
            at = expert_flags == is_expert
            if not bool(at.any()):
                continue
            chunk = self._trained[int(at.nonzero()[0])][1]
            over = chunk.expt_dp_group if is_expert else groups.dp_cp
            self._sum(exchange, own, at, over)
            if chunk.ddp_config.use_distributed_optimizer:
                shards = chunk.intra_expt_dp_group if is_expert else chunk.intra_dp_cp_group
                part = final[at]
                exchange.reduce(part, shards)
                final[at] = part
        tied = torch.tensor([_is_tied(p, groups) for p, _ in self._trained], dtype=torch.bool)
        replicas = self._add_replicas(exchange, own, final)
        self._add_tied(exchange, own, tied)
        fit = Fit(self.parameters, own, final)
        alike = fit.alike(where)
        for number, replica in replicas.items():
            name = self.parameters[number].name
            if name in (*alike.zero, *alike.uncovered):
                continue
            if undecided := replica.undecided(fit.ratio_to_factor(number), groups.tp.size()):
                alike.covered -= name not in alike.unlike
                alike.unlike.pop(name, None)
                alike.uncovered[name] = undecided
            elif replica.spread > _REPLICAS and name not in alike.unlike:
                alike.unlike[name] = (
                    f"differs between tensor-parallel ranks by {replica.spread:.2g} of its norm, and its values do not"
                )
                alike.covered -= 1
        alike.total += len(self._not_held)
        alike.uncovered |= dict.fromkeys(self._not_held, _NOT_HELD)
        unlinked = [n for n in range(len(self._trained)) if not self._is_linked(n) and bool(own[n, -1] > 0)]
        if unlinked:
            alike.notes.append(f"{len(unlinked)} of them from main_grad on")
        return alike

    def _sum(self, exchange: Exchange, table: Tensor, at: Tensor, group: Group) -> None:
        """Add up rows of a table over a group."""
        part = table[at]
        exchange.reduce(part, group)
        table[at] = part
        for number in at.nonzero()[:, 0].tolist():
            self.parameters[number].roundings += size_of(group)

    def _add_replicas(self, exchange: Exchange, own: Tensor, final: Tensor) -> dict[int, "_Replica"]:
        """Add up gradients of whole parameters over TP where a sum is due; what was seen of each, by parameter."""
        tp, at = self._groups.tp, self._replicas()
        if tp.size() == 1 or not len(at):
            return {}
        both = torch.cat([own[at], final[at, :-1]], 1)
        total = both.clone()
        exchange.reduce(total, tp)
        # Sketches of copies are equal: each is the mean.
        off, patterns = (total / tp.size() - both).abs(), self._signs.patterns
        norms = (total[:, patterns] / tp.size()).sqrt(), final[at, -1].sqrt()
        is_part = (off[:, :patterns].amax(1) > _REPLICAS * norms[0]).double()
        spread = off[:, patterns + 1 :].amax(1) / norms[1].clamp(min=1e-300)
        known = [self._values.get(number, (math.nan, False)) for number in at.tolist()]
        values = torch.tensor([value for value, _ in known], dtype=torch.float64)
        varies = torch.tensor([not is_one_number for _, is_one_number in known], dtype=torch.float64)
        extremes = torch.stack([values, -values, is_part, spread, varies], 1)
        exchange.reduce(extremes, tp, dist.ReduceOp.MAX)
        replicas = {}
        for row, number in enumerate(at.tolist()):
            high, minus_low, any_part, widest, any_varies = extremes[row].tolist()
            is_marked = any(getattr(self._trained[number][0], mark, False) for mark in _PARTS)
            replica = _Replica(bool(high + minus_low), bool(any_part), is_marked, not any_varies, widest)
            if replica.is_summed:
                own[number] = total[row, : patterns + 1]
                self.parameters[number].roundings += tp.size()
            replicas[number] = replica
        return replicas

    def _add_tied(self, exchange: Exchange, own: Tensor, tied: Tensor) -> None:
        """Add up the gradients of an embedding that stages share; those that hold no part of it take part."""
        if self._groups.pp.size() == 1:
            return
        group = self._groups.embd or parallel_state.get_embedding_group(check_initialized=False)
        if group is None:
            for number in tied.nonzero()[:, 0].tolist():
                self.parameters[number].why = "tied over stages without a known group"
            return
        if world_rank() not in ranks_of(group):
            return
        part = own[tied].sum(0)
        exchange.reduce(part, group)
        own[tied] = part
        for number in tied.nonzero()[:, 0].tolist():
            self.parameters[number].roundings += group.size()


class _Replica(NamedTuple):
    """What tensor-parallel ranks show of a parameter that has no mark of being cut.

    Attributes:
        has_other_values: they differ between ranks.
        is_in_parts: so do the gradients that backward gives.
        is_marked: Megatron's mark says so.
        is_one_number: all values of it are one number, as those of zeros: equal values are then no sign of a copy.
        spread: by which part of its norm the final gradient differs between ranks.
    """

    has_other_values: bool
    is_in_parts: bool
    is_marked: bool
    is_one_number: bool
    spread: float

    @property
    def is_summed(self) -> bool:
        """A sum over the ranks is due."""
        return self.is_marked or (self.is_in_parts and not self.has_other_values)

    def undecided(self, ratio: float, tp_size: int) -> str:
        """Why nothing can be decided of it; empty if something can. `ratio`: of its own factor to the others'."""
        if self.is_marked:
            return ""
        if self.has_other_values:
            return _NO_MARK
        if self.is_in_parts and self.is_one_number and self.spread > _REPLICAS:
            return _UNTOLD
        if not self.is_in_parts and math.isclose(ratio, tp_size, rel_tol=1e-3):
            return _EQUAL_PARTS
        return ""


def _bucket_groups(chunks: Sequence[Any]) -> list[Any]:
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def _restore(group: Any, replacement: Any) -> None:
    if vars(group).get("start_grad_sync") is replacement:
        del group.start_grad_sync


def _is_tied(parameter: Any, groups: ModelGroups) -> bool:
    return bool(getattr(parameter, "shared_embedding", False)) and groups.pp.size() > 1


def _buffers(parameter: Any) -> list[Tensor]:
    """Those in which a gradient is accumulated, and reduced, if that is another."""
    tensors = parameter.main_grad, getattr(parameter, "main_grad_copy_in_grad_buffer", None)
    return [tensor for tensor in tensors if tensor is not None]


def owned_by(parameter: Any, chunk: Any) -> slice:
    """The part of a final gradient that this rank's optimizer uses; the rest of the buffer is invalid."""
    most = parameter.numel()
    if not chunk.ddp_config.use_distributed_optimizer:
        return slice(0, most)
    # Megatron cuts a bucket into equal parts, one for each rank of a distributed optimizer's instance; parameters lie
    # across these parts.
    group = chunk.param_to_bucket_group[parameter]
    bucket = group.param_to_bucket[parameter]
    size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
    first = size * group.intra_distributed_optimizer_instance_rank
    # `param_to_index` of older versions leaves out the padding between parameters.
    in_bucket = _buffers(parameter)[-1]
    start = in_bucket.storage_offset() - bucket.grad_data.storage_offset()
    end = start + in_bucket.numel()
    begin, stop = min(max(first, start), end) - start, max(min(first + size, end), start) - start
    return slice(min(begin, most), min(stop, most))

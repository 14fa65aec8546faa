"""The look-ahead: fetches and describes all micro-batches of a step before training on the first one.

Where a packing scheduler gives batches to the first tensor-parallel rank alone, they are sent to the others.
"""

import functools
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_rl_loss.core.collectives import Group, ModelGroups, attempt, gather_parts, rank_in, several, unwrapped
from megatron_rl_loss.core.errors import BadBatchError
from megatron_rl_loss.core.layouts import ZigzagTHD
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.megatron.iterator import MicrobatchIterator

SamplesOf = Callable[[Any], Samples]
Batches = TypeVar("Batches")


def look_ahead(
    iterators: Sequence[Iterator[Any] | None],
    num_microbatches: int,
    samples_of: SamplesOf,
    groups: ModelGroups,
    *,
    scheduled: bool,
) -> tuple[list[list[Any] | None], list[Samples] | None]:
    """Fetch a step and describe it. Errors in the data are raised on this rank alone: see `attempt`.

    Args:
        scheduled: a packing scheduler distributed the step. The first tensor-parallel ranks hold the batches, and each
            chunk the keys that it needs; this function gives all keys to all chunks of all stages.

    Returns:
        A list of batches for each model chunk, None for a chunk that reads no data; and the samples of each batch of
        the last chunk that reads data, None on a pipeline stage that reads none.
    """

    fetched: list[list[Any] | None]
    if scheduled:

        def whole_batches() -> list[dict[str, Any]]:
            chunks = [_fetch(iterator, num_microbatches) for iterator in iterators if iterator is not None]
            # Empty dicts beside them, for a first rank whose chunks read nothing: it sends as many as the others.
            return join_batches([[{}] * num_microbatches, *chunks])

        whole = from_first_tp_rank(whole_batches, groups.tp, groups.pp)
        fetched = [[dict(batch) for batch in whole] if any(whole) else None for _ in iterators]
    else:
        fetched = [None if iterator is None else _fetch(iterator, num_microbatches) for iterator in iterators]
    reading = [batches for batches in fetched if batches is not None]
    if not reading:
        if groups.pp.rank() == groups.pp.size() - 1:
            raise ValueError(
                f"no data iterator on TP rank {groups.tp.rank()} of the last pipeline stage: every rank of that stage "
                "needs one, in evaluation too. Set is_distributed = True on the provider; without validation data pass "
                "--eval-iters 0; if a scheduler feeds TP rank 0 alone, set the config's sequence_packing_scheduler."
            )
        return fetched, None
    samples = [_describe(batch, samples_of) for batch in reading[-1]]
    for number, (batch, described) in enumerate(zip(reading[-1], samples, strict=True)):
        check_packed_bounds(number, batch, described, described.place_in(groups.cp)[1])
    # Megatron gives each virtual stage an iterator of its own, and weights are made from the last one's samples.
    for chunk, batches in enumerate(fetched[:-1]):
        for i, (batch, expected) in enumerate(zip(batches or [], samples, strict=False)):
            if samples_of(batch).digest() != expected.digest():
                raise ValueError(
                    f"the iterators of model chunk {chunk} and of the last chunk give different samples from "
                    f"micro-batch {i} on: virtual pipeline stages must read the same data. Make every chunk's iterator "
                    "from the same data, in the same order."
                )
    return fetched, samples


def from_first_tp_rank(make: Callable[[], Batches], tp_group: Group, pp_group: Group | None = None) -> Batches:
    """Call `make` on the first tensor-parallel rank and return its result, tensors on the host, on all of them.

    For the batches of a packing scheduler, whose iterator is None on the other ranks. All ranks call it inside the
    function that `plan_step` gets as ``samples``, so an error of `make` is raised on every rank of the step. With
    `pp_group`, `make` returns a list of dicts. Each pipeline stage may have keys of its own (tokens on the first stage,
    labels and loss mask on the last), and all stages get all keys.

    Raises the errors of `make`, and those of pickle for a result that cannot be sent.
    """
    if not several(tp_group, pp_group):
        return make()

    # The first TP ranks of all stages meet in one gather; the other TP ranks take no part in it, and wait for the
    # broadcast of their stage.
    def sent() -> bytes:
        parts = gather_parts(lambda: pickle.dumps(tree_map_only(Tensor, Tensor.cpu, make())), pp_group)
        return parts[0] if pp_group is None else pickle.dumps(join_batches(map(pickle.loads, parts)))

    # An error travels in the place of the batches: the other ranks of the TP group wait for one of the two.
    is_first = rank_in(tp_group) == 0
    mine = attempt(sent) if is_first else None
    outcome: list[Any] = [f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine]
    if several(tp_group):
        known = unwrapped(tp_group)
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(known, 0), group=known)
    if isinstance(mine, Exception):
        raise mine
    if isinstance(outcome[0], str):
        raise BadBatchError(f"the first tensor-parallel rank could not make its batches: {outcome[0]}")
    result: Batches = pickle.loads(outcome[0])
    return result


def join_batches(parts: Iterable[Any]) -> list[Any]:
    """Merge lists of dicts, one dict for each micro-batch, into one list of dicts with the keys of all lists."""
    return [functools.reduce(operator.or_, batches) for batches in zip(*parts, strict=True)]


def check_packed_bounds(number: int, batch: Any, samples: Samples, cp_size: int) -> None:
    """Raise ValueError where the batch's `PackedSeqParams` cut other slots over CP ranks than the layout.

    Bounds on a device are not read.
    """
    layout = samples.layout
    if cp_size == 1 or not isinstance(layout, ZigzagTHD):
        return
    values = batch.values() if isinstance(batch, Mapping) else getattr(batch, "__dict__", {}).values()
    for packed in [value for value in values if isinstance(value, PackedSeqParams)]:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        if isinstance(bounds, Tensor) and bounds.is_cpu:
            model_bounds, layout_bounds = sorted(set(bounds.tolist())), sorted(set(layout.bounds))
            if model_bounds != layout_bounds:
                only = [bound for bound in model_bounds if bound not in layout_bounds]
                others = [bound for bound in layout_bounds if bound not in model_bounds]
                raise ValueError(
                    f"micro-batch {number}: the model's packed bounds have {only[:4]}, and the layout's {others[:4]} "
                    "in their place: context-parallel ranks cut each slot for itself, so losses would get the weights "
                    "of other tokens. Give ZigzagTHD the model's cu_seqlens_q_padded; padding behind the last sample "
                    "is a slot of its own, with filler_slots=1, only where the model has it so."
                )


def _fetch(iterator: Iterator[Any], num_microbatches: int) -> list[Any]:
    if isinstance(iterator, MicrobatchIterator):
        raise TypeError(
            "a schedule that is wrapped by LossAggregation twice: a step is counted once. Wrap the schedule in one "
            "LossAggregation."
        )
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            f"a data iterator of type {type(iterator).__name__}: the schedule needs an iterator of micro-batches, or a "
            "list with one for each model chunk. Pass iter(...) of the micro-batches, and the same iterator at every "
            "step."
        )
    batches: list[Any] = []
    while len(batches) < num_microbatches:
        try:
            batches.append(next(iterator))
        except StopIteration:
            raise ValueError(
                f"the data iterator ended after {len(batches)} of the step's {num_microbatches} micro-batches: every "
                "step needs all of them. Provide more data, or train fewer steps."
            ) from None
    return batches


def _describe(batch: Any, samples_of: SamplesOf) -> Samples:
    samples = samples_of(batch)
    if not isinstance(samples, Samples):
        raise TypeError(
            f"samples_of returned a {type(samples).__name__}: it must return megatron_rl_loss.Samples. Wrap the masks "
            "in Samples."
        )
    return samples

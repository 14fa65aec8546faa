"""The look-ahead: fetches and describes all micro-batches of a step before training on the first one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.megatron.iterator import MicrobatchIterator

SamplesOf = Callable[[Any], Samples]


def look_ahead(
    iterators: Sequence[Iterator[Any] | None],
    num_microbatches: int,
    samples_of: SamplesOf,
    groups: ProcessGroupCollection,
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
        from megatron_rl_loss.megatron.first_rank import from_first_tp_rank, join_batches

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

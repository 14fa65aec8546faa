"""Long runs do not grow: memory, open files, live tensors and the autograd graph of a step stay what they were.

Every step draws new shapes, so whatever is kept by shape would pile up too. Growth is measured after a warm-up, in a
process that did nothing before: one that did has free heap, into which a leak goes unseen.
"""

import gc
import mmap
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import oracle
import psutil
import pytest
import torch
from graphs import graph_nodes
from placements import PLACES, bshd, padded_masks
from ranks import run_ranks
from table_step import aggregation, begun, start, table_model

from megatron_rl_loss import Samples

pytestmark = pytest.mark.slow

MEGABYTE = 2**20


#: Of memory a little growth is let pass: the allocator's pools fill up slowly with random shapes. Of tensors less than
#: one, in the mean of a window: gloo's thread can hold what was reduced a moment longer.
LIMITS = {"memory": 4 * MEGABYTE, "files": 0, "tensors": 0.99, "graph_nodes_per_loss": 0}


def grown_in(step: Callable[[int], int], steps: int, every: int) -> list[str]:
    """Run `step(number)`, which gives the nodes of a loss's graph; what the process holds more of towards the end.

    It is looked at every few steps. The last third of the readings is compared with the second; the first is warm-up.
    """
    process = psutil.Process()
    readings = []
    for number in range(steps):
        nodes = step(number)
        if number % every == every - 1:
            gc.collect()
            live = sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())
            readings.append((process.memory_info().rss, process.num_fds(), live, nodes))
    third = len(readings) // 3
    before, after = (
        [statistics.fmean(column) for column in zip(*part, strict=True)]
        for part in (readings[third : 2 * third], readings[-third:])
    )
    return [name for (name, limit), a, b in zip(LIMITS.items(), before, after, strict=True) if b - a > limit]


def in_pages_of_its_own(size: int) -> torch.Tensor:
    """`size` bytes that no free heap can hold: a leak of them shows in the memory of the process, byte for byte."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


#: What the negative control leaks with every micro-batch it keeps. The windows of `grown_in` are a third of the steps
#: apart, three micro-batches each: 24 MB over 96 steps, of 4 MB allowed.
LEAKED = MEGABYTE // 4

MODES: list[dict[str, Any]] = [
    {"mode": mode, "units": units, "divisor": oracle.divisor_of(mode, 64.0)} for mode, units in oracle.COUNTINGS
]


def as_it_is(samples: Samples) -> Samples:
    return samples


def draw_masks(rng: random.Random) -> list[torch.Tensor]:
    lengths = [rng.randint(1, 1500) for _ in range(rng.randint(0, 8))]
    kinds = [rng.choice([0.0, 0.3, 1.0]) for _ in lengths]
    return [(torch.rand(n) < kind).float() * rng.choice([1, 0.5]) for n, kind in zip(lengths, kinds, strict=True)]


def draw_samples(rng: random.Random, masks: list[torch.Tensor], cp_size: int, **ids: Any) -> Samples:
    """Samples in one of the layouts; there are no rows of no samples."""
    placed = rng.choice([place for place in PLACES if masks or place is not bshd])([*map(len, masks)], cp_size)
    chosen = [oracle.sample([], mask.tolist()) for mask in masks]
    return Samples(padded_masks(chosen, placed), layout=placed.layout, **ids)


def grown_by_adapter(cp: int, leak: bool, steps: int) -> list[str]:
    state = start(cp=cp)
    dp_rank = state.get_data_parallel_rank()
    # One model and aggregation for every mode, unit counting and carrier: they live as long as the launch.
    launches = [
        (
            table_model([0.0], per_token=per_token, ddp=False),
            aggregation(as_it_is, **mode_flags, with_per_token_loss=True),
        )
        for per_token in (False, True)
        for mode_flags in MODES
    ]
    opened: list[int] = []
    running = torch.zeros((), requires_grad=True)
    kept: list[Any] = []

    def batches(rng: random.Random) -> Any:
        for _ in range(3):
            masks = draw_masks(rng)
            ids = [rng.randrange(20) + 100 * dp_rank for _ in masks]
            yield draw_samples(rng, masks, cp, rollout_ids=ids, prompt_ids=[i // 5 for i in ids])

    def step(number: int) -> int:
        torch.manual_seed(number + 1000 * dp_rank)
        nonlocal running
        model, own_aggregation = launches[number % len(launches)]
        source = batches(random.Random(number + 1000 * dp_rank))
        nodes = set()
        for microbatch in begun(own_aggregation, source, model, 3):
            losses = torch.randn(len(microbatch.tokens), requires_grad=True)
            loss, _, _ = microbatch.loss(losses, {"twice": 2 * losses.detach()})
            loss.backward()
            if leak:
                kept.extend((microbatch, in_pages_of_its_own(LEAKED)))
                opened.append(os.open(os.devnull, os.O_RDONLY))
                loss = running = running + loss.detach()
            nodes.add(graph_nodes(loss))
        return max(nodes)

    gc.collect()
    gc.freeze()
    return grown_in(step, steps, every=16)  # a multiple of the launches: each reading is after the same one


def test_288_steps_of_the_adapter_leave_nothing_behind(record_property: Any) -> None:
    # Trees of random sizes fill the allocator's pools for some hundred steps.
    assert run_ranks(2, grown_by_adapter, 2, False, 288) == [[]] * 2
    record_property("cases", 288 * 3 * 2)


def test_what_is_kept_is_seen() -> None:
    """Negative control: micro-batches that are kept, files that stay open, a sum of losses that is never detached."""
    assert run_ranks(2, grown_by_adapter, 2, True, 96) == [list(LIMITS)] * 2

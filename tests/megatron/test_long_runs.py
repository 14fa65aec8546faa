"""Long runs do not grow: memory, open files, live tensors and the autograd graph of a step stay what they were.

Every step draws new shapes (numbers and lengths of samples, masks, layouts, CP sizes and ranks), so whatever is kept by
shape would pile up too. Growth is measured after a warm-up, between the means of two later windows, in a process that
did nothing before: one that did has free heap, into which a leak goes unseen.
"""

import gc
import mmap
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import psutil
import pytest
import torch
from graphs import graph_nodes
from ranks import run_ranks, start_process_group

from megatron_rl_loss import (
    Contiguous,
    Gathered,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
)
from megatron_rl_loss.megatron import AggregationSettings

MEGABYTE = 2**20


@dataclass
class Reading:
    """What a process holds between two steps."""

    memory: int
    files: int
    tensors: int
    graph_nodes_per_loss: int


def take_readings(step: Callable[[int], int], steps: int, every: int) -> list[Reading]:
    """Run `step(number)`, which gives the nodes of a loss's graph, and look at the process every few steps."""
    process = psutil.Process()
    readings = []
    for number in range(steps):
        nodes = step(number)
        if number % every == every - 1:
            gc.collect()
            live = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            readings.append(Reading(process.memory_info().rss, process.num_fds(), live, nodes))
    return readings


def growth(readings: list[Reading]) -> dict[str, float]:
    """By how much the last third of the readings is above the second third; the first is warm-up."""
    third = len(readings) // 3
    before, after = readings[third : 2 * third], readings[-third:]
    return {
        name: statistics.fmean(getattr(r, name) for r in after) - statistics.fmean(getattr(r, name) for r in before)
        for name in ("memory", "files", "tensors", "graph_nodes_per_loss")
    }


def grown(readings: list[Reading]) -> list[str]:
    """What does not stay flat. Of memory a little may: the allocator's pools fill up slowly with random shapes.

    Of tensors less than one may, in the mean of a window: gloo's thread can hold what was reduced a moment longer.
    """
    limits = {"memory": 4 * MEGABYTE, "files": 0, "tensors": 0.99, "graph_nodes_per_loss": 0}
    found = growth(readings)
    return [f"{name} grew by {found[name]:.0f}" for name, limit in limits.items() if found[name] > limit]


def in_pages_of_its_own(size: int) -> torch.Tensor:
    """`size` bytes that no free heap can hold: a leak of them shows in the memory of the process, byte for byte."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


#: What the negative control leaks with every micro-batch it keeps. The windows of `growth` are a third of the steps
#: apart, three micro-batches each: 24 MB over 96 steps, of 4 MB allowed.
LEAKED = MEGABYTE // 4

MODES: list[dict[str, Any]] = [
    {"mode": mode, "units": units, "divisor": 64.0 if mode == "constant" else None} for mode, units in oracle.COUNTINGS
]


def draw_masks(rng: random.Random) -> list[torch.Tensor]:
    lengths = [rng.randint(1, 1500) for _ in range(rng.randint(0, 8))]
    kinds = [rng.choice([0.0, 0.3, 1.0]) for _ in lengths]
    return [(torch.rand(n) < kind).float() * rng.choice([1, 0.5]) for n, kind in zip(lengths, kinds, strict=True)]


def draw_layout(rng: random.Random, lengths: list[int], cp_size: int) -> Any:
    sizes = [-(-n // (2 * cp_size)) * 2 * cp_size for n in lengths]
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    kind = rng.choice(["thd", "bshd", "response", "contiguous", "gathered"])
    if kind == "response":
        return ZigzagResponse([n + rng.randint(1, 9) for n in lengths], lengths)
    if kind == "bshd" and lengths:
        return ZigzagBSHD(len(lengths), max(sizes), total_lengths=lengths)
    packed: Any = {"contiguous": Contiguous, "gathered": Gathered}.get(kind, ZigzagTHD)
    return packed(bounds, total_lengths=lengths)


@pytest.mark.slow
def test_a_graph_that_grows_and_files_that_stay_open_are_seen() -> None:
    """Negative control: a running sum of losses that is never detached, and a file a step."""
    total, opened = torch.zeros((), requires_grad=True), []

    def leaking(number: int) -> int:
        nonlocal total
        total = total + 1
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return graph_nodes(total)

    try:
        lines = {line.split()[0] for line in grown(take_readings(leaking, steps=30, every=2))}
    finally:
        for number in opened:
            os.close(number)
    assert {"files", "graph_nodes_per_loss"} <= lines


def adapter_readings(cp: int, pp: int, leak: bool, steps: int) -> list[Reading]:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from megatron_rl_loss import Samples
    from megatron_rl_loss.megatron import LossAggregation

    start_process_group()
    parallel_state.initialize_model_parallel(1, pp, context_parallel_size=cp)
    dp_rank, cp_rank = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    # One model and aggregation for every mode, unit counting and carrier: they live as long as the launch.
    launches = []
    for per_token in (False, True):
        common = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "use_cpu_initialization": True}
        model = MegatronModule(TransformerConfig(calculate_per_token_loss=per_token, **common))
        for settings in MODES:
            asked = AggregationSettings.resolve(**settings, with_per_token_loss=True)
            launches.append((model, LossAggregation(asked, lambda samples: samples)))
    kept: list[Any] = []

    def batches(rng: random.Random) -> Any:
        for _ in range(3):
            masks = draw_masks(rng)
            ids = [rng.randrange(20) + 100 * dp_rank for _ in masks]
            layout = draw_layout(rng, [mask.numel() for mask in masks], cp)
            yield Samples(masks, layout=layout, rollout_ids=ids, prompt_ids=[i // 5 for i in ids])

    def step(number: int) -> int:
        torch.manual_seed(number + 1000 * dp_rank)
        model, aggregation = launches[number % len(launches)]
        source = batches(random.Random(number + 1000 * dp_rank))
        nodes = set()
        for microbatch in aggregation.begin_step(source, model=model, num_microbatches=3):
            held = microbatch.data.layout.local_indices(cp_rank, cp)
            losses = torch.randn(held.size, requires_grad=True)
            loss, _, _ = microbatch.loss(losses, {"twice": 2 * losses.detach()})
            loss.backward()
            nodes.add(graph_nodes(loss))
            if leak:
                kept.extend((microbatch, in_pages_of_its_own(LEAKED)))
        return max(nodes)

    gc.collect()
    gc.freeze()
    return take_readings(step, steps, every=16)  # a multiple of the launches: each reading is after the same one


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cp", "pp"), [(4, 2, 1), (2, 1, 2)])
def test_208_steps_of_the_adapter_leave_nothing_behind(world_size: int, cp: int, pp: int, record_property: Any) -> None:
    for rank, readings in enumerate(run_ranks(world_size, adapter_readings, cp, pp, False, 208)):
        assert grown(readings) == [], rank
    record_property("cases", 208 * 3 * world_size)


@pytest.mark.slow
def test_microbatches_that_are_kept_are_seen() -> None:
    """Negative control, on ranks."""
    for readings in run_ranks(2, adapter_readings, 2, 1, True, 96):
        assert {line.split()[0] for line in grown(readings)} == {"memory", "tensors"}

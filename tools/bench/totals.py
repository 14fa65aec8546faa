"""What the totals of a step cost as data parallelism (DP) grows: bytes, collectives and time.

    python tools/bench/totals.py        # 1, 2, 4 and 8 ranks, gloo; writes docs/bench/totals-cpu.txt and .json
    python tools/bench/totals.py --device cuda --ranks 1 2      # a GPU per rank and NCCL: totals-cuda
    python tools/bench/totals.py --hops --ranks 16 64           # straight and as a grid: totals-hops-cpu

Bytes are what one rank hands to collectives, the largest rank's; messages, what it sends to other ranks in all-to-alls.
Times are those of the slowest rank in its fastest round, in milliseconds; with more ranks than cores they mostly show
the machine. Masks are short, so that little else is timed. ``--hops`` adds a rank among 10,000 that do not exist: it
gets back what it sends. Its time is the CPU time of the host; messages are to be added, at the network's price.
"""

import argparse
import json
import os
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import BACKENDS, machine, publish, start_rank

from megatron_rl_loss import StepTotals
from megatron_rl_loss.step import collectives

OUT = Path(__file__).parents[2] / "docs" / "bench"
COUNTED = ("all_reduce", "all_to_all_single", "all_gather_object", "all_gather", "broadcast", "batch_isend_irecv")
#: Ranks that rows go to straight, by the name of the way.
WAYS = {"as it is": collectives.ONE_HOP_RANKS, "straight": 2**31, "grid": 1}
#: (samples a rank, with ids, way)
Case = tuple[int, bool, str]


def count_collectives() -> dict[str, int]:
    """Wrap torch's collectives; the dict counts calls, messages and bytes from now on."""
    seen = {"calls": 0, "messages": 0, "bytes": 0}
    for name in COUNTED:
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            sent = [args[1] if name == "all_to_all_single" else args[0]]
            messages = kwargs["group"].size() - 1 if name == "all_to_all_single" else 0
            if name == "batch_isend_irecv":
                sent = [swap.tensor for swap in args[0] if swap.op is dist.isend]
                messages = len(sent)
            seen["calls"] += 1
            seen["messages"] += messages
            seen["bytes"] += sum(one.numel() * one.element_size() for one in sent)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    return seen


def run_rank(rank: int, world_size: int, folder: str, cases: list[Case], repeats: int, device: str) -> None:
    wait_for_device = start_rank(device, rank, world_size, folder)
    group = dist.group.WORLD
    seen = count_collectives()
    found = [time_case(case, rank, world_size, group, seen, repeats, device, wait_for_device) for case in cases]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # the group's threads would wait for ranks that are gone


def time_case(
    case: Case,
    rank: int,
    world_size: int,
    group: Any,
    seen: dict[str, int],
    repeats: int,
    device: str,
    wait_for_device: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int, int, int]:
    """Milliseconds of the fastest round, and its calls, messages and bytes."""
    samples, with_ids, way = case
    collectives.ONE_HOP_RANKS = WAYS[way]
    masks = [torch.ones(16, device=device)] * samples
    # Prompt groups of eight, split over ranks: every rank holds a part of every second group.
    ids: dict[str, Any] = {}
    if with_ids:
        rollouts = [i * world_size + rank for i in range(samples)]
        ids = {"rollout_ids": rollouts, "prompt_ids": [rollout // 8 for rollout in rollouts]}
    times = []
    for _ in range(repeats):
        if group is dist.group.WORLD:
            dist.barrier()
        seen.update(dict.fromkeys(seen, 0))
        start = clock()
        StepTotals.from_loss_masks(masks, dp_group=group, **ids)
        wait_for_device()
        times.append((clock() - start) * 1e3)
    return min(times), seen["calls"], seen["messages"], seen["bytes"]


def row(world_size: int, case: Case, by_rank: Sequence[Sequence[Any]]) -> dict[str, Any]:
    samples, with_ids, way = case
    return {
        "DP": world_size,
        "samples a rank": samples,
        "ids": "rollouts and prompts" if with_ids else "none",
        **({} if way == "as it is" else {"rows go": way}),
        "ms": max(of_rank[0] for of_rank in by_rank),
        "collectives": by_rank[0][1],
        "messages a rank": max(of_rank[2] for of_rank in by_rank),
        "bytes a rank": max(of_rank[3] for of_rank in by_rank),
    }


def measure(world_size: int, cases: list[Case], repeats: int, device: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, cases, repeats, device)
        start = "fork" if device == "cpu" else "spawn"  # a fork shares the memory of what is imported
        mp.start_processes(run_rank, args=arguments, nprocs=world_size, start_method=start)  # type: ignore[attr-defined, no-untyped-call]
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    return [row(world_size, case, [times[k] for times in by_rank]) for k, case in enumerate(cases)]


class GroupOfOne:
    """A rank of a group whose others do not exist: what it sends to one of them, that one sends to it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def simulate(ranks: int, cases: list[Case], repeats: int) -> list[dict[str, Any]]:
    """The work of the host on a rank of so many, and what it sends: collectives give back what they are given."""

    def swap(swaps: Sequence[Any]) -> list[Any]:
        for mine, theirs in pairwise(swaps):
            if mine.op is dist.isend and theirs.op is dist.irecv and len(mine.tensor) == len(theirs.tensor):
                theirs.tensor.copy_(mine.tensor)
        return []

    group = GroupOfOne(ranks)
    standing_in: dict[str, Any] = {
        "all_reduce": lambda values, **_: values.mul_(ranks),
        "all_to_all_single": lambda out, rows, *_, **__: out.copy_(rows),
        "batch_isend_irecv": swap,
        "get_global_rank": lambda _, rank: rank,
        "P2POp": namedtuple("P2POp", "op tensor peer group"),
    }
    with patch.multiple(dist, **standing_in), patch.object(collectives, "device_of", lambda _: torch.device("cpu")):
        counted: dict[str, Any] = {name: getattr(dist, name) for name in COUNTED}
        with patch.multiple(dist, **counted):  # undoes what counting puts there
            seen = count_collectives()
            parts = (0, ranks, group, seen, repeats, "cpu", bool, time.process_time)
            return [row(ranks, case, [time_case(case, *parts)]) for case in cases]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 4096], help="A rank.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--hops", action="store_true", help="Rows with ids straight and as a grid; and 10,000 ranks.")
    args = parser.parse_args(arguments)
    cases = [(samples, with_ids, "as it is") for with_ids in (False, True) for samples in args.samples]
    if args.hops:
        cases = [(args.samples[0], True, way) for way in ("straight", "grid")]
    results = [found for world_size in args.ranks for found in measure(world_size, cases, args.repeats, args.device)]
    about = machine(args.device) | {"threads": 1, "backend": BACKENDS[args.device]}
    if args.hops:
        results += simulate(10_000, cases, args.repeats)
    publish(args.out, f"totals-{'hops-' * args.hops}{args.device}", about, results)


if __name__ == "__main__":
    main()

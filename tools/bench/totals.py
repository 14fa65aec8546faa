"""What the totals of a step cost as data parallelism (DP) grows: bytes, collectives and time.

    python tools/bench/totals.py        # 1, 2, 4 and 8 ranks, gloo; writes docs/bench/totals-cpu.txt and .json
    python tools/bench/totals.py --device cuda --ranks 1 2      # a GPU per rank and NCCL: totals-cuda

Bytes are what one rank hands to collectives, the largest rank's. Times are those of the slowest rank in its fastest
round, in milliseconds; with more ranks than cores they mostly show the machine. Masks are short, so that little else
is timed.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import BACKENDS, machine, publish, start_rank

from megatron_rl_loss import StepTotals

OUT = Path(__file__).parents[2] / "docs" / "bench"
COUNTED = ("all_reduce", "all_to_all_single", "all_gather_object", "all_gather", "broadcast")


def count_collectives() -> dict[str, int]:
    """Wrap torch's collectives; the dict counts calls and bytes from now on."""
    seen = {"calls": 0, "bytes": 0}
    for name in COUNTED:
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            sent = args[1] if name == "all_to_all_single" else args[0]
            seen["calls"] += 1
            seen["bytes"] += sent.numel() * sent.element_size()
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    return seen


def run_rank(rank: int, world_size: int, folder: str, cases: list[tuple[int, bool]], repeats: int, device: str) -> None:
    wait_for_device = start_rank(device, rank, world_size, folder)
    group = dist.group.WORLD
    seen = count_collectives()
    found = []
    for samples, with_ids in cases:
        masks = [torch.ones(16, device=device)] * samples
        # Prompt groups of eight, split over ranks: every rank holds a part of every second group.
        ids: dict[str, Any] = {}
        if with_ids:
            rollouts = [i * world_size + rank for i in range(samples)]
            ids = {"rollout_ids": rollouts, "prompt_ids": [rollout // 8 for rollout in rollouts]}
        times = []
        for _ in range(repeats):
            dist.barrier()
            seen.update(calls=0, bytes=0)
            start = time.perf_counter()
            StepTotals.from_loss_masks(masks, dp_group=group, **ids)
            wait_for_device()
            times.append((time.perf_counter() - start) * 1e3)
        found.append((min(times), seen["calls"], seen["bytes"]))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # the group's threads would wait for ranks that are gone


def measure(world_size: int, cases: list[tuple[int, bool]], repeats: int, device: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, cases, repeats, device)
        mp.spawn(run_rank, args=arguments, nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    return [
        {
            "DP": world_size,
            "samples a rank": samples,
            "ids": "rollouts and prompts" if with_ids else "none",
            "ms": max(times[k][0] for times in by_rank),
            "collectives": by_rank[0][k][1],
            "bytes a rank": max(times[k][2] for times in by_rank),
        }
        for k, (samples, with_ids) in enumerate(cases)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 4096], help="A rank.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    cases = [(samples, with_ids) for with_ids in (False, True) for samples in args.samples]
    results = [row for world_size in args.ranks for row in measure(world_size, cases, args.repeats, args.device)]
    about = machine(args.device) | {"threads": 1, "backend": BACKENDS[args.device]}
    publish(args.out, f"totals-{args.device}", about, results)


if __name__ == "__main__":
    main()

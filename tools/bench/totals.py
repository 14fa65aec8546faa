"""What the totals of a step cost as data parallelism (DP) grows: bytes, collectives and time.

    python tools/bench/totals.py --out docs/bench       # 1, 2, 4 and 8 ranks, gloo
    python tools/bench/totals.py --device cuda --ranks 1 2      # a GPU per rank and NCCL
    python tools/bench/totals.py --hops --ranks 16 64           # straight and as a grid: totals-hops

Bytes are what one rank hands to collectives, the largest rank's; messages, what it sends to other ranks in all-to-alls.
Times are those of the slowest rank in its fastest round, in milliseconds; with more ranks than cores they mostly show
the machine. Masks are short, so that little else is timed. ``--hops`` adds a rank among 10,000 that do not exist: it
gets back what it sends. Its time is the CPU time of the host; messages are to be added, at the network's price.
"""

import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timing import BACKENDS, COUNTED, count_collectives, flags, on_ranks, publish, synchronize

from megatron_rl_loss import StepTotals
from megatron_rl_loss.step import collectives

#: Ranks that rows go to straight, by the name of the way.
WAYS = {"as it is": collectives.ONE_HOP_RANKS, "straight": 2**31, "grid": 1}
Case = tuple[bool, int, str]  # with ids, samples a rank, way


def measure(rank: int, cases: list[Case], repeats: int, device: str) -> list[tuple[float, int, int, int]]:
    """On a rank: of each case milliseconds of the fastest round, and its calls, messages and bytes."""
    seen = count_collectives()
    return [time_case(case, rank, dist.group.WORLD, seen, repeats, device) for case in cases]


def time_case(
    case: Case,
    rank: int,
    group: Any,
    seen: dict[str, int],
    repeats: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int, int, int]:
    with_ids, samples, way = case
    collectives.ONE_HOP_RANKS = WAYS[way]
    masks = [torch.ones(16, device=device)] * samples
    # Prompt groups of eight, split over ranks: every rank holds a part of every second group.
    rollouts = [i * group.size() + rank for i in range(samples)]
    ids: Any = {"rollout_ids": rollouts, "prompt_ids": [rollout // 8 for rollout in rollouts]} if with_ids else {}
    times = []
    for _ in range(repeats):
        if group is dist.group.WORLD:
            dist.barrier()
        seen.update(dict.fromkeys(seen, 0))
        start = clock()
        StepTotals.from_loss_masks(masks, dp_group=group, **ids)
        synchronize(device)
        times.append((clock() - start) * 1e3)
    return min(times), seen["calls"], seen["messages"], seen["bytes"]


def row(world_size: int, case: Case, by_rank: Sequence[Sequence[Any]]) -> dict[str, Any]:
    with_ids, samples, way = case
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


def simulate(ranks: int, cases: list[Case], repeats: int) -> list[dict[str, Any]]:
    """The work of the host on a rank of so many, and what it sends: collectives give back what they are given."""

    def swap(swaps: Sequence[Any]) -> list[Any]:
        for mine, theirs in pairwise(swaps):
            if mine.op is dist.isend and theirs.op is dist.irecv and len(mine.tensor) == len(theirs.tensor):
                theirs.tensor.copy_(mine.tensor)
        return []

    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
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
            parts = (0, group, count_collectives(), repeats, "cpu", time.process_time)
            return [row(ranks, case, [time_case(case, *parts)]) for case in cases]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 4096], help="A rank.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--hops", action="store_true", help="Rows with ids straight and as a grid; and 10,000 ranks.")
    args = parser.parse_args()
    cases: list[Case] = list(product((False, True), args.samples, ["as it is"]))
    if args.hops:
        cases = [(True, args.samples[0], way) for way in ("straight", "grid")]
    rows = []
    for ranks in args.ranks:
        by_rank = on_ranks(ranks, args.device, measure, cases, args.repeats, args.device)
        rows += [row(ranks, case, found) for case, found in zip(cases, zip(*by_rank, strict=True), strict=True)]
    if args.hops:
        rows += simulate(10_000, cases, args.repeats)
    name = "totals-hops" if args.hops else "totals"
    publish(name, args, {"totals of a step": rows}, threads=1, backend=BACKENDS[args.device])


if __name__ == "__main__":
    main()

"""Cost of a step's totals as data parallelism (DP) grows: bytes, collectives and time.

    python tools/bench/totals.py --out docs/bench       # 1, 2, 4 and 8 ranks over gloo, and one of 10,000
    python tools/bench/totals.py --device cuda --ranks 1 2      # a GPU per rank and NCCL

Bytes are what one rank hands to collectives, and what it gets back. Times are those of the slowest rank in its fastest
round, in milliseconds; with more ranks than cores they mostly show the machine. Masks are short, so that little else is
timed. The rank of 10,000 is alone, with the others' rows in memory: its time is the CPU time of the host.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timing import ALL_GATHERS, BACKENDS, count_collectives, flags, on_ranks, publish, synchronize

from megatron_rl_loss import Samples
from megatron_rl_loss.core import collectives, counting
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.core.ids import hashed

Case = tuple[bool, int]  # with ids, samples a rank
SIMULATED, SAMPLES = 10_000, 16


def samples_of(rank: int, ranks: int, case: Case, device: str = "cpu") -> list[Samples]:
    """Samples in prompt groups of eight, split over ranks: every rank holds a part of many groups."""
    with_ids, number = case
    rollouts = [i * ranks + rank for i in range(number)]
    ids: Any = {"rollout_ids": rollouts, "prompt_ids": [rollout // 8 for rollout in rollouts]} if with_ids else {}
    return [Samples([torch.ones(16, device=device)] * number, **ids)]


def measure(rank: int, cases: list[Case], repeats: int, device: str) -> list[tuple[float, int, int]]:
    """Milliseconds of the fastest round on a rank, with calls and bytes, for each case."""
    seen, group = count_collectives(), dist.group.WORLD

    def describe(case: Case) -> list[Samples]:
        samples = samples_of(rank, dist.get_world_size(), case, device)
        dist.barrier()
        return samples

    return [time_case(lambda case=case: describe(case), group, seen, repeats, device) for case in cases]  # type: ignore[misc]


def time_case(
    describe: Callable[[], list[Samples]],
    group: Any,
    seen: dict[str, int],
    repeats: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int, int]:
    times = []
    for _ in range(repeats):
        samples = describe()
        seen.update(dict.fromkeys(seen, 0))
        start = clock()
        count_step(samples, StepGroups(dp_group=group))
        synchronize(device)
        times.append((clock() - start) * 1e3)
    return min(times), seen["calls"], seen["bytes"]


def row(ranks: int, case: Case, by_rank: Sequence[Sequence[Any]]) -> dict[str, Any]:
    sent = max(row[2] for row in by_rank)
    return {
        "DP": ranks,
        "samples a rank": case[1],
        "ids": "rollouts and prompts" if case[0] else "none",
        "ms": max(row[0] for row in by_rank),
        "collectives": by_rank[0][1],
        "bytes sent": sent,
        "bytes received": sent * ranks,
    }


def simulate(case: Case, repeats: int) -> dict[str, Any]:
    """The host's work on one of many ranks; the others' messages were made before."""
    group: Any = SimpleNamespace(size=lambda: SIMULATED, rank=lambda: 0)
    groups = StepGroups(dp_group=group)
    settings, columns_of = hashed(""), partial(counting._columns, masks=[], sums=[])
    messages = []
    for rank in range(SIMULATED):
        tally = counting._tally(samples_of(rank, SIMULATED, case), groups, columns_of, settings)
        pickled = pickle.dumps(tuple(tally), pickle.HIGHEST_PROTOCOL)
        messages.append(len(pickled).to_bytes(collectives._LENGTH, "little") + pickled)
    longest = max(map(len, messages))

    def answer(out: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        begin = 0 if len(mine) == collectives._SMALL else collectives._SMALL
        out.copy_(received[begin])

    bounds = {0: collectives._SMALL, collectives._SMALL: max(longest, collectives._SMALL)}
    received = {
        begin: torch.frombuffer(
            bytearray(b"".join(message[begin:end].ljust(end - begin, b"\0") for message in messages)) or bytearray(1),
            dtype=torch.uint8,
        )
        for begin, end in bounds.items()
    }
    to_host = patch.object(collectives, "device_of", lambda _: torch.device("cpu"))
    gathers: dict[str, Any] = dict.fromkeys(ALL_GATHERS, answer)
    with to_host, patch.multiple(dist, **gathers):
        seen, describe = count_collectives(), lambda: samples_of(0, SIMULATED, case)
        return row(SIMULATED, case, [time_case(describe, group, seen, repeats, clock=time.process_time)])


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 4096], help="On each rank.")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    cases: list[Case] = list(product((False, True), args.samples))
    rows = []
    for ranks in args.ranks:
        by_rank = on_ranks(ranks, args.device, measure, cases, args.repeats, args.device)
        rows += [row(ranks, case, times) for case, times in zip(cases, zip(*by_rank, strict=True), strict=True)]
    rows += [simulate((with_ids, SAMPLES), args.repeats) for with_ids in (False, True)]
    publish("totals", args, {"totals of a step": rows}, threads=1, backend=BACKENDS[args.device])


if __name__ == "__main__":
    main()

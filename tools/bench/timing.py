"""Shared parts of the benchmarks: flags, other frameworks' code, turns, ranks, and output of tables."""

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from checkouts import MILES, SLIME, load

TURN_SECONDS = 0.004
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: Of a framework: how it is imported, its cuts and gathers of sequences under CP, and its formulas.
PEERS = {
    "slime": (SLIME, "slime.backends.megatron_utils.cp_utils", "slime.utils.ppo_utils"),
    "miles": (MILES, "miles.backends.training_utils.cp_utils", "miles.backends.training_utils.loss_hub.math_utils"),
}
#: By the name that torch's version has.
ALL_GATHERS = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)][:1]
COUNTED = ("all_reduce", *ALL_GATHERS, "all_to_all_single", "all_gather_object", "all_gather", "broadcast")


def flags(doc: str | None, *peers: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in peers:
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"A checkout of {name}.")
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="Folder for the tables, as text and JSON.")
    return parser


def peers(args: argparse.Namespace, place: SimpleNamespace) -> dict[str, tuple[Any, Any]]:
    """The two modules of each given checkout; their parallel state has `place.cp` alone."""
    by_name = dict[str, tuple[Any, Any]]()
    for name, (framework, *modules) in PEERS.items():
        if root := getattr(args, name, None):
            cp_utils, losses = load(framework, str(root), *modules)
            by_name[name] = cp_utils, losses
            cp_utils.get_parallel_state = lambda: place
            cp_utils.mpu = SimpleNamespace(
                get_context_parallel_rank=lambda: place.cp.rank,
                get_context_parallel_world_size=lambda: place.cp.size,
                get_context_parallel_group=lambda: place.cp.group,
            )
    return by_name


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    repeats: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds a call in each turn of each function, for `seconds` in all and at least `repeats` turns.

    A turn is as many calls as fill 4 ms (at least one, at most 1000), timed as one, after one call that is not timed
    and warms the caches. All functions have a turn, in an order that rotates, before one has the next. `clock` takes
    the times: `time.process_time` counts this process's CPU seconds, whatever others do meanwhile.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    order, began, rounds = list(functions), time.perf_counter(), 0

    def timed(function: Callable[[], object], calls: int) -> float:
        synchronize(device)
        start = clock()
        for _ in range(calls):
            function()
        synchronize(device)
        return clock() - start

    gc.collect()
    gc.disable()
    try:
        while rounds < repeats or time.perf_counter() - began < seconds:
            for name in order:
                calls = max(1, min(1000, int(TURN_SECONDS / timed(functions[name], 1))))
                times[name].append(timed(functions[name], calls) / calls * 1e3)
            order = order[1:] + order[:1]
            rounds += 1
    finally:
        gc.enable()
    return times


class Others:
    """Number of cores that other processes, and other guests of the host, kept busy since the object was made."""

    def __init__(self) -> None:
        self.began, self.seconds = time.monotonic(), self._seconds()

    def _seconds(self) -> float:
        user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()

    def busy(self) -> float:
        return (self._seconds() - self.seconds) / (time.monotonic() - self.began)


def keep_freed_memory() -> None:
    """glibc: take large blocks from the heap (M_MMAP_MAX = -4) and give nothing back (M_TRIM_THRESHOLD = -1).

    Otherwise some turns would spend most of their time on page faults.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-4, 0)
        assert libc.mallopt(-1, 2**31 - 1)


def count_collectives() -> dict[str, int]:
    """Wrap torch's collectives; the dict counts calls and bytes sent from now on."""
    seen = {"calls": 0, "bytes": 0}
    for name in COUNTED:
        original, sent = getattr(dist, name), int(name in ("all_to_all_single", *ALL_GATHERS))

        def counted(*args: Any, original: Any = original, sent: int = sent, **kwargs: Any) -> Any:
            seen["calls"] += 1
            seen["bytes"] += args[sent].numel() * args[sent].element_size()
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    return seen


def on_ranks(world_size: int, device: str, measure: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `measure(rank, *arguments)` on each rank of a group; each has a thread or a GPU of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, device, folder, measure, arguments)
        start = "fork" if device == "cpu" else "spawn"  # a fork shares the memory of what is imported
        mp.start_processes(_run_rank, args=arguments, nprocs=world_size, start_method=start)  # type: ignore[attr-defined, no-untyped-call]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def _run_rank(
    rank: int, world_size: int, device: str, folder: str, measure: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    Path(folder, f"{rank}.json").write_text(json.dumps(measure(rank, *arguments)))
    dist.barrier()
    os._exit(0)  # the group's threads would wait for ranks that are gone


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; unknown without a .git of its own, since git would take that of a parent folder."""
    if not (checkout / ".git").exists():
        return "of an unknown commit"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")


def machine(device: str = "cpu") -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def publish(
    name: str, args: argparse.Namespace, tables: Mapping[str, Sequence[Mapping[str, Any]]], **about: Any
) -> None:
    """Print tables by title; with --out keep them there, as NAME-DEVICE.txt and NAME-DEVICE.json."""
    about = machine(args.device) | about | {"ours": commit_of(ROOT)}
    about |= {peer: commit_of(root) for peer in PEERS if (root := getattr(args, peer, None))}
    parts = [", ".join(f"{key} {value}" for key, value in about.items())]
    parts += [f"{title}\n{tabulate(rows, headers='keys', floatfmt='.3g')}" for title, rows in tables.items()]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}-{args.device}.txt").write_text(text)
        (args.out / f"{name}-{args.device}.json").write_text(json.dumps({"machine": about, **tables}, indent=1) + "\n")

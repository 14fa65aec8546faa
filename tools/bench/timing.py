"""How the benchmarks take times, what they say of the machine they ran on, and how ranks' tables are kept."""

import ctypes
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

TURN_SECONDS = 0.004
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    order, began, rounds = list(functions), time.perf_counter(), 0
    gc.collect()
    gc.disable()
    try:
        while rounds < repeats or time.perf_counter() - began < seconds:
            for name in order:
                function = functions[name]
                synchronize()
                start = clock()
                function()
                synchronize()
                calls = max(1, min(1000, int(TURN_SECONDS / (clock() - start))))
                start = clock()
                for _ in range(calls):
                    function()
                synchronize()
                times[name].append((clock() - start) / calls * 1e3)
            order = order[1:] + order[:1]
            rounds += 1
    finally:
        gc.enable()
    return times


def busy_elsewhere() -> float | None:
    """CPU seconds that other processes, and other guests of the host, have taken so far."""
    if not Path("/proc/stat").exists():
        return None
    user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def keep_freed_memory() -> None:
    """glibc: take large blocks from the heap (M_MMAP_MAX = -4) and give nothing back (M_TRIM_THRESHOLD = -1).

    Some turns would spend more time on page faults than on anything else.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-4, 0)
        assert libc.mallopt(-1, 2**31 - 1)


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
    folder: Path, name: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], note: str = ""
) -> None:
    """Print a table of what ranks measured, and keep it as NAME.txt and NAME.json."""
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    text = f"{head}\n\n{tabulate(rows, headers='keys', floatfmt='.3g')}\n{note}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps({"machine": about, "results": rows}, indent=1) + "\n")
    print(text)


def start_rank(device: str, rank: int, world_size: int, folder: str) -> Callable[[], None]:
    """Join the group of a benchmark's ranks, each with a thread or a GPU of its own; how to wait for the device."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def commit_of(checkout: Path) -> str | None:
    """None without a .git of its own: git would answer for a repository further up."""
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")

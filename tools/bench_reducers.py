"""What reducing a micro-batch costs, beside a closure that loops over samples and beside the memory it must touch.

    .venv/bin/python tools/bench_reducers.py                     # CPU, 2 threads; writes docs/bench/reducers-cpu.*
    .venv/bin/python tools/bench_reducers.py --sizes 512x8192    # one size only, every layout and mode
    .venv/bin/python tools/bench_reducers.py --builds            # the build alone, up to 100,000 samples
    .venv/bin/python tools/bench_reducers.py --device cuda       # the same on a GPU, bf16 losses too

Three ways, timed in one run on the same data:

- *ours*: build (layout, `Samples`, reducer; the step's totals are counted apart), forward and backward;
- *per-sample closure*: our own re-statement of how slime and miles reduce, one sample at a time in Python; build is the
  cut of the masks for the context-parallel (CP) rank and their sums, which some versions repeat at every call;
- *floor*: one read of the losses and weights and one write of the gradient (a dot product and a product), and with
  metrics one more read of the weights and of each metric. The floor of a build is one read of the masks of the whole
  micro-batch, and one write of this rank's weights. *dot* is ``torch.dot(losses, weights)``, forward and backward.

Masks are one int32 tensor a sample. "all" is build + forward + backward. Times are those of the fastest runs, in
milliseconds; compare ratios, not times, between machines. On a CPU, memory once freed stays with the process, or some
runs (of any of the three) would spend more time on page faults than on anything else.

With ``MEGATRON_RL_LOSS_HOST_KERNELS=0`` torch and NumPy do all the work on the host (see host_kernels.py).
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils.benchmark import Timer

from megatron_rl_loss import (
    MODES,
    Contiguous,
    Gathered,
    Layout,
    StepTotals,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
    host_kernels,
)
from megatron_rl_loss.reducers import ReducerInputs, WeightedSum, build_reducer
from megatron_rl_loss.samples import Samples

NUM_METRICS = 5
OUT = Path(__file__).parent.parent / "docs" / "bench"


@dataclass(frozen=True)
class Case:
    samples: int
    mean_length: int
    cp_size: int
    layout: str = "ZigzagTHD"
    mode: str = "sample_mean"
    ragged: bool = True
    dtype: str = "float32"


GRID = [Case(*sizes) for sizes in itertools.product((64, 512, 4096), (1024, 8192, 32768), (1, 4, 8))]
LAYOUTS = ("ZigzagTHD", "ZigzagBSHD", "ZigzagResponse", "Contiguous", "Gathered")
VARIANTS = [
    *(Case(512, 8192, cp, layout, mode, ragged=layout != "ZigzagBSHD")
      for layout in LAYOUTS for mode in MODES for cp in (1, 4)),
    *(Case(512, 8192, cp, ragged=False) for cp in (1, 4)),
]  # fmt: skip


class Data:
    """A micro-batch of `case` as a data loader would hand it over, and this rank's losses."""

    def __init__(self, case: Case, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        spread = case.mean_length // 2 if case.ragged else 0
        lengths = torch.randint(
            case.mean_length - spread, case.mean_length + spread + 1, (case.samples,), generator=generator
        )
        self.lengths = lengths.tolist()
        self.masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in self.lengths]
        self.prompt_ids = [i // 8 for i in range(case.samples)]
        self.cp_rank = case.cp_size - 1
        multiple = 2 * case.cp_size
        self.slots = [-(-n // multiple) * multiple for n in self.lengths]
        self.cu_seqlens = [0, *itertools.accumulate(self.slots)]
        self.case = case
        self.totals = StepTotals.from_loss_masks(self.masks, prompt_ids=self.prompt_ids)
        local = self.reducer()[0].weights.numel()
        dtype = getattr(torch, case.dtype)
        self.losses = torch.randn(local, device=device, dtype=dtype, requires_grad=True)
        self.metrics = [torch.randn(local, device=device, dtype=dtype) for _ in range(NUM_METRICS)]

    def layout(self) -> Layout:
        match self.case.layout:
            case "ZigzagBSHD":
                return ZigzagBSHD(len(self.slots), self.slots[0], total_lengths=self.lengths)
            case "ZigzagResponse":
                return ZigzagResponse([n + 512 for n in self.lengths], self.lengths)
            case "Contiguous":
                return Contiguous(self.cu_seqlens, total_lengths=self.lengths)
            case "Gathered":
                return Gathered(self.cu_seqlens, total_lengths=self.lengths)
        return ZigzagTHD(self.cu_seqlens, total_lengths=self.lengths)

    def reducer(self, metrics: bool = True) -> tuple[WeightedSum, WeightedSum]:
        """The reducers of the losses and, where they are another one, of metrics, from the masks up."""
        case = self.case
        samples = Samples(self.masks, layout=self.layout(), prompt_ids=self.prompt_ids)
        inputs = ReducerInputs(samples=samples, totals=self.totals, cp_rank=self.cp_rank, cp_size=case.cp_size,
                               divisor=case.mean_length if case.mode == "constant" else None)  # fmt: skip
        found = build_reducer(case.mode, inputs)
        metric = found
        if metrics and case.mode != "sample_mean":
            metric = build_reducer("sample_mean", ReducerInputs(**{**vars(inputs), "divisor": None}))
        assert isinstance(found, WeightedSum)
        assert isinstance(metric, WeightedSum)
        return found, metric


class PerSampleClosure:
    """One sample at a time: cut every mask for the CP rank, then sum, divide and add up in a Python loop.

    Sample means in the packed zigzag layout; what peers' closures compute, in our own words.
    """

    def __init__(self, data: Data, device: str) -> None:
        cp_size, cp_rank = data.case.cp_size, data.cp_rank
        self.masks, self.denominators = [], []
        for mask, slot in zip(data.masks, data.slots, strict=True):
            moved = mask.to(device)
            self.denominators.append(moved.sum().clamp(min=1))
            if slot > mask.numel():
                moved = torch.nn.functional.pad(moved, (0, slot - mask.numel()))
            if cp_size > 1:
                chunk = slot // (2 * cp_size)
                tail = 2 * cp_size - 1 - cp_rank
                moved = torch.cat(
                    [moved[cp_rank * chunk : (cp_rank + 1) * chunk], moved[tail * chunk : (tail + 1) * chunk]]
                )
            self.masks.append(moved)
        self.lengths = [mask.numel() for mask in self.masks]

    def __call__(self, losses: Tensor) -> Tensor:
        parts = zip(losses.split(self.lengths), self.masks, self.denominators, strict=True)
        return torch.as_tensor(sum([(loss * mask).sum() / denominator for loss, mask, denominator in parts]))


def milliseconds(functions: Mapping[str, Callable[[], Any]], min_run_time: float) -> dict[str, float]:
    """Of the fastest of many short runs of each, in turns: a shared machine may be slower for some seconds."""
    timers, times = {}, {name: float("inf") for name in functions}
    for name, function in functions.items():
        timers[name] = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    rounds, started = 0, time.perf_counter()
    while rounds < 3 or time.perf_counter() - started < min_run_time * len(functions):
        for name, timer in timers.items():
            first = timer.timeit(1).mean  # brings its data into the caches
            if rounds:
                times[name] = min(times[name], first, timer.timeit(max(1, min(1000, int(0.01 / first)))).mean)
        rounds += 1
    return {name: seconds * 1e3 for name, seconds in times.items()}


def with_backward(losses: Tensor, function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        losses.grad = None
        function(losses).backward()

    return run


def measure(case: Case, device: str, min_run_time: float) -> dict[str, Any]:
    data = Data(case, device)
    losses, metrics = data.losses, data.metrics
    reducer, metric = data.reducer()
    gradient = torch.ones((), device=device)

    def floor() -> None:
        flat = losses.detach().float()
        torch.dot(flat, reducer.weights)
        torch.mul(reducer.weights, gradient)

    def floor_with_metrics() -> None:
        floor()
        for values in metrics:
            torch.dot(values.float(), metric.weights)

    joined = torch.cat(data.masks).float()  # as many bytes as the int32 masks

    def floor_of_build() -> None:
        torch.dot(joined, joined)
        torch.ones_like(reducer.weights)

    def dot(values: Tensor) -> Tensor:
        return torch.dot(values.float(), reducer.weights)

    reducer(losses)  # moves the weights to the device
    functions: dict[str, Callable[[], Any]] = {
        "ours build": lambda: data.reducer(metrics=False),
        "ours build_metrics": data.reducer,
        "ours forward": lambda: reducer(losses),
        "ours forward_backward": with_backward(losses, reducer),
        "ours forward_backward_metrics": with_backward(losses, lambda x: reducer.with_metrics(x, metrics, metric)[0]),
        "floor build": floor_of_build,
        "floor all": floor,
        "floor all_metrics": floor_with_metrics,
        "dot forward_backward": with_backward(losses, dot),
    }
    if case.layout == "ZigzagTHD" and case.mode == "sample_mean":
        closure = PerSampleClosure(data, device)
        error = (
            closure(losses.detach()) / case.samples - reducer(losses.detach())
        ).abs() / losses.detach().abs().mean()
        assert float(error) < 1e-3, f"the two do not compute the same: {float(error)}"

        def all_metrics(x: Tensor) -> Tensor:
            with torch.no_grad():
                for values in metrics:
                    closure(values)
            return closure(x)

        functions |= {
            "closure build": lambda: PerSampleClosure(data, device),
            "closure forward": lambda: closure(losses),
            "closure forward_backward": with_backward(losses, closure),
            "closure forward_backward_metrics": with_backward(losses, all_metrics),
        }
    found: dict[str, Any] = {**asdict(case), "local_tokens": losses.numel()}
    for name, took in milliseconds(functions, min_run_time).items():
        who, what = name.split()
        found.setdefault(who, {})[what] = took
    return found


def _suffix() -> str:
    return "" if host_kernels.available() else "-numpy"


def measure_builds(about: dict[str, Any], out: Path, min_run_time: float) -> None:
    rows = []
    for samples, cp_size in itertools.product((1_000, 10_000, 100_000), (1, 8)):
        took = milliseconds({"build, ms": Data(Case(samples, 100, cp_size), "cpu").reducer}, min_run_time)
        rows.append({"samples": samples, "mean length": 100, "cp": cp_size, **took})
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    text = f"{head}\n\n{tabulate(rows, headers='keys', floatfmt='.3g')}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"builds-cpu{_suffix()}.txt").write_text(text)
    print(text)


def keep_freed_memory() -> None:
    """glibc: take large blocks from the heap (M_MMAP_MAX = -4) and give nothing back (M_TRIM_THRESHOLD = -1)."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-4, 0)
        assert libc.mallopt(-1, 2**31 - 1)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Of our times to the others'; "all" includes the build, the ones to the floor do not."""
    ours, floor = found["ours"], found["floor"]
    result = {
        "to_floor": ours["forward_backward"] / floor["all"],
        "to_floor_metrics": ours["forward_backward_metrics"] / floor["all_metrics"],
        "build_to_floor": ours["build"] / floor["all"],
        "build_to_its_floor": ours["build"] / floor["build"],
        "to_dot": ours["forward_backward"] / found["dot"]["forward_backward"],
    }
    if "closure" in found:
        closure = found["closure"]
        for name, part in (("", "forward_backward"), ("_metrics", "forward_backward_metrics")):
            all_of_ours = ours[f"build{name}"] + ours[part]
            result[f"closure_to_ours_all{name}"] = (closure["build"] + closure[part]) / all_of_ours
            result[f"closure_to_ours_run{name}"] = closure[part] / ours[part]
        result["closure_to_ours_build"] = closure["build"] / ours["build"]
    return result


def machine(device: str) -> dict[str, Any]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "host kernels": host_kernels.available(),
    }


def table(results: list[dict[str, Any]]) -> str:
    rows = []
    for found in results:
        ratio, ours, closure = ratios(found), found["ours"], found.get("closure")
        rows.append(
            {
                "samples x mean": f"{found['samples']} x {found['mean_length']}"
                + ("" if found["ragged"] else " equal"),
                "cp": found["cp_size"],
                "layout": found["layout"],
                "mode": found["mode"] + ("" if found["dtype"] == "float32" else f" {found['dtype']}"),
                "build": ours["build"],
                "with metrics": ours["build_metrics"],
                "fwd": ours["forward"],
                "fwd+bwd": ours["forward_backward"],
                "+5 metrics": ours["forward_backward_metrics"],
                "floor": found["floor"]["all"],
                "fwd+bwd / floor": ratio["to_floor"],
                "/ dot": ratio["to_dot"],
                "+5 / floor": ratio["to_floor_metrics"],
                "build / floor": ratio["build_to_floor"],
                "/ its floor": ratio["build_to_its_floor"],
                **(
                    {}
                    if closure is None
                    else {
                        "closure: build": closure["build"],
                        "fwd+bwd ": closure["forward_backward"],
                        "+5 metrics ": closure["forward_backward_metrics"],
                        "all / ours": ratio["closure_to_ours_all"],
                        "all +5 / ours": ratio["closure_to_ours_all_metrics"],
                        "fwd+bwd / ours": ratio["closure_to_ours_run"],
                    }
                ),
            }
        )
    return str(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="simple"))


def plot(results: list[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # type: ignore[no-untyped-call,unused-ignore]
    from matplotlib import pyplot

    shown = [found for found in results if "closure" in found and found["ragged"] and found["dtype"] == "float32"]
    curves: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "per-sample closure": ("tab:red", lambda f: f["closure"]["build"] + f["closure"]["forward_backward"]),
        "ours": ("tab:blue", lambda f: f["ours"]["build"] + f["ours"]["forward_backward"]),
        "floor": ("tab:gray", lambda f: f["floor"]["all"]),
    }
    sizes = sorted({found["cp_size"] for found in shown})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(4 * len(sizes), 4), sharey=True, squeeze=False)
    for axis, cp_size in zip(axes[0], sizes, strict=True):
        for length, style in zip(sorted({found["mean_length"] for found in shown}), ("-", "--", ":"), strict=False):
            of = [found for found in shown if found["cp_size"] == cp_size and found["mean_length"] == length]
            x = [found["samples"] for found in of]
            for name, (color, value) in curves.items():
                label = f"{name}, {length // 1024}k tokens"
                axis.plot(x, [value(found) for found in of], style, color=color, marker=".", label=label)
        axis.set(xscale="log", yscale="log", xlabel="samples in the micro-batch", title=f"CP {cp_size}")
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].set_ylabel("build + forward + backward, ms")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"pg_loss, sample_mean, ragged: {about['device']}, {about['threads']} threads", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch.")
    parser.add_argument("--sizes", action="append", help="Only these, as in 512x8192.")
    parser.add_argument("--builds", action="store_true", help="Measure the build alone, for very many samples.")
    parser.add_argument("--max-tokens", type=int, default=40_000_000, help="Leave out cases with more tokens in all.")
    parser.add_argument("--min-run-time", type=float, default=0.3, help="Seconds to measure each figure for.")
    parser.add_argument("--out", type=Path, default=OUT, help="Folder for the table, the JSON and the plot.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.device == "cpu":
        keep_freed_memory()
    about = machine(args.device)
    if args.builds:
        measure_builds(about, args.out, args.min_run_time)
        return
    cases = [*GRID, *VARIANTS]
    if args.device == "cuda":
        cases += [Case(512, 8192, cp, dtype="bfloat16") for cp in (1, 4)]
    if args.sizes:
        cases = [case for case in cases if f"{case.samples}x{case.mean_length}" in args.sizes]
    left_out = [case for case in cases if case.samples * case.mean_length > args.max_tokens]
    results = []
    for case in cases:
        if case not in left_out:
            results.append(measure(case, args.device, args.min_run_time))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.out / f"reducers-{args.device}{_suffix()}"
    lines = [
        ", ".join(f"{key} {value}" for key, value in about.items()),
        f"Left out, over {args.max_tokens} tokens: {len(left_out)} cases" if left_out else "All cases",
        "",
        table(results),
    ]
    name.with_suffix(".txt").write_text("\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n")
    with_ratios = [found | {"ratios": ratios(found)} for found in results]
    name.with_suffix(".json").write_text(json.dumps({"machine": about, "results": with_ratios}, indent=1) + "\n")
    plot(results, about, name.with_suffix(".png"))
    print(f"Written: {name}.txt, .json, .png")


if __name__ == "__main__":
    main()

"""Run every part that proves this library on GPUs, and write the results as JSON and as a page.

    python tools/gpu_proof.py [--rehearse] [--limit SECONDS] [--out FOLDER]

For a part that cannot run, the page has the reason. For a part that fails, it has the last lines; the other parts still
run, and the exit status is 1. The page is written after each part. `--rehearse` runs each part on the CPU at small
sizes: it proves the commands alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import machine

ROOT = Path(__file__).parents[1]
LAST_LINES = 120
#: Environment variables of checkouts, and the benchmarks' options for them.
PEERS = {"SLIME_PATH": "--slime", "MILES_PATH": "--miles"}


@dataclass(frozen=True)
class Part:
    """A command, and the reason if it cannot run here."""

    name: str
    command: Sequence[str]
    reason: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    figures: str = ""  # the JSON file it writes
    seconds: int = 3600  # it may take, against hangs


def parts(rehearse: bool, folder: Path) -> Iterator[Part]:
    gpus = 0 if rehearse else torch.cuda.device_count()
    device = ["--device", "cpu" if rehearse else "cuda"]
    without_gpu = "" if gpus or rehearse else "needs a GPU"
    without_two = "" if gpus > 1 or rehearse else f"needs 2 GPUs, there are {gpus}"
    peers = [f"{option}={os.environ[name]}" for name, option in PEERS.items() if name in os.environ]
    on_gpu = {} if rehearse else {"TEST_DEVICE": "cuda"}
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if rehearse else {}

    def bench(
        name: str,
        small: str,
        large: str,
        others: Sequence[str] = peers,
        reason: str = without_gpu,
        seconds: int = 3600,
    ) -> Part:
        sizes = (small if rehearse else large).split()
        command = ["python", f"tools/bench/{name}.py", *device, *others, *sizes, f"--out={folder}"]
        return Part(name, command, reason, no_gpu, f"{name}-{device[1]}.json", seconds)

    # First what a short loan of a GPU must show: the time of log-probs, then that kernels and plain torch agree.
    slime = [peer for peer in peers if peer.startswith("--slime")]
    yield bench("logprobs", "--sizes 64x256 --seconds 0.1 --repeats 1", "--limit 210", slime, seconds=240)
    cases = ["--cases", "4" if rehearse else "40", *device]  # on a GPU, nearly each compiles kernels of its own
    compared = ["python", "tools/compare_kernels.py", *cases]
    yield Part("kernels beside plain torch", compared, without_gpu, no_gpu, seconds=240)
    yield bench("reducers", "--sizes 2x64 --seconds 0.1 --passes 1", "--seconds 1 --passes 2")
    yield bench("audit", "--tokens 65536 --hidden 64 --seconds 0.1", "--seconds 2", [])
    yield bench("segments", "--sizes 2x1024 --cp 2 --repeats 1", f"--cp {min(gpus, 4)}", reason=without_two)
    ranks = " ".join(str(n) for n in (1, 2, 4, 8) if n <= gpus)
    yield bench("totals", "--ranks 1 2 --samples 16 --repeats 1", f"--ranks {ranks}", [])
    launch, steps = "examples/launch_grpo.sh", ["--train-iters", "2" if rehearse else "20"]
    asked = ["--loss-aggregation", "prompt_mean", *steps]
    yield Part("launch of one process", [launch, "1", *asked], without_gpu, no_gpu)
    without_four = "" if gpus > 3 or rehearse else f"needs 4 GPUs, there are {gpus}"
    layout = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]
    yield Part("launch at TP 2 x CP 2", [launch, "4", *layout, *asked], without_four, no_gpu)
    # Each test of ranks launches its own: they are shared out one by one.
    tests = ["-n0", "tests/cost/test_cost.py"] if rehearse else ["-n4", "--dist=load", "tests"]
    yield Part("tests", ["python", "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", *tests], without_gpu, on_gpu)


def run(part: Part, folder: Path, limit: int = 3600) -> dict[str, Any]:
    """Run a part, at most so many seconds. Returns its entry of the page: command, outcome, last lines, and figures."""
    shown = " ".join([*(f"{name}={value}" for name, value in part.variables.items()), *part.command])
    for name in PEERS:
        shown = shown.replace(f"={os.environ.get(name)}", f"=${name}")
    record: dict[str, Any] = {"part": part.name, "command": shown.replace(f" --out={folder}", "")}
    if part.reason:
        return record | {"outcome": f"not run: {part.reason}"}
    python = [sys.executable] if part.command[0] == "python" else [part.command[0]]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path} | part.variables
    began, seconds = time.monotonic(), min(limit, part.seconds)
    done = subprocess.run(
        ["timeout", "--kill-after=10", str(seconds), *python, *part.command[1:]], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    ended = {0: "passed", 124: f"failed: still running after {seconds} s"}
    record["outcome"] = ended.get(done.returncode, f"failed with exit status {done.returncode}")
    record["seconds"] = round(time.monotonic() - began, 1)
    lines = [line for line in done.stdout.splitlines() if "warn" not in line.lower()]
    record["output"] = [line.replace(f"{ROOT}/", "") for line in lines[-LAST_LINES:]]
    figures = folder / part.figures
    return record | ({"figures": json.loads(figures.read_text())} if part.figures and figures.exists() else {})


def page(about: dict[str, Any], records: Sequence[dict[str, Any]], rehearsed: bool) -> str:
    """The report as Markdown: a table of parts, then the output of each."""
    title = "Rehearsal on the CPU of what a GPU is to show" if rehearsed else f"On {about['device']}"
    command = "tools/gpu_proof.sh" + (" --rehearse" if rehearsed else "")
    text = f"# {title}\n\nWritten by `{command}`. " + ", ".join(f"{key} {value}" for key, value in about.items())
    text += "\n\n| part | outcome | seconds |\n|---|---|---|\n"
    text += "".join(f"| {record['part']} | {record['outcome']} | {record.get('seconds', '')} |\n" for record in records)
    for record in records:
        said = "\n".join(record.get("output", [record["outcome"]]))
        text += f"\n## {record['part']}\n\n`{record['command']}`\n\n```\n{said}\n```\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="Run on the CPU, at small sizes.")
    parser.add_argument("--limit", type=int, default=3600, metavar="SECONDS", help="A part may take, against hangs.")
    parser.add_argument("--out", type=Path, help="Default: docs/bench, or build/gpu_proof for a rehearsal.")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.rehearse
    about = machine("cuda" if on_gpu else "cpu") | {"GPUs": torch.cuda.device_count() if on_gpu else 0}
    out = args.out or (ROOT / "build" / "gpu_proof" if args.rehearse else ROOT / "docs" / "bench")
    card = "rehearsal" if args.rehearse else re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower())
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(args.rehearse, Path(folder)):
            records.append(run(part, Path(folder), args.limit))
            print(f"{part.name}: {records[-1]['outcome']}", flush=True)
            if on_gpu or args.rehearse:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"gpu-{card}.json").write_text(json.dumps({"machine": about, "parts": records}, indent=1) + "\n")
                (out / f"gpu-{card}.md").write_text(page(about, records, args.rehearse))
    if not (on_gpu or args.rehearse):
        raise SystemExit("Nothing was written: this machine has no GPU. Add --rehearse to run every part on the CPU.")
    print(f"written: {out / f'gpu-{card}.md'} and .json")
    sys.exit(any(record["outcome"].startswith("failed") for record in records))


if __name__ == "__main__":
    main()

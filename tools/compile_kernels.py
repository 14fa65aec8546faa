"""Compile the Triton kernels of log-probs for an NVIDIA GPU that is not there, and show what the compiler made of them.

    python tools/compile_kernels.py [--quick] [--capability 90] [--out docs/bench]

The package's own launches run with tensors on the host, up to the point where a GPU would start: each row of the table
is a program that a real call of that kind would run. The columns:

- *registers*, *stack*: per thread; a stack above 0 means that registers spilled to memory;
- *instructions*: per logit, in the longest loop, or in the whole program where it has none;
- *bits*: of the widest load or store of global memory.

The exit status is 1 if a program spills, or reads aligned logits by less than 128 bits.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_rl_loss.logprobs import flags
from megatron_rl_loss.logprobs import triton_kernels as kernels
from megatron_rl_loss.logprobs.kept_ids import Kept

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
THREADS_OF_WARP = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Kinds of calls; `columns` that 16 does not divide make rows unaligned.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": {"entropy": True},
    "entropy, mask of ids": {"entropy": True, "keep": True},
    "entropy, kept ids": {"entropy": True, "kept": True},
    "entropy, padding, token mask": {"entropy": True, "held": 30000, "mask": True},
    "8 ids": {"ids": 8},
    "128 ids, mask of ids": {"ids": 128, "keep": True},
    "128 ids, kept ids": {"ids": 128, "kept": True},
    "entropy, first row checked": {"entropy": True, "check_first_row": True},
    "entropy, 32767 columns": {"entropy": True, "columns": 32767},
}
QUICK = ("entropy", "128 ids, mask of ids", "entropy, kept ids")


class Programs(list[tuple[str, Any]]):
    """The programs that launches compiled, with their kernels' names; nothing is launched."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        target = GPUTarget("cuda", capability, THREADS_OF_WARP)
        zero: Any = lambda *_: 0  # noqa: E731
        driver = SimpleNamespace(get_current_device=zero, get_current_stream=zero, get_current_target=lambda: target)
        triton.runtime.driver.set_active(driver)  # in the place of one that asks a GPU
        run = JITFunction.run

        def compile_alone(function: Any, *args: Any, warmup: bool, **more: Any) -> Any:
            self.append((function.__name__.strip("_"), run(function, *args, warmup=True, **more)))
            return self[-1][1]

        JITFunction.run = compile_alone


def logits_of_turn(kernel: str, dtype: torch.dtype) -> int | None:
    """How many logits a thread works on in a turn of its loop; None where a kernel reads none."""
    per_turn = {
        "statistics": kernels.FORWARD["LANES"] * (16 // dtype.itemsize) // kernels.FORWARD["num_warps"],
        "gradient": kernels.BACKWARD["BLOCK"] // kernels.BACKWARD["num_warps"],
    }
    return per_turn[kernel] // THREADS_OF_WARP if kernel in per_turn else None


def call(dtype: torch.dtype, kind: dict[str, Any]) -> None:
    """Forward and backward of a kind."""
    columns, ids, entropy = kind.get("columns", 32768), kind.get("ids", 1), kind.get("entropy", False)
    logits, labels = torch.zeros(2, columns, dtype=dtype), torch.zeros(2, ids, dtype=torch.int64)
    per_token = torch.tensor([[0, 64], [64, 128]])
    shared = {
        "first": 0,
        "held": kind.get("held", columns),
        "scale": 1.0,
        "mask": torch.ones(2, dtype=torch.bool) if kind.get("mask") else None,
        "keep": torch.ones(2, columns, dtype=torch.bool) if kind.get("keep") else None,
        "kept": Kept(torch.arange(128), per_token) if kind.get("kept") else None,
    }
    norm, g, h = torch.ones(3 + ids, 2), torch.ones(2, ids), torch.ones(2) if entropy else None
    further = {"size": columns, "entropy": entropy, "flags": flags.tensor()}
    kernels.statistics(logits, labels, **shared, **further, check_first_row=kind.get("check_first_row", False))
    if not kind.get("check_first_row"):  # which concerns the first kernel alone
        kernels.differentiate(logits, torch.empty_like(logits), labels, norm, g, h, **shared)


def dump(program: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [str(BINARIES / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def described(program: Any, logits: int | None) -> dict[str, Any]:
    """What the compiler made: resources, and the instructions of the longest loop."""
    used = re.search(r"REG:(\d+) STACK:(\d+)", dump(program, "--dump-resource-usage"))
    assert used
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)(.*);", dump(program, "--dump-sass"))
    at = [int(place, 16) for place, _, _ in code]
    jumps = [
        (int(place, 16), int(target.group(1), 16))
        for place, name, rest in code
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", rest))
    ]
    loops = [(target, place) for place, target in jumps if target < place]
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, at[-1]))
    accesses = [name for _, name, _ in code if name.startswith(("LDG", "STG"))]
    widest = max((int(bits) for name in accesses for bits in re.findall(r"\.(64|128)\b", name)), default=32)
    return {
        "registers": int(used.group(1)),
        "stack": int(used.group(2)),
        "instructions": logits and sum(begin <= place <= end for place in at) / logits,
        "bits": widest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="A few kinds of calls, in bf16.")
    parser.add_argument("--capability", type=int, default=90, help="Of the GPU: 90 for H100 and H200.")
    parser.add_argument("--out", type=Path, help="Folder for the table, as JSON.")
    args = parser.parse_args()
    programs, rows, failures = Programs(args.capability), [], list[str]()
    for dtype in ("bf16",) if args.quick else DTYPES:
        for kind in QUICK if args.quick else KINDS:
            call(DTYPES[dtype], KINDS[kind])
            for kernel, program in programs:
                logits = logits_of_turn(kernel, DTYPES[dtype])
                row = {"kernel": kernel, "dtype": dtype, "call": kind} | described(program, logits)
                rows.append(row)
                if row["stack"] or (logits and row["bits"] < 128 and "columns" not in KINDS[kind]):
                    failures.append(f"{kernel}, {dtype}, {kind}")
            programs.clear()
    kernels.combine(torch.zeros(8, 64, 4), 1.0)
    rows.append({"kernel": "combine", "dtype": "fp32", "call": "8 ranks"} | described(programs[0][1], None))
    programs.clear()
    if args.out is not None:
        machine = {"triton": triton.__version__, "torch": torch.__version__}
        text = json.dumps({"machine": machine, "programs": rows}, indent=1)
        (args.out / f"kernels-sm_{args.capability}.json").write_text(text + "\n")
    print(f"sm_{args.capability}, triton {triton.__version__}, torch {torch.__version__}")
    print(tabulate(rows, headers="keys", floatfmt=".1f"))
    if failures:
        sys.exit(f"spills, or narrow loads: {'; '.join(failures)}")


if __name__ == "__main__":
    main()

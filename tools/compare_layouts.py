"""Compare the same steps in several layouts: a row per layout, from runs of examples/online_grpo.py.

    python tools/compare_layouts.py --start runs/demo/start runs/demo/alone runs/demo/tp2cp2 runs/demo/dp2

The first folder is the reference. All runs began at the weights in --start, trained on the same rollouts
(--save-rollouts, --replay-rollouts) and saved their last weights (--save FOLDER/weights). Exit status 1 if one differs.

A row has the largest difference over the steps, of the loss and of the grad norm, each relative to the reference's
largest; and of the weights, the norm of the difference relative to the norm of what training changed. Float32 rounding
is about 1e-7 per operation. Adam divides by the size of a gradient, so a gradient that is all rounding may flip the
sign of a step: the bound of weights is looser.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

BOUNDS = {"loss": 1e-4, "grad norm": 1e-4, "weights": 1e-3}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of a Megatron checkpoint, by name."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder, file.name)
        state = torch.load(file.name, weights_only=False)
    return {name: value.double() for name, value in state.items() if isinstance(value, torch.Tensor)}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Euclidean distance over all tensors; both need the same names."""
    if a.keys() != b.keys():
        raise ValueError(f"the weights have other names: {sorted(a.keys() ^ b.keys())}")
    return float(sum((a[name] - b[name]).square().sum() for name in a) ** 0.5)


def steps_of(run: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def relative(values: list[float], reference: list[float]) -> float:
    """The largest difference, relative to the largest value of the reference."""
    return max(abs(a - b) for a, b in zip(values, reference, strict=True)) / max(map(abs, reference))


def layout_of(run: Path) -> str:
    settings: dict[str, Any] = json.loads((run / "settings.json").read_text())
    tp, cp = settings["tensor_model_parallel_size"], settings["context_parallel_size"]
    sizes = {"TP": tp, "CP": cp, "DP": settings["world_size"] // (tp * cp)}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 process"


def differences(run: Path, reference: Path, start: dict[str, torch.Tensor]) -> dict[str, float]:
    expected = weights_in(reference / "weights")
    return {
        "loss": relative(steps_of(run, "pg_loss"), steps_of(reference, "pg_loss")),
        "grad norm": relative(steps_of(run, "grad_norm"), steps_of(reference, "grad_norm")),
        "weights": distance(weights_in(run / "weights"), expected) / distance(start, expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="Weights at the start of all runs.")
    parser.add_argument("reference", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    start, same = weights_in(args.start), True
    for run in args.runs:
        errors = differences(run, args.reference, start)
        within = all(errors[name] <= bound for name, bound in BOUNDS.items())
        same &= within
        numbers = ", ".join(f"{name} {value:.0e}" for name, value in errors.items())
        verdict = "equals" if within else "differs from"
        print(f"{layout_of(run)} {verdict} {layout_of(args.reference)}: {numbers} {'✓' if within else '✗'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()

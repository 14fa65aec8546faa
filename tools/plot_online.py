"""One picture of runs of examples/online_grpo.py: held-out numbers against steps, a line a mode, its spread over seeds.

    python tools/plot_online.py --runs runs/modes/*/* --json docs/online/modes-cpu.json --png docs/online/modes-cpu.png
    python tools/plot_online.py --json docs/online/modes-cpu.json --png docs/online/modes-cpu.png

With --runs the numbers are collected from the runs' folders and written to the JSON; without, they are read from it.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PANELS = {
    "held_out_reward": "held-out reward",
    "held_out_length_right": "tokens of right responses",
    "held_out_length_wrong": "tokens of wrong responses",
    "held_out_working": "share with working",
    "held_out_entropy": "entropy, nats a token",
}
#: Okabe and Ito's colours, told apart without red and green.
STYLES = [("#0072B2", "-"), ("#E69F00", "-"), ("#009E73", "-"), ("#D55E00", "-"), ("#222222", (0, (1, 2)))]


def collect(folders: list[Path]) -> list[dict[str, Any]]:
    """Of every run its settings, and what was seen at each evaluation."""
    runs = []
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        kept = {name: value for name, value in settings.items() if name not in PATHS and value is not None}
        seen = [
            {"step": one["step"], **{name: round(one[name], 4) for name in PANELS if name in one}}
            for one in steps
            if "held_out_reward" in one
        ]
        runs.append({"settings": kept, "seconds": steps[-1]["seconds"], "evaluations": seen})
    return runs


PATHS = ("output", "load", "save", "save_start", "save_rollouts", "replay_rollouts")


def plot(runs: list[dict[str, Any]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_mode: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_mode[run["settings"]["aggregation"].removeprefix("loss aggregation: ").split(", unit")[0]].append(run)
    figure, grid = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    axes = dict(zip(PANELS, grid.flat, strict=False))
    for (mode, of_mode), (color, dashes) in zip(by_mode.items(), STYLES * 9, strict=False):
        for name, axis in axes.items():
            values: dict[int, list[float]] = defaultdict(list)
            for run in of_mode:
                for seen in run["evaluations"]:
                    if name in seen:
                        values[seen["step"]].append(seen[name])
            steps = sorted(values)
            means = [sum(values[step]) / len(values[step]) for step in steps]
            axis.plot(steps, means, color=color, linestyle=dashes, label=mode)
            if len(of_mode) > 1:
                lowest, highest = ([bound(values[step]) for step in steps] for bound in (min, max))
                axis.fill_between(steps, lowest, highest, color=color, alpha=0.12, linewidth=0)
    for name, axis in axes.items():
        axis.set_title(PANELS[name], fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    last = grid.flat[-1]
    last.axis("off")
    last.legend(*grid.flat[0].get_legend_handles_labels(), loc="center", frameon=False)
    seeds = sorted({run["settings"]["seed"] for run in runs})
    spread = f"mean and range over {len(seeds)} warm starts" if len(seeds) > 1 else "one warm start"
    prompts = runs[0]["settings"]["eval_prompts"]
    last.text(0.5, 0.06, f"{spread}\n{prompts} held-out prompts an evaluation", ha="center", fontsize=9)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", help="Folders given to --output.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    if args.runs is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(run) for run in collect(args.runs))
        args.json.write_text(f"[\n{lines}\n]\n")
    plot(json.loads(args.json.read_text()), args.png)


if __name__ == "__main__":
    main()

"""Plot runs of examples/online_grpo.py: held-out numbers against steps, a line and its spread over seeds per mode.

    python tools/plot_online.py --runs runs/student runs/alone --json docs/online/teacher-cpu.json --table
    python tools/plot_online.py --json docs/online/*.json --table

With --runs the numbers are collected from the runs' folders and written to the JSON; without, they are read from it.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

PANELS = {
    "held_out_reward": "held-out reward",
    "held_out_length_right": "tokens of right responses",
    "held_out_length_wrong": "tokens of wrong responses",
    "held_out_working": "share with working",
    "held_out_entropy": "entropy, nats a token",
}
PATHS = ("output", "teacher", "load", "save", "save_start", "save_rollouts", "replay_rollouts")
#: What the other modes are compared with in the last panel.
REFERENCE = "token_mean"
#: Okabe and Ito's colours, told apart without red and green.
STYLES = [("#0072B2", "-"), ("#E69F00", "-"), ("#009E73", "-"), ("#D55E00", "-"), ("#222222", (0, (1, 2)))]


def collect(folders: list[Path]) -> list[dict[str, Any]]:
    """Settings of every run, without paths, and its numbers at each evaluation."""
    runs = []
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        kept = {name: value for name, value in settings.items() if name not in PATHS and value is not None}
        if settings.get("teacher") is not None:
            kept["taught"] = f"teacher's top {settings['teacher_top_k']}"
        seen = [
            {"step": step["step"], **{name: round(step[name], 4) for name in PANELS if name in step}}
            for step in steps
            if "held_out_reward" in step
        ]
        runs.append({"settings": kept, "seconds": steps[-1]["seconds"], "evaluations": seen})
    return runs


def mode_of(run: dict[str, Any]) -> str:
    mode = str(run["settings"]["aggregation"]).removeprefix("loss aggregation: ").split(", unit")[0]
    return ", ".join([mode, *filter(None, [run["settings"].get("taught")])])


def values_by_step(runs: list[dict[str, Any]], name: str) -> dict[int, dict[int, float]]:
    """The value of each seed by step, for runs of one mode."""
    values: dict[int, dict[int, float]] = defaultdict(dict)
    for run in runs:
        for seen in run["evaluations"]:
            if name in seen:
                values[seen["step"]][run["settings"]["seed"]] = seen[name]
    return values


def plot(runs: list[dict[str, Any]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_mode: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_mode[mode_of(run)].append(run)
    seeds = sorted({run["settings"]["seed"] for run in runs})
    figure, grid = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    *axes, last = grid.flat

    def draw(axis: Any, values: dict[int, dict[int, float]], mode: str) -> None:
        """Draw the mean over seeds and their range."""
        color, dashes = STYLES[list(by_mode).index(mode) % len(STYLES)]
        steps = sorted(values)
        step_values = [list(values[step].values()) for step in steps]
        axis.plot(steps, [sum(runs) / len(runs) for runs in step_values], color=color, linestyle=dashes, label=mode)
        if len(seeds) > 1:
            lowest, highest = (list(map(bound, step_values)) for bound in (min, max))
            axis.fill_between(steps, lowest, highest, color=color, alpha=0.12, linewidth=0)

    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for mode, mode_runs in by_mode.items():
            draw(axis, values_by_step(mode_runs, name), mode)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    # Warm starts differ more than modes do: what a mode changes is seen within one.
    reference = values_by_step(by_mode.get(REFERENCE, []), "held_out_reward")
    for mode, mode_runs in by_mode.items() if reference and len(by_mode) > 1 else ():
        values = values_by_step(mode_runs, "held_out_reward")
        draw(
            last,
            {step: {k: numbers[k] - reference[step][k] for k in numbers} for step, numbers in values.items()},
            mode,
        )
        last.set_title(f"reward less {REFERENCE}'s, same warm start", fontsize=10)
    if not last.lines:
        last.axis("off")
    for axis in grid.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    spread = f"mean and range over {len(seeds)} warm starts" if len(seeds) > 1 else "one warm start"
    prompts = runs[0]["settings"]["eval_prompts"]
    title = f"{spread}, {prompts} held-out prompts an evaluation"
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=5, frameon=False, title=title, title_fontsize=9)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def table(runs: list[dict[str, Any]]) -> str:
    """Table of held-out rewards: a row per mode and learning rate, a column per seed."""
    rows: dict[tuple[str, float], list[list[str]]] = defaultdict(list)
    last = runs[0]["settings"]["steps"]
    half = last // 2
    for run in sorted(runs, key=lambda run: run["settings"]["seed"]):
        reward = {seen["step"]: seen["held_out_reward"] for seen in run["evaluations"]}
        early, late = (
            [value for step, value in reward.items() if step and (step > half) == is_late] for is_late in (False, True)
        )
        values = reward[0], sum(early) / len(early), sum(late) / len(late), reward[last]
        rows[mode_of(run), run["settings"]["lr"]].append([f"{value:.2f}" for value in values])
    headers = ["mode", "lr", "at the start", f"mean to step {half}", f"mean after step {half}", f"at step {last}"]
    body = [[*key, *(" ".join(cells) for cells in zip(*seeds, strict=True))] for key, seeds in rows.items()]
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", help="Folders of runs, as given to --output.")
    parser.add_argument("--json", type=Path, nargs="+", required=True, help="Files to read; with --runs, one to write.")
    parser.add_argument("--png", type=Path, help="File for the picture.")
    parser.add_argument("--table", action="store_true", help="Print held-out rewards.")
    args = parser.parse_args()
    if args.runs is not None:
        (path,) = args.json
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(run) for run in collect(args.runs))
        path.write_text(f"[\n{lines}\n]\n")
    runs = [run for path in args.json for run in json.loads(path.read_text())]
    if args.png is not None:
        plot(runs, args.png)
    if args.table:
        print(table(runs))


if __name__ == "__main__":
    main()

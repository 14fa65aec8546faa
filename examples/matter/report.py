"""The table and the picture of runs: reward, share that works it out, length of wrong responses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]  # arm, seed, after_wrong, in_megatron, and a log of evaluations
#: Okabe and Ito's colours, which the colour-blind tell apart; dashes, too, tell the arms apart.
STYLES = [("#0072b2", "-"), ("#d55e00", "-"), ("#cc79a7", "--"), ("#009e73", ":")]


def read(path: Path) -> list[Run]:
    """The runs of a file of JSON lines, which is made where there is none."""
    path.open("a").close()
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: run[name] for name in ("after_wrong", "in_megatron", "arm", "seed", "log")} for run in runs]


def late(run: Run, name: str) -> float | None:
    """Mean of steps 30 to 40; None where there was nothing to measure."""
    values = [seen[name] for seen in run["log"] if seen["step"] >= 30 and seen[name] is not None]
    return sum(values) / len(values) if values else None


def columns(runs: Sequence[Run], arm: str, against: str) -> list[str]:
    """Reward, its paired difference from another arm, the share that works it out, and lengths of wrong responses."""
    ours, theirs = ({run["seed"]: run for run in runs if run["arm"] == name} for name in (arm, against))
    reward, works, wrong = ([late(run, name) for run in ours.values()] for name in ("reward", "works", "wrong"))
    pairs = [(late(ours[seed], "reward"), late(theirs[seed], "reward")) for seed in ours if seed in theirs]
    less = [a - b for a, b in pairs if a is not None and b is not None] if arm != against else []
    return [spread(reward), spread(less, "+.2f"), spread(works), spread(wrong, ".1f"), str(len(ours))]


def table(runs: Sequence[Run], after_wrong: Mapping[str, str], against: str) -> str:
    """Means and ranges over seeds of every arm in every setting."""
    header = "after a wrong answer | arm | reward | difference | works it out | tokens of a wrong response | seeds"
    lines = [header, " | ".join(["---"] * 7)]
    for in_megatron in (False, True):
        for setting, text in after_wrong.items():
            key = {"after_wrong": setting, "in_megatron": in_megatron}
            ran = [run for run in runs if run | key == run]
            text += ", in Megatron's schedule" * in_megatron
            arms = dict.fromkeys(run["arm"] for run in ran)
            lines += [" | ".join([text, arm, *columns(ran, arm, against)]) for arm in arms]
    return "\n".join(f"| {line} |" for line in lines)


def spread(values: Sequence[float | None], digits: str = ".2f") -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    mean, low, high = (format(x, digits) for x in (sum(numbers) / len(numbers), min(numbers), max(numbers)))
    return f"{mean}, {low} to {high}"


def plot(runs: Sequence[Run], arms: Sequence[str], path: Path) -> None:
    """Draw means and ranges over seeds: two panels for the task of a fixed limit, one for the task of free length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("reward", "limit", 1.02), ("works", "limit", 1.02), ("wrong", "free", 25)]
    titles = ["reward", "share that works it out", "tokens of a wrong response\n(the policy may stop)"]
    figure, axes = pyplot.subplots(1, 3, figsize=(7.6, 3.6), layout="constrained")  # a page's column, at its own size
    for axis, title, (name, task, top) in zip(axes, titles, panels, strict=True):
        for arm, (color, dashes) in zip(arms, STYLES, strict=True):
            logs = [
                run["log"] for run in runs if (run["arm"], run["after_wrong"], run["in_megatron"]) == (arm, task, False)
            ]
            if not logs:
                continue
            steps = [seen["step"] for seen in logs[0]]
            seeds = [[seen[name] for seen in at] for at in zip(*logs, strict=True)]  # by step
            axis.plot(steps, [sum(x) / len(x) for x in seeds], color=color, linestyle=dashes, linewidth=2.5, label=arm)
            axis.fill_between(steps, list(map(min, seeds)), list(map(max, seeds)), color=color, alpha=0.15, linewidth=0)
        axis.set(xlabel="step of GRPO", ylim=(0, top))
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=180)
    pyplot.close(figure)

"""A step in numbers, and where they go: a line of JSON, TensorBoard, wandb, and a progress line now and then."""

import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from online.task import decode, has_working
from rollouts import Rollout

Numbers = dict[str, float]


def describe(rollouts: Sequence[Rollout]) -> Numbers:
    """Reward, response length (in tokens; of right and wrong responses too) and the share with working.

    A mean over nothing, as the length of wrong responses when all are right, is left out.
    """
    lengths = {wanted: [len(one.response_tokens) for one in rollouts if one.reward == wanted] for wanted in (1.0, 0.0)}
    means = {
        "reward": [one.reward for one in rollouts],
        "length": lengths[1.0] + lengths[0.0],
        "length_right": lengths[1.0],
        "length_wrong": lengths[0.0],
        "working": [float(has_working(decode(one.response_tokens))) for one in rollouts],
    }
    return {name: math.fsum(values) / len(values) for name, values in means.items() if values}


def zero_variance_groups(rollouts: Sequence[Rollout]) -> int:
    """Prompt groups whose responses all have one reward: their advantages are 0, and nothing is learnt from them."""
    rewards: dict[int | str, set[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.prompt_id, set()).add(rollout.reward)
    return sum(len(of_group) == 1 for of_group in rewards.values())


class Report:
    """Writes on the first rank; on the others it does nothing."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, tensorboard: bool, wandb_project: str | None) -> None:
        self.folder = folder
        self.started = time.monotonic()
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
        self.lines = (folder / "steps.jsonl").open("w", encoding="utf-8")
        self.tensorboard: Any = None
        self.wandb: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder))
        if wandb_project is not None:
            if importlib.util.find_spec("wandb") is None:
                raise ValueError("--wandb-project: wandb is not installed. pip install wandb, or drop the flag.")
            import wandb

            self.wandb = wandb.init(project=wandb_project, dir=str(folder), config=dict(settings))

    def step(self, step: int, numbers: Numbers) -> None:
        record = {"step": step, "seconds": round(time.monotonic() - self.started, 2), **numbers}
        self.lines.write(json.dumps(record) + "\n")
        self.lines.flush()
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def close(self) -> None:
        self.lines.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def progress_line(step: int, steps: int, numbers: Numbers, seconds: float) -> str:
    """What to see of a step while waiting; `seconds` since the first step began."""
    width = len(str(steps))
    parts = [f"step {step:{width}}/{steps}"]
    names = {
        "reward": "reward {:.2f}",
        "held_out_reward": "held out {:.3f}",
        "length": "length {:.1f}",
        "length_right": "right {:.1f}",
        "length_wrong": "wrong {:.1f}",
        "entropy": "entropy {:.2f}",
        "ratio": "first ratio {:.6f}",
        "clip_fraction": "clipped {:.3f}",
        "zero_variance_groups": "{:.0f} groups alike",
    }
    parts += [text.format(numbers[name]) for name, text in names.items() if name in numbers]
    return ", ".join(parts) + f" | {seconds / step * (steps - step):.0f} s left"

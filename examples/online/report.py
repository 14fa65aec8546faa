"""Numbers of a step and their logs: a line of JSON, TensorBoard, wandb, and a progress line at intervals."""

import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rollouts import Rollout

from online.task import decode, has_working

Numbers = dict[str, float]


def describe(rollouts: Sequence[Rollout]) -> Numbers:
    """Mean reward, response length in tokens (also of right and of wrong responses), and share with working.

    Means over no response, such as the length of wrong responses if all are right, are left out.
    """
    means: dict[str, list[float]] = {
        "reward": [rollout.reward for rollout in rollouts],
        "length": [len(rollout.response_tokens) for rollout in rollouts],
        "length_right": [len(rollout.response_tokens) for rollout in rollouts if rollout.reward > 0],
        "length_wrong": [len(rollout.response_tokens) for rollout in rollouts if rollout.reward == 0],
        "working": [has_working(decode(rollout.response_tokens)) for rollout in rollouts],
    }
    return {name: math.fsum(values) / len(values) for name, values in means.items() if values}


def zero_variance_groups(rollouts: Sequence[Rollout]) -> int:
    """Number of prompt groups whose responses all have the same reward, so that all advantages are 0."""
    rewards: dict[int | str, set[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.prompt_id, set()).add(rollout.reward)
    return sum(len(prompt_rewards) == 1 for prompt_rewards in rewards.values())


class Report(AbstractContextManager["Report"]):
    """Writes and prints on the first rank; does nothing on other ranks.

    Raises ValueError for a wandb project if wandb is not installed.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *, tensorboard: bool, wandb_project: str | None
    ) -> None:
        self._on = not dist.is_initialized() or dist.get_rank() == 0
        self._started = time.monotonic()
        if wandb_project is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError("--wandb-project: wandb is not installed. Run pip install wandb, or drop the flag.")
        if not self._on:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n", encoding="utf-8")
        self._lines = (folder / "steps.jsonl").open("w", encoding="utf-8")
        self._tensorboard = self._wandb = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder))
        if wandb_project is not None:
            self._wandb = importlib.import_module("wandb").init(
                project=wandb_project, dir=str(folder), config=json.loads(json.dumps(settings, default=str))
            )

    def say(self, text: str) -> None:
        if self._on:
            print(text, flush=True)

    def write(self, step: int, numbers: Numbers) -> None:
        if not self._on:
            return
        record = {"step": step, "seconds": round(time.monotonic() - self._started, 2), **numbers}
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def __exit__(self, *raised: object) -> None:
        if not self._on:
            return
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def progress_line(step: int, steps: int, numbers: Numbers, seconds: float) -> str:
    """Progress line of a step; `seconds` since the first step began.

    The line that ends the run has the held-out reward of the last step.
    """
    width = len(str(steps))
    parts = [f"step {step:{width}}/{steps}"]
    names = {
        "reward": "reward {:.2f}",
        "held_out_reward": "held out {:.3f}",
        "length": "length {:.1f}",
        "length_right": "right {:.1f}",
        "length_wrong": "wrong {:.1f}",
        "entropy": "entropy {:.2f}",
        "ratio_gap": "first ratio 1 ± {:.0e}",
        "clip_fraction": "clipped {:.3f}",
        "zero_variance_groups": "{:.0f} groups without variance",
    }
    if step == steps:
        del names["held_out_reward"]
    parts += [text.format(numbers[name]) for name, text in names.items() if name in numbers]
    return ", ".join(parts) + f" | {seconds / step * (steps - step):.0f} s left"

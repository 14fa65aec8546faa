"""The share of an optimizer step of the example that the step's totals and reducing its losses take.

    SCRIPT=tools/bench/step.py examples/launch_grpo.sh 1 --seq-length 4096 --max-position-embeddings 4096

Runs `examples/pretrain_grpo.py` and times, on every rank: making `Samples`, which its data iterator does; `begin_step`
without fetching the data (totals); `Microbatch.loss` (weights, sums, metrics, carrier); and the whole of Megatron's
`train_step`. The sums' backward is one product per micro-batch and counts to the rest. The first steps, which warm up,
are left out.
"""

import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_grpo
from megatron.training import training

from megatron_rl_loss import Samples
from megatron_rl_loss.megatron import LossAggregation, Microbatch, lookahead

WARM_UP = 3


def main() -> None:
    seconds: dict[str, float] = defaultdict(float)
    steps: list[dict[str, float]] = []

    def time_calls(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[label] += 1e3 * (time.perf_counter() - start)
                if label == "train_step":
                    steps.append(dict(seconds))
                    seconds.clear()

        setattr(owner, name, call)

    time_calls(Samples, "__init__", "samples")
    time_calls(lookahead, "_fetch", "fetching")
    time_calls(LossAggregation, "_begin_step", "begin_step")  # what a wrapped schedule calls
    time_calls(Microbatch, "loss", "loss")
    time_calls(training, "train_step", "train_step")
    pretrain_grpo.main()
    medians = {label: statistics.median(step[label] for step in steps[WARM_UP:]) for label in steps[-1]}
    totals = medians["begin_step"] - medians["fetching"]
    parts = {"samples": medians["samples"], "totals": totals, "loss": medians["loss"]}
    shown = ", ".join(f"{name} {milliseconds:.3g}" for name, milliseconds in parts.items())
    whole = medians["train_step"]
    share = 100 * sum(parts.values()) / whole
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}, medians in ms: {shown}, train_step {whole:.4g}; ours {share:.2g} %", flush=True)


if __name__ == "__main__":
    main()

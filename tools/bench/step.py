"""The share of an optimizer step of the example that the step's totals and reducing its losses take.

    SCRIPT=tools/bench/step.py examples/launch_grpo.sh 1 --seq-length 4096 --max-position-embeddings 4096

Runs `examples/pretrain_grpo.py` and times, on every rank: making `Samples`, which its data iterator does; `begin_step`
without fetching the data (totals); `Microbatch.loss` (weights, sums, metrics, carrier); and the whole of Megatron's
`train_step`. The sums' backward is one product a micro-batch and counts to the rest. The first steps, which warm up,
are left out.
"""

import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
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

    def timed(owner: Any, name: str, label: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[label] += time.perf_counter() - start

        setattr(owner, name, call)

    timed(Samples, "__init__", "samples")
    timed(lookahead, "_fetch", "fetching")
    timed(LossAggregation, "begin_step", "begin_step")
    timed(Microbatch, "loss", "loss")
    timed(training, "train_step", "train_step")
    train_step = training.train_step

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        seconds.clear()
        result = train_step(*args, **kwargs)
        steps.append(dict(seconds))
        return result

    training.train_step = step
    pretrain_grpo.main()

    def median(label: str) -> float:
        return 1e3 * statistics.median(step[label] for step in steps[WARM_UP:])

    parts = {
        "samples": median("samples"),
        "totals": median("begin_step") - median("fetching"),
        "loss": median("loss"),
    }
    shown = ", ".join(f"{name} {milliseconds:.3g}" for name, milliseconds in parts.items())
    whole = median("train_step")
    share = 100 * sum(parts.values()) / whole
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}, medians in ms: {shown}, train_step {whole:.4g}; ours {share:.2g} %", flush=True)


if __name__ == "__main__":
    main()

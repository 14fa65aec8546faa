"""The share of an optimizer step of the example that looking ahead and reducing take.

    SCRIPT=tools/profile_step.py examples/launch_grpo.sh 1 --seq-length 4096 --max-position-embeddings 4096

Runs `examples/pretrain_grpo.py` and times, on every rank: `begin_step` (fetching, samples, totals), `Microbatch.loss`
(reducers, metrics, carrier) and the whole of Megatron's `train_step`. The reducers' backward is one product a
micro-batch and counts to the rest. The first steps, which warm up, are left out.
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

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import pretrain_grpo
from megatron.training import training

from megatron_rl_loss.megatron import LossAggregation, Microbatch

WARM_UP = 3


def main() -> None:
    seconds: dict[str, float] = defaultdict(float)
    steps: list[dict[str, float]] = []

    def timed(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        setattr(owner, name, call)

    timed(LossAggregation, "begin_step")
    timed(Microbatch, "loss")
    timed(training, "train_step")
    train_step = training.train_step

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        seconds.clear()
        result = train_step(*args, **kwargs)
        steps.append(dict(seconds))
        return result

    training.train_step = step
    pretrain_grpo.main()
    kept = steps[WARM_UP:]
    parts = {
        name: statistics.median(step.get(name, 0.0) for step in kept) for name in ("begin_step", "loss", "train_step")
    }
    shown = ", ".join(f"{name} {1e3 * parts[name]:.3g} ms" for name in parts)
    share = (parts["begin_step"] + parts["loss"]) / parts["train_step"]
    print(
        f"rank {os.environ.get('RANK', 0)}, median of {len(kept)} steps: {shown}; ours {100 * share:.2g} %", flush=True
    )


if __name__ == "__main__":
    main()

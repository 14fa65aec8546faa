"""A rank of two, started as a script: rank 0's loss function fails in the pipeline, where the other waits for it.

    python failing_rank.py {torchrun,ends,stays} [FILE]

Without torchrun rank 0 keeps the store, on a port that it takes itself and writes to FILE. `stays` keeps its process.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import warm_megatron  # noqa: F401  # on a machine without a GPU too

# isort: split
import torch.distributed as dist
from step_samples import step_samples
from table_step import Batch, aggregation, logged_by_step, start, table_model
from torch import Tensor

SAMPLES = step_samples(seed=1)
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]
case, fails = sys.argv[1], os.environ["RANK"] == "0"


def forward_step(iterator: Iterator[Any], model: Any) -> Any:
    microbatch = next(iterator)

    def loss_func(losses: Tensor) -> Any:
        if fails:
            raise ValueError("the reward model is gone")
        return microbatch.loss(losses)

    return model(microbatch.data.local_numbers(0, 1)), loss_func


if case != "torchrun":
    port = Path(sys.argv[2])
    if fails:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    while not port.exists():
        time.sleep(0.05)
    os.environ |= {"MASTER_PORT": port.read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
start()
try:
    batches = [Batch(SAMPLES, [0], 1), Batch(SAMPLES, [1], 1)]
    logged_by_step(aggregation(mode="token_mean"), forward_step, batches, table_model(TABLE))
finally:
    print(f"left at {time.time()}", flush=True)
    time.sleep(600 if fails and case == "stays" else 0)

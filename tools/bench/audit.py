"""Cost of the proof and of an audit in an optimizer step: time, and memory until the end of the step.

    python tools/bench/audit.py [--tokens 16777216] [--microbatches 16] [--hidden 4096] [--seconds 20]

One process runs Megatron's own DDP and schedule on a tiny model, a norm's scale of `--hidden` entries, on which every
token's loss depends. So the times are those of the step's bookkeeping and of the audit. `proof` is the comparison of
the first step and of ``--loss-aggregation-audit-interval``; `audit` assembles the whole step on the first rank. On a
machine without a GPU it runs on the CPU, and times are CPU seconds of all threads of the process. Bytes are the peak of
resident memory in a step, above that of a step that is not audited, over its tokens; and what is kept after it. Not
measured: what ranks exchange (``pytest -k exchange -s tests/megatron/test_proof_cases.py`` counts its bytes).
"""

import contextlib
import ctypes
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    import megatron_on_cpu

    megatron_on_cpu.install()

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from timing import BACKENDS, flags, keep_freed_memory, publish, take_turns
from torch import Tensor

from megatron_rl_loss import Audit, LossAggregation, Samples
from megatron_rl_loss.megatron.flags import AggregationSettings
from megatron_rl_loss.megatron.proving import facts_of
from megatron_rl_loss.proof.intervals import deviation
from megatron_rl_loss.proof.megatron_step import MegatronStep

LENGTH = 4096  # of a sample


def make_model(hidden: int) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    config.finalize_model_grads_func = finalize_model_grads

    class Norm(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.scale = torch.nn.Parameter(torch.ones(hidden))

        def set_input_tensor(self, _: Any) -> None: ...

        def forward(self, values: Tensor) -> Tensor:
            return values * self.scale.mean()

    return DistributedDataParallel(config, DistributedDataParallelConfig(), Norm().to(DEVICE))


def memory_of(function: Callable[[], object]) -> tuple[int, int]:
    """How many bytes higher memory is at the peak of a call, and after it: the GPU's, or what Linux calls resident."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    def resident(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    function()
    peak = resident("VmHWM") - before
    ctypes.CDLL(None).malloc_trim(0)
    return peak, resident("VmRSS") - before


def main() -> None:
    parser = flags(__doc__)
    parser.set_defaults(device=DEVICE)
    parser.add_argument("--tokens", type=int, default=2**24, help="Tokens of the whole step.")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    dist.init_process_group(BACKENDS[DEVICE], init_method=f"file://{folder.name}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = make_model(options.hidden)
    num_samples = options.tokens // options.microbatches // LENGTH
    masks = [torch.ones(LENGTH) for _ in range(num_samples)]
    losses = torch.randn(num_samples * LENGTH, device=DEVICE)
    batches = [Samples(masks) for _ in range(options.microbatches)]
    aggregation = LossAggregation(AggregationSettings.resolve("token_mean"), lambda samples: samples)
    schedule = aggregation.wrap_schedule(get_forward_backward_func())

    def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
        microbatch = next(data_iterator)
        return model(losses), microbatch.loss

    arguments = {"forward_step_func": forward_step, "model": model, "num_microbatches": len(batches)}
    arguments |= {"seq_length": LENGTH, "micro_batch_size": 1}

    def step(audit: Any) -> Any:
        model.zero_grad_buffer()
        with audit:
            schedule(data_iterator=iter(batches), **arguments)
        return audit

    def proved() -> float | None:
        groups, unknown = facts_of(model)
        measured = MegatronStep(model, groups, unknown=unknown)
        step(measured)
        return deviation(measured)[0]

    ways = {
        "not audited": lambda: step(contextlib.nullcontext()),
        "proof": proved,
        "audit": lambda: step(Audit(model)).measured,
    }
    off = proved()
    assert off is not None
    assert off < 1e-6, "the audit's weights differ from the step's"
    memory = {name: memory_of(way) for name, way in ways.items()}
    (usual, _) = memory["not audited"]
    keep_freed_memory()
    clock = time.perf_counter if DEVICE == "cuda" else time.process_time
    times = {name: min(turns) for name, turns in take_turns(ways, options.seconds, 2, DEVICE, clock).items()}
    rows = [
        {
            "": name,
            "ms a step": ms,
            "more": ms - times["not audited"],
            "more bytes a token": (memory[name][0] - usual) / options.tokens,
            "kept": memory[name][1] / options.tokens,
        }
        for name, ms in times.items()
    ]
    sizes = {"tokens": options.tokens, "micro-batches": options.microbatches, "anchor": options.hidden}
    dist.destroy_process_group()  # or NCCL's threads keep the process from ending
    publish("audit", options, {"CPU time" if DEVICE == "cpu" else "time": rows}, **sizes)


if __name__ == "__main__":
    main()

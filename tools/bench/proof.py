"""Cost of the first step's proof in a model's parameters: time of the step, and bytes that ranks exchange.

    python tools/bench/proof.py [--ranks 2] [--layers 12] [--width 1024] [--microbatches 4] [--out docs/bench]

Each rank trains a stack of linear layers under DistributedDataParallel, on few tokens, so that reading the gradients
shows. A row is a step without the proof, and a step that is measured. Times are CPU seconds of the rank's process in
its fastest round. Bytes are those that a rank hands to reductions, over the number of trainable parameters (tensors).
"""

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from timing import flags, on_ranks, publish
from torch.nn.parallel import DistributedDataParallel

from megatron_rl_loss import Samples, plan_step
from megatron_rl_loss.proof import plain_step
from megatron_rl_loss.proof.first_step import Stated

TOKENS = 8


def measure(rank: int, layers: int, width: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """On a rank: seconds of the fastest step of each kind, bytes sent, and numbers of parameters and their entries."""
    stack = [torch.nn.Linear(width, width) for _ in range(layers)]
    model = DistributedDataParallel(torch.nn.Sequential(*stack, torch.nn.Linear(width, 1)))
    inputs, sent = torch.randn(TOKENS, width), 0
    seconds = {"without": float("inf"), "measured": float("inf")}
    for _ in range(rounds):
        for kind in seconds:
            samples = [Samples([torch.ones(TOKENS)], prompt_ids=[f"{rank} {k}"]) for k in range(microbatches)]
            plan = plan_step(samples, "token_mean", dp_group=dist.group.WORLD, gradients="averaged over ranks")
            proof = plain_step.PlainProof()
            proved = proof.step(model, plan, lambda: "error", Stated())
            model.zero_grad()
            began = time.process_time()
            with proved if kind == "measured" else contextlib.nullcontext():
                for number, microbatch in enumerate(plan, start=1):
                    with contextlib.nullcontext() if number == microbatches else model.no_sync():
                        microbatch.loss(model(inputs)[:, 0]).backward()
            seconds[kind] = min(seconds[kind], time.process_time() - began)
            sent = proof.sent or sent
    parameters = list(model.parameters())
    return {
        "seconds": seconds,
        "sent": sent,
        "parameters": len(parameters),
        "entries": sum(p.numel() for p in parameters),
    }


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = options.layers, options.width, options.microbatches, options.rounds
    slowest = max(on_ranks(options.ranks, "cpu", measure, *sizes), key=lambda row: row["seconds"]["measured"])
    seconds, count, entries = slowest["seconds"], slowest["parameters"], slowest["entries"]
    row = {
        "parameters": count,
        "entries": entries,
        "s a step": seconds["without"],
        "s with the proof": seconds["measured"],
        "micro-batches": options.microbatches,
        "more ns an entry and micro-batch": 1e9
        * (seconds["measured"] - seconds["without"])
        / (entries * options.microbatches),
        "bytes": slowest["sent"],
        "bytes a parameter": slowest["sent"] / count,
    }
    publish("proof", options, {"CPU time, and what a rank sends": [row]}, ranks=options.ranks)


if __name__ == "__main__":
    main()

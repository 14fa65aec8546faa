"""Audit of a training loop of your own: measures the weight that its loss function gives each token.

    torchrun --nproc-per-node 4 examples/audit_own_loop.py [--context-parallel-size 2] [--exact]

The loop is minimal: a small GPT in Megatron's DDP, Megatron's schedule, a batch of ragged responses. The lines of the
audit are marked (1) to (3): import it, tap the unreduced losses, and put the schedule's call into a ``with``. The loss
function is stock Megatron's 3-tuple, a token sum and the token count of this rank; with ``--exact`` it is the token
mean of this library. On a machine without a GPU the example runs on CPU and gloo.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from packed_attention import layer_spec
from torch import Tensor

from megatron_rl_loss import Audit, Samples, StepTotals, ZigzagTHD, make_pg_loss_reducer, packed_seq_params, tap  # (1)
from megatron_rl_loss.audit.judge import judge

SLOT, VOCABULARY = 32, 64
Batch = dict[str, Any]


def make_model(cp_size: int) -> Any:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        context_parallel_size=cp_size,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model_parallel_cuda_manual_seed(1)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(SimpleNamespace(transformer=config)),
        vocab_size=VOCABULARY,
        max_sequence_length=SLOT,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def make_batches(number: int, seed: int) -> list[Batch]:
    """Micro-batches of two packed samples with ragged responses; the same on all ranks but the data-parallel ones."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(number):
        tokens = torch.randint(VOCABULARY, (2 * SLOT,), generator=generator)
        lengths = torch.randint(1, SLOT - 4, (2,), generator=generator).tolist()
        masks = [((torch.arange(SLOT) >= 4) & (torch.arange(SLOT) < 4 + length)).float() for length in lengths]
        advantages = torch.tensor([1.0, -0.5]).repeat_interleave(SLOT)
        batches.append({"tokens": tokens, "loss_masks": masks, "advantages": advantages})
    return batches


def samples_of(batch: Batch) -> Samples:
    """Masks at full length, and the place of each sample in the pack."""
    return Samples(batch["loss_masks"], layout=ZigzagTHD([0, SLOT, 2 * SLOT]), tokens=batch["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--num-microbatches", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="Seed of the batches.")
    parser.add_argument("--exact", action="store_true", help="Aggregate with this library.")
    parser.add_argument("--measured", type=Path, help="Save the measured step to this file with torch.save.")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mpu.initialize_model_parallel(context_parallel_size=options.context_parallel_size)
    cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    model = make_model(cp_size)
    seed = 1000 * options.seed + mpu.get_data_parallel_rank()
    batches = make_batches(options.num_microbatches, seed)
    every_mask = [mask for batch in batches for mask in batch["loss_masks"]]
    totals = StepTotals.of(every_mask, dp_group=mpu.get_data_parallel_group())

    def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(data_iterator)
        samples = samples_of(batch)
        held = samples.local(cp_rank, cp_size)
        tokens, labels, positions = (
            held.of(values)[None].cuda()
            for values in (batch["tokens"], batch["tokens"].roll(-1), torch.arange(SLOT).repeat(2))
        )
        packed = packed_seq_params(torch.tensor([0, SLOT, 2 * SLOT], dtype=torch.int32), model)
        output = model(tokens, positions, None, labels=labels, packed_seq_params=packed)

        def loss_func(negative_log_probs: Tensor) -> Any:
            per_token_loss = negative_log_probs * held.of(batch["advantages"])[None].cuda()
            per_token_loss = tap(per_token_loss, samples=samples)  # (2) before masks and means
            if options.exact:
                place = {"cp_rank": cp_rank, "cp_size": cp_size}
                share = make_pg_loss_reducer("token_mean", samples, totals=totals, **place)(per_token_loss)
                return share * options.num_microbatches * dist.get_world_size(), torch.tensor(1).int().cuda(), {}
            mask = torch.tensor(held.mask)[None].cuda()
            return (per_token_loss * mask).sum(), mask.sum().int(), {}  # Megatron's own

        return output, loss_func

    model.zero_grad_buffer()
    with Audit(model) as audit:  # (3) around the schedule's call
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=options.num_microbatches,
            seq_length=2 * SLOT,
            micro_batch_size=1,
        )
    if audit.measured is not None:  # on the first rank; others have sent what they know
        print(judge(audit.measured, "token_mean"))
        if options.measured is not None:
            torch.save(audit.measured, options.measured)


if __name__ == "__main__":
    main()

"""A loop of your own over Megatron's schedule, as NeMo-RL and verl have: `torchrun --nproc-per-node 2 own_loop.py`.

It trains a GPTModel; with a pattern of layers behind the name, such as "*-*-", a HybridModel (megatron-core 0.18 on).
"""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from packed_attention import hybrid_stack_spec, layer_spec

from megatron_rl_loss import (
    Microbatch,
    OutputHead,
    Samples,
    ZigzagTHD,
    packed_seq_params,
    plan_step,
    ppo_clip_loss,
    prove_step,
)

# loss_masks, layout, prompt_ids: of Samples; cu_seqlens of the pack; tokens, labels, positions, old_log_probs,
# advantages: [total_tokens]
Batch = dict[str, Any]
HEAD = OutputHead()  # of any model that ends in Megatron's output layer
VOCABULARY, SLOT = 9, 16


def log_probs_of(batch: Batch, microbatch: Microbatch, model: Any) -> torch.Tensor:
    """Log-probs of this context-parallel rank's labels, [tokens]; of other pipeline stages their hidden states."""
    tokens, positions, labels = (microbatch.local(batch[n])[None].cuda() for n in ("tokens", "positions", "labels"))
    packed = packed_seq_params(batch["cu_seqlens"], model)
    output = HEAD(model, tokens, positions, None, labels=labels, packed_seq_params=packed)
    return output[0][0] if isinstance(output, tuple) else output


def policy_loss(batch: Batch, microbatch: Microbatch, log_probs: torch.Tensor) -> Any:
    """Return (loss, report) to the schedule; without `form` it would be (loss, num_tokens, report)."""
    old, advantages = (microbatch.local(batch[name]).cuda() for name in ("old_log_probs", "advantages"))
    return microbatch.loss(ppo_clip_loss(log_probs, old, advantages, microbatch).per_token_loss, form="2-tuple")


def forward_backward(
    schedule: Any,
    model: Any,
    batches: list[Batch],
    loss: Any,
    mode: str,
    forward: Callable[[Batch, Microbatch, Any], torch.Tensor] = log_probs_of,
) -> dict[str, torch.Tensor]:
    """Compute gradients of the step loss. Returns the step's values by name, on ranks of the last pipeline stage."""

    def describe() -> list[Samples]:  # a function: what it raises on one rank is raised on all
        return [Samples(**{key: b[key] for key in ("loss_masks", "layout", "prompt_ids", "tokens")}) for b in batches]

    def forward_step(step: Iterator[tuple[Batch, Microbatch]], model: Any) -> Any:
        batch, microbatch = next(step)
        return forward(batch, microbatch, model), lambda output: loss(batch, microbatch, output)

    plan = plan_step(describe, mode, model=model)
    step = iter(list(zip(batches, plan, strict=True)))
    sizes = {"num_microbatches": len(plan), "seq_length": batches[0]["tokens"].numel(), "micro_batch_size": 1}
    with prove_step(model, plan):  # the first step is proved; a wrong one stops all ranks
        reports = schedule(forward_step_func=forward_step, data_iterator=step, model=model, **sizes)
    return plan.finish(reports) if reports else {}  # one report for each micro-batch, where losses were computed


def make_model(pattern: str) -> Any:
    """A GPTModel of two blocks, or a HybridModel with these layers, in Megatron's DDP."""
    nothing: Any = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}
    config = TransformerConfig(
        num_layers=len(pattern) or 2,
        hidden_size=32,
        num_attention_heads=4,
        context_parallel_size=2,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        **nothing,
    )
    config.finalize_model_grads_func = finalize_model_grads
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    further: Any = {"vocab_size": VOCABULARY, "max_sequence_length": SLOT, "position_embedding_type": "rope"}
    further["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    if pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        model = HybridModel(config, hybrid_stack_spec(), hybrid_layer_pattern=pattern, **further)
    else:
        model = GPTModel(config, layer_spec(SimpleNamespace(transformer=config)), **further)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def make_batches(number: int, seed: int) -> list[Batch]:
    """Packs of two responses to a prompt; the same on all ranks but the data-parallel ones."""
    generator, bounds = torch.Generator().manual_seed(seed), [0, SLOT, 2 * SLOT]
    batches = []
    for i in range(number):
        lengths = torch.randint(4, SLOT + 1, (2,), generator=generator).tolist()
        masks = [(torch.arange(n) > 1) & (torch.arange(n) < n - 1) for n in lengths]  # the last token has no label
        batch: Batch = {"layout": ZigzagTHD(bounds, lengths), "loss_masks": masks, "prompt_ids": [f"{seed}/{i}"] * 2}
        batch |= {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "positions": torch.arange(SLOT).repeat(2)}
        tokens = torch.randint(VOCABULARY, (2 * SLOT,), generator=generator)
        batch |= {"tokens": tokens, "labels": tokens.roll(-1), "old_log_probs": torch.full((2 * SLOT,), -2.2)}
        batches.append(batch | {"advantages": torch.tensor([1.0, -1.0]).repeat_interleave(SLOT)})
    return batches


def main() -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model = make_model("".join(sys.argv[1:]))
    schedule, batches = get_forward_backward_func(), make_batches(3, seed=parallel_state.get_data_parallel_rank())
    for step in range(3):
        model.zero_grad_buffer()
        print(step, forward_backward(schedule, model, batches, policy_loss, "prompt_mean"))
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.main_grad  # your optimizer's step


if __name__ == "__main__":
    main()

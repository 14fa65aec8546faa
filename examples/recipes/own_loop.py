"""A loop of your own over Megatron's schedule, as NeMo-RL and verl have: `torchrun --nproc-per-node 2 own_loop.py`."""

from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()  # before megatron is imported

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_rl_loss import Microbatch, Samples, ZigzagTHD, plan_step, ppo_clip_loss, prove_step

Batch = dict[str, Any]  # loss_masks, layout, prompt_ids: of Samples; tokens, old_log_probs, advantages: [total_tokens]


def policy_loss(batch: Batch, microbatch: Microbatch, log_probs: torch.Tensor) -> Any:
    """Return (loss, report) to the schedule; without `form` it would be (loss, num_tokens, report)."""
    old, advantages = (microbatch.local(batch[name]).cuda() for name in ("old_log_probs", "advantages"))
    return microbatch.loss(ppo_clip_loss(log_probs, old, advantages, microbatch).per_token_loss, form="2-tuple")


def forward_backward(schedule: Any, model: Any, batches: list[Batch], loss: Any, mode: str) -> dict[str, torch.Tensor]:
    """Compute gradients of the step loss. Returns the step's values by name, on ranks of the last pipeline stage."""

    def describe() -> list[Samples]:  # a function: what it raises on one rank is raised on all
        return [Samples(**{key: b[key] for key in ("loss_masks", "layout", "prompt_ids", "tokens")}) for b in batches]

    def forward_step(step: Iterator[tuple[Batch, Microbatch]], model: Any) -> Any:
        batch, microbatch = next(step)
        return model(microbatch.local(batch["tokens"]).cuda()), lambda output: loss(batch, microbatch, output)

    plan = plan_step(describe, mode, model=model)
    step = iter(list(zip(batches, plan, strict=True)))
    sizes = {"num_microbatches": len(plan), "seq_length": batches[0]["tokens"].numel(), "micro_batch_size": 1}
    with prove_step(model, plan):  # the first step is proved; a wrong one stops all ranks
        reports = schedule(forward_step_func=forward_step, data_iterator=step, model=model, **sizes)
    return plan.finish(reports) if reports else {}  # one report for each micro-batch, where losses were computed


def main() -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.manual_seed(0)
    toy: Any = torch.nn.Sequential(torch.nn.Embedding(9, 1), torch.nn.Flatten(0), torch.nn.LogSigmoid())  # log-probs
    vars(toy).update(set_input_tensor=lambda received: None, model_type=None)  # which a Megatron model has
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), toy.cuda())
    schedule, batches = get_forward_backward_func(), list[Batch]()
    torch.manual_seed(seed := parallel_state.get_data_parallel_rank())
    for number in range(3):  # packs of two responses to a prompt, in slots of 16 tokens
        lengths = torch.randint(3, 17, (2,)).tolist()
        batch: Batch = {"layout": ZigzagTHD([0, 16, 32], lengths), "loss_masks": [torch.arange(n) > 1 for n in lengths]}
        batch |= {"tokens": torch.randint(9, (32,)), "advantages": torch.tensor([1.0, -1.0]).repeat_interleave(16)}
        batches.append(batch | {"old_log_probs": torch.full((32,), -0.7), "prompt_ids": [f"{seed}/{number}"] * 2})
    for step in range(3):
        model.zero_grad_buffer()
        print(step, forward_backward(schedule, model, batches, policy_loss, "prompt_mean"))
        toy[0].weight.data -= toy[0].weight.main_grad  # your optimizer's step


if __name__ == "__main__":
    main()

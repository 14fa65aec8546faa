"""A loop of your own over Megatron's schedule, as NeMo-RL, verl and others have, over a list of batches."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl_loss import Microbatch, Samples, plan_step, ppo_clip_loss

Batch = dict[str, Any]  # loss_masks, layout, prompt_ids: of Samples; tokens, old_log_probs, advantages: [total_tokens]


def policy_loss(batch: Batch, microbatch: Microbatch, log_probs: Tensor) -> Any:
    """Return (loss, report) to the schedule; without `form` it would be (loss, num_tokens, report)."""
    old, advantages = (microbatch.local(batch[name]) for name in ("old_log_probs", "advantages"))
    return microbatch.loss(ppo_clip_loss(log_probs, old, advantages, microbatch).per_token_loss, form="2-tuple")


def forward_backward(model: Any, batches: list[Batch], loss: Callable[..., Any], mode: str) -> dict[str, Tensor]:
    """Compute gradients of the step loss. Returns the step's values by name, on ranks of the last pipeline stage."""

    def describe() -> list[Samples]:
        return [
            Samples(b["loss_masks"], layout=b["layout"], prompt_ids=b["prompt_ids"], tokens=b["tokens"])
            for b in batches
        ]

    plan = plan_step(describe, mode, model=model)

    def forward_step(step: Iterator[tuple[Batch, Microbatch]], model: Any) -> Any:
        batch, microbatch = next(step)
        return model(microbatch.local(batch["tokens"])), lambda output: loss(batch, microbatch, output)

    step = iter(list(zip(batches, plan, strict=True)))
    sizes = {"num_microbatches": len(plan), "seq_length": batches[0]["tokens"].numel(), "micro_batch_size": 1}
    schedule = get_forward_backward_func()
    reports = schedule(forward_step_func=forward_step, data_iterator=step, model=model, **sizes)
    return plan.finish(reports) if reports else {}  # one report for each micro-batch, where losses were computed

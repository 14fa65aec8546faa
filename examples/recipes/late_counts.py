"""Counting units at the end of a step: run the schedule as samples arrive, and scale gradients once by 1 / U.

    with late_counts(model) as counts:
        for batches in arriving:  # on all ranks as many calls
            samples = [samples_of(batch) for batch in batches]
            plan = plan_step(samples, rollout_sum, model=model)
            run_schedule(model, batches, plan)
            counts.append(plan.totals.units["rollout"].number["all"])
    optimizer.step()

Weights are those of a mode without its U: `rollout_sum` for ``sample_mean``, whose rollouts each come in one call, or
``token_sum`` for ``token_mean``, with ``counts.append(plan.totals.step_tokens)``. Reports are sums, to be divided by U.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from megatron.core.utils import get_model_config

from megatron_rl_loss import Mode

rollout_sum = Mode(name="rollout_sum", function=lambda step: 1 / step.tokens("rollout"), divisor="refused")


@contextmanager
def late_counts(model: Any) -> Iterator[list[float]]:
    """Delay the reduction of gradients to the end of the ``with``; then divide them by the sum of the counts.

    Gradients of auxiliary losses (MoE, MTP) are divided too. Not for per-token loss, which divides by itself.
    """
    chunks = model if isinstance(model, list) else [model]
    config, counts = get_model_config(chunks[0]), list[float]()
    if config.calculate_per_token_loss:
        raise ValueError("late counts with calculate_per_token_loss: Megatron would divide by tokens too. Turn it off.")
    options: dict[str, Any] = {}
    held = {
        "finalize_model_grads_func": lambda *_, **functions: options.update(functions),
        "no_sync_func": nullcontext,  # a schedule's own would end the one below
        "grad_sync_func": None,
    }
    hooks = {name: getattr(config, name) for name in held}
    vars(config).update(held)
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield counts
    finally:
        vars(config).update(hooks)
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()  # as the last backward pass would
    config.finalize_model_grads_func(chunks, None, **options)
    for chunk in chunks:
        chunk.scale_gradients(1 / max(sum(counts), 1e-30))

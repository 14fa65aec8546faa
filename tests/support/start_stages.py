"""The stages of a start: an evaluation, a step, sleep and wake, a step, a checkpoint, a step of workers that resume it.

Between steps the table learns, by Megatron's own Adam without memory: from other weights a step has another gradient.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from table_step import relative_error
from torch import Tensor

#: Large, for the gradients of two steps to differ by far more than rounding.
LEARNING_RATE = 5.0
#: By these a weight moves by LEARNING_RATE * gradient / (|gradient| + 1), which rounding moves little.
ADAM = {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}


def adam(model: Any, **settings: Any) -> Any:
    """Megatron's own optimizer of the table, which keeps the gradients that it gets."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = model.ddp_config.use_distributed_optimizer
    config = OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, use_distributed_optimizer=distributed, **(ADAM | settings)
    )
    return keeping_gradients(get_megatron_optimizer(config, [model]), model)


class ConstantRate:
    """A scheduler of the learning rate, in the place of the engine's."""

    def step(self, *_: Any, **__: Any) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [LEARNING_RATE]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def keeping_gradients(optimizer: Any, model: Any) -> Any:
    """The optimizer, with `gradients`: what Megatron handed it for each of its steps.

    Like Transformer Engine's Adam it has moments from the start: Megatron loads a checkpoint into them, and torch's has
    none before its first step.
    """
    own_step, optimizer.gradients = optimizer.step, list[Tensor]()
    of_torch = optimizer.chained_optimizers[0].optimizer
    for weight in (weight for group in of_torch.param_groups for weight in group["params"]):
        if weight not in of_torch.state:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            of_torch.state[weight] = {"step": torch.tensor(0.0)} | moments

    def step() -> Any:
        optimizer.gradients.append(whole_gradient(model))
        return own_step()

    optimizer.step = step
    optimizer.load_state_dict = torch.no_grad()(optimizer.load_state_dict)  # float32 weights are their own masters
    return optimizer


def whole_gradient(model: Any) -> Tensor:
    """Of the table. For a distributed optimizer, a rank has reduced its own part of it; other ranks have the rest."""
    gradient: Tensor = model.module.losses.main_grad.clone()
    if model.ddp_config.use_distributed_optimizer:
        (buffer,) = model.buffers
        group = buffer.data_parallel_group
        own = buffer.grad_data.view(group.size(), -1)[group.rank()].contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        begin, _, _ = buffer.param_index_map[model.module.losses]
        gradient.copy_(torch.cat(parts)[begin : begin + gradient.numel()].view_as(gradient))
    return gradient


def right_gradients(steps: Sequence[Callable[[Tensor], Tensor]], table: Tensor) -> list[Tensor]:
    """In float64, of steps one after the other, each at what the ones before it made of the table."""
    table, gradients = table.double(), list[Tensor]()
    for gradient_at in steps:
        gradients.append(gradient_at(table))
        moved = gradients[-1] / (gradients[-1].abs() + 1)
        table = table - LEARNING_RATE * moved.view_as(table)
    assert all(relative_error(after, before) > 1e-3 for before, after in itertools.pairwise(gradients))
    return gradients


def errors_of_steps(by_worker: Sequence[Sequence[Tensor]], right: Sequence[Tensor]) -> list[float]:
    """Of each step, the worst of its workers' errors."""
    assert [len(of_worker) for of_worker in by_worker] == [len(right)] * len(by_worker)
    return [
        max(relative_error(of_worker[step].view_as(gradient), gradient) for of_worker in by_worker)
        for step, gradient in enumerate(right)
    ]

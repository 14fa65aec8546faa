"""The stages of a start: an evaluation, a step, sleep and wake, a step, a checkpoint, a step of workers that resume it.

Between steps the table learns, by Megatron's own Adam without memory: from other weights a step has another gradient.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bigram_step import expected, make_table
from checkouts import Framework, record_errors
from ray_workers import nothing
from table_step import relative_error
from torch import Tensor

#: Large, for the gradients of two steps to differ by far more than rounding.
LEARNING_RATE = 5.0
#: By these a weight moves by LEARNING_RATE * gradient / (|gradient| + 1), which rounding moves little.
ADAM = {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
#: Losses and gradients are float32.
TOLERANCE = 2e-6


class Launch(NamedTuple):
    """What a launch did: the gradients of each worker's steps, the library's lines, and the error of an evaluation."""

    gradients: list[Any]
    lines: list[str]
    evaluated: float | None = None


class Start(NamedTuple):
    """The errors of an engine's stages; None is for one that the engine does not have, or that did not run."""

    evaluated: float | None
    first: float
    woken: float | None = None
    resumed: float | None = None

    def check(self, is_ours: bool = True) -> None:
        """An evaluation is exact in every launch; steps are with the library, and far from it without."""
        assert self.evaluated is None or self.evaluated < TOLERANCE, self
        errors = [error for error in self[1:] if error is not None]
        assert max(errors) < TOLERANCE if is_ours else min(errors) > 1e-2, self


def run_stages(
    resumed: bool,
    *,
    evaluate: Callable[[], float],
    step: Callable[[], Any],
    gradients: Callable[[], list[Any]],
    lines: Callable[[], list[str]],
    sleep: Callable[[], Any] = nothing,
    save: Callable[[], Any] = nothing,
    load: Callable[[], Any] = nothing,
) -> Launch:
    """By the engine's own calls: a launch up to its checkpoint after two steps, or from there to a third.

    `sleep`, which wakes the workers up again, is for an engine that does not sleep around each step by itself.
    """
    if resumed:
        load()
        step()
        return Launch(gradients(), lines())
    evaluated = evaluate()
    proved = [line for line in lines() if "aggregation" in line]
    assert not proved, f"An evaluation was taken for a training step: {proved}"
    step()
    sleep()
    step()
    of_workers = gradients()
    save()
    return Launch(of_workers, lines(), evaluated)


def errors_of_stages(
    launches: Sequence[Launch], workers: int, gradient_at: Callable[[Tensor], Tensor], table: Tensor
) -> Start:
    """Of a launch and, if there are two, of the one that resumes it."""
    right, errors = right_gradients([gradient_at] * 3, table), list[float]()
    for launch, of_launch in zip(launches, (right[:2], right[2:]), strict=False):
        assert len(launch.gradients) == workers
        errors += errors_of_steps(launch.gradients, of_launch)
    return Start(launches[0].evaluated, *errors)


def errors_on_rows(launches: Sequence[Launch], workers: int, mode: str, terms: dict[str, str], **options: Any) -> Start:
    """Of launches that train on the rows of `bigram_step`; `options` as of its `expected`."""
    return errors_of_stages(
        launches, workers, lambda table: expected(mode, terms, table=table, **options)[1], make_table()
    )


def assert_said(lines: list[str], engine: str, proved: str, is_ours: bool = True, does: str = "replaced") -> None:
    """Worker 0 says what the library does there and what it proved; neither is said in a launch without the library."""
    print(*lines, sep="\n")
    for said in f" in {engine} worker 0: {does}", f": {proved}, aggregation proved on":
        assert any(line.startswith(f"megatron_rl_loss{said}") for line in lines) == is_ours, (said, lines)


def record_stages(record_property: Any, framework: Framework, evaluation: str | None, start: Start) -> None:
    """Of a launch as asked, which is checked. `evaluation` names the engine's own function."""
    start.check()
    stages = (f"{evaluation}, an evaluation", "first step", "step after sleep", "step from a checkpoint")
    for stage, error in zip(stages, start, strict=True):
        if error is not None:
            record_errors(record_property, framework, f"started: {stage}", ours=error)


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
        table = after_step(table, gradients[-1])
    assert all(relative_error(after, before) > 1e-3 for before, after in itertools.pairwise(gradients))
    return gradients


def after_step(table: Tensor, gradient: Tensor) -> Tensor:
    """What a step makes of the table, in float64."""
    return table.detach().double() - LEARNING_RATE * (gradient / (gradient.abs() + 1)).view_as(table)


def errors_of_steps(by_worker: Sequence[Sequence[Tensor]], right: Sequence[Tensor]) -> list[float]:
    """Of each step; its workers have one gradient, to the bit."""
    assert [len(of_worker) for of_worker in by_worker] == [len(right)] * len(by_worker)
    for of_step in zip(*by_worker, strict=True):
        assert all(torch.equal(gradient, of_step[0]) for gradient in of_step)
    return [
        relative_error(gradient.view_as(of_oracle), of_oracle)
        for gradient, of_oracle in zip(by_worker[0], right, strict=True)
    ]

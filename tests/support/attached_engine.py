"""A toy of an engine: workers that train two steps with Megatron's schedule, asked for as engines do, DP 2 x CP 2."""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import gpt_oracle
from audited_gpt import STOCK
from tiny_gpt import Case, Layout, output_of, prepared, run_batches, start_layout
from torch import Tensor

from megatron_rl_loss import Samples, tap

LAYOUT = Layout(1, False, 1, 1, 2, 2)
ATTACH = "megatron_rl_loss.audit.attach"


class Later:
    """Finalises gradients before the optimizer's step, not at the schedule's end: as SkyRL does, by its names."""

    def __init__(self, config: Any) -> None:
        self._finalize = config.finalize_model_grads_func
        config.finalize_model_grads_func = self._defer_finalize_model_grads

    def _defer_finalize_model_grads(self, *args: Any, **options: Any) -> None:
        self._call = args, options

    def run_pending_grad_sync(self) -> None:
        args, options = self._call
        self._finalize(*args, **options)


def train(
    scaling: str, variables: dict[str, str], plugin: str | None = None, later: bool = False
) -> tuple[list[Any], str, bool]:
    """All weights after two steps on one rank, the printed text, and True if all modules are as they were before.

    The loss is Megatron's own 3-tuple: a token mean with `scaling` "per token", else means of means. `plugin` is
    imported as verl imports its ``external_lib``, once Megatron and its trainer are there.
    """
    os.environ.update(variables)
    start_layout(LAYOUT)
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if plugin is not None:
            importlib.import_module(plugin)
        case = Case(3, "token_mean", "all", scaling, bf16=False, optimizer="distributed", tied=False, lopsided=False)
        ready, batches = prepared(LAYOUT, case, gpt_oracle.rollouts_of(case.shape(LAYOUT)), "packed")

        def forward_step(iterator: Iterator[Any], model: Any) -> Any:
            batch = next(iterator)

            masks = [mask != 0 for mask in batch.samples.loss_masks]  # whole, since tokens are counted

            def loss_func(losses: Tensor) -> Any:
                samples = Samples(masks, layout=batch.samples.layout)
                both = -losses, -losses.bfloat16()  # as if a sampler's were stored so
                losses = tap(losses * (1.5 + batch.advantages), samples=samples, log_probs=both)
                return STOCK["3-tuple"](losses, (batch.mask != 0).float())

            return output_of(model, batch), loss_func

        finalizer = Later(ready.config) if later else None
        for _ in range(2):
            # A module's own name of Megatron's function, imported before the plugin was.
            run_batches(LAYOUT, ready, forward_step, batches, lambda _: training.get_forward_backward_func())
            if finalizer is not None:
                finalizer.run_pending_grad_sync()
            assert ready.optimizer.step()[0]
    parameters = [parameter for chunk in ready.chunks for parameter in chunk.parameters()]
    functions = [
        value for name, value in vars(schedules).items() if name.startswith(("forward_backward", "forward_step"))
    ]
    clean = not any(type(function) is not FunctionType or hasattr(function, "__wrapped__") for function in functions)
    clean &= schedules.forward_step_calc_loss.__module__ == schedules.__name__
    clean &= not any(parameter._backward_hooks for parameter in parameters)
    return [parameter.detach().float().numpy().copy() for parameter in parameters], printed.getvalue(), clean

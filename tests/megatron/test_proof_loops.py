"""Loops of one's own that the proof must let pass, stop, or call not proved: a row for each.

All rows run one after the other on the same four ranks, two data- times two context-parallel, with the real schedule
and DDP. The gradient of a row that trains is compared with the oracle.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from proved_steps import ELSEWHERE, IN_PART, PROVED, Step, attempted, policy
from ranks import run_ranks
from step_samples import dealt
from table_step import Batch, relative_error, run_schedule, run_step, table_model
from torch import Tensor
from world import CP, DP, STEP, TABLE, gradient_of, start_ranks

pytestmark = pytest.mark.slow


class Loop:
    """A model and its micro-batches on a rank, in a loop around Megatron's schedule."""

    def __init__(
        self,
        asked: Any = None,
        batches: list[Batch] | None = None,
        table: list[float] = TABLE,
        level: Any = "error",
    ) -> None:
        from megatron.core import parallel_state as mpu

        self.cp_rank, self.dp_rank = mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank()
        self.groups = {"dp_group": mpu.get_data_parallel_group(), "cp_group": mpu.get_context_parallel_group()}
        hands = dealt(STEP, self.dp_rank, DP, 3)
        self.batches = [Batch(STEP, hand, CP) for hand in hands] if batches is None else batches
        self.model = table_model(table)
        self.level = level

    def proving(self, plan: Any) -> Any:
        """Megatron's schedule in the ``with`` of a plan's step."""
        from megatron_rl_loss import prove_step

        def wrap(schedule: Any) -> Any:
            def run(**options: Any) -> Any:
                with prove_step(options["model"], plan, level=self.level):
                    return schedule(**options)

            return run

        return wrap

    @property
    def samples(self) -> list[Any]:
        return [batch.samples for batch in self.batches]

    def plan(self, mode: Any, **options: Any) -> Any:
        from megatron_rl_loss import plan_step
        from megatron_rl_loss.core.carriers import DEFAULT

        if "model" in options:
            return plan_step(self.samples, mode, **options)
        plan = plan_step(self.samples, mode, gradients="averaged over ranks", **self.groups, **options)
        # As of a plan that has the model, whose Megatron was not probed: some of these loops would be refused.
        plan.record.trainer = dataclasses.replace(plan.record.trainer, form=DEFAULT)
        return plan

    def step(
        self,
        plan: Any,
        loss_of: Callable[[Any, Tensor], Any] = lambda microbatch, losses: microbatch.loss(losses),
        *,
        expected: Tensor | str | None,
        model: Any = None,
        num_microbatches: int | None = None,
        microbatches: Any = None,
    ) -> Step:
        model = self.model if model is None else model
        getattr(model, "zero_grad_buffer", model.zero_grad)()

        pairs = list(zip(self.batches, microbatches or plan, strict=True))
        options: Any = {"num_microbatches": num_microbatches or len(pairs), "fresh": False}

        def run() -> float:
            run_step(model, pairs, loss_of, self.proving(plan), **options)
            return 0.0 if expected is None else error_in(model, expected)

        return attempted(run)


def error_in(model: Any, expected: Tensor | str) -> float:
    wanted = gradient_of(expected) if isinstance(expected, str) else expected
    return relative_error(model.module.losses.main_grad.cpu(), wanted)


# ---- right loops


def as_asked() -> list[Step]:
    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), expected="prompt_mean") for _ in range(2)]


def first_entries_without_a_gradient() -> list[Step]:
    loop, count = Loop("prompt_mean", table=[0.0] * 300 + TABLE), 300
    for batch in loop.batches:
        batch.numbers = [[number + count for number in slot] for slot in batch.numbers]
    expected = torch.cat([torch.zeros(count), gradient_of("prompt_mean")])
    return [loop.step(loop.plan("prompt_mean"), expected=expected)]


def reduced_twice() -> list[Step]:
    """One share is made for a log, with a graph, and never returned."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        from megatron_rl_loss.core.aggregation import resolve
        from megatron_rl_loss.core.totals_by_hand import reducer_by

        for mode in ("prompt_mean", "sample_mean"):
            reducer_by(resolve(mode), microbatch.tokens, microbatch.totals)(losses)
        return microbatch.loss(losses)

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected="prompt_mean")]


def term_left_out_where_it_has_no_token() -> list[Step]:
    from megatron_rl_loss import Term

    masks = [sample.mask * (number % 3 == 0) for number, sample in enumerate(STEP)]
    loop = Loop("token_mean")
    loop.batches = [Batch(STEP, hand, CP, term_masks={"good": masks}) for hand in dealt(STEP, loop.dp_rank, DP, 6)]

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        terms: dict[str, Any] = {"pg": losses}
        if microbatch.tokens_of("good").samples.mask_sums.any():
            terms["nll"] = Term(0 * losses, "sample_mean", coef=0.3, mask="good")
        return microbatch.loss(terms)

    return [loop.step(loop.plan("token_mean", term_masks=["good"]), loss_of, expected="token_mean")]


def skipped_where_no_token_is_active() -> list[Step]:
    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        if microbatch.mask.any():
            return microbatch.loss(losses)
        return 0 * losses.sum(), torch.tensor(1, dtype=torch.int32), {}

    loop = Loop("sample_mean")
    return [loop.step(loop.plan("sample_mean"), loss_of, expected="sample_mean")]


def hand_made_reducers() -> list[Step]:
    """Two reducers beside the plan that the loop states; that of the KL term, of another mode, is called first."""
    from megatron_rl_loss.core.aggregation import resolve
    from megatron_rl_loss.core.collectives import StepGroups
    from megatron_rl_loss.core.counting import count_step
    from megatron_rl_loss.core.totals_by_hand import reducer_by

    loop = Loop("prompt_mean")
    totals = count_step(loop.samples, StepGroups(**loop.groups))

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        local = microbatch.samples.local(loop.cp_rank, CP)
        shares = {}
        for mode in ("token_mean", "prompt_mean"):
            reducer = reducer_by(resolve(mode), local, totals)
            shares[mode] = reducer(0 * losses if mode == "token_mean" else losses)
        share = shares["prompt_mean"] + 0.1 * shares["token_mean"]
        return share * len(loop.samples) * CP * DP, torch.tensor(1, dtype=torch.int32), {}

    return [loop.step(loop.plan("prompt_mean"), loss_of, expected="prompt_mean")]


def two_models_planned_first() -> list[Step]:
    """Both plans, without a model, are made before either model trains."""
    loop, modes = Loop(), ("token_mean", "prompt_mean")
    plans = {mode: loop.plan(mode) for mode in modes}
    return [loop.step(plans[mode], expected=mode, model=table_model(TABLE)) for mode in modes]


def critic_without_this_library() -> list[Step]:
    """A critic trains on a loss of its own, wrongly in the ``with`` of the actor's plan; then the actor in its own."""
    loop, critic = Loop(), table_model(TABLE)
    plan = loop.plan("prompt_mean")
    first = loop.step(plan, squared, expected=None, model=critic)
    return [first, loop.step(plan, expected="prompt_mean")]


def critic_planned_first() -> list[Step]:
    """One wrapped schedule trains a critic by token_mean and an actor by prompt_mean, twice each."""
    loop, models = Loop(), {mode: table_model(TABLE) for mode in ("token_mean", "prompt_mean")}
    steps = []
    for mode, model in [*models.items()] * 2:
        plan = loop.plan(mode, model=model)
        steps.append(loop.step(plan, expected=mode, model=model))
        plan.finish()
    return steps


def finalised_after_the_schedule() -> list[Step]:
    from megatron.core.distributed import finalize_model_grads

    loop, steps = Loop("prompt_mean"), []
    loop.model.config.finalize_model_grads_func = None
    for _ in range(2):
        step = loop.step(loop.plan("prompt_mean"), expected=None)
        finalize_model_grads([loop.model], None)
        steps.append(step._replace(error=error_in(loop.model, "prompt_mean")))
    return steps


def another_ddp() -> list[Step]:
    loop = Loop("prompt_mean")
    loop.model = table_model(TABLE, ddp=False)
    loop.model.config.finalize_model_grads_func = None
    return [loop.step(loop.plan("prompt_mean"), expected=None) for _ in range(2)]


def not_measured() -> list[Step]:
    """An error in the measurement is no fault of the loss: training goes on."""
    from megatron_rl_loss.proof.own_tokens import OwnTokens

    loop = Loop("prompt_mean")
    with patch.object(OwnTokens, "_add", lambda *_, **__: 1 / 0):
        return [loop.step(loop.plan("prompt_mean"), expected="prompt_mean") for _ in range(2)]


def out_of_memory_and_given_up() -> list[Step]:
    """Step 1 fails in its second micro-batch and is given up."""
    loop = Loop("prompt_mean")
    numbers = iter(range(3))

    def fails(microbatch: Any, losses: Tensor) -> Any:
        if next(numbers) == 1:
            raise RuntimeError("CUDA out of memory")
        return microbatch.loss(losses)

    first = loop.step(loop.plan("prompt_mean", model=loop.model), fails, expected=None)
    loop.model.zero_grad_buffer()
    return [first, loop.step(loop.plan("prompt_mean", model=loop.model), expected="prompt_mean")]


def compiled() -> list[Step]:
    """Simulated: Megatron's replacements for a CPU cannot be compiled. No hook is set in a compiled graph."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            return microbatch.loss(losses)

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected="prompt_mean")]


def two_compiled_reducers(own_plan: bool) -> list[Step]:
    """As `compiled`, of two terms of a plan's loss, or of two hand-made reducers."""
    from megatron_rl_loss import Term

    def compiled_sum(microbatch: Any, losses: Tensor) -> Any:
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            return microbatch.loss({"pg": losses, "kl": Term(0 * losses, "token_mean", coef=0.1)})

    with patch.object(torch.compiler, "is_compiling", lambda: True):
        if not own_plan:
            return hand_made_reducers()
    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), compiled_sum, expected="prompt_mean")]


def sample_means_by_hand() -> list[Step]:
    """Each sample's mean is taken by hand, and summed by a mode that divides by no count of tokens."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        sums = torch.from_numpy(microbatch.tokens.spread(microbatch.samples.mask_sums + 1e-9)).float()
        return microbatch.loss(policy(microbatch, losses) / sums)

    rows = oracle.step_gradient("sample_mean", [oracle.Sample(sample.losses, sample.mask) for sample in STEP])
    loop = Loop("token_sum")
    return [loop.step(loop.plan("token_sum"), loss_of, expected=len(STEP) * torch.cat([*rows, torch.zeros(1)]))]


def coefficient_like_a_division() -> list[Step]:
    """A coefficient of 0.1, and ten tokens in each sample."""
    step = [oracle.sample([0.1 * t - k for t in range(10)], [1.0] * 10, f"r{k}", f"p{k // 2}") for k in range(8)]
    loop = Loop("token_mean", [], [float(loss) for sample in step for loss in sample.losses] + [0.0])
    loop.batches = [Batch(step, [4 * loop.dp_rank + k, 4 * loop.dp_rank + k + 1], CP) for k in (0, 2)]
    expected = 0.1 * torch.cat([*oracle.step_gradient("token_mean", step), torch.zeros(1)])

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        return microbatch.loss(0.1 * policy(microbatch, losses))

    return [loop.step(loop.plan("token_mean"), loss_of, expected=expected)]


def by_label(inputs: Any) -> Any:
    return np.asarray([float(label) for label in inputs.batch.labels["score"]]) / inputs.tokens("step")


def two_terms_that_read_labels() -> list[Step]:
    """The coefficient of one changes, so that its weights cannot be known."""
    from megatron_rl_loss import Term

    loop = Loop("token_mean")
    labels: Any = {"labels": {"score": [1.0 + number % 2 for number in range(len(STEP))]}}
    loop.batches = [Batch(STEP, hand, CP, **labels) for hand in dealt(STEP, loop.dp_rank, DP, 3)]

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        other = Term(0 * losses, by_label, coef=1.0 + len(losses))
        return microbatch.loss({"pg": losses, "kl": Term(0 * losses, by_label, coef=0.5), "entropy": other})

    return [loop.step(loop.plan("token_mean"), loss_of, expected="token_mean")]


def three_steps_without_a_gradient() -> list[Step]:
    loop = Loop("token_mean")

    def nothing(microbatch: Any, losses: Tensor) -> Any:
        return microbatch.loss(0 * losses)

    return [loop.step(loop.plan("token_mean"), nothing, expected=torch.zeros(len(TABLE))) for _ in range(4)]


def gradients_for_a_log() -> list[Step]:
    """Norms of gradients are taken in the loss function, of the losses and of a parameter."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        share, *others = microbatch.loss(losses)
        torch.autograd.grad(share, [losses, loop.model.module.losses], retain_graph=True)
        return share, *others

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected="prompt_mean")]


def squared(microbatch: Any, values: Tensor) -> Any:
    """A loss without this library."""
    return (values**2).mean(), {}


def gathered_over_cp() -> list[Step]:
    """Each context-parallel rank holds all losses, and the gather's backward adds up what they send."""
    loop = Loop("prompt_mean")
    loop.batches = [Batch(STEP, hand, CP, gathered=True) for hand in dealt(STEP, loop.dp_rank, DP, 3)]
    return [loop.step(loop.plan("prompt_mean"), expected="prompt_mean")]


def plan_that_is_over() -> list[Step]:
    """After a step without a gradient, the micro-batches of its plan serve for another loss."""
    loop = Loop("prompt_mean")
    plan = loop.plan("prompt_mean")
    first = loop.step(plan, lambda microbatch, losses: microbatch.loss(0 * losses), expected=None)
    return [first, loop.step(plan, squared, expected=None)]


def groups_of_one(factor: float) -> list[Step]:
    """Context-parallel groups of one rank in a launch of CP 2, which no micro-batch names."""
    from megatron.core import parallel_state as mpu

    from megatron_rl_loss import plan_step

    loop, dp_cp = Loop(), mpu.get_data_parallel_group(with_context_parallel=True)
    batches = [Batch(STEP, hand[loop.cp_rank :: CP], 1) for hand in dealt(STEP, loop.dp_rank, DP, 3)]
    plan = plan_step(
        [batch.samples for batch in batches], "prompt_mean", dp_group=dp_cp, gradients="averaged over ranks"
    )
    loop.model.zero_grad_buffer()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch, microbatch = next(iterator)
        numbers = batch.local_numbers(microbatch.cp_rank, microbatch.cp_size)

        def loss_func(losses: Tensor) -> Any:
            share, *others = microbatch.loss(losses, form="3-tuple")
            return share * factor, *others

        return chunk(numbers), loss_func

    def run() -> float:
        pairs = iter(list(zip(batches, plan, strict=True)))
        run_schedule(forward_step, pairs, loop.model, len(batches), loop.proving(plan), fresh=False)
        return error_in(loop.model, "prompt_mean") if factor == 1 else 0.0

    return [attempted(run)]


def after_a_caught_exception() -> list[Step]:
    """The schedule raises in a step, whose plan is given up; the next step is right."""
    loop = Loop("prompt_mean")

    def fails(microbatch: Any, losses: Tensor) -> Any:
        raise RuntimeError("out of memory")

    first = loop.step(loop.plan("prompt_mean", model=loop.model), fails, expected=None)
    return [first, loop.step(loop.plan("prompt_mean", model=loop.model), expected="prompt_mean")]


def weights_on_purpose(third: bool) -> list[Step]:
    """A coefficient of 1/3 on losses of three tokens each, or weights of one over a sample's length."""
    step = [oracle.sample([0.1 * t - k for t in range(3)], [1.0] * 3, f"r{k}", f"p{k // 2}") for k in range(8)]
    loop = Loop("token_mean", [], [float(loss) for sample in step for loss in sample.losses] + [0.0])
    loop.batches = [Batch(step, [4 * loop.dp_rank + k, 4 * loop.dp_rank + k + 1], CP) for k in (0, 2)]
    if not third:
        loop = Loop("token_mean")

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        lengths = torch.from_numpy(microbatch.tokens.spread(microbatch.samples.mask_sums + 1e-9)).float()
        return microbatch.loss(policy(microbatch, losses) * (1 / 3 if third else 1 / lengths))

    return [loop.step(loop.plan("token_mean"), loss_of, expected=None)]


def clipped_while_finalising() -> list[Step]:
    loop = Loop("prompt_mean")
    finalize = loop.model.config.finalize_model_grads_func

    def finalised(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        loop.model.module.losses.main_grad *= 0.0599

    loop.model.config.finalize_model_grads_func = finalised
    return [loop.step(loop.plan("prompt_mean"), expected=None)]


def a_call_for_each_microbatch(each: bool) -> list[Step]:
    """The schedule is called for each micro-batch of one plan, and proved as a whole; or wrongly each call."""
    from megatron_rl_loss import prove_step

    loop = Loop("prompt_mean")
    plan = loop.plan("prompt_mean", model=loop.model)
    loop.model.zero_grad_buffer()
    finalize, count = loop.model.config.finalize_model_grads_func, len(loop.batches)
    loop.model.config.finalize_model_grads_func = None if each else lambda *_, **__: None
    options: Any = {"num_microbatches": 1, "fresh": False}

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        share, *others = microbatch.loss(losses)
        return share / count, *others

    def run() -> float:
        with contextlib.nullcontext() if each else prove_step(loop.model, plan):
            for pair in zip(loop.batches, plan, strict=True):
                with prove_step(loop.model, plan) if each else contextlib.nullcontext():
                    run_step(loop.model, [pair], loss_of, **options)
            if not each:
                finalize([loop.model])
        return 0.0 if each else error_in(loop.model, "prompt_mean")

    return [attempted(run)]


def levels_that_differ() -> list[Step]:
    """Rank 1 asks for no proof; the strictest level holds, before ranks exchange anything else."""
    loop = Loop("prompt_mean", level="off" if dist.get_rank() == 1 else "error")
    return [loop.step(loop.plan("prompt_mean"), expected="prompt_mean")]


def planned_by_fewer_ranks() -> list[Step]:
    """Each data-parallel rank counts its own tokens."""
    loop = Loop("prompt_mean")
    loop.groups["dp_group"] = None
    return [loop.step(loop.plan("prompt_mean"), expected=None)]


# ---- wrong loops


def losses_detached_in_a_microbatch() -> list[Step]:
    loop, numbers = Loop("token_mean"), iter(range(3))

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        is_cut = next(numbers) == 1
        return microbatch.loss(losses.detach().requires_grad_() if is_cut else losses)

    return [loop.step(loop.plan("token_mean"), loss_of, expected="token_mean")]


def a_plan_for_each_microbatch() -> list[Step]:
    """A plan for each micro-batch, whose gradients add up until one optimizer step."""
    from megatron_rl_loss import plan_step

    loop = Loop("token_mean")
    loop.model.zero_grad_buffer()
    options: Any = {"num_microbatches": 1, "fresh": False}
    steps = []
    for batch in loop.batches[:2]:
        plan = plan_step([batch.samples], "token_mean", model=loop.model)
        loss_of = lambda microbatch, losses: microbatch.loss(losses)  # noqa: E731
        run: Any = functools.partial(run_step, loop.model, [(batch, plan[0])], loss_of, loop.proving(plan), **options)
        steps.append(attempted(lambda run=run: float(bool(run())) * 0))  # type: ignore[misc]
    return steps


def never_zeroed() -> list[Step]:
    loop = Loop("token_mean")
    first = loop.step(loop.plan("token_mean", model=loop.model), expected="token_mean")
    zero, loop.model.zero_grad_buffer = loop.model.zero_grad_buffer, lambda: None
    second = loop.step(loop.plan("token_mean", model=loop.model), expected="token_mean")
    loop.model.zero_grad_buffer = zero
    return [first, second]


def compiled_and_doubled() -> list[Step]:
    """The share of a compiled graph, where no hook is set, is doubled before it is returned."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            share, *others = microbatch.loss(losses)
        return 2 * share, *others

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected=None)]


def microbatch_left_out_of_a_sum() -> list[Step]:
    """The last of three micro-batches is not trained on; the schedule divides by two."""
    loop = Loop("token_sum")
    return [loop.step(loop.plan("token_sum"), expected="token_sum", num_microbatches=2)]


def microbatch_with_a_loss_of_its_own() -> list[Step]:
    numbers = iter(range(3))

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        if next(numbers) == 1:
            return losses.mean(), torch.tensor(1, dtype=torch.int32), {}
        return microbatch.loss(losses)

    loop = Loop("token_mean")
    return [loop.step(loop.plan("token_mean"), loss_of, expected="token_mean")]


def microbatches_of_two_plans() -> list[Step]:
    from megatron_rl_loss import plan_step

    loop = Loop("token_mean")
    plans = [plan_step(part, "token_mean", model=loop.model) for part in (loop.samples[:2], loop.samples[2:])]
    step = loop.step(plans[0], expected="token_mean", microbatches=[*plans[0], *plans[1]])
    assert step.error > 0.1
    return [step._replace(error=0.0)]


def halved_on_some_ranks() -> list[Step]:
    from megatron.core.distributed import finalize_model_grads

    loop = Loop("prompt_mean")

    def finalize(chunks: Any, *args: Any, **options: Any) -> None:
        finalize_model_grads(chunks, *args, **options)
        for parameter in loop.model.parameters():
            parameter.main_grad /= 1 + loop.dp_rank

    loop.model.config.finalize_model_grads_func = finalize
    return [loop.step(loop.plan("prompt_mean"), expected=None)]


def without_its_ddp() -> list[Step]:
    """The measured model is the one inside Megatron's DDP."""
    from megatron_rl_loss import prove_step

    loop = Loop("prompt_mean")
    plan = loop.plan("prompt_mean")

    def run() -> float:
        with prove_step(loop.model.module, plan):
            run_step(loop.model, [*zip(loop.batches, plan, strict=True)], lambda batch, losses: batch.loss(losses))
        return error_in(loop.model, "prompt_mean")

    return [attempted(run)]


def doubled() -> list[Step]:
    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        loss, *others = microbatch.loss(losses)
        return 2 * loss, *others

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected=None)]


def verls_form() -> list[Step]:
    """``form="verl"``, whose factor verl's own code completes, in Megatron's schedule."""
    loop = Loop("prompt_mean")
    return [
        loop.step(
            loop.plan("prompt_mean"), lambda microbatch, losses: microbatch.loss(losses, form="verl"), expected=None
        )
    ]


def own_mean(factor: float, microbatch: Any, losses: Tensor) -> Any:
    """A loss function that never calls its micro-batch, and returns a multiple of its own mean."""
    return factor * losses.mean(), torch.tensor(1, dtype=torch.int32), {}


def not_called(level: str) -> list[Step]:
    loop, ignoring = Loop("prompt_mean", level=level), functools.partial(own_mean, 1.0)
    return [loop.step(loop.plan("prompt_mean"), ignoring, expected=None) for _ in range(1 + (level == "warn"))]


def step_of_dummies() -> list[Step]:
    loop, ignoring = Loop("prompt_mean"), functools.partial(own_mean, 0.0)
    first = loop.step(loop.plan("prompt_mean"), ignoring, expected=None)
    return [first, loop.step(loop.plan("prompt_mean"), expected="prompt_mean")]


def freed_after_the_step() -> list[Step]:
    """Without the collector of cycles, nothing of a measured step is left."""
    from megatron_rl_loss.megatron import proving

    references: list[Any] = []
    measurement = vars(proving)["MegatronStep"]

    def noted(*args: Any, **options: Any) -> Any:
        measured = measurement(*args, **options)
        references.extend(map(weakref.ref, (measured, measured.taps, measured._source)))
        return measured

    loop = Loop("prompt_mean")
    vars(proving)["MegatronStep"] = noted
    gc.collect()
    gc.disable()
    try:
        step = loop.step(loop.plan("prompt_mean"), expected="prompt_mean")
        left = [type(reference()).__name__ for reference in references if reference() is not None]
    finally:
        gc.enable()
        vars(proving)["MegatronStep"] = measurement
    return [step._replace(error=math.inf if left or not references else step.error)]


def beside_the_share() -> list[Step]:
    """A term of the model's output is added to the share, which no reducer weighs."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        share, *others = microbatch.loss(losses)
        return share + 0.01 * (losses**2).mean(), *others

    loop = Loop("prompt_mean")
    return [loop.step(loop.plan("prompt_mean"), loss_of, expected=None)]


def other_count() -> list[Step]:
    """One rank returns another token count than its micro-batch handed out, by which the schedule divides."""
    loop = Loop("prompt_mean")

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        share, count, *others = microbatch.loss(losses)
        return share, count + (loop.dp_rank == 0), *others

    return [loop.step(loop.plan("prompt_mean"), loss_of, expected=None)]


def new_mode_tripled() -> list[Step]:
    """A mode, its divisor and its unit counting are claims: the fault that comes with the second mode is seen."""
    loop = Loop()

    def tripled(microbatch: Any, losses: Tensor) -> Any:
        share, *others = microbatch.loss(losses)
        return 3 * share, *others

    claims: list[Any] = [
        {"mode": "prompt_mean"},
        {"mode": "constant", "divisor": 8.0},
        {"mode": "constant", "divisor": 16.0},
    ]
    steps = [loop.step(loop.plan(**claim), expected=None) for claim in claims]
    return [*steps, loop.step(loop.plan("token_mean"), tripled, expected=None)]


def two_models_in_one_step(nested: bool) -> list[Step]:
    """An actor and a critic, each with a plan and a ``with`` of its own; both losses are made inside both."""
    from megatron_rl_loss import prove_step

    loop, models = Loop(), [table_model(TABLE) for _ in range(2)]
    plans = [loop.plan(mode, model=model) for mode, model in zip(("prompt_mean", "token_mean"), models, strict=True)]
    options: Any = {"num_microbatches": len(loop.batches), "fresh": False}
    loss_of = lambda microbatch, losses: microbatch.loss(losses)  # noqa: E731
    for model in models:
        model.zero_grad_buffer()

    def run() -> float:
        with contextlib.ExitStack() as stack:
            for model, plan in zip(models, plans, strict=True):
                if nested:
                    stack.enter_context(prove_step(model, plan))
            for model, plan in zip(models, plans, strict=True):
                with contextlib.nullcontext() if nested else prove_step(model, plan):
                    run_step(model, list(zip(loop.batches, plan, strict=True)), loss_of, **options)
        return max(error_in(model, mode) for model, mode in zip(models, ("prompt_mean", "token_mean"), strict=True))

    return [attempted(run)]


def scale_that_fails() -> list[Step]:
    """The function of the loss scale raises on one rank once the step is over."""
    loop, calls = Loop("prompt_mean"), [0]

    def scale(loss: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > len(loop.batches) and dist.get_rank() == 1:
            raise RuntimeError("no scale")
        return loss

    loop.model.config.grad_scale_func = scale
    return [loop.step(loop.plan("prompt_mean"), expected="prompt_mean")]


def divided_by_the_microbatch(mode: str, level: str, per: str) -> list[Step]:
    """Losses are divided by a number of their micro-batch before a reducer that divides by a number of the step."""

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        number = {
            "mask": float(microbatch.samples.mask_sums.sum()),
            "rows": float(len(microbatch.samples)),
            "weights": 1 / microbatch.weights.clamp(min=1e-12),
        }[per]
        return microbatch.loss(policy(microbatch, losses) / number)

    loop, divisor = Loop(level=level), 8.0 if mode == "constant" else None
    return [loop.step(loop.plan(mode, divisor=divisor), loss_of, expected=None)]


def stated_twice() -> list[Step]:
    from megatron_rl_loss import prove_step

    loop = Loop()
    plan = loop.plan("prompt_mean")

    def run() -> float:
        with prove_step(loop.model, plan, loss_scale=2.0):
            return 0.0

    return [attempted(run)]


#: The loop, and what each of its steps prints on the first rank or raises on all.
NOT_CALLED = "its loss.* was not called"
LOOPS: dict[str, tuple[Callable[[], list[Step]], list[str]]] = {
    "as asked": (
        as_asked, [rf"prompt_mean on the policy loss, {PROVED} 37 tokens of 13 samples, 3 prompts of 3 to 7", "^$"]
    ),
    "no gradient at the first entries": (first_entries_without_a_gradient, [f"prompt_mean .*{PROVED} 37"]),
    "a loss reduced twice": (reduced_twice, [rf"prompt_mean on the policy loss, {PROVED} 37 [^;]*; by the gradient"]),
    "a term left out where no token has its mask": (
        term_left_out_where_it_has_no_token,
        [rf"token_mean on the policy loss, sample_mean on nll, {PROVED} 37 [^;]*; by the gradient"],
    ),
    "a micro-batch skipped where no token is active": (skipped_where_no_token_is_active, [f"{PROVED} 37 tokens of 13"]),
    "a hand-made reducer of another mode first": (
        hand_made_reducers,
        [rf"{IN_PART} 37 .*not covered: loss number 2 of a micro-batch \(no mode of its own\)"],
    ),
    "two models planned before either trains": (
        two_models_planned_first,
        [f"token_mean on the policy loss, {PROVED} 37", f"prompt_mean on the policy loss, {PROVED} 37"],
    ),
    "a critic without this library first": (
        critic_without_this_library,
        [f"raises no micro-batch of the plan handed out: {NOT_CALLED}", f"prompt_mean on the policy loss, {PROVED} 37"],
    ),
    "a critic, planned first": (
        critic_planned_first,
        [rf"token_mean on the policy loss, {PROVED} 37", rf"prompt_mean on the policy loss, {PROVED} 37", "^$", "^$"],
    ),
    "finalised after the schedule": (
        finalised_after_the_schedule,
        ["NOT PROVED: The schedule does not finalise gradients: the config has no finalize_model_grads_func", "^$"],
    ),
    "another DDP": (another_ddp, ["raises Gradients are not summed over ranks at all"] * 2),
    "an error in the measurement": (not_measured, ["NOT PROVED: A rank failed to measure. ZeroDivisionError", "^$"]),
    "out of memory, given up": (
        out_of_memory_and_given_up,
        [
            "raises RuntimeError: CUDA out of memory",
            f"{PROVED} 37 tokens",
        ],
    ),
    "a step of dummies": (
        step_of_dummies,
        ["prompt_mean on the policy loss, not proved yet: no token of the step has a gradient", f"{PROVED} 37 tokens"],
    ),
    "a loss under torch.compile": (compiled, ["NOT PROVED: A micro-batch's loss was made in a compiled graph"]),
    "two terms under torch.compile": (
        functools.partial(two_compiled_reducers, True),
        ["NOT PROVED: A micro-batch's loss was made in a compiled graph, where no gradient can be seen"],
    ),
    "two hand-made reducers under torch.compile": (
        functools.partial(two_compiled_reducers, False),
        [f"raises no micro-batch of the plan handed out: {NOT_CALLED}"],
    ),
    "sample means by hand": (
        sample_means_by_hand,
        [rf"token_sum on .*{IN_PART} 37 .*not covered: factors of .* \(1 / the sum of the mask over each sample\) on"],
    ),
    "a coefficient like a division": (
        coefficient_like_a_division,
        [rf"{IN_PART} 80 .*not covered: a factor of 0.1 \(1 / the sum of the mask over each sample\) on tokens"],
    ),
    "two terms that read labels": (
        two_terms_that_read_labels,
        [rf"token_mean on the policy loss, \S*by_label on kl, {IN_PART} 37 .*not covered: entropy \(its mode or coef"],
    ),
    "three steps without a gradient": (
        three_steps_without_a_gradient,
        ["not proved yet: no token", "^$", "NOT PROVED: No token of 3 steps had a gradient.* gradients are 0", "^$"],
    ),
    "gradients for a log": (gradients_for_a_log, [rf"prompt_mean on the policy loss, {PROVED} 37 [^;]*; by the grad"]),
    "gathered over CP": (
        gathered_over_cp, [rf"{PROVED} 37 .*; the backward of the gather over CP as given"]
    ),
    "a plan that is over": (
        plan_that_is_over, ["not proved yet: no token of the step", "NOT PROVED: No loss of the plan's micro-b"]
    ),
    "levels that differ": (levels_that_differ, [rf"differs between ranks \(error, off\): error\n.*{PROVED} 37"]),
    "planned by fewer ranks": (
        planned_by_fewer_ranks,
        ["raises DistributedDataParallel reduces gradients over 4 ranks, and the plan counts the tokens of 2: "],
    ),
    "groups of one": (functools.partial(groups_of_one, 1.0), [f"prompt_mean .*{PROVED} 37 tokens of 13 samples"]),
    "groups of one, doubled": (functools.partial(groups_of_one, 2.0), ["raises tokens weigh 2 times what they"]),
    "an exception that was caught": (
        after_a_caught_exception, ["raises RuntimeError: out of memory", f"prompt_mean .*{PROVED} 37 tokens"]
    ),
    "a third on purpose": (
        functools.partial(weights_on_purpose, True),
        [rf"{IN_PART} 24 .*not covered: a factor of 0.3333 \(1 / the sum of the mask over each sample\) on tokens"],
    ),
    "weights on purpose": (
        functools.partial(weights_on_purpose, False),
        ["raises Losses are divided by the sum of the mask over each sample between ppo_clip_loss and the reducer"],
    ),
    "clipped in the finalisation": (
        clipped_while_finalising, ["NOT PROVED: .*Gradients may have been clipped inside the measured step"]
    ),
    "a call for each micro-batch": (
        functools.partial(a_call_for_each_microbatch, False), [f"prompt_mean on the policy loss, {PROVED} 37"]
    ),
    "each call proved by itself": (
        functools.partial(a_call_for_each_microbatch, True),
        [r"raises Of 3 micro-batches of the plan, \[1, 2\] were not trained on in this step"],
    ),
    "losses detached in a micro-batch": (
        losses_detached_in_a_microbatch,
        ["raises token_mean on the policy loss: tokens weigh 0 to 1 times what they should; .* of micro-batch 1 on"],
    ),
    "a plan for each micro-batch": (
        a_plan_for_each_microbatch, [PROVED, "raises gradients that are not 0 before the step's first micro-batch"]
    ),
    "gradients never zeroed": (
        never_zeroed, [PROVED, "raises gradients that are not 0 before the step's first micro-batch"]
    ),
    "compiled and doubled": (compiled_and_doubled, ["NOT PROVED: .*made in a compiled graph, where no gradient"]),
    "loss doubled": (
        doubled,
        [r"(?s)raises tokens weigh 2 times what they should \(2 = .*Return what microbatch.loss.* put a coef"],
    ),
    "microbatch.loss not called": (
        functools.partial(not_called, "error"),
        [f"raises no micro-batch of the plan handed out: {NOT_CALLED}. Return the result"],
    ),
    "microbatch.loss not called, warn": (
        functools.partial(not_called, "warn"), [f"(?s){NOT_CALLED}.*Training goes on.", "^$"]
    ),
    "a form for another trainer": (
        verls_form,
        [
            r"(?s)raises tokens weigh 0.3333 times what they should \(0.3333 = 1/micro-batches\).*"
            "Micro-batches returned form='verl', which is for another trainer"
        ],
    ),
    "a micro-batch left out of a sum": (
        microbatch_left_out_of_a_sum,
        ["raises token_sum on the policy loss: tokens weigh 0 to 1.5 times what they should; .* of micro-batch 2 on"],
    ),
    "a micro-batch with a loss of its own": (
        microbatch_with_a_loss_of_its_own,
        ["raises token_mean on the policy loss: tokens weigh 0 to 1 times what they should; .* of micro-batch 1 on"],
    ),
    "micro-batches of two plans": (
        microbatches_of_two_plans, ["NOT PROVED: The step trained on micro-batches of another plan than"]
    ),
    "a term beside the share": (
        beside_the_share, ["raises The loss that was returned is not that of microbatch.loss"]
    ),
    "another token count": (
        other_count, [r"raises The token count that was returned is \d+, and microbatch.loss\(...\) handed out \d+"]
    ),
    "a fault that comes with a new mode": (
        new_mode_tripled,
        [
            f"prompt_mean on .*{PROVED} 37", f"constant with divisor 8 on .*{PROVED} 37",
            f"constant with divisor 16 on .*{PROVED} 37", "raises token_mean .* tokens weigh 3 times what they should",
        ],
    ),
    **{
        f"two models in one step, {'one inside the other' if nested else 'one after the other'}": (
            functools.partial(two_models_in_one_step, nested),
            [f"(?s)(?=.*prompt_mean on .*{PROVED} 37)(?=.*token_mean on .*{PROVED} 37)"],
        )
        for nested in (True, False)
    },
    "a loss scale that cannot be read": (scale_that_fails, ["NOT PROVED: A rank failed to measure"]),
    **{
        f"{mode}, losses divided by {per}, {level}": (
            functools.partial(divided_by_the_microbatch, mode, level, per),
            [f"raises Losses are {'multiplied' if per == 'weights' else 'divided'} by the .*between ppo_clip_loss"],
        )
        for mode, level, per in [
            ("constant", "error", "mask"), ("constant", "strict", "mask"), ("token_sum", "error", "mask"),
            ("constant", "error", "rows"), ("prompt_mean", "error", "weights"),
        ]
    },
    "gradients halved on some ranks": (
        halved_on_some_ranks, [r"NOT PROVED: .*the final gradients are 0.125 or 0.25 times the sum, on different ranks"]
    ),
    "the model without its DDP": (without_its_ddp, ["NOT PROVED: .*gradients are added up in main_grad, and not in"]),
    "a scale that is stated, and Megatron's own": (stated_twice, ["raises .*of a Megatron model: its DDP holds its"]),
    "freed after the step": (freed_after_the_step, [f"{PROVED} 37"]),
}  # fmt: skip


def run_loops() -> dict[str, list[Step]]:
    start_ranks()
    return {name: run() for name, (run, _) in LOOPS.items()}


@functools.cache
def outcomes() -> list[dict[str, list[Step]]]:
    return run_ranks(CP * DP, run_loops, timeout_s=300)


#: Faults, for the table of plants.
PLANTED = ("another DDP", "loss doubled", "a term beside the share", "microbatch.loss not called")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str, record_property: Any) -> None:
    words = LOOPS[name][1]
    if name in PLANTED:
        outcome = "stopped" if "raises " in words[0][:12] else "not proved, as it says"
        record_property("plant", ("a loop of one's own", name, outcome))
    for rank, rank_steps in enumerate(outcomes()):
        for step, expected in zip(rank_steps[name], words, strict=True):
            if "raises " in expected[:12]:
                why = expected.replace("raises ", "", 1)
                assert re.search(f"{why}|{ELSEWHERE}" if rank else why, step.raised), (rank, step)
                continue
            assert not step.raised, (rank, step)
            assert re.search(expected if rank == 0 else "^$", step.printed), (rank, step)
            assert step.error < 1e-6, (rank, step)

"""The proof of the first step by `LossAggregation` and by `prove_first_step`, with the real schedule, DDP and GPT.

What is proved has the gradients that it would have had; a fault stops all ranks before the optimizer.
"""

import contextlib
import functools
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpt_oracle
import numpy as np
import oracle
import pytest
import torch
from audited_gpt import (
    TERMS,
    capture_graphs,
    correct_masks,
    freeze_the_anchors,
    leave_gradients,
    scale,
    scale_a_stage_apart,
    scale_losses,
    scale_ranks_apart,
)
from gpt_steps import output_of, prepared, run_batches, settings_of, start_layout
from planned_steps import CP, DP, batches_of, start_ranks, step
from planned_steps import TABLE as LOSSES
from ranks import run_ranks
from table_step import table_model
from tiny_gpt import Batch, Case, Layout, Ready
from torch import Tensor

pytestmark = pytest.mark.slow

STEP = Case(3, "sample_mean", "all", "mean", bf16=False, optimizer="plain", tied=False, lopsided=False)
PER_TOKEN = STEP._replace(scaling="per token")
TP_CP, CP_DP, VIRTUAL = Layout(2, True, 1, 1, 2, 1), Layout(1, False, 1, 1, 2, 2), Layout(1, False, 2, 2, 1, 2)
LAYOUTS = [TP_CP, CP_DP, VIRTUAL]


class Ask(NamedTuple):
    """Steps to run: a key of `PLANTS`, the proof's level, the factor of each step's losses, and if it has `TERMS`."""

    case: Case = STEP
    plant: str = ""
    level: str = "error"
    factors: tuple[float, ...] = (1.0, 1.0)
    terms: bool = False


class Outcome(NamedTuple):
    """On a rank: what was printed in each step, what stopped one, gradients after each, and how many were measured."""

    printed: list[str]
    stopped: str
    gradients: list[Any]
    measured: int


def run_ask(layout: Layout, ask: Ask, rollouts: list[gpt_oracle.Rollout]) -> Outcome:
    from megatron_rl_loss import LossAggregation, Term
    from megatron_rl_loss.audit.megatron import first_step

    ready, batches = prepared(layout, ask.case, rollouts, "packed")
    measured: list[int] = []
    audit = first_step.Audit

    def forward_step(factor: float, iterator: Iterator[Any], model: Any) -> Any:
        taken = next(iterator)
        batch: Batch = taken.data

        def loss_func(negative_log_probs: Tensor) -> Any:
            losses = negative_log_probs * (1.5 + batch.advantages) * factor
            if ask.plant == "loss not linear":
                share = taken.pg_loss(losses)
                return taken.carry(share**2, taken.report({"pg_loss": share}))
            if not ask.terms:
                return taken.loss(losses)
            terms = {name: Term(losses * (k + 1), mode, coef=coef, mask=mask)
                     for k, (name, (mode, coef, mask)) in enumerate(TERMS.items())}  # fmt: skip
            return taken.loss(terms)

        return output_of(model, batch), loss_func

    declared: Any = {"terms": {"entropy": "prompt_mean"}, "term_masks": ["correct"]} if ask.terms else {}
    describe = functools.partial(Batch.described, correct=correct_masks)
    wrap = LossAggregation(settings_of(ask.case, proof=ask.level), describe, **declared).wrap_schedule
    printed: list[str] = []
    gradients = []
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, first_step, "Audit", audit)
        first_step.Audit = lambda *given, **options: measured.append(1) or audit(*given, **options)  # type: ignore[misc,assignment]
        if ask.plant:
            PLANTS[ask.plant][0](ready, stack)
        for factor in ask.factors:
            out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            try:
                run_batches(layout, ready, functools.partial(forward_step, factor), batches, wrap)
            except Exception as error:
                return Outcome(printed, f"{type(error).__name__}: {error}", gradients, len(measured))
            printed.append("".join(re.findall(r"megatron_rl_loss: .*\n(?:(?!loss aggr).*\n)*", out.getvalue())))
            gradients += [one.main_grad.float().numpy().copy() for chunk in ready.chunks for one in chunk.parameters()]
    return Outcome(printed, "", gradients, len(measured))


def run_asks(layout: Layout, asks: list[Ask], rollouts: dict[Any, list[gpt_oracle.Rollout]]) -> list[Outcome]:
    start_layout(layout)
    return [run_ask(layout, ask, rollouts[ask.case.shape(layout)]) for ask in asks]


def outcomes_of(layout: Layout, asks: list[Ask]) -> list[tuple[Ask, list[Outcome]]]:
    """The outcomes of each ask, on all ranks."""
    if layout.vp > 1:  # whole rounds of micro-batches, where Megatron asks for them
        asks = [ask._replace(case=ask.case._replace(microbatches=4)) for ask in asks]
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {ask.case.shape(layout) for ask in asks}}
    by_rank = run_ranks(layout.world_size, run_asks, layout, asks, rollouts)
    return list(zip(asks, map(list, zip(*by_rank, strict=True)), strict=True))


# ---- faults


def replaced(stack: contextlib.ExitStack, owner: Any, name: str, ours: Callable[..., Any]) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, functools.partial(ours, getattr(owner, name)))


def scale_what_the_schedule_trains_on(ready: Ready, stack: contextlib.ExitStack) -> None:
    from megatron.core.pipeline_parallel import schedules

    def doubled(calculate: Any, *given: Any, **options: Any) -> Any:
        loss, tokens = calculate(*given, **options)
        return 2 * loss, tokens

    replaced(stack, schedules, "forward_step_calc_loss", doubled)


def skip_a_microbatch(ready: Ready, stack: contextlib.ExitStack) -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import schedules

    calls = iter(range(100))

    def but_one(backward: Any, *given: Any, **options: Any) -> Any:
        return None if next(calls) == mpu.get_data_parallel_rank() == 1 else backward(*given, **options)

    replaced(stack, schedules, "backward_step", but_one)


def scale_when_finalised(ready: Ready, stack: contextlib.ExitStack) -> None:
    def finalised(finalize: Any, *given: Any, **options: Any) -> None:
        finalize(*given, **options)
        for parameter in (parameter for chunk in ready.chunks for parameter in chunk.parameters()):
            parameter.main_grad *= 0.5

    replaced(stack, ready.config, "finalize_model_grads_func", finalised)


def scale_context_parallel_ranks(ready: Ready, stack: contextlib.ExitStack) -> None:
    from megatron.core import parallel_state as mpu

    scale(ready, 1.5 - mpu.get_context_parallel_rank())


def weigh_too_much(ready: Ready, stack: contextlib.ExitStack) -> None:
    from megatron_rl_loss.plan import microbatch

    replaced(stack, microbatch, "weigh", lambda weigh, *given: 1.25 * weigh(*given))


def flip_per_token_loss(ready: Ready, stack: contextlib.ExitStack) -> None:
    """Switch per-token loss after DDP was made."""
    ready.config.calculate_per_token_loss = not ready.config.calculate_per_token_loss


def of_ready(mutate: Callable[[Ready], None]) -> Callable[[Ready, contextlib.ExitStack], None]:
    return lambda ready, stack: mutate(ready)


OF_ANCHOR, TWICE, HALF = "is no multiple of the sum over ranks", "tokens weigh 2 times", "tokens weigh 0.5 times"
#: What is done, and what all ranks then say.
PLANTS: dict[str, tuple[Callable[[Ready, contextlib.ExitStack], None], str]] = {
    "DDP's scaling doubled": (of_ready(functools.partial(scale, factor=2)), TWICE),
    "finalised gradients halved": (scale_when_finalised, HALF),
    "our weights times 1.25": (weigh_too_much, "tokens weigh 1.25 times"),
    "loss not linear": (lambda ready, stack: None, "of all weight is on wrong"),
    "DP ranks scaled apart": (of_ready(scale_ranks_apart), OF_ANCHOR),
    "CP ranks scaled 1.5 and 0.5": (scale_context_parallel_ranks, OF_ANCHOR),
    "a pipeline stage scaled apart": (of_ready(scale_a_stage_apart), "Gradients are multiplied by"),
    "a rank skips a micro-batch": (skip_a_microbatch, "active tokens have no weight, all of DP 1, micro-batch 1"),
    "schedule's scaling doubled": (scale_what_the_schedule_trains_on, "Megatron's schedule .* scales losses by"),
    "per-token loss switched after DDP": (flip_per_token_loss, "Megatron's DDP .* scales losses by"),
    "gradients of before": (of_ready(leave_gradients), "gradients that are not 0 before"),
    "fp16's loss scale": (of_ready(scale_losses), ""),
    "CUDA graphs": (of_ready(capture_graphs), "CUDA graphs replay"),
    "no anchor": (of_ready(freeze_the_anchors), "no parameter is trainable, whole"),
}
#: Those that stop a step, by layout. What is raised before the pipeline starts is seen in one without stages.
STOPPED = {
    CP_DP: [one for one in list(PLANTS)[:11] if "stage" not in one],
    VIRTUAL: [*list(PLANTS)[:4], "a pipeline stage scaled apart"],
}
NO_LINE = re.compile("$")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_mode_is_proved_and_nothing_is_changed(layout: Layout) -> None:
    """Each term is proved by its own mode; one line on the first rank says so; the second step is not measured."""
    asks = [Ask(STEP._replace(mode=mode)) for mode in oracle.MODES]
    asks += [Ask(terms=True), Ask(PER_TOKEN, terms=True), Ask(STEP._replace(bf16=True)), Ask(plant="fp16's loss scale")]
    asks += [Ask(STEP._replace(mode="token_mean", optimizer="distributed+overlap"))]
    found = outcomes_of(layout, asks + [ask._replace(level="off") for ask in asks])
    for (ask, proved), (_, alone) in zip(found[: len(asks)], found[len(asks) :], strict=True):
        words = f"{ask.case.mode}( with divisor 3)? on the policy loss"
        words += ", token_mean on kl, prompt_mean on entropy, sample_mean on nll" * ask.terms
        line = re.compile(
            f"megatron_rl_loss: {words}, proved on 73 tokens of 19 samples, 6 prompts of 1 to 7; masks as given\n"
        )
        for rank, (one, other) in enumerate(zip(proved, alone, strict=True)):
            assert [one.stopped, other.stopped] == ["", ""]
            assert [one.measured, other.measured] == [1, 0]
            assert (line if rank == 0 else NO_LINE).fullmatch(one.printed[0]), (ask, rank, one.printed)
            assert [one.printed[1], *other.printed] == [""] * 3
            assert all(np.array_equal(*pair) for pair in zip(one.gradients, other.gradients, strict=True))


@pytest.mark.parametrize("layout", STOPPED, ids=str)
def test_a_fault_stops_all_ranks_before_the_optimizer(layout: Layout, record_property: Any) -> None:
    for ask, outcomes in outcomes_of(layout, [Ask(plant=plant) for plant in STOPPED[layout]]):
        for one in outcomes:
            assert re.search(PLANTS[ask.plant][1], one.stopped), (ask.plant, one.stopped, one.printed)
            assert (one.printed, one.gradients) == ([], [])
        record_property("plant", ("LossAggregation", f"{ask.plant}{', PP 2' * (layout.pp > 1)}", "stopped"))


def test_warnings_steps_without_a_gradient_and_what_cannot_be_proved(record_property: Any) -> None:
    """A fault is said once; a step of zeros or of infinities is left to the next one."""
    waiting = [Ask(factors=(first, 0.0, 1.0)) for first in (0.0, float("inf"))]
    unknown = [Ask(plant="CUDA graphs"), Ask(plant="no anchor")]
    fault = Ask(plant="DDP's scaling doubled", level="warn")
    found = dict(outcomes_of(CP_DP, [*waiting, *unknown, fault]))
    assert not any(text for outcomes in found.values() for one in outcomes[1:] for text in one.printed)
    for ask in waiting:
        first, second, third = found[ask][0].printed
        assert (second, found[ask][0].measured) == ("", 3)
        assert re.search("sample_mean on the policy loss, not proved yet: the step has no gradient", first)
        assert re.search("sample_mean on the policy loss, proved on 73 tokens", third)
    for ask in [*unknown, fault]:
        first, second = found[ask][0].printed
        assert (second, found[ask][0].measured, len(found[ask][0].gradients) > 0) == ("", 1, True)
        assert re.search(PLANTS[ask.plant][1], first)
        assert re.search("Training goes on." if ask == fault else "sample_mean on the policy loss, NOT PROVED", first)
    for ask in unknown:
        record_property("plant", ("LossAggregation", ask.plant, "not proved, as it says"))


# ---- a loop of one's own


class Ignoring(NamedTuple):
    """In the place of a micro-batch: a loss function that never calls it, and returns a multiple of its own mean."""

    factor: float

    def __call__(self, losses: Tensor) -> Tensor:
        return self.factor * losses.mean()

    def carry(self, share: Tensor, report: Any, form: str) -> Any:
        return share, torch.tensor(1, dtype=torch.int32), report


NOT_CALLED, DUMMIES = "microbatch.loss not called", "a step of dummies"
NOT_MEASURED = "an error in the measurement"  # not a fault of the loss: training goes on


def loop_of_ones_own(plant: str) -> tuple[list[str], str]:
    """On a rank: what is printed in each of two planned steps, and what stopped one."""
    from megatron.core import parallel_state as mpu
    from megatron.core import pipeline_parallel

    from megatron_rl_loss import plan_step, prove_first_step
    from megatron_rl_loss.audit.megatron.audit import Audit

    cp_rank, dp_rank = start_ranks()
    batches, model = batches_of(dp_rank), table_model(LOSSES, ddp=plant != "another DDP")
    if plant == "another DDP":
        model.config.finalize_model_grads_func = None
    if plant == NOT_MEASURED:
        Audit._add_tokens = lambda *_, **__: 1 / 0  # type: ignore[assignment,method-assign]
    level = "warn" if plant.endswith("warn") else "error"
    schedule = prove_first_step(pipeline_parallel.get_forward_backward_func(), "prompt_mean", level=level)  # type: ignore[arg-type]
    pipeline_parallel.get_forward_backward_func = lambda: schedule
    printed: list[str] = []
    for number in range(2):
        groups = {"dp_group": mpu.get_data_parallel_group(), "cp_group": mpu.get_context_parallel_group()}
        mode = "sample_mean" if plant == "planned by another mode" else "prompt_mean"
        plan: Any = plan_step([batch.samples for batch in batches], mode, **groups)
        if plant.startswith(NOT_CALLED) or (plant == DUMMIES and number == 0):
            plan = [Ignoring(float(plant != DUMMIES)) for _ in plan]
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                step(model, plan, batches, cp_rank, "3-tuple", twice if plant == "loss doubled" else as_it_is)
            except Exception as error:
                return printed, str(error)
        printed.append(out.getvalue())
    return printed, ""


def twice(returned: Any, *_: Any) -> Any:
    return 2 * returned[0], *returned[1:]


def as_it_is(returned: Any, *_: Any) -> Any:
    return returned


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("", "prompt_mean on the policy loss, proved on 37 tokens of 13 samples, 3 prompts of"),
        ("another DDP", "NOT PROVED: .* is not Megatron-Core's own DistributedDataParallel"),
        ("loss doubled", f"(?s){TWICE}.*or a factor of 2 in your own code.*Return what microbatch.loss.* put a coef"),
        ("planned by another mode", "(?s)asked prompt_mean; tokens weigh.*Give plan_step and .* one mode"),
        (NOT_CALLED, "no micro-batch handed out: neither its loss.* nor its carry.* was called. Return the result of"),
        (f"{NOT_CALLED}, warn", "(?s)neither its loss.* nor its carry.* was called.*Training goes on."),
        (NOT_MEASURED, "NOT PROVED: A rank failed to measure. ZeroDivisionError"),
        (DUMMIES, "prompt_mean on the policy loss, not proved yet: the step has no gradient"),
    ],
)
def test_a_loop_of_ones_own(plant: str, says: str, record_property: Any) -> None:
    stops = plant in ("loss doubled", "planned by another mode", NOT_CALLED)
    for rank, (printed, stopped) in enumerate(run_ranks(CP * DP, loop_of_ones_own, plant)):
        assert re.search(says, stopped) if stops else not stopped
        if not stops:
            assert bool(re.search(says, printed[0])) == (rank == 0)
            assert ("megatron_rl_loss:" in printed[1]) == (plant == DUMMIES and rank == 0)
            assert ("proved on 37 tokens" in printed[1]) == (plant == DUMMIES and rank == 0)
    if plant and "warn" not in plant and plant not in (DUMMIES, NOT_MEASURED):
        record_property("plant", ("a loop of one's own", plant, "stopped" if stops else "not proved, as it says"))


def test_a_terms_function_is_not_taken_for_the_policy_losses_of_one_name() -> None:
    from megatron_rl_loss import Samples
    from megatron_rl_loss.audit.megatron.reports import Report
    from megatron_rl_loss.modes.names import resolve
    from megatron_rl_loss.reduction.taps import TappedLosses

    policy, other = resolve(lambda of: 1 / of.tokens("step")), resolve(lambda of: 1.0)
    assert policy.mode.name == other.mode.name
    samples, place = Samples([torch.ones(8)]), {"dp_rank": 0, "microbatch": 0, "cp_rank": 0}
    for aggregation, as_policy in ((policy, True), (other, None)):
        report = Report(0, [], [])
        report.add("kl", TappedLosses((8,), torch.float32, aggregation=aggregation), samples, 1, policy, **place)
        assert (report.terms["kl"][0].declared or {}).get("as_policy") is as_policy

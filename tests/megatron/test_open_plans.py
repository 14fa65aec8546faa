"""A step whose denominators are known at its end, in several calls of the real schedule and DDP: an open plan."""

import io
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from gpt_steps import beyond_bounds, errors_of, outcomes_in
from pages import code_of
from planned_steps import CP, DP, FORMS, STEP, TABLE, batches_of, gradient_of, start_ranks, step, units_dealt
from ranks import run_ranks
from refusals import outcome_of
from step_samples import DIVISOR
from table_step import Batch, relative_error, table_model
from tiny_gpt import Case, Layout
from torch import Tensor

from megatron_rl_loss.reduction import Term
from megatron_rl_loss.step import Samples

pytestmark = pytest.mark.slow


def calls_of(dp_rank: int, mode: str) -> list[list[Batch]]:
    """Two calls on DP rank 0, of two micro-batches and one; four on rank 1, of one each, the last one a filler."""
    hands = units_dealt(mode, 3)[dp_rank]
    batches = [Batch(STEP, sorted(chosen), CP) for chosen in hands]
    if dp_rank == 0:
        return [batches[:2], batches[2:]]
    filler = batches_of(1)[-1]
    return [[one] for one in batches] + [[filler]]


DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_grad_reduce": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    {"average_in_collective": True},
]
#: What DDP does to gradients does not depend on the mode: two of different counts are enough.
REDUCED_IN_EVERY_WAY = ("sample_mean", "token_mean")
#: The modes of the terms beside a policy loss by each mode; not constant, which needs a divisor of its own.
FURTHER = {mode: [one for one in oracle.MODES if one not in (mode, "constant")][-2:] for mode in oracle.MODES}
COEF = 0.5  # of these terms


class WithTerms:
    """A micro-batch whose loss has further terms of the same values, by modes of their own."""

    def __init__(self, microbatch: Any, modes: list[str]) -> None:
        self.microbatch, self.modes = microbatch, modes
        self.report = lambda _: self.reported

    def __call__(self, losses: Tensor) -> Tensor:
        self.terms = {"pg_loss": losses, **{mode: Term(losses, mode, coef=COEF) for mode in self.modes}}
        return losses.detach().sum()

    def carry(self, share: Tensor, report: Any = None, *, form: str) -> Any:
        returned = self.microbatch.loss(self.terms, form=form)
        self.reported = self.microbatch.report() if isinstance(returned, Tensor) else returned[-1]
        return returned if isinstance(returned, Tensor) else (*returned[:-1], report)


def opened(with_terms: bool) -> list[tuple[str, str, Tensor, tuple[float, float]]]:
    """On a rank: by every mode, in every form, with every way that DDP reduces, a step's gradient and report."""
    cp_rank, dp_rank = start_ranks()
    return [one for mode in oracle.MODES for one in opened_by(mode, with_terms, cp_rank, dp_rank)]


def opened_by(mode: str, with_terms: bool, cp_rank: int, dp_rank: int) -> Iterator[Any]:
    import torch.distributed as dist
    from tiny_gpt import gather_sharded_gradients

    from megatron_rl_loss.megatron import open_plan

    further = FURTHER[mode] if with_terms else []
    for form, per_token in FORMS:
        in_every_way = form == "3-tuple" and mode in REDUCED_IN_EVERY_WAY and not with_terms
        for options in DDP_OPTIONS if in_every_way else DDP_OPTIONS[:1]:
            if per_token and "average_in_collective" in options:
                continue
            model = table_model(TABLE, per_token=per_token, **options)
            for nominal in (1, 300) if in_every_way else (300,):  # the second step meets DDP after its first one
                model.zero_grad_buffer()
                divisor = DIVISOR if mode == "constant" else None
                reports = []
                options_of = {"divisor": divisor, "terms": {one: one for one in further}, "nominal": nominal}
                with open_plan(mode, model=model, **options_of) as plan:  # type: ignore[arg-type]
                    for batches in calls_of(dp_rank, "prompt_mean" if further else mode):
                        call: Any = plan.add([batch.samples for batch in batches])
                        for number, part in enumerate(plan.passes(call) if further else [call]):
                            part = [WithTerms(one, further) for one in part] if further else part
                            shares = step(model, part, batches, cp_rank, form, is_call=True)
                            for microbatch, share in zip(part, shares, strict=True):
                                if number == 0 or form not in ("sum", "mean"):
                                    reports.append(microbatch.report({"pg_loss": share}))
                    closed = plan.close()
                if "use_distributed_optimizer" in options:
                    gather_sharded_gradients([model])
                pair = closed.report(reports)["pg_loss"]
                dist.all_reduce(pair)
                case = f"{form}, per token {per_token}, {options}, nominal {nominal}"
                yield mode, case, model.module.losses.main_grad.clone().cpu(), tuple(pair.tolist())


@pytest.mark.parametrize("with_terms", [False, True])
def test_calls_add_up_to_the_step(with_terms: bool) -> None:
    """Also of terms that each divide by another count that is known at the end."""
    for found in run_ranks(DP * CP, opened, with_terms):
        for mode, case, gradient, (numerator, normaliser) in found:
            divisor = DIVISOR if mode == "constant" else None
            further = FURTHER[mode] if with_terms else []
            expected = sum([COEF * gradient_of(other) for other in further], gradient_of(mode))
            assert relative_error(gradient, expected) < oracle.EXACT, (mode, case)
            loss = float(oracle.step_loss(mode, STEP, divisor))
            of_sum = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(mode, STEP, divisor)
            assert numerator / normaliser == pytest.approx(loss, abs=of_sum), (mode, case)
        assert len({(mode, pair[1]) for mode, _, _, pair in found}) == len(oracle.MODES)


def resumed() -> tuple[str, Tensor]:
    """On a rank: a step whose plan was saved after its first call, and which another model and plan went on with."""
    from megatron_rl_loss.megatron import open_plan

    cp_rank, dp_rank = start_ranks()
    calls, file = calls_of(dp_rank, "prompt_mean"), io.BytesIO()
    for part in (calls[:1], calls[1:]):
        model = table_model(TABLE, per_token=True)
        with open_plan("token_mean", model=model, nominal=5, terms={"sample_mean": "sample_mean"}) as plan:
            if part == calls[1:]:
                file.seek(0)
                plan.load_state_dict(torch.load(file, weights_only=True))
            for batches in part:
                for call in plan.passes(plan.add([batch.samples for batch in batches])):
                    terms = [WithTerms(one, ["sample_mean"]) for one in call]
                    step(model, terms, batches, cp_rank, "3-tuple", is_call=True)
            torch.save(saved := plan.state_dict(), file)
            if part == calls[1:]:
                plan.close()
    with open_plan("token_mean", model=table_model(TABLE)) as plan:
        refused = outcome_of(lambda: plan.load_state_dict(saved))
    return refused, model.module.losses.main_grad.clone().cpu()


def test_a_saved_plan_goes_on() -> None:
    expected = gradient_of("token_mean") + COEF * gradient_of("sample_mean")
    for refused, gradient in run_ranks(DP * CP, resumed):
        assert "a saved step by loss aggregation: token_mean" in refused
        assert relative_error(gradient, expected) < oracle.EXACT


def shown() -> Tensor:
    """On a rank: the gradient after the code that recipes.md shows."""
    cp_rank, dp_rank = start_ranks()
    model = table_model(TABLE)

    def run_schedule(model: Any, batches: list[Batch], microbatches: Any) -> list[Any]:
        shares = step(model, microbatches, batches, cp_rank, "3-tuple", is_call=True)
        return [one.report({"pg_loss": share}) for one, share in zip(microbatches, shares, strict=True)]

    names = {"model": model, "arriving": calls_of(dp_rank, "token_mean"), "describe": lambda batch: batch.samples}
    (code,) = (code for code in code_of("recipes.md") if "open_plan" in code)
    exec(code, names | {"run_schedule": run_schedule, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)})
    return model.module.losses.main_grad.clone().cpu()


def test_the_code_of_recipes_trains_on_the_step_loss() -> None:
    expected = gradient_of("token_mean")
    for gradient in run_ranks(DP * CP, shown):
        assert relative_error(gradient, expected) < oracle.EXACT


OPEN_LAYOUTS = [Layout(1, False, 2, 2, 1, 2), Layout(2, True, 1, 1, 2, 1)]
WAYS = [("mean", "plain"), ("averaged in collective", "overlap"), ("per token", "distributed+overlap")]
OPEN_CASES = [
    Case(4, mode, units, WAYS[k % 3][0], k % 2 == 1, WAYS[k % 3][1], k > 4, False, "", "open plan")
    for k, (mode, units) in enumerate(oracle.COUNTINGS[::2] + oracle.COUNTINGS[1::2][:2])
]


needs_gpt = pytest.mark.skipif(
    any(found.version.startswith("0.15.") for found in distributions(name="megatron-core")),
    reason="the tests' attention needs Megatron-Core 0.16",
)


@needs_gpt
@pytest.mark.parametrize("layout", OPEN_LAYOUTS, ids=str)
def test_calls_of_a_real_model_are_one_step(layout: Layout, record_property: Any) -> None:
    """A GPT in every mode and way to reduce: gradients, norm, reports and the weights after clipping and Adam."""
    worst: dict[str, float] = {}
    for case, outcomes in outcomes_in(layout, OPEN_CASES):
        errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), case.mode, case.units))
        for what, error in errors.items():
            key = f"{'bf16' if case.bf16 else 'fp32'}_{what}_error"
            worst[key] = max(worst.get(key, 0.0), error)
        assert not beyond_bounds(case, errors), (case, errors)
    for key, error in worst.items():
        record_property(key, error)


@needs_gpt
def test_the_comparison_sees_a_misplaced_factor() -> None:
    case = Case(2, "token_mean", "all", "mean", False, "plain", False, False)
    cases = [case._replace(loop=f"open plan, {wrong}") for wrong in ("factor twice", "factor after clipping")]
    layout = Layout(1, False, 1, 1, 1, 2)
    for case, outcomes in outcomes_in(layout, cases):
        errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), case.mode, case.units))
        assert {"gradients", "grad_norm", "weights"} <= set(beyond_bounds(case, errors))


def misused(wrong: str, cp_rank: int, dp_rank: int) -> tuple[str, float, bool]:
    """On a rank: what an open plan says of a wrong use, the gradient's error, whether abandoning it leaves no trace."""
    from megatron_rl_loss.megatron import open_plan

    split, masked = wrong == "a rollout in two calls", wrong == "no active token"
    batches, mode = batches_of(dp_rank), "sample_mean" if split or masked else "token_mean"
    model = table_model(TABLE, per_token=True)  # sums gradients: to average an average again changes nothing
    hooks = [model.config.finalize_model_grads_func, model.config.no_sync_func, model.config.grad_sync_func]
    in_passes = masked or wrong in ("a plan saved in a pass", "a plan abandoned in a pass")
    other = "token_mean" if masked else "sample_mean"
    terms = {other: other} if in_passes or wrong in ("a pass left out", "a share by hand") else {}
    plan = open_plan(mode, model=model, terms=terms, units="active" if masked else None)

    def calls() -> None:
        trained: list[Any] = []
        for number, batch in enumerate(batches):
            if wrong == "a context-parallel rank with fewer calls" and number and (cp_rank, dp_rank) == (1, 1):
                continue
            samples = batch.samples
            if masked:
                samples = Samples([torch.zeros_like(mask) for mask in samples.loss_masks], layout=samples.layout)
            call: Any = plan.add([samples])
            if wrong == "a pass left out":
                call = [WithTerms(one, list(terms)) for one in call]
            if wrong == "a call that is not trained on" and number == 1 and dp_rank == 1:
                continue
            if wrong == "one call twice, another never" and dp_rank == 1:
                trained.append((call, batch))
                call, batch = trained[0 if number == 1 else -1]
            for of_pass in plan.passes(call) if in_passes else [call]:
                part = [WithTerms(one, list(terms)) for one in of_pass] if in_passes else of_pass
                step(model, part, [batch], cp_rank, "3-tuple", is_call=True)
                if plan.current_count != plan.late_count and not masked:
                    plan.state_dict() if wrong == "a plan saved in a pass" else plan.abandon()
            if wrong == "a reduction in between":
                model.finish_grad_sync()
            if wrong == "gradients zeroed in between":
                model.zero_grad_buffer()
            if wrong == "a double reduction":
                type(model).finish_grad_sync(model)
        if wrong == "a second plan":
            open_plan("token_mean", model=model)
        plan.close()

    outcome = outcome_of(calls)
    expected = gradient_of(mode)
    error = relative_error(model.module.losses.main_grad.cpu(), expected)
    if outcome != "accepted":
        plan.__exit__()  # abandons it if it is open
    after = [model.config.finalize_model_grads_func, model.config.no_sync_func, model.config.grad_sync_func]
    fresh = outcome == "accepted" or not model.module.losses.main_grad.any()
    return outcome, error, fresh and hooks == after


MISUSES = {
    "a rollout in two calls": "a rollout with .* Add all samples of a rollout in one call",
    "a context-parallel rank with fewer calls": "were given different samples",
    "a call that is not trained on": "runs of the schedule for 3 calls of add",
    "one call twice, another never": r"returned \[2, 0, 1\] losses where \[1, 1, 1\] are expected",
    "a pass left out": "runs of the schedule for 3 calls of add",
    "a plan saved in a pass": "2 runs of the schedule for 1 calls of add.* or save it between two calls",
    "a plan abandoned in a pass": "a plan that was closed or abandoned",
    "a share by hand": "a share that was put together by hand",
    "a reduction in between": "reduced or zeroed while a plan is open",
    "gradients zeroed in between": "reduced or zeroed while a plan is open",
    "a second plan": "a model with an open plan",
    "a double reduction": "",
    "no active token": "",
    "nothing": "",
}


def misuses() -> dict[str, tuple[str, float, bool]]:
    place = start_ranks()
    return {wrong: misused(wrong, *place) for wrong in MISUSES}


def test_a_misuse_is_refused_on_all_ranks() -> None:
    """Or, where nothing can see it, by the comparison. A plan that was abandoned leaves no gradient and no hook."""
    for found in run_ranks(DP * CP, misuses):
        for wrong, (outcome, error, is_clean) in found.items():
            assert is_clean, wrong
            text = MISUSES[wrong]
            assert re.search(text, outcome) if text else outcome == "accepted", (wrong, outcome)
            assert (error < oracle.EXACT) == (wrong == "nothing") or text, wrong

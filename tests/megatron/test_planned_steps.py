"""A planned step in a loop of one's own: evaluation, a bad list on one rank, a plan that is used twice or in parts.

Its gradient in every form of what a loss function returns: test_worlds.py.
"""

import functools
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks
from refusals import outcome_of
from step_samples import dealt
from table_step import Batch, start, table_model
from world import CP, DP, STEP, TABLE, batches_of, planned_step, start_ranks

from megatron_rl_loss import Samples, ZigzagTHD, plan_step
from megatron_rl_loss.core.carriers import IN_A_LOOP


def evaluated() -> tuple[float, bool]:
    """On a rank of two pipeline stages: the loss of an evaluation step on the last, where alone there are samples."""
    state = start(pp=2)
    last = state.get_pipeline_model_parallel_rank() == 1
    batches = [Batch(STEP, chosen, 1) for chosen in dealt(STEP, 0, 1, 2)]
    model = table_model(TABLE)
    samples = [batch.samples for batch in batches] if last else None
    plan = plan_step(samples, "prompt_mean", model=[model], num_microbatches=2)
    if not last:
        return plan.totals.step_active_tokens or 0, False
    with torch.no_grad():
        reports = [
            microbatch.loss(model(batch.local_numbers(0, 1)))[-1]
            for batch, microbatch in zip(batches, plan, strict=True)
        ]
    assert all(report["pg_loss"].isnan() for report in reports)  # until the step's numbers are known
    values = plan.finish(reports)
    assert all(report == values for report in reports)
    return float(values["pg_loss"]), True


def test_a_stage_without_data_plans_too() -> None:
    (tokens, _), (total, is_last) = run_ranks(2, evaluated)
    assert is_last
    assert tokens == sum(int((sample.mask != 0).sum()) for sample in STEP)
    sum_error = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale("prompt_mean", STEP)
    assert total == pytest.approx(float(oracle.step_loss("prompt_mean", STEP)), abs=sum_error)


def misused() -> dict[str, str]:
    """On a rank: schedules that run a plan twice, in parts and not at all, on DP rank 0 alone or on all ranks."""
    cp_rank, dp_rank = start_ranks()
    model, batches = table_model(TABLE), batches_of(dp_rank)

    def planned() -> Any:
        return plan_step([batch.samples for batch in batches], "token_mean", model=model)

    def train(plan: Any, part: slice = slice(None)) -> None:
        planned_step(model, list(plan)[part], batches[part], "3-tuple")

    def half() -> Any:
        plan = planned()
        train(plan, slice(None) if dp_rank else slice(1))
        return plan

    def after_reset() -> None:
        plan = half()
        plan.reset()
        train(plan)
        plan.finish()
        planned()

    plan = planned()
    train(plan)
    outcomes = {"trained on": outcome_of(plan.finish), "never": outcome_of(planned), "after never": outcome_of(planned)}
    outcomes["twice"] = outcome_of(lambda: train(plan))
    outcomes["half, finished"] = outcome_of(lambda: half().finish())
    outcomes["planned anew"] = outcome_of(planned)  # after an error, say: its gradients are the loop's to drop
    outcomes["reset"] = outcome_of(after_reset)
    for form in ("mean", *IN_A_LOOP):
        losses = model(batches[0].local_numbers(cp_rank, CP))
        outcomes[form] = outcome_of(functools.partial(planned()[0].loss, losses, form=form))
    return outcomes


def test_a_plan_is_trained_on_once_and_as_a_whole() -> None:
    for outcomes in run_ranks(DP * CP, misused):
        for name in ("trained on", "never", "after never", "planned anew", "reset"):
            assert outcomes[name] == "accepted", (name, outcomes[name])
        assert "micro-batch 0 of a plan, a second time: the plan was trained on already" in outcomes["twice"]
        half = outcomes["half, finished"]
        assert half.startswith("BadBatchError: Step aborted on all ranks"), half
        assert "ranks 0, 1: ValueError: a plan of 3 micro-batches, of which [1, 2] were not" in half
        for form in ("mean", *IN_A_LOOP):
            assert f"form='{form}': there is no such form" in outcomes[form]


BAD_LISTS: dict[str, tuple[Any, str]] = {
    # what DP rank 1 plans; said on all ranks
    "not Samples": ([None] * 3, "Wrap the masks in Samples"),
    "too few": ([batch.samples for batch in batches_of(0)][:2], "2 Samples for 3 micro-batches"),
    "a bad mask": (
        lambda: [Samples([-torch.ones(4)], layout=ZigzagTHD([0, 4]))] * 3,
        "the loss mask of sample 0 holds -1.0",
    ),
}
CONSTANT: dict[str, Any] = {"mode": "constant", "divisor": 8.0}
#: What the second CP rank of DP rank 0 asks for, and all of DP rank 1 but in the first case; the others for `CONSTANT`.
DIFFERENT: dict[str, dict[str, Any]] = {
    "a divisor of one rank": {"divisor": 16.0},
    "another mode": {"mode": "token_mean", "divisor": None},
    "units": {"units": "active"},
    "a term": {"terms": {"kl": "token_mean"}},
}


def refused_plans() -> dict[str, str]:
    """On a rank: what each list and each difference comes to."""
    cp_rank, dp_rank = start_ranks()
    model, outcomes = table_model(TABLE), {}
    good = [batch.samples for batch in batches_of(dp_rank)]
    for name, (bad, _) in BAD_LISTS.items():
        samples = bad if dp_rank == 1 else good
        outcomes[name] = outcome_of(
            functools.partial(plan_step, samples, "prompt_mean", model=model, num_microbatches=3)
        )
    for name, changes in DIFFERENT.items():
        changed = (dp_rank, cp_rank) == (0, 1) or (dp_rank == 1 and name != "a divisor of one rank")
        asked = CONSTANT | (changes if changed else {})
        outcomes[name] = outcome_of(functools.partial(plan_step, good, model=model, **asked))
    finalize, model.config.finalize_model_grads_func = model.config.finalize_model_grads_func, None
    plan = functools.partial(plan_step, good, "token_mean", model=model)
    outcomes["to train"] = outcome_of(plan)
    if dp_rank:
        model.config.finalize_model_grads_func = finalize
    outcomes["to train on one rank"] = outcome_of(plan)
    model.config.finalize_model_grads_func = None
    with torch.no_grad():
        outcomes["to evaluate"] = outcome_of(plan)
    return outcomes


def test_a_list_or_setting_of_one_rank_and_a_schedule_that_sums_no_gradients_are_refused_on_all() -> None:
    for outcomes in run_ranks(DP * CP, refused_plans):
        for name, (_, text) in BAD_LISTS.items():
            assert outcomes[name].startswith("BadBatchError: Step aborted on all ranks"), outcomes[name]
            assert text in outcomes[name]
        for name in DIFFERENT:
            assert "this rank asks for loss aggregation: constant" in outcomes[name]
            assert "all ranks must aggregate alike" in outcomes[name]
        for name in ("to train", "to train on one rank"):
            assert "a model config without finalize_model_grads_func" in outcomes[name], outcomes[name]
        assert outcomes["to evaluate"] == "accepted"

"""Phases of `pretrain` beside plain steps: evaluation, and reruns of a step, in launches of the example.

The example reads no validation data, which is given here.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
from example_run import train
from ranks import run_ranks

pytestmark = pytest.mark.slow

CP2 = ["--context-parallel-size", "2"]
PER_TOKEN = ["--calculate-per-token-loss", "--loss-aggregation-with-per-token-loss"]
Steps = list[dict[str, float]]


# ---- evaluation


def with_evaluation(flags: list[str]) -> tuple[Steps, Steps]:
    """The numbers of training steps, and of evaluations, each on the data of the training step that comes next."""
    import pretrain_grpo
    from megatron.training import get_args, training

    evaluated: Steps = []
    evaluate, provide = training.evaluate, pretrain_grpo.data_provider

    def catch(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0]:
            evaluated.append({name: float(value) for name, value in result[0].items()})
        return result

    def provide_both(*args: Any, **kwargs: Any) -> Any:
        training_data, validation_data = provide(*args, **kwargs)[0], provide(*args, **kwargs)[0]
        a_step = get_args().global_batch_size // get_args().data_parallel_size
        return training_data, itertools.islice(validation_data, a_step, None), None

    training.evaluate, pretrain_grpo.data_provider = catch, provide_both
    return train([*flags, "--train-iters", "3"]), evaluated


def test_an_evaluation_step_is_the_training_step_on_its_data() -> None:
    flags = ["--pipeline-model-parallel-size", "2", *PER_TOKEN, "--loss-aggregation", "prompt_mean"]
    steps, evaluated = run_ranks(2, with_evaluation, [*flags, "--eval-interval", "1", "--eval-iters", "1"])[-1]
    assert len(steps) == 3
    assert len(evaluated) >= 3
    for step, evaluation in zip(steps[1:], evaluated, strict=False):
        assert {"pg_loss", "log_prob"} <= evaluation.keys()
        assert evaluation == pytest.approx({name: step[name] for name in evaluation}, rel=oracle.EXACT)
    # Negative control: other data, or other weights, give another loss.
    assert steps[1]["pg_loss"] != pytest.approx(steps[2]["pg_loss"], rel=1e-3)


# ---- reruns


def record_steps() -> list[float | None]:
    """Filled with the tokens of every step that is begun."""
    from megatron_rl_loss import LossAggregation

    begun: list[float | None] = []
    begin_step = LossAggregation._begin_step

    @functools.wraps(begin_step)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan, chunks = begin_step(self, *args, **kwargs)
        begun.append(plan.totals.step_tokens)
        return plan, chunks

    LossAggregation._begin_step = recorded  # type: ignore[method-assign]
    return begun


def rerun(rerun_mode: str, flags: list[str]) -> tuple[Steps, list[Any], bool]:
    """Training whose second step looks suspicious, the steps that were begun, and whether its rerun gave the same."""
    import pretrain_grpo
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    begun = record_steps()
    forward_step = pretrain_grpo.forward_step

    def validating(data_iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
        output, loss_func = forward_step(data_iterator, model)

        def validated(losses: Any) -> Any:
            loss, count, report = loss_func(losses)
            get_rerun_state_machine().validate_result(
                result=loss.detach().clone(), rejection_func=lambda _: len(begun) == 2, message="loss", fatal=False
            )
            return loss, count, report

        return output, validated

    pretrain_grpo.forward_step = validating
    steps = train(["--rerun-mode", rerun_mode, *flags, "--train-iters", "3"])
    return steps, begun, get_rerun_state_machine().suspicious_node is not None


def test_a_rerun_is_the_same_step() -> None:
    """`--rerun-mode validate_results` runs a step again on the micro-batches it saved; no step is skipped by that."""
    flags = [*CP2, *PER_TOKEN]
    plain = run_ranks(2, rerun, "disabled", flags)
    again = run_ranks(2, rerun, "validate_results", flags)
    for (steps, begun, same), (steps_again, begun_again, same_again) in zip(plain, again, strict=True):
        assert len(begun) == len(set(begun)) == 3, "every step has data of its own"
        assert begun_again == [begun[0], begun[1], begun[1], begun[2]]
        assert (same, same_again) == (False, True), "Megatron found the rerun's loss to be the first run's"
        assert steps_again == steps

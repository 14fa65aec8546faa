"""Two models whose steps overlap in two threads: each is proved by itself, and Megatron's functions are put back."""

import threading
from typing import Any

import megatron_on_cpu
from ranks import run_ranks
from step_samples import dealt
from table_step import Batch, relative_error, run_step, start, table_model
from world import OF_SAMPLES, STEP, TABLE, gradient_of

from megatron_rl_loss import LossAggregation
from megatron_rl_loss.megatron.flags import AggregationSettings

MODES = ("token_mean", "sample_mean")


def overlapping() -> tuple[dict[str, Any], bool]:
    """On a rank: the errors of each model's gradients, and whether the schedule's function is Megatron's own again."""
    from megatron.core.pipeline_parallel import schedules

    start()
    own, errors = schedules.forward_step_calc_loss, dict[str, Any]()
    first_begun, second_begun, first_left = (threading.Event() for _ in range(3))
    models = {mode: table_model(TABLE) for mode in MODES}

    def train(mode: str) -> None:
        if mode == MODES[1]:
            first_begun.wait(20)
        begun = list[bool]()
        batches = [Batch(STEP, chosen, 1, **OF_SAMPLES) for chosen in dealt(STEP, 0, 1, 3)]

        def loss(microbatch: Any, losses: Any) -> Any:
            if not begun:  # the second step begins within the first, and ends after it
                begun.append(True)
                (first_begun if mode == MODES[0] else second_begun).set()
                (second_begun if mode == MODES[0] else first_left).wait(20)
            return microbatch.loss(losses)

        aggregation = LossAggregation(AggregationSettings.resolve(mode), lambda batch: batch.samples)
        try:
            with megatron_on_cpu._CudaMeansCpu():
                run_step(models[mode], batches, loss, aggregation.wrap_schedule)
            errors[mode] = relative_error(models[mode].module.losses.main_grad, gradient_of(mode))
        except Exception as error:
            errors[mode] = str(error)
        finally:
            if mode == MODES[0]:
                first_left.set()

    threads = [threading.Thread(target=train, args=(mode,)) for mode in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, schedules.forward_step_calc_loss is own


def test_steps_that_overlap() -> None:
    ((errors, is_own),) = run_ranks(1, overlapping)
    assert set(errors) == set(MODES)
    assert all(isinstance(error, float) and error < 1e-6 for error in errors.values()), errors
    assert is_own

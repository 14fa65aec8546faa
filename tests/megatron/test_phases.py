"""What `pretrain` does beside plain steps: evaluation, batch ramp-up, and reruns of a step, in launches of the example.

The example reads no validation data and refuses ramp-up, since its packs are those of whole steps; both are given and
let through here, for the library's sake. Megatron 0.19 ignores `--rampup-batch-size`; a batch grows by
`--step-batch-size-schedule` there.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
from example_run import EXAMPLES, train
from ranks import run_ranks
from rollouts import packs_of_rank, read_rollouts

pytestmark = pytest.mark.slow

CP2 = ["--context-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
PER_TOKEN = ["--calculate-per-token-loss", "--loss-aggregation-with-per-token-loss"]
Steps = list[dict[str, float]]


def record_steps() -> list[tuple[int, float | None, int | None]]:
    """Filled with number of micro-batches, tokens and rollouts of every step that is begun."""
    from megatron_rl_loss.megatron import LossAggregation

    begun: list[tuple[int, float | None, int | None]] = []
    begin_step = LossAggregation._begin_step

    @functools.wraps(begin_step)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        microbatches = begin_step(self, *args, **kwargs)
        totals = self._last_plan.totals
        begun.append((self._last_plan.num_microbatches, totals.step_tokens, totals.rollouts.all))
        return microbatches

    LossAggregation._begin_step = recorded  # type: ignore[method-assign]
    return begun


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


@pytest.mark.parametrize("flags", [PP2, [*CP2, *PER_TOKEN]], ids=["pp 2", "cp 2, per-token loss"])
def test_an_evaluation_step_is_the_training_step_on_its_data(flags: list[str]) -> None:
    mode = ["--loss-aggregation", "prompt_mean"]
    steps, evaluated = run_ranks(2, with_evaluation, [*flags, *mode, "--eval-interval", "1", "--eval-iters", "1"])[-1]
    assert len(steps) == 3
    assert len(evaluated) >= 3
    for step, evaluation in zip(steps[1:], evaluated, strict=False):
        assert {"pg_loss", "log_prob"} <= evaluation.keys()
        assert evaluation == pytest.approx({name: step[name] for name in evaluation}, rel=oracle.EXACT)
    # Negative control: other data, or other weights, give another loss.
    assert steps[1]["pg_loss"] != pytest.approx(steps[2]["pg_loss"], rel=1e-3)


# ---- ramp-up

PACKS = 8
#: Four packs a step for the first eight, which are tokens of as many sequences here; then eight.
SCHEDULE = ["--step-batch-size-schedule", f"0:4 {8 * 256}:{PACKS}"]


def ramped_up(flags: list[str]) -> tuple[Steps, list[Any]]:
    import example_run
    import pretrain_grpo

    pretrain_grpo.check_example_args = lambda args: None
    packs = pretrain_grpo.packs_of_rank
    pretrain_grpo.packs_of_rank = lambda *args, **options: packs(*args, **options | {"packs_per_step": PACKS})
    example_run.DATA = example_run.DATA.replace(f"--global-batch-size {PACKS}", "")  # the schedule says it
    begun = record_steps()
    return train([*flags, "--train-iters", "4"]), begun


def test_batch_ramp_up() -> None:
    """Steps of 4, 4, 8 and 8 packs: their totals are those of just these packs, the numbers those of one process."""
    rollouts = read_rollouts(str(EXAMPLES / "arithmetic.jsonl"), vocab_size=32)
    packs = packs_of_rank(
        rollouts, prompts_per_step=4, packs_per_step=PACKS, seq_length=256, slot_multiple=2, dp_rank=0, dp_size=1
    )
    expected = []
    for size in (4, 4, 8, 8):
        samples = [pack.samples for pack in itertools.islice(packs, size)]
        tokens = sum(float(mask.double().sum()) for one in samples for mask in one.loss_masks)
        ids = {unit for one in samples for unit in one.rollout_ids.tolist()}  # type: ignore[union-attr]
        expected.append((size, tokens, len(ids)))
    assert len({tokens for _, tokens, _ in expected}) == 4
    ((alone, begun),) = run_ranks(1, ramped_up, SCHEDULE)
    assert begun == expected
    for steps, begun in run_ranks(2, ramped_up, SCHEDULE):
        assert begun == [(size // 2, tokens, number) for size, tokens, number in expected]
        for step, reference in zip(steps, alone if steps else [], strict=True):
            # As between layouts (test_example.py): two layers, sums over 256 tokens, then steps of Adam.
            assert step == pytest.approx(reference, rel=4 * oracle.chain_error(2, 256), abs=1e-9)


# ---- reruns


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

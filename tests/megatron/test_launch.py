"""A launch: how a step begins and ends on all ranks, whose groups it takes, what `attached` replaces in Megatron."""

import contextlib
import functools
import io
import math
import re
import threading
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from missing import skip_without
from ranks import run_ranks
from refusals import outcome_of, refusal_tests, refusals
from step_samples import dealt, step_samples
from table_step import Batch, aggregation, begun, one_step, run_step, start, table_model

from megatron_rl_loss import LossAggregation, Samples, next_microbatch, plan_step
from megatron_rl_loss.megatron.flags import AggregationSettings
from megatron_rl_loss.megatron.iterator import MicrobatchIterator
from megatron_rl_loss.megatron.lookahead import from_first_tp_rank
from megatron_rl_loss.megatron.versions import logged_arguments

SAMPLES = step_samples(seed=1)
EVERYTHING = list(range(len(SAMPLES)))
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]


# ---- one rank: iterators, the first line, what `attached` replaces


def iterators_of_every_kind() -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    model, step = table_model([0.0]), aggregation(mode="token_mean")

    def batches(count: int) -> list[Batch]:
        return [Batch(SAMPLES, [i], 1) for i in range(count)]

    source = iter(batches(5))  # exactly the step's micro-batches are taken
    handed = list(begun(step, source, model, 3))
    assert [microbatch.data.samples.mask_lengths for microbatch in handed] == [
        microbatch.samples.mask_lengths for microbatch in batches(3)
    ]
    assert len({id(microbatch.totals) for microbatch in handed}) == 1
    assert len(list(source)) == 2
    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    rerun = RerunDataIterator(iter(batches(4)))
    first = list(begun(step, rerun, model, 2))
    rerun.rewind()
    again = list(begun(step, rerun, model, 2))
    assert [microbatch.totals.step_tokens for microbatch in again] == [
        microbatch.totals.step_tokens for microbatch in first
    ]


def chunks_of_every_kind() -> None:
    """Two chunks of the same masks: the samples of the last one that reads data count."""
    model = table_model(TABLE)
    for without_data in (None, 0, 1):
        chunks = [Batch(SAMPLES, EVERYTHING, 1) for _ in range(2)]
        iterators = [None if i == without_data else iter([chunk]) for i, chunk in enumerate(chunks)]
        handed = begun(aggregation(mode="sample_mean"), iterators, [model, model], 1)
        described = chunks[0] if without_data == 1 else chunks[1]
        for i, (iterator, chunk) in enumerate(zip(handed, chunks, strict=True)):
            assert (iterator is None) == (i == without_data)
            if iterator is not None:
                microbatch = next(iterator)
                assert (microbatch.samples, microbatch.data) == (described.samples, chunk)


#: Values of six steps; the fifth is skipped.
LOGGED = [
    {"pg_loss": 0.5, "kl": 1.0, "gap": math.nan},
    {"pg_loss": -1.0, "kl": 2.0, "gap": 1.0},
    {"pg_loss": -0.5, "kl": 2.0},
    {"pg_loss": 1.0, "kl": 2.0},
    {"pg_loss": 9.0, "kl": 9.0},
    {"pg_loss": -3.0, "kl": 4.0},
]


def attached() -> None:
    """Check Megatron's replaced functions inside `attached`, and the restored ones after it."""
    from megatron.training import training

    start()
    lines: list[str] = []
    calls: list[Any] = []

    def training_log(loss_dict: Any, total_loss_dict: Any, lr: float, iteration: int, skipped_iter: int = 0) -> str:
        """As Megatron's: its line has the means since its last one, those below 0 left out."""
        if not skipped_iter:
            for name, value in [*loss_dict.items(), ("advanced iterations", 1)]:
                total_loss_dict[name] = total_loss_dict.get(name, 0) + value
        if iteration % 2 == 0:
            steps = total_loss_dict["advanced iterations"]
            means = {name: value / steps for name, value in total_loss_dict.items() if "iterations" not in name}
            lines.append(" ".join(f"{name} {float(mean):g}" for name, mean in means.items() if mean >= 0))
            total_loss_dict.update(dict.fromkeys(total_loss_dict, 0))
        return "logged"

    training.get_forward_backward_func = lambda: lambda **kwargs: calls.append(kwargs) or "stored"
    training.training_log = training_log
    training.get_args = lambda: SimpleNamespace(log_interval=2)
    training.print_rank_last = lines.append
    before = training.get_forward_backward_func, training.training_log
    options = {"model": table_model([0.0], ddp=False), "num_microbatches": 2, "collect_non_loss_data": True}
    with aggregation(mode="token_mean").attached():
        batches = iter([Batch(SAMPLES, [0], 1), Batch(SAMPLES, [1], 1)])
        schedule = training.get_forward_backward_func()
        assert schedule(forward_step_func=print, data_iterator=batches, **options) == "stored"
        sums: dict[str, Any] = {}
        for iteration, step_values in enumerate(LOGGED, 1):
            losses = {name: torch.tensor(value) for name, value in step_values.items()}
            assert training.training_log(losses, sums, 0.1, iteration, skipped_iter=iteration == 5) == "logged"
        with pytest.raises(RuntimeError, match=r"attached\(\) inside attached\(\)"), aggregation().attached():
            pass
    assert (training.get_forward_backward_func, training.training_log) == before
    with pytest.raises(KeyError), aggregation().attached():
        raise KeyError
    assert (training.get_forward_backward_func, training.training_log) == before
    (kwargs,) = calls
    assert [len(batch.data.samples) for batch in kwargs.pop("data_iterator")] == [1, 1]
    assert kwargs.pop("forward_step_func").__wrapped__ is print
    assert kwargs == options
    assert lines == [
        "kl 1.5",
        " iteration        2, values below 0 | pg_loss: -2.500000E-01 | gap: NAN |",
        "pg_loss 0.25 kl 2 gap 0",  # -0.5 and 1: the mean is above 0, and stands in Megatron's line alone
        "kl 4 gap 0",  # of the one step that was not skipped
        " iteration        6, values below 0 | pg_loss: -3.000000E+00 |",
    ]


def on_one() -> tuple[dict[str, str], str, dict[str, float]]:
    start()
    iterators_of_every_kind()
    chunks_of_every_kind()
    model = table_model(TABLE)

    def of(sample: int) -> Any:
        return iter([Batch(SAMPLES, [sample], 1)])

    def begin(*iterators: Any) -> Any:
        several = len(iterators) > 1
        data, chunks = (list(iterators), [model] * 2) if several else (iterators[0], model)
        return begun(aggregation(mode="token_mean"), data, chunks, 1)

    outcomes = {
        "a data set": outcome_of(lambda: begin([Batch(SAMPLES, [0], 1)])),
        "a list of one": outcome_of(lambda: begin([of(0)])),
        "one inside another": outcome_of(lambda: begin(begin(of(0)))),
        "None": outcome_of(lambda: begin(None)),
        "not attached": outcome_of(lambda: next_microbatch(iter([{"tokens": 1}]))),
        "attached": outcome_of(lambda: next_microbatch(begin(of(0)))),
        "indexed": outcome_of(lambda: next_microbatch(begin(of(0)))["tokens"]),
        "two chunks": outcome_of(lambda: begin(of(0), of(0))),
        "two chunks of other data": outcome_of(lambda: begin(of(0), of(1))),
    }
    step, out = aggregation(mode="constant", divisor=40960), io.StringIO()
    with contextlib.redirect_stdout(out):
        for _ in range(2):
            begun(step, iter([Batch(SAMPLES, EVERYTHING, 1)]), model, 1)
    return outcomes, out.getvalue(), step.summary


def test_attached_puts_back_what_it_replaced_and_logs_values_below_0() -> None:
    skip_without("pretrain")
    run_ranks(1, attached)


def test_the_iteration_of_a_log_by_its_name_or_its_place() -> None:
    """A wrapper of the user's may take any arguments; Megatron's own are named, and moved in 0.16."""

    def before_016(losses: Any, total: Any, lr: float, decoupled_lr: float, iteration: int) -> None: ...

    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert logged_arguments(before_016, {}, {}, 0.1, 0.2, 7)["iteration"] == 7
    assert logged_arguments(wrapper, {}, {}, 0.1, 7, 1.0)["iteration"] == 7
    assert logged_arguments(wrapper, {}, {}, iteration=7)["iteration"] == 7


def test_the_look_ahead_and_the_first_line() -> None:
    outcomes, line, summary = run_ranks(1, on_one)[0]
    assert "a data iterator of type Batch: the schedule needs an iterator of micro-batches" in outcomes["a data set"]
    assert "a list with one for each model chunk. Pass iter(...)" in outcomes["a data set"]
    assert "wrapped by LossAggregation twice: a step is counted once." in outcomes["one inside another"]
    assert "without validation data pass --eval-iters 0" in outcomes["None"]
    assert "a data iterator that gives dict: next_microbatch needs the iterator of a" in outcomes["not attached"]
    assert "microbatch['tokens']: a Microbatch is not your batch" in outcomes["indexed"]
    assert (
        "the iterators of model chunk 0 and of the last chunk give different samples"
        in outcomes["two chunks of other data"]
    )
    assert outcomes["a list of one"] == outcomes["attached"] == outcomes["two chunks"] == "accepted"
    rollouts, prompts = ({getattr(sample, f"{name}_id") for sample in SAMPLES} for name in ("rollout", "prompt"))
    active_rollouts, active_prompts = (
        len({getattr(sample, f"{name}_id") for sample in SAMPLES if sample.mask.any()})
        for name in ("rollout", "prompt")
    )
    entries, active = (
        sum(map(count, SAMPLES)) for count in (lambda s: len(s.mask), lambda s: int((s.mask != 0).sum()))
    )
    assert line == (
        f"loss aggregation: constant, divisor 40960 | {len(rollouts)} rollouts, {len(prompts)} "
        f"prompts ({len(rollouts) / len(prompts):.1f} each), {active} of {entries} tokens active, "
        f"{len(rollouts) - active_rollouts} rollouts fully masked, left out of metric means | "
        f"1 micro-batches x DP 1, CP 1\n"
    )
    assert summary == {
        "rollouts": len(rollouts), "active_rollouts": active_rollouts, "prompts": len(prompts),
        "active_prompts": active_prompts, "tokens": entries, "active_tokens": active,
    }  # fmt: skip


# ---- groups, replicas, stages


def groups_of_models() -> list[Any]:
    """The groups over which a step is counted: the launch's, else the model's, else Megatron's parallel state's."""
    start(cp=2)
    names = ["tp", "pp", "cp", "dp", "dp_cp"]
    whole = ProcessGroupCollection.use_mpu_process_groups(names)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    one_rank = ProcessGroupCollection(**dict.fromkeys(names, alone))
    lengths: list[Any] = []
    for collection, model_groups in ((None, None), (one_rank, None), (None, one_rank), (whole, one_rank)):
        model = table_model([0.0], ddp=False)
        if model_groups is not None:
            model.pg_collection = model_groups
        step = LossAggregation(AggregationSettings.resolve(), lambda batch: batch.samples, pg_collection=collection)
        cp = 2 if (collection or model_groups or whole) is whole else 1
        lengths.append(len(next(begun(step, iter([Batch(SAMPLES, [0], cp)]), model, 1)).weights))
    partial = ProcessGroupCollection(dp=dist.group.WORLD)
    step = LossAggregation(AggregationSettings.resolve(), lambda batch: batch.samples, pg_collection=partial)
    return [*lengths, outcome_of(lambda: begun(step, iter([]), table_model([0.0], ddp=False), 1))]


def test_the_groups_are_the_launchs_or_the_models_or_megatrons() -> None:
    """A rank that is its own context-parallel group holds all tokens of its micro-batch, one of two holds half."""
    length = len(SAMPLES[0].mask)
    halves, all_of_it = -(-length // 4) * 4 // 2, -(-length // 2) * 2
    for *lengths, partial in run_ranks(2, groups_of_models):
        assert lengths == [halves, all_of_it, all_of_it, halves]
        assert "a ProcessGroupCollection without tp, pp, cp, dp_cp" in partial


def stages() -> tuple[str, str]:
    """The outcome of stages that differ in their data, and the batch of a first stage that reads none."""
    state = start(pp=2)
    model = table_model([0.0], ddp=False)
    last = state.is_pipeline_last_stage()
    begin = functools.partial(begun, aggregation(mode="prompt_mean"), model=model, num_microbatches=1)
    dp_rank = state.get_data_parallel_rank()
    other = outcome_of(lambda: begin(iter([Batch(SAMPLES, [6 * dp_rank, 6 * dp_rank + (2 if last else 3)], 1)])))
    chosen = dealt(SAMPLES, dp_rank, 2, 1)
    handed = begin(iter([Batch(SAMPLES, chosen[0], 1)]) if last else None)
    return other, "nothing" if handed is None else f"{next(handed).totals.units['prompt'].number['all']} prompts"


def test_a_pipeline_stage_reads_the_same_data_or_none_unless_it_computes_the_loss() -> None:
    others, handed = zip(*run_ranks(4, stages), strict=True)
    assert all("were given different samples" in text for text in others), others
    assert handed == ("nothing", "nothing", "3 prompts", "3 prompts")


# ---- two models in one world; gradients that are not fresh; errors of the loader


def actor_and_critic(state: Any) -> list[str]:
    """Groups of one rank each, and of both; made in another order on each rank. What each trains on."""
    rank, names = dist.get_rank(), ("tp", "pp", "cp", "dp", "dp_cp")
    alone = ProcessGroupCollection(**dict.fromkeys(names, [dist.new_group([member]) for member in range(2)][rank]))
    makes: Any = [lambda: LossAggregation(AggregationSettings.resolve("token_mean"), lambda batch: batch.samples,
                                     pg_collection=alone),
             lambda: aggregation(mode="token_mean")]  # fmt: skip
    aggregations = {number: makes[number]() for number in ([0, 1] if rank else [1, 0])}
    with contextlib.suppress(ValueError):  # the critic of one rank meets a bad batch, and goes on
        if rank:
            begun(aggregations[0], iter([]), table_model(TABLE), 1)
    tokens = []
    for step in (aggregations[1], aggregations[0], aggregations[1]):
        (microbatch,) = begun(step, iter([Batch(SAMPLES, EVERYTHING[rank::2], 1)]), table_model(TABLE, ddp=False), 1)
        tokens.append(f"{microbatch.totals.step_tokens:g}")
    return tokens


def steps_without_zeros() -> list[str]:
    """Three steps on two DP ranks, with fresh gradients; then without on one of them, evaluated and trained on."""
    outcomes = []
    for forgetful in (False, True):
        model, step = table_model(TABLE), aggregation(mode="token_mean")
        batches = [Batch(SAMPLES, EVERYTHING[dist.get_rank() :: 2], 1)]
        run = functools.partial(one_step, model, batches, step)
        run()
        if forgetful and dist.get_rank():
            model.zero_grad_buffer = lambda: None
        outcomes += [outcome_of(run), outcome_of(run)]
    return outcomes


def steps_of_mxfp8() -> list[str]:
    """Gradient buffers that hold parameters when the schedule begins, as `train_step` leaves them there (mxfp8)."""
    model, step = table_model(TABLE), aggregation(mode="token_mean", proof="off")  # the buffer here is never zeroed
    batches = [Batch(SAMPLES, EVERYTHING[dist.get_rank() :: 2], 1)]
    model.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = model.ddp_config.overlap_param_gather = True

    def zero_and_copy() -> None:
        for buffer in model.buffers:
            buffer.grad_data.fill_(1)

    model.zero_grad_buffer = zero_and_copy
    return [outcome_of(lambda: one_step(model, batches, step)) for _ in range(3)]


def on_two() -> tuple[list[str], list[str], list[str]]:
    state = start()
    return actor_and_critic(state), steps_without_zeros(), steps_of_mxfp8()


def test_two_models_and_gradients_that_are_not_fresh() -> None:
    tokens = [f"{oracle.mask_tokens(SAMPLES[rank::2]):g}" for rank in range(2)]
    whole = f"{oracle.mask_tokens(SAMPLES):g}"
    for rank, (models, (fresh, again, *forgotten), mxfp8) in enumerate(run_ranks(2, on_two)):
        assert models == [whole, tokens[rank], whole]
        assert (fresh, again, mxfp8) == ("accepted", "accepted", ["accepted"] * 3)
        for text in forgotten:
            assert text.startswith("BadBatchError: Step aborted on all ranks before the optimizer ran. rank 1: ")
            assert "gradients that are not 0 before the step's first micro-batch" in text


def loaded() -> list[str]:
    """Batches of a packing scheduler on two TP ranks: a sound one, and what pickle refuses."""
    state = start(tp=2)
    tp, dp = state.get_tensor_model_parallel_group(), state.get_data_parallel_group()

    class LoaderError(Exception): ...

    def broken() -> Any:
        raise LoaderError("row 7 is broken")

    makes = [lambda: [{"mask": torch.ones(3)}], broken, lambda: [{"mask": torch.ones(3), "lock": threading.Lock()}]]

    def planned(make: Any) -> Any:
        def describe() -> list[Samples]:
            return [Samples([batch["mask"]]) for batch in from_first_tp_rank(make, tp)]

        return plan_step(describe, "token_mean", dp_group=dp, replica_groups=[tp], num_microbatches=1)

    return [outcome_of(functools.partial(planned, make)) for make in makes]


def test_what_cannot_be_sent_from_the_first_tensor_parallel_rank_is_refused_on_all() -> None:
    for sound, error, batch in run_ranks(2, loaded, timeout_s=120):
        assert sound == "accepted"
        assert re.search("rank 0: LoaderError: row 7 is broken; rank 1: BadBatchError: .* LoaderError: row 7", error)
        assert re.search("rank 0: TypeError: cannot pickle .*lock.*; rank 1: BadBatchError: ", batch)


# ---- a step without active tokens; what is let go


def empty_steps() -> list[Any]:
    """Results with either carrier, and the batches alive while the last loss of a step is computed."""
    start(cp=2)
    samples, steps = [oracle.sample([1.0] * 4, [0] * 4, rollout_id=f"r{i}", prompt_id="p") for i in range(2)], []
    for per_token in (False, True):
        step = aggregation(mode="sample_mean", units="active", with_per_token_loss=True)
        batches = [Batch(samples, [0, 1], 2), Batch(samples, [], 2)]
        gradient, logged = one_step(table_model([1.0] * 9, per_token=per_token), batches, step)
        steps.append((gradient.abs().max().item(), logged))
    held: list[Any] = []

    def loss(microbatch: Any, losses: torch.Tensor) -> Any:
        held.append(microbatch)
        return microbatch.loss(losses)

    batches = [Batch(samples, [i % 2], 2) for i in range(4)]
    run_step(table_model([1.0] * 9), batches, loss, aggregation().wrap_schedule)
    return [*steps, [microbatch.data is None for microbatch in held]]


def test_a_step_without_active_tokens_and_batches_that_are_let_go() -> None:
    """Empty steps that are errors are in test_bad_input.py."""
    nothing = (0, {"pg_loss": 0, "twice": 0})
    assert run_ranks(2, empty_steps) == [[nothing, nothing, [True, True, True, False]]] * 2


# ---- wrong arguments

SETTINGS = AggregationSettings.resolve("token_mean")

test_refusals = refusal_tests(
    refusals(
        lambda settings=SETTINGS, samples_of=len, **options: LossAggregation(settings, samples_of, **options),
        (("token_mean",), r"settings is a str: .* Call LossAggregation.from_args\(args, samples_of\)", (SETTINGS,)),
        ({"samples_of": [1]}, "samples_of is a list: it must be a function of a batch", {}),
        ({"term_masks": "correct"}, r"term_masks is 'correct': .* Pass \['correct'\]", {"term_masks": ["correct"]}),
        ({"terms": ["kl"]}, "terms is a list: it must be a dict", {"terms": {"kl": "token_mean"}}),
        ({"before_step": 3}, "before_step is a int: it must be a function of a ForwardPass", {"before_step": len}),
        error=TypeError,
    )
    | refusals(
        next_microbatch,
        (
            ([1],),
            "data_iterator is a list: it must be the iterator",
            (MicrobatchIterator([plan_step([Samples([[1]])], "token_mean", dp_group=None)[0]]),),
        ),
        error=TypeError,
    )
)

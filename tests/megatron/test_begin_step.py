"""How a step begins: the look-ahead, its collectives, errors on every rank, and totals that a user knows."""

import functools
import itertools
import math
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from refusals import outcome_of
from step_samples import dealt, step_samples
from table_step import Batch, aggregation, logged_by_step, one_step, start, table_model

from megatron_rl_loss import StepTotals, UnitCounts
from megatron_rl_loss import next_microbatch
from megatron_rl_loss.reduction import Metric

SAMPLES = step_samples(seed=1)
EVERYTHING = list(range(len(SAMPLES)))
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]


# ---- the look-ahead


def looked_ahead() -> None:
    """Iterators of every kind, one rank."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    samples = step_samples(seed=2)
    model = table_model([0.0])
    step = aggregation(mode="token_mean")

    def batches(first: int, count: int) -> list[Batch]:
        return [Batch(samples, [(first + i) % len(samples)], 1) for i in range(count)]

    # A plain iterator: exactly the step's micro-batches are taken, the rest stays.
    source = iter(batches(0, 5))
    handed = list(step.begin_step(source, model=model, num_microbatches=3))
    assert [m.data.samples.mask_lengths for m in handed] == [b.samples.mask_lengths for b in batches(0, 3)]
    assert len({id(m.totals) for m in handed}) == 1
    assert len(list(source)) == 2
    # Megatron's rerun iterator gives the same step again.
    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    rerun = RerunDataIterator(iter(batches(0, 4)))
    first = list(step.begin_step(rerun, model=model, num_microbatches=2))
    rerun.rewind()
    again = list(step.begin_step(rerun, model=model, num_microbatches=2))
    assert [a.totals.step_tokens for a in first] == [a.totals.step_tokens for a in again]
    # Virtual pipeline stages: a list in, a list out, every chunk with its own data and the same totals.
    chunks = step.begin_step([iter(batches(0, 2)), None, iter(batches(0, 2))], model=[model] * 3, num_microbatches=2)
    assert chunks[1] is None
    pairs = list(zip(chunks[0], chunks[2], strict=True))
    assert len(pairs) == 2
    assert all(a.totals is b.totals and a.data is not b.data for a, b in pairs)
    # Without a number, Megatron's current one is read at the call.
    calculator.init_num_microbatches_calculator(0, None, 2, 1, 1, False)
    assert len(list(step.begin_step(iter(batches(0, 9)), model=model))) == 2
    calculator.reconfigure_num_microbatches_calculator(0, None, 4, 1, 1, False)
    assert len(list(step.begin_step(iter(batches(0, 9)), model=model))) == 4
    # Known counts: those of the first step are compared with the masks, then the user's numbers are used.
    counts = [6.5, 300.0, 100.0, 1.0]
    known = aggregation(mode="token_mean", totals_of=lambda step: StepTotals(step_tokens=counts.pop(0)))
    for expected in (6.5, 300):
        (first, *_) = known.begin_step(iter(batches(0, 3)), model=model, num_microbatches=3)
        assert first.totals.step_tokens == expected
    chunks = known.begin_step([iter(batches(0, 3)) for _ in range(2)], model=[model] * 2, num_microbatches=1)
    assert next(chunks[1]).totals.step_tokens == 100
    with pytest.raises(ValueError, match=r"samples whose step_tokens alone are .*: the totals say 1"):
        known.begin_step(iter(batches(0, 3)), model=model, num_microbatches=3)
    with pytest.raises(ValueError, match=r"step_tokens of 300 from totals_of: the masks of all ranks have 6\.5"):
        aggregation(mode="token_mean", totals_of=lambda step: StepTotals(step_tokens=300)).begin_step(
            iter(batches(0, 3)), model=model, num_microbatches=3
        )


def last_chunk_described() -> None:
    """Two chunks of the same masks, described by layouts of two kinds: the last one that reads data counts."""
    model = table_model(TABLE)
    for given, without_data in itertools.product((False, True), (None, 0, 1)):
        described_batches: list[Any] = []

        def totals_of(batches: list[Any]) -> StepTotals:
            described_batches.extend(batches)  # noqa: B023
            return StepTotals(**KNOWN)

        chunks = [Batch(SAMPLES, EVERYTHING, 1, gathered=gathered) for gathered in (True, False)]
        step = aggregation(mode="sample_mean", totals_of=totals_of if given else None)
        iterators = [None if i == without_data else iter([chunk]) for i, chunk in enumerate(chunks)]
        begun = step.begin_step(iterators, model=[model, model], num_microbatches=1)
        described = chunks[0] if without_data == 1 else chunks[1]
        for i, (iterator, chunk) in enumerate(zip(begun, chunks, strict=True)):
            assert (iterator is None) == (i == without_data)
            if iterator is not None:
                microbatch = next(iterator)
                assert microbatch.samples is described.samples
                assert microbatch.data is chunk
        assert described_batches == ([described] if given else [])


def outcomes_of_iterators() -> dict[str, str]:
    start()
    last_chunk_described()
    model = table_model(TABLE)

    def begin(*iterators: Any) -> Any:
        several = len(iterators) > 1
        given, chunks = (list(iterators), [model] * 2) if several else (iterators[0], model)
        return aggregation(mode="token_mean").begin_step(given, model=chunks, num_microbatches=1)

    def of(sample: int) -> Any:
        return iter([Batch(SAMPLES, [sample], 1)])

    found = {
        "a data set": outcome_of(lambda: begin([Batch(SAMPLES, [0], 1)])),
        "a list of one": outcome_of(lambda: begin([of(0)])),
        "one inside another": outcome_of(lambda: begin(begin(of(0)))),
        "None": outcome_of(lambda: begin(None)),
        "not attached": outcome_of(lambda: next_microbatch(iter([{"tokens": 1}]))),
        "attached": outcome_of(lambda: next_microbatch(begin(of(0)))),
        "two chunks": outcome_of(lambda: begin(of(0), of(0))),
        "two chunks of other data": outcome_of(lambda: begin(of(0), of(1))),
    }
    looked_ahead()
    return found


def test_the_look_ahead_takes_iterators_of_micro_batches_alone() -> None:
    found = run_ranks(1, outcomes_of_iterators)[0]
    assert "a data iterator of type Batch: micro-batches are taken from it one by one" in found["a data set"]
    assert "a list must hold an iterator for each model chunk. Pass iter(...)" in found["a data set"]
    assert "that a LossAggregation has wrapped already: a step is counted once." in found["one inside another"]
    assert "without validation data pass --eval-iters 0" in found["None"]
    assert "a data iterator that gives dict: the step's totals were not made" in found["not attached"]
    assert "the iterator of model chunk 0 gives other samples" in found["two chunks of other data"]
    assert found["a list of one"] == found["attached"] == found["two chunks"] == "accepted"


def collectives_of_steps() -> list[dict[str, int]]:
    """Of a step by ids, and of one whose counts are known, with their losses and metrics."""
    model = table_model([0.0], ddp=False)
    counts: dict[str, int] = {}
    for name in ("all_reduce", "all_gather", "all_to_all_single", "all_gather_object", "broadcast"):
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    found = []
    by_hand: list[StepTotals] = []
    for known in (False, True):
        step = aggregation(mode="prompt_mean", totals_of=(lambda _: by_hand[0]) if known else None)
        batches = [Batch(SAMPLES, [i], 2) for i in (0, 1, 2)]
        # Known: the first step is compared with the masks, the second asks once for metrics.
        for _ in range(3 if known else 1):
            counts.clear()
            microbatches = step.begin_step(iter(batches), model=model, num_microbatches=3)
            by_hand[:] = [step._last_plan.totals]
            for microbatch in microbatches:
                zeros = torch.zeros(1, len(microbatch.tokens))
                microbatch.loss(zeros.clone().requires_grad_(), {"metric": zeros})
        found.append(dict(counts))
    return found


# ---- names of reports


def logged_where_there_are_tokens(state: Any, always: bool) -> list[dict[str, float]]:
    """Three steps on dp 2 x cp 2: all ranks have tokens, DP rank 1 has none, a CP rank has none of a further mask.

    Metrics are left out where a rank, or a micro-batch, has no token of theirs; and come in another order on DP rank 1.
    """
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    logged = []
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):  # each of them is once the first step, where names are compared
        step = aggregation(mode="token_mean", term_masks=["correct"])
        for number in order:
            samples = step_samples(seed=number)
            batches = []
            for chosen in dealt(samples, dp_rank, 2, 3):
                for i in chosen if number == 1 and dp_rank else []:
                    samples[i].mask.zero_()
                correct = [sample.mask * (number != 2 or i < 4) for i, sample in enumerate(samples)]
                batches.append(Batch(samples, chosen, 2, term_masks={"correct": correct}))

            def forward_step(iterator: Any, model: Any) -> Any:
                microbatch = next(iterator)
                losses = model(microbatch.data.local_numbers(cp_rank, 2).cuda())
                masks = {name: microbatch.local(microbatch.samples.with_mask(name).flat_mask) for name in MASKS}
                names = ["twice", "most", "spread", "of correct"][:: -1 if dp_rank else 1]
                metrics = {
                    "twice": Metric(2 * losses),
                    "most": Metric(losses, "tokens", kind="max"),
                    "spread": Metric(losses, "tokens", kind="variance"),
                    "of correct": Metric(losses, "none", mask="correct"),
                }
                kept = {name: metrics[name] for name in names if always or masks[metrics[name].mask].any()}
                return losses, lambda losses: microbatch.loss(losses, kept)

            model = table_model([math.sin(i) for i in range(1 + sum(len(sample.mask) for sample in samples))])
            logged.append(logged_by_step(step, forward_step, batches, model))
    return logged


MASKS = (None, "correct")


def on_four() -> tuple[list[dict[str, float]], list[dict[str, float]], list[dict[str, int]]]:
    state = start(cp=2)
    left_out, whole = (logged_where_there_are_tokens(state, always) for always in (False, True))
    return left_out, whole, collectives_of_steps()


def test_a_metric_may_be_left_out_where_it_has_no_token_and_takes_no_collective() -> None:
    by_rank = run_ranks(4, on_four)
    (names, *_), expected, _ = by_rank[0]
    for found, _, collectives in by_rank:
        for mine, whole in zip(found, expected, strict=True):
            assert list(mine) == list(names)
            assert mine == pytest.approx(whole, rel=oracle.EXACT, abs=1e-6)
        # A sum over dp, a maximum over cp (tp and pp have one rank), and the exchange by id: test_totals.py.
        assert collectives == [{"all_reduce": 3, "all_to_all_single": 3}, {}]


# ---- replicas


def stages() -> tuple[str, str]:
    """Whether stages may differ in their data, and what the first gets that reads none."""
    state = start(pp=2)
    model = table_model([0.0], ddp=False)
    last = state.is_pipeline_last_stage()
    begin = functools.partial(aggregation(mode="prompt_mean").begin_step, model=model, num_microbatches=1)
    other = outcome_of(lambda: begin(iter([Batch(SAMPLES, [0, 1] if last else [0, 2], 1)])))
    chosen = dealt(SAMPLES, state.get_data_parallel_rank(), 2, 1)
    handed = begin(iter([Batch(SAMPLES, chosen[0], 1)]) if last else None)
    return other, "nothing" if handed is None else f"{next(handed).totals.prompts.all} prompts"


def test_a_pipeline_stage_reads_the_same_data_or_none_unless_it_computes_the_loss() -> None:
    others, handed = zip(*run_ranks(4, stages), strict=True)
    assert all("were given different samples" in text for text in others)
    assert handed == ("nothing", "nothing", "3 prompts", "3 prompts")


# ---- gradients of an earlier step


def steps_without_zeros(state: Any) -> list[str]:
    """Three steps on two DP ranks, with fresh gradients; then without on one of them, evaluated and trained on."""
    found = []
    for forgetful in (False, True):
        model, step = table_model(TABLE), aggregation(mode="token_mean")
        batches = [Batch(SAMPLES, EVERYTHING[state.get_data_parallel_rank() :: 2], 1)]
        run = functools.partial(one_step, model, batches, step)
        run()
        if forgetful and state.get_data_parallel_rank():
            model.zero_grad_buffer = lambda: None
        found += [outcome_of(run), outcome_of(run)]
    return found


# ---- totals that a user knows


WHOLE = StepTotals.from_loss_masks(
    [sample.mask for sample in SAMPLES],
    rollout_ids=[str(sample.rollout_id) for sample in SAMPLES],
    prompt_ids=[str(sample.prompt_id) for sample in SAMPLES],
)
KNOWN = {name: getattr(WHOLE, name) for name in ("step_tokens", "step_active_tokens", "rollouts", "prompts")}
NO_ROLLOUTS = {"rollouts": UnitCounts(tokens=WHOLE.rollouts.tokens)}
TOTALS = {
    # (changed counts, mode, per-token loss, a metric, empty step): what is said, "" for nothing
    "right": (({}, "sample_mean", False, True, "error"), ""),
    "right, per-token loss": (({}, "sample_mean", True, True, "warn"), ""),
    "token_mean needs no rollouts without metrics": ((NO_ROLLOUTS, "token_mean", False, False, "warn"), ""),
    "a metric needs them": (
        (NO_ROLLOUTS, "token_mean", False, True, "warn"),
        "totals_of returned totals without rollouts.all: a metric's sample_mean needs it",
    ),
    "the mode's count missing": (
        (NO_ROLLOUTS, "sample_mean", False, False, "warn"),
        "totals without rollouts.all: loss aggregation: sample_mean",
    ),
    "the carrier's count missing": (
        ({"step_active_tokens": None}, "token_mean", True, False, "warn"),
        "totals without step_active_tokens: per-token loss needs it",
    ),
    "an empty step could not be told": (
        ({"step_active_tokens": None}, "token_mean", False, False, "error"),
        "totals without step_active_tokens: empty step handling 'error' needs it",
    ),
    "of half the step": (
        ({"step_tokens": WHOLE.step_tokens / 2}, "token_mean", False, False, "warn"),  # type: ignore[operator]
        "step_tokens",
    ),
    "a step too large": (
        ({"step_tokens": WHOLE.step_tokens + 1}, "token_mean", False, False, "warn"),  # type: ignore[operator]
        "from totals_of: the masks of all ranks have",
    ),
    "none": (({"step_tokens": "no totals"}, "token_mean", False, False, "warn"), "totals is None"),
}


def outcomes_of_totals(state: Any) -> dict[str, str]:
    """Two steps on two DP ranks with totals by hand, for each case."""
    half = (EVERYTHING[:6], EVERYTHING[6:])[state.get_data_parallel_rank()]
    found = {}
    for name, ((changes, mode, per_token, metric, empty_step), _) in TOTALS.items():

        def totals_of(batches: list[Any], changes: Any = changes) -> Any:
            return None if changes.get("step_tokens") == "no totals" else StepTotals(**{**KNOWN, **changes})

        model = table_model(TABLE, per_token=per_token)
        options = {"with_per_token_loss": True, "empty_step": empty_step}
        step = aggregation(mode=mode, totals_of=totals_of, **options)
        batches = [Batch(SAMPLES, half, 1)]
        run = functools.partial(one_step, model, batches, step, metric=metric)
        found[name] = outcome_of(lambda run=run: (run(), run()))
    return found


def on_two() -> tuple[list[str], dict[str, str]]:
    state = start()
    return steps_without_zeros(state), outcomes_of_totals(state)


def test_gradients_of_an_earlier_step_and_wrong_totals_are_refused() -> None:
    for (fresh, again, *forgotten), found in run_ranks(2, on_two):
        assert (fresh, again) == ("accepted", "accepted")
        for text in forgotten:
            assert text.startswith("BadBatchError: All ranks stopped here, no weight was changed. rank 1: ValueError: ")
            assert "gradients that are not 0 before the step's first micro-batch" in text
        for name, (_, text) in TOTALS.items():
            assert text in found[name] if text else found[name] == "accepted", (name, found[name])


# ---- a step without active tokens


def empty_steps() -> list[Any]:
    """With either carrier."""
    start(cp=2)
    samples, found = [oracle.sample([1.0] * 4, [0] * 4, rollout_id=f"r{i}", prompt_id="p") for i in range(2)], []
    for per_token in (False, True):
        step = aggregation(mode="sample_mean", units="active", with_per_token_loss=True)
        batches = [Batch(samples, [0, 1], 2), Batch(samples, [], 2)]
        gradient, logged = one_step(table_model([1.0] * 9, per_token=per_token), batches, step)
        found.append((gradient.abs().max().item(), logged))
    return found


def test_a_step_without_active_tokens() -> None:
    """Where it is an error: test_bad_input.py."""
    assert run_ranks(2, empty_steps) == [[(0, {"pg_loss": 0, "twice": 0})] * 2] * 2

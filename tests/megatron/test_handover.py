"""What reaches Megatron must be what the micro-batch handed out: wrong loss functions in the real schedule, by ranks.

Each wrong use stands beside its legal neighbour. The first step's line, totals that a user knows, replicas and model
chunks that read other data are here too, since they are seen as a step begins.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks
from table_step import Batch, aggregation, start, step_samples, table_model

from megatron_rl_loss import Samples, StepTotals, UnitCounts

SAMPLES = step_samples(seed=1)
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]
ENTRIES = sum(len(sample.mask) for sample in SAMPLES)

# What a loss function returns: (micro-batch, its losses, the micro-batch before it) -> what Megatron is given.
LossFunc = Callable[[Any, torch.Tensor, Any], Any]


def mean(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean()


def changed_in_place(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    loss.mul_(0.5)
    return loss, count, report


def called_and_ignored(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    microbatch.loss(losses)
    return losses.sum(), torch.tensor(1, dtype=torch.int32), {}


def plus_kl(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss + 0.1 * losses.square().mean(), count, report


def scaled(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss / 2, count, report


def counted_anew(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss, count.clone(), report


def without_its_count(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, _, report = microbatch.loss(losses)
    return loss, report


def earlier_one(microbatch: Any, losses: torch.Tensor, earlier: Any) -> Any:
    carried = microbatch.loss(losses)
    return carried if earlier is None else earlier


def own_share(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    return microbatch.carry((losses * 0.1).sum(), {})


def kl_in_the_share(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    share = microbatch.pg_loss(losses) + 0.1 * microbatch.sample_mean(losses.square())
    return microbatch.carry(share, {"pg_loss": share})


def with_a_report_of_ones_own(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss, count, {**report, "lr": torch.tensor(1.0)}


WRONG: dict[str, tuple[LossFunc, str]] = {
    "the stock 2-tuple": (lambda m, losses, _: (mean(losses), {}), "loss_func returned 2 values"),
    "the stock 3-tuple": (
        lambda m, losses, _: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int32), {}),
        "neither its loss() nor its carry() was called",
    ),
    "a bare loss": (lambda m, losses, _: mean(losses), "loss_func returned a Tensor"),
    "its count dropped": (without_its_count, "loss_func returned 2 values"),
    "divided by the number of micro-batches": (scaled, "a loss that this micro-batch did not hand out"),
    "a KL term on top": (plus_kl, "put further terms into the share"),
    "changed in place": (changed_in_place, "it was changed in place"),
    "called, and something else returned": (called_and_ignored, "a loss that this micro-batch did not hand out"),
    "another count": (counted_anew, "a token count that this micro-batch did not hand out"),
    "an earlier micro-batch's": (earlier_one, "a loss that this micro-batch did not hand out"),
    "a share of no reducer": (own_share, "put together without this micro-batch's reducers"),
}
RIGHT: dict[str, LossFunc] = {
    "loss": lambda m, losses, _: m.loss(losses),
    "carry": kl_in_the_share,
    "a report of one's own": with_a_report_of_ones_own,
    "loss, called again": lambda m, losses, _: (m.loss(losses), m.loss(losses))[1],
}


def outcome_of(model: Any, loss_of: LossFunc, *, forward_only: bool = False, takes: int = 1) -> str:
    """A step of two micro-batches through Megatron's schedule: the refusal, or "accepted"."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    earlier: list[Any] = []

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = [next(iterator) for _ in range(takes)][-1]
        losses = model(microbatch.data.local_numbers(0, 1).cuda())

        def loss_func(losses: torch.Tensor) -> Any:
            returned = loss_of(microbatch, losses, earlier[0] if earlier else None)
            earlier.append(returned)
            return returned

        return losses, loss_func

    model.zero_grad_buffer()
    batches = [Batch(SAMPLES, chosen, 1) for chosen in ([0, 1, 2], [3, 4, 5, 6])]
    step = aggregation(mode="sample_mean", with_per_token_loss=True)
    try:
        step.wrap_schedule(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=2 if takes == 1 else 1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    except (ValueError, TypeError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def all_outcomes(per_token: bool) -> dict[str, list[str]]:
    start()
    model = table_model(TABLE, per_token=per_token)
    functions = {name: loss_of for name, (loss_of, _) in WRONG.items()} | RIGHT
    return {
        name: [outcome_of(model, loss_of, forward_only=forward_only) for forward_only in (False, True)]
        for name, loss_of in functions.items()
    }


@pytest.mark.parametrize("per_token", [False, True], ids=["carrier A", "carrier C"])
def test_only_what_was_handed_out_reaches_megatron(per_token: bool) -> None:
    """In training and in evaluation."""
    found = run_ranks(1, all_outcomes, per_token)[0]
    for name, (_, text) in WRONG.items():
        for outcome in found[name]:
            assert outcome.startswith("ValueError: "), (name, outcome)
            assert text in outcome, (name, outcome)
    for name in RIGHT:
        assert found[name] == ["accepted", "accepted"], name


def iterators() -> dict[str, str]:
    from megatron_rl_loss.megatron import next_microbatch

    start()
    model = table_model(TABLE)
    step = aggregation(mode="token_mean")
    batches = [Batch(SAMPLES, [0], 1)]
    found = {"two next()": outcome_of(model, RIGHT["loss"], takes=2)}
    calls = {
        "a data set": lambda: step.begin_step(batches, model=model, num_microbatches=1),
        "an iterator": lambda: step.begin_step(iter(batches), model=model, num_microbatches=1),
        "not attached": lambda: next_microbatch(iter([{"tokens": 1}])),
        "attached": lambda: next_microbatch(step.begin_step(iter(batches), model=model, num_microbatches=1)),
        "None": lambda: step.begin_step(None, model=model, num_microbatches=1),
    }
    for name, call in calls.items():
        try:
            call()
            found[name] = "accepted"
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_iterators_and_what_is_taken_from_them() -> None:
    found = run_ranks(1, iterators)[0]
    # Two are asked of an iterator of one: Megatron's own schedule would take them from the next step.
    assert "StopIteration" in found["two next()"] or "took 2 micro-batches" in found["two next()"]
    assert "a data iterator of type Batch: micro-batches are taken from it one by one" in found["a data set"]
    assert "a data iterator that gives dict: the step's totals were not made" in found["not attached"]
    assert "without validation data pass --eval-iters 0" in found["None"]
    assert found["an iterator"] == found["attached"] == "accepted"


# --- totals that a user knows


WHOLE = StepTotals.from_loss_masks(
    [sample.mask for sample in SAMPLES],
    rollout_ids=[str(sample.rollout_id) for sample in SAMPLES],
    prompt_ids=[str(sample.prompt_id) for sample in SAMPLES],
)
KNOWN = {
    "step_tokens": WHOLE.step_tokens,
    "step_active_tokens": WHOLE.step_active_tokens,
    "rollouts": WHOLE.rollouts,
    "prompts": WHOLE.prompts,
}


def with_totals(changes: dict[str, Any], mode: str, per_token: bool, metric: bool, empty_step: str) -> str:
    """Two steps on two DP ranks with totals by hand; the first refusal, or "accepted"."""
    from table_step import one_step

    state = start()
    rank = state.get_data_parallel_rank()

    def totals_of(batches: list[Any]) -> Any:
        return None if changes.get("step_tokens") == "no totals" else StepTotals(**{**KNOWN, **changes})

    model = table_model(TABLE, per_token=per_token)
    options = {"with_per_token_loss": True, "empty_step": empty_step}
    step = aggregation(mode=mode, totals_of=totals_of, **options)
    halves = [list(range(0, 6)), list(range(6, len(SAMPLES)))]
    try:
        for _ in range(2):
            one_step(model, [Batch(SAMPLES, halves[rank], 1)], step, metric=metric)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


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
        "totals without step_active_tokens: --loss-aggregation-empty-step error needs it",
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


@pytest.mark.parametrize(("case", "text"), TOTALS.values(), ids=TOTALS.keys())
def test_totals_that_a_user_knows(case: tuple[Any, ...], text: str) -> None:
    for outcome in run_ranks(2, with_totals, *case):
        assert text in outcome if text else outcome == "accepted", outcome


# --- replicas and model chunks that read other data


def replica_outcome(kind: str, rank_with_other_data: int | None) -> str:
    """CP 2 on two ranks; the samples of one of them are other ones, though their sums are the same."""
    import torch.distributed as dist

    start(cp=2)
    masks = [torch.tensor([0.0, 1, 1, 0]), torch.tensor([0.0, 1, 1, 1])]
    tokens = torch.arange(8)
    cuts = [[0], [1]]
    if dist.get_rank() == rank_with_other_data:
        if kind == "shifted masks":
            masks = [mask.roll(-1) for mask in masks]
        elif kind == "other tokens":
            tokens = tokens.flip(0)
        elif kind == "another order":
            cuts = [[1], [0]]
        elif kind == "another cut":
            cuts = [[0, 1], []]
    from megatron_rl_loss import ZigzagTHD

    def samples_of(chosen: list[int]) -> Samples:
        layout = ZigzagTHD([4 * i for i in range(len(chosen) + 1)])
        return Samples([masks[i] for i in chosen], layout=layout, tokens=tokens if kind == "other tokens" else None)

    step = aggregation(samples_of, mode="token_mean")
    try:
        step.begin_step(iter(cuts), model=table_model([0.0] * 9), num_microbatches=2)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("kind", ["shifted masks", "other tokens", "another order", "another cut"])
def test_replicas_that_read_other_data_are_told_apart(kind: str) -> None:
    assert run_ranks(2, replica_outcome, kind, None) == ["accepted"] * 2
    for outcome in run_ranks(2, replica_outcome, kind, 1):
        assert "were given different samples for this step" in outcome


def many_swapped(swap: bool) -> str:
    """256 samples a rank on 2 DP x 2 CP ranks; two neighbours are swapped on one CP rank."""
    import torch.distributed as dist

    state = start(cp=2)
    generator = torch.Generator().manual_seed(state.get_data_parallel_rank())
    masks = [(torch.rand(4, generator=generator) < 0.5).float() for _ in range(256)]
    masks[100], masks[101] = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 1])
    if swap and dist.get_rank() == 3:
        masks[100], masks[101] = masks[101], masks[100]
    from megatron_rl_loss import BadBatchError

    replicas = [state.get_context_parallel_group()]
    try:
        StepTotals.from_loss_masks(masks, dp_group=state.get_data_parallel_group(), replica_groups=replicas)
    except BadBatchError as error:
        return str(error)
    return "accepted"


def test_a_swap_of_neighbours_is_seen_among_hundreds() -> None:
    assert run_ranks(4, many_swapped, False) == ["accepted"] * 4
    for outcome in run_ranks(4, many_swapped, True):
        assert "were given different samples" in outcome


def chunks_outcome(other: bool) -> str:
    start()
    model = table_model(TABLE)
    step = aggregation(mode="token_mean")
    chunks = [[Batch(SAMPLES, [0], 1)], [Batch(SAMPLES, [1 if other else 0], 1)]]
    try:
        step.begin_step([iter(chunk) for chunk in chunks], model=[model, model], num_microbatches=1)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_model_chunks_read_the_same_data() -> None:
    assert run_ranks(1, chunks_outcome, False) == ["accepted"]
    assert "the iterator of model chunk 0 gives other samples" in run_ranks(1, chunks_outcome, True)[0]


def last_chunk_described(given: bool, chunk_without_data: int | None) -> list[bool]:
    """Two chunks of the same masks, described by layouts of two kinds: is it the last one's that counts?"""
    start()
    seen: list[Any] = []

    def totals_of(batches: list[Any]) -> StepTotals:
        seen.extend(batches)
        return StepTotals(**KNOWN)

    model = table_model(TABLE)
    everything = list(range(len(SAMPLES)))
    chunks = [Batch(SAMPLES, everything, 1, gathered=gathered) for gathered in (True, False)]
    step = aggregation(mode="sample_mean", totals_of=totals_of if given else None)
    iterators = [None if i == chunk_without_data else iter([chunk]) for i, chunk in enumerate(chunks)]
    handed = step.begin_step(iterators, model=[model, model], num_microbatches=1)
    described = chunks[0] if chunk_without_data == 1 else chunks[1]
    taken = [None if iterator is None else next(iterator) for iterator in handed]
    return [
        all(one is None or one.samples is described.samples for one in taken),
        all(one is None or one.data is chunk for one, chunk in zip(taken, chunks, strict=True)),
        [one is None for one in taken] == [i == chunk_without_data for i in range(2)],
        not given or (len(seen) == 1 and seen[0] is described),
    ]


@pytest.mark.parametrize("chunk_without_data", [None, 0, 1])
@pytest.mark.parametrize("given", [False, True], ids=["exchanged", "given"])
def test_the_last_chunk_that_reads_data_is_described(given: bool, chunk_without_data: int | None) -> None:
    """With virtual pipeline stages the last chunk computes the loss; all chunks get what it was described by."""
    assert run_ranks(1, last_chunk_described, given, chunk_without_data) == [[True] * 4]


# --- counts that Megatron's int32 cannot hold


def with_many_tokens() -> dict[tuple[bool, int], str]:
    """A second step of so many active tokens: the first one is compared with what there is."""
    start()
    found = {}
    for per_token in (False, True):
        model = table_model(TABLE, per_token=per_token)
        for tokens in (2**31 - 1, 2**31, 2**33):
            counts = [WHOLE, StepTotals(step_tokens=tokens, step_active_tokens=tokens)]
            step = aggregation(mode="token_mean", totals_of=lambda _, counts=counts: counts.pop(0))
            outcome = "accepted"
            for number in range(2):
                try:
                    step.begin_step(iter([Batch(SAMPLES, list(range(13)), 1)]), model=model, num_microbatches=1)
                except ValueError as error:
                    outcome = f"step {number}: {type(error).__name__}: {error}"
            found[per_token, tokens] = outcome
    return found


def test_a_step_of_2_31_tokens_is_refused_with_per_token_loss() -> None:
    found = run_ranks(1, with_many_tokens)[0]
    refused = {case for case, outcome in found.items() if outcome != "accepted"}
    assert refused == {(True, 2**31), (True, 2**33)}
    for _, tokens in refused:
        text = f"step 1: BadBatchError: {tokens} active tokens with per-token loss: Megatron sums token counts as int32"
        assert found[True, tokens].startswith(text)


# --- groups


def groups_outcome(which: str) -> str:
    state = start(cp=2)
    masks = [torch.ones(2)]
    options: dict[str, Any] = {
        "unsaid": {},
        "said to be none": {"dp_group": None},
        "dp": {"dp_group": state.get_data_parallel_group()},
        "dp and cp": {
            "dp_group": state.get_data_parallel_group(with_context_parallel=True),
            "replica_groups": [state.get_context_parallel_group()],
        },
    }[which]
    try:
        return str(StepTotals.from_loss_masks(masks, **options).step_tokens)
    except ValueError as error:
        return str(error)


def test_the_data_parallel_group_is_said() -> None:
    assert all("totals of 4 ranks without a dp_group" in text for text in run_ranks(4, groups_outcome, "unsaid"))
    assert all("shares the ranks" in text for text in run_ranks(4, groups_outcome, "dp and cp"))
    assert run_ranks(4, groups_outcome, "said to be none") == ["2.0"] * 4
    assert run_ranks(4, groups_outcome, "dp") == ["4.0"] * 4


# --- the first step's line


def announced(prompt_groups: int) -> str:
    import contextlib
    import io

    start()
    model = table_model(TABLE)
    step = aggregation(mode="constant", divisor=40960)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for _ in range(2):
            step.begin_step(iter([Batch(SAMPLES, list(range(13)), 1)]), model=model, num_microbatches=1)
    return f"{out.getvalue()}|{step.summary}"


def test_the_first_step_is_told_in_a_line() -> None:
    text, _, summary = run_ranks(1, announced, 3)[0].rpartition("|")
    assert text.count("\n") == 1
    rollouts = len({sample.rollout_id for sample in SAMPLES})
    masked = sum(
        all(float(one.mask.sum()) == 0 for one in SAMPLES if one.rollout_id == name)
        for name in {sample.rollout_id for sample in SAMPLES}
    )
    active = sum(int((sample.mask != 0).sum()) for sample in SAMPLES)
    assert text.startswith("loss aggregation: constant, divisor 40960, unit counting all | ")
    assert f"{rollouts} rollouts" in text
    assert f"{active} of {ENTRIES} tokens active, {masked} rollouts fully masked" in text
    assert re.search(r"\| 1 micro-batches x DP 1, CP 1\n$", text)
    assert eval(summary) == {
        "rollouts": rollouts, "active_rollouts": rollouts - masked, "tokens": ENTRIES, "active_tokens": active,
    }  # fmt: skip


def test_a_rank_that_fails_is_named() -> None:
    """Negative control of this file's runner: an assertion on a rank comes through."""
    with pytest.raises(RankError, match=r"AssertionError|KeyError|RuntimeError"):
        run_ranks(1, groups_outcome, "no such case")

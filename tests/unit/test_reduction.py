"""The reducers: the shares of all micro-batches and context-parallel (CP) ranks add up to the step loss.

`run_step` does what a launch does, in one process: it cuts the step into micro-batches, lays each out, hands every CP
rank its own piece of the losses, and adds up the shares and the gradients. `oracle` says what must come out.
Not exercised here: data-parallel groups (test_totals.py) and Megatron's own scaling.
"""

import doctest
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import MODES, NAN, WORKED, WORKED_DIVISOR, WORKED_VALUES
from placements import Place, Placement, every_layout, response, thd
from steps import (
    Outcome,
    Step,
    assert_equals_oracle,
    divisor_of,
    every_counting,
    oracle_gradient,
    quick,
    run_step,
    steps,
    totals_of,
)
from torch import Tensor

from megatron_rl_loss import (
    Gathered,
    Layout,
    ReducerInputs,
    Samples,
    StepTotals,
    ZigzagResponse,
    ZigzagTHD,
    available_modes,
    make_pg_loss_reducer,
    reducers,
    register_pg_loss_reducer,
)

INF = float("inf")


# --- a step, laid out


# --- the worked batch


def subsets(n: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, n + 1):
        yield from itertools.combinations(range(n), size)


def set_partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way of cutting the items into micro-batches."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for others in itertools.chain([()], *(itertools.combinations(rest, size) for size in range(1, len(rest) + 1))):
        for partition in set_partitions(tuple(item for item in rest if item not in others)):
            yield [(first, *others), *partition]


PARTITIONS = list(set_partitions((0, 1, 2, 3)))


def test_there_are_15_ways_to_cut_4_samples() -> None:
    assert len({frozenset(partition) for partition in PARTITIONS}) == 15
    assert all(sorted(itertools.chain(*partition)) == [0, 1, 2, 3] for partition in PARTITIONS)


@every_counting
def test_the_oracle_gives_the_worked_values(mode: str, units: str) -> None:
    value = oracle.step_loss(mode, [one.poisoned() for one in WORKED], divisor_of(mode), units)
    assert float(value) == pytest.approx(WORKED_VALUES[mode, units], abs=1e-6)


@every_layout
@every_counting
def test_worked_batch(mode: str, units: str, place: Place, cp_size: int) -> None:
    step = [one.poisoned() for one in WORKED]
    totals = totals_of(step)
    # A micro-batch's share depends on itself and the totals only: reduce each of the 15 subsets once.
    parts = {
        subset: run_step(step, [subset], mode, units, place=place, cp_size=cp_size, totals=totals)
        for subset in subsets(4)
    }
    for partition in PARTITIONS:
        value = sum(parts[microbatch].value for microbatch in partition)
        assert value == pytest.approx(WORKED_VALUES[mode, units], abs=1e-6), partition
    slopes = oracle_gradient(step, mode, units)
    for subset, part in parts.items():
        member = torch.cat([torch.full_like(one.losses, i in subset) for i, one in enumerate(step)])
        torch.testing.assert_close(part.gradient, slopes * member, rtol=0, atol=1e-7)


@every_layout
def test_token_sum_without_a_divisor_is_the_plain_sum(place: Place, cp_size: int) -> None:
    """Whatever the totals hold, none included: it counts nothing."""
    step = [replace(one.poisoned(), rollout_id=None) for one in WORKED]
    outcome = run_step(step, [[2, 0], [1, 3]], "token_sum", place=place, cp_size=cp_size, totals=StepTotals())
    assert outcome.value == pytest.approx(27.5 / 8)  # run_step gives it L
    for divisor in (None, 1):
        reducer = make_pg_loss_reducer("token_sum", [one.mask for one in step], totals=StepTotals(), divisor=divisor)
        assert float(reducer(torch.cat([one.losses for one in step]))) == pytest.approx(27.5)


# --- random steps


@every_layout
@quick
@given(step=steps(), units=st.sampled_from(["all", "active"]))
def test_random_steps(step: Step, units: str, place: Place, cp_size: int) -> None:
    totals = totals_of(step.samples)
    for mode in MODES:
        outcome = run_step(step.samples, step.microbatches, mode, units, place=place, cp_size=cp_size, totals=totals)
        assert_equals_oracle(outcome, step.samples, mode, units)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "grad_rtol"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)], ids=["bf16", "fp16"]
)
@quick
@given(data=st.data())
def test_half_precision_losses_are_summed_in_float32(
    mode: str, dtype: torch.dtype, grad_rtol: float, data: st.DataObject
) -> None:
    step = data.draw(steps(dtype))
    outcome = run_step(step.samples, step.microbatches, mode, place=thd, cp_size=2, dtype=dtype)
    # The gradient of a half-precision loss is itself rounded to half precision.
    assert_equals_oracle(outcome, step.samples, mode, rtol=grad_rtol, atol=1e-7)


def test_float64_losses_give_a_float32_share() -> None:
    step = [one.poisoned() for one in WORKED]
    assert_equals_oracle(run_step(step, [[0, 1, 2, 3]], "sample_mean", dtype=torch.float64), step, "sample_mean")


def test_many_tokens_keep_their_precision() -> None:
    # In bf16, a running sum of ones stops at 256.
    masks = [torch.ones(40_000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)]
    totals = StepTotals.from_loss_masks(masks)
    assert totals.step_tokens == 41_000
    share = make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.ones(41_000, dtype=torch.bfloat16))
    assert float(share) == pytest.approx(1, rel=1e-5)


# --- properties


@every_counting
@quick
@given(step=steps())
def test_weights_sum_to_one(mode: str, units: str, step: Step) -> None:
    """Or to the share of units with an active token where all count, to tokens / (L * N) for constant, and to
    tokens / d for token_sum."""
    ones = [replace(one, losses=torch.ones_like(one.losses)).poisoned() for one in step.samples]
    members = oracle.units_of(mode, ones)
    active = sum(oracle.mask_tokens([ones[i] for i in unit]) > 0 for unit in members)
    tokens = oracle.mask_tokens(ones)
    counted = active if units == "active" else len(members)
    if mode == "constant":
        expected = tokens / (WORKED_DIVISOR * counted) if counted else 0
    elif mode == "token_sum":
        expected = tokens / WORKED_DIVISOR
    elif mode == "token_mean":
        expected = 1 if tokens else 0
    else:
        expected = active / counted if counted else 0
    outcome = run_step(ones, step.microbatches, mode, units, place=thd, cp_size=2)
    assert outcome.value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@quick
@given(step=steps(), units=st.sampled_from(["all", "active"]), seed=st.integers(0, 2**16))
def test_order_and_cuts_do_not_matter(mode: str, step: Step, units: str, seed: int) -> None:
    rng = random.Random(seed)
    order = list(range(len(step.samples)))
    rng.shuffle(order)
    one_by_one = run_step(step.samples, [[i] for i in order], mode, units, place=response, cp_size=4)
    at_once = run_step(step.samples, [list(range(len(step.samples)))], mode, units)
    scale = oracle.step_scale(mode, step.samples, divisor_of(mode), units)
    assert one_by_one.value == pytest.approx(at_once.value, abs=1e-5 * scale)
    torch.testing.assert_close(one_by_one.gradient, at_once.gradient, rtol=1e-5, atol=1e-30)


@quick
@given(step=steps(), divisor=st.floats(1e-3, 1e6))
def test_constant_is_linear_in_one_over_l(step: Step, divisor: float) -> None:
    at_one = run_step(step.samples, step.microbatches, "constant", divisor=1)
    at_divisor = run_step(step.samples, step.microbatches, "constant", divisor=divisor)
    assert at_divisor.value * divisor == pytest.approx(at_one.value, rel=1e-5, abs=1e-6 * abs(at_one.value) + 1e-30)


@every_layout
@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
def test_what_is_masked_never_matters(poison: float, place: Place, cp_size: int) -> None:
    step = [one.poisoned(poison) for one in WORKED]
    for mode in MODES:
        outcome = run_step(step, [[2, 0], [1, 3]], mode, place=place, cp_size=cp_size, padding=poison)
        assert_equals_oracle(outcome, WORKED, mode)


@every_layout
@pytest.mark.parametrize("mode", MODES)
def test_what_is_active_always_surfaces(mode: str, place: Place, cp_size: int) -> None:
    for i, t, poison in [(0, 0, NAN), (1, 1, INF), (2, 3, -INF)]:
        losses = WORKED[i].losses.clone()
        losses[t] = poison
        step = [replace(one, losses=losses) if k == i else one for k, one in enumerate(WORKED)]
        outcome = run_step(step, [[2, 0], [1, 3]], mode, place=place, cp_size=cp_size)
        assert outcome.value == pytest.approx(poison, nan_ok=True), (i, t)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("masks", "layout", "rank", "num_losses"),
    [
        pytest.param([torch.zeros(4), torch.zeros(8)], ZigzagTHD([0, 4, 12]), 1, 6, id="no active token"),
        pytest.param([torch.ones(3)], ZigzagResponse([16], [3]), 1, 0, id="no token on this rank"),
        pytest.param([], ZigzagTHD([0]), 0, 0, id="empty micro-batch"),
        pytest.param([], ZigzagTHD([0, 8], filler_slots=1), 0, 4, id="filler only"),
        pytest.param([torch.ones(0)], ZigzagTHD([0, 0]), 1, 0, id="empty mask"),
        pytest.param([torch.ones(0)], ZigzagResponse([5], [0]), 0, 0, id="empty response"),
    ],
)
def test_the_graph_stays_connected(mode: str, masks: list[Tensor], layout: Layout, rank: int, num_losses: int) -> None:
    n = len(masks)
    elsewhere = torch.ones(5)  # so that the step is not empty
    totals = StepTotals.from_loss_masks([*masks, elsewhere], prompt_ids=[0] * (n + 1))
    reducer = make_pg_loss_reducer(
        mode, masks, totals=totals, divisor=divisor_of(mode), prompt_ids=[0] * n, layout=layout, cp_rank=rank, cp_size=2
    )
    logits = torch.full((num_losses,), 3.0, requires_grad=True)
    share = reducer(logits * 2)
    assert share.dtype == torch.float32
    assert share.shape == ()
    share.backward()
    assert float(share.detach()) == 0
    torch.testing.assert_close(logits.grad, torch.zeros(num_losses))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_an_active_token_is_zero(mode: str) -> None:
    step = [oracle.sample([1, 2], [0, 0]).poisoned(), oracle.sample([3], [0]).poisoned()]
    for units in ("all", "active"):
        outcome = run_step(step, [[0], [1]], mode, units)
        assert outcome.value == 0
        assert not outcome.gradient.any()


def test_masks_are_not_part_of_the_graph() -> None:
    mask = torch.ones(2, requires_grad=True)
    losses = torch.ones(2, requires_grad=True)
    make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.from_loss_masks([mask]))(losses).backward()
    assert mask.grad is None
    assert losses.grad.tolist() == [0.5, 0.5]


def test_a_reducer_can_be_used_again() -> None:
    """The loss and the metrics of one micro-batch share it."""
    reducer = make_pg_loss_reducer("sample_mean", [torch.ones(2)], totals=StepTotals(num_rollouts=1))
    assert [float(reducer(torch.full((2,), x))) for x in (1.0, 5.0, 1.0)] == [1, 5, 1]


# --- negative controls: each planted bug makes the comparisons above fail, by the factor shown

HALVES = [[0, 1], [2, 3]]


def share_with(totals: StepTotals, microbatch: Sequence[int], mode: str = "token_mean") -> float:
    return run_step(WORKED, [microbatch], mode, totals=totals).value


def local_denominator() -> float:
    return sum(share_with(totals_of([WORKED[i] for i in part]), part) for part in HALVES)


def mean_of_means() -> float:
    return local_denominator() / len(HALVES)


def mean_of_microbatch_sample_means() -> float:
    halves = [[0], [1, 2, 3]]
    return sum(share_with(totals_of([WORKED[i] for i in part]), part, "sample_mean") for part in halves) / 2


def phantom_token() -> float:
    tokens = sum(max(float(one.mask.sum()), 1) for one in WORKED)
    return sum(share_with(replace(totals_of(WORKED), step_tokens=tokens), part) for part in HALVES)


def unmasked_numerator() -> float:
    ones = [replace(one, mask=torch.ones_like(one.mask)) for one in WORKED]
    return sum(run_step(ones, [part], "token_mean", totals=totals_of(WORKED)).value for part in HALVES)


def tokens_counted_by_length() -> float:
    tokens = float(sum(len(one.mask) for one in WORKED))
    return sum(share_with(StepTotals(step_tokens=tokens), part) for part in HALVES)


def tokens_summed_over_cp() -> float:
    doubled = StepTotals(step_tokens=2 * oracle.mask_tokens(WORKED))
    return run_step(WORKED, HALVES, "token_mean", place=thd, cp_size=2, totals=doubled).value


def gathered_losses_said_to_be_cut() -> float:
    """Every CP rank holds all tokens and each counts for a whole one."""
    return sum(run_step(WORKED, HALVES, "token_mean").value for _ in range(2))


def masked_by_multiplication() -> float:
    return float(sum((one.poisoned().losses * one.mask).sum() for one in WORKED)) / oracle.mask_tokens(WORKED)


def bshd_cut_read_as_thd() -> float:
    """Rows [1 2 3 4 - - - -] and [5 6 - - - - - -], cut by row, weighed as if the whole buffer were one slot."""
    rows = oracle.padded_slots([4, 2], [8, 8])
    masks = [torch.cat([WORKED[0].mask, torch.zeros(4), WORKED[1].mask, torch.zeros(6)])]
    value = 0.0
    for rank in range(2):
        local = [
            0.0 if token is None else float(WORKED[token[0]].losses[token[1]]) for token in oracle.zigzag(rows, rank, 2)
        ]
        reducer = make_pg_loss_reducer(
            "token_mean",
            masks,
            totals=StepTotals(step_tokens=9),
            layout=ZigzagTHD([0, 16]),
            cp_rank=rank,
            cp_size=2,
        )
        value += float(reducer(torch.tensor(local)))
    return value + share_with(StepTotals(step_tokens=9), [2, 3])


@pytest.mark.parametrize(
    ("mode", "planted", "factor"),
    [
        ("token_mean", local_denominator, (21 / 6 + 6.5 / 3) / (27.5 / 9)),
        ("token_mean", mean_of_means, (21 / 6 + 6.5 / 3) / 2 / (27.5 / 9)),
        ("sample_mean", mean_of_microbatch_sample_means, (2.5 + (5.5 + 6.5 / 3) / 3) / 2 / ((2.5 + 5.5 + 6.5 / 3) / 4)),
        ("token_mean", phantom_token, 9 / 10),
        ("token_mean", unmasked_numerator, 35.5 / 27.5),
        ("token_mean", tokens_counted_by_length, 9 / 13),
        ("token_mean", tokens_summed_over_cp, 1 / 2),
        ("token_mean", gathered_losses_said_to_be_cut, 2),
        ("token_mean", masked_by_multiplication, NAN),
        # Rank 0 holds 1 2 - - 5 6 - -, and only its first four places have weight; rank 1's 3 4 fall in padding.
        ("token_mean", bshd_cut_read_as_thd, (1 + 2 + 6.5) / 27.5),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_planted_bugs_are_seen(mode: str, planted: Callable[[], float], factor: float) -> None:
    wrong, right = planted(), WORKED_VALUES[mode, "all"]
    assert wrong / right == pytest.approx(factor, rel=1e-5, nan_ok=True)
    seen = Outcome(wrong, oracle_gradient(WORKED, mode))
    with pytest.raises(AssertionError):
        assert_equals_oracle(seen, WORKED, mode)


def test_a_wrong_gradient_is_seen() -> None:
    slopes = oracle_gradient(WORKED, "token_mean")
    assert_equals_oracle(Outcome(27.5 / 9, slopes), WORKED, "token_mean")
    with pytest.raises(AssertionError):
        assert_equals_oracle(Outcome(27.5 / 9, slopes * 1.001), WORKED, "token_mean")


def test_a_layout_that_drops_a_rank_is_seen() -> None:
    def lossy(lengths: list[int], cp_size: int) -> Placement:
        placed = thd(lengths, cp_size)
        return replace(placed, held=placed.held[:-1])

    outcome = run_step(WORKED, HALVES, "token_mean", place=lossy, cp_size=4)
    with pytest.raises(AssertionError):
        assert_equals_oracle(outcome, WORKED, "token_mean")


# --- totals made by hand

MASKS = [torch.ones(4), torch.tensor([1.0, 0.5, 0, 0])]
LOSSES = torch.tensor([1.0, 2, 3, 4, 5, 6, NAN, NAN])


def by_hand(mode: str, totals: StepTotals, **keywords: Any) -> float:
    keywords = {"divisor": divisor_of(mode), **keywords}
    return float(make_pg_loss_reducer(mode, MASKS, totals=totals, **keywords)(LOSSES))


@pytest.mark.parametrize(
    ("mode", "needed", "keywords", "expected"),
    [
        pytest.param("token_mean", {"step_tokens": 20}, {}, 18 / 20, id="token_mean"),
        pytest.param("token_mean", {"step_tokens": 20.5}, {"units": "active"}, 18 / 20.5, id="token_mean active"),
        pytest.param("sample_mean", {"num_rollouts": 5}, {}, (2.5 + 8 / 1.5) / 5, id="sample_mean"),
        pytest.param(
            "sample_mean", {"num_active_rollouts": 3}, {"units": "active"}, (2.5 + 8 / 1.5) / 3, id="sample_mean active"
        ),
        pytest.param(
            "sample_mean",
            {"num_rollouts": 2, "rollout_tokens": {7: 10, 8: 1.5}},
            {"rollout_ids": [7, 8]},
            (10 / 10 + 8 / 1.5) / 2,
            id="sample_mean, split rollouts",
        ),
        pytest.param(
            "prompt_mean",
            {"num_prompts": 4, "prompt_tokens": {0: 11, 1: 9}},
            {"prompt_ids": [0, 0]},
            18 / 11 / 4,
            id="prompt_mean, int ids",
        ),
        pytest.param(
            "prompt_mean",
            {"num_prompts": 4, "prompt_tokens": {"a": 8, "b": 3, -5: 1}},
            {"prompt_ids": ["b", "a"]},
            (10 / 3 + 8 / 8) / 4,
            id="prompt_mean, string ids",
        ),
        pytest.param(
            "prompt_mean",
            {"num_active_prompts": 2, "prompt_tokens": {0: 11}},
            {"prompt_ids": torch.tensor([0, 0]), "units": "active"},
            18 / 11 / 2,
            id="prompt_mean active",
        ),
        pytest.param("constant", {"num_rollouts": 5}, {"divisor": 100}, 18 / 500, id="constant"),
        pytest.param("constant", {"num_active_rollouts": 4}, {"units": "active"}, 18 / 32, id="constant active"),
    ],
)
def test_totals_by_hand(mode: str, needed: dict[str, Any], keywords: dict[str, Any], expected: float) -> None:
    assert by_hand(mode, StepTotals(**needed), **keywords) == pytest.approx(expected)
    for name in needed:
        rest = {field: value for field, value in needed.items() if field != name}
        with pytest.raises(ValueError, match=f"totals without {name}: loss aggregation '{mode}' needs it"):
            by_hand(mode, StepTotals(**rest), **keywords)


Call = Callable[[], Any]
WITH_ROLLOUTS = StepTotals.from_loss_masks(MASKS, rollout_ids=[0, 0], prompt_ids=[0, 0])
PROMPTS = StepTotals(num_prompts=2, prompt_tokens={0: 4, "a": 1.5})


def masked(mode: str, totals: StepTotals) -> Call:
    """A micro-batch without an active token."""
    return lambda: make_pg_loss_reducer(mode, [torch.zeros(2)], totals=totals, prompt_ids=[0])(torch.ones(2))


REFUSALS: dict[str, tuple[Call, type[Exception], str, Call]] = {
    # refused call, error, fragment of its text, accepted neighbour
    "negative count": (
        lambda: StepTotals(num_rollouts=-1),
        ValueError,
        "num_rollouts is -1: it must be a finite number >= 0",
        lambda: StepTotals(num_rollouts=0),
    ),
    "NaN count": (
        lambda: StepTotals(step_tokens=NAN),
        ValueError,
        "step_tokens is nan",
        lambda: StepTotals(step_tokens=0.5),
    ),
    "infinite count": (
        lambda: StepTotals(num_prompts=INF),
        ValueError,
        "num_prompts is inf",
        lambda: StepTotals(num_prompts=10**9),
    ),
    "bool count": (
        lambda: StepTotals(num_rollouts=True),
        ValueError,
        "num_rollouts is True",
        lambda: StepTotals(num_rollouts=1),
    ),
    "string count": (
        lambda: StepTotals(step_active_tokens="9"),
        ValueError,
        "step_active_tokens is '9'",
        lambda: StepTotals(step_active_tokens=9),
    ),
    "negative tokens of a unit": (
        lambda: StepTotals(prompt_tokens={0: -1.0}),
        ValueError,
        "token count of prompt_ids 0 is -1.0",
        lambda: StepTotals(prompt_tokens={0: 0.0}),
    ),
    "NaN tokens of a unit": (
        lambda: StepTotals(rollout_tokens={"a": NAN}),
        ValueError,
        "token count of rollout_ids 'a' is nan",
        lambda: StepTotals(rollout_tokens={"a": 0.5}),
    ),
    "bool tokens of a unit": (
        lambda: StepTotals(rollout_tokens={0: True}),
        ValueError,
        "is True",
        lambda: StepTotals(rollout_tokens={0: 1}),
    ),
    "a mapping for a count": (
        lambda: StepTotals(num_rollouts={0: 1}),
        ValueError,
        "num_rollouts",
        lambda: StepTotals(rollout_tokens={0: 1}),
    ),
    "a count for a mapping": (
        lambda: StepTotals(prompt_tokens=4.0),
        (TypeError, ValueError),
        "prompt_tokens",
        lambda: StepTotals(prompt_tokens={}),
    ),
    "ids of a mapping": (
        lambda: StepTotals(prompt_tokens={0.5: 1}),
        TypeError,
        r"prompt_ids holds 0.5 \(float\)",
        lambda: StepTotals(prompt_tokens={5: 1}),
    ),
    "unknown int id": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 1]),
        ValueError,
        "prompt_ids of sample 1 has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, "a"]),
    ),
    "unknown string id": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["a", "b"]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["a", "a"]),
    ),
    "an int id is not its string": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["0", "a"]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, "a"]),
    ),
    "unknown id among none": (
        lambda: by_hand("prompt_mean", replace(PROMPTS, prompt_tokens={}), prompt_ids=[0, 0]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 0]),
    ),
    **{
        f"rollout ids in the totals only, {mode}": (
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, prompt_ids=[0, 0]),
            ValueError,
            "totals made with rollout_ids, a micro-batch without",
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, prompt_ids=[0, 0], rollout_ids=[0, 0]),
        )
        for mode in MODES
        if mode != "token_sum"  # it has one unit, whatever the ids
    },
    **{
        f"active tokens in a step of no {mode} unit": (
            lambda mode=mode, totals=totals: by_hand(mode, totals, prompt_ids=[0, 0]),
            ValueError,
            field,
            masked(mode, totals),
        )
        for mode, field, totals in [
            ("token_mean", "step_tokens", StepTotals(step_tokens=0)),
            ("sample_mean", "num_rollouts", StepTotals(num_rollouts=0)),
            ("prompt_mean", "unit's tokens", StepTotals(num_prompts=1, prompt_tokens={0: 0})),
        ]
    },
    "rollout ids in the micro-batch only": (
        lambda: by_hand("sample_mean", totals_of([]), rollout_ids=[0, 0]),
        ValueError,
        "totals without rollout_tokens",
        lambda: by_hand("sample_mean", WITH_ROLLOUTS, rollout_ids=[0, 0]),
    ),
    "prompt_mean without prompt ids": (
        lambda: by_hand("prompt_mean", PROMPTS),
        ValueError,
        "'prompt_mean' without prompt_ids",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 0]),
    ),
    "unknown mode": (
        lambda: by_hand("dapo", WITH_ROLLOUTS),
        ValueError,
        "'dapo': there is no such mode. Choose one of sample_mean, prompt_mean, token_mean, constant",
        lambda: by_hand("token_mean", StepTotals(step_tokens=1)),
    ),
    "unknown counting": (
        lambda: by_hand("token_mean", StepTotals(step_tokens=1), units="some"),
        ValueError,
        "'some': there is no such counting. Choose one of all, active",
        lambda: by_hand("token_mean", StepTotals(step_tokens=1), units="active"),
    ),
    "constant without a divisor": (
        lambda: by_hand("constant", StepTotals(num_rollouts=1), divisor=None),
        ValueError,
        "'constant' without a divisor",
        lambda: by_hand("constant", StepTotals(num_rollouts=1), divisor=1),
    ),
    **{
        f"divisor {value!r}": (
            lambda value=value: by_hand("constant", StepTotals(num_rollouts=1), divisor=value),
            error,
            fragment,
            lambda: by_hand("constant", StepTotals(num_rollouts=1), divisor=1e-3),
        )
        for value, error, fragment in [
            (0, ValueError, "divisor 0: it must be finite and above 0"),
            (-8, ValueError, "divisor -8"),
            (NAN, ValueError, "divisor nan"),
            (INF, ValueError, "divisor inf"),
            (1e30, ValueError, "below 1e30"),
            (True, TypeError, r"divisor True \(bool\)"),
            ("8", TypeError, r"divisor '8' \(str\)"),
        ]
    },
    **{
        f"divisor with {mode}": (
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, divisor=8, rollout_ids=[0, 0], prompt_ids=[0, 0]),
            ValueError,
            f"divisor 8 with loss aggregation '{mode}': only 'constant' and 'token_sum' have",
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, rollout_ids=[0, 0], prompt_ids=[0, 0]),
        )
        for mode in MODES
        if divisor_of(mode) is None
    },
}


@pytest.mark.parametrize(("refused", "error", "fragment", "accepted"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(refused: Call, error: type[Exception], fragment: str, accepted: Call) -> None:
    with pytest.raises(error, match=fragment):
        refused()
    accepted()


# --- samples


def of_masks(*masks: Any, **keywords: Any) -> Call:
    return lambda: Samples(list(masks), **keywords)


ONE, TWO = torch.ones(1), torch.ones(2)

SAMPLE_REFUSALS: dict[str, tuple[Call, type[Exception], str, Call]] = {
    "negative": (
        of_masks(TWO, torch.tensor([1.0, -0.5])),
        ValueError,
        "sample 1 holds -0.5: token weights must be finite and >= 0",
        of_masks(TWO, torch.tensor([1.0, 0.5])),
    ),
    "negative int": (of_masks(torch.tensor([-1])), ValueError, "sample 0 holds -1.0", of_masks(torch.tensor([1]))),
    "NaN": (
        of_masks(torch.ones(0), torch.tensor([NAN])),
        ValueError,
        "sample 1 holds nan",
        of_masks(torch.ones(0), torch.tensor([0.0])),
    ),
    "Inf": (of_masks(torch.tensor([INF]), TWO), ValueError, "sample 0 holds inf", of_masks(torch.tensor([1e30]), TWO)),
    "2-D": (
        of_masks(torch.ones(1, 2)),
        ValueError,
        r"sample 0 has shape \(1, 2\): it must be 1-D",
        of_masks(torch.ones(1, 2)[0]),
    ),
    "0-D": (of_masks(TWO, torch.tensor(1)), ValueError, r"sample 1 has shape \(\)", of_masks(TWO, torch.tensor([1]))),
    "a list for a mask": (of_masks([1, 1]), TypeError, "sample 0 is a list", of_masks(torch.tensor([1, 1]))),
    "complex": (
        of_masks(TWO, torch.ones(2, dtype=torch.complex64)),
        TypeError,
        "sample 1 is torch.complex64",
        of_masks(TWO, torch.ones(2, dtype=torch.float16)),
    ),
    "one tensor for the list": (
        lambda: Samples(torch.ones(2, 3)),
        TypeError,
        r"one tensor of shape \(2, 3\).*list\(loss_masks\)",
        lambda: Samples(list(torch.ones(2, 3))),
    ),
    "too few ids": (
        of_masks(ONE, TWO, rollout_ids=[0]),
        ValueError,
        "1 rollout_ids for 2 loss masks",
        of_masks(ONE, TWO, rollout_ids=[0, 0]),
    ),
    "too many ids": (
        of_masks(ONE, prompt_ids=[0, 1]),
        ValueError,
        "2 prompt_ids for 1 loss masks",
        of_masks(ONE, prompt_ids=[0]),
    ),
    "ids for no sample": (of_masks(prompt_ids=[0]), ValueError, "1 prompt_ids for 0", of_masks(prompt_ids=[])),
    "float id": (
        of_masks(ONE, prompt_ids=[0.0]),
        TypeError,
        r"prompt_ids holds 0.0 \(float\)",
        of_masks(ONE, prompt_ids=["0.0"]),
    ),
    "float tensor of ids": (
        of_masks(ONE, rollout_ids=torch.tensor([1.0])),
        TypeError,
        "rollout_ids holds 1.0",
        of_masks(ONE, rollout_ids=torch.tensor([1])),
    ),
    "2-D tensor of ids": (
        of_masks(ONE, rollout_ids=torch.tensor([[1]])),
        TypeError,
        r"holds \[1\] \(list\)",
        of_masks(ONE, rollout_ids=torch.tensor([1])),
    ),
    "bool id": (of_masks(ONE, prompt_ids=[True]), TypeError, "holds True", of_masks(ONE, prompt_ids=[1])),
    "None as an id": (of_masks(ONE, prompt_ids=[None]), TypeError, "holds None", of_masks(ONE, prompt_ids=None)),
    "bytes id": (of_masks(ONE, prompt_ids=[b"a"]), TypeError, r"b'a' \(bytes\)", of_masks(ONE, prompt_ids=["a"])),
    "id too large": (
        of_masks(ONE, prompt_ids=[2**61]),
        ValueError,
        "beyond 61 bits",
        of_masks(ONE, prompt_ids=[2**61 - 1]),
    ),
    "id too small": (
        of_masks(ONE, rollout_ids=[-(2**61)]),
        ValueError,
        "beyond 61 bits",
        of_masks(ONE, rollout_ids=[1 - 2**61]),
    ),
    "id beyond int64": (
        of_masks(ONE, rollout_ids=[2**70]),
        ValueError,
        "Pass them as strings",
        of_masks(ONE, rollout_ids=[str(2**70)]),
    ),
}


@pytest.mark.parametrize(
    ("refused", "error", "fragment", "accepted"), SAMPLE_REFUSALS.values(), ids=SAMPLE_REFUSALS.keys()
)
def test_sample_refusals(refused: Call, error: type[Exception], fragment: str, accepted: Call) -> None:
    with pytest.raises(error, match=fragment) as caught:
        refused()
    assert caught.type is error
    accepted()


def test_one_rollout_under_two_prompts_is_refused() -> None:
    """Anywhere in the step: ids that repeat from prompt to prompt would join rollouts that have nothing in common."""
    with pytest.raises(ValueError, match="one rollout id is used under two prompt ids"):
        StepTotals.from_loss_masks([ONE, TWO], rollout_ids=[0, 0], prompt_ids=[0, 1])
    StepTotals.from_loss_masks([ONE, TWO], rollout_ids=[0, 0], prompt_ids=[1, 1])
    StepTotals.from_loss_masks([ONE, TWO], rollout_ids=[0, 1], prompt_ids=[0, 0])


@pytest.mark.parametrize(
    "rename",
    [str, lambda i: f"rollout/{i}", lambda i: i - 5, lambda i: i * 2**55],
    ids=["str", "path", "shift", "large"],
)
@quick
@given(step=steps())
def test_ids_only_group(rename: Callable[[int], int | str], step: Step) -> None:
    """Any ids that group alike give the same loss."""
    number = {key: i for i, key in enumerate(dict.fromkeys(one.prompt_id for one in step.samples))}
    rollout = {key: i for i, key in enumerate(dict.fromkeys(one.rollout_id for one in step.samples))}
    renamed = [
        replace(
            one,
            prompt_id=rename(number[one.prompt_id]),
            rollout_id=None if one.rollout_id is None else rename(rollout[one.rollout_id]),
        )
        for one in step.samples
    ]
    for mode in ("sample_mean", "prompt_mean"):
        assert_equals_oracle(run_step(renamed, step.microbatches, mode), step.samples, mode)


# --- reducers of the user's own


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An own, empty registry for one test."""
    names: dict[str, Any] = {}
    monkeypatch.setattr(reducers, "_REGISTERED", names)
    return names


def plain_sum(inputs: ReducerInputs) -> reducers.Reducer:
    return inputs.weighted_sum(inputs.samples.loss_masks)


@pytest.mark.usefixtures("registry")
def test_docstring_examples() -> None:
    result = doctest.testmod(reducers)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.usefixtures("registry")
@every_layout
def test_a_registered_reducer_is_a_mode(place: Place, cp_size: int) -> None:
    assert register_pg_loss_reducer("plain_sum")(plain_sum) is plain_sum
    assert available_modes() == (*MODES, "plain_sum")
    step = [one.poisoned() for one in WORKED]
    outcome = run_step(step, [[3, 1], [0, 2]], "plain_sum", place=place, cp_size=cp_size)
    assert outcome.value == pytest.approx(27.5)
    assert outcome.gradient.tolist() == torch.cat([one.mask for one in WORKED]).tolist()


@pytest.mark.usefixtures("registry")
def test_a_registered_reducer_is_given_everything() -> None:
    seen: list[ReducerInputs] = []

    @register_pg_loss_reducer("spy")
    def spy(inputs: ReducerInputs) -> reducers.Reducer:
        seen.append(inputs)
        return plain_sum(inputs)

    totals, layout = StepTotals(), Gathered([0, 1])
    make_pg_loss_reducer(
        "spy",
        [ONE],
        totals=totals,
        divisor=3.0,
        units="active",
        rollout_ids=[4],
        prompt_ids=["a"],
        layout=layout,
        cp_rank=1,
        cp_size=2,
    )
    (inputs,) = seen
    assert (inputs.divisor, inputs.units, inputs.cp_rank, inputs.cp_size) == (3.0, "active", 1, 2)
    assert inputs.totals is totals
    assert inputs.samples.layout is layout
    assert inputs.samples.rollout_ids.tolist() == [4]
    assert inputs.samples.prompt_ids is not None


def weigh(*weights: Tensor) -> Call:
    inputs = ReducerInputs(samples=Samples([torch.ones(3), torch.ones(2)]), totals=StepTotals())
    return lambda: float(inputs.weighted_sum(weights)(torch.ones(5)))


REGISTER_REFUSALS: dict[str, tuple[Call, type[Exception], str, Call]] = {
    "taken": (
        lambda: register_pg_loss_reducer("mine"),
        ValueError,
        "'mine': it is taken",
        lambda: register_pg_loss_reducer("mine2"),
    ),
    "a built-in": (
        lambda: register_pg_loss_reducer("token_mean"),
        ValueError,
        "'token_mean': it is taken",
        lambda: register_pg_loss_reducer("token_means"),
    ),
    "no identifier": (
        lambda: register_pg_loss_reducer("my-sum"),
        ValueError,
        "'my-sum': it must be a Python identifier",
        lambda: register_pg_loss_reducer("my_sum"),
    ),
    "empty": (lambda: register_pg_loss_reducer(""), ValueError, "''", lambda: register_pg_loss_reducer("x")),
    "no string": (
        lambda: register_pg_loss_reducer(plain_sum),
        ValueError,
        "identifier",
        lambda: register_pg_loss_reducer("plain_sum"),
    ),  # type: ignore[arg-type]
    "not callable": (
        lambda: register_pg_loss_reducer("x")(3),
        TypeError,
        "reducer 'x' is a int: it must be a function",
        lambda: register_pg_loss_reducer("x")(plain_sum),  # type: ignore[arg-type]
    ),
    "weights of other lengths": (
        weigh(torch.ones(2), torch.ones(3)),
        ValueError,
        r"lengths \[2, 3\].*\[3, 2\]",
        weigh(torch.ones(3), torch.ones(2)),
    ),
    "weights missing": (
        weigh(torch.ones(5)),
        ValueError,
        r"lengths \[5\]",
        weigh(torch.ones(3).bool(), torch.ones(2).int()),
    ),
    "weights of no sample": (weigh(), ValueError, r"lengths \[\]", weigh(torch.zeros(3), torch.zeros(2))),
}


@pytest.mark.parametrize(
    ("refused", "error", "fragment", "accepted"), REGISTER_REFUSALS.values(), ids=REGISTER_REFUSALS.keys()
)
def test_register_refusals(
    refused: Call, error: type[Exception], fragment: str, accepted: Call, registry: dict[str, Any]
) -> None:
    registry["mine"] = plain_sum
    with pytest.raises(error, match=fragment):
        refused()
    assert list(registry) == ["mine"]
    accepted()


def test_weighted_sum_takes_weights_of_another_sign_and_gives_no_gradient_to_them() -> None:
    weights = [torch.tensor([1.0, -2.0], requires_grad=True)]
    inputs = ReducerInputs(samples=Samples([TWO]), totals=StepTotals())
    losses = torch.tensor([3.0, 5.0], requires_grad=True)
    share = inputs.weighted_sum(weights)(losses)
    share.backward()
    assert float(share.detach()) == -7
    assert losses.grad.tolist() == [1, -2]
    assert weights[0].grad is None


def test_a_divisor_reaches_registered_reducers_only_if_it_is_usable(registry: dict[str, Any]) -> None:
    registry["mine"] = plain_sum
    with pytest.raises(ValueError, match="divisor 0"):
        make_pg_loss_reducer("mine", [ONE], totals=StepTotals(), divisor=0)
    make_pg_loss_reducer("mine", [ONE], totals=StepTotals(), divisor=1)

"""Counting over real gloo groups: weights on every rank against the oracle, errors that reach all ranks, collectives.

All cases run in one launch of four ranks. Not exercised here: NCCL, and the groups Megatron makes.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from placements import PLACES, gathered, thd
from ranks import run_ranks, start_process_group
from refusals import outcome_of, refusal_tests, refusals
from repository import ROOT
from steps import divisor_of, drawn_step, error_of, samples_of, token_weights, weights_of

from megatron_rl_loss import Contiguous, Samples, StepTotals, Sum, ZigzagTHD
from megatron_rl_loss.core import counting, plan
from megatron_rl_loss.core.aggregation import LossModes
from megatron_rl_loss.core.collectives import StepGroups, attempt
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.core.errors import BadBatchError
from megatron_rl_loss.core.plan import make_plan
from megatron_rl_loss.core.record import Trainer

RANKS = 4
#: By name: the ranks of data-parallel groups, and those of the groups of replicas.
GRIDS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "dp4": ([[0, 1, 2, 3]], []),
    "dp2 x 2": ([[0, 2], [1, 3]], [[0, 1], [2, 3]]),
    "stages": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),  # of which the first reads data
    "dp1 x 4": ([[0], [1], [2], [3]], [[0, 1, 2, 3]]),
    "alone": ([[0], [1], [2], [3]], []),
}
Groups = dict[tuple[int, ...], Any]


def all_groups() -> Groups:
    lists = [ranks for grid in GRIDS.values() for part in grid for ranks in part]
    return {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(map(tuple, lists)))}


def groups_of(grid: str, rank: int, by_ranks: Groups) -> StepGroups:
    dp, replicas = ([by_ranks[tuple(ranks)] for ranks in part if rank in ranks] for part in GRIDS[grid])
    return StepGroups(dp[0], None, tuple(replicas))


# --- weights over ranks

SEEDS = range(3 * len(PLACES))  # three kinds of groups in every layout


def weights_on(rank: int, by_ranks: Groups) -> tuple[float, int, list[bytes]]:
    """The worst error of this rank's weights over random steps, how many were compared, and totals as bytes."""
    worst, vectors, bits, countings = 0.0, 0, list[bytes](), [*oracle.UNITS]
    for seed in SEEDS:
        kind, units = ("dp4", "dp2 x 2", "dynamic")[seed % 3], countings[seed // 3 % len(countings)]
        place = PLACES[seed // 3 % len(PLACES)] if kind != "dynamic" else (thd, gathered)[seed // 3 % 2]
        if kind == "dynamic":  # the k-th micro-batch is cut for 1, 2 or 4 ranks
            sizes = [(1, 2, 4)[(seed // 3 + k) % 3] for k in range(3)]
            step = drawn_step(seed, 1, sum(RANKS // size for size in sizes))
            starts = [sum(RANKS // size for size in sizes[:k]) for k in range(3)]
            mine = [(step.hands[0][at + rank // size], size) for at, size in zip(starts, sizes, strict=True)]
            by_size = {4: by_ranks[0, 1, 2, 3], 2: by_ranks[(0, 1) if rank < 2 else (2, 3)], 1: by_ranks[rank,]}
            groups = StepGroups(by_size[4])
        else:
            size = 1 if kind == "dp4" else 2
            step = drawn_step(seed, RANKS // size, 2)
            mine = [(hand, size) for hand in step.hands[rank // size]]
            groups = groups_of(kind, rank, by_ranks)
        described, holds = [], []
        for hand, size in mine:
            own = {"cp_group": by_size[size]} if kind == "dynamic" else {}
            if not hand:
                described.append(Samples([], **own))
                continue
            chosen = [step.samples[i] for i in hand]
            at = place([len(sample.mask) for sample in chosen], size)
            described.append(samples_of(chosen, at, **own))
            holds.append((hand, size, at, described[-1]))
        totals = count_step(described, groups, settings=kind)
        bits.append(repr((totals.step_tokens, totals.step_entries, totals.units["rollout"].number["all"])).encode())
        for mode in (*oracle.MODES, *oracle.BY_IDS):
            right = weights_of(mode, step.samples, units)
            for hand, size, at, samples in holds:
                asked: dict[str, Any] = {"divisor": divisor_of(mode), "units": units}
                weights = token_weights(mode, samples, totals, cp_rank=rank % size, cp_size=size, **asked)
                copies = size if place is gathered else 1
                expected = [right[hand[t[0]]][t[1]] / copies if t else 0.0 for t in at.held[rank % size]]
                worst, vectors = max(worst, error_of(weights, expected)), vectors + 1
    return worst, vectors, bits


# --- what every rank is told


def samples(masks: Any = None, **options: Any) -> list[Samples]:
    return [Samples(masks or [[1] * 8] * 2, layout=ZigzagTHD([0, 8, 16]), **options)]


def broken() -> Any:
    raise OSError("the disk is full")


@dataclass(frozen=True)
class Case:
    """The samples that each rank prepares, and fragments of the error on all ranks of the grid; () where they count."""

    grid: str
    prepare: Callable[[int], Any]
    told: tuple[str, ...] = ()
    options: Callable[[int], dict[str, Any]] = field(default=lambda rank: {})
    is_long: bool = False  # the longest tally does not fit into the first all-gather


def by_key(rank: int, *ids: int) -> dict[str, Any]:
    return {"rollout_ids": [rank * 10 + i for i in ids]}


def turns(*ids: Any) -> dict[str, Any]:
    return {"turn": [[turn] * 8 for turn in ids]}


def planned(mode: Any, **options: Any) -> Callable[[int], Any]:
    """A plan in place of a count: what a mode asks for is looked at before any collective."""
    return lambda rank: {"plan": mode(rank) if callable(mode) else mode, **{k: v(rank) for k, v in options.items()}}


KL = {"kl": [[1] * 8] * 2}
OTHER = "asks for .*another rank for something else: all ranks must aggregate alike"
IDS = "and other ids on other ranks: each kind of id must be given on all DP ranks or none, as ints on all or as"
UNLIKE = "ranks of one context, tensor or pipeline parallel group were given different samples"
TWO_PROMPTS = "one rollout id is used under two prompt ids"
TWICE = "DP ranks 0 and 2 hold samples with the same masks, ids and tokens: these samples count twice"
CP_UNLIKE = "ranks of a micro-batch's cp_group were given different samples, or the same in another order"
CASES: dict[str, Case] = {
    # --- one rank fails, every rank says so
    "a loader": Case("dp4", lambda r: broken() if r == 2 else samples(), ("rank 2: OSError: the disk is full",)),
    "a mask": Case("dp4", lambda r: samples([[1] * 8, [1, -1] * 4 if r == 1 else [1] * 8]),
                   ("rank 1: ValueError: the loss mask of sample 1 holds -1", "before the optimizer ran")),
    "two errors": Case("dp4", lambda r: broken() if r % 2 else samples(), ("ranks 1, 3: OSError",)),
    "a loader on a replica": Case("dp2 x 2", lambda r: broken() if r == 3 else samples(), ("rank 3: OSError",)),
    "a loader, two groups away": Case("stages", lambda r: (broken() if r == 1 else samples()) if r < 2 else None,
                                      ("rank 1: OSError",)),
    "a declared sum": Case("dp4", lambda r: samples(), ("rank 3: ValueError: a declared sum of",),
                           lambda r: {"sums": [Sum(of=lambda s: [1.0, float("nan") if r == 3 else 1])]}),
    "a key that a mode asks for": Case("dp4", lambda r: samples(prompt_ids=["a", "b"] if r else None),
                                       ("rank 0: ValueError: .*'prompt_mean' and samples without prompt_ids",),
                                       planned("prompt_mean")),
    # --- settings that differ
    "modes": Case("dp4", lambda r: samples(), (OTHER,), planned(lambda r: ("token_mean", "sample_mean")[r == 3])),
    "modes of replicas": Case("dp2 x 2", lambda r: samples(**by_key(r // 2, 0, 1)), (OTHER,),
                              planned(lambda r: ("token_mean", "sample_mean")[r == 3])),
    "per_token_loss": Case("dp4", lambda r: samples(), (OTHER, "per_token_loss"),
                           planned("token_mean", per_token_loss=lambda r: r == 1)),
    "names of term masks": Case("dp4", lambda r: samples(term_masks=KL), (OTHER,),
                                planned("token_mean", term_masks=lambda r: ["kl"] if r else [])),
    "a term mask on some ranks": Case("dp4", lambda r: samples(term_masks=KL if r else None),
                                      ("rank 0: ValueError: the samples have no mask 'kl'",),
                                      planned("token_mean", term_masks=lambda r: ["kl"])),
    "sums on some ranks": Case("dp4", lambda r: samples(), (OTHER,),
                               lambda r: {"sums": [Sum(of=lambda s: s.mask_sums)] * (r == 1)}),
    # --- ids
    "ints and strings": Case("dp4", lambda r: samples(rollout_ids=[f"{r}a", f"{r}b"] if r else [0, 1]), (IDS,)),
    "ids on some ranks": Case("dp4", lambda r: samples(prompt_ids=[r, r] if r else None), (IDS,)),
    "own ids on some": Case("dp4", lambda r: samples(ids={"task": [1, r]} if r == 2 else None), (IDS,)),
    "ids on some micro-batches": Case("dp4", lambda r: samples(**by_key(r, 1, 2)) + samples() * (r == 3),
                                      ("rank 3: ValueError: micro-batches with ids of",)),
    "no ids on a rank without samples": Case("dp4", lambda r: samples(**by_key(r, 1, 2)) if r else [Samples([])]),
    "turns on some": Case("dp4", lambda r: samples(ids={"turn": [[r] * 8, [9] * 8]} if r else
                                                   {"turn": [r, 9]}), (IDS,)),
    "no turn on one rank": Case("dp4", lambda r: samples([[1] * 8, [0] * 8] if r else [[0] * 8] * 2, ids={
                                "turn": [[f"t{r}" * (r > 0)] * 8, [""] * 8]})),
    "turns as ints and as strings": Case("dp4", lambda r: samples(ids=turns(0, 1) if r else turns("a", "b")), (IDS,)),
    "turns of two types on a rank": Case("dp4", lambda r: samples(ids=turns(0, 1)) + samples(
                                         ids=turns("a", "b") if r == 3 else turns(2, -1)),
                                         ("rank 3: ValueError: micro-batches with ids of .*int per token",)),
    "turns of 0, and strings": Case("dp4", lambda r: samples(ids=turns(0, 0)) + samples(ids=turns("a", "b")) * (r == 3),
                                    ("rank 3: ValueError: micro-batches with ids of .*int per token",)),
    "no turn in one micro-batch": Case("dp4", lambda r: samples([[0] * 8] * 2, ids=turns(-1, -1)) + samples(
                                       ids=turns(f"a{r}", "b"))),
    "two prompts on one rank": Case("dp4", lambda r: samples(rollout_ids=[r, r], prompt_ids=["a", "ba"[r > 0]]),
                                    (TWO_PROMPTS, "rank 0")),
    "two prompts on two ranks": Case("dp4", lambda r: samples(rollout_ids=[r, 9], prompt_ids=[f"p{r}", f"q{r // 3}"]),
                                     (TWO_PROMPTS,)),
    # --- labels
    "a label on some ranks": Case("dp4", lambda r: samples(labels={"counted": [True, False]} if r else None)),
    # --- replicas
    "replicas agree": Case("dp2 x 2", lambda r: samples(**by_key(r // 2, 1, 2), labels={"a": [{1}, object()]})),
    "other masks": Case("dp2 x 2", lambda r: samples([[1] * 8, [int(r != 1)] * 8], **by_key(r // 2, 1, 2)), (UNLIKE,)),
    "another order": Case("dp2 x 2", lambda r: samples(**by_key(r // 2, *((1, 2), (2, 1))[r == 3])), (UNLIKE,)),
    "DP shards swapped": Case("dp2 x 2", lambda r: samples(**by_key((r // 2 + (r % 2)) % 2, 1, 2)), (UNLIKE,)),
    "another layout": Case("dp1 x 4", lambda r: [Samples([[1] * 8], layout=(ZigzagTHD, Contiguous)[r == 2]([0, 8]))],
                           (UNLIKE, "cut it alike")),
    "other tokens": Case("dp1 x 4", lambda r: samples(tokens=torch.arange(16) + (r == 1)), (UNLIKE,)),
    "a function's sums": Case("dp1 x 4", lambda r: samples(), (UNLIKE,),
                              lambda r: {"sums": [Sum(of=lambda s: [1.0, r])]}),
    # --- data-parallel groups
    "twins": Case("dp4", lambda r: samples(**by_key(r % 2, 1, 2)), (TWICE,)),
    "masks that are alike by chance": Case("dp4", lambda r: samples()),
    "replicas in the dp_group": Case("dp4", lambda r: samples(), ("a dp_group that shares the ranks",),
                                     lambda r: {"replicas of": "dp2 x 2"}),
    "many samples on one rank": Case("dp4", lambda r: samples() if r else [Samples([[1]] * 40, ids={"x": range(40)})],
                                     (IDS,)),
    "many rollouts on one rank": Case("dp4", lambda r: [Samples([[1]] * n, rollout_ids=[f"{r} {i}" for i in range(n)])
                                      for n in (40 * (r == 2) + 1,)], is_long=True),
    # --- stages without data
    "a stage without data": Case("stages", lambda r: samples(**by_key(r, 1, 2)) if r < 2 else None),
    "data on one DP rank": Case("dp4", lambda r: samples() if r else None, ("rank 0: .* has no data iterator",)),
    "on a part of one stage": Case("stages", lambda r: samples() if r < 3 else None, ("rank 3: .* no data iterator",)),
    "data nowhere": Case("stages", lambda r: None, ("no rank reads data for this step",)),
    # --- context-parallel groups of their own
    "a cp_group of other samples": Case("dp4", lambda r: samples([[1] * 8, [int(r != 1)] * 8]), (CP_UNLIKE,),
                                        lambda r: {"own group": 2}),
    "a cp_group of another order": Case("dp4", lambda r: samples() + samples([[1] * 8, [0] * 8])[:: 1] if r != 2
                                        else samples([[1] * 8, [0] * 8]) + samples(), (CP_UNLIKE,),
                                        lambda r: {"own group": 2}),
    "a cp_group beyond the dp_group": Case("alone", lambda r: samples(), ("and a dp_group of",),
                                           lambda r: {"own group": 4}),
}  # fmt: skip
NAMES = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))]
Observed = tuple[str, dict[str, int], list[str]]


def recorder(calls: dict[str, int], name: str, function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return function(*args, **kwargs)

    return counted


def observed(case: Case, rank: int, by_ranks: Groups) -> Observed:
    """Outcome, collectives that were called, warnings."""
    options, groups = case.options(rank), groups_of(case.grid, rank, by_ranks)
    if "replicas of" in options:
        groups = StepGroups(groups.dp_group, None, groups_of(options.pop("replicas of"), rank, by_ranks).replica_groups)
    size = options.pop("own group", None)

    def prepare() -> Any:
        of_rank = case.prepare(rank)
        for samples in of_rank if size else ():
            samples.cp_group = by_ranks[tuple(range(rank // size * size, (rank // size + 1) * size))]
        return of_rank

    def act() -> Any:
        if "plan" not in options:
            return count_step(attempt(prepare), groups, **options)
        modes, masks = LossModes.resolve(options["plan"]), options.get("term_masks", [])
        trainer = Trainer(groups=groups, per_token_loss=options.get("per_token_loss", False))
        return make_plan(prepare, modes, trainer, term_masks=masks)

    calls: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in filter(lambda name: callable(getattr(dist, name)), NAMES):
            patch.setattr(dist, name, recorder(calls, name, getattr(dist, name)))
        outcome = outcome_of(act)
    return outcome, calls, [str(warning.message) for warning in seen if warning.category is UserWarning]


def on_rank() -> tuple[tuple[float, int, list[bytes]], dict[str, Observed]]:
    start_process_group()
    rank, by_ranks = int(os.environ["RANK"]), all_groups()
    of_weights = weights_on(rank, by_ranks)
    of_cases = {}
    for name, case in CASES.items():
        of_cases[name] = observed(case, rank, by_ranks)
        dist.barrier()
    return of_weights, of_cases


@pytest.fixture(scope="module")
def by_rank() -> list[Any]:
    return run_ranks(RANKS, on_rank)


def test_weights_on_every_rank(by_rank: list[Any], record_property: Callable[[str, object], None]) -> None:
    """DP 4, DP 2 x CP 2, and context-parallel groups that change between micro-batches."""
    of_ranks = [of_weights for of_weights, _ in by_rank]
    assert max(worst for worst, _, _ in of_ranks) < oracle.EXACT
    assert len({tuple(bits) for _, _, bits in of_ranks}) == 1  # the same totals on every rank, to the bit
    vectors = sum(number for _, number, _ in of_ranks)
    assert vectors > 500
    record_property("weight_vectors_over_ranks", vectors)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_count_or_all_are_told_why(name: str, by_rank: list[Any]) -> None:
    """An all-gather over DP, a second one of what is long, one over each group of replicas; more only for an error."""
    case = CASES[name]
    for rank, (_, of_cases) in enumerate(by_rank):
        outcome, calls, warned = of_cases[name]
        if case.told:
            assert (
                outcome.startswith(("BadBatchError: ", "ValueError: a dp_group that shares")) or case.grid == "alone"
            ), outcome
            assert all(re.search(f"(?s){part}", outcome) for part in case.told), outcome
            continue
        assert outcome == "accepted"
        of_dp = 0 if len(GRIDS[case.grid][0][0]) == 1 else 2 if case.is_long else 1
        of_replicas = sum(rank in ranks for ranks in GRIDS[case.grid][1])
        assert [name.replace("into_tensor", "single") for name in calls] == ["all_gather_single"]
        assert [*calls.values()] == [of_dp + of_replicas]
        assert not warned


# --- alone


def test_a_counting_is_counted_where_all_samples_have_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is counted of a key is listed once."""
    listed = list[str]()

    def columns(key: str, *args: Any, **options: Any) -> Any:
        listed.append(key)
        return real(key, *args, **options)

    real = counting._columns
    monkeypatch.setattr(counting, "_columns", columns)
    flagged: Any = {"labels": {"counted": [True, False]}, "rollout_ids": [0, 1]}
    plain: Any = {"rollout_ids": [2, 2]}
    for parts, known in (([flagged], True), ([flagged, plain], False), ([plain], False), ([], True)):
        listed.clear()
        totals = count_step([Samples([[0, 0], [1]], **part) for part in parts], StepGroups())
        assert all(("counted" in units.number) == known for units in totals.units.values())
        assert len(set(listed)) == len(listed)
    totals = count_step([Samples([[0, 0], [0], [1]], labels={"counted": [True, False, False]})], StepGroups())
    assert totals.units["rollout"].number == {"all": 3, "active": 1, "counted": 2}


def test_a_unit_travels_in_as_many_bytes_as_the_page_says() -> None:
    page, sent = " ".join((ROOT / "docs" / "performance.md").read_text().split()), []
    for labels in ({}, {"counted": [True]}):
        of_key = [Samples([[1]], prompt_ids=[0], labels=labels)]
        columns = partial(counting._columns, masks=[], sums=[])
        (unit,) = [len(counting._tally(of_key, StepGroups(), columns, 0).tables["prompt"])]
        sent.append(unit)
    assert f"Each rank sends {sent[0]} bytes for each rollout" in page
    assert f"({sent[1]} if the samples have the label `counted`)" in page


def test_what_a_device_found_wrong_is_raised_where_ranks_raise_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LATE_CHECKS", [broken])
    with pytest.raises(OSError, match="the disk is full"):
        make_plan(lambda: samples(), LossModes.resolve("token_mean"), Trainer())


def test_errors_alone_are_plain() -> None:
    for error in (OSError("the disk is full"), ValueError("x")):
        with pytest.raises(type(error), match=str(error)):
            count_step(error, StepGroups())
    with pytest.raises(BadBatchError, match="no rank reads data"):
        count_step(None, StepGroups())
    assert count_step([], StepGroups()).units["rollout"].number["all"] == 0


test_refusals = refusal_tests(
    {
        **refusals(
            lambda **ids: StepTotals.of(Samples([[1], [1, 1]], **ids)),
            ({"rollout_ids": [0, 0], "prompt_ids": [0, 1]}, f"{TWO_PROMPTS}.*Join prompt and rollout index into one id",
             {"rollout_ids": [0, 0], "prompt_ids": [1, 1]}),
        ),
    }
)  # fmt: skip

"""The totals of a step: alone, and over real gloo groups of 1, 2 and 4 data-parallel (DP) ranks with replicas.

All cases of the table `CASES` run in one launch of four ranks. A case says which ranks hold which samples; every rank
reports what it got, and the tests compare that with plain sums over the union of the samples.
Not exercised here: NCCL, and the groups Megatron makes.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from oracle import WORKED, Sample, mask_tokens, sample, units_of
from ranks import run_ranks, start_process_group
from refusals import Call, Refusal, check_refusal, each_of

from megatron_rl_loss import BadBatchError, Samples, StepTotals, UnitCounts
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.counting import reduce_step_totals
from megatron_rl_loss.step.ids import as_ids
from megatron_rl_loss.step.totals import TokensById

WORLD_SIZE = 4
#: Sums of some hundred numbers in float64, in whatever order.
FLOAT64 = 1e-12


# --- what the totals must be, by plain sums


def expected_fields(step: Sequence[Sample]) -> dict[str, Any]:
    def active(units: list[list[int]]) -> int:
        return sum(mask_tokens([step[i] for i in unit]) > 0 for unit in units)

    rollouts, prompts = units_of("sample_mean", step), units_of("prompt_mean", step)
    by_prompt = any(one.prompt_id is not None for one in step)
    return {
        "step_tokens": pytest.approx(mask_tokens(step), rel=FLOAT64),
        "step_active_tokens": sum(int((one.mask != 0).sum()) for one in step),
        "rollouts.all": len(rollouts),
        "rollouts.active": active(rollouts),
        "prompts.all": len(prompts) if by_prompt else None,
        "prompts.active": active(prompts) if by_prompt else None,
    }


def tokens_by(name: str, step: Sequence[Sample]) -> dict[Any, float]:
    tokens: dict[Any, float] = {}
    for one in step:
        tokens[getattr(one, name)] = tokens.get(getattr(one, name), 0) + mask_tokens([one])
    return tokens


def fields_of(totals: StepTotals) -> dict[str, Any]:
    return {name: attrgetter(name)(totals) for name in expected_fields([])}


def ids_of(samples: Sequence[Sample], name: str) -> list[Any] | None:
    ids = [getattr(one, name) for one in samples]
    return None if None in ids or not ids else ids


def unit_tokens_of(totals: StepTotals, samples: Sequence[Sample]) -> dict[str, dict[Any, float] | None]:
    """What the totals say of this rank's own units, by id."""
    said: dict[str, dict[Any, float] | None] = {}
    for name, tokens in (("rollout_id", totals.rollouts.tokens), ("prompt_id", totals.prompts.tokens)):
        ids = ids_of(samples, name)
        if not isinstance(tokens, TokensById):
            said[name] = None
        elif ids is None:
            said[name] = {}
        else:
            said[name] = dict(zip(ids, tokens.of(name, as_ids(name, ids, len(ids))).tolist(), strict=True))
    return said


def all_totals(step: Sequence[Sample], **groups: Any) -> StepTotals:
    return StepTotals.from_loss_masks(
        [one.mask for one in step],
        rollout_ids=ids_of(step, "rollout_id"),
        prompt_ids=ids_of(step, "prompt_id"),
        **groups,
    )


# --- alone

STEPS: dict[str, list[Sample]] = {
    "worked batch": WORKED,
    "no ids": [sample([0] * 3, [1, 0, 0.5], prompt_id=None), sample([0] * 2, [0, 0], prompt_id=None)],
    "rollouts split": [
        sample([0] * 3, [1, 1, 0], 7, -1),
        sample([0] * 2, [0, 0], 8, -1),
        sample([0] * 3, [0.25, 1, 0], 7, -1),
        sample([0] * 1, [0], 9, 4),
    ],
    "string ids": [sample([0] * 2, [1, 1], "p0/r0", "p0"), sample([0] * 2, [1, 0], "p0/r1", "p0")],
    "rollout and prompt ids overlap": [sample([0], [1], 0, 0), sample([0], [1], 1, 0), sample([0], [1], 2, 1)],
    "empty mask": [sample([], [], 0, 0), sample([0], [1], 1, 1)],
    "no sample": [],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_alone(step: list[Sample]) -> None:
    totals = all_totals(step)
    assert fields_of(totals) == expected_fields(step)
    assert all(isinstance(value, int | None) for name, value in fields_of(totals).items() if name != "step_tokens")
    for name, said in unit_tokens_of(totals, step).items():
        assert said == (tokens_by(name, step) if ids_of(step, name) else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_fractional_masks_are_summed_in_float64(dtype: torch.dtype) -> None:
    mask = torch.full((1_000_003,), 0.1, dtype=dtype)
    # In float64 a sum of a million terms is off by 2^-53 a million times at most.
    assert StepTotals.from_loss_masks([mask]).step_tokens == pytest.approx(1_000_003 * float(mask[0]), rel=1e-9)


@pytest.mark.parametrize(
    ("microbatches", "fragment"),
    [
        ([Samples([torch.ones(1)], rollout_ids=[0]), Samples([torch.ones(1)])], "rollout_ids on 1 of 2"),
        ([Samples([torch.ones(1)]), Samples([torch.ones(1)], prompt_ids=[0])], "prompt_ids on 1 of 2"),
    ],
    ids=["rollout ids", "prompt ids"],
)
def test_ids_on_some_microbatches_only(microbatches: list[Samples], fragment: str) -> None:
    with pytest.raises(ValueError, match=f"{fragment} micro-batches: they must be given on all or none"):
        reduce_step_totals(microbatches)
    # An empty micro-batch has no id to give.
    ids = [0, 1]
    filled = Samples([torch.ones(1)] * 2, rollout_ids=ids, prompt_ids=ids)
    assert reduce_step_totals([Samples([]), filled]).rollouts.all == 2


def test_errors_alone_are_plain() -> None:
    with pytest.raises(ValueError, match="sample 0 holds nan") as caught:
        StepTotals.from_loss_masks([torch.tensor([float("nan")])])
    assert caught.type is ValueError
    with pytest.raises(BadBatchError, match="no rank reads data"):
        reduce_step_totals(None)
    with pytest.raises(RuntimeError, match="the disk is full"):
        reduce_step_totals(RuntimeError("the disk is full"))
    assert reduce_step_totals([]).rollouts.all == 0


# --- refusals, each beside its nearest legal neighbour


def counts(**values: Any) -> Call:
    return lambda: UnitCounts(**values)


def totals_with(**values: Any) -> Call:
    return lambda: StepTotals(**values)


def of_two(**ids: Any) -> Call:
    """Anywhere in the step: ids that repeat from prompt to prompt would join rollouts that have nothing in common."""
    return lambda: StepTotals.from_loss_masks([torch.ones(1), torch.ones(2)], **ids)


NAN, INF = float("nan"), float("inf")
REFUSALS: dict[str, Refusal] = {
    "negative count": (counts(all=-1), ValueError, "all is -1: it must be a finite number >= 0", counts(all=0)),
    "NaN count": (totals_with(step_tokens=NAN), ValueError, "step_tokens is nan", totals_with(step_tokens=0.5)),
    "infinite count": (counts(active=INF), ValueError, "active is inf", counts(active=10**9)),
    "bool count": (counts(all=True), ValueError, "all is True", counts(all=1)),
    "string count": (
        totals_with(step_active_tokens="9"),
        ValueError,
        "step_active_tokens is '9'.*Pass the count of the whole step",
        totals_with(step_active_tokens=9),
    ),
    "a mapping for a count": (counts(all={0: 1}), ValueError, "all is {0: 1}", counts(tokens={0: 1})),
    "negative tokens of a unit": (
        counts(tokens={0: -1.0}),
        ValueError,
        "the token count of .*0 is -1.0",
        counts(tokens={0: 0.0}),
    ),
    "NaN tokens of a unit": (
        counts(tokens={"a": NAN}),
        ValueError,
        "the token count of .*'a' is nan",
        counts(tokens={"a": 0.5}),
    ),
    "bool tokens of a unit": (counts(tokens={0: True}), ValueError, "is True", counts(tokens={0: 1})),
    "a count for a mapping": (counts(tokens=4.0), TypeError, "tokens is 4.0.*Pass a dict", counts(tokens={})),
    "ids of a mapping": (counts(tokens={0.5: 1}), TypeError, r"holds 0.5 \(float\)", counts(tokens={5: 1})),
    "a number for counts": (
        totals_with(rollouts=4),
        TypeError,
        "rollouts is 4: it must be UnitCounts",
        totals_with(rollouts=UnitCounts(all=4)),
    ),
    "a mapping for counts": (
        totals_with(prompts={"all": 4}),
        TypeError,
        "prompts is {'all': 4}: it must be UnitCounts",
        totals_with(prompts=UnitCounts(all=4)),
    ),
    "one rollout under two prompts": (
        of_two(rollout_ids=[0, 0], prompt_ids=[0, 1]),
        ValueError,
        "one rollout id is used under two prompt ids.*Join prompt and rollout index into one id",
        of_two(rollout_ids=[0, 0], prompt_ids=[1, 1]),
    ),
    "rollout ids that begin anew with every prompt": (
        of_two(rollout_ids=["0", "0"], prompt_ids=["a", "b"]),
        ValueError,
        "one rollout id is used under two prompt ids",
        of_two(rollout_ids=["a/0", "b/0"], prompt_ids=["a", "b"]),
    ),
    "one tensor for all masks": (
        lambda: StepTotals.from_loss_masks(torch.ones(2, 3)),  # type: ignore[arg-type]
        TypeError,
        r"one tensor of shape \(2, 3\).*Pass list\(loss_masks\)",
        lambda: StepTotals.from_loss_masks(list(torch.ones(2, 3))),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_rollouts_may_share_a_prompt_and_prompts_be_alone() -> None:
    assert of_two(rollout_ids=[0, 1], prompt_ids=[0, 0])().prompts.all == 1


# --- over groups


@dataclass(frozen=True)
class Grid:
    """Ranks of a launch: DP groups, and groups of replicas that hold the same samples."""

    dp_groups: list[list[int]]
    replica_groups: list[list[list[int]]] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for group in self.dp_groups for rank in group)

    def place_of(self, rank: int) -> tuple[int, int]:
        """(replica, DP rank)"""
        return next((r, group.index(rank)) for r, group in enumerate(self.dp_groups) if rank in group)


GRIDS = {
    "dp1": Grid([[0]]),
    "dp2": Grid([[0, 1]]),
    "dp4": Grid([[0, 1, 2, 3]]),
    "dp2 x 2 replicas": Grid([[0, 1], [2, 3]], [[[0, 2], [1, 3]]]),
    "dp1 x 2 x 2 replicas": Grid([[0], [1], [2], [3]], [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),
}

Share = list[list[Sample]] | Callable[[], Any] | None
"""A rank's micro-batches; or what it does instead of preparing some; or None if its stage reads no data."""


@dataclass(frozen=True)
class Case:
    grid: str
    shares: list[Share]  # by DP rank
    other_replicas: list[Share] | None = None  # if they differ from the first one's
    count_prompts: bool = True
    # For cases that must fail: fragments of the text on every rank of the grid.
    fails_with: list[str] = field(default_factory=list)

    def share(self, rank: int) -> Share:
        replica, dp_rank = GRIDS[self.grid].place_of(rank)
        return (self.shares if replica == 0 or self.other_replicas is None else self.other_replicas)[dp_rank]

    @property
    def all_read_data(self) -> bool:
        return None not in [*self.shares, *(self.other_replicas or [])]

    @property
    def step(self) -> list[Sample]:
        return [one for share in self.shares if isinstance(share, list) for part in share for one in part]


def ragged(num_ranks: int, ids: Callable[[int], int | str] | None, split: bool) -> list[Share]:
    """Ranks of 5, 0, 7, ... samples: prompt groups of 3, and rollouts of 1 or 2 samples, straddle ranks."""
    generator = torch.Generator().manual_seed(num_ranks)
    sizes = {1: [6], 2: [7, 4], 4: [5, 0, 7, 3]}[num_ranks]
    samples = []
    for i in range(sum(sizes)):
        length = int(torch.randint(0, 6, (), generator=generator))
        mask = torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) < 0.7) * (i % 4 != 2)
        losses = torch.randn(length, generator=generator).double()
        rollout = ids(100 + i * 2 // 3) if ids and split else None
        samples.append(Sample(losses, mask, rollout, ids(i * 2 // 3 // 2) if ids else None).poisoned())
    shares: list[Share] = []
    for size in sizes:
        mine, samples = samples[:size], samples[size:]
        shares.append([mine[:2], mine[2:]] if size > 2 else [mine])
    return shares


def one(mask: Sequence[float] = (1, 1), rollout_id: int | str | None = None, prompt_id: Any = None) -> Sample:
    return sample([1.0] * len(mask), mask, rollout_id, prompt_id)


def bad_mask() -> Any:
    return [Samples([torch.ones(2), torch.tensor([1.0, float("nan")])])]


def broken_loader() -> Any:
    raise RuntimeError("the disk is full")


NAN_TEXT = "ValueError: the loss mask of sample 1 holds nan: token weights must be finite"

CASES: dict[str, Case] = {
    **{
        f"{grid}, {name}": Case(grid, ragged(ranks, ids, split))
        for grid, ranks in [("dp1", 1), ("dp2", 2), ("dp4", 4), ("dp2 x 2 replicas", 2), ("dp1 x 2 x 2 replicas", 1)]
        for name, ids, split in [
            ("no ids", None, False),
            ("prompt ids", int, False),
            ("rollout and prompt ids", int, True),
            ("string ids", lambda i: f"id/{i}", True),
            ("negative and large ids", lambda i: -(2**61) + 1 + i * 2**50, True),
        ]
    },
    "dp4, worked batch, a sample a rank": Case("dp4", [[[one_]] for one_ in WORKED]),
    "dp2, worked batch, all on the last rank": Case("dp2", [[], [WORKED[:1], WORKED[1:]]]),
    "dp2, no sample anywhere": Case("dp2", [[], [[]]]),
    "dp2, prompt ids left aside": Case("dp2", ragged(2, int, False), count_prompts=False),
    # --- pipeline stages without data
    "a stage without data": Case("dp2 x 2 replicas", ragged(2, None, False), [None, None]),
    "a stage without data, with ids": Case("dp2 x 2 replicas", ragged(2, int, True), [None, None]),
    "data on one DP rank only": Case(
        "dp2", [[[one()]], None], fails_with=["rank 1: ", "given no data iterator", "Give every rank one"]
    ),
    "data on one DP rank of one stage only": Case(
        "dp2 x 2 replicas",
        [[[one()]], [[one()]]],
        [[[one()]], None],
        fails_with=["rank 3: ", "given no data iterator"],
    ),
    "data nowhere": Case("dp2 x 2 replicas", [None, None], fails_with=["no rank reads data for this step"]),
    # --- one rank fails, every rank says so
    "NaN mask": Case("dp4", [[[one()]], [[one()]], bad_mask, []], fails_with=[f"rank 2: {NAN_TEXT}", "no weight was"]),
    "NaN mask on two ranks": Case(
        "dp4",
        [bad_mask, [[one()]], broken_loader, []],
        fails_with=[f"rank 0: {NAN_TEXT}", "rank 2: RuntimeError: the disk is full"],
    ),
    "broken loader on a replica": Case(
        "dp2 x 2 replicas", [[[one()]]] * 2, [[[one()]], broken_loader], fails_with=["rank 3: RuntimeError: the disk"]
    ),
    "broken loader two groups away": Case(
        "dp1 x 2 x 2 replicas", [[[one()]]], [broken_loader], fails_with=[f"rank {r}: RuntimeError" for r in (1, 2, 3)]
    ),
    # --- replicas that differ
    "another number of samples": Case(
        "dp2 x 2 replicas", [[[one()]]] * 2, [[[one()]], [[one(), one()]]], fails_with=["were given different samples"]
    ),
    "another mask": Case(
        "dp2 x 2 replicas", [[[one()]]] * 2, [[[one()]], [[one((1, 0))]]], fails_with=["were given different samples"]
    ),
    "a fractional weight apart": Case(
        "dp2 x 2 replicas", [[[one()]]] * 2, [[[one()]], [[one((1, 1.0001))]]], fails_with=["different samples"]
    ),
    "other ids": Case(
        "dp2 x 2 replicas",
        [[[one((1, 1), 0, 0)]], [[one((1, 1), 1, 0)]]],
        [[[one((1, 1), 0, 0)]], [[one((1, 1), 2, 0)]]],
        fails_with=["were given different samples"],
    ),
    "ids on one replica only": Case(
        "dp2 x 2 replicas", [[[one()]]] * 2, [[[one((1, 1), 0)]], [[one((1, 1), 1)]]], fails_with=["different samples"]
    ),
    "DP shards swapped on a replica": Case(  # the same step, so every sum over DP is right
        "dp2 x 2 replicas",
        [[[one()]], [[one((1, 0))]]],
        [[[one((1, 0))]], [[one()]]],
        fails_with=["were given different samples"],
    ),
    "another order on a replica": Case(
        "dp2 x 2 replicas",
        [[[one(), one((1, 0))]]] * 2,
        [[[one(), one((1, 0))]], [[one((1, 0)), one()]]],
        fails_with=["were given different samples"],
    ),
    # --- ids that cannot be
    "rollout ids on some ranks": Case(
        "dp4",
        [[[one((1, 1), 0)]], [[one()]], [], [[one((1, 1), 3)]]],
        fails_with=["rollout_ids on 2 of the 3 DP ranks"],
    ),
    "prompt ids on some ranks": Case(
        "dp2", [[[one((1, 1), None, 0)]], [[one()]]], fails_with=["prompt_ids on 1 of the 2 DP ranks that hold samples"]
    ),
    "prompt ids on some ranks of a split rollout": Case(
        "dp2", [[[one((1, 1), 5, 0)]], [[one((1, 1), 5)]]], fails_with=["prompt_ids on 1 of the 2 DP ranks"]
    ),
    "ids on every rank with samples": Case("dp4", [[[one((1, 1), 5, 0)]], [], [[one((0, 0), 6, 0)]], [[]]]),
    "rollout under two prompts, one rank": Case(
        "dp2",
        [[[one((1, 1), 5, 0), one((1, 1), 5, 1)]], [[one((1, 1), 6, 0)]]],
        fails_with=["one rollout id is used under two"],
    ),
    "rollout under two prompts, two ranks": Case(
        "dp2",
        [[[one((1, 1), 5, 0)]], [[one((1, 1), 5, 1)]]],
        fails_with=["one rollout id is used under two prompt ids"],
    ),
    "rollout under two prompts, four ranks": Case(
        "dp4",
        [[[one((1, 1), r if r < 3 else 0, "a" if r < 3 else "b")]] for r in range(4)],
        fails_with=["one rollout id is used under two prompt ids"],
    ),
    "rollout under two prompts beside a stage without data": Case(
        "dp2 x 2 replicas",
        [[[one((1, 1), 5, 0)]], [[one((1, 1), 5, 1)]]],
        [None, None],
        fails_with=["one rollout id is used under two prompt ids"],
    ),
}


@dataclass
class Report:
    """What one rank got from one case."""

    calls: dict[str, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    by_id: dict[str, dict[Any, float] | None] = field(default_factory=dict)


# --- on a rank


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv")
    )
    and callable(getattr(dist, name))
    and not isinstance(getattr(dist, name), type)
]


@contextmanager
def counted_collectives(calls: Counter[str]) -> Iterator[None]:
    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    counters = {name: counting(name, getattr(dist, name)) for name in COLLECTIVES}
    with patch.multiple(dist, **counters):
        yield


def run_case(case: Case, rank: int, dp_group: Any, replica_groups: list[Any]) -> Report:
    share, report, calls = case.share(rank), Report(), Counter[str]()
    mine = [one_ for part in share for one_ in part] if isinstance(share, list) else []
    groups = {"dp_group": dp_group, "replica_groups": replica_groups}

    def samples_of(part: list[Sample]) -> Samples:
        some_ids = {f"{name}s": ids_of(part, name) for name in ("rollout_id", "prompt_id")}
        return Samples([one_.mask for one_ in part], **some_ids)

    def prepare() -> Any:
        if not isinstance(share, list):
            return None if share is None else share()
        return [samples_of(part) for part in share]

    try:
        with counted_collectives(calls):
            totals = reduce_step_totals(attempt(prepare), count_prompts=case.count_prompts, **groups)
    except Exception as error:
        report.error = (type(error).__name__, str(error))
    report.calls = dict(calls)
    if report.error is None:
        report.fields, report.by_id = fields_of(totals), unit_tokens_of(totals, mine)
        if case.count_prompts and case.all_read_data:
            # The public constructor must say the same.
            assert fields_of(all_totals(mine, **groups)) == report.fields
    return report


def reports_of_rank() -> dict[str, Report]:
    start_process_group()
    rank = int(os.environ["RANK"])
    all_groups = [group for grid in GRIDS.values() for group in [*grid.dp_groups, *chain(*grid.replica_groups)]]
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(map(tuple, all_groups))}
    reports = {}
    for name, case in CASES.items():
        grid = GRIDS[case.grid]
        if rank in grid.ranks:
            dp_group = next(made[tuple(ranks)] for ranks in grid.dp_groups if rank in ranks)
            replicas = [made[tuple(ranks)] for kind in grid.replica_groups for ranks in kind if rank in ranks]
            reports[name] = run_case(case, rank, dp_group, replicas)
        dist.barrier()
    return reports


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[int, Report]]:
    """Every case's report by rank."""
    by_rank = run_ranks(WORLD_SIZE, reports_of_rank, timeout_s=600)
    return {name: {rank: mine[name] for rank, mine in enumerate(by_rank) if name in mine} for name in CASES}


GOOD = {name: case for name, case in CASES.items() if not case.fails_with}
BAD = {name: case for name, case in CASES.items() if case.fails_with}


@pytest.mark.parametrize("name", GOOD)
def test_totals_of_every_rank_are_those_of_the_union(name: str, reports: dict[str, dict[int, Report]]) -> None:
    case = CASES[name]
    expected = expected_fields(case.step)
    if not case.count_prompts:
        expected |= {"prompts.all": None, "prompts.active": None}
    assert sorted(reports[name]) == GRIDS[case.grid].ranks
    for rank, report in reports[name].items():
        assert report.error is None, f"rank {rank}: {report.error}"
        share = case.share(rank)
        if share is None:
            # It takes no part in the exchange by id.
            by_id = ["prompts.all", "prompts.active"]
            if ids_of(case.step, "rollout_id"):
                by_id += ["rollouts.all", "rollouts.active"]
            assert report.fields == expected | dict.fromkeys(by_id)
            assert report.by_id == {"rollout_id": None, "prompt_id": None}
            continue
        assert isinstance(share, list)
        assert report.fields == expected
        for kind, said in report.by_id.items():
            mine = {getattr(one_, kind) for part in share for one_ in part}
            right = {key: tokens for key, tokens in tokens_by(kind, case.step).items() if key in mine}
            counted = ids_of(case.step, kind) and (kind == "rollout_id" or case.count_prompts)
            assert said == (pytest.approx(right, rel=FLOAT64) if counted else None)


@pytest.mark.parametrize("name", BAD)
def test_a_failure_is_raised_on_every_rank(name: str, reports: dict[str, dict[int, Report]]) -> None:
    case = CASES[name]
    assert sorted(reports[name]) == GRIDS[case.grid].ranks
    for rank, report in reports[name].items():
        assert report.error is not None, f"rank {rank} went on"
        kind, text = report.error
        assert kind == "BadBatchError"
        for fragment in case.fails_with:
            assert fragment in text


@pytest.mark.parametrize("name", GOOD)
def test_number_of_collectives(name: str, reports: dict[str, dict[int, Report]]) -> None:
    case = CASES[name]
    grid = GRIDS[case.grid]
    by_id = ids_of(case.step, "rollout_id") or (ids_of(case.step, "prompt_id") and case.count_prompts)
    for rank, report in reports[name].items():
        over_dp = len(grid.dp_groups[0]) > 1
        exchanged = over_dp and by_id and case.share(rank) is not None
        all_reduces = over_dp + len(grid.replica_groups) + bool(exchanged)
        expected = {"all_reduce": all_reduces, "all_to_all_single": 3 if exchanged else 0}
        assert report.calls == {call: n for call, n in expected.items() if n}


def test_the_counter_sees_collectives() -> None:
    calls = Counter[str]()
    with counted_collectives(calls), pytest.raises(ValueError, match="process group"):
        dist.all_reduce(torch.zeros(1))
    assert calls == {"all_reduce": 1}
    assert {"all_reduce", "all_to_all_single", "all_gather_object", "broadcast", "barrier"} <= set(COLLECTIVES)


def test_local_totals_would_be_seen() -> None:
    """Negative control: a rank that sums nothing over DP has other totals than the union, and its own are right."""
    mine = WORKED[:2]
    assert fields_of(all_totals(mine)) == expected_fields(mine)
    assert not any(fields_of(all_totals(mine))[name] == whole for name, whole in expected_fields(WORKED).items())

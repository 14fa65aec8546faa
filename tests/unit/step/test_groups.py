"""The totals of a step over real gloo groups of 1, 2 and 4 data-parallel (DP) ranks with replicas.

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
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from oracle import WORKED, Sample, sample
from ranks import run_ranks, start_process_group
from step_counts import all_totals, expected_of, ids_of, kinds_of, said_of

from megatron_rl_loss import BadBatchError, Samples
from megatron_rl_loss.step import collectives
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.totals import reduce_step_totals

WORLD_SIZE = 4


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


TWICE = "dp2 x 2 replicas"
GRIDS = {
    "dp1": Grid([[0]]),
    "dp2": Grid([[0, 1]]),
    "dp4": Grid([[0, 1, 2, 3]]),
    TWICE: Grid([[0, 1], [2, 3]], [[[0, 2], [1, 3]]]),
    "dp1 x 2 x 2 replicas": Grid([[0], [1], [2], [3]], [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),
    "replicas of a dp2": Grid([[0, 1]], [[[0, 1]]]),
    "replicas of half a dp4": Grid([[0, 1, 2, 3]], [[[0, 1], [2, 3]]]),
}

Share = list[list[Sample]] | Callable[[], Any] | None
"""A rank's micro-batches; or what it does instead of preparing some; or None if its stage reads no data."""


@dataclass(frozen=True)
class Case:
    grid: str
    shares: list[Share]  # by DP rank
    other_replicas: list[Share] | None = None  # if they differ from the first one's
    count_prompts: bool = True
    one_hop_ranks: int = collectives.ONE_HOP_RANKS
    # For cases that must fail: fragments of the text on every rank of the grid, and the error's type.
    fails_with: Sequence[str] = ()
    error: type[Exception] = BadBatchError

    def share(self, rank: int) -> Share:
        replica, dp_rank = GRIDS[self.grid].place_of(rank)
        return (self.shares if replica == 0 or self.other_replicas is None else self.other_replicas)[dp_rank]

    @property
    def all_read_data(self) -> bool:
        return None not in [*self.shares, *(self.other_replicas or [])]

    @property
    def step(self) -> list[Sample]:
        return [one for share in self.shares if isinstance(share, list) for part in share for one in part]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in kinds_of(self.step) if kind == "rollout_id" or self.count_prompts]


def ragged(num_ranks: int, ids: Callable[[int], int | str] | None, split: bool) -> list[Share]:
    """Ranks of 5, 0, 7, ... samples: prompt groups of 3, and rollouts of 1 or 2 samples, straddle ranks."""
    generator = torch.Generator().manual_seed(num_ranks)
    sizes = {1: [6], 2: [7, 4], 4: [5, 0, 7, 3]}[num_ranks]
    samples = []
    for i in range(sum(sizes)):
        length = int(torch.randint(0, 6, (), generator=generator))
        mask = torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) < 0.7) * (i % 4 != 2)
        rollout = ids(100 + i * 2 // 3) if ids and split else None
        samples.append(Sample(mask.double(), mask, rollout, ids(i * 2 // 3 // 2) if ids else None))
    shares: list[Share] = []
    for size in sizes:
        mine, samples = samples[:size], samples[size:]
        shares.append([mine[:2], mine[2:]] if size > 2 else [mine])
    return shares


def one(mask: Sequence[float] = (1, 1), rollout_id: int | str | None = None, prompt_id: Any = None) -> Sample:
    return sample([1.0] * len(mask), mask, rollout_id, prompt_id)


def named(rollout_id: int, prompt_id: int | str | None = None) -> list[list[Sample]]:
    """A micro-batch of one sample."""
    return [[one((1, 1), rollout_id, prompt_id)]]


def bad_mask() -> Any:
    return [Samples([torch.ones(2), torch.tensor([1.0, float("nan")])])]


def broken_loader() -> Any:
    raise RuntimeError("the disk is full")


def labelled(label: Any) -> Callable[[], Any]:
    return lambda: [Samples([torch.ones(2)], labels={"task": [label]})]


NAN_TEXT = "ValueError: the loss mask of sample 1 holds nan: token weights must be finite"
PLAIN: Share = [[one()]]
UNALIKE = ["were given different samples"]
CLASH = ["one rollout id is used under two prompt ids"]
SHARED = ["a dp_group that shares the ranks [0, 1] with a replica group"]
A_LABEL, ITS_TWIN, ANOTHER = (labelled(torch.tensor(label)) for label in ([1, 2], [1, 2], [1, 3]))

CASES: dict[str, Case] = {
    **{
        f"{grid}, {name}": Case(grid, ragged(ranks, ids, split))
        for grid, ranks in [("dp1", 1), ("dp2", 2), ("dp4", 4), (TWICE, 2), ("dp1 x 2 x 2 replicas", 1)]
        for name, ids, split in [
            ("no ids", None, False),
            ("prompt ids", int, False),
            ("rollout and prompt ids", int, True),
            ("string ids", lambda i: f"id/{i}", True),
            ("negative and large ids", lambda i: -(2**61) + 1 + i * 2**50, True),
        ]
    },
    **{
        f"dp4 as a grid, {name}": Case("dp4", shares, one_hop_ranks=1)
        for name, shares in [
            ("rollout and prompt ids", ragged(4, int, True)),
            ("string ids", ragged(4, lambda i: f"id/{i}", True)),
            ("one prompt of all", [[[one((1, 1), 4 * rank + i, 0) for i in range(3)]] for rank in range(4)]),
            ("all ids on one rank", [[[one((1, 0), i, i // 2) for i in range(9)]], [], [], []]),
        ]
    },
    "dp4 as a grid, rollout under two prompts": Case(
        "dp4", [*(named(r, "a") for r in range(3)), named(0, "b")], one_hop_ranks=1, fails_with=CLASH
    ),
    "dp4, worked batch, a sample a rank": Case("dp4", [[[one_]] for one_ in WORKED]),
    "dp2, worked batch, all on the last rank": Case("dp2", [[], [WORKED[:1], WORKED[1:]]]),
    "dp2, no sample anywhere": Case("dp2", [[], [[]]]),
    "replicas, no sample anywhere": Case(TWICE, [[], [[]]]),
    "dp2, prompt ids left aside": Case("dp2", ragged(2, int, False), count_prompts=False),
    # --- pipeline stages without data
    "a stage without data": Case(TWICE, ragged(2, None, False), [None, None]),
    "a stage without data, with ids": Case(TWICE, ragged(2, int, True), [None, None]),
    "data on one DP rank only": Case(
        "dp2", [PLAIN, None], fails_with=["rank 1: ", "given no data iterator", "Give every rank one"]
    ),
    "data on one DP rank of one stage only": Case(
        TWICE, [PLAIN, PLAIN], [PLAIN, None], fails_with=["rank 3: ", "given no data iterator"]
    ),
    "data nowhere": Case(TWICE, [None, None], fails_with=["no rank reads data for this step"]),
    # --- one rank fails, every rank says so
    "NaN mask": Case("dp4", [PLAIN, PLAIN, bad_mask, []], fails_with=[f"rank 2: {NAN_TEXT}", "no weight was"]),
    "NaN mask on two ranks": Case(
        "dp4",
        [bad_mask, PLAIN, broken_loader, []],
        fails_with=[f"rank 0: {NAN_TEXT}", "rank 2: RuntimeError: the disk is full"],
    ),
    "broken loader on a replica": Case(
        TWICE, [PLAIN] * 2, [PLAIN, broken_loader], fails_with=["rank 3: RuntimeError: the disk"]
    ),
    "broken loader two groups away": Case(
        "dp1 x 2 x 2 replicas", [PLAIN], [broken_loader], fails_with=["ranks 1, 2, 3: RuntimeError"]
    ),
    # --- replicas that differ
    **{
        name: Case(TWICE, first, second, fails_with=UNALIKE)
        for name, first, second in [
            ("another number of samples", [PLAIN, PLAIN], [PLAIN, [[one(), one()]]]),
            ("another mask", [PLAIN, PLAIN], [PLAIN, [[one((1, 0))]]]),
            ("a fractional weight apart", [PLAIN, PLAIN], [PLAIN, [[one((1, 1.0001))]]]),
            ("other ids", [named(0, 0), named(1, 0)], [named(0, 0), named(2, 0)]),
            ("ids on one replica only", [PLAIN, PLAIN], [named(0), named(1)]),
            # The same step, so every sum over DP is right.
            ("DP shards swapped on a replica", [PLAIN, [[one((1, 0))]]], [[[one((1, 0))]], PLAIN]),
            ("another order", [[[one(), one((1, 0))]], PLAIN], [[[one((1, 0)), one()]], PLAIN]),
            ("other labels", [A_LABEL, A_LABEL], [A_LABEL, ANOTHER]),
        ]
    },
    "equal labels": Case(TWICE, [A_LABEL, ANOTHER], [ITS_TWIN, ANOTHER]),
    # --- ids that cannot be
    "rollout ids on some ranks": Case(
        "dp4", [named(0), PLAIN, [], named(3)], fails_with=["rollout_ids on 2 of the 3 DP ranks"]
    ),
    "prompt ids on some ranks": Case(
        "dp2", [[[one((1, 1), None, 0)]], PLAIN], fails_with=["prompt_ids on 1 of the 2 DP ranks that hold samples"]
    ),
    "prompt ids on some ranks of a split rollout": Case(
        "dp2", [named(5, 0), named(5)], fails_with=["prompt_ids on 1 of the 2 DP ranks"]
    ),
    "ids on every rank with samples": Case("dp4", [named(5, 0), [], [[one((0, 0), 6, 0)]], [[]]]),
    **{
        f"rollout under two prompts, {where}": Case(*shares, count_prompts=counted, fails_with=CLASH)
        for where, counted, *shares in [
            ("one rank", True, "dp2", [[[*named(5, 0)[0], *named(5, 1)[0]]], named(6, 0)]),
            ("two ranks", True, "dp2", [named(5, 0), named(5, 1)]),
            ("prompts not counted", False, "dp2", [named(5, 0), named(5, 1)]),
            ("four ranks", True, "dp4", [*(named(r, "a") for r in range(3)), named(0, "b")]),
            ("beside a stage without data", True, TWICE, [named(5, 0), named(5, 1)], [None, None]),
        ]
    },
    # --- groups that cannot be
    **{
        name: Case(name, [PLAIN] * len(GRIDS[name].ranks), fails_with=fragments, error=ValueError)
        for name, fragments in [("replicas of a dp2", SHARED), ("replicas of half a dp4", [SHARED[0][:24]])]
    },
}


@dataclass
class Report:
    """What one rank got from one case."""

    calls: dict[str, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    said: dict[str, Any] = field(default_factory=dict)


# --- on a rank

KINDS = ("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "batch_isend")
COLLECTIVES = [name for name in dir(dist) if name.startswith(KINDS) and callable(getattr(dist, name))]


@contextmanager
def counted_collectives(calls: Counter[str]) -> Iterator[None]:
    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    with patch.multiple(dist, **{name: counting(name, getattr(dist, name)) for name in COLLECTIVES}):
        yield


def run_case(case: Case, rank: int, dp_group: Any, replica_groups: list[Any]) -> Report:
    share, report, calls = case.share(rank), Report(), Counter[str]()
    mine = [one_ for part in share for one_ in part] if isinstance(share, list) else []
    groups = {"dp_group": dp_group, "replica_groups": replica_groups}

    def prepare() -> Any:
        if not isinstance(share, list):
            return None if share is None else share()
        return [Samples([one_.mask for one_ in part], **{f"{k}s": ids_of(part, k) for k in IDS}) for part in share]

    try:
        with counted_collectives(calls), patch.object(collectives, "ONE_HOP_RANKS", case.one_hop_ranks):
            totals = reduce_step_totals(attempt(prepare), count_prompts=case.count_prompts, **groups)
    except Exception as error:
        report.error = (type(error).__name__, str(error))
    report.calls = dict(calls)
    if report.error is None:
        report.said = said_of(totals, mine)
        if case.count_prompts and case.all_read_data and isinstance(share, list):
            # The public constructor must say the same.
            assert said_of(all_totals(mine, **groups), mine) == report.said
    return report


IDS = ("rollout_id", "prompt_id")


def reports_of_rank() -> dict[str, Report]:
    start_process_group()
    rank = int(os.environ["RANK"])
    all_groups = [group for grid in GRIDS.values() for group in [*grid.dp_groups, *chain(*grid.replica_groups)]]
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(map(tuple, all_groups)))}
    reports = {}
    for name, case in CASES.items():
        grid = GRIDS[case.grid]
        if rank in grid.ranks:
            dp_group = next(made[tuple(ranks)] for ranks in grid.dp_groups if rank in ranks)
            replicas = [made[tuple(ranks)] for kind in grid.replica_groups for ranks in kind if rank in ranks]
            reports[name] = run_case(case, rank, dp_group, replicas)
        dist.barrier()
    return reports


@pytest.mark.parametrize("ranks", [64, 65, 67, 134])
def test_every_peer_of_a_hop_is_sent_rows(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 67 ranks, a prime number, too."""
    sent: list[tuple[int, int]] = []

    class Hop:
        def __init__(self, to: torch.Tensor, peers: range, _: Any) -> None:
            sent.append((len(to.unique()), len(peers)))

        def forth(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    monkeypatch.setattr(collectives, "_Hop", Hop)
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 3)
    collectives.Exchange(group).to_owners(torch.arange(100 * ranks)[:, None])
    assert sent
    assert all(reached == peers for reached, peers in sent)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[int, Report]]:
    """Every case's report by rank."""
    by_rank = run_ranks(WORLD_SIZE, reports_of_rank, timeout_s=600)
    return {name: {rank: mine[name] for rank, mine in enumerate(by_rank) if name in mine} for name in CASES}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.fails_with])
def test_totals_of_every_rank_are_those_of_the_union(name: str, reports: dict[str, dict[int, Report]]) -> None:
    """In the collectives that `reduce_step_totals` says."""
    case, grid = CASES[name], GRIDS[CASES[name].grid]
    assert sorted(reports[name]) == grid.ranks
    for rank, report in reports[name].items():
        assert report.error is None, f"rank {rank}: {report.error}"
        share, over_dp = case.share(rank), len(grid.dp_groups[0]) > 1
        exchanged = over_dp and bool(case.kinds) and share is not None
        expected = {"all_reduce": over_dp + len(grid.replica_groups) + exchanged, "all_to_all_single": 3 * exchanged}
        if case.one_hop_ranks == 1:  # two hops, to one other rank each: counts, rows and answers, if there are any
            assert 2 <= report.calls.pop("batch_isend_irecv") <= 6
            del expected["all_to_all_single"]
        assert report.calls == {call: n for call, n in expected.items() if n}
        if callable(share):
            continue
        mine = [one_ for part in share or [] for one_ in part]
        right = expected_of(case.step, mine, case.kinds)
        if share is None:  # it takes no part in the exchange by id
            right |= dict.fromkeys(["prompts.all", "prompts.active"])
            right |= dict.fromkeys(["rollouts.all", "rollouts.active"] if "rollout_id" in case.kinds else [])
        assert report.said == right


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fails_with])
def test_a_failure_is_raised_on_every_rank(name: str, reports: dict[str, dict[int, Report]]) -> None:
    case = CASES[name]
    assert sorted(reports[name]) == GRIDS[case.grid].ranks
    for rank, report in reports[name].items():
        assert report.error is not None, f"rank {rank} went on"
        kind, text = report.error
        assert kind == case.error.__name__
        for fragment in case.fails_with:
            assert fragment in text

"""The totals of a step: of one rank, and over real gloo groups of 2 and 4 data-parallel (DP) ranks with replicas.

All cases of the table `CASES` run in one launch of four ranks. A case says which ranks hold which samples; every rank
reports what it got, to be compared with plain sums over the union of the samples.
Not exercised here: NCCL, and the groups Megatron makes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from oracle import WORKED, Sample, sample
from plain_totals import KINDS, Share, all_ids, all_totals, expected_of, ids_of, ragged, said_of
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals
from steps import on_both

from megatron_rl_loss import BadBatchError, Samples, StepTotals, UnitCounts
from megatron_rl_loss.step import collectives
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.totals import compare_totals, reduce_step_totals

# --- one rank

STEPS: dict[str, list[Sample]] = {
    "worked batch": WORKED,
    "no ids": [sample([0] * 3, [1, 0, 0.5], prompt_id=None), sample([0] * 2, [0, 0], prompt_id=None)],
    "rollouts split": [
        sample([0] * 3, [1, 1, 0], 7, -1), sample([0] * 2, [0, 0], 8, -1), sample([0] * 3, [0.25, 1, 0], 7, -1),
        sample([0] * 1, [0], 9, 4),
    ],
    "string ids": [sample([0] * 2, [1, 1], "p0/r0", "p0"), sample([0] * 2, [1, 0], "p0/r1", "p0")],
    "rollout and prompt ids overlap": [sample([0], [1], 0, 0), sample([0], [1], 1, 0), sample([0], [1], 2, 1)],
    "empty mask": [sample([], [], 0, 0), sample([0], [1], 1, 1)],
    "no sample": [],
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_alone(step: list[Sample]) -> None:
    for said in on_both(lambda: said_of(all_totals(step), step)):
        assert said == expected_of(step, step)
        assert all(isinstance(count, int | dict | None) for name, count in said.items() if name != "step_tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_fractional_masks_are_summed_in_float64(dtype: torch.dtype) -> None:
    mask = torch.full((1_000_003,), 0.1, dtype=dtype)
    # In float64 a sum of a million terms is off by 2^-53 a million times at most.
    for totals in on_both(lambda: StepTotals.from_loss_masks([mask])):
        assert totals.step_tokens == pytest.approx(1_000_003 * float(mask[0]), rel=1e-9)


def test_errors_alone_are_plain() -> None:
    def unsound() -> None:
        with pytest.raises(ValueError, match="the loss mask of sample 1 holds nan") as caught:
            StepTotals.from_loss_masks([torch.ones(1), torch.tensor([NAN])])
        assert caught.type is ValueError

    on_both(unsound)
    with pytest.raises(BadBatchError, match="no rank reads data"):
        reduce_step_totals(None)
    with pytest.raises(RuntimeError, match="the disk is full"):
        reduce_step_totals(RuntimeError("the disk is full"))
    assert reduce_step_totals([]).rollouts.all == 0


# --- over ranks

TWICE = "dp2 x 2 replicas"
#: By name: the data-parallel groups, and by kind the groups of replicas that hold the same samples.
GRIDS: dict[str, tuple[list[list[int]], list[list[list[int]]]]] = {
    "dp2": ([[0, 1]], []),
    "dp4": ([[0, 1, 2, 3]], []),
    TWICE: ([[0, 1], [2, 3]], [[[0, 2], [1, 3]]]),
    "dp1 x 2 x 2 replicas": ([[0], [1], [2], [3]], [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),
    "replicas of a dp2": ([[0, 1]], [[[0, 1]]]),
    "replicas of half a dp4": ([[0, 1, 2, 3]], [[[0, 1], [2, 3]]]),
}


@dataclass(frozen=True)
class Case:
    grid: str
    shares: list[Share]  # by DP rank
    other_replicas: list[Share] | None = None  # if they differ from the first one's
    count_prompts: bool = True
    one_hop_ranks: int = collectives.ONE_HOP_RANKS
    fails_with: Sequence[str] = ()  # fragments of the text on every rank of the grid

    def share(self, rank: int) -> Share:
        replica, group = next((r, group) for r, group in enumerate(GRIDS[self.grid][0]) if rank in group)
        return (self.shares if not replica or self.other_replicas is None else self.other_replicas)[group.index(rank)]

    @property
    def step(self) -> list[Sample]:
        return [one for share in self.shares if isinstance(share, list) for part in share for one in part]


def one(mask: Sequence[float] = (1, 1), rollout_id: int | str | None = None, prompt_id: Any = None) -> Sample:
    return sample([1.0] * len(mask), mask, rollout_id, prompt_id)


def named(rollout_id: int, prompt_id: int | str | None = None) -> list[list[Sample]]:
    """A micro-batch of one sample."""
    return [[one((1, 1), rollout_id, prompt_id)]]


def bad_mask() -> Any:
    return [Samples([torch.ones(2), torch.tensor([1.0, NAN])])]


def broken_loader() -> Any:
    raise RuntimeError("the disk is full")


def labelled(*label: int) -> Callable[[], Any]:
    return lambda: [Samples([torch.ones(2)], labels={"task": [torch.tensor(label)]})]


NAN, INF = float("nan"), float("inf")
NAN_TEXT = "ValueError: the loss mask of sample 1 holds nan: token weights must be finite"
PLAIN, HALF = [[one()]], [[one((1, 0))]]
CLASH = ["one rollout id is used under two prompt ids"]
SHARED = "ValueError: a dp_group that shares the ranks"
A_LABEL, ITS_TWIN, ANOTHER = labelled(1, 2), labelled(1, 2), labelled(1, 3)
FOUR_WITH_CLASH: list[Share] = [*(named(r, "a") for r in range(3)), named(0, "b")]

CASES: dict[str, Case] = {
    **{
        f"{grid}, {name}": Case(grid, ragged(ranks, ids, split))
        for grid, ranks in [("dp2", 2), ("dp4", 4), (TWICE, 2), ("dp1 x 2 x 2 replicas", 1)]
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
    "dp4, worked batch, a sample a rank": Case("dp4", [[[one_]] for one_ in WORKED]),
    "dp2, worked batch, all on the last rank": Case("dp2", [[], [WORKED[:1], WORKED[1:]]]),
    "dp2, no sample anywhere": Case("dp2", [[], [[]]]),
    "replicas, no sample anywhere": Case(TWICE, [[], [[]]]),
    "dp2, prompt ids left aside": Case("dp2", ragged(2, int, False), count_prompts=False),
    "ids on every rank with samples": Case("dp4", [named(5, 0), [], [[one((0, 0), 6, 0)]], [[]]]),
    "equal labels": Case(TWICE, [A_LABEL, ANOTHER], [ITS_TWIN, ANOTHER]),
    "a stage without data": Case(TWICE, ragged(2, None, False), [None, None]),
    "a stage without data, with ids": Case(TWICE, ragged(2, int, True), [None, None]),
    **{
        name: Case(grid, shares, others, count_prompts=name != "prompts not counted", fails_with=fragments)
        for name, grid, shares, others, fragments in [
            # --- pipeline stages without data
            ("data on one DP rank", "dp2", [PLAIN, None], None, ["rank 1: ", "given no data iterator", "Give every"]),
            ("on one of one stage", TWICE, [PLAIN] * 2, [PLAIN, None], ["rank 3: ", "given no data iterator"]),
            ("data nowhere", TWICE, [None, None], None, ["no rank reads data for this step"]),
            # --- one rank fails, every rank says so
            ("NaN mask", "dp4", [PLAIN, PLAIN, bad_mask, []], None, [f"rank 2: {NAN_TEXT}", "no weight was"]),
            ("two errors", "dp4", [bad_mask, PLAIN, broken_loader, []], None,
             [f"rank 0: {NAN_TEXT}", "rank 2: RuntimeError: the disk is full"]),
            ("broken loader on a replica", TWICE, [PLAIN] * 2, [PLAIN, broken_loader], ["rank 3: RuntimeError: the"]),
            ("broken loader two groups away", "dp1 x 2 x 2 replicas", [PLAIN], [broken_loader], ["ranks 1, 2, 3: Run"]),
            # --- ids that cannot be
            ("rollout ids on some", "dp4", [named(0), PLAIN, [], named(3)], None, ["rollout_ids on 2 of the 3 DP"]),
            ("prompt ids on some", "dp2", [[[one((1, 1), None, 0)]], PLAIN], None,
             ["prompt_ids on 1 of the 2 DP ranks that hold samples"]),
            ("prompt ids on some of a rollout", "dp2", [named(5, 0), named(5)], None, ["prompt_ids on 1 of the 2 DP"]),
            ("two prompts on one rank", "dp2", [[[*named(5, 0)[0], *named(5, 1)[0]]], named(6, 0)], None, CLASH),
            ("two prompts on two", "dp2", [named(5, 0), named(5, 1)], None, CLASH),
            ("prompts not counted", "dp2", [named(5, 0), named(5, 1)], None, CLASH),
            ("two prompts on four", "dp4", FOUR_WITH_CLASH, None, CLASH),
            ("two prompts beside a stage without data", TWICE, [named(5, 0), named(5, 1)], [None, None], CLASH),
            # --- groups that cannot be
            ("of a dp2", "replicas of a dp2", [PLAIN] * 2, None, [f"{SHARED} [0, 1] with a replica group"]),
            ("of half a dp4", "replicas of half a dp4", [PLAIN] * 4, None, [SHARED]),
            # --- replicas that differ
            *((name, TWICE, first, second, ["were given different samples"]) for name, first, second in [
                ("another number of samples", [PLAIN, PLAIN], [PLAIN, [[one(), one()]]]),
                ("another mask", [PLAIN, PLAIN], [PLAIN, HALF]),
                ("a fractional weight apart", [PLAIN, PLAIN], [PLAIN, [[one((1, 1.0001))]]]),
                ("other ids", [named(0, 0), named(1, 0)], [named(0, 0), named(2, 0)]),
                ("ids on one replica only", [PLAIN, PLAIN], [named(0), named(1)]),
                ("DP shards swapped on a replica", [PLAIN, HALF], [HALF, PLAIN]),  # the same step: all sums are right
                ("another order", [[[one(), one((1, 0))]], PLAIN], [[[one((1, 0)), one()]], PLAIN]),
                ("other labels", [A_LABEL, A_LABEL], [A_LABEL, ANOTHER]),
            ]),
        ]
    },
    "dp4 as a grid, two prompts on four": Case("dp4", FOUR_WITH_CLASH, one_hop_ranks=1, fails_with=CLASH),
}  # fmt: skip

PREFIXES = ("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "batch_isend")
COLLECTIVES = [name for name in dir(dist) if name.startswith(PREFIXES) and callable(getattr(dist, name))]
#: The collectives that one rank called in one case, and what it was told, or the error.
Report = tuple[dict[str, int], dict[str, Any] | str]


def run_case(case: Case, rank: int, dp_group: Any, replica_groups: list[Any]) -> Report:
    share, groups = case.share(rank), {"dp_group": dp_group, "replica_groups": replica_groups}
    mine = [one_ for part in share for one_ in part] if isinstance(share, list) else []

    def prepare() -> Any:
        if not isinstance(share, list):
            return None if share is None else share()
        return [Samples([one_.mask for one_ in part], **all_ids(part)) for part in share]

    said: dict[str, Any] | str
    counted = {name: Mock(wraps=getattr(dist, name)) for name in COLLECTIVES}
    try:
        with patch.multiple(dist, **counted), patch.object(collectives, "ONE_HOP_RANKS", case.one_hop_ranks):
            totals = reduce_step_totals(attempt(prepare), count_prompts=case.count_prompts, **groups)
        said = said_of(totals, mine)
        if case.count_prompts and None not in [*case.shares, *(case.other_replicas or [])] and isinstance(share, list):
            assert said_of(all_totals(mine, **groups), mine) == said, "the public constructor must say the same"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {name: mock.call_count for name, mock in counted.items() if mock.called}, said


def reports_of_rank() -> dict[str, Report]:
    start_process_group()
    rank, reports = int(os.environ["RANK"]), {}
    all_groups = [group for dp_groups, replicas in GRIDS.values() for group in [*dp_groups, *chain(*replicas)]]
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(map(tuple, all_groups)))}
    for name, case in CASES.items():
        dp_groups, replicas = GRIDS[case.grid]
        if rank in chain(*dp_groups):
            dp_group, *others = (made[tuple(ranks)] for ranks in [*dp_groups, *chain(*replicas)] if rank in ranks)
            reports[name] = run_case(case, rank, dp_group, others)
        dist.barrier()
    return reports


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Report]]:
    """By rank and case."""
    return run_ranks(4, reports_of_rank)


@pytest.mark.parametrize("name", CASES)
def test_over_ranks(name: str, reports: list[dict[str, Report]]) -> None:
    """The totals are those of the union, in the collectives that `reduce_step_totals` says; or all ranks fail."""
    case, (dp_groups, replicas) = CASES[name], GRIDS[CASES[name].grid]
    assert [rank for rank in range(4) if name in reports[rank]] == sorted(chain(*dp_groups))
    for rank in chain(*dp_groups):
        calls, said = reports[rank][name]
        assert isinstance(said, str) == bool(case.fails_with), said
        if isinstance(said, str):
            assert said.startswith("BadBatchError: ") or case.fails_with[0].startswith(SHARED)
            assert all(fragment in said for fragment in case.fails_with), said
            continue
        share, over_dp = case.share(rank), len(dp_groups[0]) > 1
        by_id = {kind for kind in KINDS if ids_of(case.step, kind) and (kind == "rollout" or case.count_prompts)}
        exchanged = over_dp and bool(by_id) and share is not None
        expected = {"all_reduce": over_dp + len(replicas) + exchanged, "all_to_all_single": 3 * exchanged}
        if case.one_hop_ranks == 1:  # two hops, to one other rank each: counts, rows and answers, if there are any
            assert 2 <= calls.pop("batch_isend_irecv") <= 6
            del expected["all_to_all_single"]
        assert calls == {call: n for call, n in expected.items() if n}
        if not callable(share):
            right = expected_of(case.step, [one_ for part in share or [] for one_ in part], case.count_prompts)
            for kind in ("prompt", *by_id) if share is None else ():  # it takes no part in the exchange by id
                right |= dict.fromkeys([f"{kind}s.all", f"{kind}s.active"])
            assert said == right


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


# --- refusals, each beside its nearest legal neighbour

COUNT = {"all": 4}
ONE, BOTH = Samples([torch.ones(1)]), Samples([torch.ones(1)], rollout_ids=[0], prompt_ids=[0])
BY_PROMPT, NOTHING = Samples([torch.ones(1)], prompt_ids=[0]), Samples([])


def of_two(**ids: Any) -> StepTotals:
    """Anywhere in the step: ids that repeat from prompt to prompt would join rollouts that have nothing in common."""
    return StepTotals.from_loss_masks([torch.ones(1), torch.ones(2)], **ids)


REFUSALS = {
    **refusals(
        UnitCounts,
        ({"all": -1}, "all is -1: it must be a finite number >= 0", {"all": 0}),
        ({"active": INF}, "active is inf", {"active": 10**9}),
        ({"all": True}, "all is True", {"all": 1}),
        ({"all": {0: 1}}, "all is {0: 1}", {"tokens": {0: 1}}),
        ({"all": 2, "active": 3}, "3 active units of 2", {"all": 3, "active": 3}),
        ({"tokens": {0: -1.0}}, "the token count of .*0 is -1.0", {"tokens": {0: 0.0}}),
        ({"tokens": {"a": NAN}}, "the token count of .*'a' is nan", {"tokens": {"a": 0.5}}),
        ({"tokens": {0: True}}, "is True", {"tokens": {0: 1}}),
    ),
    **refusals(
        UnitCounts,
        ({"tokens": 4.0}, "tokens is 4.0.*Pass a dict", {"tokens": {}}),
        ({"tokens": {0.5: 1}}, r"holds 0.5 \(float\)", {"tokens": {5: 1}}),
        error=TypeError,
    ),
    **refusals(
        StepTotals,
        ({"step_tokens": NAN}, "step_tokens is nan", {"step_tokens": 0.5}),
        ({"step_active_tokens": "9"}, "is '9'.*Pass the count of the whole step", {"step_active_tokens": 9}),
        (
            {"step_tokens": 4, "step_active_tokens": 0},
            "step_tokens of 4 and step_active_tokens of 0",
            {"step_tokens": 0, "step_active_tokens": 0},
        ),
        (
            {"step_tokens": 4, "prompts": UnitCounts(tokens={0: 5})},
            "step_tokens alone are 5: the totals say 4",
            {"step_tokens": 5, "prompts": UnitCounts(tokens={0: 5})},
        ),
    ),
    **refusals(
        StepTotals,
        ({"rollouts": 4}, "rollouts is 4: it must be UnitCounts", {"rollouts": UnitCounts(all=4)}),
        ({"prompts": COUNT}, "prompts is {'all': 4}: it must be UnitCounts", {"prompts": UnitCounts(all=4)}),
        error=TypeError,
    ),
    **refusals(
        of_two,
        (
            {"rollout_ids": [0, 0], "prompt_ids": [0, 1]},
            "one rollout id is used under two prompt ids.*Join prompt and rollout index into one id",
            {"rollout_ids": [0, 0], "prompt_ids": [1, 1]},
        ),
        (
            {"rollout_ids": ["0", "0"], "prompt_ids": ["a", "b"]},
            "one rollout id is used under two prompt ids",
            {"rollout_ids": ["a/0", "b/0"], "prompt_ids": ["a", "b"]},
        ),
    ),
    **refusals(
        reduce_step_totals,
        (([ONE, Samples([torch.ones(2, device="meta")])],), r"micro-batches on \['cpu', 'meta'\]: they", ([ONE, ONE],)),
        (([BOTH, BY_PROMPT],), "rollout_ids on 1 of 2 micro-batches: they must be given on", ([BOTH, NOTHING],)),
        (([ONE, BY_PROMPT],), "prompt_ids on 1 of 2 micro-batches", ([NOTHING, BY_PROMPT],)),
    ),
}


test_refusals = refusal_tests(REFUSALS)


def test_a_stated_count_that_is_wrong_is_named_with_its_mask() -> None:
    samples = Samples([torch.ones(3)], term_masks={"correct": [torch.tensor([1.0, 0, 0])]})
    for tokens, correct, text in ((9, 1, "^step_tokens of 9"), (3, 2, "^correct: step_tokens of 2")):
        stated = StepTotals(step_tokens=tokens, by_mask={"correct": StepTotals(step_tokens=correct)})
        with pytest.raises(ValueError, match=text):
            compare_totals(stated, [samples], dp_group=None, replica_groups=[], masks=["correct"])

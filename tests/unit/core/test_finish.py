"""The end of a step over real gloo groups: values that all ranks agree on, and errors that reach all of them.

Four ranks, data-parallel 2 x context-parallel 2, in one launch.
"""

import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import outcome_of

from megatron_rl_loss import Metric, Microbatch, Samples, Term, ZigzagTHD, plan_step
from megatron_rl_loss.core.plan import Plan

RANKS, LENGTH = 4, 8
AVERAGED: Any = "averaged over ranks"
SUMMED: Any = "summed over ranks"
Metrics = dict[str, Any]


def values_on(rank: int) -> torch.Tensor:
    """Values of the 4 tokens that a rank holds."""
    return torch.arange(4.0) + 10 * rank


#: Metrics of a rank and micro-batch; the last micro-batch of DP rank 1 has no active token.
MetricsOf = Callable[[int, int], Metrics]


def some_kinds(rank: int, number: int) -> Metrics:
    """Metrics of five kinds, in another order on each rank."""
    values = values_on(rank) + number
    names = {"most": "max", "least": "min", "spread": "variance", "share": "ess", "even": "mean"}
    metrics = {name: Metric(values, "tokens", kind=kind) for name, kind in names.items()}  # type: ignore[arg-type]
    order = list(metrics) if rank % 2 else list(metrics)[::-1]
    return {name: metrics[name] for name in order}


def without(name: str, *, on: Callable[[int, int], bool]) -> MetricsOf:
    return lambda rank, n: {k: v for k, v in some_kinds(rank, n).items() if k != name or not on(rank, n)}


def two_kinds(rank: int, number: int) -> Metrics:
    return {"x": Metric(values_on(rank), kind="max" if rank == 2 else "mean")}


MISSING = (
    "micro-batch {} reports .*while another, maybe of another rank, reports {!r}: the tokens of .* would count as 0"
)
#: Steps one after the other of one plan each: metrics, and what all ranks are told; "" where they agree.
STEPS: dict[str, tuple[MetricsOf, str]] = {
    "every kind, in any order": (some_kinds, ""),
    "again": (some_kinds, ""),
    "one appears": (lambda rank, n: {**some_kinds(rank, n), "new": values_on(rank)}, ""),
    "none": (lambda rank, n: {}, ""),
    "missing where there is no token": (without("even", on=lambda rank, n: rank >= 2 and n == 1), ""),
    "missing on a rank": (without("even", on=lambda rank, n: rank == 1), MISSING.format("[01]", "even")),
    "missing in a micro-batch": (without("most", on=lambda rank, n: rank == 0 and n == 1), MISSING.format(1, "most")),
    "on one rank alone": (without("least", on=lambda rank, n: rank != 3), MISSING.format("[01]", "least")),
    "of two kinds": (two_kinds, "a name must have one kind, mask, aggregation and coefficient in a step"),
    "over two units": (
        lambda rank, n: {"x": Metric(values_on(rank), "tokens" if rank else "samples")},
        "a name must have one",
    ),
    "over two units in turn": (
        lambda rank, n: {"x": Metric(values_on(rank), "tokens" if n else "none")},
        "a name must have",
    ),
}


def described(dp_rank: int, cp_group: Any = None) -> list[Samples]:
    layout, tokens = ZigzagTHD([0, LENGTH]), torch.arange(LENGTH)
    masks = [[1, 1, 0, 1, 1, 1, 1, 1], [1 - dp_rank] * LENGTH]
    ids = [f"r{dp_rank}{n}" for n in range(2)]
    return [
        Samples([mask], layout=layout, rollout_ids=[rollout], tokens=tokens, cp_group=cp_group)
        for mask, rollout in zip(masks, ids, strict=True)
    ]


def train(plan: Plan, rank: int, metrics: MetricsOf) -> list[Any]:
    """The reports of a step."""

    def loss(number: int, microbatch: Microbatch) -> Any:
        return microbatch.loss(values_on(rank).requires_grad_(), metrics(rank, number), form="3-tuple")[2]

    return [loss(number, microbatch) for number, microbatch in enumerate(plan)]


def outcomes_on_rank() -> dict[str, Any]:
    start_process_group()
    rank = int(os.environ["RANK"])
    dp: Any = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    cp: Any = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    calls: list[str] = []
    for name in ("all_reduce", *(name for name in vars(dist) if name.startswith("all_gather"))):

        def counted(*args: Any, name: str = name, function: Any = getattr(dist, name), **kwargs: Any) -> Any:  # noqa: B008
            calls.append(name)
            return function(*args, **kwargs)

        setattr(dist, name, counted)

    def planned(**options: Any) -> Plan:
        return plan_step(
            described(rank // 2), "token_mean", dp_group=dp, cp_group=cp, **({"gradients": SUMMED} | options)
        )

    outcomes: dict[str, Any] = {}
    for name, (metrics, _) in STEPS.items():
        plan = planned()
        reports = train(plan, rank, metrics)
        calls.clear()
        told = outcome_of(functools.partial(plan.finish, reports))
        outcomes[name] = told, [*calls], {key: float(value) for key, value in reports[0].items()}
    # --- errors of a rank
    plan = planned()
    plan[0].loss(values_on(rank).requires_grad_())
    if rank != 2:
        plan[1].loss(values_on(rank).requires_grad_())
    outcomes["half of the plan on a rank"] = outcome_of(plan.finish)
    plan = planned(terms={"kl": "token_mean"})
    train(plan, rank, lambda rank, n: {})
    outcomes["a mode for a term that the loss lacks"] = outcome_of(plan.finish)
    plan = planned()
    plan.record.wrong_tokens.append(torch.tensor(5 * (rank == 1)))  # as of tokens on a device
    train(plan, rank, lambda rank, n: {})
    outcomes["a model that cuts otherwise"] = outcome_of(plan.finish)
    told = AVERAGED if rank == 1 else SUMMED
    outcomes["other gradients on a rank"] = outcome_of(lambda: planned(gradients=told))
    outcomes["gradients forgotten on a rank"] = outcome_of(lambda: planned(gradients=None if rank == 1 else SUMMED))
    empty_step = "error" if rank == 1 else "warn"
    outcomes["another empty_step on a rank"] = outcome_of(lambda: planned(empty_step=empty_step))
    plan = planned()
    mode = "sample_mean" if rank == 3 else "token_mean"
    for microbatch in plan:
        losses = values_on(rank).requires_grad_()
        microbatch.loss({"pg": losses, "kl": Term(losses, mode)})
    outcomes["a term of another mode on a rank"] = outcome_of(plan.finish)
    plan = planned()
    for microbatch in plan:
        microbatch.loss(values_on(rank).requires_grad_(), form="2-tuple" if rank == 3 else None)
    outcomes["another form on a rank"] = outcome_of(plan.finish)
    # --- values over context-parallel groups that change
    solo: Any = [dist.new_group([member]) for member in range(RANKS)][rank]
    own = [described(rank // 2, cp)[0], *[Samples([[1] * 4], rollout_ids=[f"s{rank}"], cp_group=solo)]]
    plan = plan_step(own, "token_mean", dp_group=dist.group.WORLD, gradients=SUMMED)
    averaged = plan_step(own, "token_mean", dp_group=dist.group.WORLD, gradients=AVERAGED)
    factors = list[float]()
    for summed, averaging in zip(plan, averaged, strict=True):
        values = values_on(rank).requires_grad_()
        loss = summed.loss(values, {"most": Metric(values_on(rank), kind="max")})
        factors.append(float(averaging.loss(values).detach() / loss.detach()))
    outcomes["dynamic, averaged"] = factors
    outcomes["dynamic"] = {key: float(value) for key, value in plan.finish().items()}
    dist.barrier()
    return outcomes


@pytest.fixture(scope="module")
def by_rank() -> list[Any]:
    return run_ranks(RANKS, outcomes_on_rank)


def step_values() -> dict[str, float]:
    """Values of the step by plain sums over the ranks' tokens: zigzag of 8 tokens over 2 ranks."""
    held, seen, losses = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}, list[float](), list[float]()
    for rank in range(RANKS):
        for number in range(2):
            mask = described(rank // 2)[number].loss_masks[0]
            for k, token in enumerate(held[rank % 2]):
                if mask[token]:
                    losses.append(k + 10.0 * rank)
                    seen.append(k + 10.0 * rank + number)
    mean, square = sum(seen) / len(seen), sum(value * value for value in seen) / len(seen)
    kinds = {"most": max(seen), "least": min(seen), "even": mean, "spread": square - mean**2, "share": mean**2 / square}
    return {"pg_loss": sum(losses) / len(losses), **kinds}


@pytest.mark.parametrize("name", STEPS)
def test_values_of_a_step_over_ranks(name: str, by_rank: list[Any]) -> None:
    """Two reductions over both groups, three with extremes; or all ranks are told what one of them lacks."""
    _, told = STEPS[name]
    expected = step_values()
    assert len({str(sorted(outcomes[name][2].items())) for outcomes in by_rank}) == 1 or told
    for outcomes in by_rank:
        outcome, calls, report = outcomes[name]
        if told:
            assert re.search(f"^(BadBatchError|ValueError): .*{told}", outcome), outcome
            assert all(math.isnan(value) for value in report.values())
            continue
        assert outcome == "accepted"
        alike = name not in ("missing where there is no token",)
        assert calls == ["all_reduce"] * (2 * (2 + ("most" in report))) or not alike
        if name == "none":
            assert report.keys() == {"pg_loss"}
        assert {key: value for key, value in report.items() if key != "new"} == pytest.approx(
            {key: expected[key] for key in report if key != "new"}, rel=1e-5
        )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "half of the plan on a rank",
            r"rank 2: ValueError: a plan of 2 micro-batches, of which \[1\] were not trained",
        ),
        (
            "another empty_step on a rank",
            "rank.* 1.*this rank asks for .*empty_step 'error', another rank for something",
        ),
        (
            "a term of another mode on a rank",
            "ValueError: metrics .*'kl'.*a name must have one kind, mask, aggregation and coefficient",
        ),
        ("another form on a rank", r"ValueError: losses of a step in the forms \['2-tuple', 'summed over ranks'\]"),
        (
            "other gradients on a rank",
            "rank.* 1.*this rank asks for .*gradients averaged over ranks.*, another rank for something",
        ),
        (
            "gradients forgotten on a rank",
            'rank 1: ValueError: a plan over 4 ranks without gradients=: .*"averaged over ranks" .*"summed over ran',
        ),
        ("a mode for a term that the loss lacks", "ValueError: a mode for the term 'kl', and a loss of"),
        ("a model that cuts otherwise", "rank 1: ValueError: 5 local tokens that are not those of the plan's layout"),
    ],
)
def test_an_error_of_one_rank_reaches_all(name: str, told: str, by_rank: list[Any]) -> None:
    for outcomes in by_rank:
        assert re.search(told, outcomes[name]), outcomes[name]


def test_values_where_context_parallel_groups_change(by_rank: list[Any]) -> None:
    held, masks = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}, [samples.loss_masks[0] for samples in described(0)[:1]]
    first_losses = [k + 10 * rank for rank in range(RANKS) for k, t in enumerate(held[rank % 2]) if masks[0][t]]
    losses = first_losses + [k + 10 * rank for rank in range(RANKS) for k in range(4)]
    for outcomes in by_rank:
        assert outcomes["dynamic, averaged"] == [RANKS, RANKS]
        assert outcomes["dynamic"] == pytest.approx({"pg_loss": sum(losses) / len(losses), "most": 33})

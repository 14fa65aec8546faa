"""What a micro-batch hands Megatron: the carriers' counts, its reducers, and the cut for a CP rank, in this process.

The real schedule, DDP and reduction are in test_aggregation.py, what is refused in the schedule in test_bad_input.py.
"""

from typing import Any

import oracle
import pytest
import torch
from refusals import Call, Refusal, check_refusal, each_of
from steps import divisor_of, ids_of, totals_of
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, ZigzagBSHD, ZigzagTHD
from megatron_rl_loss.megatron import AggregationSettings, Microbatch
from megatron_rl_loss.plan import Plan

STEP = [
    oracle.sample([1, 2, 3, 4], [1, 1, 0.5, 1], rollout_id="a", prompt_id=0),
    oracle.sample([5, 6], [1, 1], rollout_id="a", prompt_id=0),
    oracle.sample([-1, 0.5, 2, 7, 1, 3], [1, 0.25, 0, 1, 0, 0], rollout_id="b", prompt_id=1),
    oracle.sample([2], [0], rollout_id="c", prompt_id=1),
]
HALVES = [[0, 2], [1, 3]]


def step_with(mode: str = "sample_mean", units: str = "all", **changes: Any) -> Plan:
    settings = AggregationSettings.resolve(mode, divisor_of(mode), units)  # type: ignore[arg-type]
    given = {"samples": None, "totals": totals_of(STEP), "num_microbatches": 2}
    return Plan(modes=settings.modes, **{**given, **changes})


def samples_of(chosen: list[int], layout: Any = None) -> Samples:
    samples = [STEP[i] for i in chosen]
    return Samples([one.mask for one in samples], layout=layout, **ids_of(samples))


def losses_of(chosen: list[int]) -> Tensor:
    return torch.cat([STEP[i].losses for i in chosen]).float().requires_grad_()


# --- the carriers


def test_per_token_tokens_are_counted_as_they_are() -> None:
    """So that what else Megatron divides by the count keeps its scale; a token that all CP ranks hold counts once."""
    for layout, expected in (
        (ZigzagTHD([0, 4, 12], [4, 6]), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
        (Gathered([0, 4, 10]), [list(range(10)), []]),
    ):
        samples = samples_of([0, 2], layout)
        for cp_rank, positions in enumerate(expected):
            step = step_with(cp_rank=cp_rank, cp_size=2, per_token_loss=True)
            microbatch = Microbatch(samples, step)
            losses = torch.ones(len(samples.local(cp_rank, 2)), requires_grad=True)
            _, count, _ = microbatch.loss(losses)
            assert int(count) == int((samples.local(0, 1).mask[positions] != 0).sum()), (layout, cp_rank)


def test_a_share_of_ones_own_is_carried_alike() -> None:
    microbatch = Microbatch(samples_of([0, 1]), step_with("token_mean", num_microbatches=2, dp_size=3))
    losses = losses_of([0, 1])
    share = microbatch.pg_loss(losses) + 0.5 * microbatch.sample_mean(losses.square())
    loss, count, report = microbatch.carry(share, microbatch.report({"a": share, "b": microbatch.token_mean(losses)}))
    assert float(loss.detach()) == pytest.approx(6 * float(share.detach()), rel=oracle.ROUNDING)
    assert int(count) == 1
    assert list(report) == ["a", "b"]
    assert not any(pair.requires_grad for pair in report.values())
    assert microbatch.report({"b": share, "a": share}).keys() == {"a", "b"}  # any order
    bare = Microbatch(samples_of([0]), step_with())
    assert bare.carry(bare.pg_loss(losses_of([0])))[2] == bare.report({}) == {}


# --- the cut for a CP rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_local_cuts_every_dtype(dtype: torch.dtype) -> None:
    microbatch = Microbatch(samples_of([0], ZigzagTHD([0, 4])), step_with(cp_rank=1, cp_size=2))
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(microbatch.local(values), values[1:3])


def test_local_cuts_what_has_a_value_a_token() -> None:
    packed = samples_of([0, 2], ZigzagTHD([0, 8, 16], [4, 6]))
    rows = Samples([torch.ones(4)] * 2, layout=ZigzagBSHD(2, 4))
    whole, batch = torch.arange(16), torch.arange(8).view(2, 4)
    both = torch.stack([whole, -whole], 1)
    for cp_rank, held in enumerate([[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]):
        step = step_with(cp_rank=cp_rank, cp_size=2)
        microbatch = Microbatch(packed, step)
        assert microbatch.local(whole).tolist() == held
        assert microbatch.local(whole[None]).tolist() == [held]
        assert microbatch.local(both).tolist() == [[p, -p] for p in held]
        assert microbatch.local(both[None]).shape == (1, 8, 2)
        columns, of_rows = [[0, 3], [1, 2]][cp_rank], Microbatch(rows, step)  # row by row
        assert of_rows.local(batch).tolist() == batch[:, columns].tolist()
        assert of_rows.local(batch.flatten()).tolist() == batch[:, columns].flatten().tolist()
        with pytest.raises(ValueError, match=r"shape \(4, 2\)"):  # which would be cut as a whole
            of_rows.local(batch.view(4, 2))
    alone = Microbatch(samples_of([0, 1]), step_with())
    assert alone.local(torch.arange(6)).tolist() == list(range(6))


# --- refusals that show here alone, each beside its nearest legal neighbour; the others: test_bad_input.py


def loss_with(losses: Tensor | None = None, **changes: Any) -> Call:
    given = losses_of([0]) if losses is None else losses
    return lambda: Microbatch(samples_of([0]), step_with(**changes)).loss(given)


def cut(tensor: Tensor) -> Call:
    samples = samples_of([0], ZigzagTHD([0, 4]))
    return lambda: Microbatch(samples, step_with(cp_rank=1, cp_size=2)).local(tensor)


KNOWN = totals_of(STEP)
REFUSALS: dict[str, Refusal] = {
    "per-token loss without its count": (
        loss_with(per_token_loss=True, totals=StepTotals(rollouts=KNOWN.rollouts)),
        ValueError,
        "totals without step_active_tokens: what is returned is multiplied by it",
        loss_with(per_token_loss=True, totals=StepTotals(rollouts=KNOWN.rollouts, step_active_tokens=9)),
    ),
    "a cut of another number of tokens": (cut(torch.ones(5)), ValueError, r"shape \(5,\)", cut(torch.ones(4))),
    "a cut of tokens in the second dimension": (
        cut(torch.ones(2, 4)),
        ValueError,
        r"shape \(2, 4\)",
        cut(torch.ones(1, 4)),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_without_gradients_no_graph_is_needed() -> None:
    """Megatron evaluates under no_grad."""
    with torch.no_grad():
        loss, _, _ = loss_with(losses=torch.ones(4))()
    assert not loss.requires_grad

"""Sums and scans of sequences: collectives over gloo, by hand on one rank, refusals. Layouts: test_formulas.py."""

import itertools
import math
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import bytes_reduced, run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import (
    Gathered,
    Samples,
    StepTotals,
    ZigzagTHD,
    ppo_clip_loss,
    segment_mean,
    segment_scan,
    segment_sum,
    to_tokens,
)
from megatron_rl_loss.losses import place

NAN, INF = math.nan, math.inf
# --- collectives

NUM_SAMPLES = 6
CHUNKS = 4 * NUM_SAMPLES  # zigzag, of two ranks


def count_on_rank() -> None:
    """One collective each way, whose bytes depend on neither lengths nor the rows that need no gradient."""
    start_process_group()
    rank, sent = int(os.environ["RANK"]), bytes_reduced()
    for length, cp_size in itertools.product((4, 64), (1, 2)):
        cu_seqlens = [length * i for i in range(NUM_SAMPLES + 1)]
        for layout in (ZigzagTHD(cu_seqlens), Gathered(cu_seqlens)):
            local = Samples([torch.ones(length)] * NUM_SAMPLES, layout=layout).local(rank % cp_size, cp_size)
            cut = cp_size > 1 and isinstance(layout, ZigzagTHD)
            for trained, data in [(1, 0), (4, 0), (0, 2), (1, 2)]:
                rows = [torch.randn(len(local), requires_grad=k < trained) for k in range(trained + data)]
                both = 8 * (trained + data + 1) * CHUNKS
                sizes = {segment_sum: [8 * (trained + data) * NUM_SAMPLES, 8 * trained * NUM_SAMPLES]}
                for function, expected in {**sizes, segment_scan: [both, both]}.items():
                    results = function(rows[::-1], local, dist.group.WORLD if cp_size > 1 else None)
                    if trained:
                        results.square().sum().backward()
                    assert sent == expected[: 2 if trained else 1] * cut, (layout, length, trained, data, function)
                    sent.clear()
            turns = [[i // 2] * (length - 1) + [100] for i in range(NUM_SAMPLES)]  # two of each sample
            local = Samples([torch.ones(length)] * NUM_SAMPLES, layout=layout, ids={"turn": turns}).local(
                rank % cp_size, cp_size
            )
            group = dist.group.WORLD if cp_size > 1 else None
            sums = segment_sum(torch.ones(len(local), requires_grad=True), local, group, per="turn")
            sums.sum().backward()
            assert sums.tolist() == [2 * (length - 1), NUM_SAMPLES] * NUM_SAMPLES
            assert sent == [8 * 2 * NUM_SAMPLES] * 2 * cut
            sent.clear()


def test_one_collective_whose_bytes_do_not_depend_on_lengths() -> None:
    run_ranks(2, count_on_rank, timeout_s=600)


# --- on one rank

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), torch.tensor([1])]
TURNS = [["u", "v", ""], ["", "w"], ["v"]]
IDS: dict[str, Any] = {
    "rollout_ids": [2, 1, 2],
    "prompt_ids": ["q", "p", "q"],
    "ids": {"session": [7, 8, 8], "turn": TURNS},
}


def local_of(masks: list[Any], **ids: Any) -> Any:
    return Samples(masks, **ids).local(0, 1)


VALUES = [1.0, 2.0, NAN, INF, -INF, 2.0]
SCANNED = {"per": "rollout", "gamma": 0.5, "reverse": True, "exclusive": True}
#: The results, and the gradient where the n-th result has the slope n, from 1 on.
BY_HAND: list[tuple[Any, dict[str, Any], list[float], list[float]]] = [
    (segment_sum, {}, [3, 0, 2], [1, 1, 0, 0, 0, 3]),
    (segment_mean, {}, [1.5, 0, 2], [0.5, 0.5, 0, 0, 0, 3]),
    (lambda x, at: to_tokens(segment_mean(x, at), at), {}, [1.5, 1.5, 1.5, 0, 0, 2], [3, 3, 0, 0, 0, 6]),
    # of units whose samples need not be neighbours
    (segment_sum, {"per": "rollout"}, [5, 0, 5], [4, 4, 0, 0, 0, 4]),
    (segment_mean, {"per": "prompt"}, [5 / 3, 0, 5 / 3], [4 / 3, 4 / 3, 0, 0, 0, 4 / 3]),
    (segment_sum, {"per": "session"}, [3, 2, 2], [1, 1, 0, 0, 0, 5]),
    # of the parts of turns: u and v of the first sample, w of the second, v of the third
    (segment_sum, {"per": "turn"}, [1, 4, 0, 4], [1, 6, 0, 0, 0, 6]),
    (segment_mean, {"per": "turn"}, [1, 2, 0, 2], [1, 3, 0, 0, 0, 3]),
    (
        lambda x, at: to_tokens(segment_mean(x, at, per="turn"), at, per="turn"),
        {},
        [1, 2, 0, 0, 0, 2],
        [1, 4, 0, 0, 0, 4],
    ),
    (segment_scan, {"per": "rollout"}, [1, 3, 0, 0, 0, 5], [9, 8, 0, 0, 0, 6]),
    (segment_scan, SCANNED, [3, 2, 0, 0, 0, 0], [0, 1, 0, 0, 0, 2.5]),
    (segment_scan, SCANNED | {"steps": "all"}, [2.5, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1.25]),
]


@pytest.mark.parametrize(("function", "how", "expected", "gradient"), BY_HAND)
def test_by_hand(function: Any, how: dict[str, Any], expected: list[float], gradient: list[float]) -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    results = function(values, local_of(MASKS, **IDS), **how)
    assert results.tolist() == pytest.approx(expected)
    (results * torch.arange(1, len(results) + 1)).sum().backward()
    assert values.grad.tolist() == pytest.approx(gradient)


def test_the_future_kl_of_fipo_counts_positions() -> None:
    """FutureKL_t = sum_{k >= t} gamma^(k - t) M_k log r_k: masked tokens are steps (ms-swift's loss_type fipo)."""
    mask = [1, 0, 0, 0, 0, 0, 0, 1]
    sums = segment_scan(torch.tensor([0.1] * 8), local_of([mask]), gamma=0.9, steps="all", reverse=True)
    assert float(sums[0]) == pytest.approx(0.1 + 0.9**7 * 0.1)
    assert float(segment_scan(torch.full((8,), 0.1), local_of([mask]), gamma=0.9, reverse=True)[0]) == pytest.approx(
        0.19
    )
    padded = Samples([[1, 1], [1]], layout=Gathered([0, 4, 6], total_lengths=[2, 1]), rollout_ids=[0, 0]).local(0, 1)
    sums = segment_scan(torch.ones(6), padded, gamma=0.5, steps="all", per="rollout")
    assert sums.tolist() == [1, 1.5, 0, 0, 1.75, 0]  # padding is no step


def test_dtypes_and_none() -> None:
    local = local_of(MASKS)
    for dtype, sum_dtype in [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]:
        values = torch.ones(6, dtype=dtype, requires_grad=True)
        total = segment_sum(values, local)
        assert total.dtype == sum_dtype
        total.sum().backward()
        assert values.grad.dtype == dtype
    for empty in (torch.zeros(0, requires_grad=True), torch.zeros(1, 0, requires_grad=True)):
        no_means = segment_mean(empty, local_of([]))
        assert no_means.shape == (0,)
        to_tokens(no_means, local_of([])).sum().backward()
        assert segment_scan(empty, local_of([])).shape == empty.grad.shape == empty.shape


def test_long_sums_are_exact() -> None:
    """Float32 tokens, added in float64: only the result is rounded. 0.9 ** 100,000 is 0 even in float64."""
    values, local = torch.full((2**22,), 0.1), local_of([torch.ones(2**22, dtype=torch.bool)])
    assert float(segment_sum(values, local)) == pytest.approx(float(values[0]) * 2**22, rel=oracle.ROUNDING)
    sums = segment_scan(torch.ones(100_000), local_of([torch.ones(100_000)]), gamma=0.9, reverse=True)
    assert sums[[0, 50_000, -2, -1]].tolist() == pytest.approx([10, 10, 1.9, 1], rel=oracle.ROUNDING)


@pytest.mark.parametrize("lengths", [(4, 2), (5,)])
@pytest.mark.parametrize("name", ["segment_scan", "segment_sum", "segment_mean", "to_tokens"])
def test_what_is_changed_before_backward_changes_no_gradient(name: str, lengths: tuple[int, ...]) -> None:
    """A buffer of a batch that is refilled between the passes: values, masks and discounts."""

    def gradient(refill: bool) -> Tensor:
        masks = [torch.tensor([1.0, 0.5, 0, 2, 1][:length]) for length in lengths]
        gamma = torch.full((len(lengths),), 0.5, dtype=torch.float64)
        local = Samples(masks).local(0, 1)
        leaf = torch.arange(1.0, 1 + (len(lengths) if name == "to_tokens" else sum(lengths))).requires_grad_()
        values = leaf * 1
        function: Any = {
            "segment_scan": partial(segment_scan, gamma=gamma),
            "segment_sum": segment_sum,
            "segment_mean": segment_mean,
            "to_tokens": to_tokens,
        }[name]
        results = function(values, local)
        with torch.no_grad():
            for given in [values, gamma, *masks] if refill else []:
                given.zero_()
        return torch.autograd.grad((results * torch.arange(1.0, 1 + len(results))).sum(), leaf)[0]

    right = gradient(False)
    assert torch.equal(gradient(True), right)
    assert right.any()


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([1.0, bad, 2, 3, 4, bad, 5])
        local = local_of([torch.ones(4), torch.ones(1), torch.tensor([0, 1])])
        sums = segment_scan(values, local)
        assert sums.isfinite().tolist() == [True, *[False] * 3, True, True, True]
        assert sums[[0, 4, 5, 6]].tolist() == [1, 4, 0, 5]
        assert segment_sum(values, local)[1:].tolist() == [4, 5]
    values.requires_grad_()
    segment_sum(values, local_of([[1, 1, 1, 1], [0], [0, 1]])).log().sum().backward()
    assert values.grad[4:].tolist() == pytest.approx([0, 0, 0.2])  # 1 / 0 of a masked sample is not its tokens'


# --- refusals, each beside its nearest legal neighbour


WHOLE, MASKED = torch.ones(6), local_of(MASKS, ids={"session": [1, 1, 2], "turn": TURNS})
PPO = ppo_clip_loss(-WHOLE, -WHOLE, WHOLE, WHOLE)
AT_CP_2 = Samples(MASKS, layout=Gathered([0, 3, 5, 6])).local(0, 2)  # where all tokens are on every rank
CUT = Samples(MASKS, layout=ZigzagTHD([0, 4, 8, 12], total_lengths=[3, 2, 1])).local(0, 2)


def sums(values: Any = WHOLE, local: Any = MASKED, **more: Any) -> Tensor:
    return segment_sum(values, local, **more)


def unit_sums(per: str, tokens: dict[str, float]) -> Tensor:
    """Segment sums in a step whose units have so many tokens, which their micro-batch knows."""
    masks = [[1.0] * int(number) + [number % 1] for number in tokens.values()]
    totals = StepTotals.of(Samples(masks, ids={per: [*tokens]}))
    local = local_of(MASKS, ids={per: ["a", "a", "b"]})
    return segment_sum(WHOLE, SimpleNamespace(tokens=local, cp_group=None, totals=totals), per=per)


# As much of a process group as is looked at before anything is exchanged.
TWO_RANKS, FOUR_RANKS = ({"local": AT_CP_2, "cp_group": SimpleNamespace(size=lambda n=n: n)} for n in (2, 4))
REFUSALS = {
    **refusals(
        sums,
        ((torch.ones(5),), r"of shape \(5,\): this rank's part of the layout is \(6,\)", (torch.ones(1, 6),)),
        (([WHOLE, torch.ones(4)],), r"a value of segment_sum of shape \(4,\)", ([WHOLE, WHOLE],)),
        (([],), "segment_sum of no values: there must be a tensor at least", ([WHOLE],)),
        (
            {"per": "prompt"},
            r"per='prompt' and samples without prompt_ids \(they have session, turn\): .+ prompt_ids",
            {"per": "session"},
        ),
        (FOUR_RANKS, "a cp_group of 4 ranks: the micro-batch is cut for 2", TWO_RANKS),
        ({"local": CUT}, "no cp_group: a sample's tokens lie on 2 ranks", {"local": AT_CP_2}),
    ),
    **refusals(
        unit_sums,
        (
            ("rollout", {"a": 2.125, "b": 1}),
            "rollout of sample 0, 2 of whose 2.125 mask",
            ("rollout", {"a": 2, "b": 1}),
        ),
        (("task", {"a": 2, "b": 2}), "task of sample 2, 1 .+ Keep a task's samples", ("task", {"a": 2, "b": 1})),
    ),
    **refusals(
        partial(segment_scan, WHOLE, MASKED),
        ({"per": "turn"}, "a scan per='turn' with ids per token", {"per": "session"}),
        ({"steps": "none"}, "there is no such steps. .*Choose one of active, all", {"steps": "all"}),
        ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 0}),
    ),
    **refusals(
        partial(segment_scan, WHOLE, MASKED),
        ({"reverse": "no"}, "reverse is 'no': it must be True or False", {"reverse": False}),
        ({"exclusive": 0}, "exclusive is 0: it must be True or False", {"exclusive": True}),
        error=TypeError,
    ),
    **refusals(
        lambda *shape: to_tokens(torch.ones(shape), MASKED),
        ((6,), r"a statistic of shape \(6,\): it must have one number for each of the micro-batch's 3", (3,)),
    ),
    **refusals(
        sums,
        ((WHOLE.int(),), "it must be a float tensor", (WHOLE.double(),)),
        ((PPO,), "a value of segment_sum is a PolicyLoss: .+ Pass its .per_token_loss", (PPO.per_token_loss,)),
        ({"cp_group": WHOLE}, "a process group of type Tensor: it must be a ProcessGroup", {"cp_group": None}),
        ({"local": MASKED.samples}, "local is a Samples: it must say which tokens", {"local": MASKED}),
        error=TypeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)


COUNTED = StepTotals.of([torch.ones(2)], dp_group=None)


def test_another_group_of_as_many_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data-parallel group, say: its ranks hold other samples, and the sums would be right in no layout."""
    own, same, other = (SimpleNamespace(size=lambda: 2, ranks=ranks) for ranks in ([0, 1], [0, 1], [0, 2]))
    monkeypatch.setattr(place, "ranks_of", lambda group: group.ranks)
    microbatch: Any = SimpleNamespace(tokens=AT_CP_2, cp_group=own, totals=COUNTED)
    for group in (None, own, same):
        segment_sum(WHOLE, microbatch, group)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"a cp_group of the ranks \[0, 2\], and a micro-batch that is cut for \[0, 1\]: "
    ):
        segment_sum(WHOLE, microbatch, other)  # type: ignore[arg-type]

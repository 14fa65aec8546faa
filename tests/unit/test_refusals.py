"""What is refused of a step, its totals, its layout and a loss, each beside its nearest legal neighbour."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from oracle import EXACT
from refusals import Call, Refusal, check_refusal, each_of

from megatron_rl_loss import (
    Gathered,
    Layout,
    Samples,
    StepTotals,
    UnitCounts,
    ZigzagBSHD,
    ZigzagTHD,
    make_pg_loss_reducer,
    token_weights,
)
from megatron_rl_loss.losses import group_relative_advantages, ppo_clip_loss
from megatron_rl_loss.modes.names import resolve

MASKS = [torch.ones(4), torch.tensor([1.0, 0, 1, 0])]
IDS = {"rollout_ids": ["a", "a"], "prompt_ids": [0, 0]}
WHOLE = StepTotals.from_loss_masks(MASKS)
BY_ID = StepTotals.from_loss_masks(MASKS, **IDS)  # type: ignore[arg-type]


def reducer(mode: str = "token_mean", totals: Any = WHOLE, **options: Any) -> Call:
    return lambda: make_pg_loss_reducer(mode, MASKS, totals=totals, **options)


class Own(Layout):
    """A layout of one's own over 8 tokens: two slots of 4, and a rank's pieces as given."""

    def __init__(self, *pieces: list[tuple[int, int]], replicated: bool = False) -> None:
        self.pieces, self.replicated_over_cp = pieces, replicated

    @property
    def total_tokens(self) -> int:
        return 8

    def mask_starts(self, mask_lengths: Any) -> Any:
        return [0, 4]

    def local_segments(self, cp_rank: int, cp_size: int) -> Any:
        return [start for start, _ in self.pieces[cp_rank]], [length for _, length in self.pieces[cp_rank]]


def held(*pieces: list[tuple[int, int]], replicated: bool = False) -> Call:
    return lambda: Samples(MASKS, layout=Own(*pieces, replicated=replicated)).local(0, 2)


LOG_PROBS = torch.tensor([-1.0, -0.5, -2.0])


def loss(log_probs: Any = LOG_PROBS, old: Any = LOG_PROBS, advantages: Any = LOG_PROBS, **clip: Any) -> Call:
    return lambda: ppo_clip_loss(log_probs, old, advantages, **clip)


THD = ZigzagTHD([0, 4, 8])

REFUSALS: dict[str, Refusal] = {
    "no totals": (reducer(totals=None), TypeError, "totals is None.*never guessed from a micro-batch", reducer()),
    "totals of one sample": (
        reducer(totals=StepTotals.from_loss_masks(MASKS[:1])),
        ValueError,
        "samples whose step_tokens alone are 6: the totals say 4",
        reducer(totals=StepTotals.from_loss_masks([*MASKS, torch.ones(1)])),
    ),
    "too few rollouts": (
        reducer("constant", StepTotals(rollouts=UnitCounts(all=1)), divisor=8),
        ValueError,
        "samples whose rollouts.all alone are 2",
        reducer("constant", StepTotals(rollouts=UnitCounts(all=2)), divisor=8),
    ),
    "too few active rollouts": (
        reducer("sample_mean", StepTotals(rollouts=UnitCounts(active=1)), units="active"),
        ValueError,
        "samples whose rollouts.active alone are 2",
        reducer("sample_mean", StepTotals(rollouts=UnitCounts(active=2)), units="active"),
    ),
    "a rollout of fewer tokens": (
        reducer("sample_mean", StepTotals(rollouts=UnitCounts(all=1, tokens={"a": 5})), rollout_ids=["a", "a"]),
        ValueError,
        "a rollout with 6 mask tokens in these samples: the totals say it has fewer",
        reducer("sample_mean", StepTotals(rollouts=UnitCounts(all=1, tokens={"a": 6})), rollout_ids=["a", "a"]),
    ),
    "token_weights of one sample's totals": (
        lambda: token_weights("token_mean", Samples(MASKS), StepTotals(step_tokens=5)),
        ValueError,
        "step_tokens alone are 6",
        lambda: token_weights("token_mean", Samples(MASKS), StepTotals(step_tokens=6)),
    ),
    "more active rollouts than all": (
        lambda: StepTotals(rollouts=UnitCounts(all=2, active=3)),
        ValueError,
        "3 active units of 2",
        lambda: StepTotals(rollouts=UnitCounts(all=3, active=3)),
    ),
    "no active token among tokens": (
        lambda: StepTotals(step_tokens=4, step_active_tokens=0),
        ValueError,
        "step_tokens of 4 and step_active_tokens of 0",
        lambda: StepTotals(step_tokens=0, step_active_tokens=0),
    ),
    "units of more tokens than the step": (
        lambda: StepTotals(step_tokens=4, prompts=UnitCounts(tokens={0: 5})),
        ValueError,
        "step_tokens alone are 5: the totals say 4",
        lambda: StepTotals(step_tokens=5, prompts=UnitCounts(tokens={0: 5})),
    ),
    "no CP rank": (
        reducer(layout=THD, cp_size=2),
        ValueError,
        "cp_size=2 without a cp_rank: each rank holds other tokens",
        reducer(layout=THD, cp_rank=0, cp_size=2),
    ),
    "no CP rank for weights": (
        lambda: token_weights("token_mean", Samples(MASKS, layout=THD), WHOLE, cp_size=2),
        ValueError,
        "cp_size=2 without a cp_rank",
        lambda: token_weights("token_mean", Samples(MASKS, layout=THD), WHOLE),
    ),
    "an int above 1": (
        lambda: Samples([torch.tensor([0, 255], dtype=torch.uint8)]),
        ValueError,
        "holds 255.*integer masks 0 or 1",
        lambda: Samples([torch.tensor([0.0, 255])]),
    ),
    "an id in two spellings": (
        lambda: Samples(MASKS, prompt_ids=[0, "0"]),
        ValueError,
        "prompt_ids holds 0 and '0': an int and its string are two ids",
        lambda: Samples(MASKS, prompt_ids=[0, "1"]),
    ),
    "CP parts that overlap": (
        held([(0, 8)], [(4, 4)]),
        ValueError,
        "Own gives position 4 of the buffer to 2 of 2 CP ranks: each token of a sample must be held by 1",
        held([(0, 4)], [(4, 4)]),
    ),
    "a token of no CP rank": (
        held([(0, 4)], [(5, 3)]),
        ValueError,
        "position 4 of the buffer to 0 of 2",
        held([(0, 8)], []),
    ),
    "replicas that are not": (
        held([(0, 8)], [(0, 4)], replicated=True),
        ValueError,
        "must be held by 2",
        held([(0, 8)], [(0, 8)], replicated=True),
    ),
    "a weight that vanishes": (
        reducer("constant", StepTotals(rollouts=UnitCounts(all=10**17)), divisor=1e29),
        ValueError,
        "a token weight that float32 rounds to 0",
        reducer("constant", StepTotals(rollouts=UnitCounts(all=10**17)), divisor=1e20),
    ),
    "a fractional weight that vanishes": (
        lambda: token_weights("token_mean", Samples([torch.tensor([1e-30, 1.0])]), StepTotals(step_tokens=1e17)),
        ValueError,
        "a token weight that float32 rounds to 0",
        lambda: token_weights("token_mean", Samples([torch.tensor([1e-20, 1.0])]), StepTotals(step_tokens=1e17)),
    ),
    "losses for log-probs": (
        loss(log_probs=-LOG_PROBS),
        ValueError,
        "log_probs with values up to 2, 100% of them above 0.*pass -loss",
        loss(log_probs=LOG_PROBS),
    ),
    "advantages for old log-probs": (
        loss(old=torch.tensor([0.7, -1.0, 0.2]), advantages=LOG_PROBS),
        ValueError,
        "old_log_probs with values up to 0.7, 67% of them above 0.*order of the arguments",
        loss(old=LOG_PROBS, advantages=torch.tensor([0.7, -1.0, 0.2])),
    ),
    "advantages with a graph": (
        loss(advantages=LOG_PROBS.clone().requires_grad_()),
        ValueError,
        "advantages that require grad.*Detach them",
        loss(advantages=LOG_PROBS.clone().requires_grad_().detach()),
    ),
    "an upper bound for a width": (
        loss(clip_high=1.28),
        ValueError,
        "clip_high is 1.28: it is a width: the ratio would be clipped at 2.28. Pass 0.28 for a bound of 1.28",
        loss(clip_high=0.28),
    ),
    "rewards that differ in a rollout": (
        lambda: group_relative_advantages(torch.tensor([1.0, 0, 1]), [0, 0, 0], rollout_ids=["a", "a", "b"]),
        ValueError,
        "rewards that differ within the rollout of sample",
        lambda: group_relative_advantages(torch.tensor([1.0, 1, 0]), [0, 0, 0], rollout_ids=["a", "a", "b"]),
    ),
    "a number left out": (
        lambda: resolve("open_instruct:<number>"),
        ValueError,
        "<number> stands for the setting's own number",
        lambda: resolve("open_instruct:4096"),
    ),
    "an unknown backward of a gather": (
        lambda: Gathered([0, 4], backward="mean"),  # type: ignore[arg-type]
        ValueError,
        "backward of a gather 'mean'.*Choose one of sum, slice",
        lambda: Gathered([0, 4], backward="slice"),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_a_rollout_id_under_two_prompts_is_refused_whatever_the_mode() -> None:
    """Also where prompts are not counted: rollouts would be joined that have nothing in common."""
    from megatron_rl_loss.step.counting import reduce_step_totals

    samples = [Samples(MASKS, rollout_ids=[0, 0], prompt_ids=[0, 1])]
    for count_prompts in (False, True):
        with pytest.raises(ValueError, match="one rollout id is used under two prompt ids"):
            reduce_step_totals(samples, count_prompts=count_prompts)
        reduce_step_totals([Samples(MASKS, rollout_ids=[0, 0], prompt_ids=[1, 1])], count_prompts=count_prompts)


def test_a_split_rollout_counts_once_in_its_group() -> None:
    rewards, prompts = torch.tensor([1.0, 1.0, 1.0, 0.0, 5.0]), [0, 0, 0, 0, 1]
    rollouts = ["a", "a", "a", "b", "c"]
    whole = group_relative_advantages(torch.tensor([1.0, 0.0, 5.0]), [0, 0, 1])
    split = group_relative_advantages(rewards, prompts, rollout_ids=rollouts)
    assert split.tolist() == pytest.approx(whole[[0, 0, 0, 1, 2]].tolist(), rel=EXACT)
    plain = group_relative_advantages(rewards, prompts)
    assert plain.tolist() != pytest.approx(split.tolist(), rel=1e-3)  # negative control


def test_rewards_that_teach_nothing_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="all rewards are equal within their prompt groups"):
        group_relative_advantages(torch.tensor([1.0, 1, 3, 3]), [0, 0, 1, 1])


def test_rows_that_hold_no_sample() -> None:
    layout = ZigzagBSHD(3, 4, total_lengths=[4, 4], filler_slots=1)
    assert Samples(MASKS, layout=layout).local(0, 2).mask.shape == (6,)
    with pytest.raises(ValueError, match="2 loss masks for 3 slots"):
        Samples(MASKS, layout=ZigzagBSHD(3, 4))


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_a_gather_by_its_backward(backward: Any) -> None:
    """Two CP ranks gather their halves of 8 log-probs: a token's gradient is its weight, and the value is the loss."""
    layout = Gathered([0, 4, 8], backward=backward)
    place = {"layout": layout, "cp_size": 2}
    gradients, value = [torch.zeros(4), torch.zeros(4)], 0.0
    for rank in range(2):
        gathered = torch.arange(8.0, requires_grad=True)
        share = make_pg_loss_reducer("token_mean", MASKS, totals=WHOLE, cp_rank=rank, **place)(gathered)
        share.backward()
        value += float(share.detach())
        grad = gathered.grad.view(2, 4)
        for owner in range(2) if backward == "sum" else [rank]:
            gradients[owner] += grad[owner]
    weights = token_weights("token_mean", Samples(MASKS), WHOLE)
    assert value == pytest.approx(float((weights * torch.arange(8.0)).sum()), rel=EXACT)
    torch.testing.assert_close(torch.cat(gradients), weights, rtol=EXACT, atol=0)


@pytest.mark.slow
def test_modes_may_be_read_by_head() -> None:
    command = f"{sys.executable} -m megatron_rl_loss modes | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_plain_ddp_averages_so_a_share_is_multiplied_by_the_ranks() -> None:
    """As the docstring of `make_pg_loss_reducer` says; on real ranks in tests/frameworks/test_plain_torch.py."""
    totals = StepTotals(step_tokens=6)
    gradients = []
    for chosen in ([0], [1]):
        masks = [MASKS[i] for i in chosen]
        losses = torch.ones(4, requires_grad=True)
        (2 * make_pg_loss_reducer("token_mean", masks, totals=totals)(losses)).backward()
        gradients.append(losses.grad)
    averaged = torch.cat(gradients) / 2
    assert averaged.tolist() == pytest.approx((torch.cat(MASKS) / 6).tolist())
    assert np.isclose(float(averaged.sum()), 1)

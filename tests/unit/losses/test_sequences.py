"""Statistics of sequences and the losses made of them: in every layout at CP 1, 2 and 4 against float64, and by hand.

Formulas are those of `sequence_formulas`. One launch over gloo runs all losses and all planted bugs (`cp_steps`).
"""

import functools
import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import cp_steps
import oracle
import pytest
import sequence_formulas as stated
import torch
import torch.distributed as dist
from cp_steps import CASES, Formula, Loss, Tokens
from pages import code_of
from ranks import bytes_reduced, run_ranks, start_process_group
from refusals import refusal_tests, refusals
from sequence_formulas import log_ratio
from torch import Tensor

from megatron_rl_loss import losses
from megatron_rl_loss.losses import segment_mean, segment_scan, segment_sum, to_tokens
from megatron_rl_loss.step import Gathered, Samples, StepTotals, Units, ZigzagTHD

NAN, INF = math.nan, math.inf
NARROW: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}

# --- the formulas from the package, on a rank's tokens


def given(t: Tokens, advantages: str = "advantages") -> tuple[Tensor, Tensor, Tensor]:
    return t.values["log_probs"], t.values["old_log_probs"], t.values[advantages]


def place(t: Tokens) -> tuple[Any, Any]:
    return t.local, t.cp_group


def microbatch_of(t: Tokens) -> Any:
    """A `Microbatch`'s place: CP needs no further argument."""
    return SimpleNamespace(tokens=t.local, cp_group=t.cp_group, totals=t.totals)


def at_tokens(of_samples: Tensor, t: Tokens) -> Tensor:
    return to_tokens(of_samples, t.local).view(t.values["log_probs"].shape)


def named(name: str, advantages: str = "token_advantages", **settings: Any) -> Loss:
    return lambda t: losses.policy_loss(name, *given(t, advantages), microbatch_of(t), **settings).per_token_loss


def ppo_here(t: Tokens, weights: Tensor | None = None) -> Tensor:
    return named("ppo", clip_high=0.28, dual_clip=1.5, importance_weights=weights)(t)


def value_here(t: Tokens) -> Tensor:
    x, old, target = (t.values[name] for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
    return losses.value_loss(x, target, t.local, old_values=old, clip=0.2)


def kl_here(estimator: Any) -> Loss:
    return lambda t: losses.kl_estimate(*given(t)[:2], t.local, estimator=estimator)


def gspo_here(t: Tokens, at: Any = None, **more: Any) -> Tensor:
    at = place(t) if at is None else (at,)
    return losses.gspo_loss(*given(t), *at, **NARROW, **more).per_token_loss


def sequence_tis_together(t: Tokens) -> Tensor:
    """Its two statistics in one collective: a sum is a mean times the sample's mask sum."""
    of_ratio, of_mismatch = segment_mean([log_ratio(t.values), stated.mismatch(t.values)], *place(t))
    mask_sums = torch.from_numpy(t.samples.mask_sums)
    weights = at_tokens(losses.importance_weights(of_mismatch * mask_sums, high=1.1), t)
    return gspo_here(t, mean_log_ratio=of_ratio, importance_weights=weights)


def off_policy_mask_here(t: Tokens) -> Tensor:
    mean_kl = segment_mean(-log_ratio(t.values).detach(), *place(t))
    return ppo_here(t, losses.keep_sequences(at_tokens(mean_kl, t), max_kl=0.01, advantages=t.values["advantages"]))


def three_here(t: Tokens) -> Tensor:
    """One with gradient by two ways, one without, one of data."""
    x, old = t.values["log_probs"], t.values["old_log_probs"]
    a, b, c = segment_mean([x, x.detach().exp(), old], *place(t))
    return at_tokens(a.square() * b + c * a, t) + x


def scans_here(t: Tokens) -> Tensor:
    x, total = t.values["log_probs"], torch.zeros_like(t.values["log_probs"])
    for n, (gamma, steps, reverse, exclusive) in enumerate(stated.SCANS):
        how: dict[str, Any] = {"gamma": gamma, "steps": steps, "reverse": reverse, "exclusive": exclusive}
        _, found = segment_scan([x.detach().exp(), x], *place(t), **how)
        total = total + (found / 9 + n).sin()
    return total


def scans_of_rollouts_here(t: Tokens) -> Tensor:
    x = t.values["log_probs"]
    return (segment_scan(x, microbatch_of(t), per="rollout") / 9).sin() * x


def gae_here(t: Tokens) -> Tensor:
    values = t.values["token_advantages"], t.values["old_log_probs"]
    advantages, returns = losses.gae(*values, microbatch_of(t), gamma=0.9, lam=0.8)
    return (advantages + 0.3 * returns).double() * t.values["log_probs"]


#: The page's code.
OWN: dict[str, Any] = {}
exec(next(code for code in code_of("losses.md") if "def future_kl" in code), OWN)


def own(name: str) -> Loss:
    return lambda t: OWN[name](*given(t, "token_advantages"), microbatch_of(t))


# --- planted bugs: each shows where tokens are cut


def own_part(x: Tensor, t: Tokens) -> Tensor:
    """The part of each sample's sum that this rank adds."""
    number = len(t.samples)
    zeros = x.new_zeros(number + 1)  # where there is no sample, padding has the first one's index
    index = torch.from_numpy(t.local.sample_index)
    return zeros.index_add(0, index, x.flatten()[: len(index)] * torch.from_numpy(t.local.mask)[: len(index)])[:number]


def sum_without_backward_sum(t: Tokens) -> Tensor:
    """The other ranks' part is a constant: the value is right, the gradient is not."""
    x = t.values["log_probs"]
    own = own_part(x, t)
    return (at_tokens(segment_sum(x.detach(), *place(t)) + own - own.detach(), t) / 9).sin() * x


def scan_without_backward_exchange(t: Tokens) -> Tensor:
    """The gradient is that of prefix sums of this rank's tokens alone."""
    x, alone = t.values["log_probs"], Samples([t.local.mask[t.local.sample_index == i] for i in range(len(t.samples))])
    here = segment_scan(x.flatten()[: alone.total_tokens], alone.local(0, 1))
    here = torch.cat([here, x.flatten()[alone.total_tokens :]]).view(x.shape)
    return ((segment_scan(x.detach(), *place(t)) + here - here.detach()) / 9).sin() * x


TABLE: dict[str, tuple[Loss, Formula]] = {
    "three together": (three_here, stated.of_three),
    "scans": (scans_here, stated.of_scans),
    "GSPO of rollouts": (lambda t: gspo_here(t, microbatch_of(t), per="rollout"), stated.gspo),
    "scans of rollouts": (scans_of_rollouts_here, stated.of_prefix_sum),
    "GSPO": (gspo_here, stated.gspo),
    "GSPO-token": (named("gspo_token"), stated.gspo_token),
    "GSPO-token, its mean given": (
        lambda t: named("gspo_token", mean_log_ratio=segment_mean(log_ratio(t.values), *place(t)))(t), stated.gspo_token
    ),
    "GMPO": (named("gmpo", "advantages"), stated.gmpo),
    "PPO": (ppo_here, stated.ppo),
    "PPO, bounds": (
        named("ppo", clip_low=1, clip_high=5, dual_clip=1.01), partial(stated.ppo, low=1, high=5, dual=1.01)
    ),
    "PPO, no dual clip": (named("ppo", clip_low=0.1), partial(stated.ppo, low=0.1, high=0.1, dual=None)),
    "CISPO": (named("cispo"), partial(stated.cispo, low=1, high=4)),
    "CISPO, bounds": (named("cispo", clip_low=0.2, clip_high=0.28), stated.cispo),
    "SAPO": (named("sapo"), stated.sapo),
    "SAPO, temperatures": (
        named("sapo", tau_positive=0.3, tau_negative=7), partial(stated.sapo, positive=0.3, negative=7)
    ),
    "DPPO-TV": (named("dppo_tv"), partial(stated.dppo, divergence="tv", threshold=0.15)),
    "DPPO-KL": (named("dppo_kl"), partial(stated.dppo, divergence="kl", threshold=0.05)),
    "DPPO-KL, threshold": (
        named("dppo_kl", threshold=0.01), partial(stated.dppo, divergence="kl", threshold=0.01)
    ),
    "value": (value_here, partial(stated.critic, clip=0.2)),
    "k1": (kl_here("k1"), lambda v, m: log_ratio(v)),
    "k2": (kl_here("k2"), lambda v, m: log_ratio(v).square() / 2),
    "k3": (kl_here("k3"), lambda v, m: (-log_ratio(v)).exp() - 1 + log_ratio(v)),
    "sequence TIS": (sequence_tis_together, stated.sequence_tis),
    "off-policy mask": (off_policy_mask_here, stated.off_policy_mask),
    "GAE": (gae_here, stated.generalised),
    "FIPO": (own("future_kl"), stated.future_kl),
    "CTPO": (own("prefix_ratio"), stated.prefix_ratio),
    "CPPO": (own("prefix_budget"), stated.prefix_budget),
    "planted: sum without backward sum": (sum_without_backward_sum, stated.of_sum),
    "planted: scan without backward exchange": (scan_without_backward_exchange, stated.of_prefix_sum),
}  # fmt: skip
EVERYWHERE = [(place.__name__, cp_size) for place, cp_size in CASES]
#: What each exchange does in every layout; what is made of them in three layouts of different CP sizes.
WHERE = {
    name: set(EVERYWHERE) if n < 4 or "planted" in name else {EVERYWHERE[(5 * n + 7 * k) % 24] for k in range(3)}
    for n, name in enumerate(TABLE)
}


def on_rank() -> dict[tuple[str, str, int], cp_steps.Outcome]:
    return cp_steps.run_on_ranks({name: row[0] for name, row in TABLE.items()}, WHERE)


@functools.cache
def outcomes() -> list[dict[tuple[str, str, int], cp_steps.Outcome]]:
    return run_ranks(cp_steps.RANKS, on_rank, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient_in_every_layout(name: str, record_property: Callable[[str, Any], None]) -> None:
    """And the comparison sees planted bugs, where tokens are cut."""
    right = cp_steps.expected(TABLE[name][1], per="rollout" if "rollouts" in name else "sample")
    errors = {at: cp_steps.error_of([of_rank[(name, *at)] for of_rank in outcomes()], *right) for at in WHERE[name]}
    exact = oracle.EXACT if name == "GAE" else 1e-12  # advantages are float32
    if "planted" not in name:
        record_property("losses_over_cp_error", max(errors.values()))
    for (layout, cp_size), error in errors.items():
        shows = "planted" in name and cp_size > 1 and layout != "gathered"
        assert (error > 1e-3) if shows else (error <= exact), (layout, cp_size, error)


def test_the_data_shows_every_branch() -> None:
    """Clips, masks and caps bind on some tokens and not on others: those change the loss."""
    wide, huge = {"low": 1, "high": 1e9}, 1e9
    pairs: dict[str, tuple[Formula, Formula]] = {
        "clip": (stated.ppo, partial(stated.ppo, **wide)),
        "dual clip": (stated.ppo, partial(stated.ppo, dual=None)),
        "CISPO's": (stated.cispo, partial(stated.cispo, **wide)),
        "DPPO's TV": (partial(stated.dppo, divergence="tv", threshold=t) for t in (0.15, huge)),
        "DPPO's KL": (partial(stated.dppo, divergence="kl", threshold=t) for t in (0.05, huge)),
        "value": (partial(stated.critic, clip=t) for t in (0.2, huge)),
        "GSPO's": (stated.gspo, lambda v, m: -v["advantages"] * stated.mean(log_ratio(v), m).exp()),
        "GMPO's": (stated.gmpo, lambda v, m: -v["advantages"] * stated.mean(log_ratio(v), m).exp()),
        "sequence TIS": (stated.sequence_tis, lambda v, m: (stated.mismatch(v) * m).sum().exp() * stated.gspo(v, m)),
        "off-policy mask": (stated.off_policy_mask, stated.ppo),
        "CTPO's": (stated.prefix_ratio, lambda v, m: -v["token_advantages"] * stated.scan(log_ratio(v), m, 1).exp()),
        "CPPO's": (stated.prefix_budget, lambda v, m: -v["token_advantages"] * log_ratio(v).exp()),
    }  # fmt: skip
    for name, (bounded, free) in pairs.items():
        shown = [(bounded(one.values, one.mask.double()) - free(one.values, one.mask.double())).abs() > 1e-9
                 for one in cp_steps.rollouts()]  # fmt: skip
        assert 0.03 < float(torch.cat(shown).double().mean()) < 0.97, name


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
                    found = function(rows[::-1], local, dist.group.WORLD if cp_size > 1 else None)
                    if trained:
                        found.square().sum().backward()
                    assert sent == expected[: 2 if trained else 1] * cut, (layout, length, trained, data, function)
                    sent.clear()


def test_one_collective_whose_bytes_do_not_depend_on_lengths() -> None:
    run_ranks(2, count_on_rank, timeout_s=600)


# --- on one rank

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), torch.tensor([1])]
IDS: dict[str, Any] = {
    "rollout_ids": ["b", "a", "b"], "prompt_ids": ["q", "p", "q"], "ids": {"session": [7, 8, 8]}
}  # fmt: skip


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
    (segment_scan, {"per": "rollout"}, [1, 3, 0, 0, 0, 5], [9, 8, 0, 0, 0, 6]),
    (segment_scan, SCANNED, [3, 2, 0, 0, 0, 0], [0, 1, 0, 0, 0, 2.5]),
    (segment_scan, SCANNED | {"steps": "all"}, [2.5, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1.25]),
]


@pytest.mark.parametrize(("function", "how", "expected", "gradient"), BY_HAND)
def test_by_hand(function: Any, how: dict[str, Any], expected: list[float], gradient: list[float]) -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    found = function(values, local_of(MASKS, **IDS), **how)
    assert found.tolist() == pytest.approx(expected)
    (found * torch.arange(1, len(found) + 1)).sum().backward()
    assert values.grad.tolist() == pytest.approx(gradient)


def test_the_future_kl_of_fipo_counts_positions() -> None:
    """FutureKL_t = sum_{k >= t} gamma^(k - t) M_k log r_k: masked tokens are steps (ms-swift's loss_type fipo)."""
    mask = [1, 0, 0, 0, 0, 0, 0, 1]
    found = segment_scan(torch.tensor([0.1] * 8), local_of([mask]), gamma=0.9, steps="all", reverse=True)
    assert float(found[0]) == pytest.approx(0.1 + 0.9**7 * 0.1)
    assert float(segment_scan(torch.full((8,), 0.1), local_of([mask]), gamma=0.9, reverse=True)[0]) == pytest.approx(
        0.19
    )


def test_dtypes_and_none() -> None:
    local = local_of(MASKS)
    for dtype, found in [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]:
        values = torch.ones(6, dtype=dtype, requires_grad=True)
        total = segment_sum(values, local)
        assert total.dtype == found
        total.sum().backward()
        assert values.grad.dtype == dtype
    for empty in (torch.zeros(0, requires_grad=True), torch.zeros(1, 0, requires_grad=True)):
        of_none = segment_mean(empty, local_of([]))
        assert of_none.shape == (0,)
        to_tokens(of_none, local_of([])).sum().backward()
        assert segment_scan(empty, local_of([])).shape == empty.grad.shape == empty.shape


def test_long_sums_are_exact() -> None:
    """Float32 tokens, added in float64: only the result is rounded. 0.9 ** 100,000 is 0 even in float64."""
    values, local = torch.full((2**22,), 0.1), local_of([torch.ones(2**22, dtype=torch.bool)])
    assert float(segment_sum(values, local)) == pytest.approx(float(values[0]) * 2**22, rel=oracle.ROUNDING)
    found = segment_scan(torch.ones(100_000), local_of([torch.ones(100_000)]), gamma=0.9, reverse=True)
    assert found[[0, 50_000, -2, -1]].tolist() == pytest.approx([10, 10, 1.9, 1], rel=oracle.ROUNDING)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([1.0, bad, 2, 3, 4, bad, 5])
        local = local_of([torch.ones(4), torch.ones(1), torch.tensor([0, 1])])
        found = segment_scan(values, local)
        assert found.isfinite().tolist() == [True, *[False] * 3, True, True, True]
        assert found[[0, 4, 5, 6]].tolist() == [1, 4, 0, 5]
        assert segment_sum(values, local)[1:].tolist() == [4, 5]


# --- refusals, each beside its nearest legal neighbour


class GroupOf:
    """As much of a process group as is looked at before anything is exchanged."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


WHOLE, MASKED = torch.ones(6), local_of(MASKS, ids={"session": [1, 1, 2]})
AT_CP_2 = Samples(MASKS, layout=Gathered([0, 3, 5, 6])).local(0, 2)  # where all tokens are on every rank
CUT = Samples(MASKS, layout=ZigzagTHD([0, 4, 8, 12], total_lengths=[3, 2, 1])).local(0, 2)


def sums(values: Any = WHOLE, local: Any = MASKED, **more: Any) -> Tensor:
    return segment_sum(values, local, **more)


def of_units(per: str, tokens: dict[int | str, float]) -> Tensor:
    """In a step whose units have so many tokens, which their micro-batch knows."""
    totals = StepTotals(units={per: Units(all=9, tokens=tokens)})
    local = local_of([mask.to("cpu") for mask in MASKS], ids={per: ["a", "a", "b"]})
    return segment_sum(WHOLE, SimpleNamespace(tokens=local, cp_group=None, totals=totals), per=per)


TWO_RANKS, FOUR_RANKS = ({"local": AT_CP_2, "cp_group": GroupOf(size)} for size in (2, 4))
REFUSALS = {
    **refusals(
        sums,
        ((torch.ones(5),), r"of shape \(5,\): this rank's part of the layout is \(6,\)", (torch.ones(1, 6),)),
        (([WHOLE, torch.ones(4)],), r"a value of segment_sum of shape \(4,\)", ([WHOLE, WHOLE],)),
        ({"per": "step"}, "per='step' of samples with ids of: session", {"per": "rollout"}),
        ({"per": "prompt"}, "per='prompt' of samples with ids of: session: .+ prompt_ids", {"per": "session"}),
        (FOUR_RANKS, "a cp_group of 4 ranks: the micro-batch is cut for 2", TWO_RANKS),
        ({"local": CUT}, "no cp_group: a sample's tokens lie on 2 ranks", {"local": AT_CP_2}),
    ),
    **refusals(
        of_units,
        (
            ("rollout", {"a": 2.125, "b": 1}),
            "the rollout of sample 0, 2 of whose 2.125 mask tokens are in this micro-batch",
            ("rollout", {"a": 2, "b": 1}),
        ),
        (
            ("task", {"a": 2, "b": 2}),
            "the task of sample 2, 1 .+ Keep a task's samples together",
            ("task", {"a": 2, "b": 1}),
        ),
    ),
    **refusals(
        partial(segment_scan, WHOLE, MASKED),
        ({"steps": "none"}, "no such choice of steps. .*Choose one of active, all", {"steps": "all"}),
        ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 0}),
    ),
    **refusals(
        lambda *shape: to_tokens(torch.ones(shape), MASKED),
        ((6,), r"a statistic of shape \(6,\): it must have one number for each of the micro-batch's 3", (3,)),
    ),
    **refusals(
        sums,
        ((WHOLE.int(),), "it must be a float tensor", (WHOLE.double(),)),
        (
            (losses.ppo_clip_loss(-WHOLE, -WHOLE, WHOLE, WHOLE),),
            "a value of segment_sum is a PolicyLoss: .+ Pass its .per_token_loss",
            (losses.ppo_clip_loss(-WHOLE, -WHOLE, WHOLE, WHOLE).per_token_loss,),
        ),
        ({"cp_group": WHOLE}, "a process group of type Tensor: it must be a ProcessGroup", {"cp_group": None}),
        ({"local": MASKED.samples}, "local is a Samples: it says where tokens lie", {"local": MASKED}),
        error=TypeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)

"""`check_loss` passes exact loss functions and modes, and finds what is wrong with published ones that are not.

Beside each published function stands the weight that it gives a token, worked out by hand from counts (`published`): on
the step that a finding shows, that is what must have been measured.
"""

import dataclasses
import doctest
import functools
import inspect
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import check_my_loss
import pytest
import torch
from counted_steps import Row, Step
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    ADDED,
    BUGS,
    CP,
    DP,
    MEANS,
    MICROBATCHES,
    UNCUT,
    Bug,
    lists_by_smaller,
    masked_mean,
    row_means,
    share,
    sums_without_n,
)
from refusals import Refusal, check_refusal, each_of
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import StepTotals, make_pg_loss_reducer, token_weights
from megatron_rl_loss.audit import CALLS, GIVEN, LossCall, LossReport, calling, check_loss, drawn_steps, loss_check
from megatron_rl_loss.audit.drawn_steps import DrawnSample, LossCase
from megatron_rl_loss.audit.simulation import measure
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.modes.table import ModeInputs
from megatron_rl_loss.reduction import fold_into_advantages
from megatron_rl_loss.step.samples import Samples

TOGETHER = "over all of these together"


@pytest.mark.parametrize("module", [loss_check, calling])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# ---- published formulas that are not what they are meant to be

PUBLISHED = [bug for bug in BUGS if bug.loss_fn is not None]


def quick(rows: list[Any], first: tuple[str, ...]) -> list[Any]:
    """Rows of which those that begin so are tried in every run."""
    names = [one.id if isinstance(one, Bug) else one.where for one in rows]
    marks = [() if name.startswith(first) else (pytest.mark.slow,) for name in names]
    return [pytest.param(row, id=name, marks=mark) for row, name, mark in zip(rows, names, marks, strict=True)]


@functools.cache
def report_of(number: int) -> LossReport:
    bug = PUBLISHED[number]
    return check_loss(bug.loss_fn, bug.asked, call=bug.call, draws=10, divisor=bug.divisor)


def step_of(case: LossCase, padded: bool) -> Step:
    """The same step to count by hand."""
    ids = itertools.count()
    rows = [
        [[Row(one.mask, one.rollout if case.split_rollouts else next(ids), one.prompt) for one in k] for k in rank]
        for rank in case.ranks
    ]
    longest = max(len(sample.mask) for sample in case.samples)
    return Step(rows, case.cp_size, length=longest if padded and case.cp_size > 1 else None)


@pytest.mark.parametrize("bug", quick(PUBLISHED, ("row 3,", "row 12,", "row 39,", "row 46,")))
def test_a_published_function_is_found(bug: Bug) -> None:
    report = report_of(PUBLISHED.index(bug))
    assert not report.sound
    assert report.invariant == (set(bug.cuts) == {UNCUT})
    assert {finding.cut for finding in report.findings} == set(bug.cuts), str(report)
    rows = (CALLS[bug.call] if isinstance(bug.call, str) else bug.call).rows
    for finding in report.findings:
        assert finding.kind == "weights"
        assert finding.cut in str(report)
        expected = bug.weights(step_of(finding.case, rows == "padded").counted)
        assert finding.weights == pytest.approx(expected.tolist(), rel=1e-6)
        # The smallest step that shows it: two parts of what is cut, and one of all else.
        case = finding.case
        assert case.num_microbatches == (2 if finding.cut == MICROBATCHES else 1)
        assert case.dp_size == (2 if finding.cut == DP else 1)
        assert case.cp_size == (2 if finding.cut == CP else 1)
        assert sum(map(len, (sample.mask for sample in case.samples))) <= 4, str(case)


# ---- exact ones


def trl(losses: Tensor, mask: Tensor, num_items_in_batch: Tensor, num_processes: int, gradient_accumulation_steps: int,
        *, loss_type: str) -> Tensor:  # fmt: skip
    if loss_type == "dapo":
        return (losses * mask).sum() / (num_items_in_batch / num_processes)
    of_rows = row_means(losses, mask) if loss_type == "grpo" else (losses * mask).sum(-1) / 16
    return of_rows.mean() / gradient_accumulation_steps


def items_in_batch(losses: Tensor, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return (losses * mask).sum() / num_items_in_batch


def verl(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, batch_num_tokens: Any = None,
         global_batch_size: Any = None, loss_scale_factor: float = 16.0) -> Tensor:  # fmt: skip
    """The five modes from global counts; masked positions are multiplied away."""
    sums = (loss_mat * loss_mask).sum(-1)
    if loss_agg_mode == "token-mean":
        return sums.sum() / batch_num_tokens * dp_size
    if loss_agg_mode == "token-sum":
        return sums.sum() * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        sums = sums / (loss_mask.sum(-1) + 1e-8)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        sums = sums / loss_scale_factor
    return sums.sum() / global_batch_size * dp_size


def prime_rl(losses: list[Tensor], masks: list[Tensor], loss_scale: Tensor) -> Tensor:
    total = torch.zeros(())
    for values, mask in zip(losses, masks, strict=True):
        total = total + values[mask.bool()].sum()
    return total / loss_scale.clamp(min=1)


def tokens_of_all_ranks(losses: Tensor, mask: Tensor, step_tokens: Tensor, world_size: int) -> Tensor:
    return torch.where(mask != 0, losses, 0).sum() / step_tokens * world_size


def folded(losses: Tensor, mask: Tensor, loss_masks: list[Tensor], totals: StepTotals, *, mode: str) -> Tensor:
    """A plain sum, with the aggregation in the advantages."""
    advantages = fold_into_advantages([1.0] * len(loss_masks), loss_masks, mode=mode, totals=totals, loss="ppo")
    padded = torch.nn.utils.rnn.pad_sequence(advantages, batch_first=True)
    return (losses * padded).sum()


def rollouts(losses: Tensor, mask: Tensor, rollout_tokens: Tensor, step_rollouts: int, dp_size: int) -> Tensor:
    return ((losses * mask).sum(-1) / rollout_tokens.clamp(min=1)).sum() / step_rollouts * dp_size


def prompts(losses: Tensor, mask: Tensor, prompt_tokens: Tensor, step_prompts: int, dp_size: int) -> Tensor:
    return ((losses * mask).sum(-1) / prompt_tokens.clamp(min=1)).sum() / step_prompts * dp_size


def packed_means(
    losses: Tensor, mask: Tensor, sample_index: Tensor, sample_tokens: Tensor, step_samples: int
) -> Tensor:
    return (losses * mask / sample_tokens.clamp(min=1)[sample_index]).sum() / step_samples


def packed_by_offsets(losses: Tensor, mask: Tensor, cu_seqlens: Tensor, step_samples: int) -> Tensor:
    parts = [losses[a:b][mask[a:b] != 0] for a, b in itertools.pairwise(cu_seqlens.tolist())]
    return torch.stack([part.mean() if len(part) else part.sum() for part in parts]).sum() / step_samples


def ppo(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor, step_tokens: Tensor) -> Tensor:
    ratio = (log_probs - old_log_probs).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return (losses * mask).sum() / step_tokens


def gspo(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor, step_samples: int) -> Tensor:
    mean = ((log_probs - old_log_probs) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -(mean.exp() * advantages[:, 0]).sum() / step_samples


def in_place(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    mask.clamp_(max=1)
    losses.mul_(mask)
    return losses.sum() / step_tokens


@dataclass(frozen=True)
class Exact:
    where: str
    loss_fn: Callable[..., Tensor]
    mode: str
    call: LossCall | str
    options: dict[str, Any] = field(default_factory=dict)


LOG_PROBS = LossCall(takes="log_probs", dp="sum")
PACKED = LossCall(rows="packed", dp="sum")
EXACT = [
    Exact("TRL grpo", functools.partial(trl, loss_type="grpo"), "trl:grpo", "trl"),
    Exact("TRL dr_grpo", functools.partial(trl, loss_type="dr_grpo"), "trl:dr_grpo", "trl", {"divisor": 16}),
    Exact("TRL dapo", functools.partial(trl, loss_type="dapo"), "trl:dapo", "trl"),
    Exact("transformers, num_items_in_batch", items_in_batch, "token_mean", "transformers"),
    *(
        Exact(f"verl {name}", functools.partial(verl, loss_agg_mode=name), f"verl:{name}", "verl", options)
        for name, options in {
            "token-mean": {},
            "token-sum": {},
            "seq-mean-token-sum": {},
            "seq-mean-token-sum-norm": {"divisor": 16},
            "seq-mean-token-mean": {},
        }.items()
    ),
    Exact("prime-rl", prime_rl, "token_mean", "prime_rl"),
    Exact("open-instruct, OpenRLHF, CP and all", tokens_of_all_ranks, "token_mean", LossCall(cp="mean")),
    Exact("the same, contiguous", tokens_of_all_ranks, "token_mean", LossCall(cp="mean", cp_cut="contiguous")),
    *(
        Exact(f"folded {mode}", functools.partial(folded, mode=mode), mode, ADDED)
        for mode in ("token_mean", "sample_mean")
    ),
    Exact("rollouts over rows", rollouts, "sample_mean", LossCall(split_rollouts=True)),
    Exact("prompts", prompts, "prompt_mean", LossCall()),
    Exact("packed, by index", packed_means, "sample_mean", PACKED),
    Exact("packed, by index, CP", packed_means, "sample_mean", replace(PACKED, cp="sum")),
    Exact("packed, by offsets", packed_by_offsets, "sample_mean", PACKED),
    Exact("PPO", ppo, "token_mean", LOG_PROBS),
    Exact("GSPO", gspo, "sample_mean", LOG_PROBS),
    Exact("in place", in_place, "token_mean", ADDED),
]


@pytest.mark.parametrize("one", quick(EXACT, ("TRL dr_grpo", "open-instruct", "rollouts", "packed, by index, CP")))
def test_an_exact_formula_passes(one: Exact) -> None:
    report = check_loss(one.loss_fn, one.mode, call=one.call, draws=12, **one.options)
    assert report.sound, str(report)
    assert report.invariant
    assert not report.findings
    assert str(report).splitlines()[0].endswith(": sound")


@pytest.mark.parametrize("one", quick(EXACT, ("TRL dr_grpo", "open-instruct", "rollouts", "packed, by index, CP")))
def test_the_same_scaled_does_not(one: Exact) -> None:
    """Negative control: half as much again, in the uncut step, whatever the formula."""

    @functools.wraps(one.loss_fn)
    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * one.loss_fn(*args, **kwargs)

    loss_fn = one.loss_fn
    if isinstance(loss_fn, functools.partial):  # what is bound stays so
        inner = loss_fn.func
        scaled = functools.partial(functools.wraps(inner)(lambda *a, **k: 1.5 * inner(*a, **k)), **loss_fn.keywords)
    report = check_loss(scaled, one.mode, call=one.call, draws=3, **one.options)
    assert report.invariant
    (finding,) = report.findings
    assert finding.cut == UNCUT
    assert finding.factors == pytest.approx((1.5, 1.5))


# ---- our own reducers, in every shape and cut


def ours(losses: Any, mask: Any, loss_masks: Any, totals: Any, layout: Any, cp_rank: int, cp_size: int,
         rollout_ids: Any, prompt_ids: Any, dp_size: int, *, mode: str, split: bool, scale: str) -> Tensor:  # fmt: skip
    flat = torch.cat(losses) if isinstance(losses, list) else losses.flatten()
    ids = {"prompt_ids": prompt_ids, "rollout_ids": rollout_ids if split else None}
    cut = {"layout": layout, "cp_rank": cp_rank, "cp_size": cp_size}
    divisor = 8.0 if mode == "constant" else None
    reducer = make_pg_loss_reducer(mode, loss_masks, totals=totals, divisor=divisor, **ids, **cut)
    factor = {"": 1, "dp": dp_size, "dp_cp": dp_size * cp_size}[scale]
    return reducer(flat) * factor


CALLS_OF_OURS = [
    (LossCall(rows=rows, dp=dp, cp=cp, cp_cut=cut, split_rollouts=split), scale)  # type: ignore[arg-type]
    for rows, cut, split in [
        ("padded", "zigzag", False),
        ("packed", "zigzag", True),
        ("lists", "zigzag", False),
        ("padded", "contiguous", True),
        ("packed", "gathered", False),
    ]
    for dp, cp, scale in [("sum", "sum", ""), ("mean", "mean", "dp_cp")][rows == "packed" :]
]


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant", "token_sum"])
@pytest.mark.parametrize(
    ("call", "scale"),
    [pytest.param(*row, marks=() if i in (1, 4) else pytest.mark.slow) for i, row in enumerate(CALLS_OF_OURS)],
    ids=lambda value: getattr(value, "describe", str)(),
)
def test_our_reducers_pass(mode: str, call: LossCall, scale: str) -> None:
    loss_fn = functools.partial(ours, mode=mode, split=call.split_rollouts, scale=scale)
    report = check_loss(loss_fn, mode, call=call, divisor=8 if mode == "constant" else None, draws=3)
    assert report.sound, str(report)
    assert not report.notes  # it selects by the mask


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["dp", ""])
def test_our_reducers_without_the_factor_do_not(left_out: str) -> None:
    """Negative control: gradients are averaged over DP and CP ranks, and the share is not multiplied by both."""
    loss_fn = functools.partial(ours, mode="token_mean", split=False, scale=left_out)
    report = check_loss(loss_fn, "token_mean", call=LossCall(cp="mean", rows="packed"))
    assert {finding.cut: finding.factors for finding in report.findings} == {
        **({} if left_out else {DP: pytest.approx((1 / 2, 1 / 2))}),
        CP: pytest.approx((1 / 2, 1 / 2)),
    }


# ---- what else may be wrong with a function


def clipped(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses.clamp(max=1) * mask).sum() / step_tokens


def squared(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses.square() * mask).sum() / step_tokens


def normalised_by_loss(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / (losses * mask).abs().sum().detach().clamp(min=1e-3)


def dropped(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (torch.nn.functional.dropout(losses, 0.5) * mask).sum() / step_tokens


def needs_two_rows(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    if len(losses) < 2:
        raise RuntimeError("cannot normalise one row")
    return (losses * mask).sum() / step_tokens


def without_graph(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens if mask.any() else torch.zeros(())


def number_for_nothing(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Any:
    return (losses * mask).sum() / step_tokens if mask.any() else 0


def zero_by_zero(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1)).mean()


def infinite_gradient(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return ((losses * mask).sum() - (losses * (1 - mask)).sum().mul(0).abs().sqrt()) / step_tokens


FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "clipped": (clipped, "values", "not linear in the losses"),
    "squared": (squared, "values", "not linear in the losses"),
    "normalised by the losses": (normalised_by_loss, "values", "not linear in the losses"),
    "dropout": (dropped, "chance", "called twice with the same losses"),
    "raises": (needs_two_rows, "raises", "it raises RuntimeError: cannot normalise one row"),
    "no graph": (without_graph, "no graph", "what it returns has no graph, so nothing is trained"),
    "a number for nothing": (number_for_nothing, "no loss", "it returns a int, no tensor"),
    "0/0": (zero_by_zero, "NaN", "the gradient is NaN or infinite at 2 of 2 tokens"),
    "an infinite gradient": (infinite_gradient, "NaN", "the gradient is NaN or infinite at 1 of 1 tokens"),
}


@pytest.mark.parametrize(("loss_fn", "kind", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_told(loss_fn: Callable[..., Any], kind: str, text: str) -> None:
    report = check_loss(loss_fn, "token_mean", call=ADDED, draws=10)
    assert not report.sound
    assert not report.invariant
    finding = next(finding for finding in report.findings if finding.kind == kind)
    assert re.search(text, finding.says)
    assert finding.says in str(report)
    assert kind == "chance" or len(finding.case.samples) <= 2, str(finding.case)


def test_where_nothing_is_masked_there_is_no_0_by_0() -> None:
    every_row = LossCall(dp="mean", microbatches="mean", masked_samples=False, even_microbatches=True)
    assert check_loss(zero_by_zero, "sample_mean", call=every_row, draws=4).sound
    assert not check_loss(zero_by_zero, "sample_mean", call=replace(every_row, masked_samples=True), draws=4).sound


def test_nothing_trained_and_the_wrong_way_round_are_told() -> None:
    (nothing,) = check_loss(lambda losses, mask: 0 * losses.sum(), "token_mean", draws=4).findings
    assert (nothing.cut, nothing.factors) == (UNCUT, (0, 0))
    (finding,) = check_loss(lambda losses, mask, step_tokens: -share(losses, mask, step_tokens), "token_mean",
                            call=ADDED, draws=4).findings  # fmt: skip
    assert finding.says == "all tokens weigh -1 times what they should, on every step alike"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "token_mean", "sample_mean"])
def test_what_fails_on_some_uncut_steps_alone_is_told(mode: str | None) -> None:
    def not_of_five(losses: Tensor, mask: Tensor, step_samples: int, step_tokens: Tensor) -> Tensor:
        if step_samples == 5:
            raise IndexError("five")
        return (losses * mask).sum() / step_tokens

    for seed in range(3):
        report = check_loss(not_of_five, mode, call=ADDED, seed=seed, draws=4)
        assert {finding.kind for finding in report.findings} <= {"raises", "weights"}
    assert "it raises IndexError: five" in str(check_loss(not_of_five, mode, call=ADDED))


def test_which_call_failed_is_told() -> None:
    def third(losses: Tensor, mask: Tensor, microbatch: int, dp_rank: int, cp_rank: int) -> Tensor:
        if (microbatch, dp_rank, cp_rank) == (1, 1, 1):
            raise KeyError("here")
        return (losses * mask).sum()

    report = check_loss(third, "token_sum", call=LossCall(dp="sum", cp="sum"), draws=4)
    (finding,) = report.findings
    assert finding.cut == TOGETHER
    assert finding.says == "it raises KeyError: 'here' (micro-batch 1, DP rank 1, CP rank 1)"


def test_a_nan_under_the_mask_is_noted() -> None:
    assert any("NaN at a masked token" in note for note in check_loss(share, "token_mean", call=ADDED, draws=4).notes)
    selecting = check_loss(tokens_of_all_ranks, "token_mean", call=LossCall(), draws=4)
    assert not selecting.notes


def unmasked(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return losses.sum() / step_tokens


def off_by_one(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask.roll(1, -1)).sum() / step_tokens


@pytest.mark.parametrize(("loss_fn", "says"), [(unmasked, "padding weighs"), (off_by_one, "weigh")])
def test_weight_where_there_should_be_none(loss_fn: Callable[..., Tensor], says: str) -> None:
    report = check_loss(loss_fn, "token_mean", call=ADDED, draws=4)
    assert not report.sound
    assert re.search(says, str(report))


def test_what_breaks_only_together_is_found() -> None:
    def product(losses: Tensor, mask: Tensor, step_tokens: Tensor, num_microbatches: int, dp_size: int) -> Tensor:
        return (losses * mask).sum() / step_tokens * (2 if min(num_microbatches, dp_size) > 1 else 1)

    (finding,) = check_loss(product, "token_mean", call=ADDED, draws=4).findings
    assert finding.cut == TOGETHER
    assert (finding.case.num_microbatches, finding.case.dp_size) == (2, 2)
    assert finding.factors == pytest.approx((2, 2))


def test_methods_and_objects_are_functions_too() -> None:
    class Loss(torch.nn.Module):
        def forward(self, losses: Tensor, mask: Tensor) -> Tensor:
            return (losses * mask).sum()

        def __call__(self, losses: Tensor, mask: Tensor) -> Any:
            return super().__call__(losses, mask)

        def of_step(self, losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
            return (losses * mask).sum()[None] / step_tokens

    assert check_loss(Loss(), "token_sum", call=ADDED, draws=3).sound
    assert check_loss(Loss().of_step, "token_mean", call=ADDED, draws=3).sound
    report = check_loss(lambda *args: (args[0] * args[1]).sum(), "token_sum", call=ADDED, draws=3)
    assert report.sound


def test_without_a_mode_invariance_is_all_that_is_asked() -> None:
    assert check_loss(sums_without_n, call=ADDED, draws=4).sound
    assert check_loss(lists_by_smaller, call="prime_rl", draws=4).sound
    assert not check_loss(masked_mean, call=ADDED, draws=4).invariant


# ---- modes, ours and one's own


@pytest.mark.parametrize("units", ["all", "active"])
@pytest.mark.parametrize("mode", MODES)
def test_built_in_modes_are_invariant(mode: str, units: Any) -> None:
    report = check_loss(mode=mode, divisor=8 if MODES[mode].takes_divisor else None, units=units, draws=6)
    assert report.sound, str(report)
    assert not report.negative
    if mode == "token_mean" or (mode in ("sample_mean", "prompt_mean") and units == "active"):
        assert (report.lowest_sum, report.highest_sum) == pytest.approx((1, 1))
    elif mode in ("sample_mean", "prompt_mean"):
        assert 0 < report.lowest_sum < report.highest_sum <= 1 + 1e-6


def mean_of_the_micro_batch(inputs: ModeInputs) -> float:
    return 1 / max(1.0, float(inputs.samples.mask_sums.sum()))


def by_padded_length(inputs: ModeInputs) -> list[Tensor]:
    return [torch.full((int(n),), 1 / int(n)) for n in inputs.samples.mask_lengths]


def by_samples_here(inputs: ModeInputs) -> Tensor:
    return torch.full((len(inputs.samples),), 1 / max(1, len(inputs.samples)))


def needs_two(inputs: ModeInputs) -> float:
    if len(inputs.samples) < 2:
        raise RuntimeError("needs two samples")
    return 1.0


def sum_by_prompts(inputs: ModeInputs) -> Tensor:
    assert inputs.totals.prompts.all is not None
    return torch.full((len(inputs.samples),), 1 / inputs.totals.prompts.all)


def contrast(inputs: ModeInputs) -> list[Tensor]:
    """A sound mode of weights of both signs."""
    return [torch.where(torch.arange(int(n)) % 2 == 0, 1.0, -1.0) for n in inputs.samples.mask_lengths]


@pytest.mark.parametrize(
    ("mode", "cuts"),
    [
        (mean_of_the_micro_batch, {MICROBATCHES}),
        (by_samples_here, {MICROBATCHES}),
        (by_padded_length, {"with masks as long as padded slots"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_mode_depends_on_is_found(mode: Any, cuts: set[str]) -> None:
    report = check_loss(mode=mode, draws=8)
    assert {finding.cut for finding in report.findings} == cuts
    assert not report.invariant
    assert "NOT invariant" in str(report)
    (finding,) = report.findings
    assert len(finding.case.samples) <= 2 + (mode is by_samples_here)
    assert finding.weights != pytest.approx(finding.expected)


def test_a_mode_that_raises_and_sound_ones_of_ones_own() -> None:
    report = check_loss(mode=needs_two, draws=6)
    assert {finding.kind for finding in report.findings} == {"raises"}
    assert "it raises RuntimeError: needs two samples" in str(report)
    assert check_loss(mode=sum_by_prompts, draws=6).sound
    report = check_loss(mode=contrast, draws=6)
    assert report.sound
    assert report.negative


@pytest.mark.slow
def test_a_function_is_compared_with_a_mode_of_ones_own() -> None:
    def sums_by_prompts(losses: Tensor, mask: Tensor, step_prompts: int, dp_size: int) -> Tensor:
        return (losses * mask).sum() / step_prompts * dp_size

    assert check_loss(sums_by_prompts, sum_by_prompts).sound
    report = check_loss(share, sum_by_prompts)
    assert not report.sound
    assert "sum_by_prompts" in str(report)


# ---- the page and its example


@pytest.mark.slow
def test_the_example_says_what_its_functions_are(capsys: pytest.CaptureFixture[str]) -> None:
    check_my_loss.main()
    first_lines = [line for line in capsys.readouterr().out.splitlines() if line and line[0] in "abcm"]
    assert [line.split(": ")[-1] for line in first_lines] == ["NOT invariant", "sound", "sound", "NOT invariant"]


def test_the_page_names_everything_there_is() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    fields = {field.name for field in dataclasses.fields(LossCall)}
    assert fields | set(GIVEN) | set(CALLS) <= set(re.findall(r"`(\w+)`", page))


# ---- properties


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), dp=st.integers(1, 3), cp=st.integers(1, 3), microbatches=st.integers(1, 3))
def test_weights_are_those_of_token_weights(seed: int, dp: int, cp: int, microbatches: int) -> None:
    """The simulation adds up to what `token_weights` says, whatever the split."""
    rng = random.Random(seed)
    ranks = tuple(
        tuple(
            tuple(
                DrawnSample(tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9))), i, rng.randrange(2))
                for i in range(rng.randrange(1, 4))
            )
            for _ in range(microbatches)
        )
        for _ in range(dp)
    )
    case = LossCase(ranks, cp)
    totals = case.totals_with({})
    if not totals.step_tokens:
        return
    call = LossCall(dp="mean", cp="mean", rows="packed")
    for mode in ("token_mean", "sample_mean", "prompt_mean"):
        loss_fn = functools.partial(ours, mode=mode, split=False, scale="dp_cp")
        expected = token_weights(mode, Samples(case.masks, **case.ids()), totals)
        assert measure(loss_fn, call, case).weights == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_finding_can_be_had_again(seed: int) -> None:
    report = check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=8)
    for finding in report.findings:
        assert tuple(measure(masked_mean, MEANS, finding.case).weights) == finding.weights
        assert eval(repr(finding.case), vars(drawn_steps)) == finding.case
    assert str(check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=8)) == str(report)


def test_the_report_is_plain_data() -> None:
    report = check_loss(masked_mean, "token_mean", call=MEANS, draws=4)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["sound"], data["invariant"]) == (False, False)
    assert [finding["cut"] for finding in data["findings"]] == [MICROBATCHES, DP]
    assert eval(data["findings"][0]["case"], vars(drawn_steps)) == report.findings[0].case


def test_everything_that_can_be_asked_for_is_given() -> None:
    """Of every name in the table, and no other, in every shape of rows."""
    seen: dict[str, Any] = {}

    def asks_for_all(losses: Any, mask: Any, **given: Any) -> Tensor:
        seen.update(given)
        return sum(part.sum() for part in losses) if isinstance(losses, list) else losses.sum()

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in GIVEN]
    two = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("log_probs", "mask")]
    asks_for_all.__signature__ = inspect.Signature([*two, *parameters])  # type: ignore[attr-defined]
    rows = (DrawnSample((1, 0, 1)), DrawnSample((0, 0)))
    for shape in ("padded", "packed", "lists"):
        seen.clear()
        call = LossCall(takes="log_probs", rows=shape, cp="sum")  # type: ignore[arg-type]
        measure(asks_for_all, call, LossCase(((rows,), (rows[:1],)), 2))
        assert set(seen) == set(GIVEN)
        assert (int(seen["step_tokens"]), int(seen["rank_tokens"]), seen["step_samples"]) == (4, 2, 3)
        assert (seen["world_size"], seen["dp_rank"], seen["cp_rank"]) == (4, 1, 1)


# ---- wrong uses


def fine(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens


def by_typo(losses: Tensor, mask: Tensor, step_token: Tensor) -> Tensor:
    return (losses * mask).sum() / step_token


def of_lists(losses: list[Tensor], masks: list[Tensor]) -> Tensor:
    return torch.stack([(x * m).sum() for x, m in zip(losses, masks, strict=True)]).sum()


def accepted(loss_fn: Any = fine, mode: Any = "token_mean", **options: Any) -> Callable[[], Any]:
    return lambda: check_loss(loss_fn, mode, **{"call": ADDED, "draws": 1, **options})


REFUSALS: dict[str, Refusal] = {
    "a result for a function": (
        accepted(torch.zeros(())), TypeError, "loss_fn is a Tensor.*Pass the function", accepted(),
    ),
    "a function of losses alone": (
        accepted(lambda losses: losses.sum()), TypeError, "takes losses: .*Wrap it: lambda losses, mask",
        accepted(lambda losses, mask: (losses * mask).sum(), "token_sum"),
    ),
    "a parameter that nobody fills": (
        accepted(by_typo), TypeError, "'step_token' that has no default.*Did you mean step_tokens[?]",
        accepted(by_typo, call=replace(ADDED, names={"step_token": "step_tokens"})),
    ),
    "another call's word": (
        accepted(items_in_batch), TypeError, "'num_items_in_batch' that has no default",
        accepted(items_in_batch, call="transformers"),
    ),
    "a function of log-probs given losses": (
        accepted(ppo), TypeError, "asks for 'old_log_probs': .*takes=\"log_probs\"", accepted(ppo, call=LOG_PROBS),
    ),
    "neither a function nor a mode": (
        lambda: check_loss(draws=1), TypeError, "check_loss of nothing.*Give loss_fn or mode",
        lambda: check_loss(mode="token_sum", draws=1),
    ),
    "responses that are not packed": (
        lambda: LossCall(cp_cut="responses", cp="sum"), ValueError, "cp_cut is 'responses', and LossCall.rows 'padded'",
        lambda: LossCall(cp_cut="responses", cp="sum", rows="packed"),
    ),
    "an unknown call": (
        accepted(call="verk"), ValueError, "call 'verk': .*Did you mean verl[?]",
        accepted(functools.partial(verl, loss_agg_mode="token-mean"), call="verl"),
    ),
    "a trainer of one's own": (
        accepted(call=object()), TypeError, "call is a object: .*Choose one of pytorch, ", accepted(),
    ),
    "a word for neither sum nor mean": (
        lambda: LossCall(dp="average"), ValueError, "LossCall.dp 'average'", lambda: LossCall(dp="mean"),  # type: ignore
    ),
    "context parallelism as a flag": (
        lambda: LossCall(cp=True), ValueError, "LossCall.cp True", lambda: LossCall(cp="sum"),  # type: ignore
    ),
    "a cut for no ranks": (
        lambda: LossCall(cp_cut="gathered"), ValueError, "cp_cut is 'gathered', and LossCall.cp None",
        lambda: LossCall(cp_cut="gathered", cp="mean"),
    ),
    "a divisor of no mode": (
        accepted(mode=None, divisor=8), ValueError, "divisor 8 and units None without a mode", accepted(mode=None),
    ),
    "a flag that is none": (
        lambda: LossCall(split_rollouts="no"), TypeError, "LossCall.split_rollouts is 'no'",  # type: ignore
        lambda: LossCall(split_rollouts=False),
    ),
    "a name for nothing": (
        lambda: LossCall(names={"n": "tokens"}), ValueError, "'tokens': .*step_tokens",
        lambda: LossCall(names={"n": "step_tokens"}),
    ),
    "names that are no mapping": (
        lambda: LossCall(names=["step_tokens"]), TypeError, "LossCall.names is a list",  # type: ignore[arg-type]
        lambda: LossCall(names={}),
    ),
    "no draws": (accepted(draws=0), ValueError, "draws is 0", accepted()),
    "a seed below 0": (accepted(seed=-1), ValueError, "seed is -1", accepted(seed=1)),
    "an unknown mode": (accepted(mode="mean"), ValueError, "'mean'", accepted()),
    "constant without its divisor": (
        accepted(mode="constant"), ValueError, "divisor", accepted(mode="constant", divisor=8.0),
    ),
    "losses that are not reduced": (
        accepted(lambda losses, mask: losses * mask), ValueError,
        "returns torch.float32 of shape \\(2, 3\\), not one number", accepted(),
    ),
    "metrics beside the loss": (
        accepted(lambda losses, mask: ((losses * mask).sum(), {})), ValueError,
        "returns a tuple, no tensor: return the loss alone", accepted(),
    ),
    "a loss without a graph": (
        accepted(lambda losses, mask: (losses * mask).sum().detach()), ValueError, "has no graph", accepted(),
    ),
    "lists to a function of rows": (
        accepted(fine, call=LossCall(rows="lists")), ValueError, "raises TypeError",
        accepted(of_lists, "token_sum", call=LossCall(rows="lists", dp="sum")),
    ),
}  # fmt: skip


@each_of(REFUSALS)
def test_refused(refused: Any, error: type[Exception], text: str, accepted: Any) -> None:
    check_refusal(refused, error, text, accepted)


def test_the_functions_own_error_is_the_cause() -> None:
    with pytest.raises(ValueError, match="raises ZeroDivisionError") as caught:
        check_loss(lambda losses, mask: losses.sum() / (1 // 0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_was_left_at_its_default_is_noted() -> None:
    def with_option(losses: Tensor, mask: Tensor, step_tokens: Tensor, num_item: Any = None) -> Tensor:
        return (losses * mask).sum() / step_tokens

    assert "parameter num_item was left at its default" in check_loss(with_option, call=ADDED, draws=4).notes


def test_what_is_bound_is_not_given() -> None:
    bound = functools.partial(fine, step_tokens=1)
    assert check_loss(bound, "token_sum", call=ADDED, draws=4).sound
    assert not check_loss(fine, "token_sum", call=ADDED, draws=4).sound

"""`check_loss` passes exact loss functions and modes, and finds what is wrong with published ones that are not.

Beside each published function stands the weight that it gives a token, worked out by hand from counts (`published`): on
the step that a finding shows, that is what must have been measured.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import check_my_loss
import pytest
import torch
from counted_steps import Row, Step
from published import (
    ADDED,
    BUGS,
    CP,
    DP,
    MICROBATCHES,
    UNCUT,
    Bug,
    lists_by_smaller,
    masked_mean,
    share,
    total,
    total_of_lists,
)
from torch import Tensor

from megatron_rl_loss.audit import CALLS, LossCall, check_loss
from megatron_rl_loss.audit.drawn_steps import LossCase
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.modes.table import ModeInputs

pytestmark = pytest.mark.slow  # hundreds of random steps


# ---- published formulas that are not what they are meant to be

PUBLISHED = {bug.id: bug for bug in BUGS if bug.loss_fn is not None}


def step_of(case: LossCase, padded: bool) -> Step:
    """The same step to count by hand."""
    ids = itertools.count()
    rows = [
        [[Row(one.mask, one.rollout if case.split_rollouts else next(ids), one.prompt) for one in k] for k in rank]
        for rank in case.ranks
    ]
    longest = max(len(sample.mask) for sample in case.samples)
    return Step(rows, case.cp_size, length=longest if padded and case.cp_size > 1 else None)


@pytest.mark.parametrize("bug", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_function_is_found(bug: Bug) -> None:
    report = check_loss(bug.loss_fn, bug.asked, call=bug.call, draws=10, divisor=bug.divisor)
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


def world_share(losses: Tensor, mask: Tensor, step_tokens: Tensor, world_size: int) -> Tensor:
    return torch.where(mask != 0, losses, 0).sum() / step_tokens * world_size


def rollouts(losses: Tensor, mask: Tensor, rollout_tokens: Tensor, step_rollouts: int, dp_size: int) -> Tensor:
    return ((losses * mask).sum(-1) / rollout_tokens.clamp(min=1)).sum() / step_rollouts * dp_size


def prompts(losses: Tensor, mask: Tensor, prompt_tokens: Tensor, step_prompts: int, dp_size: int) -> Tensor:
    return ((losses * mask).sum(-1) / prompt_tokens.clamp(min=1)).sum() / step_prompts * dp_size


def by_index(losses: Tensor, mask: Tensor, sample_index: Tensor, sample_tokens: Tensor, step_samples: int) -> Tensor:
    return (losses * mask / sample_tokens.clamp(min=1)[sample_index]).sum() / step_samples


def by_offsets(losses: Tensor, mask: Tensor, cu_seqlens: Tensor, step_samples: int) -> Tensor:
    parts = [losses[a:b][mask[a:b] != 0] for a, b in itertools.pairwise(cu_seqlens.tolist())]
    return torch.stack([part.mean() if len(part) else part.sum() for part in parts]).sum() / step_samples


def ppo(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor, step_tokens: Tensor) -> Tensor:
    ratio = (log_probs - old_log_probs).exp()
    return total(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages), mask) / step_tokens


def in_place(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    mask.clamp_(max=1)
    losses.mul_(mask)
    return losses.sum() / step_tokens


LOG_PROBS = LossCall(takes="log_probs", dp="sum")
PACKED = LossCall(rows="packed", dp="sum")
# name: (loss function, mode, call, divisor)
EXACT: dict[str, tuple[Callable[..., Tensor], str, LossCall | str, float | None]] = {
    "TRL dr_grpo": (
        lambda losses, mask, gradient_accumulation_steps:
            ((losses * mask).sum(-1) / 16).mean() / gradient_accumulation_steps,
        "trl:dr_grpo", "trl", 16,
    ),
    "transformers": (
        lambda losses, mask, num_items_in_batch: share(losses, mask, num_items_in_batch),
        "token_mean", "transformers", None,
    ),
    "prime-rl": (
        lambda losses, masks, loss_scale: total_of_lists(losses, masks) / loss_scale.clamp(min=1),
        "token_mean", "prime_rl", None,
    ),
    "open-instruct, OpenRLHF, CP and all": (world_share, "token_mean", LossCall(cp="mean"), None),
    "rollouts over rows": (rollouts, "sample_mean", LossCall(split_rollouts=True), None),
    "prompts": (prompts, "prompt_mean", LossCall(), None),
    "packed, by index, CP": (by_index, "sample_mean", replace(PACKED, cp="sum"), None),
    "packed, by offsets": (by_offsets, "sample_mean", PACKED, None),
    "PPO": (ppo, "token_mean", LOG_PROBS, None),
    "in place": (in_place, "token_mean", ADDED, None),
}  # fmt: skip


@pytest.mark.parametrize("row", EXACT.values(), ids=EXACT)
def test_an_exact_formula_passes_and_the_same_scaled_does_not(row: Any) -> None:
    """Half as much again is the negative control: it shows in the uncut step, whatever the formula."""
    loss_fn, mode, call, divisor = row
    report = check_loss(loss_fn, mode, call=call, draws=8, divisor=divisor)
    assert (report.sound, report.invariant, report.findings) == (True, True, ()), str(report)
    assert str(report).splitlines()[0].endswith(": sound")

    scaled = functools.wraps(loss_fn)(lambda *args, **kwargs: 1.5 * loss_fn(*args, **kwargs))
    report = check_loss(scaled, mode, call=call, draws=3, divisor=divisor)
    assert report.invariant
    (finding,) = report.findings
    assert finding.cut == UNCUT
    assert finding.factors == pytest.approx((1.5, 1.5))


def test_the_example_says_what_its_functions_are(capsys: pytest.CaptureFixture[str]) -> None:
    check_my_loss.main()
    first_lines = [line for line in capsys.readouterr().out.splitlines() if line and line[0] in "abcm"]
    assert [line.split(": ")[-1] for line in first_lines] == ["NOT invariant", "sound", "sound", "NOT invariant"]


# ---- modes, ours and one's own


def test_without_a_mode_invariance_is_all_that_is_asked() -> None:
    assert check_loss(lambda losses, mask: total(losses, mask) / 8, call=ADDED, draws=4).sound
    assert check_loss(lists_by_smaller, call="prime_rl", draws=4).sound
    assert not check_loss(masked_mean, call=ADDED, draws=4).invariant


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


def by_tokens_here(inputs: ModeInputs) -> float:
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
    ("mode", "cut"),
    [
        (by_tokens_here, MICROBATCHES),
        (by_samples_here, MICROBATCHES),
        (by_padded_length, "with masks as long as padded slots"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_mode_depends_on_is_found(mode: Any, cut: str) -> None:
    report = check_loss(mode=mode, draws=8)
    (finding,) = report.findings
    assert finding.cut == cut
    assert not report.invariant
    assert "NOT invariant" in str(report)
    assert len(finding.case.samples) <= 2 + (mode is by_samples_here)
    assert finding.weights != pytest.approx(finding.expected)


def test_a_mode_that_raises_and_sound_ones_of_ones_own() -> None:
    report = check_loss(mode=needs_two, draws=6)
    assert {finding.kind for finding in report.findings} == {"raises"}
    assert "it raises RuntimeError: needs two samples" in str(report)
    assert check_loss(mode=sum_by_prompts, draws=6).sound
    report = check_loss(mode=contrast, draws=6)
    assert (report.sound, report.negative) == (True, True)


def test_a_function_is_compared_with_a_mode_of_ones_own() -> None:
    def sums_by_prompts(losses: Tensor, mask: Tensor, step_prompts: int, dp_size: int) -> Tensor:
        return total(losses, mask) / step_prompts * dp_size

    assert check_loss(sums_by_prompts, sum_by_prompts, draws=8).sound
    report = check_loss(share, sum_by_prompts, draws=8)
    assert not report.sound
    assert "sum_by_prompts" in str(report)

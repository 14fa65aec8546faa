"""`check_loss` passes exact loss functions and names what is wrong with published ones that are not.

Every formula is a re-statement in our own words. Beside it stands the weight that it gives a token, worked out by hand
from counts: on the step that a finding shows, that is what must have been measured.
"""

import doctest
import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Refusal, check_refusal, each_of
from torch import Tensor

from megatron_rl_loss import Trainer, check_loss, fold_into_advantages, make_pg_loss_reducer, token_weights
from megatron_rl_loss.audit import check_loss as checking
from megatron_rl_loss.audit import simulation, trainers
from megatron_rl_loss.audit.simulation import LossCase, measure
from megatron_rl_loss.audit.trainers import GIVEN, TRAINERS
from megatron_rl_loss.drawn_steps import DrawnSample
from megatron_rl_loss.samples import Samples

UNCUT, MICROBATCHES = "in one micro-batch on one rank", "over micro-batches"
DP, CP = "over data-parallel ranks", "over context-parallel ranks"
TOGETHER = "over all of these together"


@pytest.mark.parametrize("module", [checking, trainers])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# ---- a step, counted by hand


@dataclass(frozen=True)
class Token:
    """One mask entry and the counts around it; `n`: mask tokens, `rows`: rows, of the part that is named."""

    m: int
    M: int  # of its row
    n: int  # of its micro-batch
    rows: int
    n_local: int  # of its micro-batch, on its CP rank
    n_rank: int  # of its data-parallel rank
    rows_rank: int
    T: int  # of the step
    N: int
    rollout: int  # mask tokens of its rollout
    rollouts: int
    masked_rows: int
    width: int  # of the padded micro-batch
    K: int
    D: int
    C: int


def zigzag_rank(position: int, slot: int, cp_size: int) -> int:
    chunk = position // (slot // (2 * cp_size))
    return min(chunk, 2 * cp_size - 1 - chunk)


def counted(case: LossCase, padded: bool = True) -> list[Token]:
    tokens = []
    whole = [sample for rank in case.ranks for microbatch in rank for sample in microbatch]
    ids = [sample.rollout if case.split_rollouts else i for i, sample in enumerate(whole)]
    multiple = 2 * case.cp_size if case.cp_size > 1 else 1
    number = 0
    for rank in case.ranks:
        on_rank = [sample for microbatch in rank for sample in microbatch]
        for microbatch in rank:
            slots = [-(-len(sample.mask) // multiple) * multiple for sample in microbatch]
            slots = [max(slots)] * len(slots) if padded else slots
            holders = [
                [zigzag_rank(t, slot, case.cp_size) if case.cp_size > 1 else 0 for t in range(len(sample.mask))]
                for sample, slot in zip(microbatch, slots, strict=True)
            ]
            for sample, held in zip(microbatch, holders, strict=True):
                for m, holder in zip(sample.mask, held, strict=True):
                    local = [
                        other_m
                        for other, other_held in zip(microbatch, holders, strict=True)
                        for other_m, other_holder in zip(other.mask, other_held, strict=True)
                        if other_holder == holder
                    ]
                    token = Token(
                        m=m,
                        M=sum(sample.mask),
                        n=sum(sum(other.mask) for other in microbatch),
                        rows=len(microbatch),
                        n_local=sum(local),
                        n_rank=sum(sum(other.mask) for other in on_rank),
                        rows_rank=len(on_rank),
                        T=sum(sum(other.mask) for other in whole),
                        N=len(whole),
                        rollout=sum(sum(o.mask) for o, i in zip(whole, ids, strict=True) if i == ids[number]),
                        rollouts=len(set(ids)),
                        masked_rows=sum(not any(other.mask) for other in whole),
                        width=max(slots),
                        K=len(rank),
                        D=len(case.ranks),
                        C=case.cp_size,
                    )
                    tokens.append(token)
                number += 1
    return tokens


# ---- published formulas that are not what they are meant to be


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def row_means(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def mean_over_accumulation(losses: Tensor, mask: Tensor, num_microbatches: int) -> Tensor:
    return masked_mean(losses, mask) / num_microbatches


def own_devices_count(losses: Tensor, mask: Tensor, rank_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / rank_tokens.clamp(min=1)


def share(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens


def lists_by_rank(losses: list[Tensor], masks: list[Tensor], rank_tokens: Tensor) -> Tensor:
    return sum((x * m).sum() for x, m in zip(losses, masks, strict=True)) / rank_tokens.clamp(min=1)  # type: ignore[return-value]


def lists_by_smaller(losses: list[Tensor], masks: list[Tensor], loss_scale: Tensor) -> Tensor:
    return sum((x * m).sum() for x, m in zip(losses, masks, strict=True)) / loss_scale.clamp(max=1)  # type: ignore[return-value]


def rows_averaged(losses: Tensor, mask: Tensor) -> Tensor:
    return row_means(losses, mask).mean()


def geo_mean(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, sample_advantages: Tensor) -> Tensor:
    ratios = (((log_probs - old_log_probs) * mask).sum(-1) / (mask.sum(-1) + 1e-8)).exp()
    return torch.mean(-sample_advantages * ratios)


def sums_without_n(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / 8


def means_for_sums(losses: Tensor, mask: Tensor, global_batch_size: int, dp_size: int) -> Tensor:
    return row_means(losses, mask).sum() / global_batch_size * dp_size


def phantoms(losses: Tensor, mask: Tensor, step_tokens: Tensor, step_samples: int, step_active_samples: int) -> Tensor:
    return (losses * mask).sum() / (step_tokens + step_samples - step_active_samples)


def unmasked(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return losses.sum() / step_tokens


def width_for_divisor(losses: Tensor, mask: Tensor, step_samples: int) -> Tensor:
    return (losses * mask).sum() / step_samples / mask.shape[-1]


def rows_for_rollouts(losses: Tensor, mask: Tensor, rollout_tokens: Tensor, step_samples: int) -> Tensor:
    return ((losses * mask).sum(-1) / rollout_tokens.clamp(min=1)).sum() / step_samples


def by_rows(losses: Tensor, mask: Tensor, step_samples: int) -> Tensor:
    return masked_mean(losses, mask) * len(mask) / step_samples


def rows_of_the_rank(losses: Tensor, mask: Tensor, rank_samples: int) -> Tensor:
    return row_means(losses, mask).sum() / rank_samples


def fixed_accumulation(losses: Tensor, mask: Tensor, *, accumulation: int) -> Tensor:
    return masked_mean(losses, mask) / accumulation


def n_times_d(losses: Tensor, mask: Tensor, step_samples: int, dp_size: int) -> Tensor:
    return (losses * mask).sum() / (8 * step_samples * dp_size)


def normalised_twice(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens / step_tokens


def times_cp(losses: Tensor, mask: Tensor, step_tokens: Tensor, cp_size: int) -> Tensor:
    return (losses * mask).sum() / step_tokens * cp_size


def times_dp(losses: Tensor, mask: Tensor, step_tokens: Tensor, dp_size: int) -> Tensor:
    return (losses * mask).sum() / step_tokens * dp_size


def off_by_one(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask.roll(1, -1)).sum() / step_tokens


ADDED = Trainer(dp="sum")
MEANS = Trainer(microbatches="mean")
EVEN = Trainer(even_microbatches=True)


@dataclass(frozen=True)
class Published:
    """A formula with its source; the weight it gives an active token; and the cuts that must show it."""

    where: str
    loss_fn: Callable[..., Tensor]
    mode: str | None
    trainer: Trainer | str
    weight: Callable[[Token], float]
    cuts: set[str]
    options: dict[str, Any] = field(default_factory=dict)


# fmt: off
PUBLISHED = [
    Published("TRL bnpo: local token means, averaged", mean_over_accumulation, "token_mean", "trl",
              lambda t: 1 / (t.K * t.D * t.n), {MICROBATCHES, DP}),
    Published("SkyRL token_mean_legacy: mean of micro-batch means", masked_mean, "token_mean", MEANS,
              lambda t: 1 / (t.K * t.D * t.n), {MICROBATCHES, DP}),
    Published("open-instruct #1137: micro-batch mean / accumulation", mean_over_accumulation, "token_mean", Trainer(),
              lambda t: 1 / (t.K * t.D * t.n), {MICROBATCHES, DP}),
    Published("transformers #34191: mean of micro-batch means", mean_over_accumulation, "token_mean", EVEN,
              lambda t: 1 / (t.K * t.D * t.n), {MICROBATCHES, DP}),
    Published("transformers #34242: own device's items", own_devices_count, "token_mean", EVEN,
              lambda t: 1 / (t.D * t.n_rank), {DP}),
    Published("prime-rl #2358: rank-local denominator", lists_by_rank, "token_mean", Trainer(rows="lists"),
              lambda t: 1 / (t.D * t.n_rank), {DP}),
    Published("prime-rl #816: min for max", lists_by_smaller, "token_mean", "prime_rl", lambda t: 1, {UNCUT}),
    Published("Megatron-LM train_rl: mean over bins of their means", masked_mean, "token_mean",
              Trainer(rows="packed", microbatches="mean"), lambda t: 1 / (t.K * t.D * t.n), {MICROBATCHES, DP}),
    Published("Megatron-LM adfa873, !3139: own tokens of a CP rank", masked_mean, "token_mean",
              Trainer(microbatches="mean", cp="mean"), lambda t: 1 / (t.K * t.D * t.C * t.n_local),
              {MICROBATCHES, DP, CP}),
    Published("Megatron-LM #673: times CP although summed", times_cp, "token_mean", Trainer(dp="sum", cp="sum"),
              lambda t: t.C / t.T, {CP}),
    Published("verl #4250: leftover / CP", share, "token_mean", Trainer(dp="sum", cp="mean"), lambda t: 1 / t.T / t.C,
              {CP}),
    Published("DDP without x ranks", share, "token_mean", Trainer(), lambda t: 1 / (t.T * t.D), {DP}),
    Published("AReaL #1273: the schedule's / K not undone", times_dp, "token_mean", MEANS, lambda t: 1 / (t.T * t.K),
              {MICROBATCHES}),
    Published("verl geo_mean: torch.mean of the micro-batch", geo_mean, "sample_mean",
              Trainer(takes="log_probs", even_microbatches=True), lambda t: 1 / (t.M * t.rows * t.D), {MICROBATCHES}),
    Published("verl #436, TRL #2647: never / K", rows_averaged, "sample_mean", "trl",
              lambda t: 1 / (t.M * t.rows * t.D), {MICROBATCHES}),
    Published("NeMo-RL VAPO NLL: the micro-batch's own count", masked_mean, "token_mean", ADDED, lambda t: 1 / t.n,
              {MICROBATCHES, DP}),
    Published("verl #906: by rows", by_rows, "token_mean", ADDED, lambda t: t.rows / (t.N * t.n), {MICROBATCHES, DP}),
    Published("verl #3741: sum-norm without / N", sums_without_n, "constant", ADDED, lambda t: 1 / 8, {UNCUT},
              {"divisor": 8}),
    Published("verl #4510: N D for N / D", n_times_d, "constant", Trainer(), lambda t: 1 / (8 * t.N * t.D**2), {DP},
              {"divisor": 8}),
    Published("verl #931: token means for sums", means_for_sums, "verl:seq-mean-token-sum", "verl",
              lambda t: 1 / (t.M * t.N), {UNCUT}),
    Published("verl without loss_scale_factor: the padded width", width_for_divisor, None, ADDED,
              lambda t: 1 / (t.N * t.width), {MICROBATCHES, DP}),
    Published("verl #141: fixed accumulation", functools.partial(fixed_accumulation, accumulation=4), "token_mean",
              ADDED, lambda t: 1 / (4 * t.n), {UNCUT, MICROBATCHES, DP}),
    Published("ranks' own numbers of rows", rows_of_the_rank, "sample_mean", Trainer(),
              lambda t: 1 / (t.M * t.rows_rank * t.D), {DP}),
    Published("miles #2796: phantom tokens", phantoms, "token_mean", ADDED, lambda t: 1 / (t.T + t.masked_rows),
              {UNCUT}),
    Published("agent-lightning #593: rows for rollouts", rows_for_rollouts, "sample_mean",
              Trainer(dp="sum", split_rollouts=True), lambda t: 1 / (t.rollout * t.N), {UNCUT}),
    Published("tunix #1662: a pack as one sequence", masked_mean, "sample_mean",
              Trainer(rows="packed", microbatches="mean"), lambda t: 1 / (t.K * t.D * t.n),
              {UNCUT, MICROBATCHES, DP}),
    Published("SkyRL #925 review: normalised twice", normalised_twice, "token_mean", ADDED, lambda t: t.T**-2, {UNCUT}),
]
# fmt: on

each_published = pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.where)


@each_published
def test_a_published_formula_is_named(one: Published) -> None:
    report = check_loss(one.loss_fn, one.mode, trainer=one.trainer, **one.options)
    assert not report.sound
    assert report.invariant == (one.cuts == {UNCUT})
    assert {finding.cut for finding in report.findings} == one.cuts, str(report)
    trainer = TRAINERS[one.trainer] if isinstance(one.trainer, str) else one.trainer
    for finding in report.findings:
        assert finding.kind == "weights"
        tokens = counted(finding.case, trainer.rows == "padded")
        by_hand = [one.weight(token) if token.m else 0.0 for token in tokens]
        assert finding.found == pytest.approx(by_hand, rel=1e-6)
        assert finding.cut in str(report)


@each_published
def test_the_step_shown_is_the_smallest(one: Published) -> None:
    """No rank, micro-batch, row or token can be left out of it, though the first that was drawn was larger."""
    for finding in check_loss(one.loss_fn, one.mode, trainer=one.trainer, **one.options).findings:
        case = finding.case
        # Two parts of what is cut, and one of all else.
        assert case.num_microbatches == (2 if finding.cut == MICROBATCHES else 1)
        assert case.dp_size == (2 if finding.cut == DP else 1)
        assert case.cp_size == (2 if finding.cut == CP else 1)
        assert sum(map(len, (sample.mask for sample in case.step.samples))) <= 4, str(case)

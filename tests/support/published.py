"""Bugs that public projects really had, each as the weight that it gives a token: one table with three consumers.

- the audit is shown these weights and must name their shape (`tests/museum/test_audit_names.py`);
- `check_loss` is given the function, where there is one, and must find it and measure these weights
  (`tests/unit/audit/test_loss_check.py`);
- the museum patches the same bugs into the package, and its checks must turn red (`tests/museum/test_museum.py`).

Rows are numbered as in `WHERE`. Formulas are written in the counts of `counted_steps.Counted`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from counted_steps import Array, Counted, Formula, Row, Step, ragged
from torch import Tensor

from megatron_rl_loss.audit.simulation import LossCall

#: Whose bug a row is.
WHERE = {
    0: "verl #5983, #5993 (a fix that was proposed)",
    1: "Megatron-LM #673, #906, #1124",
    2: "Megatron-LM !2756",
    3: "Megatron-LM !3139, #7452, #7513",
    4: "Megatron-LM #1764",
    5: "Megatron-LM !2851",
    6: "Megatron-LM #5047",
    7: "Megatron-LM #2237",
    8: "Megatron-LM #2417",
    9: "Megatron-LM adfa873",
    10: "Megatron-LM train_rl",
    11: "verl #141",
    12: "verl #931",
    13: "verl #782",
    14: "verl #906, #5625, #5877, #3294",
    15: "verl #436, #3332",
    16: "verl #4250",
    17: "verl #4510",
    18: "verl #3741, #5417",
    19: "verl #6609, #6836",
    20: "verl #6957",
    21: "verl geo_mean",
    22: "verl seq-* modes",
    23: "SkyRL #925 → #1296",
    24: "SkyRL #925 review",
    25: "SkyRL #1420 → #1751",
    26: "open-instruct #1137, #1161",
    27: "TRL #2647",
    28: "TRL #3231, #3938",
    29: "TRL #5619 → #6024",
    30: "TRL #6439",
    31: "transformers #34191",
    32: "transformers #34242 → #39395",
    33: "NeMo-RL #86",
    34: "NeMo-RL #212 → #266",
    35: "OpenRLHF #1249",
    36: "AReaL #1273",
    37: "ROLL #444",
    38: "prime-rl #2358 → #2562",
    39: "prime-rl #816",
    40: "slime #364",
    41: "slime #987, #990",
    42: "miles #2796",
    43: "miles DrGRPO example",
    44: "miles #1328 review",
    45: "agent-lightning #593",
    46: "tunix #1662",
    47: "twinkle #292",
    48: "verl-omni #602",
    49: "Megatron torch-FSDP2",
    50: "miles #3231",
    51: "Relax #290, Megatron-LM #5376",
    52: "ms-swift dapo, cispo, fipo",
    53: "NeMo-RL VAPO NLL, PR #3791",
    54: "SkyRL Megatron KL, entropy",
    55: "ROLL sample weights",
    56: "verl bypass mode, #4852",
    57: "habit",
    58: "habit",
}
#: A float num_tokens: the last pipeline stage raises and the others wait, so no token has a weight.
WITHOUT_WEIGHTS = {51}


@dataclass(frozen=True)
class Bug:
    """One published bug.

    Attributes:
        weight: what it gives a token.
        step: a random step that shows it, by seed.
        deviations: weight in the wrong places, by the names that the audit may give it.
        loss_fn, call: the function as its project had it, and how it is called; None where it is no loss function.
        cuts: the ways of cutting a step that show it, for `check_loss`.
    """

    row: int
    text: str
    weight: Formula
    asked: str = "token_mean"
    divisor: float | None = None
    step: Callable[[int], Step] = ragged
    deviations: tuple[str, ...] = ()
    loss_fn: Callable[..., Tensor] | None = None
    call: LossCall | str = "pytorch"
    cuts: tuple[str, ...] = ()

    def weights(self, t: Counted) -> Array:
        """The weight of every entry; a part without a token divides by 1 in the projects, unless that is the bug."""
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.asarray(self.weight(t), np.float64)
        return weights if self.deviations else np.where(t.m == 0, 0.0, weights)

    @property
    def id(self) -> str:
        return f"row {self.row}, {WHERE[self.row]}: {self.text}"


# ---- formulas that several projects had


def exact(t: Counted) -> Array:
    return t.m / t.T


def own_mean(t: Counted) -> Array:
    """The mean over all micro-batches of their token means."""
    return t.m / t.n / (t.D * t.K)


def own_piece(t: Counted) -> Array:
    return t.m / t.n_here / (t.D * t.K * t.C)


def own_rank(t: Counted) -> Array:
    return t.m / t.n_rank / t.D


def mean_of_rows(t: Counted) -> Array:
    """The mean over all micro-batches of the means over their rows of token means."""
    return t.m / t.M / t.rows / (t.D * t.K)


def times(formula: Formula, factor: Callable[[Counted], Any]) -> Formula:
    return lambda t: formula(t) * factor(t)


# ---- steps


def cut(**options: Any) -> Callable[[int], Step]:
    return lambda seed: ragged(seed, **options)


def changed(of: Step, change: Callable[[int, int, Any], Any]) -> Step:
    """The step with other masks, by rank and micro-batch."""
    rows = [
        [[replace(row, mask=tuple(change(d, k, row.mask))) for row in chosen] for k, chosen in enumerate(rank)]
        for d, rank in enumerate(of.rows)
    ]
    return Step(rows, of.cp_size)


def one_token_each(seed: int) -> Step:
    """A micro-batch holds one active token."""
    of = ragged(seed, samples=(1,), masked=0.0)
    return changed(of, lambda d, k, mask: [float(t == (3 * k + d) % len(mask)) for t in range(len(mask))])


def weighted_samples(seed: int) -> Step:
    """One sample in each micro-batch; its tokens all have the sample's weight as their mask."""
    of = ragged(seed, samples=(1,), masked=0.0)
    weights = [0.25, 0.5, 1.0, 2.0, 0.125]
    return changed(of, lambda d, k, mask: [entry * weights[(k + 2 * d) % 5] for entry in mask])


def masked_piece(seed: int) -> Step:
    """A CP rank's piece of a micro-batch has no active token: all are at the row's ends."""
    rows = [[list(chosen) for chosen in rank] for rank in ragged(seed, samples=(1,), masked=0.0).rows]
    rows[0][1] = [Row((1.0, 1.0, *[0.0] * 12, 1.0, 1.0), 1, 0)]
    return Step(rows, 2)


def pads_as_masked_rows(seed: int) -> Step:
    """The last row of some micro-batches is padding."""
    rows = [[list(chosen) for chosen in rank] for rank in ragged(seed, samples=(2, 3), masked=0.0).rows]
    for d, k in ((0, 0), (1, 3), (2, 4)):
        rows[d][k].append(Row((0.0,) * len(rows[d][k][0].mask), 900 + k, 300))
    return Step(rows, 2)


def rows_cut_as_packed(t: Counted) -> Array:
    """Losses are cut row by row; the mask as if all rows of a micro-batch were one sequence."""
    weights = np.zeros(len(t.m))
    for d, k in {*zip(t.d.tolist(), t.k.tolist(), strict=True)}:
        here = np.flatnonzero((t.d == d) & (t.k == k))
        parts = np.split(t.m[here], 2 * t.C)
        for c in range(t.C):
            weights[here[t.c[here] == c]] = np.concatenate([parts[c], parts[2 * t.C - 1 - c]])
    return weights / t.T


TWICE = (3, 11)


def duplicates(t: Counted) -> Array:
    """Two rows are fed once more as padding, counted and trained."""
    again = np.isin(t.i, TWICE)
    return t.m * (1 + again) / (t.T + t.m[again].sum())


# ---- the functions, where they are functions of losses and masks


def total(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum()


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return total(losses, mask) / mask.sum().clamp(min=1)


def row_means(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def mean_over_accumulation(losses: Tensor, mask: Tensor, num_microbatches: int) -> Tensor:
    return masked_mean(losses, mask) / num_microbatches


def share(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return total(losses, mask) / step_tokens


def total_of_lists(losses: list[Tensor], masks: list[Tensor]) -> Tensor:
    return torch.stack([total(x, m) for x, m in zip(losses, masks, strict=True)]).sum()


def lists_by_smaller(losses: list[Tensor], masks: list[Tensor], loss_scale: Tensor) -> Tensor:
    return total_of_lists(losses, masks) / loss_scale.clamp(max=1)


def geo_mean(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, sample_advantages: Tensor) -> Tensor:
    ratios = (((log_probs - old_log_probs) * mask).sum(-1) / (mask.sum(-1) + 1e-8)).exp()
    return torch.mean(-sample_advantages * ratios)


def rows_for_rollouts(losses: Tensor, mask: Tensor, rollout_tokens: Tensor, step_samples: int) -> Tensor:
    return ((losses * mask).sum(-1) / rollout_tokens.clamp(min=1)).sum() / step_samples


UNCUT, MICROBATCHES = "in one micro-batch on one rank", "over micro-batches"
DP, CP = "over data-parallel ranks", "over context-parallel ranks"
ADDED = LossCall(dp="sum")
MEANS = LossCall(microbatches="mean")
EVEN = LossCall(even_microbatches=True)
BOTH = (MICROBATCHES, DP)
WITHOUT_CP, WITH_EMPTY = cut(C=1), cut(empty=((0, 1), (2, 3)))
SOME_MASKED = cut(masked=0.3)

# fmt: off
BUGS = [
    Bug(1, "loss x C with DDP's 1/D, where DDP divides by D C already", times(exact, lambda t: t.C),
        loss_fn=lambda losses, mask, step_tokens, cp_size: share(losses, mask, step_tokens) * cp_size,
        call=LossCall(dp="sum", cp="sum"), cuts=(CP,)),
    Bug(2, "per-token loss still x C", times(exact, lambda t: t.C)),
    Bug(3, "the stock 3-tuple", own_piece,
        loss_fn=masked_mean, call=LossCall(microbatches="mean", cp="mean"), cuts=(*BOTH, CP)),
    Bug(3, "the stock 3-tuple, one active token in a micro-batch", times(exact, lambda t: 1 / t.C),
        step=one_token_each),
    Bug(4, "0/0 on a CP rank without an active token", own_piece, step=masked_piece, deviations=("nan_empty", "nan")),
    Bug(5, "an auxiliary term divided by tokens as well", lambda t: t.m / t.n / t.T),
    Bug(6, "an auxiliary term x n_local, not x n_local T C", times(exact, lambda t: 1 / (t.TP * t.C)),
        step=cut(TP=7)),
    Bug(7, "an auxiliary term / K, not x C / K", times(exact, lambda t: 1 / t.C)),
    Bug(8, "MTP: the sum over M < N tokens is divided by N", lambda t: t.m / (t.T + t.ROWS - t.MASKED)),
    Bug(9, "mean of micro-batch means", own_mean, step=WITHOUT_CP,
        loss_fn=masked_mean, call=MEANS, cuts=BOTH),
    Bug(10, "bin mean of means, an empty one counted too", own_mean, step=WITH_EMPTY,
        loss_fn=masked_mean, call=LossCall(rows="packed", microbatches="mean"), cuts=BOTH),
    Bug(10, "an empty bin counted as one token",
        lambda t: t.m / (t.T + t.D * t.K * t.C - len({*zip(t.d[t.m > 0], t.k[t.m > 0], t.c[t.m > 0])})),  # noqa: B905
        step=WITH_EMPTY),
    Bug(11, "a fixed 1/G with micro-batches of any size", mean_of_rows, "sample_mean"),
    Bug(11, "a fixed accumulation of 7", lambda t: t.m / t.n / 7,
        loss_fn=lambda losses, mask: masked_mean(losses, mask) / 7, call=ADDED, cuts=(UNCUT, *BOTH)),
    Bug(12, "seq-mean-token-sum computed a token mean", lambda t: t.m / t.M / t.N, "verl:seq-mean-token-sum",
        loss_fn=lambda losses, mask, global_batch_size, dp_size:
            row_means(losses, mask).sum() / global_batch_size * dp_size,
        call="verl", cuts=(UNCUT,)),
    Bug(13, "masked_mean 0/0", lambda t: t.m / t.M / t.N, "sample_mean", step=SOME_MASKED,
        deviations=("nan_empty", "nan")),
    Bug(14, "sum over k of (s_k/n_k)(rows_k/rows)", lambda t: t.m / t.n * t.rows / t.ROWS,
        loss_fn=lambda losses, mask, step_samples: masked_mean(losses, mask) * len(mask) / step_samples,
        call=ADDED, cuts=BOTH),
    Bug(15, "backward before / K", times(exact, lambda t: t.K)),
    Bug(15, "rows' means, never / K", lambda t: t.m / t.M / t.rows / t.D, "sample_mean",
        loss_fn=lambda losses, mask: row_means(losses, mask).mean(),
        call="trl", cuts=(MICROBATCHES,), step=cut(samples=(2,), masked=0.0)),
    Bug(16, "leftover / C", times(exact, lambda t: 1 / t.C),
        loss_fn=share, call=LossCall(dp="sum", cp="mean"), cuts=(CP,)),
    Bug(17, "denominator N D, not N / D", times(exact, lambda t: t.D**-2)),
    Bug(17, "sum-norm: N D, not N / D", lambda t: t.m / (8 * t.N * t.D**2), "constant", 8.0,
        loss_fn=lambda losses, mask, step_samples, dp_size: total(losses, mask) / (8 * step_samples * dp_size),
        call=LossCall(), cuts=(DP,)),
    Bug(18, "sum-norm without / N", lambda t: t.m / 8, "constant", 8.0,
        loss_fn=lambda losses, mask: total(losses, mask) / 8, call=ADDED, cuts=(UNCUT,)),
    Bug(18, "then without x D", lambda t: t.m / (64 * t.N * t.D), "constant", 64.0),
    Bug(19, "a 2-tuple under per-token loss: no token is counted", lambda t: t.m * t.C / t.K),
    Bug(20, "the critic normalised in each micro-batch, and summed", times(own_mean, lambda t: t.K)),
    Bug(21, "torch.mean in each micro-batch, and summed", times(mean_of_rows, lambda t: t.K), "sample_mean"),
    Bug(21, "torch.mean in micro-batches of as many rows", times(mean_of_rows, lambda t: t.K), "sample_mean",
        step=cut(samples=(2,), masked=0.0),
        loss_fn=geo_mean, call=LossCall(takes="log_probs", even_microbatches=True), cuts=(MICROBATCHES,)),
    Bug(22, "x m for where(m): NaN at a masked token poisons everything", lambda t: t.m * np.nan,
        step=cut(samples=(1,), masked=0.0, longest=60), deviations=("nan", "nan_empty")),
    Bug(23, "micro-batch mean of means", own_mean, loss_fn=masked_mean, call=MEANS, cuts=BOTH),
    Bug(24, "normalised twice", lambda t: t.m / t.T / t.T,
        loss_fn=lambda losses, mask, step_tokens: share(losses, mask, step_tokens) / step_tokens,
        call=ADDED, cuts=(UNCUT,)),
    Bug(25, "corrected by D C in a 2-tuple", times(exact, lambda t: t.C)),
    Bug(26, "micro-batch mean / G", own_mean, step=WITHOUT_CP,
        loss_fn=mean_over_accumulation, call=LossCall(), cuts=BOTH),
    Bug(27, "no 1/G", times(mean_of_rows, lambda t: t.K), "sample_mean", step=cut(samples=(2,), C=1, masked=0.0)),
    Bug(28, "a local denominator called DAPO", own_mean, step=WITHOUT_CP,
        loss_fn=mean_over_accumulation, call="trl", cuts=BOTH),
    Bug(29, "the generation batch's denominator", lambda t: t.m / (t.T + 295)),
    Bug(30, "truncated, masked completions counted", lambda t: t.m / (t.T + (t.M == 0).sum()), step=SOME_MASKED),
    Bug(31, "sum over k of mean_k / G", own_mean, step=cut(C=1, D=1),
        loss_fn=mean_over_accumulation, call=EVEN, cuts=BOTH),
    Bug(32, "the same across devices", own_rank, step=WITHOUT_CP,
        loss_fn=lambda losses, mask, rank_tokens: total(losses, mask) / rank_tokens.clamp(min=1),
        call=EVEN, cuts=(DP,)),
    Bug(33, "summed over micro-batches", times(own_mean, lambda t: t.K)),
    Bug(34, "1/K counted empty micro-batches", own_mean, step=WITH_EMPTY),
    Bug(35, "micro-batch means averaged", own_mean),
    Bug(36, "the schedule's / K not undone", times(exact, lambda t: 1 / t.K),
        loss_fn=lambda losses, mask, step_tokens, dp_size: share(losses, mask, step_tokens) * dp_size,
        call=MEANS, cuts=(MICROBATCHES,)),
    Bug(37, "an unmasked numerator", lambda t: np.ones(len(t.m)) / t.T, deviations=("mask_ignored",)),
    Bug(38, "a rank-local denominator", own_rank, call=LossCall(rows="lists"), cuts=(DP,),
        loss_fn=lambda losses, masks, rank_tokens: total_of_lists(losses, masks) / rank_tokens.clamp(min=1)),
    Bug(39, "min(loss_scale, 1) for max", lambda t: t.m, loss_fn=lists_by_smaller, call="prime_rl", cuts=(UNCUT,)),
    Bug(40, "tokens from response_lengths, ignoring the mask", lambda t: t.m / t.LENGTHS),
    Bug(41, "the per-token path rescaled", times(exact, lambda t: t.C)),
    Bug(41, "then without x C", times(exact, lambda t: 1 / t.C)),
    Bug(42, "clamp(M_i, 1): phantom tokens", lambda t: t.m / (t.T + t.MASKED), step=SOME_MASKED,
        loss_fn=lambda losses, mask, step_tokens, step_samples, step_active_samples:
            total(losses, mask) / (step_tokens + step_samples - step_active_samples),
        call=ADDED, cuts=(UNCUT,)),
    Bug(43, "divisor 1000, 40960 meant", lambda t: t.m / (1000 * t.N), "constant", 40960.0),
    Bug(44, "BSHD data sliced as THD under CP", rows_cut_as_packed, step=cut(samples=(3,), length=24),
        deviations=("misaligned",)),
    Bug(45, "rows counted, not rollouts", lambda t: t.m / t.R / t.ROWS, "sample_mean", step=cut(split_rollouts=True),
        loss_fn=rows_for_rollouts, call=LossCall(dp="sum", split_rollouts=True), cuts=(UNCUT,)),
    Bug(46, "a packed row treated as one sequence", own_mean, "sample_mean",
        loss_fn=masked_mean, call=LossCall(rows="packed", microbatches="mean"), cuts=(UNCUT, *BOTH)),
    Bug(47, "micro-batch 2 -> 1 changes the gradient", own_mean, step=cut(samples=(1,), masked=0.0)),
    Bug(48, "rows of padding keep their advantages", lambda t: np.maximum(t.m, t.rollout >= 900) / t.T,
        step=pads_as_masked_rows, deviations=("masked_samples_trained",)),
    Bug(48, "the pads are copies of real rows, trained again", duplicates, deviations=("copies",)),
    Bug(49, "per-token loss is never divided", lambda t: t.m),
    Bug(50, "FSDP's per-token normaliser dropped", lambda t: t.m / t.D),
    Bug(52, "tokens of all mini-batches / D on a 2-tuple, no x K", times(exact, lambda t: 1 / t.K)),
    Bug(53, "the micro-batch's own count of correct tokens", times(own_mean, lambda t: t.K), step=cut(masked=0.4)),
    Bug(53, "the micro-batch's own count, added up", lambda t: t.m / t.n, loss_fn=masked_mean, call=ADDED, cuts=BOTH),
    Bug(54, "mean over the rank's 'real' micro-batches of their means", lambda t: t.m / t.n / t.filled / t.D,
        step=WITH_EMPTY),
    Bug(55, "normalised over a packed batch of one: identically 1",
        lambda t: t.m / (t.M / t.over((t.m != 0).astype(float), t.i)) / t.T, step=weighted_samples,
        deviations=("fractions",)),
    Bug(56, "the mask cut after tokens were counted", lambda t: t.m / (t.T + 61)),
    Bug(57, "divided by K once more", times(exact, lambda t: 1 / t.K)),
    Bug(57, "the count dropped from the tuple", times(exact, lambda t: t.C)),
    Bug(57, "the count dropped from the tuple, per-token loss", lambda t: t.m * t.C / t.K),
    Bug(58, "one micro-batch's totals as the step's", lambda t: t.m / t.n),
    Bug(58, "one rank's totals as the step's", lambda t: t.m / t.n_rank),
    Bug(58, "the last step's totals as this one's", lambda t: t.m / 295),
    Bug(0, "the false alarm's fix: tokens summed over D C", times(exact, lambda t: 1 / t.C)),
]
# fmt: on


# ---- functions that select, mask or divide wrongly, of further public reports: what `check_loss` must say of each


@dataclass(frozen=True)
class Reported:
    """A faulty loss function, re-created, and a part of the sentence that names its cause."""

    where: str
    loss_fn: Callable[..., Tensor]
    cause: str
    asked: str | None = "token_mean"
    call: LossCall | str = ADDED


def whitened_here(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """The advantages of a micro-batch less their own mean, divided by their own deviation."""
    on = mask != 0
    own = advantages[on]
    white = (advantages - own.mean()) / (own.std(unbiased=False) + 1e-8)
    return total(-(log_probs - old_log_probs).exp() * white, mask)


def prompts_trained(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    """A mask of the response alone, and everything before it is trained too."""
    before = (mask.cumsum(-1) == 0) & (mask.sum(-1, keepdim=True) > 0)
    return share(losses, torch.where(before, 1, mask), step_tokens)


def off_by_one(losses: list[Tensor], masks: list[Tensor], step_tokens: Tensor) -> Tensor:
    shifted = [torch.cat([torch.zeros(1), mask[:-1]]) for mask in masks]
    return total_of_lists(losses, shifted) / step_tokens


REPORTS = [
    Reported("RAGEN #71, the mask inverted", lambda x, m, step_tokens: share(x, 1 - m, step_tokens),
        "the mask is inverted", call=LossCall(dp="sum", rows="packed", fractional_masks=False)),
    Reported("RAGEN #71, padded rows", lambda x, m, step_tokens: share(x, 1 - m, step_tokens),
        "the mask is inverted", call=LossCall(dp="sum", fractional_masks=False)),
    Reported("gpt-neox #1285, a mask that is off by one", off_by_one, "off by one against masks: each lies one token",
        call=LossCall(dp="sum", rows="lists")),
    Reported("SkyRL #498, a fractional mask applied twice",
        lambda x, m, step_tokens: share(x * m, m, step_tokens), "the mask is applied twice"),
    Reported("a fractional mask taken as flags", lambda x, m, step_tokens: share(x, (m != 0) * 1.0, step_tokens),
        "fractional mask values are ignored"),
    Reported("easydistill #16, divided by the micro-batch's tokens twice",
        lambda x, m: masked_mean(x, m) / m.sum().clamp(min=1), "divided by the tokens of the micro-batch twice",
        call=LossCall(dp="sum", fractional_masks=False)),
    Reported("slime #2235 and miles #3229, whitened within a micro-batch", whitened_here, "whitens advantages",
        asked=None, call=LossCall(takes="log_probs", dp="sum")),
    Reported("the same beside a mode", whitened_here, "whitens advantages", "token_sum",
        LossCall(takes="log_probs", dp="sum")),
    Reported("prompts trained", prompts_trained, "tokens before the response"),
]  # fmt: skip

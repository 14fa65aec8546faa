"""Advantages: of samples within their prompt groups, and of tokens by a critic."""

import math
import warnings
from collections.abc import Sequence, Sized
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, gather_parts, rank_in, stated_dp_group
from megatron_rl_loss.core.errors import (
    check_bool,
    check_one_each,
    check_sized,
    check_within,
    is_number,
    is_unordered,
)
from megatron_rl_loss.core.ids import Ids, Ints, as_ids, type_of_ids
from megatron_rl_loss.core.masks import Array, Floats, to_array
from megatron_rl_loss.core.samples import LocalTokens, check_values
from megatron_rl_loss.core.segments import Segments, segments_by
from megatron_rl_loss.core.transfers import on_device
from megatron_rl_loss.losses.place import Place, tokens_of
from megatron_rl_loss.losses.scans import Discount, check_discount, discount_at_tokens, segment_scan
from megatron_rl_loss.losses.segments import segment_sum, to_tokens

Rewards = Tensor | Array | Sequence[float]


@torch.inference_mode(False)
def group_relative_advantages(
    rewards: Rewards,
    prompt_ids: Ids,
    *,
    rollout_ids: Ids | None = None,
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
    dp_group: Group | EllipsisType | None = ...,
) -> Tensor:
    """One advantage per sample: its reward less the mean of its prompt group, divided by the group's std if asked.

    >>> group_relative_advantages(torch.tensor([1.0, 0.0, 5.0]), ["a", "a", "b"], normalize_by_std=False)
    tensor([ 0.5000, -0.5000,  0.0000])

    ``A_i = (r_i - mean(r_group)) / (std(r_group) + epsilon)``, std with Bessel's correction, 0 for a group of one; with
    ``normalize_by_std=False`` the numerator alone. Groups may have any sizes and any order. Computed in float64. Warns
    where all rewards are equal within their groups, so that all advantages are 0.

    Args:
        rewards: [num_samples], a tensor, array or list.
        prompt_ids: one id (int or str) per sample.
        rollout_ids: one id per sample where several samples are parts of one rollout. The rollout then counts once in
            its group, and its samples share its advantage.
        dp_group: the data-parallel group, where a prompt's samples may lie on several of its ranks; all call it
            together. None where this rank has all samples of its prompts. A job of several ranks must say which.

    Returns float32 [num_samples], on the rewards' device. Raises ValueError for rewards
    that are not 1-D and finite, do not match the ids, or differ within a rollout, for an epsilon that is not above 0,
    and for no `dp_group` in a job of several ranks.
    Source: GRPO, arXiv:2402.03300 section 4.1.2; without std, Dr. GRPO, arXiv:2503.20783 section 3.
    """
    check_bool("normalize_by_std", normalize_by_std)
    if normalize_by_std:
        check_within("epsilon", epsilon, "(0, inf)", "1e-6 is usual")
    groups = _Groups([rewards], prompt_ids, rollout_ids, dp_group)
    return groups.mine((groups.by_std(epsilon) if normalize_by_std else groups.centred)[0])


@torch.inference_mode(False)
def gdpo_advantages(
    rewards: Sequence[Rewards],
    prompt_ids: Ids,
    *,
    weights: Sequence[float] | None = None,
    rollout_ids: Ids | None = None,
    epsilon: float = 1e-6,
    dp_group: Group | EllipsisType | None = ...,
) -> Tensor:
    """One advantage per sample of several rewards: each normalised in its prompt group, then added, then scaled.

    >>> gdpo_advantages([torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])], [0, 0, 1, 1])
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])

    ``A_i = S_i / (std(S) + epsilon)``, ``S_i = sum_k w_k (r_ki - mean(r_k, group)) / (std(r_k, group) + epsilon)``.
    std(S) is that of all rollouts on all ranks: pass the whole step. Their mean, which the paper subtracts, is 0.

    Args:
        rewards: one tensor, array or list of [num_samples] per reward, the same number on all ranks.
        weights: one number per reward; 1 by default.
        prompt_ids, rollout_ids, epsilon, dp_group: as in `group_relative_advantages`.

    Returns and raises as `group_relative_advantages`, and ValueError for another number of weights, or of rewards on
    other ranks. Source: GDPO, arXiv:2601.05242 eq. 4 to 7.
    """
    check_within("epsilon", epsilon, "(0, inf)", "1e-6 is usual")
    for name, entries in (("rewards", rewards), ("weights", weights)):
        if entries is not None and (is_unordered(entries) or not isinstance(entries, Sized)):
            raise TypeError(
                f"{name} is a {type(entries).__name__}: there must be one entry per reward, in order. Pass lists, "
                "both in the same order."
            )
    groups = _Groups(rewards, prompt_ids, rollout_ids, dp_group)
    weights = [1.0] * len(rewards) if weights is None else weights
    weights = weights.tolist() if isinstance(weights, Tensor | np.ndarray) else weights
    if len(weights) != len(rewards) or not all(is_number(weight) and math.isfinite(weight) for weight in weights):
        raise ValueError(
            f"weights {weights} for {len(rewards)} rewards: each must have a finite number. Pass both in order."
        )
    together = np.tensordot(weights, groups.by_std(epsilon), 1)
    variance = (groups.counts * together**2).sum() / max(groups.counts.sum() - 1, 1)
    return groups.mine(together / (np.sqrt(variance) + epsilon))


@torch.inference_mode(False)
def rloo_advantages(
    rewards: Rewards,
    prompt_ids: Ids,
    *,
    rollout_ids: Ids | None = None,
    dp_group: Group | EllipsisType | None = ...,
) -> Tensor:
    """``A_i = r_i - mean of the other rewards of its prompt group``, the leave-one-out baseline; 0 in a group of one.

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 5.0]), ["a", "a", "b"])
    tensor([ 1., -1.,  0.])

    It is ``group_relative_advantages(..., normalize_by_std=False)`` times n / (n - 1), n the rollouts of the group. All
    arguments and errors are as there. Source: RLOO, arXiv:2402.14740 section 2.2; Kool et al. 2019.
    """
    groups = _Groups([rewards], prompt_ids, rollout_ids, dp_group)
    return groups.mine(groups.centred[0] * groups.size / (groups.size - 1).clip(min=1))


@torch.inference_mode(False)
def maxrl_advantages(
    rewards: Rewards,
    prompt_ids: Ids,
    *,
    rollout_ids: Ids | None = None,
    epsilon: float = 1e-6,
    dp_group: Group | EllipsisType | None = ...,
) -> Tensor:
    """``A_i = (r_i - mean) / (mean + epsilon)``, mean of its prompt group's rewards; 0 in a group of one.

    >>> maxrl_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ["a"] * 4)
    tensor([ 3.0000, -1.0000, -1.0000, -1.0000])

    A rare success weighs as much as all successes of an easy prompt together. All arguments and errors are as in
    `group_relative_advantages`, and ValueError for a reward below 0, whose group's mean could vanish.
    Source: MaxRL, arXiv:2602.02710; SkyRL's `compute_maxrl_advantage`.
    """
    check_within("epsilon", epsilon, "(0, inf)", "1e-6 is usual")
    groups = _Groups([rewards], prompt_ids, rollout_ids, dp_group, at_least_0=True)
    return groups.mine(groups.centred[0] / (groups.means[0] + epsilon))


@torch.inference_mode(False)
def whiten_advantages(
    advantages: Sequence[Tensor],
    local: Sequence[Place],
    *,
    per: str = "step",
    epsilon: float = 1e-8,
    dp_cp_group: Group | EllipsisType | None = ...,
) -> list[Tensor]:
    """``(A_t - mean) / (std + epsilon)``, mean and variance of the active tokens of the whole step, by their masks.

    >>> local = Samples([torch.tensor([1, 1, 0])]).local(0, 1)
    >>> whiten_advantages([torch.tensor([1.0, 3.0, 9.0])], [local], dp_cp_group=None)
    [tensor([-1.,  1.,  0.])]

    The variance is that of the tokens themselves, without Bessel's correction. One exchange, whatever a rank holds:
    ranks without a token take part, with empty lists too.

    Args:
        advantages: of each micro-batch of this rank in the step, in the shape of its losses.
        local: the micro-batches, or this rank's tokens of each.
        per: ``step``, or the name of ids (``prompt``) for a mean and a variance of each of their units.
        dp_cp_group: the group of all ranks that hold tokens of the step: data parallelism with context parallelism.
            None where this rank has the whole step. A job of several ranks must say which.

    Returns a tensor for each, float32 (float64 of float64), detached, 0 where masked. Raises ValueError for values that
    are not a rank's part of the layout, another number of them, values that are not finite at active tokens, ids that
    the samples lack, and no group in a job of several ranks, on all ranks together.
    """
    check_within("epsilon", epsilon, "(0, inf)", "1e-8 is usual")
    rule = "the mean is that of all tokens of the step, over all ranks that hold some"
    group = stated_dp_group(dp_cp_group, "advantages", rule)
    places = list[tuple[LocalTokens, Floats, Ints]]()

    def tally() -> tuple[Ints, Floats]:
        check_sized("advantages", advantages)
        if isinstance(local, LocalTokens) or not isinstance(local, Sized):
            raise TypeError(f"local is one {type(local).__name__}: it must be a list of micro-batches. Pass [local].")
        check_one_each("advantages", len(advantages), "micro-batches", len(local), "Pass one tensor for each")
        for values, place in zip(advantages, local, strict=True):
            tokens = tokens_of(place)
            check_values("advantages", values, tokens)
            segments = segments_by(per, tokens.samples, f"per={per!r}", over_microbatches=True)
            unit = segments.at_tokens(segments.ids, tokens, -1)
            places.append((tokens, to_array(values.detach().double()).reshape(-1), unit))
        units, entries = (
            _joined([unit[tokens.mask != 0] for tokens, _, unit in places], np.int64),
            _joined([tokens.mask[tokens.mask != 0] / tokens.copies for tokens, _, _ in places], np.float64),
        )
        active = _joined([values[tokens.mask != 0] for tokens, values, _ in places], np.float64)
        if not np.isfinite(active).all():
            raise ValueError("advantages with NaN or infinity at active tokens: they must be finite. Mask such tokens.")
        return _moments(units, entries, active)

    parts = gather_parts(tally, group)
    units = np.concatenate([rank_units for rank_units, _ in parts])
    ids, at = np.unique(units, return_inverse=True)
    counts, means, squares = np.concatenate([moments for _, moments in parts], 1)
    total = np.bincount(at, counts, len(ids))
    mean = np.bincount(at, counts * means, len(ids)) / total
    # Squares around each rank's own mean, brought to that of all: nothing cancels.
    variance = np.bincount(at, squares + counts * (means - mean[at]) ** 2, len(ids)) / total
    whitened = list[Tensor]()
    for values, (tokens, exact, unit) in zip(advantages, places, strict=True):
        row, active = np.zeros(len(tokens)), tokens.mask != 0
        k = ids.searchsorted(unit[active])
        row[active] = (exact[active] - mean[k]) / (np.sqrt(variance[k]) + epsilon)
        dtype = torch.promote_types(values.dtype, torch.float32)
        whitened.append(on_device(row, values.device).to(dtype).view(values.shape))
    return whitened


def _joined(rows: Sequence[Array], dtype: type) -> Array:
    return np.concatenate([np.zeros(0, dtype), *rows])


def _moments(units: Ints, entries: Floats, values: Floats) -> tuple[Ints, Floats]:
    """Ids, and per id the sum of entries, the mean and the sum of squares around it, float64 [3, ids]."""
    ids, at = np.unique(units, return_inverse=True)
    counts = np.bincount(at, entries, len(ids))
    means = np.bincount(at, entries * values, len(ids)) / counts
    return ids, np.stack([counts, means, np.bincount(at, entries * (values - means[at]) ** 2, len(ids))])


class _Groups:
    """The rewards of all ranks in float64, the sums over their groups, and which of them are this rank's.

    Attributes:
        centred: a row per reward: less the mean of the sample's group.
        means: a row per reward: the mean of the sample's group.
        size: rollouts of each sample's group.
        counts: 1 / the samples of each sample's rollout.
    """

    def __init__(
        self,
        rewards: Sequence[Rewards],
        prompt_ids: Ids,
        rollout_ids: Ids | None,
        stated_group: Group | EllipsisType | None,
        *,
        at_least_0: bool = False,
    ) -> None:
        if isinstance(rewards, Tensor | np.ndarray):
            raise TypeError(
                f"rewards of shape {tuple(rewards.shape)}: they must be a list, one of [num_samples] per reward. Pass "
                "list(rewards), or list(rewards.T) of [num_samples, num_rewards]."
            )
        rule = "a prompt's samples may lie on several ranks, and their mean is over all of these samples"
        dp_group = stated_dp_group(stated_group, "advantages", rule)

        def prepare() -> tuple[Floats, Ints, Ints, list[str]]:
            arrays = [to_array(values) for values in rewards]
            for kind in {array.dtype.kind for array in arrays} - set("biuf"):
                raise TypeError(f"rewards of dtype {kind!r}: they must be real numbers. Pass a tensor, array or list.")
            mine = [array.astype(np.float64) for array in arrays]
            shapes = {row.shape for row in mine}
            if len(shapes) != 1 or any(row.ndim != 1 or not np.isfinite(row).all() for row in mine):
                raise ValueError(
                    f"rewards of shape {' and '.join(map(str, sorted(shapes))) or 'none'}: they must be 1-D and "
                    "finite. Pass one finite reward per sample."
                )
            if at_least_0 and any((row < 0).any() for row in mine):
                lowest = min(float(row.min()) for row in mine)
                raise ValueError(
                    f"rewards down to {lowest:g}: divided by their group's mean, they must be at least 0. Shift them, "
                    "or take group_relative_advantages."
                )
            prompts = as_ids("prompt_ids", prompt_ids, len(mine[0]), "rewards")
            rollouts = prompts if rollout_ids is None else as_ids("rollout_ids", rollout_ids, len(mine[0]), "rewards")
            kinds = [type_of_ids(ids) for ids in (prompt_ids, rollout_ids) if ids is not None]
            return np.stack(mine), prompts, rollouts, kinds

        parts = gather_parts(prepare, dp_group)
        *columns, kinds = zip(*parts, strict=True)
        if len(numbers := sorted({len(array) for array in columns[0]})) > 1:
            raise ValueError(
                f"{numbers[0]} rewards on one rank and {numbers[-1]} on another: all ranks must have the same rewards. "
                "Pass the same list on every rank."
            )
        sizes, rank = [array.shape[1] for array in columns[0]], rank_in(dp_group)
        self._mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self._device = rewards[0].device if isinstance(rewards[0], Tensor) else torch.device("cpu")
        exact, prompts, rollouts = (np.concatenate(column, axis=-1) for column in columns)
        if len({str(kind) for kind, size in zip(kinds, sizes, strict=True) if size}) > 1:
            raise ValueError(
                "ids of other kinds on other ranks: each kind of id must be given on all ranks or none, as ints on all "
                "or as strings on all. Pass the same ids on every rank."
            )
        _, first, self._group = np.unique(prompts, return_index=True, return_inverse=True)
        self.counts = np.ones(sum(sizes))
        if any(len(rank_types) > 1 for rank_types in kinds):
            self.counts = _share_of_rollout(exact, prompts, rollouts)
        self.size = self.sum(np.ones(sum(sizes)))
        # From a reward of the group on: rewards that are equal are then exactly 0, which epsilon does not blow up.
        shifted = exact - exact[:, first][:, self._group]
        self.centred = shifted - self.sum(shifted) / self.size
        self.means = self.sum(exact) / self.size
        if sum(sizes) > 1 and not self.centred.any():
            alone = self.size.max() == 1
            why = "every prompt group has one sample" if alone else "all rewards are equal within their prompt groups"
            hint = " Pass dp_group= if a prompt's samples lie on several ranks." if dp_group is None else ""
            warnings.warn(f"{why}: all advantages are 0.{hint}", stacklevel=4)

    def sum(self, values: Floats) -> Floats:
        """At each sample, the sum over its group: [num_samples], or a row of them per reward."""
        sums: Floats = np.apply_along_axis(
            lambda row: np.bincount(self._group, row * self.counts)[self._group], -1, values
        )
        return sums

    def by_std(self, epsilon: float) -> Floats:
        """The centred rewards divided by their groups' std."""
        variance = self.sum(self.centred**2) / (self.size - 1).clip(min=1)
        normalized: Floats = self.centred / (np.sqrt(variance) + epsilon)
        return normalized

    def mine(self, values: Floats) -> Tensor:
        return on_device(values[self._mine].astype(np.float32), self._device)


def _share_of_rollout(rewards: Floats, prompts: Ints, ids: Ints) -> Floats:
    """1 / the number of samples in each sample's rollout, float64 [num_samples]; rewards: a row for each."""
    _, first, rollout = np.unique(ids, return_index=True, return_inverse=True)
    unlike = (rewards[:, first][:, rollout] != rewards).any(0) | (prompts[first][rollout] != prompts)
    if unlike.any():
        raise ValueError(
            f"rewards that differ within the rollout of sample {int(unlike.argmax())}: samples of one rollout share "
            "its reward and its prompt. Give every part the rollout's reward and prompt id."
        )
    share: Floats = 1 / np.bincount(rollout)[rollout]
    return share


def _warn_of_lost_rewards(rewards: Tensor, values: Tensor, tokens: LocalTokens) -> None:
    """Warn of rewards at masked tokens alone, or behind the last active one, and of values in the place of rewards.

    Of a device, or where samples are cut, nothing is read.
    """
    if not rewards.is_cpu or tokens.copies != tokens.cp_size or torch.compiler.is_compiling():
        return
    token_rewards, is_active = to_array(rewards).reshape(-1), tokens.mask != 0
    has_reward = np.isfinite(token_rewards) & (token_rewards != 0)
    sample = tokens.of(segments_by("sample", tokens.samples, "rewards").in_buffer)  # -1 in padding

    def count(flags: Array) -> Ints:
        """Tokens of each sample."""
        return np.bincount(sample[flags] + 1, minlength=len(tokens.samples) + 1)[1:]

    masked, active = count(has_reward & ~is_active), count(has_reward & is_active)
    for i in np.flatnonzero((masked > 0) & (active == 0))[:1]:
        warnings.warn(
            f"sample {i} has rewards at masked tokens alone: rewards there are ignored, so it is taken for a sample "
            "without a reward. Put the reward of a sample at its last token whose mask is not 0.",
            stacklevel=4,
        )
        return
    place = np.arange(len(tokens))
    last = np.full(len(tokens.samples) + 1, -1)
    np.maximum.at(last, sample[is_active], place[is_active])
    for i in sample[has_reward & (sample >= 0) & (place > last[sample])][:1]:
        warnings.warn(
            f"sample {i} has a reward behind its last active token: rewards at masked tokens are ignored, so it "
            "vanishes. Put the reward of a sample at its last token whose mask is not 0.",
            stacklevel=4,
        )
        return
    has_value = to_array(values).reshape(-1) != 0
    valued, lengths = count(has_value & is_active), count(is_active)
    if (lengths >= 4).any() and (valued <= 1).all() and valued.any() and (active[lengths >= 4] >= 4).all():
        warnings.warn(
            "rewards at nearly every token, and a value at one token of each sample: a critic values every token, and "
            "rewards are few, so the two may be swapped. Check the order of the arguments; rewards come first.",
            stacklevel=4,
        )


@torch.inference_mode(False)
def gae(
    rewards: Tensor,
    values: Tensor,
    local: Place,
    cp_group: Group | None = None,
    *,
    gamma: float = 1,
    lam: Discount = 0.95,
    steps: str = "token",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates of tokens by a critic, and returns: ``A_t = delta_t + gamma lam A_{t+1}``.

    >>> samples = Samples([torch.tensor([1, 0, 1])])
    >>> gae(torch.tensor([0.0, 9.0, 1.0]), torch.tensor([0.5, 9.0, 0.5]), samples.local(0, 1), lam=0.5)
    (tensor([0.2500, 0.0000, 0.5000]), tensor([0.7500, 0.0000, 1.0000]))

    ``delta_t = r_t + gamma V_{t+1} - V_t``, with t + 1 the next token of the sample whose mask is not 0, and 0 behind
    the last: add ``gamma V`` to the last reward of a response that was cut off. Returns are ``A + V``. Computed in
    float64.

    Args:
        rewards, values: of the tokens this rank holds, in the shape of its losses; ignored where masked. On the host a
            sample whose rewards are all at masked tokens is warned of.
        local, cp_group: as in `segment_mean`. All ranks of the group call it together, as `segment_scan`.
        gamma, lam: discounts in [0, 1]; lam also as one for each sample, [num_samples], such as VAPO's
            ``1 - 1 / (alpha length)``.
        steps: what a step is: a ``token``, or the name of ids per token (``turn``): a turn's reward is the sum of its
            tokens', its value that of its first active token, and all of its tokens have its advantage and return. A
            turn that is masked whole is no step.

    Returns advantages and returns, float32 (float64 if the values are) in the shape of the values, detached, 0 where
    masked. Raises ValueError for turns that lie in several samples or that a sample comes back to, for values that are
    not this rank's part of the layout, discounts outside [0, 1], and rewards that require grad beside values that do
    not.
    Source: arXiv:1506.02438 eq. 16; over active tokens alone as in verl and TRL; lam per sample, VAPO,
    arXiv:2504.05118 eq. 9; turns as steps as in AReaL.
    """
    tokens = tokens_of(local)
    for name, column in (("rewards", rewards), ("values", values)):
        check_values(name, column, tokens)
    if rewards.shape != values.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} and values of shape {tuple(values.shape)}: both must have the "
            "shape of this rank's losses. Reshape one of them."
        )
    if rewards.requires_grad and not values.requires_grad:
        raise ValueError(
            "rewards with a graph, and values without one: a critic makes values, and nobody rewards, so the two are "
            "swapped. Check the order of the arguments; rewards come first."
        )
    _warn_of_lost_rewards(rewards.detach(), values.detach(), tokens)
    dtype = torch.promote_types(values.dtype, torch.float32)
    r, v = rewards.detach().double(), values.detach().double()
    mask = on_device(tokens.mask, v.device).view(v.shape)
    nothing = mask == 0
    r, v = (column.masked_fill(nothing, 0) for column in (r, v))
    once = mask.masked_fill(nothing, 1)  # sums are by the mask: over it, each token counts once
    if steps == "token":
        advantages = _step_advantages(r, v, once, gamma, lam, local, cp_group)
        returned = advantages + v
    else:
        segments = _steps_by(steps, tokens)
        first = on_device(tokens.of(segments.firsts), v.device).view(v.shape)
        rewarded, valued = segment_sum([r / once, v * first / once], local, cp_group, per=steps)
        turn_advantages = _step_advantages(
            rewarded, valued, torch.ones_like(valued), gamma, lam, segments.as_tokens(), None
        )
        advantages, returned = (
            to_tokens(turn_values, local, per=steps).view(v.shape)
            for turn_values in (turn_advantages, turn_advantages + valued)
        )
    return advantages.masked_fill(nothing, 0).to(dtype), returned.masked_fill(nothing, 0).to(dtype)


def _step_advantages(
    r: Tensor, v: Tensor, once: Tensor, gamma: float, lam: Discount, local: Place, cp_group: Group | None
) -> Tensor:
    """``A_t = r_t - V_t`` plus the discounted sum, over active t' > t, of ``gamma lam (r - V) + gamma V``."""
    tokens = tokens_of(local)
    check_within("gamma", gamma, "[0, 1]", "1 is usual")
    decay = gamma * check_discount("lam", lam, tokens, "0.95 is usual, or one for each sample")
    at_steps = discount_at_tokens(decay, tokens, v.device)
    if isinstance(at_steps, Tensor) and at_steps.ndim:
        at_steps = at_steps.view(v.shape)
    following = segment_scan(
        (at_steps * (r - v) + gamma * v) / once, local, cp_group, gamma=decay, reverse=True, exclusive=True
    )
    return r - v + following


def _steps_by(steps: str, tokens: LocalTokens) -> Segments:
    """The segments that ``steps=`` names; ValueError for those that are no steps along a sample."""
    segments = segments_by(steps, tokens.samples, f"steps={steps!r}")
    if segments.entry_segments is None and len(tokens.samples):
        raise ValueError(
            f"steps={steps!r} of samples with {steps} ids per sample: such ids must say which tokens are one step. "
            f"Pass Samples(..., ids={{{steps!r}: rows}}), or steps='token'."
        )
    if segments.num_units < len(segments):
        raise ValueError(
            f"{steps} ids that come in several samples: advantages run along a sample, so a {steps} must lie in one. "
            f"Make {steps} ids unique in the step."
        )
    segments.check_order()
    return segments

"""Advantages: of samples within their prompt groups, and of tokens by a critic."""

import math
import warnings
from collections.abc import Sequence, Sized
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, gather_parts, rank_in, stated_dp_group
from megatron_rl_loss.core.errors import check_bool, check_within, is_number, is_unordered
from megatron_rl_loss.core.ids import Ids, Ints, as_ids, type_of_ids
from megatron_rl_loss.core.masks import Array, Floats, on_device, to_array
from megatron_rl_loss.core.samples import LocalTokens, check_values
from megatron_rl_loss.losses.place import Place, tokens_of
from megatron_rl_loss.losses.scans import segment_scan

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

    Returns float32 [num_samples], on the rewards' device. Raises ValueError for rewards that are not 1-D and finite, do
    not match the ids, or differ within a rollout, for an epsilon that is not above 0, and for no `dp_group` in a job of
    several ranks.
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
    for name, of_rewards in (("rewards", rewards), ("weights", weights)):
        if of_rewards is not None and (is_unordered(of_rewards) or not isinstance(of_rewards, Sized)):
            raise TypeError(
                f"{name} is a {type(of_rewards).__name__}: there must be one entry per reward, in order. Pass lists, "
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


class _Groups:
    """The rewards of all ranks in float64, the sums over their groups, and which of them are this rank's.

    Attributes:
        centred: a row per reward: less the mean of the sample's group.
        size: rollouts of each sample's group.
        counts: 1 / the samples of each sample's rollout.
    """

    def __init__(
        self,
        rewards: Sequence[Rewards],
        prompt_ids: Ids,
        rollout_ids: Ids | None,
        stated_group: Group | EllipsisType | None,
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
        if any(len(of_rank) > 1 for of_rank in kinds):
            self.counts = _share_of_rollout(exact, prompts, rollouts)
        self.size = self.sum(np.ones(sum(sizes)))
        # From a reward of the group on: rewards that are equal are then exactly 0, which epsilon does not blow up.
        exact = exact - exact[:, first][:, self._group]
        self.centred = exact - self.sum(exact) / self.size
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
        return torch.from_numpy(values[self._mine]).float().to(self._device)


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
    has_reward = np.isfinite(of_tokens := to_array(rewards).reshape(-1)) & (of_tokens != 0)
    masked, active = (
        np.bincount(tokens.sample_index, has_reward & of_mask, len(tokens.samples))
        for of_mask in (tokens.mask == 0, tokens.mask != 0)
    )
    for i in np.flatnonzero((masked > 0) & (active == 0))[:1]:
        warnings.warn(
            f"sample {i} has rewards at masked tokens alone: rewards there are ignored, so it is taken for a sample "
            "without a reward. Put the reward of a sample at its last token whose mask is not 0.",
            stacklevel=4,
        )
        return
    place = np.arange(len(tokens))
    last = np.full(len(tokens.samples), -1)
    np.maximum.at(last, tokens.sample_index, np.where(tokens.mask != 0, place, -1))
    for i in tokens.sample_index[has_reward & (place > last[tokens.sample_index])][:1]:
        warnings.warn(
            f"sample {i} has a reward behind its last active token: rewards at masked tokens are ignored, so it "
            "vanishes. Put the reward of a sample at its last token whose mask is not 0.",
            stacklevel=4,
        )
        return
    has_value = to_array(values).reshape(-1) != 0
    valued = np.bincount(tokens.sample_index, has_value & (tokens.mask != 0), len(tokens.samples))
    lengths = np.bincount(tokens.sample_index, tokens.mask != 0, len(tokens.samples))
    if (lengths >= 4).any() and (valued <= 1).all() and valued.any() and (active[lengths >= 4] >= 4).all():
        warnings.warn(
            "rewards at nearly every token, and a value at one token of each sample: a critic values every token, and "
            "rewards are few, so the two may be swapped. Check the order of the arguments; rewards come first.",
            stacklevel=4,
        )


@torch.inference_mode(False)
def gae(
    rewards: Tensor, values: Tensor, local: Place, cp_group: Group | None = None, *, gamma: float = 1, lam: float = 0.95
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
        gamma, lam: discounts in [0, 1].

    Returns advantages and returns, float32 in the shape of the values, detached, 0 where masked. Raises ValueError for
    values that are not this rank's part of the layout, discounts outside [0, 1], and rewards that require grad beside
    values that do not.
    Source: arXiv:1506.02438 eq. 16; over active tokens alone as in verl and TRL.
    """
    tokens = tokens_of(local)
    for name, of_tokens in (("rewards", rewards), ("values", values)):
        check_values(name, of_tokens, tokens)
    if rewards.requires_grad and not values.requires_grad:
        raise ValueError(
            "rewards with a graph, and values without one: a critic makes values, and nobody rewards, so the two are "
            "swapped. Check the order of the arguments; rewards come first."
        )
    _warn_of_lost_rewards(rewards.detach(), values.detach(), tokens)
    for name, discount in (("gamma", gamma), ("lam", lam)):
        check_within(name, discount, "[0, 1]", "gamma 1 and lam 0.95 are usual")
    r, v = rewards.detach().double(), values.detach().double()
    mask = on_device(tokens.mask, v.device).view(v.shape)
    following = segment_scan(  # A_t = r_t - V_t + the sum of these from t + 1 on; over the mask: each counts once
        (gamma * lam * (r - v) + gamma * v) / mask, local, cp_group, gamma=gamma * lam, reverse=True, exclusive=True
    )
    advantages = (r - v + following).masked_fill(mask == 0, 0)
    return advantages.float(), (advantages + v).masked_fill(mask == 0, 0).float()

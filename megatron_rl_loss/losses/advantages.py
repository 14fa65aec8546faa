"""Advantages of samples within their prompt groups, and of tokens by a teacher."""

import warnings

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_within
from megatron_rl_loss.losses.ratio import at_least_float32, check_same_shape
from megatron_rl_loss.step.ids import Ids, as_ids


def group_relative_advantages(
    rewards: Tensor,
    prompt_ids: Ids,
    *,
    rollout_ids: Ids | None = None,
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """One advantage per sample: its reward less the mean of its prompt group, divided by the group's std if asked.

    >>> group_relative_advantages(torch.tensor([1.0, 0.0, 5.0]), ["a", "a", "b"], normalize_by_std=False)
    tensor([ 0.5000, -0.5000,  0.0000])

    ``A_i = (r_i - mean(r_group)) / (std(r_group) + epsilon)``, std with Bessel's correction, 0 for a group of one; with
    ``normalize_by_std=False`` the numerator alone. Groups may have any sizes and any order. Computed in float64. Warns
    where all rewards are equal within their groups, so that all advantages are 0.

    Args:
        rewards: float [num_samples].
        prompt_ids: one id (int or str) per sample.
        rollout_ids: one id per sample where several samples are parts of one rollout. The rollout then counts once in
            its group, and its samples share its advantage.

    Returns:
        float32 [num_samples], on the rewards' device.

    Raises TypeError for rewards that are no tensor. Raises ValueError for rewards that are not 1-D and finite, do not
    match the ids, or differ within a rollout, and for an epsilon that is not above 0.
    Source: GRPO, arXiv:2402.03300 section 4.1.2; without std, Dr. GRPO, arXiv:2503.20783 section 3.
    """
    if not isinstance(rewards, Tensor):
        raise TypeError(
            f"rewards is a {type(rewards).__name__}: it must be a tensor, one entry per sample. Wrap it in "
            "torch.tensor."
        )
    if normalize_by_std:
        check_within("epsilon", epsilon, epsilon > 0, "above 0: groups of equal rewards have std 0", "1e-6 is usual")
    if rewards.dim() != 1 or not bool(torch.isfinite(rewards).all()):
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)}: they must be 1-D and finite. Pass one finite reward per sample."
        )
    prompts = as_ids("prompt_ids", prompt_ids, rewards.numel()).to(rewards.device)
    unique, group = prompts.unique(return_inverse=True)
    exact = rewards.double()
    counts = torch.ones_like(exact) if rollout_ids is None else _share_of_rollout(exact, group, rollout_ids)

    def sum_groups(values: Tensor) -> Tensor:
        return torch.zeros_like(unique, dtype=torch.float64).index_add_(0, group, values * counts)

    size = sum_groups(torch.ones_like(exact))
    centred = exact - (sum_groups(exact) / size)[group]
    if rewards.numel() > 1 and not centred.any():
        warnings.warn("all rewards are equal within their prompt groups: all advantages are 0", stacklevel=2)
    if not normalize_by_std:
        return centred.float()
    std = (sum_groups(centred.square()) / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std + epsilon)[group]).float()


def _share_of_rollout(rewards: Tensor, group: Tensor, rollout_ids: Ids) -> Tensor:
    """1 / the number of samples in each sample's rollout, float64 [num_samples]."""
    ids = as_ids("rollout_ids", rollout_ids, rewards.numel()).to(rewards.device)
    unique, rollout = ids.unique(return_inverse=True)
    first = torch.empty_like(unique).scatter_(0, rollout, torch.arange(len(rollout), device=rewards.device))[rollout]
    unlike = (rewards[first] != rewards) | (group[first] != group)
    if bool(unlike.any()):
        raise ValueError(
            f"rewards that differ within the rollout of sample {int(unlike.nonzero()[0])}: samples of one rollout "
            "share its reward and its prompt. Give every part the rollout's reward and prompt id."
        )
    return 1 / rollout.bincount().double()[rollout]


def distillation_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """``log pi_teacher - log pi`` per sampled token, detached: minus a one-sample estimate of KL(pi || teacher).

    Pass them as advantages to a policy loss, with ``log_probs`` those of the policy that sampled the tokens. Its
    gradient is then that of the reverse KL of each token's distribution, estimated from the sample; KL of future tokens
    is left out. Raises ValueError for shapes that differ.
    Source: on-policy distillation, arXiv:2306.13649; as advantages, Thinking Machines Lab 2025.
    """
    check_same_shape("log-probs", log_probs, teacher_log_probs)
    return at_least_float32(teacher_log_probs.detach()) - at_least_float32(log_probs.detach())

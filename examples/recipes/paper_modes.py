"""Modes of papers, an expression each: ``--custom-pg-loss-reducer-function-path paper_modes.balanced``, or import them.

l is a token's loss, m its mask, M_i the mask tokens of sample i. Ids and labels go with the samples: ``Samples(masks,
prompt_ids=..., ids={"prompt_sign": [...]}, labels={"turns": [...]})``. Use them as examples for modes of your own.
"""

from typing import Any

import numpy as np

from megatron_rl_loss import Mode, Samples, Sum, register_loss_mode
from megatron_rl_loss.core.modes import ModeInputs


@register_loss_mode("per_adapter_token_mean")
def per_adapter_token_mean(step: ModeInputs) -> Any:
    """sum_a (sum_{t of a} l*m / M_a): each adapter a has its own token mean; ``ids={"adapter": [...]}``."""
    return 1 / step.tokens("adapter")


@register_loss_mode("balanced")
def balanced(step: ModeInputs) -> Any:
    """1/P sum_g sum_s n_gs / G_g (sum_{t in gs} l*m / M_gs): Balanced Aggregation, arXiv:2605.04077.

    n_gs of prompt g's G_g samples have an advantage of sign s. ``prompt_ids``, ``ids={"prompt_sign": ["p1/-1", ...]}``.
    """
    return step.samples("prompt_sign") / (step.samples("prompt") * step.tokens("prompt_sign") * step.units("prompt"))


@register_loss_mode("weighted_token_mean", sums={"all": Sum(of=lambda s: s.label("weight") * s.mask_sums)})
def weighted_token_mean(step: ModeInputs) -> Any:
    """sum_i v_i sum_t l*m / sum_j v_j M_j, v_i a sample's weight (its task's, say): ``labels={"weight": [...]}``."""
    return step.label("weight") / step.sum("all")


def vl_norm_of(alpha: float) -> Mode:
    """VL Norm, arXiv:2509.07558: sum_i M_i^-alpha sum_t l*m / sum_j M_j^-alpha, over L where a divisor is given."""

    def powers(samples: Samples) -> Any:
        return np.where(samples.mask_sums > 0, samples.mask_sums.clip(1e-30) ** -alpha, 0)

    def weights(step: ModeInputs) -> Any:
        return powers(step.batch) / (step.sum("powers") * (step.divisor or 1))

    return Mode(name=f"vl_norm_{alpha:g}", function=weights, sums={"powers": Sum(of=powers)})


vl_norm = vl_norm_of(0.75)  # as in the paper's experiments


def _tokens_of_turns(samples: Samples) -> list[Any]:
    return [np.bincount(np.asarray(u, int), m) for u, m in zip(samples.label("turns"), samples.loss_masks, strict=True)]


@register_loss_mode(
    "rollout_mean_of_turns",
    sums={"active": Sum(of=lambda s: [np.count_nonzero(u) for u in _tokens_of_turns(s)], by="rollout")},
)
def rollout_mean_of_turns(step: ModeInputs) -> Any:
    """1/N sum_i 1/T_i sum_u (sum_{t in u} l*m / M_u): N rollouts, T_i of whose turns u have a token that counts.

    ``labels={"turns": [...]}``: the number of each token's turn, from 0 on; a turn lies in one sample.
    """
    turns, rollout_tokens = step.label("turns"), step.sum("active") * step.units("rollout")
    rows = zip(_tokens_of_turns(step.batch), turns, rollout_tokens, strict=True)
    return [1 / (tokens[turns] * number) for tokens, turns, number in rows]

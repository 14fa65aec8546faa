"""SkyRL: its normalisation of advantages before a step, by the weights of any of its loss reductions, exact.

    from skyrl.train import trainer
    from megatron_rl_loss.frameworks.skyrl import apply_loss_reduction_to_advantages_minibatch

    trainer.apply_loss_reduction_to_advantages_minibatch = apply_loss_reduction_to_advantages_minibatch

In the process of the trainer (SkyRL's entry point runs in a Ray task of its own). Imports no SkyRL.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_loss.modes.table import check_no_declared_sums
from megatron_rl_loss.reduction.folding import fold_into_advantages
from megatron_rl_loss.step.totals import StepTotals

__all__ = ["apply_loss_reduction_to_advantages_minibatch"]


def apply_loss_reduction_to_advantages_minibatch(
    advantages: Tensor,
    loss_mask: Tensor,
    loss_reduction: str,
    micro_batch_size: int,
    max_seq_len: int,
    prompt_boundaries: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """``A * w / mask``: SkyRL's sum of loss * mask over the mini-batch's tokens then is its loss in that reduction.

    Args:
        advantages, loss_mask: [rows, tokens] of one mini-batch, an optimizer step; the mask 0/1, bool or weights >= 0.
        loss_reduction: ``token_mean``, ``sequence_mean``, ``seq_mean_token_sum_norm`` or ``prompt_mean``.
        micro_batch_size: has no effect: no reduction here depends on it.
        max_seq_len: L of ``seq_mean_token_sum_norm``.
        prompt_boundaries: (start, end) rows of each prompt, for ``prompt_mean``; ignored otherwise.

    Returns:
        [rows, tokens], as the advantages, 0 where the mask is.

    Raises:
        ValueError: ``token_mean_legacy``, a mode that declares sums, or an unknown reduction; ``prompt_mean`` without
            boundaries, or with some that leave out or repeat a row; shapes that are not one [rows, tokens]; anything
            `fold_into_advantages` refuses.

    Source: SkyRL a9564572, skyrl/backends/skyrl_train/utils/ppo_utils.py, the function of that name.
    """
    if advantages.dim() != 2 or advantages.shape != loss_mask.shape:
        raise ValueError(
            f"advantages of shape {tuple(advantages.shape)}, loss_mask of shape {tuple(loss_mask.shape)}: both must be "
            "[rows, tokens] of one mini-batch. Pass the matrices that the trainer holds."
        )
    check_no_declared_sums(loss_reduction, "SkyRL")
    prompt_ids = None
    if loss_reduction == "prompt_mean":
        if prompt_boundaries is None:
            raise ValueError(
                f"loss aggregation {'prompt_mean'!r} of SkyRL without prompt_ids: it averages inside each prompt "
                "group. Pass prompt_boundaries."
            )
        prompt_ids = _prompt_of_each_row(prompt_boundaries, len(advantages))
    loss_masks = list(loss_mask)
    folded = fold_into_advantages(
        list(advantages),
        loss_masks,
        mode=f"skyrl:{loss_reduction}",
        totals=StepTotals.from_loss_masks(loss_masks, prompt_ids=prompt_ids, dp_group=None),
        divisor=max_seq_len if loss_reduction == "seq_mean_token_sum_norm" else None,
        prompt_ids=prompt_ids,
    )
    if not folded:
        return torch.zeros_like(advantages)
    return (torch.stack(folded) / loss_mask.where(loss_mask != 0, 1)).to(advantages.dtype)


def _prompt_of_each_row(boundaries: Sequence[tuple[int, int]], rows: int) -> list[int]:
    """The number of the prompt that each row belongs to."""
    ordered = sorted((int(start), int(end)) for start, end in boundaries)
    edges = [edge for pair in ordered for edge in pair]
    if [0, *edges[1::2]] != [*edges[::2], rows] or any(start >= end for start, end in ordered):
        raise ValueError(
            f"prompt_boundaries {ordered[:8]} for {rows} rows: every row must belong to one prompt. Pass those of "
            "compute_prompt_boundaries, relative to the mini-batch."
        )
    return [number for number, (start, end) in enumerate(ordered) for _ in range(start, end)]

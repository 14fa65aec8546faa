"""Rollouts as the padded rows of micro-batches, ``[rows, positions]``, and their distribution over ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rollouts import Rollout
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagBSHD


@dataclass
class Rows:
    """One micro-batch, not yet cut for a context-parallel rank. Tensors are [rows, positions].

    Position t of a row holds its token t, and all values of the token that it predicts, t + 1. Padding is at the end,
    where causal attention does not see it.

    Attributes:
        sampler_log_probs: log-probs of the sampler, 0 for tokens that it did not sample; None if it returns none.
        old_log_probs: log-probs of the trainer before the step's first update, this rank's part,
            [rows, local positions]; None until then.
        teacher_ids, teacher_log_probs: the teacher's likeliest ids, this rank's part, [rows, local positions, K]; None
            without a teacher.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    advantages: Tensor
    sampler_log_probs: Tensor | None
    samples: Samples
    old_log_probs: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_log_probs: Tensor | None = None


def make_rows(rollouts: Sequence[Rollout], *, multiple: int) -> Rows:
    """Rows as long as the longest of `rollouts`, rounded up to `multiple` (2 * cp_size cuts in zigzag)."""
    lengths = [rollout.num_inputs for rollout in rollouts]
    shape = len(rollouts), -(-max(lengths) // multiple) * multiple
    tokens, labels = torch.zeros(2, *shape, dtype=torch.int64)
    advantages, sampler_log_probs = torch.zeros(2, *shape)
    masks = []
    for row, (rollout, n) in enumerate(zip(rollouts, lengths, strict=True)):
        sequence = torch.tensor(rollout.prompt_tokens + rollout.response_tokens)
        tokens[row, :n], labels[row, :n] = sequence[:-1], sequence[1:]
        response = slice(len(rollout.prompt_tokens) - 1, n)
        mask = torch.zeros(n)
        mask[response] = torch.tensor(rollout.loss_mask)
        masks.append(mask)
        advantages[row, response] = rollout.advantage
        if rollout.old_log_probs is not None:
            sampler_log_probs[row, response] = torch.tensor(rollout.old_log_probs)
    return Rows(
        tokens=tokens,
        labels=labels,
        position_ids=torch.arange(shape[1]).expand(shape),
        advantages=advantages,
        sampler_log_probs=None if rollouts[0].old_log_probs is None else sampler_log_probs,
        samples=Samples(
            masks,
            layout=ZigzagBSHD(*shape, total_lengths=lengths),
            rollout_ids=[rollout.rollout_id for rollout in rollouts],
            prompt_ids=[rollout.prompt_id for rollout in rollouts],
            tokens=tokens,
        ),
    )


def deal(rollouts: Sequence[Rollout], *, num_microbatches: int, dp_rank: int, dp_size: int, cp_size: int) -> list[Rows]:
    """Deal a step's samples like cards, and return the micro-batches of this data-parallel rank.

    The rollouts of one prompt lie on several ranks and in several micro-batches, and so do the samples of one rollout.
    A mode counts over the whole step, so nothing has to stay together.
    """
    hands = num_microbatches * dp_size
    if len(rollouts) < hands:
        raise ValueError(
            f"{len(rollouts)} samples for {num_microbatches} micro-batches on each of {dp_size} data-parallel ranks: "
            "every micro-batch needs a sample. Lower --num-microbatches, or raise --prompts-per-step."
        )
    return [
        make_rows(rollouts[microbatch * dp_size + dp_rank :: hands], multiple=2 * cp_size)
        for microbatch in range(num_microbatches)
    ]


def split_over_samples(rollout: Rollout, count: int) -> list[Rollout]:
    """Split a rollout into up to `count` samples, like turns of an agent: each has the earlier ones as its prompt.

    The samples share the rollout's id, so every mode gives each token its weight in the whole rollout.
    """
    length = len(rollout.response_tokens)
    count = min(count, length)
    bounds = [length * i // count for i in range(count + 1)]
    return [
        replace(
            rollout,
            prompt_tokens=rollout.prompt_tokens + rollout.response_tokens[:start],
            response_tokens=rollout.response_tokens[start:end],
            loss_mask=rollout.loss_mask[start:end],
            old_log_probs=None if rollout.old_log_probs is None else rollout.old_log_probs[start:end],
        )
        for start, end in itertools.pairwise(bounds)
    ]

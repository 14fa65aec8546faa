"""The rows of `bigram_step` as RLinf's rollout workers make them."""

from typing import Any

import bigram_step
from torch import Tensor

PROMPT, LEFT = 3, 2  # length of prompts, and of what is left of the room for them


def rollout_of_rank(dp_rank: int, dp: int, results: Any, is_corrected: bool = False) -> Any:
    """Rows as RLinf's rollout workers put them into a channel; tokens that the model did not generate are masked.

    `is_corrected`: the old log-probs are the actor's own, beside those of the rollout.
    """
    batch = {name: values[dp_rank::dp] for name, values in bigram_step.make_batch().items()}
    masks, lengths = batch["token_mask"] * batch["sample_mask"][:, None], batch["input_lengths"].tolist()

    def responses(values: Tensor) -> list[Any]:
        return [row[PROMPT:length].tolist() for row, length in zip(values, lengths, strict=True)]

    return results.RolloutResult(
        num_sequence=len(lengths), group_size=1, prompt_lengths=[PROMPT] * len(lengths),
        prompt_ids=batch["input_ids"][:, :PROMPT].tolist(), response_lengths=[n - PROMPT for n in lengths],
        response_ids=responses(batch["input_ids"]), is_end=[True] * len(lengths),
        response_mask=responses(masks.long()),
        rollout_logprobs=responses(batch["generation_logprobs" if is_corrected else "prev_logprobs"]),
        recomputed_logprobs=batch["prev_logprobs"][:, PROMPT:] if is_corrected else None,
        advantages=batch["advantages"][:, PROMPT:].contiguous(),
        ref_logprobs=batch["reference_policy_logprobs"][:, PROMPT:].contiguous(),
    )  # fmt: skip

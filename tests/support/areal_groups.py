"""The rows of `bigram_step` as AReaL's trajectory groups."""

import bigram_step
import torch
from torch import Tensor


def groups_of_rank(dp_rank: int, dp: int) -> list[dict[str, Tensor]]:
    """A rank's prompts, as AReaL holds them: values belong to the token that predicts them."""
    batch = bigram_step.make_batch()
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    rows = {
        "input_ids": batch["input_ids"],
        "attention_mask": torch.arange(mask.shape[1])[None] < batch["input_lengths"][:, None],
        "loss_mask": mask.roll(-1, 1),
        "logprobs": batch["prev_logprobs"].roll(-1, 1),
        "prox_logp": batch["prev_logprobs"].roll(-1, 1),
        "advantages": batch["advantages"].roll(-1, 1),
        **dict.fromkeys(("kl_rewards", "tot_rewards"), torch.zeros(mask.shape)),
        "rewards": torch.ones(len(mask)),
    }
    groups = []
    for prompt in range(dp_rank, max(bigram_step.PROMPTS) + 1, dp):
        held = batch["prompts"] == prompt
        longest = int(batch["input_lengths"][held].max())
        groups.append({name: value[held][..., :longest] for name, value in rows.items()})
    return groups

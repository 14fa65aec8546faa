"""verl: the proof that the first step trains on the weights of `verl_rows`, and exact counts under context parallelism.

actor_rollout_ref.model.external_lib=verl_rows_proof
"""

from typing import Any

import torch
from verl.workers.utils import losses
from verl_rows import MODE

from megatron_rl_loss.engines.loss_trials import LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.proving import prove_policy_loss
from megatron_rl_loss.engines.verl import install, response_mask_of, response_samples

ROWS = LossPaths(f"{losses.__name__}:no_padding_2_padding", "data.advantages", {"data.old_log_probs": "old"})


def describe(arguments: dict[str, Any]) -> WeighedMicrobatch:
    """The micro-batch of a call of `ppo_loss`: this recipe's weights are a column beside the advantages."""
    data, mask = arguments["data"], response_mask_of(arguments["data"])
    names = "prompt", "session", "advantages"
    prompts, sessions, plain = (torch.nested.to_padded_tensor(data[name], 0) for name in names)
    ids: Any = {"prompt_ids": prompts[:, 0], "rollout_ids": sessions[:, 0], "ids": {"session": sessions[:, 0]}}
    samples = response_samples(mask.float(), **ids)
    return WeighedMicrobatch(samples, torch.ones(mask.shape), plain, is_followed=False)


install(proves=False)
settings: Any = {"units": "active", "group_size": lambda arguments: arguments["config"].rollout_n}
PROOF = prove_policy_loss(losses, "ppo_loss", ROWS, MODE, describe, engine="verl", **settings).proof

"""The rows of `bigram_step` as ROLL's rollouts and its pipeline make them."""

from typing import Any

import bigram_step
import torch
from checkouts import Settings
from torch import Tensor

LEFT, PROMPT = 2, 3  # padding to the left, length of prompts


def rows_of_rank(dp_rank: int, dp: int, protocol: Any, functionals: Any) -> Any:
    """A `DataProto` with every `dp`-th row; the modules are ROLL's."""
    batch = {name: values[dp_rank::dp] for name, values in bigram_step.make_batch().items()}
    ids = torch.nn.functional.pad(batch["input_ids"], (LEFT, 0))
    ids[:, LEFT:][torch.arange(bigram_step.LENGTH) >= batch["input_lengths"][:, None]] = 0
    prompts = ids[:, : LEFT + PROMPT]
    columns = {"input_ids": prompts, "attention_mask": (prompts != 0).long(), "position_ids": prompts}
    data = protocol.DataProto(protocol.TensorDict(columns, batch_size=[len(ids)]))
    data = functionals.postprocess_generate(data, ids, 1, bigram_step.LENGTH + LEFT, 99, 0)
    functionals.get_sample_level_mask(data, Settings())
    data.batch["final_response_mask"] *= pad(batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].long()
    theirs_of = {"prev_logprobs": "old_log_probs", "reference_policy_logprobs": "ref_log_probs"}
    theirs_of |= {"generation_logprobs": "infer_logprobs", "advantages": "advantages"}
    for name, theirs in theirs_of.items():
        data.batch[theirs] = pad(batch[name])[:, 1:].clone()
    data.batch["train_infer_is_weight"] = torch.ones_like(data.batch["advantages"])
    cuts = [(a * len(ids) // 6, b * len(ids) // 6) for a, b in bigram_step.CUTS]
    data.meta_info = {"loss_mask_keys": ["response_mask", "final_response_mask"], "micro_batch_indices": cuts}
    data.meta_info |= {"micro_batch_lengths": [bigram_step.LENGTH + LEFT] * len(cuts), "num_micro_batchs": len(cuts)}
    return data


def pad(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, LEFT))

"""The rows of `bigram_step` as SkyRL's trainer lays them out for its workers."""

from typing import Any

from bigram_step import make_batch, with_prompts
from torch import Tensor

PROMPT = 3  # the length of prompts


def data_of(rank_rows: slice, normalize: Any, convert: Any, ids: list[int] | None = None) -> dict[str, Tensor]:
    """A rank's rows, as SkyRL lays them out; `normalize` makes advantages of all columns, as its trainer does.

    `ids`: rows have the prompts of these, whatever the trainer's groups are.
    """
    batch = make_batch() if ids is None else with_prompts(make_batch(), ids)
    masks, lengths = batch["token_mask"] * batch["sample_mask"][:, None], batch["input_lengths"].tolist()

    def responses(values: Tensor) -> list[Any]:
        return [row[PROMPT:length].tolist() for row, length in zip(values, lengths, strict=True)]

    def laid_out(name: str) -> Any:
        values = responses(batch[name])
        return convert(0, batch["input_ids"][:, :PROMPT].tolist(), responses(batch["input_ids"]), values,
                       responses(masks), values)  # fmt: skip

    sequences, attention, response, advantages, mask, *_ = laid_out("advantages")
    whole = {
        "sequences": sequences,
        "attention_mask": attention,
        "action_log_probs": laid_out("prev_logprobs")[5],
        "base_action_log_probs": laid_out("reference_policy_logprobs")[5],
        "rollout_logprobs": laid_out("generation_logprobs")[5],
        "advantages": advantages,
        "loss_mask": mask,
        "response_mask": response,
    }
    whole["advantages"] = normalize(whole)
    return {name: values[rank_rows].clone() for name, values in whole.items()}

"""slime: modes by session (its rows share a `rollout_id`) or by prompt. Rewards hold the weights; a hook sums.

--custom-reward-post-process-path slime_rows.rewards --advantage-estimator grpo
--custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.constant_1
"""

from typing import Any

from megatron_rl_loss import Samples, group_relative_advantages, weights_column

MODE = "session_mean"  # or "prompt_mean"


def rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """The raw rewards, and GRPO's advantages times G and the weight of the row's tokens."""
    raw = [sample.get_reward_value(args) for sample in samples]
    prompts, sessions = [sample.group_index for sample in samples], [sample.rollout_id for sample in samples]
    masks = [[0] * sample.response_length if sample.remove_sample else sample.loss_mask or [1] * sample.response_length
             for sample in samples]  # fmt: skip
    folded = group_relative_advantages(raw, prompts, rollout_ids=sessions, dp_group=None)
    number = {session: i for i, session in enumerate(dict.fromkeys(sessions))}
    steps = [number[session] // args.global_batch_size for session in sessions]
    for step in set(steps):  # slime's optimizer steps, of so many sessions each
        rows = [i for i, row_step in enumerate(steps) if row_step == step]
        ids = {"session": [sessions[i] for i in rows]}
        whole = Samples([masks[i] for i in rows], prompt_ids=[prompts[i] for i in rows], ids=ids)  # on every rank
        for i, weights in zip(rows, weights_column(MODE, whole, dp_group=None), strict=True):
            folded[i] *= args.global_batch_size * max(weights.tolist(), default=0.0)
    return raw, folded.tolist()

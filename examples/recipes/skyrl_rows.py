"""SkyRL: modes by session (its rows are steps of a trajectory) or by prompt. A trainer of your own sets weights.

trainer.algorithm.loss_reduction=token_mean generator.step_wise_trajectories=true, and run `Experiment` in the place of
`BasePPOExp`.
"""

from typing import Any

import torch
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer

from megatron_rl_loss import Samples, weights_column

MODE = "session_mean"  # or "prompt_mean"


class Trainer(RayPPOTrainer):  # type: ignore[misc]
    def compute_advantages_and_returns(self, data: Any) -> Any:
        is_last = torch.tensor(data.metadata["is_last_step"]).int()
        data.metadata["rows"] = data.metadata["uids"], (is_last.cumsum(0) - is_last).tolist()  # kept for what follows
        return super().compute_advantages_and_returns(data)

    def _normalize_advantages(self, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None) -> Any:
        data, (prompts, sessions) = super()._normalize_advantages(data, mini_batch_boundaries), data.metadata["rows"]
        for start, end in mini_batch_boundaries:
            masks, ids = data["loss_mask"][start:end], {"session": sessions[start:end]}
            step = Samples(list(masks), prompt_ids=prompts[start:end], ids=ids)
            weights = torch.stack(weights_column(MODE, step, dp_group=None))  # of a whole step, which the trainer has
            data["advantages"][start:end] *= weights * masks.sum()  # by which SkyRL has divided
        return data


class Experiment(BasePPOExp):  # type: ignore[misc]
    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer(*args, **kwargs)

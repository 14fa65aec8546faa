"""verl: modes by session or prompt. The driver sends weights in the place of rollout correction's; a loss sums.

VERL_USE_EXTERNAL_MODULES=verl_rows, in the environment of the driver and of Ray's workers, and
trainer.v1.trainer_mode=rows actor_rollout_ref.actor.policy_loss.loss_mode=rows
actor_rollout_ref.model.external_lib=verl_rows_proof, which proves the first step
"""

from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from megatron_rl_loss import Samples, weights_column

MODE = "session_mean"  # or "prompt_mean"


@register_policy_loss("rows")  # type: ignore[untyped-decorator]
def rows(**arguments: Any) -> Any:
    return get_policy_loss_fn("vanilla")(**arguments | {"loss_agg_mode": "token-sum"})


@register_trainer("rows")
class Trainer(PPOTrainerSync):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = "sync"  # verl chooses its replay buffer by this name
        super().__init__(config)

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        settings, stored = self.config.actor_rollout_ref, {"keys": batch.keys, "partition_id": batch.partition_id}
        if settings.actor.shuffle or (self.config.algorithm.get("rollout_correction") or {}).get("rollout_is"):
            raise ValueError("actor.shuffle or rollout_is: they mix steps or replace weights. Turn both off.")
        masks = tq.kv_batch_get(**stored, select_fields=["response_mask"])["response_mask"].unbind()
        dp_size, weights = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1, dict[int, torch.Tensor]()
        share = settings.actor.ppo_mini_batch_size * settings.rollout.n // dp_size  # a rank's rows in a step
        for step in torch.arange(len(masks)).view(dp_size, -1, share).transpose(0, 1).flatten(1).tolist():
            prompts, sessions = ([batch.keys[i].rsplit("_", parts)[0] for i in step] for parts in (2, 1))
            # The driver holds the whole step; verl adds empty rows, hence active units.
            whole = Samples([masks[i] for i in step], prompt_ids=prompts, ids={"session": sessions})
            weights |= zip(step, weights_column(MODE, whole, units="active", dp_group=None), strict=True)
        columns = {"rollout_is_weights": [weights[i] for i in range(len(masks))]}
        for unit, parts in {"prompt": 2, "session": 1}.items():  # for `verl_rows_proof`
            names = [key.rsplit("_", parts)[0] for key in batch.keys]
            number_of = {name: number for number, name in enumerate(sorted(set(names)))}
            columns[unit] = [torch.full_like(mask, number_of[name]) for name, mask in zip(names, masks, strict=True)]
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
        fields = TensorDict(nested, batch_size=len(masks))
        return super()._update_actor(tq.kv_batch_put(**stored, fields=fields), metrics)

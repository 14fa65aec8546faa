"""SkyRL: register a policy loss in the run script, before Ray starts; two settings select it.

trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=token_mean
"""

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from megatron_rl_loss.engines.skyrl import AggregatedPolicyLoss

PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", "prompt_mean", kl="token_mean"))

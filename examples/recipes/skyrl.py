"""SkyRL: register a policy loss in the run script, before Ray starts; `loss_reduction` is the mode of every term.

trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=prompt_mean
"""

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from megatron_rl_loss.engines.skyrl import AggregatedPolicyLoss

PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", kl="token_mean"))  # a mode of its own for KL

"""SkyRL: one assignment, in the process that its trainer runs in; `trainer.algorithm.loss_reduction` says the mode."""

from skyrl.train import trainer

from megatron_rl_loss.frameworks.skyrl import apply_loss_reduction_to_advantages_minibatch

trainer.apply_loss_reduction_to_advantages_minibatch = apply_loss_reduction_to_advantages_minibatch

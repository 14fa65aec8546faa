"""SkyRL's entry point with a loss of ours: `-m skyrl_main` in the place of `-m skyrl.train.entrypoints.main_base`.

trainer.algorithm.policy_loss_type=mine trainer.algorithm.loss_reduction=prompt_mean
"""

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.entrypoints.main_base import main

from megatron_rl_loss.engines.skyrl import AggregatedPolicyLoss

# group_size: as generator.n_samples_per_prompt
PolicyLossRegistry.register("mine", AggregatedPolicyLoss("regular", group_size=5))

if __name__ == "__main__":
    main()

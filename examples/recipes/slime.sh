# slime: below GRPO_ARGS=(...) of your copy of a launch script, such as slime's scripts/run-qwen3-4B.sh.
# The hook's name says the mode, and `constant_40960` the divisor, too.
GRPO_ARGS+=(
   --custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.sample_mean
   --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps
)

# verl, in the root of its checkout: launch scripts hand their arguments to Hydra. The mode is verl's setting; the module
# guards verl's `agg_loss` in every process that imports it.
bash examples/grpo_trainer/run_qwen3_8b_megatron.sh "$@" \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=megatron_rl_loss.engines.verl_install

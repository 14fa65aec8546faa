# verl: the module that its workers import guards verl's `agg_loss`; the mode is verl's setting.
python3 -m verl.trainer.main_ppo "$@" \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=megatron_rl_loss.engines.verl_install

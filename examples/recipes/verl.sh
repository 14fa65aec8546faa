# verl: the module that its workers import guards verl's `agg_loss`; the mode is verl's setting.
python3 -m verl.trainer.main_ppo "$@" \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.model.external_lib=megatron_rl_loss.engines.verl_install \
  critic.model.external_lib=megatron_rl_loss.engines.verl_install

# miles: slime's flags and slime's hooks. `token_mean` goes with Megatron's own flag.
python3 train.py "$@" --calculate-per-token-loss \
  --custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.token_mean \
  --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps

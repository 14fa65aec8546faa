# slime: two flags at its launch line. The hook's name says the mode, and `constant_40960` the divisor, too.
python3 train.py "$@" \
  --custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.sample_mean \
  --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps

# slime: one flag at its launch line. The hook's name says the mode and, for `constant`, the divisor.
python3 train.py "$@" \
  --custom-pg-loss-reducer-function-path megatron_rl_loss.frameworks.slime.constant_40960

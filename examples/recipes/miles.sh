# miles: slime's flags and hooks, as an option of its launch scripts. `token_mean` goes with Megatron's own flag.
python3 scripts/run_qwen3_4b.py "$@" --extra-args "--calculate-per-token-loss \
  --custom-pg-loss-reducer-function-path megatron_rl_loss.engines.slime.token_mean \
  --custom-megatron-init-path megatron_rl_loss.engines.slime.count_steps"

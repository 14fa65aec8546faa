#!/usr/bin/env bash
# The main job on a fresh machine: sets up .venv, then trains a small GPT for 20 steps on arithmetic rollouts with the
# real Megatron on 4 processes (tensor parallel 2 x context parallel 2), its policy loss aggregated by `constant`.
# Further arguments go to the launch and override it, e.g. tools/demo.sh --loss-aggregation-divisor 40960
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

run=runs/demo
rm -rf "$run"
mkdir -p "$run"
if [[ $("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') -lt 4 ]]; then
  export CUDA_VISIBLE_DEVICES=
  echo "Fewer than 4 GPUs here: the 4 processes run on CPU and gloo."
fi
# 64 is the generation budget that examples/arithmetic.jsonl was made with (tools/make_rollouts.py).
launch=(examples/launch_grpo.sh 4 --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel
  --loss-aggregation constant --loss-aggregation-divisor 64 --tensorboard-dir "$run" "$@")
echo "${launch[*]}"
echo "Everything it prints goes to $run/log.txt; its progress:"
if ! "${launch[@]}" 2>&1 | tee "$run/log.txt" | grep --line-buffered -E '^ \[|of iteration|^loss aggregation'; then
  echo "The launch failed. The end of $run/log.txt:" >&2
  tail -n 40 "$run/log.txt" >&2
  exit 1
fi
"$PYTHON" tools/summarize_run.py "$run"

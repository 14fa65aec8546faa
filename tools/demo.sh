#!/usr/bin/env bash
# The main job on a fresh machine: sets up .venv, trains a small GPT online with GRPO on the real Megatron, and shows that
# steps of it are the same on 2 and 4 processes. Further arguments of examples/online_grpo.py go to every run, e.g.
#   tools/demo.sh --loss-aggregation constant --loss-aggregation-divisor 40960
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

run=runs/demo
rm -rf "$run"
mkdir -p "$run"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
if [[ $("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) -lt 4 ]]; then
  export CUDA_VISIBLE_DEVICES='' GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  echo "Fewer than 4 GPUs here: all processes run on CPU and gloo."
fi

# NAME PROCESSES ARGUMENTS...: what it says of itself, while warnings go to a log that is shown if it fails.
online() {
  local name=$1 processes=$2
  shift 2
  if ! "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" examples/online_grpo.py \
      --output "$run/$name" "$@" 2> "$run/$name.log"; then
    echo "It failed. The end of $run/$name.log:" >&2
    tail -n 40 "$run/$name.log" >&2
    return 1
  fi
}

echo "A GPT of 0.1 M parameters learns to add: 80 steps of GRPO."
online learns 1 --steps 80 --eval-interval 20 --tensorboard --save-start "$run/start" "$@"
"$PYTHON" tools/plot_online.py --runs "$run/learns" --json "$run/learns.json" --png "$run/learns.png"
echo "picture: $run/learns.png; every step: $run/learns/steps.jsonl; TensorBoard: tensorboard --logdir $run/learns"

echo "3 steps on the same rollouts in other layouts; differences are relative:"
few=(--load "$run/start" --steps 3 --inner-steps 2 --eval-prompts 64)
again=(--replay-rollouts "$run/rollouts")
two_tp=(--tensor-model-parallel-size 2)
two_cp=(--context-parallel-size 2)
online alone 1 "$@" "${few[@]}" --save-rollouts "$run/rollouts" --save "$run/alone/weights" > /dev/null
online tp2cp2 4 "$@" "${few[@]}" "${again[@]}" "${two_tp[@]}" "${two_cp[@]}" --save "$run/tp2cp2/weights" > /dev/null
online dp2 2 "$@" "${few[@]}" "${again[@]}" --save "$run/dp2/weights" > /dev/null
"$PYTHON" tools/compare_layouts.py --start "$run/start" "$run/alone" "$run/tp2cp2" "$run/dp2" 2> "$run/compare.log"

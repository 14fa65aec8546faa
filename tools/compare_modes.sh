#!/usr/bin/env bash
# The same online run in every mode, from three warm starts, one run after the other on one core; then one picture.
#
#   tools/compare_modes.sh                 # 15 runs of 200 steps: about 20 minutes
#   tools/compare_modes.sh --steps 40      # further arguments go to every run
#
# A warm start is made once a seed and shared by its modes; seeds share nothing. PYTHON names the interpreter (default:
# .venv's), SEEDS the warm starts, MODES the modes, RUNS the folder of the runs, TO the picture and its JSON without
# their endings.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${PYTHON:-} ]]; then source tools/setup.sh; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
runs=${RUNS:-runs/modes}
to=${TO:-runs/modes/all}

declare -A mode_flags=(
  [sample_mean]="" [prompt_mean]="" [token_mean]=""
  [constant]="--loss-aggregation-divisor 24" # the generation budget
  [token_sum]=""
)
folders=()
for seed in ${SEEDS:-0 1 2}; do
  start=$runs/seed$seed/start
  rm -rf "$runs/seed$seed"
  mkdir -p "$runs/seed$seed"
  for mode in ${MODES:-sample_mean prompt_mean token_mean constant token_sum}; do
    run=$runs/seed$seed/$mode
    from=(--save-start "$start")
    if [[ -d $start ]]; then from=(--load "$start"); fi
    echo "== seed $seed, $mode"
    # shellcheck disable=SC2086
    "$PYTHON" examples/online_grpo.py --output "$run" --seed "$seed" --steps 200 --eval-interval 10 \
      --print-interval 1000 --loss-aggregation "$mode" ${mode_flags[$mode]} "${from[@]}" "$@" 2>> "$runs/seed$seed/log.txt"
    folders+=("$run")
  done
done
"$PYTHON" tools/plot_online.py --runs "${folders[@]}" --json "$to.json" --png "$to.png" --table
echo "$to.png and $to.json"

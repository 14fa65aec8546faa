#!/usr/bin/env bash
# Runs the tests of what depends on Megatron's version under other versions of megatron-core, and prints a table.
#
#   tools/test_versions.sh [VERSION...]     default: the oldest and the newest that this package supports
#
# VERSION is a release, or "checkout" for the Megatron-LM that MEGATRON_LM_PATH holds. Each has a venv of its own in
# .versions/, which shares all packages but Megatron with .venv. What a version lacks is skipped by name.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

make_venv() { # VERSION
  local folder=.versions/$1 packages
  packages=$folder/lib/python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
  if [[ ! -e $folder/ready ]]; then
    "$PYTHON" -m venv --clear --without-pip "$folder"
    for entry in "${PYTHON%/bin/python}"/lib/python3*/site-packages/*; do
      [[ $(basename "$entry") == megatron* ]] || ln -s "$entry" "$packages/"
    done
    if [[ $1 == checkout ]]; then
      ln -s "$(realpath "${MEGATRON_LM_PATH:?must name a checkout of Megatron-LM}")/megatron" "$packages/"
    else
      "$PYTHON" -m pip install -qq --no-deps --target "$packages" "megatron-core==$1"
    fi
    echo "$PWD" > "$packages/megatron_rl_loss_of_this_checkout.pth"
    touch "$folder/ready"
  fi
}

export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}  # 0.15 asks for it as it is imported
failed=0
results=()
for version in "${@:-0.15.3}"; do
  make_venv "$version"
  python=.versions/$version/bin/python
  echo "megatron-core $version ..."
  for part in "own loop, every form: test_planned_steps" "probe: test_probe" "MoE: test_auxiliary_losses" \
      "audit: test_audit" "pretrain with the flags: test_launch"; do
    log=.versions/$version/${part##*: }.log
    if "$python" -m pytest -q -n 0 -m 'not slow' "tests/megatron/${part##*: }.py" > "$log" 2>&1; then
      outcome=$(tail -n 1 "$log")
    else
      outcome="FAILED: $(tail -n 1 "$log")"
      failed=1
    fi
    results+=("$version|${part%: *}|$outcome")
  done
done
printf '%s\n' "${results[@]}" | column -t -s '|'
exit "$failed"

#!/usr/bin/env bash
# Runs what depends on Megatron's version under other versions of megatron-core, and prints a table.
#
#   tools/test_versions.sh [VERSION...]            by default the oldest that is supported, and of the parts the loop
#   PARTS="loop probe step" tools/test_versions.sh 0.18.2 checkout
#   PARTS=all tools/test_versions.sh 0.17.1        some ten minutes per version
#
# VERSION is a release, or "checkout" for the Megatron-LM that MEGATRON_LM_PATH holds. Each has a venv of its own in
# .versions/, which shares all packages but Megatron with .venv. Its `pretrain` is there from 0.17 on.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

make_venv() { # VERSION
  local folder=.versions/$1 packages entry
  packages=$folder/lib/python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
  [[ -e $folder/ready ]] && return
  "$PYTHON" -m venv --clear --without-pip "$folder"
  for entry in "$PWD"/.venv/lib/python3*/site-packages/*; do
    [[ $(basename "$entry") == megatron* ]] || ln -s "$entry" "$packages/"
  done
  if [[ $1 == checkout ]]; then
    ln -s "$(realpath "${MEGATRON_LM_PATH:?must name a checkout of Megatron-LM}")/megatron" "$packages/"
  else
    "$PYTHON" -m pip install -qq --no-deps --target "$packages" "megatron-core==$1" pyyaml
  fi
  touch "$folder/ready"
}

export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}  # 0.15 asks for it as it is imported
export PYTHONPATH=$PWD
[[ $# -gt 0 ]] || set -- 0.15.3
declare -A TESTS=(
  [loop]="test_planned_steps.py tests/megatron/test_late_counts.py" [probe]=test_probe.py [step]=test_launch.py [moe]=test_auxiliary_losses.py
  [audit]=test_audit.py [dynamic]="test_dynamic_cp.py tests/megatron/test_dynamic_packs.py"
  [pretrain]="test_example.py -k same_in_every_layout"
)
PARTS=${PARTS:-loop}
[[ $PARTS != all ]] || PARTS="loop probe step moe audit dynamic pretrain"
failed=0
table="version|part|outcome"
for version in "$@"; do
  make_venv "$version"
  for part in $PARTS; do
    read -ra tests <<< "${TESTS[$part]:?is no part}"
    if [[ $part == pretrain && ! -d $(echo .versions/"$version"/lib/python3*/site-packages/megatron)/training ]]; then
      table+=$'\n'"$version|$part|megatron.training is not in this wheel"
      continue
    fi
    log=.versions/$version/$part.log
    echo "megatron-core $version: $part ..."
    ".versions/$version/bin/python" -m pytest -q -n 0 -p no:cacheprovider "tests/megatron/${tests[@]}" \
      > "$log" 2>&1 || { failed=1; tail -n 30 "$log"; }
    table+=$'\n'"$version|$part|$(tail -n 1 "$log")"
  done
done
column -t -s '|' <<< "$table"
exit "$failed"

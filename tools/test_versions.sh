#!/usr/bin/env bash
# Runs what depends on Megatron's version under other versions of megatron-core. Prints each test that is skipped with
# its reason, and a table, as docs/bench/versions-cpu.txt holds it and docs/support.md sums it up.
#
#   tools/test_versions.sh [VERSION...]            by default the oldest that is supported, and of the parts the loop
#   PARTS="loop probe" tools/test_versions.sh 0.18.2 ~/Megatron-LM
#   PARTS=all tools/test_versions.sh 0.17.1        some minutes per version
#
# VERSION is a release, or a folder: a checkout of Megatron-LM; "checkout" is the one that MEGATRON_LM_PATH names. Each
# has a venv of its own in .versions/, which shares all packages but Megatron with tools/setup.sh's.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

version_venv() { # NAME VERSION
  local folder=.versions/$1 packages shared entry
  packages=$folder/lib/python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
  [[ -e $folder/ready ]] && return
  shared=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PYTHON" -m venv --clear --without-pip "$folder"
  for entry in "$shared"/*; do
    [[ $(basename "$entry") == megatron* ]] || ln -s "$entry" "$packages/"
  done
  if [[ -d $2 ]]; then
    ln -s "$(realpath "$2")/megatron" "$packages/"
  else
    "$PYTHON" -m pip install -qq --no-deps --target "$packages" "megatron-core==$2" pyyaml
  fi
  touch "$folder/ready"
}

export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}  # 0.15 asks for it as it is imported
export PYTHONPATH=$PWD
[[ $# -gt 0 ]] || set -- 0.15.3
declare -A TESTS=(
  [loop]="test_worlds.py test_planned_steps.py test_late_counts.py" [probe]=test_probe.py [step]=test_launch.py
  [moe]=test_auxiliary_losses.py [audit]=test_audit.py [dynamic]="test_dynamic_cp.py test_dynamic_packs.py"
  [head]="test_output_head.py test_head_in_place.py test_hybrid.py"
  [pretrain]=test_example.py::test_a_step_is_the_same_in_every_layout
)
PARTS=${PARTS:-loop}
[[ $PARTS != all ]] || PARTS="loop probe step moe audit dynamic head pretrain"
failed=0
table="| megatron-core | ${PARTS// / | } |"$'\n'"|---|$(sed -E 's/\w+ ?/---|/g' <<< "$PARTS")"
for version in "$@"; do
  [[ $version != checkout ]] || version=${MEGATRON_LM_PATH:?must name a checkout of Megatron-LM}
  name=$version
  [[ ! -d $version ]] || name=$(basename "$(realpath "$version")")@$(git -C "$version" rev-parse --short=8 HEAD)
  version_venv "$name" "$version"
  table+=$'\n'"| $name |"
  for part in $PARTS; do
    read -ra tests <<< "${TESTS[$part]:?is no part}"
    log=.versions/$name/$part.log
    echo "megatron-core $name: $part ..."
    ".versions/$name/bin/python" -m pytest -q -n 0 -p no:cacheprovider --no-fold-skipped \
      "${tests[@]/#/tests/megatron/}" > "$log" 2>&1 || { failed=1; tail -n 30 "$log"; }
    sed -nE 's|^SKIPPED tests/megatron/(.*) - Skipped: |  not \1: |p' "$log"
    table+=" $(sed -nE 's/^([0-9]+ (passed|failed|skipped|error).*) in [0-9.]+s.*/\1/p' "$log" | tail -n 1) |"
  done
done
echo "$table"
exit "$failed"

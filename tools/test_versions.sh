#!/usr/bin/env bash
# Runs what depends on Megatron's version under other versions of megatron-core, and prints a table.
#
#   tools/test_versions.sh [VERSION...]     by default the oldest that is supported
#
# VERSION is a release, or "checkout" for the Megatron-LM that MEGATRON_LM_PATH holds. Each has a venv of its own in
# .versions/, which shares all packages but Megatron with .venv. PARTS names the files of tests/megatron to run.
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
    "$PYTHON" -m pip install -qq --no-deps --target "$packages" "megatron-core==$1"
  fi
  touch "$folder/ready"
}

export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}  # 0.15 asks for it as it is imported
export PYTHONPATH=$PWD
[[ $# -gt 0 ]] || set -- 0.15.3
failed=0
table="version|part|outcome"
for version in "$@"; do
  make_venv "$version"
  for part in ${PARTS:-test_planned_steps test_probe}; do
    log=.versions/$version/$part.log
    echo "megatron-core $version: $part ..."
    ".versions/$version/bin/python" -m pytest -q -n 0 -m 'not slow' -p no:cacheprovider "tests/megatron/$part.py" \
      > "$log" 2>&1 || { failed=1; tail -n 30 "$log"; }
    table+=$'\n'"$version|$part|$(tail -n 1 "$log")"
  done
done
column -t -s '|' <<< "$table"
exit "$failed"

#!/usr/bin/env bash
# Builds sdist and wheel, the wheel from the sdist, and tries the wheel in an empty environment of each Python:
#   tools/check_package.sh                      # 3.10 to 3.13, and 3.12 with Megatron: the newest, and 0.16.1
#   tools/check_package.sh 3.11 3.12+megatron   # some of them
# Each environment is made anew from the package index, PyTorch with its CUDA libraries included (some GB), and removed
# again; a Python that is not here is named and left out. What is tried: tools/check_install.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
builder=$(find_python 3.12 3.13 3.11 3.10)
"$builder" -m venv "$work/build"
"$work/build/bin/python" -m pip install -qq build
"$work/build/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
ls -1 "$work/dist"
wheel=$(echo "$work"/dist/*.whl)

for wanted in "${@:-3.10 3.11 3.12 3.13 3.12+megatron 3.12+megatron==0.16.1}"; do
  for one in $wanted; do
    python=$(find_python "${one%+*}" 2>/dev/null) || { echo "$one: no such Python here, left out"; continue; }
    "$python" -m venv "$work/venv"
    extra=() release=()
    if [[ $one == *+megatron* ]]; then extra=(megatron); fi
    if [[ $one == *==* ]]; then release=("megatron-core==${one#*==}"); fi
    "$work/venv/bin/python" -m pip install -qq --no-cache-dir --no-compile "$wheel${extra[0]:+[${extra[0]}]}" "${release[@]}"
    cp tools/check_install.py "$work"
    (cd "$work" && env -u PYTHONPATH venv/bin/python check_install.py "${extra[@]:+--with-megatron}" | sed "s/^/$one: /")
    rm -rf "$work/venv"
  done
done

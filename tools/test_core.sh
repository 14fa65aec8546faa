#!/usr/bin/env bash
# Passes the tests of the core (tests/unit), which needs no Megatron, with another Python than .venv's: 3.10, the oldest,
# or 3.11, 3.13, 3.12 if there is one. Sets up .venv-core for it. Set CORE_PYTHON to choose one.
# Further arguments go to pytest, e.g. tools/test_core.sh -m 'not slow'
set -euo pipefail
cd "$(dirname "$0")/.."

source tools/find_python.sh

another_python() { # than version $1
  local version found
  for version in 3.10 3.11 3.13 3.12; do
    found=$([[ $version == "$1" ]] || python_of "$version")
    if [[ -n $found ]]; then echo "$found"; return; fi
  done
}

set_up() {
  local wanted folder shared
  wanted=$(cat constraints-core.txt tools/test_core.sh <(grep '^torch==' constraints.txt) <("$1" -VV) | cksum)
  if [[ -x .venv-core/bin/python && $(cat .venv-core/ready 2>/dev/null) == "$wanted" ]]; then return; fi
  echo "Setting up .venv-core: PyTorch, about 1 GB, a minute or two ..."
  "$1" -m venv --clear .venv-core
  local install=(.venv-core/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints-core.txt)
  "${install[@]}" numpy pytest pytest-timeout pytest-xdist hypothesis
  "${install[@]}" typing_extensions filelock fsspec jinja2 networkx sympy
  # Some GB of CUDA libraries, without which torch for CUDA does not load, are the same for every Python: take .venv's.
  shared=$(.venv/bin/python -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null) || shared=
  if [[ -n $shared ]]; then
    folder=$(.venv-core/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    ln -s "$shared" "$folder/nvidia"
    install+=(--no-deps)
  fi
  "${install[@]}" "$(grep '^torch==' constraints.txt)"
  echo "$wanted" > .venv-core/ready
}

python=${CORE_PYTHON:-$(another_python "$(version_of .venv/bin/python)")}
if [[ -z $python ]]; then
  echo "The core is not tested with another Python: none of 3.10 to 3.13 was found beside .venv's."
  exit 0
fi
echo "The core with $("$python" --version) ($python):"
set_up "$python"
exec .venv-core/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder tests/unit "$@"

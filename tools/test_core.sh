#!/usr/bin/env bash
# Passes the tests of the core (tests/unit), which needs no Megatron, with another Python than .venv's: 3.10, the oldest,
# or 3.11, 3.13, 3.12 if there is one. Sets up .venv-core for it. Set CORE_PYTHON to choose one.
# Further arguments go to pytest, e.g. tools/test_core.sh -m 'not slow'
set -euo pipefail
cd "$(dirname "$0")/.."

source tools/venv.sh

torch=$(grep '^torch==' constraints.txt)

fill_venv() {
  local install=(install_into "$1" --constraint constraints-core.txt) main=${PYTHON:-.venv/bin/python} shared
  "${install[@]}" numpy pytest pytest-timeout pytest-xdist hypothesis
  "${install[@]}" typing_extensions filelock fsspec jinja2 networkx sympy
  # Some GB of CUDA libraries, without which torch for CUDA does not load, are the same for every Python: take .venv's.
  shared=$("$main" -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null) || shared=
  if [[ -n $shared ]]; then
    ln -s "$shared" "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
    install+=(--no-deps)
  fi
  "${install[@]}" "$torch"
}

python=${CORE_PYTHON:-}
if [[ -z $python ]]; then
  mapfile -t others < <(printf '%s\n' 3.10 3.11 3.13 3.12 | grep -vxF "$(version_of "${PYTHON:-.venv/bin/python}")")
  if ! python=$(find_python "${others[@]}" 2>/dev/null); then
    echo "The core is not tested with another Python: none of ${others[*]} was found."
    exit 0
  fi
fi
echo "The core with $("$python" --version) ($python):"
make_venv .venv-core "$({ without_comments constraints-core.txt; echo "$torch"; "$python" -VV; } | cksum)" "$python" fill_venv
exec .venv-core/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder tests/unit "$@"

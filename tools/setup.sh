# Sourced by demo.sh and test.sh: makes .venv with everything pinned in constraints.txt, and sets PYTHON to its python.
# A Python 3.12 or 3.13 is found wherever it is; set PYTHON to choose one. Nothing is done when .venv is up to date.

is_suitable() { # megatron-core 0.19 needs 3.12; its wheels end at 3.13
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    is_suitable "$PYTHON" && { echo "$PYTHON"; return; }
    echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with venv and ensurepip. Point it to one, or unset it." >&2
    return 1
  fi
  for candidate in python3.12 python3.13 python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python "$HOME"/.local/share/uv/python/*/bin/python3 \
      /usr/local/bin/python3.1[23] "${CONDA_PREFIX:-/nonexistent}/bin/python"; do
    if command -v "$candidate" >/dev/null 2>&1 && is_suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  echo "No Python 3.12 or 3.13 with venv and ensurepip found (python3 is $(python3 --version 2>&1 || echo missing))." >&2
  echo "Install one (Debian: apt install python3.12 python3.12-venv; pyenv: pyenv install 3.12), or set PYTHON to it." >&2
  return 1
}

set_up_venv() {
  local base wanted
  wanted=$(cat constraints.txt setup.py tools/setup.sh | cksum)
  if [[ -x .venv/bin/python && $(cat .venv/ready 2>/dev/null) == "$wanted" ]]; then return; fi
  base=$(find_python)
  echo "Setting up .venv with $("$base" --version): PyTorch and Megatron-Core, some GB, a few minutes ..."
  "$base" -m venv --clear .venv
  .venv/bin/python -m pip install -qq --constraint constraints.txt pip
  .venv/bin/python -m pip install -qq --constraint constraints.txt --editable '.[megatron,demo,test]'
  echo "$wanted" > .venv/ready
}

set_up_venv
PYTHON=$PWD/.venv/bin/python
export PYTHON

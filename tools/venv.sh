# shellcheck shell=bash
# Sourced: the one way here to find a Python, and to make a virtual environment.

version_of() { "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# find_python VERSION...: the path of the first Python of these versions, in their order, that has venv and ensurepip.
find_python() {
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" python3 python "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
        "$HOME/.local/share/uv/python/cpython-$version".*/bin/python3 "/usr/local/bin/python$version" \
        "${CONDA_PREFIX:-/nonexistent}/bin/python"; do
      if [[ $(version_of "$candidate") == "$version" ]]; then command -v "$candidate"; return; fi
    done
  done
  echo "No Python $* with venv and ensurepip found (python3 is $(python3 --version 2>&1 || echo missing))." >&2
  echo "Install one (Debian: apt install python$1 python$1-venv; pyenv: pyenv install $1)." >&2
  return 1
}

# make_venv FOLDER STAMP PYTHON FILL: a new environment, filled by the function FILL, unless it is there with this stamp.
make_venv() {
  local folder=$1 stamp=$2 python=$3 fill=$4
  if [[ -x $folder/bin/python && $(cat "$folder/ready" 2>/dev/null) == "$stamp" ]]; then return; fi
  echo "Setting up $folder with $("$python" --version): some GB if it holds PyTorch, then a few minutes ..."
  "$python" -m venv --clear "$folder"
  "$fill" "$folder"
  echo "$stamp" > "$folder/ready"
}

# install_into FOLDER ARGUMENTS...
install_into() { "$1/bin/python" -m pip --disable-pip-version-check install -qq "${@:2}"; }

# The lines of files that hold something beside a comment.
without_comments() { sed -E 's/(^|[[:space:]])#.*//; /^[[:space:]]*$/d' "$@"; }

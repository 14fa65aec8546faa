# Sourced: `python_of VERSION` prints the path of a Python of that version, 3.10 say, with venv and ensurepip, if any.

version_of() { "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

python_of() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
      "$HOME/.local/share/uv/python/cpython-$1".*/bin/python3 "/usr/local/bin/python$1"; do
    if [[ $(version_of "$candidate") == "$1" ]]; then command -v "$candidate"; return; fi
  done
  return 0 # prints nothing
}

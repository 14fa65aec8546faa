# shellcheck shell=bash
# Sourced: sets PYTHON to the python of an active environment that has what the tests need, used as it is, or else of
# .venv, which is made with everything pinned in constraints.txt. A Python 3.12 or 3.13 is found wherever it is; set
# PYTHON to choose one. Nothing is done when .venv is up to date.
source tools/venv.sh

# megatron-core 0.19 needs 3.12; its wheels end at 3.13.
chosen_python() {
  if [[ -z ${PYTHON:-} ]]; then find_python 3.12 3.13; return; fi
  if [[ $(version_of "$PYTHON") == 3.1[23] ]]; then echo "$PYTHON"; return; fi
  echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with venv and ensurepip. Point it to one, or unset it." >&2
  return 1
}

# What decides the environment: pinned versions, and the dependencies that pyproject.toml declares.
environment_stamp() {
  { without_comments constraints.txt; "$1" - <<'END'; } | cksum
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(project["dependencies"], project["optional-dependencies"])
END
}

fill_venv() {
  install_into "$1" --constraint constraints.txt pip
  install_into "$1" --constraint constraints.txt --editable '.[megatron,demo,test]'
}

# Tests start processes elsewhere, which must import this working copy: another checkout's environment will not do.
has_what_tests_need() {
  (cd / && "$1" - "$OLDPWD" 2>/dev/null <<'END'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
for name in "megatron-core", "pytest-timeout", "pytest-xdist", "hypothesis":
    version(name)
sys.exit(not Path(find_spec("megatron_rl_loss").origin).is_relative_to(Path(sys.argv[1]).resolve()))
END
  )
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n $active && ! $active -ef .venv ]] && has_what_tests_need "$active/bin/python"; then
  PYTHON=$active/bin/python
else
  base=$(chosen_python)
  stamp=$(environment_stamp "$base")
  make_venv .venv "$stamp" "$base" fill_venv
  PYTHON=$PWD/.venv/bin/python
fi
export PYTHON

#!/usr/bin/env bash
# Passes the tests on a fresh machine: sets up .venv, then lint, types, the whole test suite, the core's quick tests
# again with another Python (tools/test_core.sh), a loop of one's own on the oldest Megatron (tools/test_versions.sh),
# and the documentation with its links (tools/docs.sh).
# Further arguments go to pytest, e.g. tools/test.sh -m 'not slow'; then it ends with pytest. Tests are shared out among
# the cores (tests/conftest.py); -n 0 runs them in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh
unset PYTHONDONTWRITEBYTECODE  # or hundreds of processes compile the same files

echo "ruff and mypy ..."
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
if [[ $# == 0 ]]; then
  tools/test_core.sh -m 'not slow'
  tools/test_versions.sh
  tools/docs.sh
fi

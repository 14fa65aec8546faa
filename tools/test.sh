#!/usr/bin/env bash
# Passes the tests on a fresh machine: sets up .venv, then lint, types, the whole test suite, the core's tests again
# with another Python (tools/test_core.sh), and the documentation with its links (tools/docs.sh).
# Further arguments go to pytest, e.g. tools/test.sh -m 'not slow'; then it ends with pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

echo "ruff and mypy ..."
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "$@"
if [[ $# == 0 ]]; then
  tools/test_core.sh
  tools/docs.sh
fi

#!/usr/bin/env bash
# Passes the tests on a fresh machine: sets up .venv, then lint, types, and the whole test suite.
# Further arguments go to pytest, e.g. tools/test.sh -m 'not slow'
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

echo "ruff and mypy ..."
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"

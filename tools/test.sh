#!/usr/bin/env bash
# Passes the tests on a fresh machine: sets up .venv, unless an active environment has what the tests need.
#
#   tools/test.sh                   lint, types, all tests, the core's quick tests again with another Python
#                                   (tools/test_core.sh), a loop of one's own on the oldest Megatron
#                                   (tools/test_versions.sh), and the documentation with its links (tools/docs.sh)
#   tools/test.sh tests/unit/core  these files or folders alone, without lint and types
#   tools/test.sh -m 'not slow'     lint, types, and pytest with these arguments
#   tools/test.sh --no-lint ...     without lint and types
#   tools/test.sh --lint-only       lint and types alone
#
# Tests are shared out among the cores (tests/conftest.py); -n 0 runs them in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh
unset PYTHONDONTWRITEBYTECODE  # or hundreds of processes compile the same files

lint=yes tests=yes whole=yes arguments=()
for argument in "$@"; do
  case $argument in
    --no-lint) lint=no ;;
    --lint-only) tests=no ;;
    tests | tests/* | ./tests/* | "$PWD"/tests/*) lint=no whole=no arguments+=("$argument") ;;
    *) whole=no arguments+=("$argument") ;;
  esac
done

if [[ $lint == yes ]]; then
  echo "ruff and mypy ..."
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
  "$PYTHON" -m mypy
fi
[[ $tests == yes ]] || exit 0
"$PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "${arguments[@]}"
if [[ $whole == yes ]]; then
  tools/test_core.sh -m 'not slow'
  tools/test_versions.sh
  tools/docs.sh
fi

#!/usr/bin/env bash
# What GPUs show of this package, in one command: sets up .venv, then tests, counts, benchmarks and a launch, each where
# it can run. Writes docs/bench/gpu-CARD.json and gpu-CARD.md. With --rehearse: the same parts on the CPU, small, into
# build/gpu_proof. SLIME_PATH and MILES_PATH may name checkouts to measure beside.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh
exec "$PYTHON" tools/gpu_proof.py "$@"

#!/usr/bin/env bash
# Runs the real code of the engines whose checkouts lie in a folder, and writes the tables of docs/bench/engines-cpu.txt
# and their numbers on docs/engines.md.
#
#   tools/test_engines.sh ~/engines           all of tests/engines/real, and the faults that are planted in launches
#   tools/test_engines.sh ~/engines -k start  pytest's arguments: prints the tables of these tests, and writes nothing
#
# Nothing is fetched. A checkout has any name; an engine that is not there is skipped, and its rows stay as they are.
# With Ray, hydra-core, tensordict and codetiming in the environment, workers start as the engines start them; so does
# ms-swift's command with its own transformers, datasets, peft, accelerate and modelscope.
set -euo pipefail
checkouts=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
source tools/setup.sh

variables=$("$PYTHON" - "$checkouts" <<'PYTHON'
import sys
from pathlib import Path

sys.path.append("tests/support")
import checkouts

folders = [folder for path in sorted(Path(sys.argv[1]).iterdir()) for folder in (path, path / "src")]
for framework in (value for value in vars(checkouts).values() if isinstance(value, checkouts.Framework)):
    for folder in [folder for folder in folders if (folder / framework.proof).is_file()][:1]:
        print(f"{framework.variable}={folder}")
PYTHON
)
printf '%s\n' "$variables"
while read -r variable; do export "${variable?}"; done <<<"$variables"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
tests=(tests/engines/real)
(($#)) || tests+=(tests/megatron/test_first_step.py tests/megatron/test_proof_loops.py)
"$PYTHON" -m pytest -n 0 -q "${tests[@]}" "$@" | tee "$log"
(($#)) || "$PYTHON" tools/engine_tables.py "$log" docs/bench/engines-cpu.txt docs/engines.md

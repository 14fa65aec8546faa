"""Count random steps of each published bug that the audit names, leaves as numbers, or names wrongly.

    python tools/count_museum.py [--steps 200] [--row 14]

The rule is `Named` in tests/support/named.py; a bug is named if at least 95 % of the steps that show it are.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from named import Named
from published import BUGS, WITHOUT_WEIGHTS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="Steps of each bug; seeds 0, 1, ...")
    parser.add_argument("--row", type=int, help="One row of the museum alone.")
    options = parser.parse_args()
    rows: dict[int, bool] = {}
    total: Counter[str] = Counter()
    for bug in BUGS:
        if options.row in (None, bug.row):
            names = Named(bug)
            outcomes = Counter(names.outcome(bug.step(seed))[0] for seed in range(options.steps))
            shown = options.steps - outcomes["not shown"]
            rows[bug.row] = rows.get(bug.row, True) and outcomes["named"] >= 0.95 * shown > 0
            total += outcomes
            print(f"{bug.id}: {dict(outcomes)}", flush=True)
    named = sum(named for row, named in rows.items() if row)
    print(f"rows named: {named} of {len(rows.keys() - {0}) + len(WITHOUT_WEIGHTS)}; steps: {dict(total)}")


if __name__ == "__main__":
    main()

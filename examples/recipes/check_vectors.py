"""Check a trainer's aggregation against docs/vectors.json, in plain Python: no torch, nothing of this library.

    python check_vectors.py vectors.json token_mean

Put your own loss in the place of `step_loss`. A token's weight is the change of the loss where the token's own loss
grows by 1. The file has the value and the weights that each mode gives.
"""

import json
import sys
from pathlib import Path
from typing import Any

Rows = list[list[float]]


def step_loss(losses: Rows, step: dict[str, Any]) -> float:
    """Yours: from the losses of a whole step, a list of tokens for each sample."""
    pairs = zip(step["masks"], losses, strict=True)
    total = sum(m * loss for mask, row in pairs for m, loss in zip(mask, row, strict=True))
    return total / max(sum(map(sum, step["masks"])), 1e-30)


if len(sys.argv) != 3:
    sys.exit("usage: python check_vectors.py vectors.json MODE")
for number, step in enumerate(json.loads(Path(sys.argv[1]).read_text())["steps"]):
    expected, losses = step["modes"][sys.argv[2]]["all"], step["losses"]
    errors = [abs(step_loss(losses, step) - expected["value"])]
    for i, row in enumerate(losses):
        for t, weight in enumerate(expected["weights"][i]):
            moved = [*losses[:i], [*row[:t], row[t] + 1, *row[t + 1 :]], *losses[i + 1 :]]
            errors.append(abs(step_loss(moved, step) - step_loss(losses, step) - weight))
    if not max(errors) < 1e-9:
        sys.exit(f"step {number}: off by {max(errors):.3g}")
print("all steps agree")

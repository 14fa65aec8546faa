"""Write docs/vectors.json: ragged steps, with the loss of each mode and the weight of each token, in float64.

    python tools/vectors.py docs/vectors.json

The numbers come from the oracle of the tests, which imports nothing of the package. A trainer in any language can be
compared with them: `examples/recipes/check_vectors.py` does it in plain Python.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support")]

import oracle
from step_samples import DIVISOR, random_samples

#: Raised when numbers of the file change or move.
VERSION = 1
NUM_STEPS = 24
FIELDS = {
    "masks": "of each sample, an entry per token: 0, 1 or a weight",
    "losses": "of each token",
    "rollout_ids, prompt_ids, session_ids": "of each sample",
    "turn_ids": "of each token; -1 in no turn",
    "divisor": "L of constant, d of token_sum; other modes have none",
    "modes": "by name, then by the units that count (all, or active ones, which have a token that is not masked): the "
    "step loss, and the weight of each token in it, mask included",
}


def step_of(seed: int) -> dict[str, Any]:
    """A ragged step: uneven groups, rollouts of one and two samples, fully and partly masked samples."""
    rng = random.Random(seed)
    number = rng.randint(2, 7)
    ids = [(f"r{i - i % 3 // 2}", f"p{min(i // 3, 1)}") for i in range(number)]
    samples = random_samples(rng, ids, (1, 2, 3, 5, 8))
    samples[rng.randrange(number)].mask.zero_()
    if seed % 3 == 0:  # flags alone
        for sample in samples:
            sample.mask.ceil_()
    masks = [sample.mask.double().tolist() for sample in samples]
    sessions = [f"s{i // 2}" for i in range(number)]
    turns = [[10 * i + t // 2 if entry else -1 for t, entry in enumerate(mask)] for i, mask in enumerate(masks)]
    losses = [sample.losses.tolist() for sample in samples]
    modes: dict[str, Any] = {}
    for mode in (*oracle.MODES, *oracle.BY_IDS):
        modes[mode] = {}
        for units in oracle.BY_MASKS:
            if mode in oracle.BY_IDS:
                token_turns = [["" if turn < 0 else turn for turn in row] for row in turns]
                weights = oracle.weights_by_ids(mode, [sample.mask for sample in samples], sessions, token_turns, units)
            else:
                divisor = oracle.divisor_of(mode, DIVISOR, optional=True)
                weights = oracle.step_weights(mode, samples, divisor, units)
            pairs = zip(weights, losses, strict=True)
            value = sum(w * loss for row, row_weights in pairs for w, loss in zip(row, row_weights, strict=True))
            modes[mode][units] = {"value": value, "weights": weights}
    return {
        "masks": masks,
        "losses": losses,
        "rollout_ids": [sample.rollout_id for sample in samples],
        "prompt_ids": [sample.prompt_id for sample in samples],
        "session_ids": sessions,
        "turn_ids": turns,
        "divisor": DIVISOR,
        "modes": modes,
    }


def vectors() -> dict[str, Any]:
    return {"version": VERSION, "fields": FIELDS, "steps": [step_of(seed) for seed in range(NUM_STEPS)]}


def text() -> str:
    """A line for each step, so that a change of one is a change of one line."""
    content = vectors()
    steps = ",\n".join(json.dumps(step) for step in content.pop("steps"))
    head = json.dumps(content, indent=1)[:-2]
    return f'{head},\n "steps": [\n{steps}\n]}}\n'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())

"""GAE over turns by AReaL's own function, and by ours, on rows with turns that are masked whole: AREAL_PATH=~/AReaL.

AReaL passes over such a turn, a stale or a tool's one that has an id. Its turn ids may come back only where masked.
"""

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkouts import AREAL, checkout, load
from ranks import run_ranks

from megatron_rl_loss import Samples, gae

pytestmark = pytest.mark.slow

#: Rows of a batch, and batches.
ROWS, BATCHES, LONGEST = 16, 67, 24


def drawn(seed: int) -> dict[str, Any]:
    """Padded rows in float32: turns of ids that rise, some masked whole, holes, a gap of no turn between two."""
    rng = random.Random(seed)
    masks, turns = [], []
    for _ in range(ROWS):
        row_mask, row_turns, turn = list[float](), list[int](), 0
        while len(row_mask) < LONGEST - 6 and (not row_mask or rng.random() < 0.8):
            number, is_masked = rng.randint(1, 4), rng.random() < 0.3
            row_mask += [float(not is_masked and rng.random() < 0.8) for _ in range(number)]
            row_turns += [turn] * number
            gap = rng.randint(0, 2)
            row_mask += [0.0] * gap
            row_turns += [-1] * gap
            turn += 1
        masks.append(row_mask + [0.0] * (LONGEST - len(row_mask)))
        turns.append(row_turns + [-1] * (LONGEST - len(row_turns)))
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, ROWS, LONGEST, generator=generator).unbind()
    lam = torch.rand(ROWS, generator=generator)
    return {"mask": torch.tensor(masks), "turns": torch.tensor(turns), "rewards": rewards, "values": values, "lam": lam}


def compared(root: str) -> tuple[float, int]:
    """The largest difference, and the number of rows with a turn that is masked whole."""
    (module,) = load(AREAL, root, "areal.trainer.ppo.gae")
    function, worst, number = module._compute_turn_level_gae, 0.0, 0
    has_bootstrap = "bootstrap_values" in inspect.signature(function).parameters  # in later versions
    for seed in range(BATCHES):
        of = drawn(seed)
        mask, turns = of["mask"], of["turns"]
        nothing = torch.zeros(ROWS)
        more = {"bootstrap_values": nothing} if has_bootstrap else {}
        for gamma in (1.0, 0.9):
            theirs = function(
                of["rewards"], of["values"], mask, turns, nothing, **more, discount=gamma, gae_lambda=of["lam"]
            )
            local = Samples(list(mask), ids={"turn": [[f"{i} {t}" if t >= 0 else "" for t in row.tolist()]
                                                      for i, row in enumerate(turns)]}).local(0, 1)  # fmt: skip
            flat = (of["rewards"].flatten(), of["values"].flatten())
            ours = gae(*flat, local, gamma=gamma, lam=of["lam"], steps="turn")
            for mine, own in zip(ours, theirs, strict=True):
                worst = max(worst, float(((mine.view_as(mask) - own) * mask).abs().max()))
        number += sum(
            any((turns[i] == t).any() and not mask[i][turns[i] == t].any() for t in set(turns[i].tolist()) - {-1})
            for i in range(ROWS)
        )
    return worst, number


def test_turns_that_are_masked_whole_are_no_steps(record_property: Any) -> None:
    root = checkout(AREAL)
    if not (Path(root) / "areal/trainer/ppo/gae.py").exists():
        pytest.skip(f"{root} is older than AReaL#1600: it has no areal/trainer/ppo/gae.py")
    ((worst, number),) = run_ranks(1, compared, root)
    assert number > 500
    record_property("largest_difference_from_areals_turns", worst)
    assert worst < 5e-6  # both add up to 24 numbers of size 1; theirs in float32

"""The weights of a whole step as a data column: what a rank has of it, cut, are the weights that it would make."""

import itertools
from typing import Any

import oracle
import torch
from placements import Place, every_layout, laid_out, padded_masks
from step_samples import dealt, step_samples
from steps import divisor_of, ids_of

from megatron_rl_loss import Gathered, Samples, StepTotals, token_weights, weights_column
from megatron_rl_loss.modes import vl_norm_undivided as vl_norm

STEP = step_samples(seed=2)


@every_layout
def test_a_column_cut_as_a_layout_cuts_is_what_a_rank_weighs(place: Place, cp_size: int) -> None:
    """Bit by bit; 1/cp_size of it where every CP rank holds all tokens."""
    of_step = ids_of(STEP)
    totals = StepTotals.from_loss_masks([one.mask for one in STEP], **of_step)
    for (mode, units), chosen in itertools.product(oracle.COUNTINGS, dealt(STEP, 0, 1, 3)):
        settings: Any = {"divisor": divisor_of(mode), "units": units}
        column = weights_column(mode, [one.mask for one in STEP], **settings, **of_step)
        placed = laid_out(place, tuple(len(STEP[i].mask) for i in chosen), cp_size)
        masks = padded_masks([STEP[i] for i in chosen], placed)
        samples = Samples(masks, layout=placed.layout, **ids_of([STEP[i] for i in chosen]))
        copies = cp_size if isinstance(placed.layout, Gathered) else 1
        for cp_rank, held in enumerate(placed.held):
            cut = [0.0 if at is None else float(column[chosen[at[0]]][at[1]]) / copies for at in held]
            weights = token_weights(mode, samples, totals, **settings, cp_rank=cp_rank, cp_size=cp_size)
            assert torch.equal(weights, torch.tensor(cut)), (mode, units, cp_rank)


def test_a_column_of_a_mode_over_its_own_sums() -> None:
    column = weights_column(vl_norm, [torch.ones(4), torch.zeros(2), torch.ones(1)])
    powers = [4**-0.75, 0.0, 1.0]
    expected = [torch.full((length,), power / sum(powers)) for length, power in zip((4, 2, 1), powers, strict=True)]
    torch.testing.assert_close(column, expected)

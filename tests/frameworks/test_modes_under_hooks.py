"""Modes over sums that they declare, under frameworks' hooks: refused, each with a way out that is exact."""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch

from megatron_rl_loss import StepTotals, register_pg_loss_reducer
from megatron_rl_loss.frameworks import slime, verl
from megatron_rl_loss.modes import table as modes
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.papers import vl_norm_undivided as vl_norm
from megatron_rl_loss.reduction import fold_into_advantages

MASKS = [torch.tensor([1.0, 1, 1, 0]), torch.tensor([1.0, 0, 0, 0]), torch.zeros(4), torch.tensor([1.0, 1, 0, 1])]
ADVANTAGES = [1.5, -1.0, 2.0, 0.5]
LENGTHS, TOTALS = [4] * len(MASKS), [6] * len(MASKS)
NAME = "vl_norm_under_hooks"
MATRIX = torch.stack(MASKS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_REGISTERED", {})
    register_pg_loss_reducer(NAME)(vl_norm)


SOUND = slime.make_hook("constant", divisor=1, cp_rank=0, cp_size=1)


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: vl_norm(TOTALS, LENGTHS, MASKS, False), "called with 4 arguments.*constant_1"),  # as by their flag
        (lambda: slime.make_hook(NAME), f"the mode {NAME} in slime or miles.*constant_1"),
        (lambda: slime.make_hook(vl_norm), "the mode length_to_the_minus_0_75 in slime or miles.*constant_1"),  # type: ignore[arg-type]
        (lambda: verl.agg_loss(MATRIX, MATRIX, NAME), f"the mode {NAME} in verl.*token-sum"),
    ],
)
def test_refused(call: Callable[[], Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        call()


def test_the_ways_out_are_the_mode() -> None:
    """Losses proportional to the advantage, over micro-batches of two samples, with the frameworks' own scaling."""
    statistics = resolve(NAME).mode.statistics  # type: ignore[union-attr]
    totals = StepTotals.from_loss_masks(MASKS, statistics=statistics)
    folded = fold_into_advantages(ADVANTAGES, MASKS, mode=NAME, totals=totals)
    losses = torch.linspace(0.1, 2.0, MATRIX.numel()).double().view_as(MATRIX)
    plain = [one * advantage for one, advantage in zip(losses, ADVANTAGES, strict=True)]
    expected = float(oracle.vl_norm([oracle.Sample(one, mask) for one, mask in zip(plain, MASKS, strict=True)]))
    size = len(MASKS)
    of_slime, of_verl, of_sums = 0.0, 0.0, 0.0
    for part in (slice(0, 2), slice(2, 4)):
        weighted = losses[part] * torch.stack(folded[part])
        reducer = SOUND(TOTALS[part], LENGTHS[part], MASKS[part], False)
        of_slime += float(reducer(weighted.flatten() * size)) / size
        of_verl += float(verl.agg_loss(weighted, MATRIX[part], "token-sum"))
        of_sums += float((weighted * MATRIX[part]).sum())
    for found in (of_slime, of_verl, of_sums):
        assert abs(found / expected - 1) <= oracle.sum_error(MATRIX.numel()) * 8

"""Modes over sums that they declare, under frameworks' hooks: refused, each with a way out that is exact."""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from refusals import Refusal, check_refusal, each_of

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


def hook(named: Callable[..., Any]) -> Any:
    """As slime and miles call what their flag names."""
    return named(TOTALS, LENGTHS, MASKS, False)


SOUND = slime.make_hook("constant", divisor=1, cp_rank=0, cp_size=1)


def refusal(call: Callable[[Any], Any], given: Any, said: str, framework: str, way_out: str, good: Any) -> Refusal:
    rule = rf": this mode declares sums over the whole step, which {framework} does not let a hook make\."
    return lambda: call(given), ValueError, f"{said}{rule} Fold its weights .*{way_out}", lambda: call(good)


IN_SLIME = ("slime or miles", "constant_1")
NAMED, FUNCTION = f"the mode {NAME} in ", "the mode length_to_the_minus_0_75 in slime or miles"
REFUSALS: dict[str, Refusal] = {
    "slime, by path": refusal(
        hook, vl_norm, "the mode .*length_to_the_minus.* called with 4 arguments", *IN_SLIME, SOUND
    ),
    "slime, a name": refusal(slime.make_hook, NAME, f"{NAMED}slime or miles", *IN_SLIME, "sample_mean"),
    "slime, the function": refusal(slime.make_hook, vl_norm, FUNCTION, *IN_SLIME, "token_mean"),
    "verl": refusal(
        lambda mode: verl.agg_loss(MATRIX, MATRIX, mode), NAME, f"{NAMED}verl", "verl", "token-sum", "token-sum"
    ),
}


@each_of(REFUSALS)
def test_refused(refused: Callable[[], Any], error: type[Exception], text: str, accepted: Callable[[], Any]) -> None:
    check_refusal(refused, error, text, accepted)


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

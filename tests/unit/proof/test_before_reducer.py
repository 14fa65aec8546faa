"""What lies between a loss function and the reducer, from gradients of both."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss import Samples
from megatron_rl_loss.core.taps import GradientSum, LossOutput, SummedShare
from megatron_rl_loss.proof.before_reducer import Before, FactorExtremes, before_of

RAGGED = [[[1, 1, 0], [1]], [[1]], [[0, 1, 1], [1, 1, 1]]]
OF_13, OF_10 = [[[1] * 13]] * 3, [[[1] * 10]] * 3
OF_MICROBATCH, OF_SAMPLE = "the sum of the mask over the micro-batch", "the sum of the mask over each sample"


def before(microbatches: list[list[list[int]]], factors_of: Any) -> Before:
    extremes = FactorExtremes()
    for masks in microbatches:
        samples = Samples([torch.tensor(mask) for mask in masks])
        tokens = samples.local(0, 1)
        weights = by_weights(samples, tokens)
        reducer: Any = SimpleNamespace(weights=weights)
        reached = GradientSum(2 * weights * factors_of(samples, tokens))
        share = SummedShare(reducer, 1.0, outputs=[LossOutput("ppo_clip_loss", reached)])
        share.add(torch.tensor(2.0))
        extremes.add(share, tokens)
    return before_of(extremes.numbers(), extremes.made_by)


def by_microbatch(samples: Samples, tokens: Any) -> float:
    return 1 / float(samples.mask_sums.sum())


def by_rows(samples: Samples, tokens: Any) -> float:
    return 1 / len(samples)


def by_weights(samples: Samples, tokens: Any) -> Tensor:
    return torch.from_numpy(tokens.mask / (7.0 + tokens.sample_index)).float()


def by_sample(samples: Samples, tokens: Any) -> Tensor:
    return 1 / torch.from_numpy(tokens.spread(samples.mask_sums)).float()


@pytest.mark.parametrize(
    ("microbatches", "factors_of", "division", "is_wrong"),
    [
        (RAGGED, by_microbatch, OF_MICROBATCH, (True, True)),  # one of them has one token: there nothing changes
        (RAGGED, by_rows, "the number of samples of the micro-batch", (True, True)),
        (RAGGED, by_weights, "the weights of the mode", (True, True)),
        (RAGGED, by_sample, OF_SAMPLE, (True, False)),  # a mode of one's own may be made so
        (OF_13, by_sample, OF_SAMPLE, (False, False)),  # 1 / 13 may be a coefficient
        (OF_10, by_sample, OF_SAMPLE, (False, False)),
        (RAGGED, lambda *_: 1.0, "", (False, False)),
        (RAGGED, lambda *_: 0.2, "", (False, False)),
        ([[[1]]] * 3, lambda *_: 1.0, "", (False, False)),
        (RAGGED, lambda samples, tokens: torch.arange(1.0, len(tokens) + 1), "", (False, False)),
    ],
)
def test_divisions(microbatches: Any, factors_of: Any, division: str, is_wrong: tuple[bool, bool]) -> None:
    """By a number of the micro-batch they are wrong in any mode; by one of each sample where the mode averages."""
    seen = before(microbatches, factors_of)
    assert (seen.division, seen.made_by, seen.lacks) == (division, ("ppo_clip_loss",), False)
    assert [bool(seen.fault(averages=averages)) for averages in (True, False)] == [*is_wrong]


def test_one_number_is_wrong_only_where_the_mode_averages() -> None:
    seen = before([[[1] * 6, [1] * 7]] * 2, by_microbatch)
    assert (seen.division, seen.varies) == (OF_MICROBATCH, False)
    assert seen.fault(averages=True)
    assert not seen.fault(averages=False)


def test_losses_of_ones_own_are_told() -> None:
    extremes = FactorExtremes()
    extremes.add(None, Samples([[1, 1]]).local(0, 1))
    assert before_of(extremes.numbers(), extremes.made_by).lacks


def test_factors_are_said() -> None:
    assert str(before(OF_10, by_sample)).startswith(
        f"a factor of 0.1 (1 / {OF_SAMPLE}) on tokens between ppo_clip_loss"
    )
    assert str(before(RAGGED, lambda *_: 0.5)) == "a factor of 0.5 on tokens between ppo_clip_loss and the reducer"
    ragged = before(OF_10, lambda samples, tokens: torch.arange(2.0, len(tokens) + 2))
    assert str(ragged) == "factors of 2 to 11 on tokens between ppo_clip_loss and the reducer"
    assert not ragged.is_one
    assert before(RAGGED, lambda *_: 1.0).is_one

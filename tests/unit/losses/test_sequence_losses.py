"""GSPO, GSPO-token and GMPO on one rank: by hand, refusals; over CP: test_losses_over_cp.py."""

import functools
import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from refusals import Call, check_refusal, each_of, refusals
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer
from megatron_rl_loss.losses import gmpo_loss, gspo_loss, gspo_token_loss, segment_mean

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1, 1])]
LOCAL = Samples(MASKS).local(0, 1)
OLD = torch.full((5,), -2.0)
# Mean log-ratios over the masks: 0.2 and -0.1. The third token is masked.
LOG_RATIOS = torch.tensor([0.5, -0.1, 1.0, -0.3, 0.1])
ALL: dict[str, Callable[..., Any]] = {"gspo": gspo_loss, "gspo_token": gspo_token_loss, "gmpo": gmpo_loss}


def advantages_of(first: float, second: float) -> Tensor:
    return torch.tensor([first] * 3 + [second] * 2)


@pytest.mark.parametrize(
    ("loss", "clip", "advantages", "expected", "clipped"),
    [
        ("gspo", (0.5, 0.5), (1, 1), (-math.exp(0.2), -math.exp(-0.1)), [0, 0, 0, 0]),
        ("gspo", (0.05, 0.1), (1, 1), (-1.1, -math.exp(-0.1)), [1, 1, 0, 0]),
        ("gspo", (0.05, 0.1), (-1, -1), (math.exp(0.2), 0.95), [0, 0, 1, 1]),
        ("gspo_token", (0.05, 0.1), (1, -1), (-1.1, 0.95), [1, 1, 1, 1]),
        ("gmpo", (0.4, 0.4), (1, 1), (-math.exp(0.15), -math.exp(-0.1)), [1, 0, 0, 0]),  # 0.5 to 0.4
        ("gmpo", (0.2, 0.4), (-1, -1), (math.exp(0.2), math.exp(-0.05)), [0, 0, 1, 0]),  # -0.3 to -0.2
    ],
)
def test_by_hand(loss: str, clip: Any, advantages: Any, expected: tuple[float, float], clipped: list[float]) -> None:
    low, high = clip
    new, active = OLD + LOG_RATIOS, [0, 1, 3, 4]
    found = ALL[loss](new, OLD, advantages_of(*advantages), LOCAL, clip_low=low, clip_high=high)
    assert found.per_token_loss[active].tolist() == pytest.approx([expected[0]] * 2 + [expected[1]] * 2)
    assert found.clipped[active].tolist() == clipped
    assert found.ppo_kl[active].tolist() == pytest.approx((-LOG_RATIOS[active]).tolist(), abs=1e-6)
    assert not found.clipped.requires_grad


def gradient_of(loss: Callable[..., Any], masks: list[Tensor], new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """Of the step's sample mean."""
    leaf = new.clone().requires_grad_()
    reducer = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.from_loss_masks(masks))
    reducer(loss(leaf, old, a).per_token_loss).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_with_one_advantage_per_sequence_a_token_has_its_sequences_gradient() -> None:
    """Off policy and inside the clip range too; whether the mean is given, with its graph, or not."""
    masks, old = [torch.ones(3), torch.ones(2)], OLD.double()
    local, clip = Samples(masks).local(0, 1), {"clip_low": 0.9, "clip_high": 0.9}

    def with_mean(new: Tensor, old: Tensor, advantages: Tensor, *place: Any, **clip: Any) -> Any:
        return gspo_token_loss(new, old, advantages, *place, mean_log_ratio=segment_mean(new - old, *place), **clip)

    by_sequence, *by_token = (
        gradient_of(
            lambda *tokens, loss=loss: loss(*tokens, local, **clip),
            masks,
            old + LOG_RATIOS.double(),
            old,
            advantages_of(1, -2).double(),
        )
        for loss in (gspo_loss, gspo_token_loss, with_mean)
    )
    for found in by_token:
        torch.testing.assert_close(found, by_sequence, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("old", [-1.0, -900.0])
@pytest.mark.parametrize("name", ALL)
def test_shapes_and_large_ratios(name: str, old: float) -> None:
    log_probs = torch.full((1, 5), -1.0, requires_grad=True)
    found = ALL[name](log_probs, torch.full((1, 5), old), torch.ones(1, 5), LOCAL)
    assert found.per_token_loss.shape == found.clipped.shape == (1, 5)
    found.per_token_loss.sum().backward()
    assert torch.isfinite(found.per_token_loss).all()
    assert (log_probs.grad == 0).all() if old == -900 else torch.isfinite(log_probs.grad).all()


def call(name: str = "gspo", **changed: Any) -> Any:
    plain: dict[str, Any] = {"log_probs": OLD, "old_log_probs": OLD, "advantages": torch.ones(5), "local": LOCAL}
    return ALL[name](**plain | changed)


SHORT = {"log_probs": OLD[:4], "old_log_probs": OLD[:4], "advantages": torch.ones(4)}
WITH_GRAPH = torch.ones(5, requires_grad=True)
ONES = torch.ones(5)
REFUSALS = {
    **refusals(
        call,
        ({"old_log_probs": OLD[:1]}, r"log-probs of shapes \(5,\) and \(1,\)", {"advantages": torch.ones(1)}),
        (SHORT, r"a loss's input of shape \(4,\)", {"log_probs": OLD[None], "old_log_probs": OLD[None]}),
        ({"clip_high": 1.0004}, "clip_high is 1.0004: it is a width", {"clip_high": 4e-4}),
        ({"mean_log_ratio": torch.zeros(5)}, r"a statistic of shape \(5,\)", {"mean_log_ratio": torch.zeros(2)}),
    ),
    **refusals(
        call,
        ({"local": 3}, "local is a int: it says where tokens lie", {"local": LOCAL}),
        ({"local": LOCAL.samples}, "local is a Samples: it says where tokens lie", {"local": LOCAL}),
        error=TypeError,
    ),
    **refusals(
        functools.partial(call, "gspo_token"),
        ({"advantages": WITH_GRAPH}, "advantages that require grad", {"advantages": ONES}),
    ),
    **refusals(
        functools.partial(call, "gmpo"),
        ({"clip_low": 0.0}, r"clip_low is 0.0: it must be a number in \(0, inf\)", {"clip_low": 1.2}),
        ({"importance_weights": ONES[:2]}, r"importance_weights of shape \(2,\)", {"importance_weights": ONES}),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

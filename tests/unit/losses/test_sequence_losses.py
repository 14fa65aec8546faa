"""GSPO, GSPO-token and GMPO on one rank: by hand, at ratio 1, what is reported, dtypes, refusals.

Whole steps in every layout over CP are in test_losses_over_cp.py.
"""

import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from refusals import Call, Refusal, check_refusal, each_of
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer
from megatron_rl_loss.losses import gmpo_loss, gspo_loss, gspo_token_loss, ppo_clip_loss
from megatron_rl_loss.step import LocalTokens

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1, 1])]
OLD = torch.full((5,), -2.0)
# Mean log-ratios over the masks: 0.2 and -0.1.
LOG_RATIOS = torch.tensor([0.5, -0.1, 7.0, -0.3, 0.1])
ALL: dict[str, Callable[..., Any]] = {"gspo": gspo_loss, "gspo_token": gspo_token_loss, "gmpo": gmpo_loss}


def local_of(masks: list[Tensor] = MASKS) -> LocalTokens:
    return Samples(masks).local(0, 1)


def advantages_of(first: float, second: float) -> Tensor:
    return torch.tensor([first] * 3 + [second] * 2)


@pytest.mark.parametrize(
    ("loss", "clip", "advantages", "expected", "clipped"),
    [
        pytest.param("gspo", (0.5, 0.5), (1, 1), (-math.exp(0.2), -math.exp(-0.1)), (0, 0), id="inside"),
        pytest.param("gspo", (0.05, 0.1), (1, 1), (-1.1, -math.exp(-0.1)), (1, 0), id="above, A > 0"),
        pytest.param("gspo", (0.05, 0.1), (-1, -1), (math.exp(0.2), 0.95), (0, 1), id="below, A < 0"),
        pytest.param("gspo_token", (0.05, 0.1), (1, -1), (-1.1, 0.95), (1, 1), id="token, both"),
        pytest.param("gmpo", (0.4, 0.4), (1, 1), (-math.exp(0.15), -math.exp(-0.1)), None, id="geometric, 0.5 to 0.4"),
        pytest.param("gmpo", (0.2, 0.4), (-1, -1), (math.exp(0.2), math.exp(-0.05)), None, id="geometric, -0.3 up"),
    ],
)
def test_by_hand(
    loss: str,
    clip: tuple[float, float],
    advantages: tuple[float, float],
    expected: tuple[float, float],
    clipped: tuple[float, float] | None,
) -> None:
    low, high = clip
    found = ALL[loss](OLD + LOG_RATIOS - 7.01 * (LOG_RATIOS > 5), OLD, advantages_of(*advantages), local_of(),
                      clip_low=low, clip_high=high)  # fmt: skip
    assert found.per_token_loss[[0, 1, 3, 4]].tolist() == pytest.approx([expected[0]] * 2 + [expected[1]] * 2)
    if clipped is not None:
        assert found.clipped[[0, 1, 3, 4]].tolist() == [clipped[0]] * 2 + [clipped[1]] * 2
    assert found.ppo_kl[[0, 1, 3, 4]].tolist() == pytest.approx((-LOG_RATIOS[[0, 1, 3, 4]]).tolist(), abs=1e-6)
    assert not found.clipped.requires_grad


def test_geometric_clips_token_by_token() -> None:
    found = gmpo_loss(OLD + LOG_RATIOS.clamp(max=1), OLD, advantages_of(1, -1), local_of(), clip_low=0.2, clip_high=0.4)
    assert found.clipped.tolist() == [1, 0, 1, 1, 0]


# --- at ratio 1


def gradient_of(loss: Callable[..., Any], masks: list[Tensor], log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Of the step's sample mean."""
    leaf = log_probs.clone().requires_grad_()
    reducer = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.from_loss_masks(masks))
    reducer(loss(leaf, log_probs, advantages).per_token_loss).backward()
    return leaf.grad


@pytest.mark.parametrize("name", ALL)
def test_at_ratio_1_the_gradient_is_that_of_sample_mean(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    masks = [torch.tensor([1, 0.5, 1, 0]), torch.tensor([0, 0]), torch.tensor([1.0, 1, 1]), torch.tensor([0.25])]
    log_probs = -4 * torch.rand(10, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.5] * 4 + [-1] * 2 + [-0.5] * 3 + [2], dtype=torch.float64)
    local = Samples(masks).local(0, 1)
    found = gradient_of(lambda new, old, a: ALL[name](new, old, a, local), masks, log_probs, advantages)
    expected = gradient_of(ppo_clip_loss, masks, log_probs, advantages)
    torch.testing.assert_close(found, expected, rtol=oracle.EXACT, atol=0)


def test_a_token_s_gradient_is_that_of_its_sequence() -> None:
    """With one advantage a sequence, off policy and inside the clip range too."""
    masks = [torch.ones(3), torch.ones(2)]
    local, log_probs = Samples(masks).local(0, 1), OLD.double()

    def gradient(loss: Callable[..., Any]) -> Tensor:
        leaf = (log_probs + LOG_RATIOS.clamp(max=1).double()).requires_grad_()
        reducer = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.from_loss_masks(masks))
        advantages = advantages_of(1, -2).double()
        reducer(loss(leaf, log_probs, advantages, local, clip_low=0.9, clip_high=0.9).per_token_loss).backward()
        return leaf.grad

    torch.testing.assert_close(gradient(gspo_token_loss), gradient(gspo_loss), rtol=oracle.EXACT, atol=0)


# --- shapes, dtypes, large ratios


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_gradients_of_dtypes(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        log_probs = torch.full((1, 5), -1.0, dtype=dtype, requires_grad=True)
        found = ALL[name](log_probs, log_probs.detach(), torch.ones(1, 5, dtype=dtype), local_of())
        assert found.per_token_loss.shape == found.clipped.shape == (1, 5)
        found.per_token_loss.sum().backward()
        assert log_probs.grad.dtype == dtype
        assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("name", ALL)
def test_a_large_ratio_is_clipped_to_a_finite_loss_and_gradient(name: str) -> None:
    log_probs = torch.zeros(5, requires_grad=True)
    found = ALL[name](log_probs, torch.full((5,), -900.0), torch.ones(5), local_of())
    found.per_token_loss.sum().backward()
    assert torch.isfinite(found.per_token_loss).all()
    assert log_probs.grad.tolist() == [0] * 5


# --- refusals, each beside its nearest legal neighbour


def call(name: str = "gspo", **changed: Any) -> Call:
    given: dict[str, Any] = {"log_probs": OLD, "old_log_probs": OLD, "advantages": torch.ones(5), "local": local_of()}
    return lambda: ALL[name](**given | changed)


REFUSALS: dict[str, Refusal] = {
    "shapes differ": (
        call(old_log_probs=OLD[:1]),
        ValueError,
        r"log-probs of shapes \(5,\) and \(1,\)",
        call(advantages=torch.ones(1)),
    ),
    "log-probs of another cut": (
        call(log_probs=OLD[:4], old_log_probs=OLD[:4], advantages=torch.ones(4)),
        ValueError,
        r"a segment sum's values of shape \(4,\)",
        call(log_probs=OLD[None], old_log_probs=OLD[None]),
    ),
    "clip_high as a bound": (
        call(clip_high=1.0004),
        ValueError,
        "clip_high is 1.0004: it is a width",
        call(clip_high=4e-4),
    ),
    "advantages that require grad": (
        call("gspo_token", advantages=torch.ones(5, requires_grad=True)),
        ValueError,
        "advantages that require grad",
        call("gspo_token"),
    ),
    "a mean of another number of samples": (
        call(mean_log_ratio=torch.zeros(5)),
        ValueError,
        r"a statistic of shape \(5,\)",
        call(mean_log_ratio=torch.zeros(2)),
    ),
    "a clip of GMPO that is 0": (
        call("gmpo", clip_low=0.0),
        ValueError,
        "clip_low is 0.0: it must be finite and above 0",
        call("gmpo", clip_low=1.2),
    ),
    "importance weights of another shape": (
        call("gmpo", importance_weights=torch.ones(2)),
        ValueError,
        r"importance_weights of shape \(2,\)",
        call("gmpo", importance_weights=torch.ones(5)),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

"""The losses by name, with what goes together; and what is not in the tables of formulas of those of sequences."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from refusals import Call, check_refusal, each_of, refusals
from torch import Tensor

from megatron_rl_loss import Samples, losses, resolve
from megatron_rl_loss.losses import (
    POLICY_LOSSES,
    check_goes_with,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    policy_loss,
    segment_mean,
)
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.plan import plan_step

LOCAL = Samples([torch.ones(3), torch.ones(2)]).local(0, 1)
OLD = torch.full((5,), -2.0)
TOKENS = (OLD + torch.tensor([0.5, -0.2, 0.0, 1.2, -0.9]), OLD, torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]))
#: The function of a name, and its settings, where they do not follow from the name.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo_clip_loss", {}),
    "dppo_tv": ("dppo_loss", {"divergence": "tv", "threshold": 0.15}),
    "dppo_kl": ("dppo_loss", {"divergence": "kl", "threshold": 0.05}),
    "luspo": ("gspo_loss", {}),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_name_is_its_function(name: str) -> None:
    loss, (function, settings) = POLICY_LOSSES[name], OTHERS.get(name, (f"{name}_loss", {}))
    place = (LOCAL,) if loss.of_sequence else ()
    found = policy_loss(name, *TOKENS, LOCAL, None, clip_low=None)
    expected = getattr(losses, function)(*TOKENS, *place, **settings)
    for part in ("per_token_loss", "clipped", "ppo_kl"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    parameters = inspect.signature(loss.compute).parameters
    assert ("cp_group" in parameters) == loss.of_sequence
    assert set(loss.settings) <= set(parameters)
    assert loss.mode is None or loss.mode in MODES


GOES_WITH = {"gspo": [("sample_mean", None)], "gmpo": [("sample_mean", None)], "luspo": [("constant", 1.0)]}
AGGREGATIONS = [*((mode, 3.0 if mode in ("constant", "token_sum") else None) for mode in MODES), ("constant", 1.0)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_modes(name: str) -> None:
    for mode, divisor in AGGREGATIONS:
        aggregation = resolve(mode, divisor=divisor)
        if (mode, divisor) in GOES_WITH.get(name, AGGREGATIONS):
            check_goes_with(name, aggregation)
        else:
            with pytest.raises(ValueError, match=f"the policy loss {name} aggregated by {mode}, divisor"):
                check_goes_with(name, aggregation)
    check_goes_with(name, resolve(lambda inputs: 1.0))  # a user's own mode


def goes(name: str, mode: str = "sample_mean", divisor: float | None = None, **settings: Any) -> None:
    check_goes_with(name, resolve(mode, divisor=divisor), **settings)


REFUSALS = refusals(
    goes,
    ({"name": "grpo"}, "there is no such policy loss.+Choose one of ppo, cispo", {"name": "ppo"}),
    (
        {"name": "sapo", "clip_low": 0.2},
        "clip_low=0.2 for the policy loss sapo: it takes tau_positive, tau_negative",
        {"name": "sapo", "tau_positive": 0.9, "clip_low": None},
    ),
    (
        {"name": "gspo", "dual_clip": 3.0},
        "dual_clip=3.0 for the policy loss gspo",
        {"name": "ppo", "dual_clip": 3.0},
    ),
    (("gspo", "token_mean"), "gspo aggregated by token_mean.+by sample_mean alone", ("gspo_token", "token_mean")),
    (("luspo", "constant", 2.0), "divisor 2.0.+by constant with divisor 1 alone", ("luspo", "constant", 1.0)),
)

# --- of sequences: what is clipped, whose gradient a token has, ratios that overflow, refusals

HELD = Samples([torch.tensor([1, 1, 0]), torch.tensor([1, 1])]).local(0, 1)
# Mean log-ratios over the masks: 0.2 and -0.1. The third token is masked.
LOG_RATIOS = torch.tensor([0.5, -0.1, 1.0, -0.3, 0.1])
OF_SEQUENCES: dict[str, Callable[..., Any]] = {"gspo": gspo_loss, "gspo_token": gspo_token_loss, "gmpo": gmpo_loss}


def advantages_of(first: float, second: float) -> Tensor:
    return torch.tensor([first] * 3 + [second] * 2)


@pytest.mark.parametrize(
    ("name", "clip", "advantages", "clipped"),
    [
        ("gspo", (0.5, 0.5), (1, 1), [0, 0, 0, 0]),
        ("gspo", (0.05, 0.1), (1, 1), [1, 1, 0, 0]),
        ("gspo", (0.05, 0.1), (-1, -1), [0, 0, 1, 1]),
        ("gspo_token", (0.05, 0.1), (1, -1), [1, 1, 1, 1]),
        ("gmpo", (0.4, 0.4), (1, 1), [1, 0, 0, 0]),  # 0.5 to 0.4
        ("gmpo", (0.2, 0.4), (-1, -1), [0, 0, 1, 0]),  # -0.3 to -0.2
    ],
)
def test_what_is_clipped(name: str, clip: Any, advantages: Any, clipped: list[float]) -> None:
    low, high = clip
    place = OLD + LOG_RATIOS, OLD, advantages_of(*advantages), HELD
    found, active = policy_loss(name, *place, clip_low=low, clip_high=high), [0, 1, 3, 4]
    assert found.clipped[active].tolist() == clipped
    assert found.ppo_kl[active].tolist() == pytest.approx((-LOG_RATIOS[active]).tolist(), abs=1e-6)
    assert not found.clipped.requires_grad


def test_with_one_advantage_per_sequence_a_token_has_its_sequences_gradient() -> None:
    """Off policy and inside the clip range too; whether the mean is given, with its graph, or not."""
    (microbatch,) = plan_step([Samples([torch.ones(3), torch.ones(2)])], "sample_mean", dp_group=None)
    old, advantages = OLD.double(), advantages_of(1, -2).double()

    def gradient_of(loss: Callable[..., Any], given: bool) -> Tensor:
        leaf = (old + LOG_RATIOS.double()).requires_grad_()
        mean = {"mean_log_ratio": segment_mean(leaf - old, microbatch)} if given else {}
        found = loss(leaf, old, advantages, microbatch, clip_low=0.9, clip_high=0.9, **mean)
        microbatch(found.per_token_loss).backward()
        assert leaf.grad is not None
        return leaf.grad

    for loss, given in ((gspo_loss, True), (gspo_token_loss, False), (gspo_token_loss, True)):
        torch.testing.assert_close(gradient_of(loss, given), gradient_of(gspo_loss, False), rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("old", [-1.0, -900.0])
@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_shapes_and_large_ratios(name: str, old: float) -> None:
    log_probs = torch.full((1, 5), -1.0, requires_grad=True)
    found = OF_SEQUENCES[name](log_probs, torch.full((1, 5), old), torch.ones(1, 5), HELD)
    assert found.per_token_loss.shape == found.clipped.shape == (1, 5)
    found.per_token_loss.sum().backward()
    assert torch.isfinite(found.per_token_loss).all()
    assert (log_probs.grad == 0).all() if old == -900 else torch.isfinite(log_probs.grad).all()


def call(name: str = "gspo", **changed: Any) -> Any:
    plain: dict[str, Any] = {"log_probs": OLD, "old_log_probs": OLD, "advantages": torch.ones(5), "local": HELD}
    return OF_SEQUENCES[name](**plain | changed)


SHORT = {"log_probs": OLD[:4], "old_log_probs": OLD[:4], "advantages": torch.ones(4)}
WITH_GRAPH = torch.ones(5, requires_grad=True)
ONES = torch.ones(5)
REFUSALS |= {
    **refusals(
        call,
        ({"old_log_probs": OLD[:1]}, r"log-probs of shapes \(5,\) and \(1,\)", {"advantages": torch.ones(1)}),
        (SHORT, r"a loss's input of shape \(4,\)", {"log_probs": OLD[None], "old_log_probs": OLD[None]}),
        ({"clip_high": 1.0004}, "clip_high is 1.0004: it is a width", {"clip_high": 4e-4}),
        ({"mean_log_ratio": torch.zeros(5)}, r"a statistic of shape \(5,\)", {"mean_log_ratio": torch.zeros(2)}),
    ),
    **refusals(
        call,
        ({"local": 3}, "local is a int: it says where tokens lie", {"local": HELD}),
        ({"local": HELD.samples}, "local is a Samples: it says where tokens lie", {"local": HELD}),
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

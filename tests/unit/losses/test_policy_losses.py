"""The losses by name: each is its function, takes its settings alone, and goes with the modes that its paper says."""

import inspect
from typing import Any

import pytest
import torch
from refusals import Call, check_refusal, each_of, refusals

from megatron_rl_loss import Samples, losses, resolve
from megatron_rl_loss.losses import POLICY_LOSSES, check_goes_with, policy_loss
from megatron_rl_loss.modes import MODES

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


def test_settings_are_handed_on() -> None:
    found, plain = (policy_loss("gspo", *TOKENS, LOCAL, **clip) for clip in ({"clip_low": 0.4, "clip_high": 0.5}, {}))
    expected = losses.gspo_loss(*TOKENS, LOCAL, clip_low=0.4, clip_high=0.5)
    assert torch.equal(found.per_token_loss, expected.per_token_loss)
    assert not torch.equal(found.per_token_loss, plain.per_token_loss)


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


@pytest.mark.parametrize(
    ("name", "mode"),
    [("luspo", "trl:luspo"), ("gspo", "verl:seq-mean-token-mean"), ("cispo", "trl:cispo"), ("sapo", "trl:sapo")],
)
def test_other_frameworks_settings(name: str, mode: str) -> None:
    check_goes_with(name, resolve(mode))


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


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

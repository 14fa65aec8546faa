"""The losses by name: each is its function, takes its settings alone, and goes with the modes that its paper says."""

import inspect
from typing import Any

import pytest
import torch
from refusals import Call, Refusal, check_refusal, each_of

from megatron_rl_loss import Samples
from megatron_rl_loss.losses import (
    POLICY_LOSSES,
    check_goes_with,
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    policy_loss,
    ppo_clip_loss,
    sapo_loss,
)
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.modes.names import resolve

LOCAL = Samples([torch.ones(3), torch.ones(2)]).local(0, 1)
OLD = torch.full((5,), -2.0)
NEW = OLD + torch.tensor([0.5, -0.2, 0.0, 1.2, -0.9])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0])

DIRECT: dict[str, Any] = {
    "ppo": lambda: ppo_clip_loss(NEW, OLD, ADVANTAGES),
    "cispo": lambda: cispo_loss(NEW, OLD, ADVANTAGES),
    "sapo": lambda: sapo_loss(NEW, OLD, ADVANTAGES),
    "dppo_tv": lambda: dppo_loss(NEW, OLD, ADVANTAGES, divergence="tv", threshold=0.15),
    "dppo_kl": lambda: dppo_loss(NEW, OLD, ADVANTAGES, divergence="kl", threshold=0.05),
    "gspo": lambda: gspo_loss(NEW, OLD, ADVANTAGES, LOCAL),
    "gspo_token": lambda: gspo_token_loss(NEW, OLD, ADVANTAGES, LOCAL),
    "luspo": lambda: gspo_loss(NEW, OLD, ADVANTAGES, LOCAL),
    "gmpo": lambda: gmpo_loss(NEW, OLD, ADVANTAGES, LOCAL),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_name_is_its_function(name: str) -> None:
    found = policy_loss(name, NEW, OLD, ADVANTAGES, LOCAL, None, clip_low=None)
    for got, expected in zip(vars(found).values(), vars(DIRECT[name]()).values(), strict=True):
        assert torch.equal(got, expected)
    assert DIRECT.keys() == POLICY_LOSSES.keys()


def test_settings_are_handed_on() -> None:
    found = policy_loss("gspo", NEW, OLD, ADVANTAGES, LOCAL, clip_low=0.4, clip_high=0.5)
    expected = gspo_loss(NEW, OLD, ADVANTAGES, LOCAL, clip_low=0.4, clip_high=0.5)
    assert torch.equal(found.per_token_loss, expected.per_token_loss)
    assert not torch.equal(found.per_token_loss, DIRECT["gspo"]().per_token_loss)


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES.keys())
def test_the_table_says_what_the_functions_take(loss: Any) -> None:
    parameters = inspect.signature(loss.compute).parameters
    assert ("local" in parameters) == loss.of_sequence
    assert set(loss.settings) <= set(parameters)
    assert loss.source.startswith("arXiv:")
    assert loss.mode is None or loss.mode in MODES


# --- which modes they go with

GOES_WITH = {
    "gspo": [("sample_mean", None)],
    "gmpo": [("sample_mean", None)],
    "luspo": [("constant", 1.0)],
}
ASKED = [*((mode, 3.0 if mode in ("constant", "token_sum") else None) for mode in MODES), ("constant", 1.0)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_modes(name: str) -> None:
    for mode, divisor in ASKED:
        aggregation = resolve(mode, divisor=divisor)
        if (mode, divisor) in GOES_WITH.get(name, ASKED):
            check_goes_with(name, aggregation)
        else:
            with pytest.raises(ValueError, match=f"the policy loss {name} aggregated by {mode}, divisor"):
                check_goes_with(name, aggregation)
    check_goes_with(name, resolve(lambda inputs: 1.0))  # a mode of one's own is taken at its word


def test_other_frameworks_settings() -> None:
    check_goes_with("luspo", resolve("trl:luspo"))
    check_goes_with("gspo", resolve("verl:seq-mean-token-mean"))
    check_goes_with("cispo", resolve("trl:cispo"))
    check_goes_with("sapo", resolve("trl:sapo"))


# --- refusals, each beside its nearest legal neighbour


def goes(name: str, mode: str = "sample_mean", divisor: float | None = None, **settings: Any) -> Call:
    return lambda: check_goes_with(name, resolve(mode, divisor=divisor), **settings)


REFUSALS: dict[str, Refusal] = {
    "an unknown loss": (
        goes("grpo"),
        ValueError,
        "there is no such policy loss.+Choose one of ppo, cispo",
        goes("ppo"),
    ),
    "a clip that the loss has not": (
        goes("sapo", clip_low=0.2),
        ValueError,
        "clip_low=0.2 for the policy loss sapo: it takes tau_positive, tau_negative",
        goes("sapo", tau_positive=0.9, clip_low=None),
    ),
    "a dual clip of a sequence's ratio": (
        goes("gspo", dual_clip=3.0),
        ValueError,
        "dual_clip=3.0 for the policy loss gspo",
        goes("ppo", dual_clip=3.0),
    ),
    "GSPO by a mode that weighs sequences by length": (
        goes("gspo", "token_mean"),
        ValueError,
        "gspo aggregated by token_mean.+what its paper says by sample_mean alone",
        goes("gspo_token", "token_mean"),
    ),
    "LUSPO by another divisor": (
        goes("luspo", "constant", 2.0),
        ValueError,
        "luspo aggregated by constant, divisor 2.0.+by constant with divisor 1 alone",
        goes("luspo", "constant", 1.0),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)

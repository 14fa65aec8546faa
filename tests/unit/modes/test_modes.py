"""The modes as data, and modes of one's own."""

import doctest
from typing import Any

import oracle
import pytest
import torch
from placements import Place, every_layout
from refusals import check_refusal
from steps import assert_equals_oracle, run_step

from megatron_rl_loss import Gathered, ModeInputs, StepTotals, make_pg_loss_reducer, register_pg_loss_reducer
from megatron_rl_loss.modes import MODES, Mode, available_modes
from megatron_rl_loss.modes import table as modes
from megatron_rl_loss.modes.table import ModeFunction


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModeFunction]:
    """A registry of its own, empty."""
    names: dict[str, ModeFunction] = {}
    monkeypatch.setattr(modes, "_REGISTERED", names)
    return names


def plain_sum(inputs: ModeInputs) -> float:
    return 1.0


def test_docstring_examples() -> None:
    result = doctest.testmod(modes)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_modes_are_rows_of_one_table() -> None:
    assert tuple(MODES) == oracle.MODES == available_modes()
    for name, mode in MODES.items():
        assert isinstance(mode, Mode)
        assert mode.name == name
        assert mode.formula
    rows = {name: (mode.unit, mode.size, mode.default_divisor) for name, mode in MODES.items()}
    assert rows == {
        "sample_mean": ("rollout", "tokens", None),
        "prompt_mean": ("prompt", "tokens", None),
        "token_mean": ("step", "tokens", None),
        "constant": ("rollout", "divisor", None),
        "token_sum": ("step", "divisor", 1),
    }


@every_layout
def test_a_registered_function_is_a_mode(place: Place, cp_size: int) -> None:
    assert register_pg_loss_reducer("plain_sum")(plain_sum) is plain_sum
    assert available_modes() == (*MODES, "plain_sum")
    step = [one.poisoned() for one in oracle.WORKED]
    outcome = run_step(step, [[3, 1], [0, 2]], "plain_sum", place=place, cp_size=cp_size)
    assert outcome.value == pytest.approx(27.5, rel=oracle.sum_error(13))
    assert outcome.gradient.tolist() == torch.cat([one.mask for one in oracle.WORKED]).tolist()


def test_a_mode_of_ones_own_can_be_what_a_built_in_is() -> None:
    @register_pg_loss_reducer("my_token_mean")
    def my_token_mean(inputs: ModeInputs) -> float:
        assert inputs.totals.step_tokens is not None
        return 1 / inputs.totals.step_tokens

    for mode in ("my_token_mean", my_token_mean):
        outcome = run_step(oracle.WORKED, [[3, 1], [0, 2]], mode)  # type: ignore[arg-type]
        assert_equals_oracle(outcome, oracle.WORKED, "token_mean")


def test_a_mode_of_ones_own_is_given_everything() -> None:
    seen: list[ModeInputs] = []

    @register_pg_loss_reducer("spy")
    def spy(inputs: ModeInputs) -> int:
        seen.append(inputs)
        return 1

    totals, layout = StepTotals(), Gathered([0, 1])
    ids: dict[str, Any] = {"rollout_ids": [4], "prompt_ids": ["a"]}
    place: dict[str, Any] = {"layout": layout, "cp_rank": 1, "cp_size": 2}
    make_pg_loss_reducer("spy", [torch.ones(1)], totals=totals, divisor=3.0, units="active", **ids, **place)
    (inputs,) = seen
    assert (inputs.divisor, inputs.units) == (3.0, "active")
    assert inputs.totals is totals
    assert inputs.samples.layout is layout
    assert inputs.samples.rollout_ids is not None
    assert inputs.samples.rollout_ids.tolist() == [4]
    assert inputs.samples.prompt_ids is not None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine", "'mine': it is taken"),
        ("token_mean", "'token_mean': it is taken"),
        ("my-sum", "'my-sum': it must be a Python identifier"),
        ("", "''"),
        (plain_sum, "identifier"),
    ],
)
def test_refused_names(name: Any, text: str, registry: dict[str, ModeFunction]) -> None:
    registry["mine"] = plain_sum
    check_refusal(lambda: register_pg_loss_reducer(name), ValueError, text, lambda: None)
    assert list(registry) == ["mine"]
    register_pg_loss_reducer("my_sum")(plain_sum)


def test_what_cannot_be_called_is_refused(registry: dict[str, ModeFunction]) -> None:
    register: Any = register_pg_loss_reducer("x")
    check_refusal(lambda: register(3), TypeError, "mode 'x' is a int: it must be a function", lambda: None)
    assert not registry
    register(plain_sum)

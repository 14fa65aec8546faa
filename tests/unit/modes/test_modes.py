"""The modes as data, and modes of one's own."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from refusals import refusal_tests, refusals
from steps import assert_equals_oracle, run_step

from megatron_rl_loss import (
    Gathered,
    ModeInputs,
    Samples,
    StepTotals,
    make_pg_loss_reducer,
    register_pg_loss_reducer,
    token_weights,
)
from megatron_rl_loss.modes import MODES, Mode, available_modes
from megatron_rl_loss.modes import table as modes
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import ModeFunction

MASK = [torch.tensor([1.0, 0, 0.5]), torch.tensor([1.0, 1])]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModeFunction]:
    """A registry of its own, empty."""
    names: dict[str, ModeFunction] = {}
    monkeypatch.setattr(modes, "_REGISTERED", names)
    return names


def plain_sum(inputs: ModeInputs) -> float:
    return 1.0


def test_the_modes_are_rows_of_one_table() -> None:
    assert tuple(MODES) == oracle.MODES == available_modes()
    assert all(isinstance(mode, Mode) and mode.name == name and mode.formula for name, mode in MODES.items())


def test_a_registered_function_is_a_mode() -> None:
    assert register_pg_loss_reducer("plain_sum")(plain_sum) is plain_sum
    assert available_modes() == (*MODES, "plain_sum")
    for mode in ("plain_sum", "token_sum"):  # whose divisor is 1 where none is given
        assert token_weights(mode, Samples(MASK), StepTotals()).tolist() == torch.cat(MASK).tolist()


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
    totals, layout = StepTotals(), Gathered([0, 1])
    ids: dict[str, Any] = {"rollout_ids": [4], "prompt_ids": ["a"]}
    place: dict[str, Any] = {"layout": layout, "cp_rank": 1, "cp_size": 2}
    spy: Any = lambda inputs: seen.append(inputs) or 1  # noqa: E731
    make_pg_loss_reducer(spy, [torch.ones(1)], totals=totals, divisor=3.0, units="active", **ids, **place)
    (inputs,) = seen
    assert (inputs.divisor, inputs.units) == (3.0, "active")
    assert inputs.totals is totals
    assert inputs.samples.layout is layout
    assert inputs.samples.rollout_ids is not None
    assert inputs.samples.rollout_ids.tolist() == [4]
    assert inputs.samples.prompt_ids is not None


# --- weights beside the mask; cut over CP ranks: test_weights.py


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (2, [2, 0, 1, 2, 2]),
        (0.5, [0.5, 0, 0.25, 0.5, 0.5]),
        (np.float32(0.5), [0.5, 0, 0.25, 0.5, 0.5]),
        (torch.tensor(2.0), [2, 0, 1, 2, 2]),
        (torch.tensor([2.0, 3.0]), [2, 0, 1, 3, 3]),
        (torch.tensor([2.0, 3.0], dtype=torch.float64), [2, 0, 1, 3, 3]),
        ([torch.tensor([4.0, 5, 6]), torch.tensor([7.0, 8])], [4, 0, 3, 7, 8]),
        ((torch.tensor([4, 5, 6]), torch.tensor([True, False])), [4, 0, 3, 1, 0]),
        ([torch.tensor([1.0, -2, -2]), torch.tensor([0.0, -1])], [1, 0, -1, 0, -1]),
    ],
    ids=["int", "float", "NumPy float", "0-dim", "a sample", "float64", "a token", "ints and bools", "of any sign"],
)
def test_a_mode_of_ones_own_returns_them(beside: Any, expected: list[float]) -> None:
    assert token_weights(lambda inputs: beside, Samples(MASK), StepTotals()).tolist() == expected


def test_no_gradient_goes_to_them_and_what_is_masked_is_ignored() -> None:
    beside = torch.tensor([1.0, -2.0], requires_grad=True)
    losses = torch.tensor([1.0, NAN, 4, 3, 2], requires_grad=True)
    share = make_pg_loss_reducer(lambda inputs: beside, MASK, totals=StepTotals())(losses)
    share.backward()
    assert float(share.detach()) == 1 + 2 - 6 - 4
    assert beside.grad is None
    assert losses.grad.tolist() == [1, 0, 0.5, -2, -2]


def own(beside: Any) -> torch.Tensor:
    return token_weights(lambda inputs: beside, Samples([torch.ones(3), torch.ones(2)]), StepTotals())


def of_divisor(divisor: float) -> Any:
    return make_pg_loss_reducer(plain_sum, MASK, totals=StepTotals(), divisor=divisor)


def register(name: Any, function: Any = plain_sum) -> None:
    modes._REGISTERED.clear()
    modes._REGISTERED["mine"] = plain_sum
    register_pg_loss_reducer(name)(function)


INF_AT_A_TOKEN, FINITE = ([torch.ones(3), torch.tensor([1.0, last])] for last in (INF, 0))
test_refusals = refusal_tests(
    {
        **refusals(
            own,
            (([torch.ones(2), torch.ones(3)],), r"lengths \[2, 3\].*\[3, 2\].*Return one weight per mask", (FINITE,)),
            (([torch.ones(5)],), r"lengths \[5\]", ([torch.ones(3).bool(), torch.ones(2).int()],)),
            (([],), r"lengths \[\]", (FINITE,)),
            ((NAN,), "token weights with NaN or Inf", (0.0,)),
            ((INF_AT_A_TOKEN,), "token weights with NaN or Inf.*Use 0 to leave tokens out", (FINITE,)),
        ),
        **refusals(
            own,
            ((torch.ones(5),), r"returned \(5,\)", (torch.ones(2),)),
            ((torch.ones(1, 5),), r"returned \(1, 5\)", (torch.tensor(1.0),)),
            (([[1.0] * 3, [1.0] * 2],), "a number, a tensor of 2", (torch.ones(2),)),
            ((None,), r"returned None \(NoneType\)", (0,)),
            ((True,), r"returned True \(bool\)", (1,)),
            ((torch.sum,), "must return weights beside the mask", (1.0,)),
            error=TypeError,
        ),
        **refusals(of_divisor, ((0,), "divisor 0: it must be finite and above 0", (1,))),
        **refusals(
            register,
            (("mine",), "'mine': it is taken", ("my_sum",)),
            (("token_mean",), "'token_mean': it is taken", ("my_sum",)),
            (("my-sum",), "'my-sum': it must be a Python identifier", ("my_sum",)),
            (("",), "''", ("my_sum",)),
            ((plain_sum,), "identifier", ("my_sum",)),
        ),
        **refusals(register, (("x", 3), "mode 'x' is a int: it must be a function", ("x",)), error=TypeError),
    }
)


def test_terms_have_the_divisor_of_their_own_mode_alone() -> None:
    modes = LossModes.resolve("constant", divisor=8.0, terms={"kl": "constant", "value": "token_sum"})
    assert (modes.terms["kl"].divisor, modes.terms["value"].divisor) == (8.0, 1.0)
    for units, mode in ((None, "openrlhf:token_level_loss=false"), ("active", "sample_mean")):
        assert LossModes.resolve("token_mean", units=units, terms={"kl": mode}).terms["kl"].units == "active"  # type: ignore[arg-type]
    of_verl = {"kl": "verl:seq-mean-token-sum-norm", "value": "verl:seq-mean-token-sum", "other": None}
    modes = LossModes.resolve("constant", divisor=8.0, terms=of_verl)
    assert {name: one.divisor for name, one in modes.terms.items()} == {"kl": 8, "value": 1}
    assert not modes.needs_prompt_ids
    assert modes.with_terms({"kl": "prompt_mean"}).needs_prompt_ids
    for policy in ("token_mean", "token_sum"):
        with pytest.raises(ValueError, match="the term 'kl' by constant beside a policy loss by"):
            LossModes.resolve(policy, terms={"kl": "constant"})

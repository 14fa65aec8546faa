"""The modes as data, and modes of one's own."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from placements import Place, every_layout, laid_out
from refusals import Call, check_refusal, each_of, refusals
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
    for name, mode in MODES.items():
        assert isinstance(mode, Mode)
        assert mode.name == name
        assert mode.formula


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


# --- weights beside the mask


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


@every_layout
def test_they_are_cut_for_the_rank_and_shared_by_copies(place: Place, cp_size: int) -> None:
    """A weight of its own for every token: its sample times 100, plus its position, plus 1."""
    lengths = (3, 1, 8)
    placed = laid_out(place, lengths, cp_size)
    masks = [torch.ones(n) for n in placed.mask_lengths or lengths]
    samples = Samples(masks, layout=placed.layout)

    def numbered(inputs: ModeInputs) -> list[torch.Tensor]:
        return [100.0 * i + torch.arange(len(mask)) + 1 for i, mask in enumerate(inputs.samples.loss_masks)]

    copies = cp_size if isinstance(placed.layout, Gathered) else 1
    for cp_rank, held in enumerate(placed.held):
        found = token_weights(numbered, samples, StepTotals(), cp_rank=cp_rank, cp_size=cp_size)
        known = [(w * copies, at) for w, at in zip(found.tolist(), held, strict=True) if at is not None]
        expected = [100 * at[0] + at[1] + 1 for _, at in known]
        assert [w for w, _ in known] == pytest.approx(expected, rel=oracle.EXACT)


def test_no_gradient_goes_to_them() -> None:
    beside = torch.tensor([1.0, -2.0], requires_grad=True)
    losses = torch.ones(5, requires_grad=True)
    make_pg_loss_reducer(lambda inputs: beside, MASK, totals=StepTotals())(losses).backward()
    assert beside.grad is None
    assert losses.grad is not None
    assert losses.grad.tolist() == [1, 0, 0.5, -2, -2]


def test_what_is_masked_is_ignored_whatever_its_weight() -> None:
    losses = torch.tensor([1.0, NAN, 4, INF, 2])
    with_nan = make_pg_loss_reducer(
        lambda inputs: [torch.tensor([1.0, 7, 1]), torch.tensor([0.0, 1])], MASK, totals=StepTotals()
    )
    assert float(with_nan(losses)) == 1 + 2 + 2


def own(beside: Any) -> torch.Tensor:
    return token_weights(lambda inputs: beside, Samples([torch.ones(3), torch.ones(2)]), StepTotals())


def of_divisor(divisor: float) -> Any:
    return make_pg_loss_reducer(plain_sum, MASK, totals=StepTotals(), divisor=divisor)


INF_AT_A_TOKEN, FINITE = ([torch.ones(3), torch.tensor([1.0, last])] for last in (INF, 0))
REFUSALS = {
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
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_terms_have_the_divisor_of_their_own_mode_alone() -> None:
    modes = LossModes.resolve("constant", divisor=8.0, terms={"kl": "constant", "value": "token_sum"})
    assert (modes.terms["kl"].divisor, modes.terms["value"].divisor) == (8.0, 1.0)
    assert (
        LossModes.resolve("token_mean", terms={"kl": "openrlhf:token_level_loss=false"}).terms["kl"].units == "active"
    )
    of_verl = {"kl": "verl:seq-mean-token-sum-norm", "value": "verl:seq-mean-token-sum", "other": None}
    modes = LossModes.resolve("constant", divisor=8.0, terms=of_verl)
    assert {name: one.divisor for name, one in modes.terms.items()} == {"kl": 8, "value": 1}
    assert not modes.needs_prompt_ids
    assert modes.with_terms({"kl": "prompt_mean"}).needs_prompt_ids
    for policy in ("token_mean", "token_sum"):
        with pytest.raises(ValueError, match="the term 'kl' by constant beside a policy loss by"):
            LossModes.resolve(policy, terms={"kl": "constant"})

"""Modes of a user's own: what they are given, what they may be, and modes of terms."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import THREE_PARTS, refusal_tests, refusals
from steps import token_weights

from megatron_rl_loss import (
    Gathered,
    Mode,
    Samples,
    StepTotals,
    Sum,
    make_pg_loss_reducer,
    plan_step,
    register_pg_loss_reducer,
)
from megatron_rl_loss.core.aggregation import LossModes, resolve
from megatron_rl_loss.core.modes import ModeInputs, available_modes

MASK = [torch.tensor([1.0, 0, 0.5]), torch.tensor([1.0, 1])]


def scaled(step: ModeInputs, by: float = 1.0) -> Any:
    return by / step.tokens("step")


@dataclasses.dataclass
class Scaled:
    """A callable object, which cannot be hashed."""

    by: float

    def __call__(self, step: ModeInputs) -> Any:
        return scaled(step, self.by)

    def of(self, step: ModeInputs) -> Any:
        return self(step)


class Plain:
    def __call__(self, step: ModeInputs) -> Any:
        return scaled(step)


#: Modes, and the name that each has on every rank, whatever its address.
CALLABLES: dict[str, tuple[Any, str]] = {
    "function": (scaled, "test_modes.scaled"),
    "partial": (functools.partial(scaled, by=1.0), "test_modes.scaled"),
    "partial of an object": (functools.partial(Scaled(1.0)), "test_modes.Scaled"),
    "unhashable object": (Scaled(1.0), "test_modes.Scaled"),
    "object": (Plain(), "test_modes.Plain"),
    "method": (Scaled(1.0).of, "test_modes.Scaled.of"),
    "lambda": (lambda step: scaled(step), "test_modes.<lambda>"),
}


@pytest.mark.parametrize(("mode", "name"), CALLABLES.values(), ids=CALLABLES)
def test_whatever_can_be_called_is_a_mode_of_one_name(mode: Callable[..., Any], name: str) -> None:
    assert resolve(mode).mode.name == name
    assert "0x" not in LossModes.resolve(mode).describe()
    plan = plan_step([Samples(MASK)], mode, terms={"kl": mode}, dp_group=None)
    assert torch.equal(plan[0].weights, token_weights("token_mean", Samples(MASK), plan.totals))
    assert plan[0].loss({"pg": torch.ones(5, requires_grad=True)}).item() == pytest.approx(1)


def test_a_registered_function_is_a_mode() -> None:
    @register_pg_loss_reducer("my_mean", formula="mean", divisor="refused")
    def my_mean(step: ModeInputs) -> Any:
        return 1 / step.tokens("step")

    assert isinstance(my_mean, Mode)
    assert available_modes()[-1] == "my_mean"
    for mode in ("my_mean", my_mean):
        weights = token_weights(mode, Samples(MASK), StepTotals.of(MASK))
        assert weights.tolist() == pytest.approx([1 / 3.5, 0, 0.5 / 3.5, 1 / 3.5, 1 / 3.5])
    with pytest.raises(ValueError, match="divisor 3 with loss aggregation 'my_mean': this mode takes none"):
        resolve("my_mean", divisor=3)


def test_a_mode_is_given_everything() -> None:
    seen: list[ModeInputs] = []
    layout, labels = Gathered([0, 1]), {"weight": [2.5]}
    ids: dict[str, Any] = {"rollout_ids": [4], "prompt_ids": ["a"], "ids": {"task": ["t"]}, "labels": labels}
    totals = StepTotals.of(Samples([[1], [1, 0]], rollout_ids=[4, 5], prompt_ids=["a", "a"], ids={"task": ["t", "t"]}))
    place: dict[str, Any] = {"cp_rank": 1, "cp_size": 2}
    samples = Samples([torch.ones(1)], layout=layout, **ids)
    spy: Any = lambda step: seen.append(step) or 1  # noqa: E731
    make_pg_loss_reducer(spy, samples, totals=totals, divisor=3.0, units="active", **place)
    (step,) = seen
    assert (step.divisor, step.counting, step.totals is totals, step.batch.layout) == (3.0, "active", True, layout)
    assert (1 / step.label("weight")).tolist() == [0.4]  # numbers are an array, so that a mode calculates with them
    assert Samples([[1], [1]], labels={"kind": ["math", "code"]}).label("kind") == ["math", "code"]
    keys = ("rollout", "prompt", "task")
    assert [float(step.tokens(key)[0]) for key in keys] == [1, 2, 2]  # type: ignore[index]
    assert [float(step.samples(key)[0]) for key in (*keys, "step", "sample")] == [1, 2, 2, 2, 1]
    assert [step.units(key) for key in (*keys, "sample", "step")] == [2, 1, 1, 2, 1]
    assert (step.tokens("step"), step.asked) == (2, {*keys, "sample", "step"})
    for ask, text in (
        (
            lambda: step.tokens("session"),
            r"without ids\['session'\] \(they have rollout, prompt, task\).*ids={",
        ),
        (lambda: step.label("x"), "the samples have no label 'x' .they have weight"),
    ):
        with pytest.raises(ValueError, match=text):
            ask()


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (2, [2, 0, 1, 2, 2]),
        (np.float32(0.5), [0.5, 0, 0.25, 0.5, 0.5]),
        (torch.tensor([2.0, 3.0], dtype=torch.float64), [2, 0, 1, 3, 3]),
        ([2.0, 3], [2, 0, 1, 3, 3]),
        (torch.tensor([2.0, 3.0], requires_grad=True), [2, 0, 1, 3, 3]),
        ([torch.tensor([4.0, 5, 6]), torch.tensor([7.0, 8])], [4, 0, 3, 7, 8]),
        ((np.array([4, 5, 6]), torch.tensor([True, False])), [4, 0, 3, 1, 0]),
        ([[4, 5, 6], [7.0, 8]], [4, 0, 3, 7, 8]),
        ([torch.tensor([1.0, float("nan"), 2]), torch.tensor([0.0, 1])], [1, 0, 1, 0, 1]),
        ([[1.0, -1, 2], [0.0, 1]], [1, 0, 1, 0, 1]),
    ],
    ids=[
        *("int", "NumPy float", "a sample", "a list", "with a graph", "a token", "ints and bools", "lists"),
        *("NaN at a masked token", "below 0 at a masked token"),
    ],
)
def test_weights_beside_the_mask(beside: Any, expected: list[float]) -> None:
    weights = token_weights(lambda step: beside, Samples(MASK), StepTotals.of(MASK))
    assert (weights.tolist(), weights.requires_grad) == (expected, False)


def test_settings_that_differ_are_described_apart() -> None:
    """Ranks compare these lines."""
    asked = [("constant", 1_000_001), ("constant", 1_000_002), ("constant", 0.1), ("token_sum", 1_000_001)]
    lines = {LossModes.resolve(mode, divisor=divisor).describe() for mode, divisor in asked}
    lines |= {LossModes.resolve("token_mean", terms={name: "sample_mean"}).describe() for name in ("kl", "nll")}
    assert len(lines) == 6
    assert LossModes.resolve("constant", divisor=8).describe() == LossModes.resolve("constant", divisor=8.0).describe()


def test_an_aggregation_as_text_has_what_is_not_usual() -> None:
    asked = [
        resolve("token_mean"),
        resolve("constant", divisor=40960),
        resolve("token_sum", divisor=0.5, units="active"),
    ]
    assert list(map(str, asked)) == [
        "token_mean",
        "constant with divisor 40960",
        "token_sum with divisor 0.5, counting active units",
    ]


def test_terms_have_the_divisor_and_the_counting_of_their_own_mode() -> None:
    own: Any = lambda step: 1 / step.divisor  # noqa: E731
    modes = LossModes.resolve("constant", divisor=8.0, terms={"kl": "constant", "value": "token_sum"})
    assert (modes.terms["kl"].divisor, modes.terms["value"].divisor) == (8.0, None)
    assert LossModes.resolve(own, divisor=8.0).term_aggregation("kl", own).divisor == 8
    for mode in ("openrlhf:token_level_loss=false", "sample_mean"):
        modes = LossModes.resolve("token_mean", units="active", terms={"kl": mode})
        assert modes.terms["kl"].units == "active" == modes.term_aggregation("other", mode).units
    assert LossModes.resolve("token_mean").term_aggregation("kl", "openrlhf:token_level_loss=false").units == "active"
    assert LossModes.resolve("token_mean").term_aggregation("kl").mode.name == "token_mean"


def term(*arguments: Any, **options: Any) -> Any:
    return LossModes.resolve("token_mean").term_aggregation("kl", *arguments, **options)


def own(beside: Any) -> torch.Tensor:
    masks = [torch.tensor([1.0, 0, 1]), torch.ones(2)]
    return token_weights(lambda step: beside, Samples(masks), StepTotals.of(masks))


LAST_INF, FINITE = ([torch.ones(3), torch.tensor([1.0, last])] for last in (math.inf, 0))


def summing(name: str) -> torch.Tensor:
    mode = Mode(name="own", function=lambda step: 1 / step.sum(name), sums={"tokens": Sum(of=lambda s: s.mask_sums)})
    return plan_step([Samples([[1, 1]])], mode, dp_group=None)[0].weights


def nothing(of: Any) -> Any: ...


test_settings_of_a_mode = refusal_tests(
    {
        **refusals(summing, (("samples",), "the sum 'samples' of the mode 'own', which declares tokens", ("tokens",))),
        **refusals(
            functools.partial(Mode, name="own", function=nothing),
            ({"divisor": "maybe"}, "there is no such divisor of a mode", {"divisor": "refused"}),
        ),
        **refusals(
            functools.partial(Mode, name="own", function=nothing),
            ({"function": 1}, "it must be a function of ModeInputs", {}),
            ({"sums": [1]}, "sums of the mode 'own' is a list", {"sums": {}}),
            ({"sums": {"x": len}}, "the sum 'x' is a builtin_.*must be a Sum", {"sums": {"x": Sum(of=nothing)}}),
            error=TypeError,
        ),
    }
)
test_refusals = refusal_tests(
    {
        **refusals(
            own,
            (([torch.ones(2), torch.ones(3)],), r"rows of \[2, 3\] values for loss masks of \[3, 2\]", (FINITE,)),
            ((math.nan,), "token weights with NaN or Inf", (0.0,)),
            ((1e39,), "token weights with NaN or Inf", (1e38,)),
            (([2.0, -1.0],), "weights down to -1 from the mode .*would train a token away.*Term's coef", ([2.0, 0.0],)),
            (([[1, 1, 1], [1, -1]],), "token weights down to -1", ([[1, -1, 1], [1, 1]],)),  # the second is masked
            ((1e-50,), "float32 rounds to 0", (1e-30,)),
            ((LAST_INF,), "token weights with NaN or Inf.*Use 0 to leave tokens out", (FINITE,)),
        ),
        **refusals(
            own,
            ((torch.ones(5),), r"returned float32 of shape \(5,\)", (torch.ones(2),)),
            ((torch.ones(1, 5),), "a number, 2 numbers", (torch.tensor(1.0),)),
            (([1.0] * 3,), r"of shape \(3,\)", ([[1.0] * 3, [1.0] * 2],)),
            ((None,), "returned None", (0,)),
            ((True,), "returned bool", (1,)),
            error=TypeError,
        ),
    }
    | refusals(
        term,
        (
            ("constant",),
            "the term 'kl': .*without a divisor.* Pass Term\\(values, 'constant', divisor=",
            ("token_sum",),
        ),
        (("nope",), "the term 'kl': loss aggregation 'nope': there is no such mode", ("sample_mean",)),
    )
    | refusals(
        functools.partial(term, None),
        ({"units": "active"}, "the term 'kl' with units or a divisor and no mode", {}),
    )
)  # fmt: skip


def test_a_misspelt_input_of_a_mode_is_named() -> None:
    text = r"^step.token: a mode's inputs have no such attribute. Did you mean tokens\? Choose one of"
    with pytest.raises(AttributeError, match=text) as caught:
        plan_step([Samples([[1, 1]])], lambda step: 1 / step.token("step"), dp_group=None)  # type: ignore[attr-defined]
    assert THREE_PARTS.fullmatch(str(caught.value))


def test_functions_of_one_name_are_told_apart() -> None:
    """Two ranks compare modes by text: names of lambdas, partials and captured values alike say too little."""

    def captured(factor: Any) -> Any:
        return lambda step: np.sum(factor) / step.tokens("step")

    def configured(**config: Any) -> Any:
        asked = SimpleNamespace(**config)
        return lambda step: asked.factor / step.tokens("step")

    def by_key(key: str) -> Any:
        return lambda step: 1 / step.tokens(key)

    def counted(key: str, kind: str) -> Any:
        return lambda step: 1 / (step.samples(key) if kind == "samples" else step.units(key))

    def settings(mode: Any, **options: Any) -> str:
        return LossModes.resolve(mode, **options).describe()

    def sum_mode(count: Any) -> Mode:
        return Mode(name="mine", function=scaled, sums={"n": Sum(of=count)})

    def unlike_in_code(step: ModeInputs) -> Any:
        return np.reciprocal(step.tokens("step") / 0.5)

    functions = [
        *(functools.partial(scaled, by=by) for by in (0.5, 1 / 3)),
        *(lambda step: 0.5, lambda step: 0.3),
        *(Scaled(by) for by in (0.5, 0.25)),
        *(Scaled(by).of for by in (0.5, 0.25)),
        *(captured(factor) for factor in (2, 3, np.array([2.0, 2.0]), torch.tensor([2.0, 3.0]))),
        *(configured(factor=factor) for factor in (0.5, 0.25)),
        *(by_key(key) for key in ("step", "sample", "rollout", "prompt", "session", "task")),
        *(counted(key, kind) for key in ("rollout", "prompt") for kind in ("samples", "units")),
        *(lambda step: 1 / step.units("rollout"), lambda step: 1 / len(step.batch)),  # of the step, and of a part of it
        *(lambda step: step.batch.mask_sums, lambda step: step.batch.active_tokens),
        *(sum_mode(count) for count in (lambda samples: samples.mask_sums, lambda samples: samples.active_tokens)),
    ]
    texts = [settings(function) for function in functions]
    assert len(set(texts)) == len(texts)
    assert texts == [settings(function) for function in functions]  # the same at every call
    assert settings(configured(factor=0.5, rank=0)) == settings(configured(factor=0.5, rank=1))  # is not read
    assert len({settings(scaled, divisor=divisor) for divisor in (1, 2)}) == 2
    assert "giving" not in settings("token_mean")
    # What they give is compared, not how it is written.
    gives = [settings(function).partition("giving")[2] for function in (Scaled(0.5), unlike_in_code)]
    assert gives[0] == gives[1]


def test_of_modes_that_read_labels_names_are_compared() -> None:
    """Nobody knows what a label holds before there are samples."""

    def by_label(factor: float) -> Any:
        return lambda step: factor * step.label("weight")

    def by_a_sum(factor: float) -> Mode:
        sums = {"n": Sum(of=lambda samples: factor * samples.label("weight"))}
        return Mode(name="mine", function=lambda step: 1 / step.sum("n"), sums=sums)

    for make in (by_label, by_a_sum):
        texts = [LossModes.resolve(make(factor)).describe() for factor in (1.0, 2.0)]
        assert texts[0] == texts[1]
        assert texts[0].endswith("(giving what its name says)")


def test_a_mode_that_asks_for_ever_more_keys_is_compared_by_name() -> None:
    calls = list[int]()

    def endless(step: ModeInputs) -> Any:
        calls.append(len(calls))
        return step.tokens(f"key{len(calls)}")

    assert LossModes.resolve(endless).describe().endswith("(giving what its name says)")
    assert len(calls) < 100

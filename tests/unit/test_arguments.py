"""The flags: what they parse to, what validation makes of them, and what it refuses."""

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_rl_loss.reducers import build_reducer

from megatron_rl_loss import MODES, ReducerInputs, Samples, StepTotals, reducers, register_pg_loss_reducer
from megatron_rl_loss.arguments import (
    AggregationSettings,
    add_loss_aggregation_args,
    load_reducer_factory,
    validate_loss_aggregation_args,
)

MODULE = "a_users_reducers"
SOURCE = """
import functools

def plain_sum(inputs):
    return inputs.weighted_sum(inputs.samples.loss_masks)

scaled = functools.partial(plain_sum)

class Sum:
    def __call__(self, inputs):
        return plain_sum(inputs)

instance = Sum()
number = 3
"""


@pytest.fixture(autouse=True)
def a_module_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "_REGISTERED", {})


def parse(*flags: str) -> Namespace:
    """Through argparse, between two other providers as Megatron chains them; unknown flags are let pass, as it does."""

    def others(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--rollouts", default="none")
        return parser

    def megatron(parser: ArgumentParser) -> ArgumentParser:
        group = parser.add_argument_group("megatron")
        group.add_argument("--calculate-per-token-loss", action="store_true")
        group.add_argument("--ddp-average-in-collective", action="store_true")
        group.add_argument("--use-torch-fsdp2", action="store_true")
        group.add_argument("--hybrid-context-parallel", action="store_true")
        group.add_argument("--cuda-graph-impl", default="none")
        return parser

    return megatron(add_loss_aggregation_args(others(ArgumentParser()))).parse_known_args(flags)[0]


def validated(*flags: str, **changes: Any) -> AggregationSettings:
    """What validation makes of the flags, and then of `changes` to the parsed values; args must stay as they were."""
    args = Namespace(**(vars(parse(*flags)) | changes))
    before = copy.deepcopy(vars(args))
    settings = validate_loss_aggregation_args(args)
    assert vars(args) == before
    return settings


def test_the_provider_returns_its_parser() -> None:
    parser = ArgumentParser()
    assert add_loss_aggregation_args(parser) is parser


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"mode": "sample_mean"}),
        ("--loss-aggregation sample_mean", {"mode": "sample_mean"}),
        ("--loss-aggregation prompt_mean", {"mode": "prompt_mean"}),
        ("--loss-aggregation token_mean", {"mode": "token_mean"}),
        ("--loss-aggregation constant --loss-aggregation-divisor 40960", {"mode": "constant", "divisor": 40960.0}),
        ("--loss-aggregation constant --loss-aggregation-divisor 0.5", {"mode": "constant", "divisor": 0.5}),
        ("--loss-aggregation token_sum", {"mode": "token_sum"}),
        ("--loss-aggregation token_sum --loss-aggregation-divisor 8", {"mode": "token_sum", "divisor": 8.0}),
        ("--loss-aggregation-units active", {"mode": "sample_mean", "units": "active"}),
        ("--loss-aggregation-empty-step error", {"mode": "sample_mean", "empty_step": "error"}),
        ("--loss-aggregation token_mean --calculate-per-token-loss", {"mode": "token_mean"}),
        (
            "--loss-aggregation prompt_mean --calculate-per-token-loss --loss-aggregation-with-per-token-loss",
            {"mode": "prompt_mean", "with_per_token_loss": True},
        ),
        ("--rollouts x --unknown-flag 3 --loss-aggregation token_mean", {"mode": "token_mean"}),
    ],
)
def test_settings(flags: str, expected: dict[str, Any]) -> None:
    assert validated(*flags.split()) == AggregationSettings(**expected)


def test_per_token_loss_alone_means_token_mean_and_says_so() -> None:
    settings = validated("--calculate-per-token-loss")
    assert settings.mode == "token_mean"
    assert settings.notice is not None
    assert "--calculate-per-token-loss without --loss-aggregation" in settings.notice
    for flags in ([], ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"]):
        assert validated(*flags).notice is None


def test_defaults_of_megatron_may_be_absent() -> None:
    """A Namespace with our flags alone, as an own launcher makes it."""
    flags = vars(add_loss_aggregation_args(ArgumentParser()).parse_args([]))
    assert validate_loss_aggregation_args(Namespace(**flags)) == AggregationSettings()


@pytest.mark.parametrize(
    ("settings", "line", "uses_prompt_ids"),
    [
        (AggregationSettings(), "loss aggregation: sample_mean, units: all", False),
        (AggregationSettings(mode="token_mean"), "loss aggregation: token_mean, units: all", False),
        (AggregationSettings(mode="prompt_mean", units="active"), "loss aggregation: prompt_mean, units: active", True),
        (
            AggregationSettings(mode="constant", divisor=40960.0),
            "loss aggregation: constant, divisor 40960, units: all",
            False,
        ),
    ],
)
def test_describe(settings: AggregationSettings, line: str, uses_prompt_ids: bool) -> None:
    assert settings.describe() == line
    assert settings.uses_prompt_ids is uses_prompt_ids


# --- the user's own reducer


@pytest.mark.parametrize("path", [f"{MODULE}.plain_sum", f"{MODULE}:plain_sum"])
@pytest.mark.parametrize("mode", ["", "--loss-aggregation sample_mean"])
def test_both_spellings_of_a_path_load(path: str, mode: str) -> None:
    settings = validated("--custom-pg-loss-reducer-function-path", path, *mode.split())
    masks = [torch.tensor([1.0, 0.0, 0.5])]
    reducer = build_reducer(settings.mode, ReducerInputs(samples=Samples(masks), totals=StepTotals()))
    assert float(reducer(torch.tensor([2.0, float("nan"), 4.0]))) == 4
    assert settings.uses_prompt_ids
    assert settings.describe() == f"loss aggregation: {MODULE}.plain_sum, units: all"


def test_a_path_into_a_package() -> None:
    assert load_reducer_factory("os.path:join") is load_reducer_factory("os.path.join")


@pytest.mark.parametrize("name", ["scaled", "instance"])
def test_any_callable_can_be_described(name: str) -> None:
    """A functools.partial or an object with __call__ has no __qualname__."""
    settings = validated(
        "--custom-pg-loss-reducer-function-path", f"{MODULE}:{name}", "--loss-aggregation-divisor", "8"
    )
    assert "divisor 8" in settings.describe()
    with pytest.raises(ValueError, match="--calculate-per-token-loss with"):
        validated("--custom-pg-loss-reducer-function-path", f"{MODULE}:{name}", "--calculate-per-token-loss")


def test_a_registered_name_is_a_mode() -> None:
    with pytest.raises(ValueError, match="'mine': there is no such mode"):
        validated("--loss-aggregation", "mine")
    register_pg_loss_reducer("mine")(lambda inputs: inputs.weighted_sum(inputs.samples.loss_masks))
    settings = validated("--loss-aggregation", "mine", "--loss-aggregation-divisor", "3")
    assert (settings.mode, settings.divisor, settings.uses_prompt_ids) == ("mine", 3.0, True)


# --- refusals, each beside its nearest legal neighbour

Call = Callable[[], Any]
PATH = f"--custom-pg-loss-reducer-function-path {MODULE}:plain_sum"


def flags(line: str, **changes: Any) -> Call:
    return lambda: validated(*line.split(), **changes)


def custom(path: str) -> Call:
    return flags(f"--custom-pg-loss-reducer-function-path {path}")


REFUSALS: dict[str, tuple[Call, type[Exception], str, Call]] = {
    # refused flags, error, fragment of its text, accepted neighbour
    "unknown mode": (
        flags("--loss-aggregation dapo"),
        ValueError,
        f"'dapo': there is no such mode. Choose one of {', '.join(MODES)}",
        flags("--loss-aggregation token_mean"),
    ),
    "constant without a divisor": (
        flags("--loss-aggregation constant"),
        ValueError,
        "'constant' without a divisor.*--loss-aggregation-divisor 40960",
        flags("--loss-aggregation constant --loss-aggregation-divisor 40960"),
    ),
    "divisor with another mode": (
        flags("--loss-aggregation token_mean --loss-aggregation-divisor 8"),
        ValueError,
        "divisor 8.0 with loss aggregation 'token_mean'",
        flags("--loss-aggregation constant --loss-aggregation-divisor 8"),
    ),
    "divisor after a misspelt mode flag": (  # parse_known_args lets the misspelt flag pass
        flags("--loss-agregation constant --loss-aggregation-divisor 8"),
        ValueError,
        "divisor 8.0 with loss aggregation 'sample_mean'",
        flags("--loss-aggregation constant --loss-aggregation-divisor 8"),
    ),
    "divisor with per-token loss alone": (
        flags("--calculate-per-token-loss --loss-aggregation-divisor 8"),
        ValueError,
        "'token_mean': only 'constant' and 'token_sum' have a divisor",
        flags("--calculate-per-token-loss"),
    ),
    **{
        f"divisor {value}": (
            flags(f"--loss-aggregation constant --loss-aggregation-divisor {value}"),
            ValueError,
            "it must be finite and above 0",
            flags("--loss-aggregation constant --loss-aggregation-divisor 1e-3"),
        )
        for value in ("0", "-1", "nan", "inf", "1e30")
    },
    "divisor not a number": (
        flags("--loss-aggregation constant", loss_aggregation_divisor="8"),
        TypeError,
        "divisor '8' \\(str\\): it must be a number",
        flags("--loss-aggregation constant", loss_aggregation_divisor=8),
    ),
    "divisor unusable for an own reducer": (
        flags(f"{PATH} --loss-aggregation-divisor 0"),
        ValueError,
        "divisor 0.0",
        flags(f"{PATH} --loss-aggregation-divisor 1"),
    ),
    "unknown counting": (
        flags("", loss_aggregation_units="some"),
        ValueError,
        "'some': there is no such counting",
        flags("", loss_aggregation_units="active"),
    ),
    "unknown counting with an own reducer": (
        flags(PATH, loss_aggregation_units="some"),
        ValueError,
        "'some': there is no such counting",
        flags(PATH, loss_aggregation_units="active"),
    ),
    "unknown empty-step handling": (
        flags("", loss_aggregation_empty_step="skip"),
        ValueError,
        "'skip': there is no such handling. Choose warn or error",
        flags("", loss_aggregation_empty_step="error"),
    ),
    "per-token loss with another mode": (
        flags("--calculate-per-token-loss --loss-aggregation sample_mean"),
        ValueError,
        "--calculate-per-token-loss with loss aggregation: sample_mean.*add --loss-aggregation-with-per-token-loss",
        flags("--calculate-per-token-loss --loss-aggregation sample_mean --loss-aggregation-with-per-token-loss"),
    ),
    "per-token loss with an own reducer": (
        flags(f"--calculate-per-token-loss {PATH}"),
        ValueError,
        f"with loss aggregation: {MODULE}.plain_sum",
        flags(f"--calculate-per-token-loss {PATH} --loss-aggregation-with-per-token-loss"),
    ),
    "own reducer with a mode": (
        flags(f"{PATH} --loss-aggregation token_mean"),
        ValueError,
        f"{MODULE}:plain_sum with --loss-aggregation token_mean: only one",
        flags(PATH),
    ),
    "path without a module": (
        custom("plain_sum"),
        ValueError,
        "'plain_sum': it must name a module and a function",
        custom(f"{MODULE}.plain_sum"),
    ),
    "path without a function": (
        custom(f"{MODULE}:"),
        ValueError,
        "Write pkg.mod.fn or pkg.mod:fn",
        custom(f"{MODULE}:plain_sum"),
    ),
    "path starting with a colon": (
        custom(":plain_sum"),
        ValueError,
        "must name a module",
        custom(f"{MODULE}:plain_sum"),
    ),
    "no such module": (
        custom("no_such_module.f"),
        ValueError,
        "does not load .*No module named 'no_such_module'",
        custom(f"{MODULE}.plain_sum"),
    ),
    "no such function": (
        custom(f"{MODULE}:plain_sums"),
        ValueError,
        "does not load .*no attribute 'plain_sums'",
        custom(f"{MODULE}:plain_sum"),
    ),
    "not a function": (
        custom(f"{MODULE}:number"),
        TypeError,
        "it is a int, not a function of ReducerInputs",
        custom(f"{MODULE}:plain_sum"),
    ),
    "hybrid context parallel": (
        flags("--hybrid-context-parallel"),
        ValueError,
        "--hybrid-context-parallel: the context-parallel group changes",
        flags("", context_parallel_size=4),
    ),
    "dynamic context parallel": (
        flags("", dynamic_context_parallel=True),
        ValueError,
        "--dynamic-context-parallel: ",
        flags("", dynamic_context_parallel=False),
    ),
    "GTP": (flags("", gtp_weight_remat_size=2), ValueError, r"\(GTP\)", flags("", gtp_weight_remat_size=1)),
    "GTP of experts": (
        flags("", expert_gtp_weight_remat_size=2),
        ValueError,
        r"\(GTP\)",
        flags("", expert_gtp_weight_remat_size=None),
    ),
    "full-iteration CUDA graphs": (
        flags("--cuda-graph-impl full_iteration"),
        ValueError,
        "--cuda-graph-impl full_iteration: ",
        flags("--cuda-graph-impl local"),
    ),
    "per-token loss on Torch FSDP2": (
        flags("--calculate-per-token-loss --use-torch-fsdp2"),
        ValueError,
        "per-token loss with --use-torch-fsdp2",
        flags("--use-torch-fsdp2"),
    ),
    "per-token loss averaged in the collective": (
        flags("--calculate-per-token-loss --ddp-average-in-collective"),
        ValueError,
        "per-token loss with --ddp-average-in-collective",
        flags("--ddp-average-in-collective"),
    ),
}


@pytest.mark.parametrize(("refused", "error", "fragment", "accepted"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(refused: Call, error: type[Exception], fragment: str, accepted: Call) -> None:
    with pytest.raises(error, match=fragment) as caught:
        refused()
    assert caught.type is error
    accepted()


FLAGS = sorted(vars(add_loss_aggregation_args(ArgumentParser()).parse_args([])))


@pytest.mark.parametrize("name", FLAGS)
def test_a_missing_flag_is_named(name: str) -> None:
    args = parse()
    delattr(args, name)
    with pytest.raises(ValueError, match=f"args without {name}: the flags were never registered.*extra_args_provider"):
        validate_loss_aggregation_args(args)
    args.yaml_cfg = "run.yaml"
    with pytest.raises(ValueError, match=f"args without {name}: --yaml-cfg replaces all parsed flags"):
        validate_loss_aggregation_args(args)


def test_all_six_flags_are_missed_at_once() -> None:
    with pytest.raises(ValueError, match="args without") as caught:
        validate_loss_aggregation_args(Namespace())
    assert len(FLAGS) == 6
    assert all(name in str(caught.value) for name in FLAGS)


@pytest.mark.parametrize(
    "line",
    [
        "--loss-aggregation-units some",
        "--loss-aggregation-empty-step skip",
        "--loss-aggregation-divisor many",
        "--loss-aggregation",
        "--loss-agg token_mean",  # an abbreviation of several flags
    ],
)
def test_argparse_refuses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*line.split())
    assert line.split()[0] in capsys.readouterr().err


def test_a_factory_need_not_come_from_a_flag() -> None:
    factory = partial(
        lambda inputs, scale: inputs.weighted_sum([m * scale for m in inputs.samples.loss_masks]), scale=2
    )
    settings = AggregationSettings(mode=factory)
    reducer = build_reducer(settings.mode, ReducerInputs(samples=Samples([torch.ones(2)]), totals=StepTotals()))
    assert float(reducer(torch.ones(2))) == 4

"""The flags: what they parse to, what validation makes of them, and what it refuses."""

import copy
import re
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Call, Refusal, refusal_tests

from megatron_rl_loss import (
    LossAggregation,
    Samples,
    StepTotals,
    add_loss_aggregation_args,
    make_pg_loss_reducer,
    register_pg_loss_reducer,
)
from megatron_rl_loss.megatron.flags import (
    AggregationSettings,
    check_command_line,
    modes_of_checkpoint,
    validate_loss_aggregation_args,
)

MODULE = "a_users_modes"
SOURCE = """
import functools
from megatron_rl_loss import register_pg_loss_reducer

def plain_sum(inputs):
    return 1

scaled = functools.partial(plain_sum)
registered = register_pg_loss_reducer("of_a_user")(plain_sum)
number = 3
"""


@pytest.fixture(autouse=True)
def a_module_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def parse(*flags: str) -> Namespace:
    """Args through argparse, beside flags of others; unknown flags pass, as in Megatron."""
    parser = add_loss_aggregation_args(ArgumentParser())
    parser.add_argument("--rollouts", default="none")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    return parser.parse_known_args(flags)[0]


def validated(*flags: str, **changes: Any) -> AggregationSettings:
    """The settings of validated flags, with `changes` to the parsed values; args must stay as they were."""
    args = Namespace(**(vars(parse(*flags)) | changes))
    before = copy.deepcopy(vars(args))
    settings = validate_loss_aggregation_args(args)
    assert vars(args) == before
    return settings


OVER = "--loss-aggregation"
SETTINGS: dict[str, dict[str, Any]] = {
    "": {"mode": "sample_mean"},
    f"{OVER} prompt_mean": {"mode": "prompt_mean"},
    f"{OVER} constant {OVER}-divisor 40960": {"mode": "constant", "divisor": 40960.0},
    f"{OVER} token_sum": {"mode": "token_sum"},
    f"{OVER} session_mean": {"mode": "session_mean"},
    f"{OVER} turn_mean {OVER}-units active": {"mode": "turn_mean", "units": "active"},
    f"{OVER}-units active": {"mode": "sample_mean", "units": "active"},
    f"{OVER}-empty-step error": {"mode": "sample_mean", "empty_step": "error"},
    f"{OVER}-audit-interval 100": {"mode": "sample_mean", "audit_interval": 100},
    f"{OVER} token_mean --calculate-per-token-loss": {"mode": "token_mean"},
    "--calculate-per-token-loss": {"mode": "token_mean"},
    f"{OVER} prompt_mean --calculate-per-token-loss {OVER}-with-per-token-loss": {
        "mode": "prompt_mean",
        "with_per_token_loss": True,
    },
    f"--rollouts x --unknown-flag 3 {OVER} token_mean": {"mode": "token_mean"},
    f"{OVER} verl:seq-mean-token-sum-norm {OVER}-divisor 4096": {"mode": "constant", "divisor": 4096.0},
    f"{OVER} openrlhf:token_level_loss=false": {"mode": "sample_mean", "units": "active"},
    f"{OVER} constant {OVER}-divisor 8 --kl{OVER[1:]} token_mean --value{OVER[1:]} constant": {
        "mode": "constant",
        "divisor": 8.0,
        "terms": {"kl": "token_mean", "value": "constant"},
    },
}


@pytest.mark.parametrize(("flags", "expected"), SETTINGS.items(), ids=SETTINGS)
def test_settings(flags: str, expected: dict[str, Any]) -> None:
    assert validated(*flags.split()) == AggregationSettings.resolve(**expected)


def test_the_flag_of_each_field_sets_it() -> None:
    for field in fields(AggregationSettings):
        if field.name == "modes":
            continue
        flag, row = f"{OVER}-{field.name.replace('_', '-')}", field.metadata
        if row.get("action") == "store_true":
            assert (getattr(validated(), field.name), getattr(validated(flag), field.name)) == (False, True)
            continue
        for value in row.get("choices", (7,)):
            assert getattr(validated(flag, str(value)), field.name) == value


# --- a file of flags

LINES = """
loss_aggregation: constant  # a comment
loss_aggregation_divisor: 8
loss_aggregation_units: active
kl_loss_aggregation: token_mean
loss_aggregation_proof: off
loss_aggregation_audit_interval: 7
loss_aggregation_with_per_token_loss: true
"""
AS_FLAGS = (
    f"{OVER} constant {OVER}-divisor 8 {OVER}-units active --kl-loss-aggregation token_mean {OVER}-proof off "
    f"{OVER}-audit-interval 7 {OVER}-with-per-token-loss"
)


def in_file(tmp_path: Path, lines: str) -> list[str]:
    (tmp_path / "run.yaml").write_text(lines)
    return ["--loss-aggregation-config", str(tmp_path / "run.yaml")]


def test_a_file_says_what_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    expected, words = validated(*AS_FLAGS.split()), in_file(tmp_path, LINES)
    assert validated(*words) == expected
    assert validated(*words, f"{OVER}-divisor", "8.0", "--rollouts", "x") == expected  # says the same
    rest = in_file(tmp_path, LINES.replace("loss_aggregation_divisor: 8\n", ""))
    assert validated(*rest, f"{OVER}-divisor=8") == expected  # adds to it
    monkeypatch.setattr(sys, "argv", ["script.py", *in_file(tmp_path, LINES)])
    assert validate_loss_aggregation_args(add_loss_aggregation_args(ArgumentParser()).parse_args()) == expected
    for word in ("True", "False"):
        given = [f"{OVER}-with-per-token-loss"] * (word == "True")
        assert validated(*in_file(tmp_path, f"loss_aggregation_with_per_token_loss: {word}")) == validated(*given)
    path = f"custom_pg_loss_reducer_function_path: {MODULE}:registered"
    assert validated(*in_file(tmp_path, path)).modes.policy.mode.name == "of_a_user"


def test_other_flags_are_not_taken_for_short_ones(tmp_path: Path) -> None:
    """A parser's own flags may begin as ours do; where it takes short flags, these are compared with the file, too."""
    pytest.importorskip("yaml")
    lines = "loss_aggregation: constant\nloss_aggregation_divisor: 8\nentropy_loss_aggregation: token_mean"
    words, parser = in_file(tmp_path, lines), add_loss_aggregation_args(ArgumentParser())
    for name in ("--entropy", "--loss"):
        parser.add_argument(name)
    args = parser.parse_args([*words, "--entropy", "0.1", "--loss", "x", f"{OVER}-div", "8"])
    assert (args.entropy, args.loss, args.entropy_loss_aggregation) == ("0.1", "x", "token_mean")
    with pytest.raises(ValueError, match=r"--loss-aggregation-divisor 9\.0 with loss_aggregation_divisor: 8\.0 in"):
        parser.parse_args([*words, f"{OVER}-div", "9"])


def test_a_parsers_defaults_and_a_given_namespace_are_kept(tmp_path: Path) -> None:
    parser = add_loss_aggregation_args(ArgumentParser())
    parser.set_defaults(loss_aggregation="token_mean")
    assert parser.parse_args([]).loss_aggregation == "token_mean"
    assert parser.parse_args([], Namespace(loss_aggregation="prompt_mean")).loss_aggregation == "prompt_mean"
    pytest.importorskip("yaml")
    words = in_file(tmp_path, "loss_aggregation: session_mean")
    assert parser.parse_args(words).loss_aggregation == "session_mean"
    with pytest.raises(ValueError, match="prompt_mean with loss_aggregation: session_mean in"):
        parser.parse_args(words, Namespace(loss_aggregation="prompt_mean"))
    absent = add_loss_aggregation_args(ArgumentParser(argument_default=SUPPRESS)).parse_args([])
    assert not hasattr(absent, "loss_aggregation")


def test_every_flag_is_a_field(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    names = set(vars(add_loss_aggregation_args(ArgumentParser()).parse_args([]))) - {"loss_aggregation_config"}
    with pytest.raises(ValueError, match="there is no such field") as caught:
        parse(*in_file(tmp_path, "some: 1"))
    assert set(str(caught.value).partition("one of ")[2].rstrip(".").split(", ")) == names


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        (LINES, f"{OVER}-divisor 9", "--loss-aggregation-divisor 9.0 with loss_aggregation_divisor: 8.0 in "),
        (
            "loss_aggregation_empty_step: error",
            f"{OVER}-empty-step warn",
            "warn with loss_aggregation_empty_step: error",
        ),
        (
            "loss_aggregation_with_per_token_loss: false",
            f"{OVER}-with-per-token-loss",
            "loss True with loss_aggregation_with_per_token_loss: False",
        ),
        (LINES + "loss_aggregation_divisor: 9", "", "loss_aggregation_divisor has several lines"),
        ("loss_aggregation_divisors: 8", "", "Did you mean loss_aggregation_divisor?"),
        ("loss-aggregation: constant", "", "Did you mean loss_aggregation?"),
        ("loss_aggregation_config: other.yaml", "", "there is no such field"),
        ("loss_aggregation_divisor: many", "", "argument --loss-aggregation-divisor: invalid float value: 'many'"),
        ("loss_aggregation_units: some", "", "argument --loss-aggregation-units: invalid choice: 'some'"),
        ("loss_aggregation_with_per_token_loss: 2", "", "Choose one of true, false"),
        ("loss_aggregation: [a, b]", "", r"loss_aggregation is ['a', 'b']: it must be one value"),
        ("loss_aggregation:", "", "loss_aggregation is '': it must be one value"),
        ("- loss_aggregation", "", "the file must hold names and values"),
        ("", "", "the file must hold names and values"),
        ("a: b: c", "", "the file is no YAML"),
        ("loss_aggregation: constant", "", "'constant' without a divisor"),
    ],
)
def test_an_unusable_file_is_refused(lines: str, flags: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(*in_file(tmp_path, lines), *flags.split())


def test_a_file_that_is_not_there_and_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = in_file(tmp_path, LINES)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"run\.yaml: the file needs PyYAML.*Run pip install pyyaml"):
        parse(*words)
    monkeypatch.undo()
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        parse("--loss-aggregation-config", str(tmp_path / "other.yaml"))
    (tmp_path / "run.yaml").write_bytes(b"loss_aggregation: token_m\xe9an")
    with pytest.raises(ValueError, match=r"the file is no YAML \('utf-8' codec"):
        parse(*words)


# --- the user's own mode


@pytest.mark.parametrize("name", [".plain_sum", ":plain_sum", ":scaled", ":registered"])
def test_a_path_loads(name: str) -> None:
    """Both spellings load; a functools.partial has no __qualname__ to be described by; a registered mode is one."""
    path = ["--custom-pg-loss-reducer-function-path", f"{MODULE}{name}"]
    settings = validated(*path, "--loss-aggregation-divisor", "8")
    masks = [torch.tensor([1.0, 0.0, 0.5])]
    reducer = make_pg_loss_reducer(settings.modes.policy.mode, masks, totals=StepTotals.of(masks), divisor=8)
    assert float(reducer(torch.tensor([2.0, float("nan"), 4.0]))) == 4
    shown = "of_a_user" if name == ":registered" else f"{MODULE}.plain_sum"
    assert settings.modes.policy.describe() == f"loss aggregation: {shown}, divisor 8"


def test_a_registered_name_is_a_mode() -> None:
    with pytest.raises(ValueError, match="'mine': there is no such mode"):
        validated("--loss-aggregation", "mine")
    register_pg_loss_reducer("mine")(lambda inputs: 1)
    policy = validated("--loss-aggregation", "mine", "--loss-aggregation-divisor", "3").modes.policy
    assert (policy.mode.name, policy.divisor) == ("mine", 3.0)


# --- refusals, each beside its nearest legal neighbour; the others, by Megatron's parser: test_bad_input.py


PATH = f"--custom-pg-loss-reducer-function-path {MODULE}:plain_sum"


def flags(line: str, **changes: Any) -> Call:
    return lambda: validated(*line.split(), **changes)


def custom(path: str) -> Call:
    return flags(f"--custom-pg-loss-reducer-function-path {path}")


PLAIN = custom(f"{MODULE}:plain_sum")
REFUSALS: dict[str, Refusal] = {
    "divisor with per-token loss alone": (
        flags("--calculate-per-token-loss --loss-aggregation-divisor 8"),
        ValueError,
        "divisor 8.0 with loss aggregation 'token_mean': this mode takes none",
        flags("--calculate-per-token-loss"),
    ),
    "per-token loss with an own mode": (
        flags(f"--calculate-per-token-loss {PATH}"),
        ValueError,
        f"with mode {MODULE}.plain_sum",
        flags(f"--calculate-per-token-loss {PATH} --loss-aggregation-with-per-token-loss"),
    ),
    "path without a function": (custom(f"{MODULE}:"), ValueError, "Write pkg.mod.fn or pkg.mod:fn", PLAIN),
}


test_refusals = refusal_tests(REFUSALS)


def test_missing_flags_are_named() -> None:
    names = sorted(vars(add_loss_aggregation_args(ArgumentParser()).parse_args([])))
    for name in names:
        args = parse()
        delattr(args, name)
        for text in ("the flags were never registered.*extra_args_provider", "--yaml-cfg replaces all parsed flags"):
            with pytest.raises(ValueError, match=f"args without {name}: {text}"):
                validate_loss_aggregation_args(args)
            args.yaml_cfg = "run.yaml"
    with pytest.raises(ValueError, match="args without") as caught:
        validate_loss_aggregation_args(Namespace())
    assert all(name in str(caught.value) for name in names)


def test_the_modes_of_a_checkpoint_are_those_of_its_flags() -> None:
    """Names of one mode are one; flags that a checkpoint lacks have their defaults; what does not load is said."""
    assert modes_of_checkpoint(Namespace(num_layers=2)) is None
    saved = Namespace(loss_aggregation="verl:token-mean")
    assert modes_of_checkpoint(saved) == validated("--loss-aggregation", "token_mean").modes.describe()
    saved = Namespace(loss_aggregation=None, calculate_per_token_loss=True, kl_loss_aggregation="sample_mean")
    flags_of_it = ["--calculate-per-token-loss", "--kl-loss-aggregation", "sample_mean"]
    assert modes_of_checkpoint(saved) == validated(*flags_of_it).modes.describe()
    assert modes_of_checkpoint(parse(*PATH.split())) == validated(*PATH.split()).modes.describe()
    gone = Namespace(loss_aggregation=None, custom_pg_loss_reducer_function_path="no_such_file.fn")
    assert "cannot be loaded here (--custom-pg-loss" in (modes_of_checkpoint(gone) or "")


def test_checkpoints_with_the_same_mode_or_without_flags_pass(caplog: pytest.LogCaptureFixture) -> None:
    aggregation = LossAggregation.from_args(parse("--loss-aggregation", "token_mean"), lambda batch: Samples([]))
    for saved in (Namespace(num_layers=2), Namespace(loss_aggregation="verl:token-mean")):
        aggregation._compare_with_checkpoint(saved)
    assert caplog.messages == []
    aggregation._compare_with_checkpoint(Namespace(loss_aggregation="sample_mean"))
    (told,) = caplog.messages
    assert "token_mean; the checkpoint was trained with loss aggregation: sample_mean" in told


def test_misspelt_flags_on_the_command_line_are_named() -> None:
    args = parse()
    check_command_line(args, ["--loss-aggregation=token_mean", "--rollouts", "x", "--lost", "file"])
    for option in ("--loss-agregation", "--loss-aggregation-divisors", "--los-aggregation-units"):
        with pytest.raises(
            ValueError, match=f"{option} on the command line: there is no such flag.*Write --loss-aggreg"
        ):
            check_command_line(args, [f"{option}=8"])

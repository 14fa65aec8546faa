"""`python -m megatron_rl_loss modes MODE`: the weights of README's small step are the oracle's."""

import re
import sys

import oracle
import pytest

from megatron_rl_loss.__main__ import LOSSES, MASKS, format_weights, main
from megatron_rl_loss.engines.names import format_versions


def test_its_step_is_the_one_that_is_worked_out_by_hand() -> None:
    assert [sample.losses.tolist() for sample in oracle.WORKED] == LOSSES
    assert [sample.mask.tolist() for sample in oracle.WORKED] == MASKS
    assert [sample.prompt_id for sample in oracle.WORKED] == [0, 0, 1, 1]  # the table's a, a, b, b


@pytest.mark.parametrize("units", oracle.BY_MASKS)
@pytest.mark.parametrize("mode", [*oracle.MODES, *oracle.BY_IDS])
def test_the_table_has_the_oracles_weights(
    mode: str, units: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    divisor = oracle.divisor_of(mode, oracle.WORKED_DIVISOR, optional=True)
    flags = ["--loss-aggregation-units", units] + (["--loss-aggregation-divisor", f"{divisor}"] if divisor else [])
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", mode, *flags])
    assert main() == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\d +([ab]) +([s-u]) +([\d. ]+)$", printed, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [("a", "s"), ("a", "s"), ("b", "t"), ("b", "u")]
    if mode in oracle.MODES:
        expected = oracle.step_weights(mode, oracle.WORKED, divisor, units)
        assert f"loss is {oracle.step_loss(mode, oracle.WORKED, divisor, units):.6f}." in printed
    else:
        turns: list[list[object]] = [[0, 0, 1, 1], [2, 2], [3, 3, "", 4, "", ""], [""]]
        expected = oracle.weights_by_ids(mode, [row.mask for row in oracle.WORKED], ["s", "s", "t", "u"], turns, units)
    for (*_, shown), weights in zip(rows, expected, strict=True):
        assert list(map(float, shown.split())) == pytest.approx(weights, abs=5.1e-5)  # four decimals are printed


def test_names_of_other_frameworks_are_shown() -> None:
    ours, theirs = (format_weights(mode).split(": ", 1) for mode in ("sample_mean", "verl:seq-mean-token-mean"))
    assert ours[1] == theirs[1]


def test_a_name_is_said_by_version_and_one_that_differs_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", "verl:gspo"])
    with pytest.raises(SystemExit):
        main()
    printed, errors = capsys.readouterr()
    assert printed.startswith(format_versions("verl:gspo"))
    assert "response  prompt" not in printed
    assert "Write yours: verl@1dda039b:gspo or verl@0.9.1:gspo" in " ".join(errors.split())
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", "verl@0.9.0:gspo"])
    assert main() == 0
    assert capsys.readouterr().out.strip().endswith(format_weights("sample_mean").partition(": ")[2])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt"], "there is no such mode"),
        (["constant"], "--loss-aggregation-divisor 40960"),
        (["sample_mean", "--loss-aggregation-divisor", "3"], "this mode takes none"),
        (["token_mean", "--loss-aggregation-units", "some"], f"Choose one of {', '.join(oracle.UNITS)}"),
        (["--loss-aggregation-units", "active"], "flags without a mode"),
    ],
)
def test_misuse_is_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", *words])
    with pytest.raises(SystemExit):
        main()
    assert says in " ".join(capsys.readouterr().err.split())

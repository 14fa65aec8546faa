"""`python -m megatron_rl_loss modes MODE`: the weights of README's small step are the oracle's."""

import json
import re
import sys
from pathlib import Path

import oracle
import pytest

from megatron_rl_loss.__main__ import LOSSES, MASKS, format_weights, main
from megatron_rl_loss.engines.names import NAMES, NUMBER, differs_by_version, format_versions


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
    assert main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith(format_versions("verl:gspo"))
    assert "response  prompt" not in printed
    assert printed.strip().endswith("For weights write one: verl@1dda039b:gspo.")
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", "verl@0.9.0:gspo"])
    assert main() == 0
    assert capsys.readouterr().out.strip().endswith(format_weights("sample_mean").partition(": ")[2])


def printed_by(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", *words])
    assert main() == 0
    return capsys.readouterr().out


def test_a_framework_and_all_of_them_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = printed_by([], monkeypatch, capsys)
    everything = printed_by(["--all"], monkeypatch, capsys)
    assert everything.startswith(screen.strip())
    (verl_text,) = re.findall(r"^(verl, .*?)\n\n", everything, flags=re.MULTILINE | re.DOTALL)
    assert verl_text in printed_by(["verl"], monkeypatch, capsys)
    assert "\nslime, " not in printed_by(["verl"], monkeypatch, capsys)


@pytest.mark.parametrize("spelt", ["OpenRLHF", "NeMo-RL", "VERL", "SkyRL:prompt_mean", "NeMo-RL:token_level_loss=true"])
def test_a_framework_is_found_as_it_spells_itself(
    spelt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = spelt.lower().replace("-", "_")
    assert printed_by([spelt], monkeypatch, capsys) == printed_by([ours], monkeypatch, capsys) != ""


def test_the_hint_for_a_framework_without_a_setting_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="It is a framework") as refused:
        format_weights("openrlhf")
    (hinted,) = re.findall(r"python -m megatron_rl_loss (.*) lists them", str(refused.value))
    command, *words = hinted.split()
    assert command == "modes"
    assert "openrlhf:token-mean" in printed_by(words, monkeypatch, capsys)


def test_the_hint_for_a_name_whose_versions_differ_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every such name, with a number in the place of N and D."""
    names = {f"{peer.framework}:{peer.name.replace(NUMBER, '8')}" for peer in NAMES}
    hinted = 0
    for name in sorted(name for name in names if differs_by_version(name)):
        printed = printed_by([name], monkeypatch, capsys).strip()
        choices = printed.rpartition("For weights write one: ")[2] if "write one: " in printed else ""
        for choice in filter(None, choices.removesuffix(".").split(" or ")):
            words = choice.replace(" D", " 8").split()
            assert "response  prompt" in printed_by(words, monkeypatch, capsys), choice
            hinted += 1
    assert hinted


def test_the_same_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(printed_by(["--json", "-"], monkeypatch, capsys))
    assert {row["name"] for row in data["modes"]} >= set(oracle.MODES)
    assert set(data["units"]) == set(oracle.UNITS)
    assert sum(len(row["names"]) for row in data["frameworks"].values()) == len(NAMES)
    assert data["frameworks"]["verl"] == json.loads(printed_by(["verl", "--json", "-"], monkeypatch, capsys))
    out = tmp_path / "weights.json"
    words = ["verl:seq-mean-token-sum-norm", "--divisor", "8", "--json", str(out)]
    assert printed_by(words, monkeypatch, capsys) == ""
    step = json.loads(out.read_text())
    assert (step["mode"], step["divisor"], step["units"]) == ("constant", 8.0, "all")
    expected = oracle.step_weights("constant", oracle.WORKED, 8.0, "all")
    for row, weights, losses, mask in zip(step["responses"], expected, LOSSES, MASKS, strict=True):
        assert row["weights"] == pytest.approx(weights)
        assert (row["losses"], row["mask"]) == (losses, mask)
    assert step["loss"] == pytest.approx(oracle.step_loss("constant", oracle.WORKED, 8.0, "all"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verl", "--units", "active"], "flags without a mode"),
        (["sample_mean", "--all"], "--all with sample_mean"),
        (["--json", "no_folder/out.json"], "--json no_folder/out.json: the file cannot be written"),
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

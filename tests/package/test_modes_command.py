"""`python -m megatron_rl_loss modes MODE`: the weights of README's small step are the oracle's."""

import re
import sys

import oracle
import pytest

from megatron_rl_loss.__main__ import LOSSES, MASKS, format_weights, main


def test_its_step_is_the_one_that_is_worked_out_by_hand() -> None:
    assert [sample.losses.tolist() for sample in oracle.WORKED] == LOSSES
    assert [sample.mask.tolist() for sample in oracle.WORKED] == MASKS
    assert [sample.prompt_id for sample in oracle.WORKED] == [0, 0, 1, 1]  # the table's a, a, b, b


@pytest.mark.parametrize(("mode", "units"), oracle.WORKED_VALUES)
def test_the_table_has_the_oracles_weights(
    mode: str, units: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    divisor = oracle.WORKED_DIVISOR if mode in ("constant", "token_sum") else None
    flags = ["--loss-aggregation-units", units] + (["--loss-aggregation-divisor", f"{divisor}"] if divisor else [])
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "modes", mode, *flags])
    assert main() == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\d +[ab] +[st] +([\d. ]+)$", printed, flags=re.MULTILINE)
    shown = [list(map(float, row.split())) for row in rows]
    for weights, row in zip(oracle.step_weights(mode, oracle.WORKED, divisor, units), shown, strict=True):
        assert row == pytest.approx(weights, abs=5.1e-5)  # four decimals are printed
    assert f"loss is {oracle.WORKED_VALUES[mode, units]:.6f}." in printed


@pytest.mark.parametrize("mode", ["session_mean", "turn_mean", "verl:seq-mean-token-mean"])
def test_modes_of_ids_and_names_of_other_frameworks_are_shown(mode: str) -> None:
    assert re.search(r"^0 +a +s +0\.\d{4} ", format_weights(mode), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt"], "there is no such mode"),
        (["constant"], "--loss-aggregation-divisor 40960"),
        (["sample_mean", "--loss-aggregation-divisor", "3"], "this mode takes none"),
        (["token_mean", "--loss-aggregation-units", "some"], "Choose one of all, active"),
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

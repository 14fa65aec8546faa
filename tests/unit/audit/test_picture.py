"""The picture of a step: bars as high as weights, lines where they were asked to be; the same in a terminal."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import audit_picture
import numpy as np
import pytest
from counted_steps import Row, Step, measured, ragged
from published import exact, own_piece
from refusals import check_refusal

from megatron_rl_loss.audit.picture import draw, in_terminal
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.modes.names import resolve

TOKEN_MEAN = resolve("token_mean")
#: Two micro-batches on one rank: 2 and 4 tokens; and 6, behind one that is masked.
SMALL = measured(Step([[[Row((1.0,) * 2), Row((1.0,) * 4, 1)], [Row((0.0, *[1.0] * 6), 2)]]]), exact)
STEP = ragged(3, D=2, C=2, K=3)
OURS = measured(STEP, exact)
STOCK = measured(STEP, lambda t: np.where(t.m == 0, 0, own_piece(t)))


def shown(step: MeasuredStep, **options: Any) -> list[str]:
    return [line.split("  ")[1] for line in in_terminal(step, expected=TOKEN_MEAN, **options).splitlines()]


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_refusal(
        lambda: draw([("one", SMALL)], Path("out.png"), expected=TOKEN_MEAN),
        RuntimeError,
        r"out\.png: matplotlib draws it, and is not installed",
        lambda: shown(SMALL),
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1] * 6 + [0] + [1] * 6, ["▄▄|▄▄▄▄", "▄▄▄▄▄▄"]),
        ([0.5, 0, 1, 1.5, 2, 7, 0, 0.01, 0.25, 1, 1, np.nan, 1], ["▂-|▄▆██", "▁▁▄▄?▄"]),
        ([1] * 6 + [0.5] + [1] * 6, ["▄▄|▄▄▄▄", "!▄▄▄▄▄▄"]),  # masked tokens are shown if they are trained
    ],
)
def test_heights_in_a_terminal_are_measured_over_asked(weights: list[float], expected: list[str]) -> None:
    step = replace(SMALL, weights=np.array(weights) / 12)
    assert shown(step) == expected
    coloured = in_terminal(step, expected=TOKEN_MEAN, colour=True)
    assert "\033[34m" in coloured  # of CP rank 0
    assert re.sub(r"\033\[\d+m", "", coloured) == in_terminal(step, expected=TOKEN_MEAN)
    assert coloured.startswith("DP 0, micro-batch 0  ")


def test_long_lines_are_drawn_together_and_their_mean_stays() -> None:
    step = measured(ragged(3, D=1, C=2, K=2, samples=(6,), masked=0.0), exact)
    for width in (60, 80, 200):
        assert all(len(line) <= width for line in in_terminal(step, expected=TOKEN_MEAN, width=width).splitlines())
        assert set("".join(shown(step, width=width))) == {"▄", "|"}
    assert "\033[33m" in in_terminal(step, expected=TOKEN_MEAN, colour=True)  # of CP rank 1


def test_the_command_shows_steps_that_were_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit_picture.py", "--terminal"]
    for flag, one in {"--stock": STOCK, "--ours": OURS}.items():
        path = tmp_path / f"{flag[2:]}.json"
        path.write_text(one.to_json())
        command += [flag, str(path)]
    monkeypatch.setattr(sys, "argv", command)
    audit_picture.main()
    told = capsys.readouterr().out
    assert told.count("DP 0, micro-batch 0") == 2
    assert told.index("NOT SOUND: asked token_mean") < told.index("\nSOUND: token_mean")
    monkeypatch.setattr(sys, "argv", command[:-2])
    with pytest.raises(SystemExit):
        audit_picture.main()
    assert "--stock and --ours go together" in capsys.readouterr().err


def test_bars_are_as_high_as_weights_and_lines_are_where_they_should_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    panels = [("stock", STOCK), ("ours", OURS), ("all", measured(STEP, lambda t: 0 * t.m + 1 / t.T))]
    figure = draw(panels, tmp_path / "step.png", expected=TOKEN_MEAN)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    for place, (title, step) in zip(figure.axes, panels, strict=True):
        assert place.get_title(loc="left").strip() == title
        bars = sorted((bar.get_x(), bar.get_width(), bar.get_height(), bar.get_facecolor()) for bar in place.patches)
        active = step.tokens.mask != 0
        on = active | (title == "all")
        heights = np.repeat([height for *_, height, _ in bars], [round(width) for _, width, *_ in bars])
        np.testing.assert_allclose(heights, (step.weights * STEP.counted.T)[on], rtol=1e-5)
        red = sum(round(width) for _, width, _, colour in bars if to_hex(colour) == "#d62728")
        assert red == (~active).sum() * (title == "all")  # a colour of their own for masked tokens that are trained
        lines = [segment for lines in place.collections for segment in lines.get_segments()]
        assert {round(float(y), 5) for line in lines for _, y in line} == {1.0}
        assert sum(float(line[1][0] - line[0][0]) for line in lines) == pytest.approx(active.sum())
    assert "every token weighs what was asked" in [text.get_text() for text in figure.axes[1].texts]
    assert any("of the gradient's weight" in text.get_text() for text in figure.axes[0].texts)
    assert "a masked token that is trained" in [text.get_text() for text in figure.legends[0].get_texts()]

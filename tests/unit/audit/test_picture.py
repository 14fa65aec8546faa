"""The picture of a step: bars as high as weights, lines where they were asked to be."""

import sys
from pathlib import Path

import audit_picture
import numpy as np
import pytest
from counted_steps import measured, ragged
from published import exact, own_piece

from megatron_rl_loss.core.aggregation import resolve

STEP = ragged(3, D=2, C=2, K=3)
OURS = measured(STEP, exact)
STOCK = measured(STEP, lambda t: np.where(t.m == 0, 0, own_piece(t)))


def test_the_command_draws_both_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["audit_picture.py", "--out", str(tmp_path / "step.png")])
    monkeypatch.setattr(audit_picture, "measure", lambda *flags: OURS if flags else STOCK)
    audit_picture.main()
    told = capsys.readouterr().out
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert told.index("NOT SOUND: expected token_mean") < told.index("\nSOUND: token_mean")


def test_bars_are_as_high_as_weights_and_lines_are_where_they_should_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    panels = [("stock", STOCK), ("ours", OURS), ("all", measured(STEP, lambda t: 0 * t.m + 1 / t.T))]
    figure = audit_picture.draw(panels, tmp_path / "step.png", expected=resolve("token_mean"))
    for place, (title, step) in zip(figure.axes, panels, strict=True):
        assert place.get_title(loc="left").strip() == title
        bars = sorted((bar.get_x(), bar.get_width(), bar.get_height(), bar.get_facecolor()) for bar in place.patches)
        active = step.tokens.mask != 0
        heights = np.repeat([height for *_, height, _ in bars], [round(width) for _, width, *_ in bars])
        np.testing.assert_allclose(heights, (step.weights * STEP.counted.T)[active | (title == "all")], rtol=1e-5)
        red = sum(round(width) for _, width, _, colour in bars if to_hex(colour) == "#d62728")
        assert red == (~active).sum() * (title == "all")  # a colour of their own for masked tokens that are trained
        lines = [segment for lines in place.collections for segment in lines.get_segments()]
        assert {round(float(height), 5) for line in lines for _, height in line} == {1.0}
        assert sum(float(line[1][0] - line[0][0]) for line in lines) == pytest.approx(active.sum())
    assert "every token weighs what it should" in [text.get_text() for text in figure.axes[1].texts]
    assert any("on wrong tokens" in text.get_text() for text in figure.axes[0].texts)

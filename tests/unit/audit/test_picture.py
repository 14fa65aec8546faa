"""The picture of a step: bars as high as weights, lines where they were asked to be; the same in a terminal."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import audit_picture
import numpy as np
import pytest
from counted_steps import Row, Step, measured, ragged
from published import exact, own_piece
from refusals import check_refusal

from megatron_rl_loss.audit import MeasuredStep, draw, in_terminal
from megatron_rl_loss.modes.names import resolve

TOKEN_MEAN = resolve("token_mean")


def stock(step: Step) -> MeasuredStep:
    t = step.counted
    return measured(step, np.where(t.m == 0, 0, own_piece(t)))


def small() -> Step:
    """Two micro-batches on one rank: 2 and 4 tokens; and 6, one of which is masked."""
    first = [Row((1.0, 1.0), 0, 0), Row((1.0,) * 4, 1, 0)]
    return Step([[first, [Row((0.0, *[1.0] * 6), 2, 0)]]])


def without_matplotlib(step: MeasuredStep, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        draw([("one", step)], path, expected=TOKEN_MEAN)


MEASURED = measured(small(), exact)


def test_a_picture_without_matplotlib_is_refused() -> None:
    check_refusal(
        lambda: without_matplotlib(MEASURED, Path("out.png")),
        RuntimeError,
        r"out\.png: matplotlib draws it, and is not installed",
        lambda: in_terminal(MEASURED, expected=TOKEN_MEAN),
    )


# ---- in a terminal


def test_a_character_a_token() -> None:
    assert in_terminal(MEASURED, expected=TOKEN_MEAN).splitlines() == [
        "DP 0, micro-batch 0  ▄▄|▄▄▄▄",
        "DP 0, micro-batch 1  ▄▄▄▄▄▄",
    ]


def weighed(weights: Sequence[float]) -> str:
    return in_terminal(replace(MEASURED, weights=np.array(weights) / 12), expected=TOKEN_MEAN)


def test_heights_are_measured_over_asked() -> None:
    shown = weighed([0.5, 0, 1, 1.5, 2, 7, 0, 0.01, 0.25, 1, 1, np.nan, 1]).splitlines()
    assert shown == ["DP 0, micro-batch 0  ▂-|▄▆██", "DP 0, micro-batch 1  ▁▁▄▄?▄"]
    # Masked tokens are shown if they are trained.
    assert weighed([1] * 6 + [0.5] + [1] * 6).splitlines()[1] == "DP 0, micro-batch 1  !▄▄▄▄▄▄"


def test_long_lines_are_drawn_together_and_their_mean_stays() -> None:
    step = measured(ragged(3, D=1, C=1, K=2, samples=(6,), masked=0.0), exact)
    for width in (60, 80, 200):
        lines = in_terminal(step, expected=TOKEN_MEAN, width=width).splitlines()
        assert all(len(line) <= width for line in lines)
        assert set("".join(line.split("  ")[1] for line in lines)) == {"▄", "|"}


def test_colours_follow_cp_ranks() -> None:
    step = measured(ragged(3, D=1, C=2, K=2), exact)
    plain, coloured = (in_terminal(step, expected=TOKEN_MEAN, colour=colour) for colour in (False, True))
    assert "\033[34m" in coloured
    assert "\033[33m" in coloured
    assert re.sub(r"\033\[\d+m", "", coloured) == plain


def test_the_command_shows_steps_that_were_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ragged(3, D=2, C=2, K=3)
    files = {"--stock": stock(step), "--ours": measured(step, exact)}
    command = ["audit_picture.py", "--terminal"]
    for flag, one in files.items():
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


# ---- by matplotlib


def test_bars_are_as_high_as_weights_and_lines_are_where_they_should_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = ragged(3, D=2, C=2, K=3)
    panels = [("stock", stock(step)), ("ours", measured(step, exact))]
    figure = draw(panels, tmp_path / "step.png", expected=TOKEN_MEAN)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    for place, (title, shown) in zip(figure.axes, panels, strict=True):
        assert place.get_title(loc="left").strip() == title
        bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in place.patches]
        on = shown.tokens.mask != 0
        heights = np.repeat([h for _, _, h in sorted(bars)], [round(w) for _, w, _ in sorted(bars)])
        np.testing.assert_allclose(heights, (shown.weights * step.counted.T)[on], rtol=1e-5)
        lines = [segment for lines in place.collections for segment in lines.get_segments()]
        assert {round(float(y), 5) for line in lines for _, y in line} == {1.0}
        assert sum(float(line[1][0] - line[0][0]) for line in lines) == pytest.approx(on.sum())
    assert "every token weighs what was asked" in [text.get_text() for text in figure.axes[1].texts]
    assert any("of the gradient's weight" in text.get_text() for text in figure.axes[0].texts)


def test_trained_masked_tokens_have_a_colour_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    step = measured(ragged(3, D=1, C=1, K=2), lambda t: 0 * t.m + 1 / t.T)
    figure = draw([("all", step)], tmp_path / "all.png", expected=TOKEN_MEAN)
    red = [bar for bar in figure.axes[0].patches if to_hex(bar.get_facecolor()) == "#d62728"]
    assert sum(round(bar.get_width()) for bar in red) == int((step.tokens.mask == 0).sum())
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "a masked token that is trained" in labels

"""The picture of a step: bars as high as weights, lines where they were asked to be, and a page that names each bar."""

import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import audit_picture
import numpy as np
import pytest
import torch
import torch.distributed as dist
from counted_steps import measured, ragged
from published import exact, own_piece
from ranks import run_ranks, start_process_group

from megatron_rl_loss import Gathered, Samples, ZigzagTHD, check_loss, plan_step
from megatron_rl_loss.audit import picture
from megatron_rl_loss.audit.picture import Panel, figure_of, page_of, plot_weights
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.plan import Plan

STEP = ragged(3, D=2, C=2, K=3)
OURS = measured(STEP, exact)
STOCK = measured(STEP, lambda t: np.where(t.m == 0, 0, own_piece(t)))
EVERYWHERE = measured(STEP, lambda t: 0 * t.m + 1 / t.T)
PANELS = [
    Panel.from_step(step, resolve("token_mean"), title=title)
    for title, step in (("stock", STOCK), ("ours", OURS), ("all", EVERYWHERE))
]


class Page(HTMLParser):
    """The bars of a page: their texts, and their visible rectangles as (x, width, height, colour)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts, self.rectangles = list[str](), list[str](), list[dict[str, str | None]]()
        self.open = list[str]()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        assert not any(re.match("src|href|on", name) for name in values)
        if tag == "rect" and values.get("class") != "all":
            self.rectangles.append(values)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["g", "title"]:
            self.texts.append(data)


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


def test_bars_are_as_high_as_weights_and_lines_are_where_they_should_be() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    figure = figure_of(PANELS)
    for axes, panel, step in zip(figure.axes, PANELS, (STOCK, OURS, EVERYWHERE), strict=True):
        assert axes.get_title(loc="left").strip() == panel.title
        bars = sorted((bar.get_x(), bar.get_width(), bar.get_height(), bar.get_facecolor()) for bar in axes.patches)
        active = step.tokens.mask != 0
        heights = np.repeat([height for *_, height, _ in bars], [round(width) for _, width, *_ in bars])
        np.testing.assert_allclose(heights, (step.weights * STEP.counted.T)[active | (step is EVERYWHERE)], rtol=1e-5)
        red = sum(round(width) for _, width, _, colour in bars if to_hex(colour) == "#d62728")
        assert red == (~active).sum() * (step is EVERYWHERE)  # masked tokens that are trained have their own colour
        lines = [segment for lines in axes.collections for segment in lines.get_segments()]
        assert {round(float(height), 5) for line in lines for _, height in line} == {1.0}
        assert sum(float(line[1][0] - line[0][0]) for line in lines) == pytest.approx(active.sum())
    assert "every token weighs what it should" in [text.get_text() for text in figure.axes[1].texts]
    assert any("on wrong tokens" in text.get_text() for text in figure.axes[0].texts)


def test_a_page_has_the_bars_of_the_image_and_a_text_for_each() -> None:
    page = Page(page_of(PANELS))
    assert "script" in page.tags
    bars = [(panel, bar) for panel in PANELS for bar in range(len(panel.begin))]
    assert len(bars) == len(page.rectangles) == len(page.texts)
    high = max(float(panel.heights.max()) for panel in PANELS)
    for (panel, bar), rectangle in zip(bars, page.rectangles, strict=True):
        asked = picture._HIGH * panel.heights[bar] / (1.12 * high)  # two roundings to 0.01 pixels
        assert float(rectangle["height"] or 0) == pytest.approx(asked, abs=0.021)
        assert rectangle["fill"] == panel.colours[bar]
    counted, at = STEP.counted, 0
    for step in (STOCK, OURS, EVERYWHERE):
        seen = np.flatnonzero((counted.m != 0) | (step is EVERYWHERE))
        while seen.size:  # each text names the tokens that come next
            text, at, entry = page.texts[at], at + 1, seen[0]
            match = re.match(
                r"sample (\d+), (?:(\d+) tokens, (\d+) to (\d+)|token (\d+)): weight (\S+), expected (\S+?)"
                r"(, (\S+) times that|, a masked token); DP rank (\d+), micro-batch (\d+), CP rank (\d+)$",
                text,
            )
            assert match, text
            number = int(match[2] or 1)
            assert [int(match[1]), int(match[3] or match[5])] == [counted.i[entry], counted.t[entry]]
            assert int(match[4] or match[5]) == counted.t[seen[number - 1]]
            assert [int(match[9 + k]) for k in (1, 2, 3)] == [counted.d[entry], counted.k[entry], counted.c[entry]]
            for held in seen[:number]:
                assert float(match[6]) == pytest.approx(step.weights[held], rel=1e-5)
                assert float(match[7]) == pytest.approx(counted.m[held] / counted.T, rel=1e-5)
            seen = seen[number:]
    assert at == len(page.texts)


def test_what_is_expected_is_a_line_in_the_legend_as_in_the_drawing() -> None:
    page = page_of(PANELS)
    assert '<span class="mark line"></span>expected' in page
    assert page.count('class="asked"') == sum(int((panel.asked != 0).sum()) for panel in PANELS)
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("num_microbatches", [16, 200])
def test_a_page_of_many_microbatches_has_the_width_of_a_window_and_names_that_do_not_touch(
    num_microbatches: int,
) -> None:
    rows = [[1.0] * (3 + number % 5) for number in range(num_microbatches)]
    plan = plan_step([Samples([row, row]) for row in rows], "sample_mean", dp_group=None)
    page = page_of([Panel.from_plan(plan)])
    (width,) = re.findall(r'<svg width="(\S+)"', page)
    assert (float(width) < 1200) == (num_microbatches == 16)  # the other one scrolls
    named = re.findall(r'<text x="(\S+)" y="\S+" text-anchor="middle">(0\.\d+)</text>', page)
    edges = [(float(at) - 3.5 * len(name), float(at) + 3.5 * len(name)) for at, name in named]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(edges))
    assert len(named) == 16 if num_microbatches == 16 else 16 < len(named) <= 200


def test_names_are_escaped() -> None:
    title = 'mine</h2><script>alert("&")</script> $x_1$'
    page = page_of([Panel.from_step(OURS, resolve("token_mean"), title=title)])
    assert Page(page).tags.count("script") == 1
    assert "mine&lt;/h2&gt;&lt;script&gt;" in page
    pytest.importorskip("matplotlib")
    (axes,) = figure_of([Panel.from_step(OURS, resolve("token_mean"), title=title)]).axes
    assert axes.get_title(loc="left").strip() == title.replace("$", r"\$")


def test_negative_and_lost_weights_have_their_bars() -> None:
    weights = np.where(STEP.counted.d == 1, -1.0, 0.0) * OURS.weights
    weights[np.flatnonzero(OURS.weights)[0]] = np.nan
    step = measured(STEP, lambda t: weights)
    panel = Panel.from_step(step, resolve("token_mean"))
    assert int(panel.tokens.sum()) == int((STEP.counted.m != 0).sum())
    assert panel.heights.min() == pytest.approx(-1, rel=1e-5)
    page = Page(page_of([panel]))
    assert "weight nan" in page.texts[0]
    assert {rectangle["height"] for rectangle in page.rectangles} >= {"0.00"}
    zero = picture._ABOVE + picture._HIGH * 1.12 / (1.12 + 1.12)  # bars of -1 hang from it, below the lines at 1
    assert all(float(rectangle["y"] or 0) == pytest.approx(zero, abs=0.01) for rectangle in page.rectangles)


def test_a_coefficient_is_part_of_what_is_expected() -> None:
    twice = measured(STEP, lambda t: 2 * exact(t))
    twice.facts["coefficient"] = 2.0
    panel = Panel.from_step(twice, resolve("token_mean"))
    assert panel.says == "every token weighs what it should"
    np.testing.assert_allclose(panel.weights, panel.expected, rtol=1e-5)


def test_a_plan_is_drawn_by_the_weights_of_its_micro_batches(tmp_path: Path) -> None:
    batches = [Samples([[1, 0, 1], [1]], prompt_ids=["a", "b"]), Samples([], prompt_ids=[])]
    plan = plan_step([*batches, Samples([[1, 1]], prompt_ids=["a"])], "prompt_mean", dp_group=None)
    plan.plot(tmp_path / "plan.html", title="a <plan>")
    page = (tmp_path / "plan.html").read_text()
    assert "<h2>a &lt;plan&gt;</h2>" in page
    assert Page(page).texts == [
        "sample 0, 2 tokens, 0 to 2: weight 0.125; DP rank 0, micro-batch 0, CP rank 0",
        "sample 1, token 0: weight 0.5; DP rank 0, micro-batch 0, CP rank 0",
        "sample 2, 2 tokens, 0 to 1: weight 0.125; DP rank 0, micro-batch 2, CP rank 0",
    ]
    assert not plan.record.use.is_used
    with pytest.raises(ValueError, match="a plan has a mode of its own"):
        plot_weights(plan, tmp_path / "plan.html", expected="token_mean")
    with pytest.raises(ValueError, match="a plan without samples"):
        Plan(None, plan.record).plot(tmp_path / "plan.html")


def drawn_on_rank(folder: Path) -> list[list[str]]:
    """On a context-parallel rank: the end of what a picture says of its plan, and the texts of the bars."""
    start_process_group()
    seen = list[list[str]]()
    for layout in (ZigzagTHD([0, 8]), Gathered([0, 8])):
        plan = plan_step(
            [Samples([[1] * 8], layout=layout)],
            "token_sum",
            dp_group=None,
            cp_group=dist.group.WORLD,
            gradients="summed over ranks",
        )
        plan.plot(folder / f"{dist.get_rank()}.html")
        page = (folder / f"{dist.get_rank()}.html").read_text()
        seen.append([*re.findall("; the tokens of this rank", page), *Page(page).texts])
    return seen


def test_a_plan_is_drawn_where_a_rank_holds_a_part(tmp_path: Path) -> None:
    for rank, (cut, gathered) in enumerate(run_ranks(2, drawn_on_rank, tmp_path)):
        assert cut[0] == gathered[0] == "; the tokens of this rank"
        tokens = ("2 to 5", "0 to 7")[rank == 0]  # with a hole in the middle
        assert cut[1:] == [f"sample 0, 4 tokens, {tokens}: weight 1; DP rank 0, micro-batch 0, CP rank {rank}"]
        assert gathered[1:] == ["sample 0, 8 tokens, 0 to 7: weight 0.5; DP rank 0, micro-batch 0, all CP ranks"]


def test_a_report_draws_a_step_in_all_cuts(tmp_path: Path) -> None:
    def mean_of_microbatch(losses: Any, mask: Any) -> Any:
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    for loss, mode in ((mean_of_microbatch, "token_mean"), (mean_of_microbatch, None), (None, "prompt_mean")):
        report = check_loss(loss, mode, draws=2)
        report.plot(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert f"<h2>{str(report).splitlines()[0]}</h2>" in page
        texts = Page(page).texts
        assert len({re.search("DP rank .*, micro-batch .*,", text)[0] for text in texts}) > 2
        assert (">1.0<" in page) == ("1.2 is micro-batch 2 of DP rank 1" in page)  # short names are explained
        ratios = {match[1] for text in texts if (match := re.search(r"(\S+) times", text))}
        assert (ratios == {"1"}) == report.sound
        assert "panel" not in report.to_dict()

    def spoiled(losses: Any, mask: Any, num_microbatches: int) -> Any:
        if num_microbatches > 1:
            raise RuntimeError
        return (losses * mask).sum()

    with pytest.raises(ValueError, match="cannot be measured"):
        check_loss(spoiled, "token_sum", draws=2).plot(tmp_path / "report.html")


def test_a_large_step_is_drawn_in_part() -> None:
    masks = torch.rand(4, 2000).tolist()
    plan = plan_step([Samples([mask]) for mask in masks], "token_mean", dp_group=None)
    panel = Panel.from_plan(plan)
    assert panel.places["microbatch"].max() == 0  # whole micro-batches
    assert panel.says.endswith("drawn: the first 2,000 of 8,000 tokens")
    halves = plan_step([Samples([mask[:1500]]) for mask in masks], "token_mean", dp_group=None)
    assert len(Panel.from_plan(halves).begin) == 3000  # as many as are drawn
    joined = [entry for mask in masks for entry in mask]
    alone = Panel.from_plan(plan_step([Samples([joined])], "token_mean", dp_group=None))
    assert len(alone.begin) == int(alone.tokens.sum()) == 3000


@pytest.mark.parametrize("name", ["step", "step.xyz"])
def test_a_suffix_of_no_format_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"Choose \.html, \.png"):
        plot_weights(OURS, tmp_path / name)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="without a verdict"):
        plot_weights(measured(STEP, lambda t: 0 * t.m), tmp_path / "step.html", expected="session_mean")
    for name in ("no_folder/step.html", "no_folder/step.png"):
        with pytest.raises(ValueError, match=r"no_folder/step\.\w+': the folder must be there\. Make it first"):
            plot_weights(OURS, tmp_path / name)
    plan = plan_step([Samples([[1]])], "token_mean", dp_group=None)
    for step in (plan[0], [plan], check_loss(None, "token_mean", draws=1), None):
        with pytest.raises(TypeError, match=f"step is a {type(step).__name__}: it must be a plan or a measured step"):
            plot_weights(step, tmp_path / "step.html")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib, or choose a path that ends in \.html"):
        plot_weights(OURS, tmp_path / "step.png", expected="token_mean")
    plot_weights(OURS, tmp_path / "step.html", expected="token_mean")  # needs nothing

"""The picture of a step: a bar for the weight of each token, as an image or as a page of HTML.

A `Panel` is what is drawn of one step, and a `TreePanel` of a plan's micro-batch whose samples share prefixes.
`write_picture` writes panels one above the other: a page with a text for each bar where the path ends in ``.html``,
which needs nothing, or else an image by matplotlib.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from megatron_rl_loss.audit.judge import expected_weights, judge, nearest_mode
from megatron_rl_loss.audit.tokens import MICROBATCH, Floats, Ints, MeasuredStep
from megatron_rl_loss.audit.tree_picture import TreePanel, draw_tree, legend_of, svg_of, tree_panels
from megatron_rl_loss.audit.verdict import Verdict
from megatron_rl_loss.core.aggregation import Aggregation, resolve, weigh
from megatron_rl_loss.core.collectives import rank_in
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.trees.layout import PrefixTree

_COLOURS = np.array(["#3b6fb6", "#e08a1e", "#4a9d6f", "#b5475b", "#7a5aa6", "#8a6d3b", "#4aa3b5", "#777777"])
_ASKED, _MASKED, _QUIET = "#111111", "#d62728", "#8c8c8c"
_CROWDED = 8  # micro-batches have short names where there are more
_GAP_SAMPLE, _GAP_MICROBATCH = 1.0, 4.0  # tokens left empty
_LETTER = 7  # pixels of a letter of a micro-batch's name
_MOST_BARS = 3000  # of a panel: more are narrower than a pixel, and make a page slow
#: Columns of a token's place: its number in the sample's mask, the sample, and the ranks and micro-batch that hold it.
_PLACE = ("position", "sample", *MICROBATCH, "cp_rank")


@dataclass(frozen=True)
class Panel:
    """The tokens of a step that have, or should have, weight, in their order: DP rank, micro-batch, sample, position.

    A bar stands for neighbouring tokens of a sample on one CP rank that weigh the same. Columns are [num_bars].

    Attributes:
        title, says: of the step, and a sentence on it.
        unit: the mean expected weight of a token, by which the drawing divides weights.
        expected: None for a plan, whose weights are not measured.
        tokens: number of tokens.
        places: position of the first token, its sample, DP rank, micro-batch and CP rank (-1 if all ranks hold it).
        last: position of the last token.
        begin: place of its left edge, in tokens, with gaps between samples and micro-batches.
    """

    title: str
    says: str
    unit: float
    weights: Floats
    expected: Floats | None
    tokens: Ints
    places: Mapping[str, Ints]
    last: Ints
    begin: Floats

    @classmethod
    def from_step(
        cls,
        measured: MeasuredStep,
        expected: Aggregation | None = None,
        *,
        verdict: Verdict | None = None,
        title: str = "",
    ) -> "Panel":
        """Measured weights beside those that a mode, or else the nearest one, asks for.

        `verdict` is what `judge` says of both, where it was asked already. Raises ValueError for a step on which there
        is none: its weights are not known.
        """
        verdict = verdict or judge(measured, expected)
        if verdict.unknown:
            raise ValueError(
                f"a picture of a step without a verdict: its weights are not known. {' '.join(verdict.unknown)}"
            )
        coefficient = measured.facts.get("coefficient") or 1.0
        asked = coefficient * expected_weights(measured, expected or nearest_mode(measured))
        says = "every token weighs what it should" if verdict.sound else verdict.headline.partition("; ")[2]
        return cls.from_weights(measured, asked, title=title or verdict.expected, says=says)

    @classmethod
    def from_weights(cls, measured: MeasuredStep, asked: Floats, *, title: str, says: str) -> "Panel":
        """Measured weights beside others of the same tokens, [num_entries]."""
        columns = {name: measured.tokens.column(name) for name in _PLACE}
        return cls._from_tokens(title, says, measured.weights, asked, columns)

    @classmethod
    def from_plan(cls, plan: Plan, *, title: str = "") -> "Panel":
        """The weights that the mode of a plan gives the tokens of this rank; nothing is measured or exchanged.

        Micro-batches with a `PrefixTree` are left out: `tree_panels` draws them.
        """
        policy, dp_rank, num_samples = plan.record.modes.policy, rank_in(plan.record.groups.dp_group), 0
        columns: dict[str, list[Any]] = {name: [np.zeros(0, np.int64)] for name in _PLACE}
        weights = [np.zeros(0)]
        for number, microbatch in enumerate(plan.microbatches):
            if isinstance(microbatch.samples.layout, PrefixTree):
                continue
            local = microbatch.tokens_of(None)
            starts = np.array([*microbatch.samples.mask_starts, 0], np.int64)  # fillers have no sample
            place = {
                "dp_rank": dp_rank,
                "microbatch": number,
                "cp_rank": -1 if local.copies > 1 else microbatch.cp_rank,
            }
            own_columns = {"position": local.positions - starts[local.sample_index]}
            own_columns["sample"] = local.sample_index + num_samples
            for name in _PLACE:
                columns[name].append(own_columns.get(name, np.full(len(local), place.get(name))))
            weights.append(weigh(policy, local, plan.totals).double().numpy())
            num_samples += len(microbatch.samples)
        joined = {name: np.concatenate(column) for name, column in columns.items()}
        says = plan.describe().partition(" | ")[2]  # after the mode
        if plan.record.dp_size * plan.record.cp_size > 1:
            says += "; the tokens of this rank"
        return cls._from_tokens(title or str(policy), says, np.concatenate(weights), None, joined)

    @classmethod
    def _from_tokens(
        cls, title: str, says: str, weights: Floats, asked: Floats | None, columns: Mapping[str, Ints]
    ) -> "Panel":
        beside = weights if asked is None else asked
        entries = np.flatnonzero((beside != 0) | (weights != 0))  # NaN is not 0
        unit = float(np.abs(beside[beside != 0]).mean()) if beside.any() else 1.0
        place = {name: column[entries] for name, column in columns.items()}
        sample, microbatch = (_changes(*(place[name] for name in names)) for names in (("sample",), MICROBATCH))
        gaps: Floats = np.where(microbatch, _GAP_MICROBATCH, _GAP_SAMPLE * sample)
        gaps[:1] = 0
        at: Floats = np.arange(len(entries), dtype=np.float64) + gaps.cumsum()
        shown = np.nan_to_num(weights[entries], nan=-np.inf)  # NaN differs from itself
        first = np.flatnonzero(sample | microbatch | _changes(place["cp_rank"], shown, beside[entries]))
        ends = np.append(first, len(entries))
        if len(first) > _MOST_BARS:  # whole micro-batches, if one fits
            starts = np.flatnonzero(microbatch[first])
            most = int(starts[starts <= _MOST_BARS].max(initial=0)) or _MOST_BARS
            says += f"; drawn: the first {ends[most]:,} of {len(entries):,} tokens"
            first, ends = first[:most], ends[: most + 1]
        bars = entries[first]
        return cls(
            title, says, unit, weights[bars], None if asked is None else asked[bars], np.diff(ends),
            {name: column[first] for name, column in place.items()}, place["position"][ends[1:] - 1], at[first],
        )  # fmt: skip

    @property
    def end(self) -> Floats:
        """The place of each bar's right edge, in tokens."""
        return self.begin + self.tokens

    @property
    def heights(self) -> Floats:
        """Weights in units of the mean expected one; 0 for a weight that is not finite."""
        return np.nan_to_num(self.weights, posinf=0.0, neginf=0.0) / self.unit

    @property
    def asked(self) -> Floats:
        """Expected weights in the same units; 0 for a plan, which has no lines."""
        return np.zeros(len(self.weights)) if self.expected is None else self.expected / self.unit

    @property
    def masked(self) -> Any:
        """True for a masked token that is trained."""
        return np.zeros(len(self.weights), np.bool_) if self.expected is None else self.expected == 0

    @property
    def colours(self) -> list[str]:
        """By CP rank; a masked token that is trained has a colour of its own."""
        rank_colours = _COLOURS[self.places["cp_rank"].clip(0) % len(_COLOURS)]
        return np.where(self.masked, _MASKED, rank_colours).tolist()

    def spans(self, *names: str) -> list[tuple[int, float, float]]:
        """First bar, left and right edge of each run of bars that agree in these columns of `places`."""
        first = np.flatnonzero(_changes(*(self.places[name] for name in names)))
        last = np.append(first, len(self.begin))[1:] - 1
        return list(zip(first.tolist(), self.begin[first].tolist(), self.end[last].tolist(), strict=True))

    def name_microbatches(self, pixels_per_token: float) -> list[tuple[str, float, float]]:
        """The name and edges of each micro-batch; the name is empty where it would touch the one before it."""
        spans = self.spans(*MICROBATCH)
        pattern = "{}.{}" if len(spans) > _CROWDED else "DP {}, micro-batch {}"
        columns = [self.places[name] for name in MICROBATCH]
        named, free_from = [], -np.inf
        for bar, begin, end in spans:
            name = pattern.format(*(column[bar] for column in columns))
            half = 0.5 * _LETTER * (len(name) + 1) / pixels_per_token
            touches = (begin + end) / 2 - half < free_from
            free_from = free_from if touches else (begin + end) / 2 + half
            named.append(("" if touches else name, begin, end))
        return named

    def texts(self) -> list[str]:
        """Of each bar: sample, tokens, weight, expected weight, ranks and micro-batch."""
        columns = [*(self.places[name] for name in _PLACE), self.last, self.tokens]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        texts = []
        for bar, (first, sample, dp_rank, microbatch, cp_rank, last, number) in enumerate(rows):
            tokens = f"token {first}" if number == 1 else f"{number} tokens, {first} to {last}"
            weight = f"weight {self.weights[bar]:.6g}"
            if self.expected is not None:
                asked = self.expected[bar]
                times = f", {self.weights[bar] / asked:.4g} times that" if asked else ", a masked token"
                weight += f", expected {asked:.6g}{times}"
            held = "all CP ranks" if cp_rank < 0 else f"CP rank {cp_rank}"
            texts.append(f"sample {sample}, {tokens}: {weight}; DP rank {dp_rank}, micro-batch {microbatch}, {held}")
        return texts


#: Bars of a step's tokens, or the tree of a micro-batch.
AnyPanel = Panel | TreePanel


def _bars(panels: Sequence[AnyPanel]) -> list[Panel]:
    return [panel for panel in panels if isinstance(panel, Panel)]


def _trees(panels: Sequence[AnyPanel]) -> list[TreePanel]:
    return [panel for panel in panels if isinstance(panel, TreePanel)]


def _changes(*columns: Any) -> Any:
    """Flags of entries that differ from the one before."""
    flags = np.zeros(len(columns[0]), np.bool_)
    flags[:1] = True
    for column in columns:
        flags[1:] |= column[1:] != column[:-1]
    return flags


def plot_weights(
    step: Plan | MeasuredStep, path: str | Path, *, expected: Aggregation | str | None = None, title: str = ""
) -> None:
    """Draw the weight of each token of a step into a file: an image, or a page where the path ends in ``.html``.

    A bar's height is the weight of a token, in units of the mean expected weight. On a page, the text of a bar names
    the sample, the weight, the expected weight, the ranks and the micro-batch. A page loads nothing from elsewhere.
    A plan's micro-batch with a `PrefixTree` is drawn as its tree: slots are as wide as their tokens, and their colour
    is the weight of the losses that predict them, summed over samples.

    Args:
        step: a plan, of which the weights of this rank's tokens are drawn; or `Audit.measured`, with a line for the
            expected weight of each token.
        path: the file; its suffix names the format: ``.html``, ``.png``, ``.svg``, ``.pdf``.
        expected: the mode that a measured step should have; None for the nearest one. A plan has its own.
        title: above the bars; by default the mode.

    Raises:
        ImportError: an image without matplotlib.
        TypeError: a step that is neither.
        ValueError: a suffix of no format; a folder that is not there; a measured step on which there is no verdict; a
            plan without samples, or with a mode in `expected`.
    """
    if isinstance(step, Plan):
        if expected is not None:
            raise ValueError(f"expected {expected} for a plan: a plan has a mode of its own. Drop expected=.")
        trees = tree_panels(step, title=title)
        bars = [] if trees and len(trees) == len(step.microbatches) else [Panel.from_plan(step, title=title)]
        write_picture([*bars, *trees], path)
    elif not isinstance(step, MeasuredStep):
        raise TypeError(
            f"step is a {type(step).__name__}: it must be a plan or a measured step. Pass what plan_step returns, "
            "or Audit.measured."
        )
    else:
        asked = resolve(expected) if isinstance(expected, str) else expected
        write_picture([Panel.from_step(step, asked, title=title)], path)


def _is_page(path: str | Path) -> bool:
    return Path(path).suffix.lower() in (".html", ".htm")


def check_path(path: str | Path) -> None:
    """Raise ImportError for an image without matplotlib, and ValueError for a suffix of no format, or no folder."""
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"a picture to draw into {str(path)!r}: the folder must be there. Make it first, or choose another."
        )
    if _is_page(path):
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ImportError(
            f"a picture to draw into {str(path)!r}: images need matplotlib, which is not installed. Run pip install "
            "matplotlib, or choose a path that ends in .html, which needs nothing."
        ) from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"a picture to draw into {str(path)!r}: the suffix must name a format. Choose .html, .png, .svg or .pdf."
        )


def write_picture(panels: Sequence[AnyPanel], path: str | Path) -> None:
    """Write panels one above the other, into a page or an image; raises as `plot_weights`."""
    check_path(path)
    if _is_page(path):
        Path(path).write_text(page_of(panels), encoding="utf-8")
    else:
        figure_of(panels).savefig(path)


def _legend(drawn: Sequence[AnyPanel]) -> list[tuple[str, str, bool]]:
    """Colour and words of each kind of mark; True for the line of expected weights."""
    panels = _bars(drawn)
    measured = any(panel.expected is not None for panel in panels)
    ranks = sorted({int(rank) for panel in panels for rank in np.unique(panel.places["cp_rank"])})
    rows = [(_ASKED, "expected", True)] if measured else []
    for rank in ranks:
        where = "" if len(ranks) == 1 else f", on CP rank {rank}"
        rows.append(
            (str(_COLOURS[max(rank, 0) % len(_COLOURS)]), ("measured" if measured else "weight") + where, False)
        )
    if any(panel.masked.any() for panel in panels):
        rows.append((_MASKED, "a masked token that is trained", False))
    return rows + [(colour, words, False) for colour, words in legend_of(_trees(drawn))]


_BELOW = "the step's tokens, in order; a stroke below them is a sample"


def _below(panels: Sequence[Panel]) -> str:
    """The line below the last panel, which explains the short names of micro-batches where there are any."""
    is_crowded = any(len(panel.spans(*MICROBATCH)) > _CROWDED for panel in panels)
    return _BELOW + only_if(is_crowded, ", and 1.2 is micro-batch 2 of DP rank 1")


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """The lowest and the highest of all bars and lines, with some room; 0 and 1 are among them."""
    heights = np.concatenate([np.ones(1), *(np.append(panel.heights, panel.asked) for panel in panels)])
    return 1.12 * min(0.0, float(heights.min())), 1.12 * float(heights.max())


# --- an image


def figure_of(panels: Sequence[AnyPanel]) -> Any:
    """The figure of matplotlib; not registered with pyplot, whose backend stays as it is."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 2.6 * len(panels) + 0.5), dpi=120, layout="constrained")
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    bars = _bars(panels)
    for axes, panel in zip(rows, panels, strict=True):
        axes.set_title(f"{_plain(panel.title)}\n", loc="left", fontsize=10.5, fontweight="bold")
        says = {"transform": axes.transAxes, "fontsize": 9.5, "color": "#333333", "va": "bottom"}
        axes.text(0, 1.02, _plain(panel.says), **says)
        if isinstance(panel, TreePanel):
            draw_tree(axes, panel)
            continue
        _draw_panel(axes, panel)
        axes.set_ylim(*_limits(bars))
        if panel is bars[-1]:
            axes.set_xlabel(_below(bars), fontsize=9, labelpad=20)
    handles = [
        Line2D([], [], color=colour, linewidth=1.4, label=words) if is_line else Patch(color=colour, label=words)
        for colour, words, is_line in _legend(panels)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=max(len(handles), 1), frameon=False, fontsize=9)
    return figure


def _plain(text: str) -> str:
    """The text without the signs that matplotlib reads as formulas."""
    return text.replace("$", r"\$")


def _draw_panel(axes: Any, panel: Panel) -> None:
    wanted, below = panel.asked != 0, axes.get_xaxis_transform()
    axes.bar(panel.begin, panel.heights, panel.tokens, align="edge", color=panel.colours, linewidth=0)
    axes.hlines(panel.asked[wanted], panel.begin[wanted], panel.end[wanted], color=_ASKED, linewidth=1.5)
    edges = np.array([edges for _, *edges in panel.spans("sample", *MICROBATCH)]).reshape(-1, 2).T
    axes.plot(edges, np.full(edges.shape, -0.03), transform=below, color=_QUIET, linewidth=2,
              clip_on=False, solid_capstyle="butt")  # fmt: skip
    pixels = axes.figure.get_figwidth() * axes.figure.dpi - 2 * _LEFT
    for name, left, right in panel.name_microbatches(pixels / panel.end.max(initial=1.0)):
        axes.text((left + right) / 2, -0.06, name, transform=below, ha="center", va="top", fontsize=8, color="#555555")
        if left > 0:
            axes.axvline(left - _GAP_MICROBATCH / 2, color=_QUIET, linewidth=0.8, linestyle=":")
    axes.set_xlim(-_GAP_MICROBATCH / 2, panel.end.max(initial=1.0) + _GAP_MICROBATCH / 2)
    axes.set_xticks([])
    axes.set_ylabel("weight / mean\nexpected weight", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


# --- a page

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Weights of a step</title>
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --quiet: #555; --grid: #ddd; --box: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eee; --paper: #1e2129; --quiet: #aaa; --grid: #444; --box: #2b2f3a; }
}
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: var(--ink); background: var(--paper); }
h2 { font-size: 16px; margin: 1em 0 0; }
p { margin: 0.2em 0; }
.scroll { overflow-x: auto; }
.mark { display: inline-block; width: 1em; height: 0.7em; margin: 0 0.4em 0 1.2em; }
.mark.line { width: 1.6em; height: 0; border-top: 2px solid var(--ink); vertical-align: middle; }
#text { position: sticky; top: 0; background: var(--box); padding: 0.4em 0.6em; font-family: monospace; z-index: 1; }
svg text { font: 11px sans-serif; fill: var(--quiet); }
.grid { stroke: var(--grid); }
.asked { stroke: var(--ink); stroke-width: 1.5; }
.bar:hover .all { fill: #8883; }
</style>
</head>
<body>
<p id="text">Point at a bar to read its sample, weight, ranks and micro-batch.</p>
<p>$legend</p>
$sections
<p>$below</p>
<script>
document.addEventListener("mouseover", (event) => {
  const bar = event.target.closest(".bar");
  if (bar) document.getElementById("text").textContent = bar.querySelector("title").textContent;
});
</script>
</body>
</html>
""")
_HIGH, _LEFT, _ABOVE, _UNDER = 200, 46, 8, 34  # pixels of the bars, and of the room beside, above and below them


def page_of(panels: Sequence[AnyPanel]) -> str:
    """The page: a drawing for each panel, whose bars have their texts. It loads nothing."""
    bars = _bars(panels)
    low, high = _limits(bars)
    marks = []
    for colour, words, is_line in _legend(panels):
        drawn_as = 'class="mark line"' if is_line else f'class="mark" style="background:{colour}"'
        marks.append(f"<span {drawn_as}></span>{escape(words)}")
    sections = [
        f"<h2>{escape(panel.title)}</h2>\n<p>{escape(panel.says)}</p>\n"
        f'<div class="scroll">{svg_of(panel) if isinstance(panel, TreePanel) else _svg(panel, low, high)}</div>'
        for panel in panels
    ]
    below = f"T{_below(bars)[1:]}. Heights are weight / mean expected weight." if bars else ""
    if _trees(panels):
        below += " Of a tree: depths from left to right, in tokens; a lane is a leaf."
    return _PAGE.substitute(legend="".join(marks), sections="\n".join(sections), below=below.strip())


def _svg(panel: Panel, low: float, high: float) -> str:
    tokens = float(panel.end.max(initial=1.0))
    readable = 6 / float(np.median(panel.tokens)) if len(panel.tokens) else 3.0  # half of the bars are wider
    step = max(1040 / tokens, min(3.0, 20000 / tokens, readable))  # pixels of a token: the page's width, if it will do

    def x(token: float) -> float:
        return round(_LEFT + token * step, 2)

    def y(height: float) -> float:
        return round(_ABOVE + _HIGH * (high - height) / (high - low), 2)

    bottom, right = _ABOVE + _HIGH, x(tokens) + 10
    parts = [f'<svg width="{right:g}" height="{bottom + _UNDER}" role="img">']
    every = max(1, round((high - low) / 5))
    for tick in range(-(-int(low) // every) * every, int(high) + 1, every):
        parts.append(f'<line x1="{_LEFT}" x2="{right:g}" y1="{y(tick)}" y2="{y(tick)}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>')
    numbers = [column.tolist() for column in (panel.begin, panel.end, panel.heights, panel.asked)]
    for begin, end, height, asked, colour, text in zip(*numbers, panel.colours, panel.texts(), strict=True):
        left, wide = x(begin), max(round((end - begin) * step, 2), 0.5)
        line = f'<path d="M{left} {y(asked)}h{wide}" class="asked"/>'
        parts.append(
            f'<g class="bar"><title>{escape(text)}</title>'
            f'<rect class="all" x="{left}" y="{_ABOVE}" width="{wide}" height="{_HIGH}" fill="transparent"/>'
            f'<rect x="{left}" y="{min(y(height), y(0))}" width="{wide}" height="{abs(y(height) - y(0)):.2f}" '
            f'fill="{colour}"/>{line * (asked != 0)}</g>'
        )
    for _, begin, end in panel.spans("sample", *MICROBATCH):
        parts.append(f'<path d="M{x(begin)} {bottom + 6}H{x(end)}" stroke="{_QUIET}" stroke-width="2"/>')
    for name, begin, end in panel.name_microbatches(step):
        at = x((begin + end) / 2)
        if name:
            parts.append(f'<text x="{at}" y="{bottom + 24}" text-anchor="middle">{escape(name)}</text>')
        if begin > 0:
            at = x(begin - _GAP_MICROBATCH / 2)
            parts.append(f'<path d="M{at} {_ABOVE}V{bottom}" stroke="{_QUIET}" stroke-dasharray="2 3"/>')
    return "\n".join([*parts, "</svg>"])

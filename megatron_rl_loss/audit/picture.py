"""A step's tokens in a picture: what each weighs against what was asked. A PNG by matplotlib, or text in a terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl_loss.audit.comparison import StepSamples
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, StepTokens
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import Aggregation

_COLOURS = np.array(["#3b6fb6", "#e08a1e", "#4a9d6f", "#b5475b", "#7a5aa6", "#8a6d3b", "#4aa3b5", "#777777"])
_ASKED, _MASKED, _QUIET = "#111111", "#d62728", "#8c8c8c"
_CROWDED = 8  # micro-batches have short names where there are more
_GAP_SAMPLE, _GAP_MICROBATCH = 1.0, 4.0  # tokens left empty


def draw(panels: Sequence[tuple[str, MeasuredStep]], path: Path, *, expected: Aggregation) -> Any:
    """Draw measured steps one above the other into a PNG (or whatever the path's ending says).

    A bar is a token that has, or should have, weight: its height is the measured weight, the black line the asked one,
    both in units of the mean asked weight. Tokens are in order: data-parallel rank, micro-batch, sample, position.

    Args:
        panels: titles and steps.
        expected: what all of them should be.

    Returns:
        The figure, which is saved already.

    Raises:
        RuntimeError: without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError(
            f"a picture to draw into {path}: matplotlib draws it, and is not installed. Run pip install matplotlib, or "
            "print in_terminal(...), which needs nothing."
        ) from None
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 2.6 * len(panels) + 0.5), dpi=120, layout="constrained")
    places = figure.subplots(len(panels), 1, squeeze=False, sharex=False, sharey=True)[:, 0]
    highest, masked, ranks = 1.0, False, set()
    for place, (title, step) in zip(places, panels, strict=True):
        verdict, asked = judge(step, expected), StepSamples(step.tokens).weights(expected)
        said = "every token weighs what was asked" if verdict.sound else verdict.extent
        place.set_title(f"{title}\n", loc="left", fontsize=10.5, fontweight="bold")
        place.text(0, 1.02, said, transform=place.transAxes, fontsize=9.5, color="#333333", va="bottom")
        weights = np.nan_to_num(step.weights, posinf=0.0, neginf=0.0)
        entries = np.flatnonzero((asked != 0) | (weights != 0))  # tokens that have or should have weight
        unit = float(np.abs(asked[asked != 0]).mean()) if asked.any() else 1.0
        weights, asked = weights[entries] / unit, asked[entries] / unit
        _draw_panel(place, step.tokens, entries, weights, asked)
        highest = max(highest, weights.max(initial=0), asked.max(initial=0))
        masked |= not asked.all()
        ranks |= set(step.tokens.cp_rank[entries].tolist())
    places[0].set_ylim(0, 1.12 * highest)
    places[-1].set_xlabel("the step's tokens, in order; a stroke below them is a sample", fontsize=9, labelpad=20)
    handles: list[Any] = [Line2D([], [], color=_ASKED, linewidth=1.4, label="asked")]
    for rank in sorted(ranks):
        where = "" if len(ranks) == 1 else f", on CP rank {rank}"
        handles.append(Patch(color=_COLOURS[max(rank, 0) % len(_COLOURS)], label=f"measured{where}"))
    if masked:
        handles.append(Patch(color=_MASKED, label="a masked token that is trained"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)
    return figure


def _draw_panel(place: Any, tokens: StepTokens, entries: Ints, weights: Floats, asked: Floats) -> None:
    cp_rank, sample = tokens.cp_rank[entries], tokens.sample[entries]
    microbatch = tokens.groups(("dp_rank", "microbatch"))[entries]
    gaps: Floats = _GAP_SAMPLE * _changes(sample)
    gaps[_changes(microbatch)] = _GAP_MICROBATCH
    gaps[:1] = 0
    at: Floats = np.arange(len(gaps), dtype=np.float64) + gaps.cumsum()

    first, begin, end = _runs(at, sample, cp_rank, weights, asked)
    wanted = asked[first] != 0
    colours = np.where(wanted, _COLOURS[cp_rank[first].clip(0) % len(_COLOURS)], _MASKED)
    place.bar(begin, weights[first], end - begin, align="edge", color=colours, linewidth=0)
    place.hlines(asked[first][wanted], begin[wanted], end[wanted], color=_ASKED, linewidth=1.5)
    below = place.get_xaxis_transform()
    _, begin, end = _runs(at, sample)
    place.plot([begin, end], np.full((2, len(begin)), -0.03), transform=below, color=_QUIET, linewidth=2,
               clip_on=False, solid_capstyle="butt")  # fmt: skip
    first, begin, end = _runs(at, microbatch)
    for entry, left, right in zip(entries[first].tolist(), begin, end, strict=True):
        dp_rank, number = tokens.dp_rank[entry], tokens.microbatch[entry]
        name = f"{dp_rank}.{number}" if len(first) > _CROWDED else f"DP {dp_rank}, micro-batch {number}"
        place.text((left + right) / 2, -0.06, name, transform=below, ha="center", va="top", fontsize=8, color="#555555")
        if left > 0:
            place.axvline(left - _GAP_MICROBATCH / 2, color=_QUIET, linewidth=0.8, linestyle=":")
    place.set_xlim(-_GAP_MICROBATCH / 2, at.max(initial=0.0) + 1 + _GAP_MICROBATCH / 2)
    place.set_xticks([])
    place.set_ylabel("weight / mean\nasked weight", fontsize=9)
    place.tick_params(labelsize=8.5)
    place.spines[["top", "right", "bottom"]].set_visible(False)


def _changes(*columns: Any) -> Any:
    """Whether a token differs from the one before it."""
    return np.diff(np.stack(columns), axis=1, prepend=np.nan).any(0)


def _runs(at: Floats, *columns: Any) -> tuple[Ints, Floats, Floats]:
    """Neighbouring tokens that agree in all columns: the first of each run, and where runs begin and end."""
    first = np.flatnonzero(_changes(*columns))
    last = np.append(first, len(at))[1:] - 1
    return first, at[first], at[last] + 1


# ---- in a terminal

_BLOCKS = " ▁▂▃▄▅▆▇█"
_AS_ASKED = 4  # the block of measured/asked 1
_ANSI = (34, 33, 32, 31, 35, 36)


def in_terminal(step: MeasuredStep, *, expected: Aggregation, width: int = 100, colour: bool = False) -> str:
    """A line per micro-batch, a character per token: ▄ weighs what was asked, █ twice that or more, - nothing.

    Masked tokens are left out unless they are trained (!). Samples are parted by |. Where a line would be too long a
    character is the mean of several tokens.

    Args:
        width: columns of a line.
        colour: one for each CP rank, as terminals understand it.
    """
    tokens = step.tokens
    wanted = StepSamples(tokens).weights(expected)
    shown = (wanted != 0) | (step.weights != 0)
    group = tokens.groups(("dp_rank", "microbatch"))
    firsts = np.unique(group, return_index=True)[1].tolist()
    names = [f"DP {tokens.dp_rank[first]}, micro-batch {tokens.microbatch[first]}" for first in firsts]
    indent = max(map(len, names), default=0)
    lines = []
    for number, name in enumerate(names):
        here = np.flatnonzero((group == number) & shown)
        samples = dict.fromkeys(tokens.sample[here].tolist())
        together = max(1, -(-len(here) // max(max(width - indent - 2, 8) - len(samples), 1)))
        bars = []
        for sample in samples:
            piece = here[tokens.sample[here] == sample]
            parts = [piece[begin : begin + together] for begin in range(0, len(piece), together)]
            bars.append("".join(_mark(step, wanted, part, colour) for part in parts))
        lines.append(f"{name:<{indent}}  {'|'.join(bars)}")
    return "\n".join(lines)


def _mark(step: MeasuredStep, expected: Floats, entries: Ints, colour: bool) -> str:
    weight, wanted = float(step.weights[entries].sum()), float(expected[entries].sum())
    if not np.isfinite(weight):
        mark = "?"
    elif wanted == 0:
        mark = "!"
    elif weight == 0:
        mark = "-"
    else:
        mark = _BLOCKS[min(max(round(weight / wanted * _AS_ASKED), 1), len(_BLOCKS) - 1)]
    if colour:
        mark = f"\033[{_ANSI[max(int(step.tokens.cp_rank[entries[0]]), 0) % len(_ANSI)]}m{mark}\033[0m"
    return mark

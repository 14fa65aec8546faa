"""A step's tokens in a picture: what each weighs against what was asked. A PNG by matplotlib, or text in a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl_loss.audit.comparison import StepSamples
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import Aggregation

_COLOURS = ("#3b6fb6", "#e08a1e", "#4a9d6f", "#b5475b", "#7a5aa6", "#8a6d3b", "#4aa3b5", "#777777")
_ASKED, _MASKED, _QUIET = "#111111", "#d62728", "#8c8c8c"
_CROWDED = 8  # micro-batches have short names where there are more
_GAP_SAMPLE, _GAP_MICROBATCH = 1.0, 4.0  # tokens left empty


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of one sample and CP rank that weigh the same, [begin, end) on the axis."""

    begin: float
    end: float
    weight: float
    asked: float
    cp_rank: int


@dataclass(frozen=True)
class _Axis:
    """Where things are: runs of tokens, and the ends of samples and micro-batches."""

    runs: tuple[_Run, ...]
    samples: tuple[tuple[float, float], ...]
    microbatches: tuple[tuple[float, float, tuple[int, int]], ...]
    unit: float  # the mean asked weight of an active token


def draw(
    panels: Sequence[tuple[str, MeasuredStep]],
    path: Path,
    *,
    asked: Aggregation,
    inches: tuple[float, float] = (11, 2.6),
) -> Any:
    """Draw measured steps one above the other into a PNG (or whatever the path's ending says).

    A bar is a token that has, or should have, weight: its height is the measured weight, the black line the asked one,
    both in units of the mean asked weight. Tokens are in order: data-parallel rank, micro-batch, sample, position.

    Args:
        panels: titles and steps.
        asked: what all of them should be.
        inches: size of one panel.

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

    figure = Figure(figsize=(inches[0], inches[1] * len(panels) + 0.5), dpi=120, layout="constrained")
    drawn = figure.subplots(len(panels), 1, squeeze=False, sharex=False, sharey=True)[:, 0]
    axes = [_laid_out(step, asked) for _, step in panels]
    for place, (title, step), axis in zip(drawn, panels, axes, strict=True):
        _draw_panel(place, title, step, asked, axis)
    highest = max((max(run.weight, run.asked) / axis.unit for axis in axes for run in axis.runs), default=1.0)
    drawn[0].set_ylim(0, 1.12 * max(highest, 1.0))
    drawn[-1].set_xlabel("the step's tokens, in order; a stroke below them is a sample", fontsize=9, labelpad=20)
    _draw_legend(figure, axes)
    figure.savefig(path)
    return figure


def _draw_panel(place: Any, title: str, step: MeasuredStep, asked: Aggregation, axis: _Axis) -> None:
    verdict = judge(step, asked)
    said = "every token weighs what was asked" if verdict.sound else verdict.extent
    place.set_title(f"{title}\n", loc="left", fontsize=10.5, fontweight="bold")
    place.text(0, 1.02, said, transform=place.transAxes, fontsize=9.5, color="#333333", va="bottom")
    for colour, runs in _by_colour(axis.runs):
        begins, widths = [run.begin for run in runs], [run.end - run.begin for run in runs]
        place.bar(begins, [run.weight / axis.unit for run in runs], widths, align="edge", color=colour, linewidth=0)
    wanted = [run for run in axis.runs if run.asked]
    heights = [run.asked / axis.unit for run in wanted]
    place.hlines(heights, [run.begin for run in wanted], [run.end for run in wanted], color=_ASKED, linewidth=1.5)
    for begin, end in axis.samples:
        place.plot([begin, end], [-0.03, -0.03], transform=place.get_xaxis_transform(), color=_QUIET, linewidth=2,
                   clip_on=False, solid_capstyle="butt")  # fmt: skip
    crowded = len(axis.microbatches) > _CROWDED
    for begin, end, (dp_rank, microbatch) in axis.microbatches:
        name = f"{dp_rank}.{microbatch}" if crowded else f"DP {dp_rank}, micro-batch {microbatch}"
        if begin > 0:
            place.axvline(begin - _GAP_MICROBATCH / 2, color=_QUIET, linewidth=0.8, linestyle=":")
        place.text((begin + end) / 2, -0.06, name, transform=place.get_xaxis_transform(), ha="center", va="top",
                   fontsize=8, color="#555555")  # fmt: skip
    last = max((end for _, end, _ in axis.microbatches), default=1.0)
    place.set_xlim(-_GAP_MICROBATCH / 2, last + _GAP_MICROBATCH / 2)
    place.set_xticks([])
    place.set_ylabel("weight / mean\nasked weight", fontsize=9)
    place.tick_params(labelsize=8.5)
    for side in ("top", "right", "bottom"):
        place.spines[side].set_visible(False)


def _draw_legend(figure: Any, axes: Sequence[_Axis]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    runs = [run for axis in axes for run in axis.runs]
    ranks = sorted({run.cp_rank for run in runs})
    handles: list[Any] = [Line2D([], [], color=_ASKED, linewidth=1.4, label="asked")]
    for rank in ranks:
        label = "measured" if len(ranks) == 1 else f"measured, on CP rank {rank}"
        handles.append(Patch(color=_colour_of(rank), label=label))
    if any(run.asked == 0 for run in runs):
        handles.append(Patch(color=_MASKED, label="a masked token that is trained"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)


def _colour_of(cp_rank: int) -> str:
    return _COLOURS[max(cp_rank, 0) % len(_COLOURS)]


def _by_colour(runs: Sequence[_Run]) -> Iterator[tuple[str, list[_Run]]]:
    of_colour: dict[str, list[_Run]] = {}
    for run in runs:
        colour = _MASKED if run.asked == 0 else _colour_of(run.cp_rank)
        of_colour.setdefault(colour, []).append(run)
    yield from of_colour.items()


def _laid_out(step: MeasuredStep, asked: Aggregation) -> _Axis:
    """Tokens that have or should have weight, side by side."""
    tokens = step.tokens
    expected = StepSamples(tokens).weights(asked)
    weights = np.nan_to_num(step.weights, posinf=0.0, neginf=0.0)
    shown = np.flatnonzero((expected != 0) | (weights != 0))
    runs: list[_Run] = []
    samples: list[tuple[float, float]] = []
    microbatches: list[tuple[float, float, tuple[int, int]]] = []
    at = 0.0
    before = None
    for entry in shown.tolist():
        place = (int(tokens.dp_rank[entry]), int(tokens.microbatch[entry]))
        sample, cp_rank = int(tokens.sample[entry]), int(tokens.cp_rank[entry])
        weight, wanted = float(weights[entry]), float(expected[entry])
        if before is None or before[0] != place:
            at += 0.0 if before is None else _GAP_MICROBATCH
            microbatches.append((at, at, place))
            samples.append((at, at))
        elif before[1] != sample:
            at += _GAP_SAMPLE
            samples.append((at, at))
        last = runs[-1] if runs else None
        alike = last is not None and (last.end, last.cp_rank, last.weight, last.asked) == (at, cp_rank, weight, wanted)
        if last is not None and alike:
            runs[-1] = _Run(last.begin, at + 1, weight, wanted, cp_rank)
        else:
            runs.append(_Run(at, at + 1, weight, wanted, cp_rank))
        at += 1
        samples[-1] = (samples[-1][0], at)
        microbatches[-1] = (microbatches[-1][0], at, microbatches[-1][2])
        before = (place, sample)
    active = expected != 0
    unit = float(np.abs(expected[active]).mean()) if active.any() else 1.0
    return _Axis(tuple(runs), tuple(samples), tuple(microbatches), unit)


# ---- in a terminal

_BLOCKS = " ▁▂▃▄▅▆▇█"
_AS_ASKED = 4  # the block of measured/asked 1
_ANSI = (34, 33, 32, 31, 35, 36)


def in_terminal(step: MeasuredStep, *, asked: Aggregation, width: int = 100, colour: bool = False) -> str:
    """A line a micro-batch, a character a token: ▄ weighs what was asked, █ twice that or more, - nothing.

    Masked tokens are left out unless they are trained (!). Samples are parted by |. Where a line would be too long a
    character is the mean of several tokens.

    Args:
        width: columns of a line.
        colour: one for each CP rank, as terminals understand it.
    """
    tokens = step.tokens
    expected = StepSamples(tokens).weights(asked)
    shown = (expected != 0) | (step.weights != 0)
    group = tokens.groups(("dp_rank", "microbatch"))
    names = {}
    for number in range(int(group.max(initial=-1)) + 1):
        first = int((group == number).argmax())
        names[number] = f"DP {tokens.dp_rank[first]}, micro-batch {tokens.microbatch[first]}"
    indent = max(map(len, names.values()), default=0)
    space = max(width - indent - 2, 8)
    lines = []
    for number, name in names.items():
        here = np.flatnonzero((group == number) & shown)
        parts = len(np.unique(tokens.sample[here]))
        together = max(1, -(-len(here) // max(space - parts, 1)))
        pieces = [here[tokens.sample[here] == sample] for sample in dict.fromkeys(tokens.sample[here].tolist())]
        bars = [_bars(step, expected, piece, together, colour) for piece in pieces]
        lines.append(f"{name:<{indent}}  {'|'.join(bars)}")
    return "\n".join(lines)


def _bars(step: MeasuredStep, expected: Floats, piece: Any, together: int, colour: bool) -> str:
    characters = []
    for begin in range(0, len(piece), together):
        entries = piece[begin : begin + together]
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
        characters.append(mark)
    return "".join(characters)

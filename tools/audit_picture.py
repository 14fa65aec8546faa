"""Draw the weight of each token of a step: by Megatron's stock loss function, and by this library.

    python tools/audit_picture.py --out docs/audit.png

Both are measured in the real Megatron, at context parallelism 2 x data parallelism 2 with 3 micro-batches, by two
launches of `examples/audit_own_loop.py` under torchrun on 4 processes (CPU and gloo without a GPU). The picture needs
matplotlib: pip install -e '.[audit]'.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl_loss.audit.judge import expected_weights, judge
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, StepTokens
from megatron_rl_loss.core.aggregation import Aggregation, resolve

LOOP = Path(__file__).parents[1] / "examples" / "audit_own_loop.py"
STOCK = "Megatron's stock loss function, (sum, num_tokens, report), without --calculate-per-token-loss"
OURS = "megatron_rl_loss, token_mean: the same step, the same Megatron"


_COLOURS = np.array(["#3b6fb6", "#e08a1e", "#4a9d6f", "#b5475b", "#7a5aa6", "#8a6d3b", "#4aa3b5", "#777777"])
_ASKED, _MASKED, _QUIET = "#111111", "#d62728", "#8c8c8c"
_CROWDED = 8  # micro-batches have short names where there are more
_GAP_SAMPLE, _GAP_MICROBATCH = 1.0, 4.0  # tokens left empty


def draw(panels: Sequence[tuple[str, MeasuredStep]], path: Path, *, expected: Aggregation) -> Any:
    """Draw measured steps one above the other into a PNG, or the format of the path's suffix.

    A bar is a token that has, or should have, weight. Its height is the measured weight, its line the expected one,
    both in units of the mean expected weight. Tokens are in order: data-parallel rank, micro-batch, sample, position.

    Args:
        panels: titles and steps.
        expected: the mode of all steps.

    Returns:
        The figure, already saved.

    Raises:
        RuntimeError: without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError(
            f"a picture to draw into {path}: matplotlib is not installed. Run pip install matplotlib, or "
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
        verdict, asked = judge(step, expected), expected_weights(step, expected)
        said = "every token weighs what it should" if verdict.sound else verdict.headline.partition("; ")[2]
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
    handles: list[Any] = [Line2D([], [], color=_ASKED, linewidth=1.4, label="expected")]
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
    microbatch = tokens.groups("dp_rank", "microbatch")[entries]
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
    place.set_ylabel("weight / mean\nexpected weight", fontsize=9)
    place.tick_params(labelsize=8.5)
    place.spines[["top", "right", "bottom"]].set_visible(False)


def _changes(*columns: Any) -> Any:
    """Flags of tokens that differ from the one before."""
    return np.diff(np.stack(columns), axis=1, prepend=np.nan).any(0)


def _runs(at: Floats, *columns: Any) -> tuple[Ints, Floats, Floats]:
    """Runs of neighbouring tokens that agree in all columns: the first token of each run, and the runs' bounds."""
    first = np.flatnonzero(_changes(*columns))
    last = np.append(first, len(at))[1:] - 1
    return first, at[first], at[last] + 1


def measure(*flags: str) -> MeasuredStep:
    """Run the example on 4 processes and return its measured step."""
    with tempfile.NamedTemporaryFile() as written:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(LOOP)]
        command += ["--context-parallel-size", "2", "--num-microbatches", "3", "--measured", written.name, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return torch.load(written.name, weights_only=False)  # of our own making


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="The picture: a PNG, or another suffix that matplotlib knows."
    )
    options = parser.parse_args()
    expected, steps = resolve("token_mean"), [measure(), measure("--exact")]
    panels = list(zip((STOCK, OURS), steps, strict=True))
    draw(panels, options.out, expected=expected)
    for title, step in panels:
        print(f"{title}\n{judge(step, expected)}")


if __name__ == "__main__":
    main()

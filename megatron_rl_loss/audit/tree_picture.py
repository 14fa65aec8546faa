"""The picture of a `PrefixTree`: a block for the slots of a run that weigh the same, in the place of bars of samples.

From left to right are depths, so that a block is as wide as its tokens. A lane is a leaf of the tree; a run is as high
as all leaves behind it. The colour of a block is the weight of one of its slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from megatron_rl_loss.audit.tokens import Floats, Ints
from megatron_rl_loss.core.aggregation import weigh
from megatron_rl_loss.core.collectives import rank_in
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.trees.layout import PrefixTree

#: Of weight 0, and from there to the largest weight, as red, green and blue.
_UNTRAINED, _LIGHT, _DARK = "#efefef", np.array([198, 219, 239]), np.array([8, 48, 107])
_MOST_BLOCKS = 3000  # of a panel, as of bars
_LEFT, _ABOVE, _UNDER = 46, 8, 26  # pixels beside, above and below the blocks


class Blocks(NamedTuple):
    """Neighbouring slots of a run that weigh the same, as columns [num_blocks].

    Attributes:
        run: its number in `PrefixTree.runs`.
        begin, end: the depth of its first slot, and the depth behind its last one.
        low, high: [low, high) of the leaves behind it, the first one on top.
        samples: number of samples through it.
        weights: of each of its slots: the sum of the weights of the losses that predict the slot's token.
    """

    run: Ints
    begin: Ints
    end: Ints
    low: Ints
    high: Ints
    samples: Ints
    weights: Floats


@dataclass(frozen=True)
class TreePanel:
    """A micro-batch whose samples share prefixes.

    Attributes:
        title, says: of the tree, and a sentence on it.
        place: DP rank, micro-batch and CP rank.
        most: the largest weight of a slot in all trees of the step, which has the darkest colour.
        num_lanes: number of leaves.
    """

    title: str
    says: str
    place: Mapping[str, int]
    blocks: Blocks
    most: float
    num_lanes: int

    @property
    def colours(self) -> list[str]:
        """Grey for a slot that is not trained; else by the size of its weight."""
        share = np.abs(self.blocks.weights)[:, None] / (self.most or 1.0)
        mixed = np.rint(_LIGHT + share * (_DARK - _LIGHT)).astype(int).tolist()
        pairs = zip(mixed, self.blocks.weights.tolist(), strict=True)
        return ["#{:02x}{:02x}{:02x}".format(*of) if weight else _UNTRAINED for of, weight in pairs]

    def texts(self) -> list[str]:
        """Of each block: run, depths, samples through it, weight, ranks and micro-batch."""
        place = "DP rank {dp_rank}, micro-batch {microbatch}, CP rank {cp_rank}".format(**self.place)
        texts = []
        for run, begin, end, _, _, samples, weight in zip(*(column.tolist() for column in self.blocks), strict=True):
            slots = (
                f"slot at depth {begin}" if end - begin == 1 else f"{end - begin} slots, depths {begin} to {end - 1}"
            )
            through = f"{samples} sample{only_if(samples > 1, 's')}"
            texts.append(f"run {run}, {slots}, of {through}: weight {weight:.6g}; {place}")
        return texts


def tree_panels(plan: Plan, *, title: str = "") -> list[TreePanel]:
    """A panel for each micro-batch of this rank whose layout is a `PrefixTree`; nothing is measured or exchanged."""
    drawn = list[tuple[int, Microbatch, PrefixTree, Floats]]()
    for number, microbatch in enumerate(plan.microbatches):
        if isinstance(tree := microbatch.samples.layout, PrefixTree):
            drawn.append((number, microbatch, tree, _weights_of_slots(plan, microbatch, tree)))
    most = max((float(np.abs(weights).max(initial=0.0)) for *_, weights in drawn), default=0.0)
    dp_rank, heading = rank_in(plan.record.groups.dp_group), title or str(plan.record.modes.policy)
    panels = []
    for number, microbatch, tree, weights in drawn:
        blocks, num_lanes = _blocks_of(tree, weights)
        place = {"dp_rank": dp_rank, "microbatch": number, "cp_rank": microbatch.cp_rank}
        says = f"DP {dp_rank}, micro-batch {number}: {tree!r}; colour: weight of a slot, up to {most:.6g}"
        if len(blocks.run) > _MOST_BLOCKS:
            says += f"; drawn: the first {_MOST_BLOCKS:,} of {len(blocks.run):,} blocks"
            blocks = Blocks._make(column[:_MOST_BLOCKS] for column in blocks)
        panels.append(TreePanel(heading, says, place, blocks, most, num_lanes))
    return panels


def _weights_of_slots(plan: Plan, microbatch: Microbatch, tree: PrefixTree) -> Floats:
    """Of each slot the sum of the weights of this rank's losses that predict its token, [num_slots]."""
    local = microbatch.tokens_of(None)
    weights = weigh(plan.record.modes.policy, local, plan.totals).double().numpy()
    trained = np.flatnonzero(weights)
    slot_weights = np.zeros(tree.num_slots)
    np.add.at(slot_weights, tree.slots[local.positions[trained] + 1], weights[trained])  # a last token weighs 0
    return slot_weights


def _blocks_of(tree: PrefixTree, weights: Floats) -> tuple[Blocks, int]:
    """The blocks of a tree, in the order of its slots, and the number of its leaves."""
    runs = np.array(tree.runs, np.int64).reshape(-1, 3)
    begins, ends, before = runs.T
    is_leaf = np.ones(len(runs), bool)
    is_leaf[before[before >= 0]] = False
    low, lanes = is_leaf.cumsum() - is_leaf, is_leaf.astype(np.int64)
    for run in range(len(runs) - 1, -1, -1):  # a run stands behind the one that it follows
        if before[run] >= 0:
            lanes[before[run]] += lanes[run]
    used = int(ends[-1]) if len(runs) else 0
    run_of = np.repeat(np.arange(len(runs)), ends - begins)
    through = np.bincount(tree.slots, minlength=tree.num_slots)[:used]
    columns = run_of, through, weights[:used]
    first = np.flatnonzero(np.any([np.r_[True, of[1:] != of[:-1]][:used] for of in columns], 0)) if used else run_of
    last = np.r_[first[1:], used][: len(first)] - 1
    runs_of, depths = run_of[first], tree.depths
    blocks = Blocks(
        run=runs_of, begin=depths[first], end=depths[last] + 1, low=low[runs_of],
        high=low[runs_of] + lanes[runs_of], samples=through[first], weights=weights[first],
    )  # fmt: skip
    return blocks, int(is_leaf.sum())


def legend_of(panels: Sequence[TreePanel]) -> list[tuple[str, str]]:
    """Colour and words of slots that are not trained, and of the largest weight."""
    if not panels:
        return []
    darkest = "#{:02x}{:02x}{:02x}".format(*_DARK.tolist())
    return [(_UNTRAINED, "a slot that is not trained"), (darkest, f"a slot of weight {panels[0].most:.6g}")]


def draw_tree(axes: Any, panel: TreePanel) -> None:
    """The blocks, on axes of matplotlib."""
    blocks = panel.blocks
    axes.barh(
        blocks.low, blocks.end - blocks.begin, blocks.high - blocks.low, blocks.begin, align="edge",
        color=panel.colours, edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    axes.set_ylim(max(panel.num_lanes, 1), 0)
    axes.set_xlim(0, max(int(blocks.end.max(initial=0)), 1))
    axes.set_yticks([])
    axes.set_xlabel("depth in the tree, in tokens", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def svg_of(panel: TreePanel) -> str:
    """The blocks as a drawing for a page, each with its text."""
    blocks, deepest = panel.blocks, max(int(panel.blocks.end.max(initial=0)), 1)
    step = max(1040 / deepest, min(3.0, 20000 / deepest))  # pixels of a token
    lane = max(3.0, min(24.0, 360 / max(panel.num_lanes, 1)))
    bottom = _ABOVE + lane * max(panel.num_lanes, 1)
    parts = [f'<svg width="{_LEFT + deepest * step + 10:g}" height="{bottom + _UNDER:g}" role="img">']
    numbers = (column.tolist() for column in (blocks.begin, blocks.end, blocks.low, blocks.high))
    for begin, end, low, high, colour, text in zip(*numbers, panel.colours, panel.texts(), strict=True):
        parts.append(
            f'<g class="bar"><title>{escape(text)}</title><rect class="slots" x="{_LEFT + begin * step:.2f}" '
            f'y="{_ABOVE + low * lane:.2f}" width="{(end - begin) * step:.2f}" height="{(high - low) * lane:.2f}" '
            f'fill="{colour}" stroke="#fff" stroke-width="0.5"/></g>'
        )
    every = 10 ** max(len(str(deepest)) - 1, 0)
    every = every if deepest // every > 3 else max(every // 4, 1)
    for depth in range(0, deepest + 1, every):
        x = _LEFT + depth * step
        parts.append(f'<text x="{x:.2f}" y="{bottom + 16:g}" text-anchor="middle">{depth}</text>')
    return "\n".join([*parts, "</svg>"])

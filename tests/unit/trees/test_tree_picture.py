"""The drawing of a plan whose samples share prefixes: where its blocks lie, what they weigh, how wide they are."""

import re
from pathlib import Path

import numpy as np
import pytest
import tree_oracle

from megatron_rl_loss import PrefixTree, Samples, plan_step
from megatron_rl_loss.audit.picture import figure_of, page_of
from megatron_rl_loss.audit.tree_picture import TreePanel, tree_panels

ROWS, MASKS = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6]], [[0, 1, 1, 0], [0, 1, 0], [1, 1, 0, 0]]


def panel_by_hand() -> TreePanel:
    samples = Samples(MASKS, layout=PrefixTree(ROWS), prompt_ids=["a", "b", "a"])
    (panel,) = tree_panels(plan_step([samples], "token_sum", dp_group=None))
    return panel


def test_blocks_of_a_tree_by_hand() -> None:
    """Weights of ones: a slot weighs as much as the number of samples whose masks ask for its token."""
    panel = panel_by_hand()
    columns = zip(*(column.tolist() for column in panel.blocks), strict=True)
    assert list(columns) == [  # run, begin, end, low, high, samples, weight
        (0, 0, 1, 0, 3, 3, 0.0),  # 1: nothing predicts it
        (0, 1, 2, 0, 3, 3, 1.0),  # 2: by the third sample alone
        (1, 2, 3, 0, 2, 2, 2.0),  # 3: by two samples
        (2, 3, 4, 0, 1, 1, 1.0),  # 4
        (3, 3, 4, 1, 2, 1, 0.0),  # 6: masked
        (4, 2, 3, 2, 3, 1, 1.0),  # 5
    ]
    assert (panel.num_lanes, panel.most) == (3, 2.0)
    assert panel.colours == ["#efefef", "#6786ad", "#08306b", "#6786ad", "#efefef", "#6786ad"]
    assert panel.texts()[2] == (
        "run 1, slot at depth 2, of 2 samples: weight 2; DP rank 0, micro-batch 0, CP rank 0"
    )  # fmt: skip


def blocks_of_page(page: str) -> list[tuple[float, ...]]:
    pattern = r'class="slots" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"'
    return [tuple(map(float, found)) for found in re.findall(pattern, page)]


def test_a_page_and_an_image_have_the_blocks() -> None:
    panel = panel_by_hand()
    page = page_of([panel])
    drawn, blocks = blocks_of_page(page), panel.blocks
    assert len(drawn) == len(blocks.run) == page.count("<title>run ")
    unit = drawn[0][2]  # a slot of one token
    assert unit > 0
    for (x, y, width, height), begin, end, low, high in zip(
        drawn, blocks.begin, blocks.end, blocks.low, blocks.high, strict=True
    ):
        assert (x - drawn[0][0], width) == pytest.approx((begin * unit, (end - begin) * unit), abs=0.02)
        assert (y - drawn[0][1], height) == pytest.approx((low * 24.0, (high - low) * 24.0), abs=0.02)
    assert re.findall(r'fill="(#\w{6})" stroke', page) == panel.colours
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    (axes,) = figure_of([panel]).axes
    patches = [
        (patch.get_x(), patch.get_width(), patch.get_y(), patch.get_height(), to_hex(patch.get_facecolor()))
        for patch in axes.patches
    ]
    edges = (blocks.begin, blocks.end - blocks.begin, blocks.low, blocks.high - blocks.low)
    assert patches == list(zip(*(column.tolist() for column in edges), panel.colours, strict=True))


def test_weights_of_drawn_forests_are_those_of_whole_samples() -> None:
    """Over all blocks, and of each slot: the sum over samples of the weights of the same samples without a tree."""
    shared = 0
    for seed in range(20):
        drawn = tree_oracle.forest(seed)
        tree = PrefixTree(drawn.rows)
        plans = [
            plan_step([Samples(drawn.masks, layout=layout)], "sample_mean", dp_group=None) for layout in (tree, None)
        ]
        (panel,) = tree_panels(plans[0])
        (whole,) = plans[1]
        right = np.zeros(tree.num_slots)
        bounds = np.cumsum([0, *map(len, drawn.rows)])
        weights = whole.weights.double().numpy()
        for path, begin in zip(tree.paths, bounds, strict=False):
            for t, slot in enumerate(path[1:].tolist()):
                right[slot] += weights[begin + t]
        blocks = panel.blocks
        got = np.repeat(blocks.weights, blocks.end - blocks.begin)
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=0)
        shared += int((blocks.samples > 1).sum())
    assert shared > 20


def test_a_plan_with_trees_and_whole_samples_draws_both(tmp_path: Path) -> None:
    tree = PrefixTree(ROWS)
    plan = plan_step(
        [Samples(MASKS, layout=tree), Samples([[1, 1, 0]]), Samples([[1, 0]], layout=PrefixTree([[8, 9]]))],
        "token_mean",
        dp_group=None,
    )
    plan.plot(tmp_path / "plan.html", title="some <samples>")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<h2>some &lt;samples&gt;</h2>") == 3  # the bars of whole samples, and two trees
    assert "sample 0, 2 tokens, 0 to 1" in page
    assert len(blocks_of_page(page)) == 6 + 2
    assert "DP 0, micro-batch 2: PrefixTree(1 samples, 2 tokens in 2 slots, 1 runs)" in page
    alone = plan_step([Samples([], layout=PrefixTree([]))], "token_mean", dp_group=None)
    alone.plot(tmp_path / "empty.html")
    assert not blocks_of_page((tmp_path / "empty.html").read_text())


def test_a_large_tree_is_drawn_in_part() -> None:
    row, mask = [1, *[2, 3] * 1000], [0, *[1, 0.5] * 999, 1, 0]
    tree = PrefixTree([row, [4, *row]])  # two branches, in which each slot weighs other than its neighbours
    (panel,) = tree_panels(plan_step([Samples([mask, [0, *mask]], layout=tree)], "token_mean", dp_group=None))
    assert len(panel.blocks.run) == 3000
    assert "drawn: the first 3,000 of 4,000 blocks" in panel.says

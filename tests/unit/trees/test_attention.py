"""Visibility in each of its forms beside the boolean mask, attention by runs, and models that a tree does not fit."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tree_oracle
from refusals import refusal_tests, refusals
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from tree_oracle import forest

from megatron_rl_loss import PrefixTree, Samples
from megatron_rl_loss.trees import attention
from megatron_rl_loss.trees.layout import check_trees


def branching(seed: int, size: int) -> PrefixTree:
    """Long rows that branch at random places, so that blocks are seen wholly, in part and not at all."""
    rng = random.Random(seed)
    rows = [[rng.randrange(3) for _ in range(rng.randint(1, size))]]
    for _ in range(rng.randint(0, 6)):
        row = rng.choice(rows)
        rows.append(row[: rng.randint(0, len(row))] + [rng.randrange(3) for _ in range(rng.randint(1, size))])
    return PrefixTree(rows, multiple=rng.choice([1, 4, 16]))


def test_a_block_mask_is_that_of_the_dense_one() -> None:
    """Blocks that are seen in part and wholly are those that torch finds by looking at each slot."""
    kinds = set[str]()
    for seed in range(40):
        tree, size = branching(seed, 40), (8, 16)[seed % 2]
        mask = tree.block_mask("cpu", size)
        slots = tree.num_slots
        right = create_block_mask(tree.mask_mod(), 1, 1, slots, slots, device="cpu", BLOCK_SIZE=size)
        assert mask.seq_lengths == right.seq_lengths
        for name in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(mask, f"{name}_num_blocks")
            assert torch.equal(counts, getattr(right, f"{name}_num_blocks")), (seed, name)
            for row, count in enumerate(counts[0, 0].tolist()):
                ours, theirs = (getattr(of, f"{name}_indices")[0, 0, row, :count] for of in (mask, right))
                assert torch.equal(ours, theirs)
            kinds |= {name} if counts.sum() else set()
        assert torch.equal(mask.to_dense()[0, 0].bool(), right.to_dense()[0, 0].bool())
    assert kinds == {"kv", "full_kv", "q", "full_q"}


def test_flex_attention_sees_what_the_mask_shows() -> None:
    tree = branching(3, 40)
    q, k, v = (torch.randn(1, 2, tree.num_slots, 8, dtype=torch.float64) for _ in range(3))
    right = scaled_dot_product_attention(q, k, v, attn_mask=tree.visible())
    got = flex_attention(q, k, v, block_mask=tree.block_mask(block_size=16))
    assert torch.allclose(got, right, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_by_runs(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients; queries a few at a time, as those of a long run are."""
    monkeypatch.setattr(attention, "QUERIES", 5)
    for seed in range(20):
        tree = branching(seed, 20)
        shapes = [(2, heads, tree.num_slots, 8) for heads in (2 * groups, 2, 2)]
        q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
        right = scaled_dot_product_attention(q, k, v, attn_mask=tree.visible(), enable_gqa=groups > 1)
        got, ones = tree.attend(q, k, v), torch.randn_like(right)
        right_gradients, got_gradients = (torch.autograd.grad(out, (q, k, v), ones) for out in (right, got))
        assert tree_oracle.error([got, *got_gradients], [right, *right_gradients]) < 1e-12


def test_a_model_by_runs_is_that_of_whole_samples() -> None:
    for seed in range(6):
        drawn, model = forest(seed), tree_oracle.net(seed)
        tree = PrefixTree(drawn.rows)
        (tokens, depths), whole = (column[0] for column in tree.inputs()), tree_oracle.whole(model, drawn.rows)
        log_q = model(tokens, depths, tree.attend).log_softmax(-1)
        for (log_probs, _), path, row in zip(whole, tree.paths, drawn.rows, strict=True):
            got = log_q[torch.tensor(path[:-1]), torch.tensor(row[1:], dtype=torch.long)]
            assert torch.allclose(got, log_probs[:-1], atol=1e-12)


def test_a_padding_slot_sees_itself_alone() -> None:
    tree = PrefixTree([[1, 2], [1, 3]], multiple=8)
    assert torch.equal(tree.visible()[3:, :].nonzero()[:, 1], torch.arange(3, 8))


# --- models


class MambaMixer(nn.Module):
    pass


class Named(MambaMixer):
    """A mixer made of Megatron's, under a name of its own."""


class OfAnyName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2))


def model_with(*layers: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(2, 2), *layers)


def described(**settings: Any) -> None:
    model = nn.Linear(2, 2)
    vars(model).update(settings)
    PrefixTree.check_model([model])


BY_NEIGHBOURS = "it goes by neighbours in the buffer"
NOT_TOLD = "its state would go from one branch to the next"
test_refusals = refusal_tests(
    {
        **refusals(
            lambda *layers: PrefixTree.check_model(model_with(*layers)),
            *(
                ((layer,), rf"{type(layer).__name__} \(1\): {NOT_TOLD}", (right,))
                for layer, right in [
                    (MambaMixer(), nn.Linear(2, 2)),
                    (Named(), nn.Linear(2, 2)),
                    (OfAnyName(), nn.LayerNorm(2)),
                    (nn.GRU(2, 2), nn.MultiheadAttention(2, 1)),
                    (nn.Conv1d(2, 2, 4), nn.Conv1d(2, 2, 1)),
                ]
            ),
        ),
        **refusals(
            described,
            (
                {"hybrid_layer_pattern": "M-*-"},
                f"the layers 'M-\\*-' .*{BY_NEIGHBOURS}",
                {"hybrid_layer_pattern": "*-*E"},
            ),
            (
                {"config": SimpleNamespace(mtp_num_layers=1)},
                f"multi-token prediction: {BY_NEIGHBOURS}",
                {"config": SimpleNamespace(mtp_num_layers=None)},
            ),
            (
                {"config": SimpleNamespace(window_size=(4, 0))},
                f"sliding window .*{BY_NEIGHBOURS}",
                {"config": SimpleNamespace(window_size=None)},
            ),
        ),
        **refusals(
            lambda slots: PrefixTree([[1, 2]]).attend(*[torch.zeros(1, 1, slots, 4)] * 3),
            ((3,), "q of shape .* for a tree of 2 slots", (2,)),
        ),
    }
)


def test_dropout_is_warned_of() -> None:
    model = model_with(nn.Dropout(0.1))
    with pytest.warns(UserWarning, match="dropout .Dropout of 0.1.: a slot draws once"):
        PrefixTree.check_model(model)
    PrefixTree.check_model(model.eval())
    PrefixTree.check_model(model_with(nn.Dropout(0.0)))


class Counted(nn.Sequential):
    """A model that counts how often its modules are walked."""

    walks = 0

    def named_modules(self, *arguments: Any, **settings: Any) -> Any:
        self.walks += 1
        return super().named_modules(*arguments, **settings)


@pytest.mark.parametrize("model", ["x", ["x"], None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="must be a module or a list of them"):
        PrefixTree.check_model(model)


def test_a_planned_model_is_walked_once_and_not_in_every_step() -> None:
    trees, whole = [Samples([[0, 0]], layout=PrefixTree([[1, 2]]))], [Samples([[1, 0]])]
    model = Counted(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    check_trees(whole, model)
    assert model.walks == 0  # without a tree
    check_trees(trees, [model])
    once = model.walks
    assert once > 0
    for _ in range(3):
        check_trees(trees, model)
    assert model.walks == once
    with pytest.warns(UserWarning, match="a slot draws once"):  # dropout matters from now on
        check_trees(trees, model.train())
    assert model.walks == 2 * once
    check_trees(trees, model)
    check_trees(trees, model.eval())
    assert model.walks == 2 * once
    with pytest.warns(UserWarning, match="a slot draws once"):  # another model of the same kind
        check_trees(trees, Counted(nn.Linear(2, 2), nn.Dropout(0.1)))
    refused = Counted(MambaMixer())
    for _ in range(2):
        with pytest.raises(ValueError, match=NOT_TOLD):
            check_trees(trees, refused)


def test_rotary_embeddings_are_looked_up_by_depth() -> None:
    class Rotary(nn.Module):
        def forward(self, length: int) -> torch.Tensor:
            return torch.arange(length)[:, None]

    model, tree = nn.ModuleDict({"rotary_pos_emb": Rotary()}), PrefixTree([[1, 2, 3], [1, 4, 5]])
    with tree.rotary_by_depth(model):
        assert model["rotary_pos_emb"](5).ravel().tolist() == tree.depths.tolist() == [0, 1, 2, 1, 2]
        with pytest.raises(ValueError, match="embeddings of 4 places for 5 slots"):
            model["rotary_pos_emb"](4)
    assert model["rotary_pos_emb"](5).ravel().tolist() == list(np.arange(5))

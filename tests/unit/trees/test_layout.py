"""A tree beside whole samples: the gradient of every mode, in float64, and what is refused.

Forests are drawn: ragged samples that branch, copies, samples inside another, samples of one token. Losses are PPO's
and CISPO's of each sample's own advantage, a KL term with its own mode, and an entropy bonus. Attention over all slots
in one process stands for a CP whose ranks exchange keys and values; each rank computes the logits of its own slots.
"""

import random
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import tree_oracle
from refusals import refusal_tests, refusals
from torch import Tensor
from tree_controls import CONTROLS, Slots
from tree_oracle import Forest, forest, net

from megatron_rl_loss import PrefixTree, Samples, StepTotals, make_pg_loss_reducer, plan_step
from megatron_rl_loss.trees.edges import Edges

DOUBLE, SINGLE = 1e-12, 1e-6
LOSSES = {"ppo": tree_oracle.ppo, "cispo": tree_oracle.cispo}
KL, ENTROPY, DIVISOR = 0.1, -0.01, 7.0


def weights_of(mode: str, units: str, drawn: Forest, sessions: list[int], turns: list[list[Any]]) -> list[Tensor]:
    """The weight of each token of whole samples, by the oracle."""
    if mode in oracle.BY_IDS:
        rows = oracle.weights_by_ids(mode, drawn.masks, sessions, turns, units)
    else:
        pairs = zip(drawn.masks, drawn.prompts, strict=True)
        samples = [oracle.Sample(mask.double(), mask, None, prompt) for mask, prompt in pairs]
        rows = oracle.step_weights(mode, samples, oracle.divisor_of(mode, DIVISOR), units)
    return [torch.tensor(row, dtype=mask.dtype) for row, mask in zip(rows, drawn.masks, strict=True)]


class Case:
    """A drawn step: whole samples by the oracle, and the same by trees of its micro-batches."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        rng = random.Random(seed)
        self.drawn, self.model = forest(seed, dtype), net(seed, dtype)
        number = len(self.drawn.rows)
        self.sessions = [rng.randrange(3) for _ in range(number)]
        self.turns: list[list[Any]] = [
            [f"{rng.randrange(2)}" if entry else "" for entry in mask.tolist()] for mask in self.drawn.masks
        ]
        self.order, self.cuts = rng.sample(range(number), number), rng.randint(1, 3)
        self.whole = tree_oracle.whole(self.model, self.drawn.rows)

    def right(self, mode: str, units: str, loss: str, kl_mode: str) -> Tensor:
        d, total = self.drawn, torch.zeros(())
        of_loss, of_kl = (weights_of(name, units, d, self.sessions, self.turns) for name in (mode, kl_mode))
        for i, (log_probs, entropy) in enumerate(self.whole):
            losses = LOSSES[loss](log_probs, d.old[i], d.advantages[i]) + ENTROPY * entropy
            kl = tree_oracle.k3(log_probs, d.old[i] + 0.1)
            total = total + (of_loss[i] * losses + KL * of_kl[i] * kl)[d.masks[i] != 0].sum()
        return total

    def samples(self, numbers: list[int], layout: PrefixTree | None) -> Samples:
        part = self.drawn.part(numbers)
        ids: Any = {name: [getattr(self, f"{name}s")[i] for i in numbers] for name in ("session", "turn")}
        return Samples(part.masks, layout=layout, prompt_ids=part.prompts, ids=ids)

    def by_trees(
        self, mode: str, units: str, loss: str, kl_mode: str, cp: int, zigzag: bool, change: Any = None
    ) -> Tensor:
        """The shares of all micro-batches and CP ranks, added up; `change`: of a tree's slots and edges, in place."""
        totals, share = StepTotals.of(self.samples(self.order, None)), torch.zeros(())
        divisor = oracle.divisor_of(mode, DIVISOR)
        for cut in range(self.cuts):
            numbers = self.order[cut :: self.cuts]
            part = self.drawn.part(numbers)
            tree = PrefixTree(part.rows, multiple=2 * cp, zigzag=zigzag, cp_attention=cp > 1)
            samples, slots = self.samples(numbers, tree), Slots(tree)
            if change is not None:
                change(slots)
            hidden = self.model.hidden(slots.tokens, slots.depths, slots.visible)
            for rank in range(cp):
                local = samples.local(rank, cp)
                at: dict[str, Any] = {"units": units, "cp_rank": rank, "cp_size": cp}
                edges = slots.edges(tree.edges(local))
                mine = self.model.head(hidden[torch.from_numpy(tree.local_slots(rank, cp))])
                log_q = mine[torch.from_numpy(edges.sources)].log_softmax(-1)
                of_edges = log_q[torch.arange(len(edges)), torch.as_tensor(edges.labels)]
                log_probs, entropy = map(edges.to_tokens, (of_edges, -(log_q.exp() * log_q).sum(-1)))
                columns = {name: local.of(column.to(log_probs)) for name, column in part.columns().items()}
                old, of_loss = columns["old"], (log_probs, columns["old"], columns["advantages"])
                reducer = make_pg_loss_reducer(mode, samples, totals=totals, divisor=divisor, **at)
                of_kl = make_pg_loss_reducer(kl_mode, samples, totals=totals, **at)
                share = share + reducer(LOSSES[loss](*of_loss) + ENTROPY * entropy)
                share = share + KL * of_kl(tree_oracle.k3(log_probs, old + 0.1))
        return share


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_mode_is_that_of_whole_samples(dtype: torch.dtype, record_property: Any) -> None:
    """Modes and countings by turns, with CP 1, 2 and 4, both cuts, one to three micro-batches."""
    bound, cases, worst = DOUBLE if dtype == torch.float64 else SINGLE, 0, 0.0
    countings = [*oracle.COUNTINGS, *((mode, units) for mode in oracle.BY_IDS for units in oracle.BY_MASKS)]
    for seed in range(18):
        case = Case(seed, dtype)
        for number in range(6):
            mode, units = countings[(6 * seed + number) % len(countings)]
            cp, zigzag = (1, 2, 4)[number % 3], bool((seed + number) % 2)
            asked = (mode, units, list(LOSSES)[(seed + number) % 2], ("token_mean", "prompt_mean")[seed % 2])
            right, got = case.right(*asked), case.by_trees(*asked, cp, zigzag)
            of_right, of_got = (tree_oracle.gradients(loss, case.model) for loss in (right, got))
            worst, cases = max(worst, tree_oracle.error(of_got, of_right)), cases + 1
            assert worst <= bound, (seed, asked, cp, zigzag, worst)
            assert float((got - right).detach()) == pytest.approx(
                0, abs=10 * bound * max(1.0, abs(float(right.detach())))
            )
    record_property("trees_beside_whole_samples", cases)
    record_property(f"error_of_trees_{dtype}", worst)


# --- negative controls: what must not go unseen


@pytest.mark.parametrize("change", CONTROLS)
def test_negative_control(change: Any) -> None:
    seen = 0
    for seed in range(12):
        case = Case(seed)
        case.cuts = 1
        right, got = case.right("sample_mean", "all", "ppo", "token_mean"), None
        got = case.by_trees("sample_mean", "all", "ppo", "token_mean", 1, True, change)
        errors = tree_oracle.error(*(tree_oracle.gradients(loss, case.model) for loss in (got, right)))
        seen += errors > 1e-4
    assert seen >= 6  # the others have no branch whose tokens are trained on


# --- slots


def test_slots_of_a_tree_by_hand() -> None:
    """A prompt 5 6 with three answers, one a copy; one that ends inside another; one that shares nothing."""
    tree = PrefixTree([[5, 6, 8, 9], [7], [5, 6, 7], [5, 6, 8, 9], [5, 6, 8]], multiple=4)
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 7, 0, 0]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 0, 0, 0]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3, -1, -1, -1]
    assert tree.ends.tolist() == [5, 5, 3, 5, 5, 6, 7, 8]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 3, 4], [5], [0, 1, 2], [0, 1, 3, 4], [0, 1, 3]]
    assert tree.runs == [(0, 2, -1), (2, 3, 0), (3, 5, 0), (5, 6, -1)]
    assert repr(tree) == "PrefixTree(5 samples, 15 tokens in 8 slots, 4 runs)"
    assert "<td>0</td><td>2</td><td></td><td>4</td><td>5 6</td>" in tree._repr_html_()


def test_slots_of_drawn_forests() -> None:
    """A slot for each distinct prefix, visible to the slots that it is a prefix of."""
    for seed in range(60):
        rows = forest(seed).rows
        tree = PrefixTree(rows)
        prefix_of: dict[int, tuple[int, ...]] = {}
        for row, path in zip(rows, tree.paths, strict=True):
            for depth, slot in enumerate(path.tolist()):
                assert prefix_of.setdefault(slot, tuple(row[: depth + 1])) == tuple(row[: depth + 1])
        assert len(set(prefix_of.values())) == tree.num_slots == len(prefix_of)
        visible = tree.visible()
        for q, of_q in prefix_of.items():
            assert (tree.tokens[q], tree.depths[q]) == (of_q[-1], len(of_q) - 1)
            assert tree.parents[q] == (
                -1 if len(of_q) == 1 else tree.paths[0].dtype.type(slot_of(prefix_of, of_q[:-1]))
            )
            for k, of_k in prefix_of.items():
                assert bool(visible[q, k]) == (of_q[: len(of_k)] == of_k)


def slot_of(prefix_of: dict[int, tuple[int, ...]], prefix: tuple[int, ...]) -> int:
    return next(slot for slot, known in prefix_of.items() if known == prefix)


@pytest.mark.parametrize(
    "of", [list, tuple, torch.tensor, np.array, lambda row: torch.tensor(row).int(), lambda row: np.array(row, ">u2")]
)
def test_rows_of_any_kind(of: Any) -> None:
    rows = [[5, 6, 7], [5, 6]]
    assert PrefixTree([of(row) for row in rows]).describe() == PrefixTree(rows).describe()


def test_ids_beyond_32_bits() -> None:
    tree = PrefixTree([[2**40, 1], [2**40, 2], [1]])
    assert tree.tokens.tolist() == [1, 2**40, 1, 2]


def test_a_million_tokens() -> None:
    rows = [np.arange(10**6), np.arange(10**6 + 1), np.arange(3)]
    tree = PrefixTree(rows)
    assert (tree.num_slots, tree.runs) == (10**6 + 1, [(0, 10**6 + 1, -1)])
    held = sum(values.nbytes for values in (tree.tokens, tree.depths, tree.parents, tree.ends, tree.slots))
    assert held <= 40 * tree.total_tokens


def test_no_row_is_padding_alone() -> None:
    tree = PrefixTree([], multiple=4)
    assert (tree.num_slots, tree.total_tokens, tree.runs) == (4, 0, [])
    assert tree.visible().tolist() == torch.eye(4, dtype=torch.bool).tolist()
    assert len(tree.edges(Samples([], layout=tree).local(0, 1))) == 0


# --- packs


def test_packs_hold_every_row_once_within_the_budget() -> None:
    rng = random.Random(0)
    for seed in range(40):
        rows, dp, multiple = forest(seed).rows, rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
        budget = rng.choice([12, 16, 24])
        packs = PrefixTree.pack(rows, budget, dp_size=dp, multiple=multiple)
        assert sorted(number for rank in packs for pack in rank for number in pack) == list(range(len(rows)))
        assert (len(packs), len({len(rank) for rank in packs})) == (dp, 1)
        for pack in (pack for rank in packs for pack in rank):
            assert PrefixTree([rows[i] for i in pack], multiple=multiple).num_slots <= budget


def test_packs_share_and_are_balanced() -> None:
    """Groups of four answers to one of eight prompts: each group in one tree, ranks within a tree of each other."""
    rng = np.random.default_rng(0)
    rows, groups = [], []
    for group in range(8):
        prompt = rng.integers(100, 200, 64)
        rows += [np.concatenate([prompt, rng.integers(0, 99, 16)]) for _ in range(4)]
        groups += [group] * 4
    order = rng.permutation(len(rows)).tolist()
    packs = PrefixTree.pack([rows[i] for i in order], 300, dp_size=2)
    of_trees = [{groups[order[i]] for i in pack} for rank in packs for pack in rank]
    assert sum(map(len, of_trees)) == 8  # no group in two trees
    sizes = [sum(PrefixTree([rows[order[i]] for i in pack]).num_slots for pack in rank) for rank in packs]
    assert sum(sizes) == 8 * (64 + 4 * 16)  # no prompt twice
    assert max(sizes) - min(sizes) <= 64 + 4 * 16


def test_packs_of_more_ranks_than_rows() -> None:
    assert sorted(PrefixTree.pack([[1, 2], [1, 3]], 8, dp_size=3)) == [[[]], [[0]], [[1]]]


# --- what is refused


def masked(rows: list[list[int]], *masks: Any, **settings: Any) -> Samples:
    return Samples(masks, layout=PrefixTree(rows, **settings))


def edges_of(other: bool) -> Edges:
    tree = PrefixTree([[1, 2]])
    return tree.edges(Samples([[1, 0]], layout=PrefixTree([[1, 2]]) if other else tree).local(0, 1))


def cut(rows: list[list[int]], size: int, **settings: Any) -> Any:
    return [
        Samples([[1.0, 0.0]] * len(rows), layout=PrefixTree(rows, **settings)).local(rank, size) for rank in range(size)
    ]


INTS = "it must be one row of ints, the token ids"
LONG = list(range(40_000))  # masks that are read in groups
test_refusals = refusal_tests(
    {
        **refusals(
            PrefixTree,
            (([[1, -100]],), "row 0 has the token id -100", ([[1, 100]],)),
            (([[1], []],), "row 1 has no token", ([[1], [1]],)),
            (([[2**63]],), "row 0 has the token id", ([[2**62]],)),
            ({"rows": [[1]], "multiple": 0}, "multiple is 0", {"rows": [[1]], "multiple": 1}),
        ),
        **refusals(
            PrefixTree,
            (([[1.0, 2.0]],), f"row 0 is float64 .*{INTS}", ([[1, 2]],)),
            (([[1], [True]],), f"row 1 is bool .*{INTS}", ([[1], [1]],)),
            (([[[1, 2]]],), r"row 0 is int64 \(1, 2\)", ([[1, 2]],)),
            (([[[1], [1, 2]]],), f"row 0 is object.*{INTS}", ([[1], [1, 2]],)),
            (([torch.tensor([0.5])],), f"row 0 is torch.float32.*{INTS}", ([torch.tensor([5])],)),
            ((torch.ones(2, 3, dtype=torch.long),), "rows is one Tensor", (list(torch.ones(2, 3, dtype=torch.long)),)),
            (({(1, 2)},), "rows is one set", ([(1, 2)],)),
            ((torch.nested.nested_tensor([[1], [1, 2]], dtype=torch.long),), "rows is one Tensor", ([[1], [1, 2]],)),
            ({"rows": [[1]], "zigzag": "no"}, "zigzag is 'no'", {"rows": [[1]], "zigzag": False}),
            error=TypeError,
        ),
        **refusals(
            masked,
            (([[1, 2, 3]], [1, 1]), "sample 0 has 2 entries for 3 tokens", ([[1, 2, 3]], [1, 1, 0])),
            (([[1, 2], [1]], [1, 0]), "1 masks for 2 rows", ([[1, 2], [1]], [1, 0], [0])),
            (
                ([[1, 2], [1, 3]], [1, 0], [1, 1]),
                "mask of sample 1 has 1 at its last",
                ([[1, 2], [1, 3]], [1, 0], [1, 0]),
            ),
            (([LONG], [1] * len(LONG)), "mask of sample 0 has 1 at its last", ([LONG], [1] * (len(LONG) - 1) + [0])),
        ),
        **refusals(edges_of, ((True,), "tokens of samples with PrefixTree", (False,))),
        **refusals(
            cut,
            (([[1, 2], [1, 3]], 2), "must exchange keys and values", ([[1, 2], [1, 3]], 1)),
            (
                {"rows": [[1, 2], [1, 3]], "size": 2, "cp_attention": True},
                "3 slots for 2 context-parallel ranks: it must be a multiple of 4",
                {"rows": [[1, 2], [1, 3]], "size": 2, "cp_attention": True, "multiple": 4},
            ),
        ),
        **refusals(
            PrefixTree.pack,
            (([[1, 2, 3], [1]], 2), "row 0 has 3 tokens, of at most 2 slots", ([[1, 2, 3], [1]], 3)),
            (
                {"rows": [[1] * 5], "max_slots": 7, "multiple": 4},
                "at most 4 slots",
                {"rows": [[1] * 5], "max_slots": 8},
            ),
            (([[1]], 0), "max_slots is 0", ([[1]], 1)),
        ),
    }
)


def test_tokens_of_the_model_are_compared_with_slots() -> None:
    tree = PrefixTree([[1, 2, 3], [1, 2, 4]])
    (microbatch,) = plan_step([Samples([[0, 1, 0]] * 2, layout=tree)], "token_mean", dp_group=None)
    microbatch.check_tokens(tree.inputs()[0])
    for wrong, text in (
        ([1, 2, 3, 4, 4], "5 local tokens: this rank's part of the layout is 4"),
        ([1, 2, 4, 3], "2 local"),
    ):
        with pytest.raises(ValueError, match=text):
            microbatch.check_tokens(torch.tensor(wrong))

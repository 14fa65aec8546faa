"""Log-probs of edges beside those of whole samples, values and gradients in float64: each needed edge is read once.

Entropy, kept ids, K ids with their rest, a teacher, a loss in one pass; the vocabulary on one rank and on two, with
hidden states whole or cut along the sequence.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tree_oracle
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor
from tree_oracle import WORDS, Forest, Net, forest, net

from megatron_rl_loss import (
    OutputLayer,
    PrefixTree,
    Samples,
    Teacher,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
)
from megatron_rl_loss.logprobs.kept_ids import KeptIds
from megatron_rl_loss.trees.edges import Edges

BOUND, K = 1e-12, 3


class Step:
    """A tree and its edges, the hidden states of its slots; and of whole samples log-softmaxes, 0 where masked."""

    def __init__(self, seed: int, multiple: int = 1) -> None:
        self.rng, self.drawn, self.model = random.Random(seed), forest(seed), net(seed)
        self.tree = PrefixTree(self.drawn.rows, multiple=multiple)
        self.samples = Samples(self.drawn.masks, layout=self.tree)
        self.edges = self.tree.edges(self.samples.local(0, 1))
        self.mask = torch.cat(self.drawn.masks) != 0
        self.labels = torch.cat([torch.tensor([*row[1:], 0]) for row in self.drawn.rows])
        self.layer = OutputLayer(self.model.head.weight, self.model.head.bias, chunk_tokens=3)

    def hidden(self, model: Net | None = None) -> Tensor:
        tokens, depths = self.tree.inputs()
        return (model or self.model).hidden(tokens[0], depths[0], self.tree.visible())

    def logits_of_rows(self, model: Net | None = None) -> Tensor:
        model, rows = model or self.model, self.drawn.rows
        of_rows = [
            model(torch.tensor(row), torch.arange(len(row)), torch.ones(len(row), len(row), dtype=torch.bool).tril())
            for row in rows
        ]
        return torch.cat(of_rows)

    def check(self, got: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Values where a mask asks for them, else 0; and gradients of their weighted sum."""
        sums = []
        for values, expected in zip(got, right, strict=True):
            shown = expected.where(self.mask.view(-1, *[1] * (expected.dim() - 1)), 0.0)
            assert torch.allclose(values, shown, atol=BOUND, rtol=BOUND)
            weights = torch.linspace(-1, 2, shown.numel(), dtype=shown.dtype).view(shown.shape)
            sums.append(((values * weights).sum(), (shown * weights).sum()))
        of_got, of_right = (tree_oracle.gradients(sum(part), self.model) for part in zip(*sums, strict=True))
        assert tree_oracle.error(of_got, of_right) < BOUND

    def columns(self, of_prefix: Any) -> list[Any]:
        """A column of tokens that depends on the prefix, but for some tokens, whose engine saw it otherwise."""
        known: dict[int, Any] = {}
        return [
            of_prefix(self.rng) if self.rng.random() < 0.1 else known.setdefault(slot, of_prefix(self.rng))
            for slot in self.tree.slots.tolist()
        ]


STEPS = range(12)


@pytest.mark.parametrize("of", ["hidden", "logits"])
def test_log_probs_and_entropy(of: str) -> None:
    shared = 0
    for seed in STEPS:
        step = Step(seed)
        hidden = step.hidden()
        if of == "hidden":
            got = log_probs_from_hidden(hidden, step.layer, step.edges, entropy=True)
        else:
            got = log_probs_from_logits(step.model.head(hidden), step.edges, entropy=True)
        log_q = step.logits_of_rows().log_softmax(-1)
        step.check(got, [log_q.gather(1, step.labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1)])
        children = step.tree.slots[np.flatnonzero(step.mask.numpy()) + 1]
        assert sorted(step.edges.labels) == sorted(step.tree.tokens[np.unique(children)])  # each edge once
        shared += len(children) - len(step.edges)
    assert shared > 20


def test_edges_of_further_masks_are_read_too() -> None:
    tree = PrefixTree([[1, 2, 3], [1, 2, 4]])
    masks = {"kl": [[1, 0, 0], [0, 0, 0]]}
    edges = tree.edges(Samples([[0, 1, 0], [0, 0, 0]], layout=tree, term_masks=masks).local(0, 1))
    assert (edges.sources.tolist(), np.array(edges.labels).tolist()) == ([0, 1], [2, 3])
    assert edges.token_edges.tolist() == [0, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("kind", ["KeptIds", "mask", "mask of all"])
def test_kept_ids(kind: str) -> None:
    apart = 0
    for seed in STEPS:
        step = Step(seed)
        sets = step.columns(lambda rng: sorted(rng.sample(range(WORDS), rng.randint(1, 4))))
        keep: Any = torch.zeros(len(sets), WORDS, dtype=torch.bool)
        for row, kept in zip(keep, sets, strict=True):
            row[kept] = True
        if kind == "mask of all":
            keep = keep[0].expand(len(sets), WORDS)
        counted = keep.clone()
        counted[torch.arange(len(sets)), step.labels] = True  # a label always counts
        given = keep
        if kind == "KeptIds":
            ids = torch.tensor([i for kept in sets for i in kept])
            given = KeptIds(ids, np.cumsum([0, *map(len, sets)]))
        elif kind == "mask of all":
            given = keep[0].clone()
        got = log_probs_from_hidden(step.hidden(), step.layer, step.edges, keep=given, entropy=True)
        log_q = step.logits_of_rows().masked_fill(~counted, -1e300).log_softmax(-1)
        step.check(got, [log_q.gather(1, step.labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1)])
        apart += len(step.edges) < int(step.mask.sum())
    assert apart > 6


def test_k_ids_and_their_rest() -> None:
    split = 0
    for seed in STEPS:
        step = Step(seed)
        ids = torch.tensor(step.columns(lambda rng: rng.sample(range(WORDS), K)))
        marked = torch.tensor(step.columns(lambda rng: [rng.random() < 0.7 for _ in range(K)]))
        edges = step.edges.with_ids(ids)
        split += len(edges) > len(step.edges)
        assert len(edges) < int(step.mask.sum()) or len(step.edges) >= int(step.mask.sum()) - 2
        log_q = step.logits_of_rows().log_softmax(-1)
        right = log_q.gather(1, ids)
        (got, _) = log_probs_from_hidden(step.hidden(), step.layer, edges)
        step.check([got], [right])
        (got, _) = log_probs_from_hidden(step.hidden(), step.layer, edges, rest_without=marked)
        others = torch.ones(len(ids), WORDS, dtype=torch.bool)
        for row, of_row, marks in zip(others, ids, marked, strict=True):
            row[of_row[marks]] = False
        step.check([got], [torch.cat([right, log_q.masked_fill(~others, -1e300).logsumexp(-1)[:, None]], 1)])
    assert split > 2


@pytest.mark.parametrize("by", ["hidden", "logits"])
def test_a_teachers_divergence(by: str) -> None:
    for seed in STEPS:
        step, other = Step(seed), net(seed + 100)
        with torch.no_grad():
            hidden, right_q = step.hidden(other), step.logits_of_rows(other).log_softmax(-1)
            of_slots = (hidden, other.head.weight, other.head.bias) if by == "hidden" else (other.head(hidden),)
        teacher = Teacher(*of_slots, kind="reverse_kl")
        got = log_probs_from_hidden(step.hidden(), step.layer, step.edges, teacher=teacher)
        log_p = step.logits_of_rows().log_softmax(-1)
        kl = (log_p.exp() * (log_p - right_q)).sum(-1)
        step.check([got.log_probs, got.divergence], [log_p.gather(1, step.labels[:, None])[:, 0], kl])


def test_a_loss_in_one_pass() -> None:
    """Each sample's own advantage, at an edge that several share too."""

    def per_token(log_probs: Tensor, entropy: Any, old: Tensor, advantages: Tensor) -> Any:
        return tree_oracle.ppo(log_probs, old, advantages), {"ratio": (log_probs - old).exp()}

    for seed in STEPS:
        step = Step(seed)
        columns = step.drawn.columns()
        inputs = {"old": columns["old"], "advantages": columns["advantages"][None]}
        weights = columns["masks"] / 7
        share, values = loss_from_hidden(step.hidden(), step.layer, step.edges, weights, per_token, inputs)
        log_probs = step.logits_of_rows().log_softmax(-1).gather(1, step.labels[:, None])[:, 0]
        losses = tree_oracle.ppo(log_probs, columns["old"], columns["advantages"])
        right = (losses.where(step.mask, 0.0) * weights).sum()
        assert torch.allclose(share, right, atol=BOUND)
        assert torch.allclose(values["losses"], losses.where(step.mask, 0.0), atol=BOUND)
        of_got, of_right = (tree_oracle.gradients(loss, step.model) for loss in (share, right))
        assert tree_oracle.error(of_got, of_right) < BOUND


# --- a vocabulary on two ranks


def on_a_rank(sequence_parallel: bool) -> list[tuple[float, int]]:
    start_process_group()
    rank, group, results = dist.get_rank(), dist.group.WORLD, []
    size = -(-WORDS // 2)
    for seed in STEPS:
        step = Step(seed, multiple=2)
        weight, bias = step.model.head.weight.detach(), step.model.head.bias.detach()
        padded = torch.zeros(2 * size, weight.shape[1], dtype=weight.dtype)
        padded[:WORDS] = weight
        mine = padded[rank * size : (rank + 1) * size].clone().requires_grad_()
        of_bias = torch.cat([bias, bias.new_zeros(1)])[rank * size : (rank + 1) * size].clone()
        whole = step.hidden().detach()
        part = whole.chunk(2)[rank] if sequence_parallel else whole
        hidden = part[:, None].clone().requires_grad_()  # [s, b, h]
        parallel: dict[str, Any] = {"tp_group": group, "sequence_parallel": sequence_parallel}
        layer = OutputLayer(mine, of_bias, **parallel, vocab_size=WORDS, chunk_tokens=3)
        got, entropy = log_probs_from_hidden(hidden, layer, step.edges, entropy=True)
        weights = torch.linspace(-1, 2, len(got), dtype=got.dtype)
        (got * weights + entropy * weights**2).sum().backward()
        # On one rank, by the same functions, which are compared with whole samples above.
        alone = whole.clone().requires_grad_()
        right_weight = padded[:WORDS].clone().requires_grad_()
        right = log_probs_from_hidden(alone, OutputLayer(right_weight, bias), step.edges, entropy=True)
        (right[0] * weights + right[1] * weights**2).sum().backward()
        of_hidden = alone.grad.chunk(2)[rank] if sequence_parallel else alone.grad
        of_weight = torch.cat([right_weight.grad, torch.zeros(1, weight.shape[1])])[rank * size : (rank + 1) * size]
        pairs = [(got, right[0]), (entropy, right[1]), (hidden.grad[:, 0], of_hidden), (mine.grad, of_weight)]
        results.append((max(tree_oracle.error([a.detach()], [b.detach()]) for a, b in pairs), len(step.edges)))
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_vocabulary_on_two_ranks(sequence_parallel: bool) -> None:
    first, second = run_ranks(2, on_a_rank, sequence_parallel)
    assert [edges for _, edges in first] == [edges for _, edges in second]
    assert max(error for error, _ in first + second) < BOUND


# --- what is refused


def read(drawn: Forest | None = None, **settings: Any) -> Any:
    step = Step(1)
    hidden = step.hidden()
    if settings.pop("other", False):
        hidden = hidden[:-1]
    return log_probs_from_hidden(hidden, step.layer, step.edges, **settings)


def to_tokens(number: int) -> Tensor:
    edges = Step(1).edges
    return edges.to_tokens(torch.zeros(len(edges) + number))


def with_ids(number: int) -> Edges:
    step = Step(1)
    return step.edges.with_ids(torch.zeros(step.tree.total_tokens + number, 2, dtype=torch.long))


def kept(number: int) -> Any:
    tokens = Step(1).tree.total_tokens + number
    return read(keep=KeptIds(torch.zeros(0, dtype=torch.long), np.zeros(tokens + 1, np.int64)))


test_refusals = refusal_tests(
    {
        **refusals(
            read,
            ({"other": True}, "tokens for a tree's .* slots on this rank", {}),
            ({"token_mask": np.ones(3)}, "a token_mask together with the edges of a tree", {}),
        ),
        **refusals(to_tokens, ((1,), "values for .* edges", (0,))),
        **refusals(with_ids, ((1,), "entries for .* tokens", (0,))),
        **refusals(kept, ((1,), "of this rank's tokens, in the order of the samples", (0,))),
    }
)


def test_negative_controls() -> None:
    """An edge with another's label, and tokens that read another edge, are seen by the comparison."""
    step = Step(2)
    log_q = step.logits_of_rows().log_softmax(-1)
    right = [log_q.gather(1, step.labels[:, None])[:, 0]]
    for wrong in (
        replace(step.edges, labels=np.roll(step.edges.labels, 1)),
        replace(step.edges, sources=np.roll(step.edges.sources, 1)),
        replace(step.edges, token_edges=np.where(step.edges.token_edges == 0, 1, step.edges.token_edges)),
    ):
        with pytest.raises(AssertionError):
            step.check([log_probs_from_hidden(step.hidden(), step.layer, wrong).log_probs], right)

"""Gates, score centering and distillation over a tree, by name, beside whole samples; and ranks with other rows.

The right gradients are those of each sample alone, by formulas of its own log-probs in float64. A tree is on one rank,
or cut over two context-parallel (CP) ranks, where a gate of sequences needs both.
"""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tree_oracle
from divergence_oracle import divergence
from ranks import run_ranks, start_process_group
from score_oracle import mean_score, modelled
from torch import Tensor
from tree_oracle import forest, net

from megatron_rl_loss import (
    AtIds,
    Gate,
    OutputLayer,
    PrefixTree,
    Samples,
    divergence_at_ids,
    importance_weights,
    log_probs_from_hidden,
    plan_step,
    score_centering,
)

BOUND, K, LOW, HIGH = 1e-12, 3, 0.5, 1.5
GATES = {
    "icepop": Gate(low=LOW, high=HIGH),
    "sequence tis": Gate(level="sequence", aggregate="sum", high=HIGH, action="clamp"),
    "rollout mis": Gate(level="rollout", low=0.9, high=1.1),
}
CENTERING = {"action": "clamp", "low": LOW, "high": HIGH}
KINDS = ("forward_kl", "reverse_kl", "jsd")
LOSSES = (*GATES, "score_centering", *KINDS)


class Step:
    """Drawn samples with what a sampler said of them: log-probs of labels, and at K ids, fewer at some tokens."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.drawn, self.model, sampler = forest(seed), net(seed), net(seed + 100)
        self.rollouts = [i // 2 for i in range(len(self.drawn.rows))]
        self.logs = [self._whole(self.model, row).log_softmax(-1) for row in self.drawn.rows]
        with torch.no_grad():
            of_sampler = [self._whole(sampler, row).log_softmax(-1).topk(K) for row in self.drawn.rows]
        self.ids = [top.indices for top in of_sampler]  # of a prefix the same in every sample
        self.log_q = [top.values.clone() for top in of_sampler]
        for values in self.log_q:
            for row in values:
                if rng.random() < 0.2:
                    row[K - 1] = -torch.inf  # another set in this sample alone
        self.sampled = [old + torch.tensor([rng.gauss(0, 0.3) for _ in old], dtype=old.dtype) for old in self.drawn.old]

    @staticmethod
    def _whole(model: Any, row: list[int]) -> Tensor:
        size = len(row)
        return model(torch.tensor(row), torch.arange(size), torch.ones(size, size, dtype=torch.bool).tril())

    def labels(self, i: int) -> Tensor:
        return torch.tensor([*self.drawn.rows[i][1:], 0])

    def weights(self, name: str) -> list[Tensor]:
        """Of each sample's tokens, by the gate's formula."""
        log_ratios = [old - of for old, of in zip(self.drawn.old, self.sampled, strict=True)]
        masks, result = self.drawn.masks, []
        for i, log_ratio in enumerate(log_ratios):
            if name == "icepop":
                ratio = log_ratio.exp()
                result.append(torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0))
            elif name == "sequence tis":
                product = float(log_ratio[masks[i] != 0].mul(masks[i][masks[i] != 0]).sum().exp())
                result.append(torch.full_like(log_ratio, min(product, HIGH)))
            else:
                beside = [j for j, rollout in enumerate(self.rollouts) if rollout == self.rollouts[i]]
                total = sum(float((log_ratios[j] * masks[j]).sum()) for j in beside)
                mean = math.exp(total / max(sum(float(masks[j].sum()) for j in beside), 1e-30))
                result.append(torch.full_like(log_ratio, mean if 0.9 <= mean <= 1.1 else 0.0))
        return result

    def losses(self, name: str) -> list[Tensor]:
        """Of each sample's tokens, by its own log-probs."""
        result = []
        for i, log_p in enumerate(self.logs):
            old, advantages = self.drawn.old[i], self.drawn.advantages[i]
            policy = tree_oracle.ppo(log_p.gather(1, self.labels(i)[:, None])[:, 0], old, advantages)
            if name in GATES:
                result.append(policy * self.weights(name)[i])
                continue
            rows = []
            for t in range(len(log_p)):
                there = self.log_q[i][t] > -torch.inf
                ids, q = self.ids[i][t, there][None], self.log_q[i][t, there].exp()[None]
                p = log_p[t : t + 1]
                if name == "score_centering":
                    rows.append(mean_score(p, modelled(q, ids, p.detach().exp()), CENTERING)[0])
                else:
                    rows.append(divergence(p.exp().gather(1, ids), q, name, "bucket")[0])
            result.append(torch.stack(rows) + policy * 0 if name in KINDS else policy + advantages * torch.stack(rows))
        return result

    def right(self, name: str) -> list[Tensor]:
        """The gradient of the rollouts' means of tokens: a rollout of two samples is one unit."""
        total = torch.zeros((), dtype=torch.float64)
        sizes = dict.fromkeys(self.rollouts, 0.0)
        for rollout, mask in zip(self.rollouts, self.drawn.masks, strict=True):
            sizes[rollout] += float(mask.sum())
        for i, losses in enumerate(self.losses(name)):
            on = self.drawn.masks[i] != 0
            share = (losses * self.drawn.masks[i])[on].sum() / max(sizes[self.rollouts[i]], 1e-30)
            total = total + share / len(sizes)
        return tree_oracle.gradients(total, self.model)

    def by_tree(self, name: str, cp_rank: int = 0, cp_group: Any = None, change: Any = None) -> list[Tensor]:
        """This rank's part of the gradient."""
        cp_size = 1 if cp_group is None else 2
        tree = PrefixTree(self.drawn.rows, multiple=2 * cp_size, cp_attention=cp_size > 1)
        samples = Samples(self.drawn.masks, layout=tree, rollout_ids=self.rollouts)
        (microbatch,) = plan_step(
            [samples], "sample_mean", dp_group=None, cp_group=cp_group, gradients="summed over ranks"
        )
        tokens, depths = tree.inputs()
        hidden = self.model.hidden(tokens[0], depths[0], tree.visible())
        hidden = hidden[torch.from_numpy(tree.local_slots(cp_rank, cp_size))]
        layer = OutputLayer(self.model.head.weight, self.model.head.bias)
        columns = self.drawn.columns() | {
            "sampled": torch.cat(self.sampled), "ids": torch.cat(self.ids), "log_q": torch.cat(self.log_q),
            "labels": torch.cat([self.labels(i) for i in range(len(self.drawn.rows))]),
        }  # fmt: skip
        of = {key: microbatch.local(column) for key, column in columns.items()}
        edges = tree.edges(microbatch.tokens)
        if change is not None:
            of = change(of, edges)
        if name in GATES:
            log_probs, _ = log_probs_from_hidden(hidden, layer, edges)
            weights = importance_weights(of["old"] - of["sampled"], GATES[name], microbatch)
            losses = tree_oracle.ppo(log_probs, of["old"], of["advantages"]) * weights
        else:
            ids = torch.cat([of["labels"][:, None], of["ids"]], 1)
            marked = torch.cat([torch.zeros(len(ids), 1, dtype=torch.bool), of["log_q"] > -torch.inf], 1)
            log_probs, _ = log_probs_from_hidden(hidden, layer, edges.with_ids(ids), rest_without=marked)
            student = AtIds(log_probs[:, 1:-1], log_probs[:, -1])
            if name == "score_centering":
                policy = tree_oracle.ppo(log_probs[:, 0], of["old"], of["advantages"])
                gate = Gate(action="clamp", low=LOW, high=HIGH)
                losses = policy + score_centering(student, of["log_q"], of["advantages"], microbatch, gate=gate)
            else:
                losses = divergence_at_ids(student, of["log_q"], microbatch, kind=name)  # type: ignore[arg-type]
        return tree_oracle.gradients(microbatch.loss(losses), self.model)


SEEDS = (3, 8, 285)


@pytest.mark.parametrize("name", LOSSES)
def test_a_tree_gives_the_gradient_of_whole_samples(name: str) -> None:
    for seed in SEEDS:
        step = Step(seed)
        assert tree_oracle.error(step.by_tree(name), step.right(name)) < BOUND


def on_a_rank(seed: int) -> dict[str, float]:
    start_process_group()
    step, errors = Step(seed), {}
    for name in LOSSES:
        got = step.by_tree(name, dist.get_rank(), dist.group.WORLD)
        for gradient in got:
            dist.all_reduce(gradient)
        errors[name] = tree_oracle.error(got, step.right(name))
    return errors


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_a_tree_on_two_context_parallel_ranks(seed: int) -> None:
    for errors in run_ranks(2, on_a_rank, seed):
        assert set(errors) == set(LOSSES)
        assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("name", LOSSES)
def test_the_comparison_sees_columns_of_the_first_sample_alone(name: str) -> None:
    """Negative control: tokens that share an edge get the sampler's numbers of the edge's first token."""

    def change(of: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
        first = torch.from_numpy(edges.first[edges.token_edges.clip(0)])
        return of | {key: of[key][first] for key in ("old", "sampled", "log_q", "advantages")}

    step = Step(285)
    assert tree_oracle.error(step.by_tree(name, change=change), step.right(name)) > 1e-3


# --- ranks with other rows


def rows_of(rank: int, case: str) -> Any:
    """Rows of the same lengths and masks: other tokens on the second rank, or a row that no tree takes."""
    rows: list[Any] = [[1, 2, 3], [1, 2, 4]]
    if rank == 1:
        rows[1] = {"other tokens": [1, 2, 5], "another branch": [1, 5, 4], "negative": [1, 2, -4], "": rows[1],
                   "longer": [1, 2, 4, 4], "floats": [1, 2, 4.5]}[case]  # fmt: skip
    return rows


def plan_on_a_rank(case: str, by: str) -> str:
    start_process_group()

    def described() -> list[Samples]:
        tree = PrefixTree(rows_of(dist.get_rank(), case), multiple=4, cp_attention=True)
        return [Samples([[0, 1, 0]] * 2, layout=tree)]

    groups: Any = {"cp_group": dist.group.WORLD} if by == "cp" else {"replica_groups": [dist.group.WORLD]}
    try:
        plan_step(described, "token_mean", dp_group=None, gradients="summed over ranks", **groups)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


DIFFERENT = {
    "": "",
    "other tokens": "different samples for this step, or layouts that differ: these ranks must read the same data",
    "another branch": "different samples for this step, or layouts that differ: these ranks must read the same data",
    "negative": "rank 1: ValueError: row 1 has the token id -4",
    "longer": "sample 1 has 3 entries for 4 tokens",
    "floats": "row 1 is float64",
}


@pytest.mark.parametrize("by", ["cp", "replicas"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_with_other_rows_have_one_error(case: str, by: str) -> None:
    texts = run_ranks(2, plan_on_a_rank, case, by)
    assert texts[0] == texts[1]
    assert texts[0].startswith("BadBatchError: ") if case else not texts[0]
    assert DIFFERENT[case] in texts[0]

"""Trees in a planned step of DP 2 x CP 2: sequence ratios, terms, metrics, advantages, and the proof.

Attention over all slots on each rank stands for a CP that exchanges keys and values.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import tree_oracle
from ranks import run_ranks, start_process_group
from torch import Tensor
from tree_oracle import forest, net

from megatron_rl_loss import (
    OutputLayer,
    PrefixTree,
    Samples,
    Term,
    gae,
    log_probs_from_hidden,
    plan_step,
    policy_loss,
    prove_step,
    whiten_advantages,
)
from megatron_rl_loss.core.errors import BadBatchError

SEEDS = (3, 8)
COEF = 0.1


def right_gradients(seed: int, of: str) -> tuple[list[Tensor], float]:
    """Of whole samples in one process: gspo, or ppo with a KL term by its own mode; the mean of ratios by samples."""
    model, drawn = net(seed), forest(seed)
    total, number, ratios = torch.zeros(()), len(drawn.rows), []
    tokens = sum(float(mask.sum()) for mask in drawn.masks)
    for i, (log_probs, _) in enumerate(tree_oracle.whole(model, drawn.rows)):
        old, advantages, mask = drawn.old[i], drawn.advantages[i], drawn.masks[i]
        size = float(mask.sum())
        ratio = (log_probs - old).exp()
        if size:
            ratios.append(float((ratio * mask).sum().detach()) / size)
        if of == "gspo":
            losses = tree_oracle.gspo(log_probs, old, advantages, mask)
        else:
            losses = tree_oracle.ppo(log_probs, old, advantages)
            total = total + COEF * (tree_oracle.k3(log_probs, old + 0.1) * mask).sum() / tokens
        total = total + (losses * mask).sum() / max(size, 1e-30) / number
    return tree_oracle.gradients(total, model), sum(ratios) / max(len(ratios), 1)


def on_a_rank(case: str, zigzag: bool, plant: bool) -> list[tuple[float, float]] | str:
    start_process_group()
    rank, results = dist.get_rank(), []
    cp_groups: Any
    dp_groups: Any
    cp_groups, dp_groups = (
        [dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    cp_group, dp_group, cp_rank = cp_groups[rank // 2], dp_groups[rank % 2], rank % 2
    for seed in SEEDS:
        model, drawn = net(seed), forest(seed)
        mine = [i for i in range(len(drawn.rows)) if i % 2 == rank // 2]
        parts = [drawn.part(mine[cut::2]) for cut in range(2)]
        trees = [PrefixTree(part.rows, multiple=4, zigzag=zigzag, cp_attention=True) for part in parts]
        samples = [Samples(part.masks, layout=tree) for part, tree in zip(parts, trees, strict=True)]
        terms = {"kl": "token_mean"} if case == "ppo" else None
        plan = plan_step(
            samples, "sample_mean", terms=terms, dp_group=dp_group, cp_group=cp_group, gradients="summed over ranks"
        )
        try:
            with prove_step(model, plan, level="error"):
                for number, (part, tree, microbatch) in enumerate(zip(parts, trees, plan, strict=True)):
                    tokens, depths = tree.inputs()
                    hidden = model.hidden(tokens[0], depths[0], tree.visible())
                    local = hidden[torch.tensor(tree.local_slots(cp_rank, 2))]
                    microbatch.check_tokens(tree.inputs(cp_rank=cp_rank, cp_size=2)[0])
                    layer = OutputLayer(model.head.weight, model.head.bias)
                    log_probs, _ = log_probs_from_hidden(local, layer, tree.edges(microbatch.tokens))
                    columns = {name: microbatch.local(column) for name, column in part.columns().items()}
                    old, advantages = columns["old"], columns["advantages"]
                    losses: Any
                    if case == "gspo":
                        losses = policy_loss("gspo", log_probs, old, advantages, microbatch).per_token_loss
                    else:
                        losses = {"pg": tree_oracle.ppo(log_probs, old, advantages)}
                        losses["kl"] = Term(tree_oracle.k3(log_probs, old + 0.1), coef=COEF)
                    loss = microbatch.loss(losses, {"ratio": (log_probs - old).exp().detach()})
                    (loss * (3 if plant and number else 1)).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
        except BadBatchError as error:
            return str(error)
        right, ratio = right_gradients(seed, case)
        got = [parameter.grad for parameter in model.parameters()]
        results.append((tree_oracle.error(got, right), abs(float(plan.finish()["ratio"]) - ratio)))
    return results


@pytest.mark.parametrize("case", ["gspo", "ppo"])
@pytest.mark.parametrize("zigzag", [True, False])
def test_a_planned_step(case: str, zigzag: bool) -> None:
    for of_rank in run_ranks(4, on_a_rank, case, zigzag, False):
        for in_gradient, in_metric in of_rank:
            assert in_gradient < 1e-12
            assert in_metric < 1e-5


def test_a_micro_batch_that_counts_thrice_is_stopped() -> None:
    for text in run_ranks(4, on_a_rank, "ppo", True, True):
        assert isinstance(text, str)
        assert "something else" in text or "aborted" in text


def advantages_on_a_rank(seed: int) -> list[Tensor]:
    """GAE and whitened advantages of each token of each sample, put together from the two CP ranks."""
    start_process_group()
    rank, drawn, results = dist.get_rank(), forest(seed), []
    values = torch.cat([torch.linspace(-1, 1, len(row), dtype=torch.float64) for row in drawn.rows])
    rewards = torch.cat([mask * 0.1 * i for i, mask in enumerate(drawn.masks)])
    for layout, size in ((None, 1), (PrefixTree(drawn.rows, multiple=4, cp_attention=True), 2)):
        group = dist.group.WORLD if size == 2 else None
        local = Samples(drawn.masks, layout=layout).local(rank if size == 2 else 0, size)
        parts = [gae(local.of(rewards), local.of(values), local, group, gamma=0.9, lam=0.8)[0]]
        parts += whiten_advantages([local.of(rewards)], [local], dp_cp_group=group)
        for part in parts:
            whole = torch.zeros(len(values), dtype=torch.float64)
            whole[torch.from_numpy(local.positions.copy())] = part.double()
            if size == 2:
                dist.all_reduce(whole)
            results.append(whole)
    return results


@pytest.mark.parametrize("seed", [2, 5])
def test_advantages_over_a_cut_tree(seed: int) -> None:
    for alone, whitened, by_tree, whitened_tree in run_ranks(2, advantages_on_a_rank, seed):
        assert torch.allclose(alone, by_tree, atol=1e-12)
        assert torch.allclose(whitened, whitened_tree, atol=1e-12)

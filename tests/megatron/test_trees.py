"""Samples that share prefixes in a real GPTModel: an audit of their step, and a loss in one pass on edges.

What a tree gives is compared with whole samples: Megatron's own loss of each sample on its own, causal attention and
positions 0, 1, 2, ..., weighted by the float64 oracle. Two ranks: DP 2, and TP 2 with sequence parallelism.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
import tree_oracle
from ranks import run_ranks
from table_step import run_schedule
from tiny_gpt import Layout, start_layout, tiny_config, tiny_model
from torch import Tensor
from tree_oracle import Forest, forest

from megatron_rl_loss import PrefixTree, Samples

DP, TP = Layout(1, False, 1, 1, 1, 2), Layout(2, True, 1, 1, 1, 1)
SEED, CUTS, MODE = 285, 2, "prompt_mean"
#: Ways to a loss: by log-probs, in one pass, and a mean over the micro-batch's own tokens, which no mode asks for.
WAYS = ("log-probs", "folded", "own mean")
SINGLE = 2e-6  # of float32, as the recipe's


class Outcome(NamedTuple):
    """On a rank: how far a way's gradient is from whole samples', by the largest entry; and what an audit measured."""

    error: float
    measured: Any
    verdict: str


def drawn() -> Forest:
    return forest(SEED, torch.float32)


def weights() -> list[Tensor]:
    """The weight of each token of whole samples."""
    pairs = zip(drawn().masks, drawn().prompts, strict=True)
    samples = [oracle.Sample(mask.double(), mask, None, prompt) for mask, prompt in pairs]
    return [torch.tensor(row, dtype=torch.float32) for row in oracle.step_weights(MODE, samples, None, "all")]


def hands(dp: int) -> list[list[list[int]]]:
    """Numbers of samples by data-parallel rank and micro-batch."""
    numbers = range(len(drawn().rows))
    return [[[i for i in numbers if i % dp == rank][cut::CUTS] for cut in range(CUTS)] for rank in range(dp)]


def model_of(layout: Layout) -> Any:
    from types import SimpleNamespace

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from packed_attention import layer_spec

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = tiny_config(layout, per_token=False)
    block = layer_spec(SimpleNamespace(transformer=config))
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return DistributedDataParallel(config, DistributedDataParallelConfig(), tiny_model(config, block).cuda())


def gradient_of(model: Any) -> Tensor:
    return torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).clone()


def by_whole_samples(model: Any, layout: Layout, mine: list[int]) -> Tensor:
    """The gradient of each sample on its own, summed."""
    step, of_tokens = drawn(), weights()
    model.zero_grad_buffer()
    for i in mine:
        padded = step.rows[i] + [0] * (len(step.rows[i]) % layout.tp)  # behind the row, where nothing sees it
        row = torch.tensor([padded])
        size = row.shape[1]
        forbidden = ~torch.ones(1, 1, size, size, dtype=torch.bool).tril()
        losses = model(row, torch.arange(size)[None], forbidden, labels=row.roll(-1))[0, : len(step.rows[i])]
        of_sample = tree_oracle.ppo(-losses, step.old[i], step.advantages[i])
        trained = of_tokens[i] != 0
        ((of_sample * of_tokens[i])[trained].sum() * layout.dp).backward()  # DDP takes the mean of ranks
    model.module.config.finalize_model_grads_func([model])
    return gradient_of(model)


def by_trees(model: Any, layout: Layout, hand: list[list[int]], way: str, seen: str = "") -> tuple[Any, Tensor]:
    """What an audit measured of the step by trees, and its gradient; `seen`: what a control does to the tree."""
    from megatron_rl_loss import Audit, Folded, OutputHead, plan_step, tap

    parts = [drawn().part(numbers) for numbers in hand]
    trees = [PrefixTree(part.rows, multiple=layout.tp) for part in parts]
    samples = [
        Samples(part.masks, layout=tree, prompt_ids=part.prompts) for part, tree in zip(parts, trees, strict=True)
    ]
    plan = plan_step(samples, MODE, model=model)

    def forward_step(iterator: Any, chunk: Any) -> Any:
        part, microbatch = next(iterator)
        tree, columns = microbatch.samples.layout, part.columns()
        tokens, positions = tree.inputs()
        if seen == "one deeper":
            positions = positions + (positions > 0)
        old, advantages = columns["old"], columns["advantages"]

        def per_token(log_probs: Tensor, _: Any, old: Tensor, advantages: Tensor) -> Any:
            return tree_oracle.ppo(log_probs, old, advantages), {}

        inputs = {"old": old, "advantages": advantages}
        folded = Folded(microbatch, per_token, inputs) if way == "folded" else None
        rotated = tree.rotary_by_depth(chunk)
        with rotated:
            forbidden = ~tree.visible()[None, None]
            if seen == "branches":
                forbidden = ~torch.ones_like(forbidden).tril()
            values = OutputHead(chunk_tokens=3)(
                chunk, tokens, positions, forbidden, labels=tree.edges(microbatch.tokens), context=folded
            )

        def loss_func(output: Any) -> Any:
            if way == "folded":
                return microbatch.loss(*output)
            losses = tree_oracle.ppo(output[0], old, advantages)
            if way == "log-probs":
                return microbatch.loss(losses)
            mask = columns["masks"]
            return (tap(losses, samples=microbatch.samples) * mask).sum() / mask.sum().clamp(min=1), {}

        return values, loss_func

    model.zero_grad_buffer()
    batches = list(zip(parts, plan, strict=True))
    with Audit(model) as audit:
        run_schedule(forward_step, iter(batches), model, len(batches))
    return audit, gradient_of(model)


def on_a_rank(layout: Layout) -> dict[str, Outcome]:
    from megatron_rl_loss.audit.judge import judge
    from megatron_rl_loss.core.aggregation import resolve

    place, outcomes = start_layout(layout), {}
    hand = hands(layout.dp)[place.get_data_parallel_rank()]
    model = model_of(layout)
    right = by_whole_samples(model, layout, [i for numbers in hand for i in numbers])
    for way, seen in [*((way, "") for way in WAYS), ("folded", "branches")]:
        audit, got = by_trees(model, layout, hand, way, seen)
        error = float((got - right).abs().max() / right.abs().max())
        verdict = "" if audit.measured is None else str(judge(audit.measured, resolve(MODE)))
        outcomes[f"{way} {seen}".strip()] = Outcome(error, audit.measured, verdict)
    return outcomes


@functools.cache
def outcomes_of(layout: Layout) -> list[dict[str, Outcome]]:
    return run_ranks(layout.world_size, on_a_rank, layout)


both = pytest.mark.parametrize("layout", [DP, TP], ids=str)


@both
def test_an_audit_measures_the_weights_of_whole_samples(layout: Layout) -> None:
    first, *others = outcomes_of(layout)
    of_samples = weights()
    in_order = [of_samples[i] for rank in hands(layout.dp) for hand in rank for i in hand]
    measured = first["log-probs"].measured
    np.testing.assert_allclose(measured.weights, torch.cat(in_order).double(), rtol=1e-6, atol=1e-9)
    assert first["log-probs"].verdict.startswith("SOUND: prompt_mean")
    assert all(other["log-probs"].measured is None for other in others)
    positions = [t for row in in_order for t in range(len(row))]
    assert measured.tokens.position.tolist() == positions


@both
def test_an_audit_sees_another_mean_over_a_tree(layout: Layout) -> None:
    verdict = outcomes_of(layout)[0]["own mean"].verdict
    assert verdict.startswith("NOT SOUND"), verdict
    assert "tokens of the micro-batch, not of the step" in verdict


@both
@pytest.mark.parametrize("way", ["log-probs", "folded"])
def test_the_gradient_is_that_of_whole_samples(layout: Layout, way: str) -> None:
    assert max(of_rank[way].error for of_rank in outcomes_of(layout)) < SINGLE


@both
def test_the_comparison_sees_branches_that_see_each_other(layout: Layout) -> None:
    assert min(of_rank["folded branches"].error for of_rank in outcomes_of(layout)) > 1e-3

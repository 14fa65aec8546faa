"""Which faults of a tree the proof of a step sees: those of the sums of losses, and not those of the model.

Every fault here makes the gradient another one than that of whole samples, which is compared in the same step.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tree_oracle
from tree_controls import CONTROLS, OF_SUMS, Slots
from tree_oracle import forest, net

from megatron_rl_loss import PrefixTree, Samples, plan_step, prove_step, tap
from megatron_rl_loss.core.errors import BadBatchError

SEED = 285  # branches with trained tokens in both micro-batches


def step(change: Any = None, factors_of: Any = None) -> tuple[str, float]:
    """What the proof says of a step by trees, and how far its gradient is from whole samples'; by a sum of its own."""
    drawn, model = forest(SEED), net(SEED)
    parts = [drawn.part(range(cut, len(drawn.rows), 2)) for cut in range(2)]
    trees = [PrefixTree(part.rows) for part in parts]
    samples = [Samples(part.masks, layout=tree) for part, tree in zip(parts, trees, strict=True)]
    plan, out = plan_step(samples, "sample_mean", dp_group=None), io.StringIO()
    said = ""
    try:
        with contextlib.redirect_stdout(out), prove_step(model, plan, level="error"):
            for part, tree, microbatch in zip(parts, trees, plan, strict=True):
                slots = Slots(tree)
                if change is not None:
                    change(slots)
                hidden = model.hidden(slots.tokens, slots.depths, slots.visible)
                edges = slots.edges(tree.edges(microbatch.tokens))
                log_q = model.head(hidden)[torch.from_numpy(edges.sources)].log_softmax(-1)
                edge_log_probs = log_q[torch.arange(len(edges)), torch.as_tensor(edges.labels)]
                columns = part.columns()
                losses = tree_oracle.ppo(edges.to_tokens(edge_log_probs), columns["old"], columns["advantages"])
                losses = tap(losses, samples=microbatch.samples)
                factors = 1.0 if factors_of is None else factors_of(edges)
                weights = microbatch.weights.double()
                (torch.where(weights != 0, losses, 0.0) * weights * factors).sum().backward()
    except BadBatchError as error:
        said = str(error)
    total = torch.zeros((), dtype=torch.float64)
    for i, (log_probs, _) in enumerate(tree_oracle.whole(model, drawn.rows)):
        losses = tree_oracle.ppo(log_probs, drawn.old[i], drawn.advantages[i])
        total = total + (losses * drawn.masks[i]).sum() / max(float(drawn.masks[i].sum()), 1e-30) / len(drawn.rows)
    got = [parameter.grad for parameter in model.parameters()]
    return said or out.getvalue(), tree_oracle.error(got, tree_oracle.gradients(total, model))


def test_a_right_step_is_proved() -> None:
    said, error = step()
    assert "aggregation proved on 53 tokens of 14 samples" in said
    assert error < 1e-6  # a plan's weights are float32


@pytest.mark.parametrize("factors_of", OF_SUMS)
def test_the_proof_sees_a_fault_of_a_sum(factors_of: Callable[..., Any]) -> None:
    said, error = step(factors_of=factors_of)
    factors = "0 to 1" if factors_of is OF_SUMS[0] else "1 to 2"
    assert f"tokens weigh {factors} times what they should" in said
    assert error > 1e-3


@pytest.mark.parametrize("change", CONTROLS)
def test_the_proof_does_not_see_a_fault_of_the_model(change: Callable[..., Any]) -> None:
    """As the page says: the weights are right, and the comparison with whole samples alone tells."""
    said, error = step(change=change)
    assert "aggregation proved on 53 tokens of 14 samples" in said
    assert error > 1e-3

"""Comparison with Transformer Engine, where there are GPUs (``TEST_DEVICE=cuda tools/test.sh``).

Its index function for packed sequences, and whole steps of `test_matrix`'s tiny GPT with its context-parallel
attention (which needs bf16) in place of `examples/packed_attention.py`.
"""

import itertools
import random

import gpt_oracle
import oracle
import pytest
import torch
from tiny_gpt import Case, Layout
from world import World, beyond_bounds, errors_of, trained_in

from megatron_rl_loss import ZigzagTHD

pytestmark = [pytest.mark.slow, pytest.mark.gpus]


@pytest.fixture(autouse=True)
def needs_transformer_engine() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs and TEST_DEVICE=cuda")
    pytest.importorskip("transformer_engine_torch")


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_our_indices_are_those_of_thd_get_partitioned_indices(cp_size: int) -> None:
    import transformer_engine_torch as tex

    rng = random.Random(cp_size)
    for _ in range(50):
        sizes = [2 * cp_size * rng.choice([0, 1, 1, 2, 5, 40]) for _ in range(rng.randrange(1, 30))] + [2 * cp_size]
        bounds = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        for cp_rank in range(cp_size):
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32).cuda()
            theirs = tex.thd_get_partitioned_indices(cu_seqlens, bounds[-1], cp_size, cp_rank)
            ours = [i for piece in ZigzagTHD(bounds).pieces(cp_rank, cp_size) for i in range(*piece)]
            assert ours == theirs.tolist()


@pytest.mark.parametrize("layout", [Layout(1, False, 1, 1, cp, dp) for cp in (1, 2, 4) for dp in (1, 2)], ids=str)
def test_a_whole_step_with_its_attention_equals_the_oracle(layout: Layout) -> None:
    scalings = itertools.cycle(("mean", "per token"))
    cases = [Case(3, *of, next(scalings), True, "plain", False, False) for of in oracle.COUNTINGS]
    for world, outcomes, _ in trained_in(layout, [World.of(layout, case) for case in cases], attention="te"):
        case = world.case
        errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), case.mode, case.units))
        assert not beyond_bounds(case, errors), (case, errors)

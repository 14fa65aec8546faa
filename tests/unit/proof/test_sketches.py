"""Sketches add up over parts of a tensor, and are those of its very numbers."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl_loss.proof.sketches import Backward, Signs, num_patterns

SHAPES = [(), (1,), (7,), (5, 3), (4, 3, 6), (1, 9), (300, 17)]


def expected(signs: Signs, values: Tensor) -> Tensor:
    """The products of all entries with their signs, each the product of the signs of its indices, and the norm."""
    at = np.indices(values.shape).reshape(values.dim(), -1) if values.dim() else np.zeros((1, 1), int)
    shape = values.shape or (1,)
    patterns = torch.ones(signs.patterns, values.numel(), dtype=torch.float64)
    for number, (size, indices) in enumerate(zip(shape, at, strict=True)):
        patterns *= signs.dimension_signs(number, size, torch.device("cpu"))[:, indices]
    flat = values.double().reshape(-1)
    return torch.cat([patterns @ flat, (flat @ flat)[None]])


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sketch_is_exact(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    signs, values = Signs(3), drawn(shape, dtype)
    kept = values.clone()
    torch.testing.assert_close(signs.sketch(values), expected(signs, values), rtol=1e-12, atol=1e-12)
    assert torch.equal(values, kept)
    assert (signs.dimension_signs(0, 40, torch.device("cpu")).abs() == 1).all()
    assert len({tuple(row) for row in signs.dimension_signs(0, 40, torch.device("cpu")).tolist()}) == 3


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_slices_and_shards_add_up(shape: tuple[int, ...]) -> None:
    signs, values = Signs(2), drawn(shape)
    whole, flat = expected(signs, values), values.reshape(-1)
    for cuts in ([], [1], [2, 2, 5], [len(flat) // 2]):
        edges = [0, *(cut for cut in cuts if cut <= len(flat)), len(flat)]
        parts = [signs.sketch_slice(flat[a:b], shape, a) for a, b in itertools.pairwise(edges)]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    assert not signs.sketch(values[..., :0], shape, [0] * len(shape)).any()
    for dim, size in enumerate(shape):
        blocks = torch.zeros(3, dtype=torch.float64)
        for begin, part in zip((0, size // 2), values.split([size // 2, size - size // 2], dim), strict=True):
            offsets = [begin if number == dim else 0 for number in range(len(shape))]
            blocks += signs.sketch(part, shape, offsets)
        torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)


def test_many_gradients_are_added_as_they_were_seen() -> None:
    """Small ones wait for others of their shape; those that are not taken, or changed later, are told apart."""
    signs, shapes = Signs(2), [(6,), (200, 200), (6,), (3, 2), ()]
    backward = Backward.of(signs, len(shapes), torch.device("cpu"))
    sums = [torch.zeros(3, dtype=torch.float64) for _ in shapes]
    for turn in range(3):
        for number, shape in enumerate(shapes):
            values = drawn(shape) * (turn + 1)
            backward.see(number, drawn(shape) * 100)  # for a log
            backward.see(number, values)
            backward.take(number)
            sums[number] += expected(signs, values)
    backward.take(0)  # nothing was seen since
    backward.flush()
    torch.testing.assert_close(backward.table, torch.stack(sums), rtol=1e-12, atol=1e-12)
    assert (backward.num_terms, backward.changed) == ([3] * 5, set())
    values = drawn((6,))
    backward.see(2, values)
    backward.take(2)
    values *= 2
    backward.flush()
    assert backward.changed == {2}


def test_small_models_have_more_patterns() -> None:
    assert [num_patterns(count) for count in (0, 1, 7, 32, 5000)] == [64, 64, 10, 2, 2]

"""The Triton kernels against float64, in Triton's interpreter, in processes of their own.

The interpreter cuts float32 off to bfloat16, where a GPU rounds: half of the values differ by a bit, so that bounds of
bfloat16 are twice as large here. `tools/compare_kernels.py` runs thousands of random cases.
"""

import functools
import mmap
from collections import Counter
from typing import Any

import head_oracle
import numpy as np
import pytest
import torch
from head_oracle import BOTH, BOUNDS, CASES, FP32, TOKENS, WANTED, Outputs, expected_of, inputs_of, relative
from interpreted import needs_triton, use_kernels
from logprob_ways import check, kept_ids, results_of
from ranks import run_ranks, start_process_group
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_loss import log_probs_from_logits
from megatron_rl_loss.logprobs import choice
from megatron_rl_loss.logprobs.kept_ids import KeptIds

#: Cases that the kernels read.
NAMES = [name for name, case in CASES.items() if not case.keys() & {"teacher", "rest"}]
#: In other dtypes, and from hidden states.
FEW = ("plain", "five ids, kept ids", "padded to several ranks")


def bound_of(dtype: torch.dtype) -> float:
    return BOUNDS[dtype] * (2 if dtype == torch.bfloat16 else 1)


# --- values and gradients


def read_cases(way: str) -> list[Any]:
    """Every case in float32, a few in bfloat16, and with a part of the loss alone; what remains of the checks' text."""
    counts, names = use_kernels(), NAMES if way == "logits" else FEW
    several = [(name, torch.float32, BOTH) for name in names]
    several += [(name, torch.bfloat16, BOTH) for name in FEW[:2]]
    several += [("plain", torch.float32, WANTED[wanted]) for wanted in ("log-probs", "entropy")]
    for name, dtype, wanted in several:
        options: list[dict[str, Any]] = [{"chunk_tokens": 7} if name in FEW else {"gradient_in_place": True}]
        options += [options[0] | {"keep": kept_ids()}] if "kept ids" in name else []
        for more in options:
            counts.clear()
            check(
                results_of(way, name, dtype, wanted, **more), expected_of(name, dtype, wanted), dtype, bound_of(dtype)
            )
            assert counts["statistics"] == counts["differentiate"] > 0, (name, counts)
            assert counts["combine"] == (counts["statistics"] if way == "one pass" else 1), (name, counts)
    return [choice.failure()]


@needs_triton
@pytest.mark.parametrize("way", ["logits", "two passes", "one pass"])
def test_values_and_gradients(way: str) -> None:
    assert run_ranks(1, read_cases, way) == [[""]]


def read_rounded() -> None:
    counts, (batch, labels, mask, _) = use_kernels(), inputs_of("plain")
    slopes = torch.linspace(-2, 3, TOKENS).double() * mask
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        leaf = (batch.hidden @ batch.weight.T).to(dtype).double().requires_grad_()
        expected = [value * mask for value in head_oracle.log_probs_and_entropy(leaf, labels, 0.7)]
        (gradient,) = torch.autograd.grad(((expected[0] - 0.3 * expected[1]) * slopes).sum(), leaf)
        logits = leaf.detach().to(dtype).requires_grad_() * 1
        values = log_probs_from_logits(
            logits, labels.int(), entropy=True, token_mask=mask, temperature=0.7, gradient_in_place=True
        )
        assert all(relative(value, right) <= 1e-6 for value, right in zip(values, expected, strict=True))
        total = ((values.log_probs - 0.3 * values.entropy) * slopes.float()).sum()
        (of_logits,) = torch.autograd.grad(total, logits, retain_graph=True)
        # The interpreter cuts off to bfloat16: one eps of the largest entry; float16 is rounded, by half of one.
        rounding = {torch.float32: 0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}[dtype]
        assert relative(of_logits, gradient) <= 1e-6 + rounding
        assert of_logits.data_ptr() == logits.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, logits)
    assert counts["differentiate"] == 3
    wrong = log_probs_from_logits(leaf.float(), labels, token_mask=mask, temperature=0.7007).log_probs
    assert relative(wrong, expected[0]) > 1e-4  # negative control: 0.1 % of the temperature


@needs_triton
def test_only_logits_and_their_gradient_are_rounded_to_their_dtype() -> None:
    run_ranks(1, read_rounded)


def read_least() -> None:
    """Rows of the least number of a dtype, as stands for -inf, of -inf, and of both: as plain torch reads them."""
    use_kernels()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        least = torch.finfo(dtype).min
        rows = torch.randn(7, 50).to(dtype)
        rows[1], rows[2, 5:], rows[3, :20], rows[4] = least, least, -torch.inf, -torch.inf
        rows[5], rows[5, 7:9] = -torch.inf, least
        rows[6], rows[6, 20:] = least, -torch.inf
        labels = torch.tensor([[0, 1], [3, 49], [5, 6], [30, 1], [0, 1], [7, 7], [0, 19]])
        defined = [0, 1, 2, 3, 5, 6]
        for keep in (None, torch.arange(50) % 3 > 0, kept(torch.arange(50).expand(7, 50) % 3 > 0)):
            results = []
            for kernel in ("triton", "torch"):
                leaf = rows.clone().requires_grad_()
                values = log_probs_from_logits(leaf * 1, labels, entropy=True, keep=keep, kernel=kernel)
                (gradient,) = torch.autograd.grad([*values], leaf, [torch.ones_like(value) for value in values])
                results.append([*(value.detach() for value in values), gradient])
            for value, right in zip(*([column[defined] for column in result] for result in results), strict=True):
                # Cut off to bfloat16 by the interpreter, where torch rounds.
                eps = torch.finfo(value.dtype).eps if value.dtype != torch.float32 else 1e-6
                torch.testing.assert_close(value, right, rtol=2 * eps, atol=1e-6, equal_nan=True)
            assert results[0][0][defined].isfinite().sum() >= 9, (dtype, keep)
            assert all(value[4].isnan().any() for result in results for value in result)


@needs_triton
def test_rows_of_the_least_number_and_of_none() -> None:
    run_ranks(1, read_least)


def kept(mask: Tensor) -> KeptIds:
    return KeptIds(mask.nonzero()[:, 1], torch.cat([torch.zeros(1).long(), mask.sum(1).cumsum(0)]))


def read_unordered() -> None:
    """Kept ids in any order, named once or several times, of 1 to 700 of 1,000 ids, over two calls of padding."""
    use_kernels()
    for number, most in enumerate((1, 3, 130, 700)):
        draw = torch.Generator().manual_seed(number)
        logits = torch.randn(5, 1000, generator=draw)
        rows = [torch.randint(900, (int(n),), generator=draw) for n in torch.randint(0, most + 1, (5,), generator=draw)]
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        labels = torch.randint(900, (5, 3), generator=draw)
        labels[0] = labels[0, :1]  # one id three times
        mask = torch.tensor([1, 1, 0, 1, 1])
        results = []
        for kernel, dtype in (("triton", torch.float32), ("torch", torch.float64)):
            leaf = logits.to(dtype).requires_grad_()
            options: dict[str, Any] = {"vocab_size": 900, "token_mask": mask, "entropy": True}
            keep = KeptIds(torch.cat(rows).to((torch.int64, torch.int32, torch.int16)[number % 3]), offsets)
            for in_place in (False, True) if kernel == "triton" else (False,):
                values = log_probs_from_logits(
                    leaf * 1, labels, keep=keep, kernel=kernel, gradient_in_place=in_place, **options
                )
                slopes = [torch.ones_like(values[0]), torch.full_like(values[1], 0.7)]
                results.append([*values, *torch.autograd.grad([*values], leaf, slopes)])
        for computed in results[:2]:
            for value, right in zip(computed, results[2], strict=True):
                torch.testing.assert_close(value.double(), right, rtol=2e-6, atol=2e-6)


@needs_triton
def test_kept_ids_in_any_order_count_once() -> None:
    run_ranks(1, read_unordered)


def read_without_a_mask() -> int:
    """The entries of the largest tensor that is made beside the gradient."""
    use_kernels()
    made = Made()
    logits = torch.randn(16, 4096).requires_grad_() * 1
    keep, labels = kept(torch.rand(16, 4096) < 0.01), torch.arange(16)
    with made:
        values = log_probs_from_logits(logits, labels, entropy=True, keep=keep, gradient_in_place=True)
        torch.autograd.grad([*values], logits, [torch.ones_like(value) for value in values])
    return made.largest


class Made(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        new = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.data_ptr() not in given]
        self.largest = max([self.largest, *new])
        return result


@needs_triton
def test_kept_ids_make_no_tensor_of_the_logits_size() -> None:
    (largest,) = run_ranks(1, read_without_a_mask)
    assert 0 < largest <= 2 * 16 * 4096 * 0.01 + 1000


LEAST = torch.finfo(torch.float32).min
FAR = [[0.0, 90, 0, -90], [5, 5, -torch.inf, -torch.inf], [3e4, 0, -3e4, 0], [0, 0, 3e4, -3e4], [5, 4, LEAST, LEAST]]
FAR_LABELS = [0, 1, 2, 0, 0]


def read_far(use: tuple[bool, ...]) -> list[Tensor]:
    """On a rank of the vocabulary, whose kernels read or not: others may have to go on without."""
    start_process_group()
    group = torch.distributed.group.WORLD
    counts = use_kernels() if use[group.rank()] else Counter(statistics=1)
    leaf = torch.tensor(FAR)[:, 2 * group.rank() : 2 * group.rank() + 2].clone().requires_grad_()
    mask = torch.tensor([1, 1, 1, 1, 1, 0])
    logits = torch.cat([leaf, torch.full((1, 2), torch.nan)])
    labels = torch.tensor([*FAR_LABELS, -100])
    values = log_probs_from_logits(logits, labels, entropy=True, tp_group=group, token_mask=mask)
    assert counts["statistics"] == 1
    (gradient,) = torch.autograd.grad((values.log_probs - values.entropy).sum(), leaf)
    return [value.detach().double() for value in (*values, gradient)]


@needs_triton
@pytest.mark.parametrize("use", [(True, True), (False, True)], ids=["kernels", "plain torch on one rank"])
def test_a_vocabulary_on_two_ranks_logits_far_apart_and_infinite_ones(use: tuple[bool, ...]) -> None:
    leaf = torch.tensor(FAR, dtype=torch.float64).clamp(min=-1e5).requires_grad_()
    expected = head_oracle.log_probs_and_entropy(leaf, torch.tensor(FAR_LABELS))
    (gradient,) = torch.autograd.grad((expected[0] - expected[1]).sum(), leaf)
    first, second = run_ranks(2, read_far, use)
    torch.testing.assert_close(first[:2], second[:2], rtol=1e-6, atol=1e-7)
    assert [float(value[-1]) for value in first[:2]] == [0, 0]  # the token that the mask leaves out
    torch.testing.assert_close(first[0][:-1], expected[0].detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(first[1][:-1], expected[1].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat([first[2], second[2]], 1), gradient, rtol=1e-6, atol=1e-6)


def read_sequence_parallel() -> dict[str, Outputs]:
    start_process_group()
    counts, parallel = use_kernels(), {"group": torch.distributed.group.WORLD, "sequence_parallel": True}
    read = functools.partial(results_of, "two passes", chunk_tokens=7)
    results = {name: read(name, torch.float32, BOTH, parallel) for name in FEW}
    assert counts["combine"] == len(FEW)
    return results | {"ids": read(FEW[1], torch.float32, BOTH, parallel, keep=kept_ids())}


@needs_triton
@pytest.mark.slow
def test_hidden_states_over_two_ranks() -> None:
    first, second = run_ranks(2, read_sequence_parallel)
    for name in (*FEW, "ids"):
        whole = {key: torch.cat([first[name][key], second[name][key]]) for key in ("hidden", "weight")}
        check(first[name] | whole, expected_of(FEW[1] if name == "ids" else name, torch.float32), torch.float32, FP32)


def read_beyond_int32() -> None:
    """Rows 2^30 entries apart, in memory of which only these rows are ever touched."""
    use_kernels()
    stride, rows, columns = 2**30, 4, 40
    reserved = mmap.mmap(-1, 4 * (stride * (rows - 1) + columns), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    logits = torch.from_numpy(np.frombuffer(reserved, np.float32)).as_strided((rows, columns), (stride, 1))
    logits.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)))
    labels, exact = torch.tensor([3, 39, 0, 7]), logits.double().requires_grad_()
    expected, _ = head_oracle.log_probs_and_entropy(exact, labels)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    leaf = logits.requires_grad_()
    log_probs = log_probs_from_logits(leaf, labels).log_probs
    assert relative(log_probs, expected) <= 1e-6
    assert relative(torch.autograd.grad(log_probs.sum(), leaf)[0], gradient) <= 1e-6


@needs_triton
def test_offsets_beyond_32_bits() -> None:
    run_ranks(1, read_beyond_int32)


def compare_some(seed: int) -> tuple[list[str], list[str]]:
    use_kernels()
    import compare_kernels

    from megatron_rl_loss.logprobs import triton_kernels

    worst, beyond = compare_kernels.compare(16, seed)
    assert {dtype for _, dtype in worst} == set(compare_kernels.DTYPES)
    combine = triton_kernels.combine

    def combine_wrongly(tables: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        log_probs, norm = combine(tables, scale)
        return log_probs * (1 + 1e-5), norm

    triton_kernels.combine = combine_wrongly
    return beyond, compare_kernels.compare(2, seed)[1]


@needs_triton
def test_random_cases() -> None:
    ((beyond, with_fault),) = run_ranks(1, compare_some, 3)
    assert beyond == []
    assert with_fault  # negative control


def compare_parts(cases: int, seed: int) -> tuple[list[str], list[str], int]:
    """On a rank of the vocabulary; also what its first launches took for wrong, and the programs that were compared."""
    start_process_group()
    use_kernels(compare=True)
    import random

    import compare_kernels

    from megatron_rl_loss.logprobs import first_launch

    group = torch.distributed.group.WORLD
    draw = random.Random(seed)
    drawn = [compare_kernels.drawn(draw, group.size()) for _ in range(cases)]
    assert any(case.is_far for case in drawn)
    # On some rank all columns are padding.
    assert any((case.options["vocab_size"] or 90) <= case.logits.shape[1] // group.size() for case in drawn)
    beyond = compare_kernels.compare(cases, seed, group=group)[1]
    return beyond, compare_kernels.off_by_mistake(), len(first_launch.compared)


@needs_triton
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_cases_of_a_vocabulary_on_ranks(ranks: int) -> None:
    for beyond, off, compared in run_ranks(ranks, compare_parts, 6, 8):
        assert beyond == off == []
        assert compared > 0

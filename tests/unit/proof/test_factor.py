"""The factor of simulated reductions: sound ones have it, in every type, order and size; others are named."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.proof.factor import Alike, Fit, Parameter
from megatron_rl_loss.proof.sketches import Signs

ENTRIES, SIGNS = 256, Signs(2)


def ring(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over ranks [ranks, parameters, entries], one after the other, in a type."""
    total = gradients[0].to(dtype)
    for rank_gradients in gradients[1:]:
        total = (total + rank_gradients.to(dtype)).to(dtype)
    return total


def tree(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    parts = gradients.to(dtype)
    while len(parts) > 1:
        parts = (parts[0::2] + parts[1::2]).to(dtype)
    return parts[0]


def drawn(kind: str, ranks: int, parameters: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(ranks + parameters)
    noise = torch.randn(ranks, parameters, ENTRIES, generator=generator)
    base = torch.randn(1, parameters, ENTRIES, generator=generator)
    first_half = (torch.arange(ranks) < max(1, ranks // 2))[:, None, None]
    values = {
        "independent": noise,
        "aligned": base + 0.1 * noise,
        "half cancel": torch.where(first_half, base, -base) + 0.1 * noise,
        "one rank": noise * (torch.arange(ranks) == ranks - 1)[:, None, None] + 1e-6 * noise,
    }[kind]
    return values.to(dtype).float() if dtype != torch.float16 else values * 1e-3


def sketched(values: Tensor) -> Tensor:
    return torch.stack([SIGNS.sketch(row) for row in values])


def fitted(gradients: Tensor, final: Tensor, dtype: torch.dtype) -> Alike:
    """What is found of gradients [ranks, parameters, entries] and final ones [parameters, entries]."""
    parameters = [
        Parameter(f"p{n}", ENTRIES, torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal, 4.0 + len(gradients))
        for n in range(gradients.shape[1])
    ]
    given = torch.stack([sketched(rank_gradients) for rank_gradients in gradients]).sum(0)
    return Fit(parameters, given, sketched(final)).alike()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("kind", ["independent", "aligned", "half cancel", "one rank"])
@pytest.mark.parametrize("reduce", [ring, tree])
def test_sound_reductions_have_one_factor(
    dtype: torch.dtype, ranks: int, kind: str, reduce: Callable[[Tensor, torch.dtype], Tensor]
) -> None:
    gradients = drawn(kind, ranks, 100, dtype)
    found = fitted(gradients, reduce(gradients / ranks, dtype).float(), dtype)
    assert not found.unlike, found.unlike
    assert found.worst < 1
    if found.factor is not None:  # of a half that cancels the other, rounding may be all that is left
        assert found.factor.value * ranks == pytest.approx(1, abs=max(4 * found.factor.uncertainty, 1e-6))
    assert found.factor is not None or kind == "half cancel"


def test_wide_sums_of_cancelling_halves_are_sound_in_float32() -> None:
    gradients = drawn("half cancel", 512, 100, torch.float32)
    found = fitted(gradients, ring(gradients / 512, torch.float32), torch.float32)
    assert found.factor is not None
    assert not found.unlike


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda final, own: final * 0.5, "0.5 times the others"),
        (lambda final, own: final * 1.01, "1.01 times the others"),
        (lambda final, own: own / 8, "no multiple of the sum over ranks"),
        (lambda final, own: final * 0, "its final gradient is 0"),
        (lambda final, own: final.roll(1), "no multiple of the sum over ranks"),
        (lambda final, own: final + (torch.arange(ENTRIES) == 3), "no multiple of the sum over ranks"),
    ],
)
def test_one_of_fifty_is_named(change: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    gradients = drawn("independent", 8, 50, torch.float32)
    final = ring(gradients / 8, torch.float32)
    final[7] = change(final[7], gradients[0, 7])
    found = fitted(gradients, final, torch.float32)
    assert found.unlike == {"p7": words}
    assert found.covered == 49


def test_most_parameters_decide() -> None:
    gradients = drawn("independent", 4, 50, torch.float32)
    final = ring(gradients / 4, torch.float32)
    final[:48] *= 0.25
    found = fitted(gradients, final, torch.float32)
    assert found.factor is not None
    assert found.factor.value == pytest.approx(1 / 16)
    assert list(found.unlike) == ["p48", "p49"]
    none = fitted(gradients, gradients[0], torch.float32)
    assert none.factor is None
    assert "50 of 50 parameters, as p0, p1, p2, are no multiple of the sum over ranks" in none.problem


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ((1.0, 3.0), "2 of 2 parameters have no common factor: p0 (0.25 times the sum), p1 (0.75 times the sum)"),
        ((1.0, 0.0), "2 of 2 parameters have no common factor: p0 (0.25 times the sum), p1 (its final gradient is 0)"),
        (
            (0.0, 0.0),
            "all final gradients are 0, as if they were zeroed before the measured step was over. End the `with` "
            "before optimizer.zero_grad()",
        ),
    ],
)
def test_why_there_is_no_common_factor(factors: tuple[float, ...], says: str) -> None:
    gradients = drawn("independent", 4, 2, torch.float64)
    gradients[:, 1] = gradients[:, 0]  # neither has the majority
    final = ring(gradients / 4, torch.float64) * torch.tensor(factors, dtype=torch.float64)[:, None]
    found = fitted(gradients, final, torch.float64)
    assert found.factor is None
    assert found.problem.endswith(f"{says}.")


@pytest.mark.parametrize(("value", "gradient"), [(0.0, "zero"), (math.inf, "overflow"), (math.nan, "overflow")])
def test_without_finite_gradients_there_is_no_factor(value: float, gradient: str) -> None:
    gradients = torch.full((2, 3, ENTRIES), value)
    found = fitted(gradients, gradients[0], torch.float32)
    assert (found.gradient, found.factor) == (gradient, None)


def test_what_cannot_be_told_is_not_covered() -> None:
    """Sums of bf16 over many ranks may stand still; where halves cancel, rounding is what is left."""
    gradients = drawn("aligned", 128, 3, torch.bfloat16)
    found = fitted(gradients, tree(gradients / 128, torch.bfloat16).float(), torch.bfloat16)
    assert not found.unlike
    assert found.factor is None
    assert "roundings of 0.008 each" in found.problem

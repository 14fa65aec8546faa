"""slime's and miles's own gathers of sequences, beside `segment_mean`: the same numbers, and what each exchanges.

From checkouts that SLIME_PATH and MILES_PATH name. Real: their `all_gather_with_cp` and `compute_gspo_kl`, on a CP
group over gloo; of their parallel state only what says this group.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import MILES, SLIME, Framework, checkout, load
from ranks import run_ranks, start_process_group
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagResponse
from megatron_rl_loss.losses import segment_mean, to_tokens

pytestmark = pytest.mark.slow

CP_SIZE = 4
NUM_SAMPLES = 5
MODULES = {
    "slime": (SLIME, "slime.backends.megatron_utils.cp_utils", "slime.utils.ppo_utils"),
    "miles": (MILES, "miles.backends.training_utils.cp_utils", "miles.backends.training_utils.loss_hub.math_utils"),
}


def their_means(framework: Framework, root: str, cp_utils: str, math_utils: str) -> Callable[..., Tensor]:
    """On a rank: a sequence's mean log-ratio at its tokens, as their policy loss computes it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
    gather_module, math_module = load(framework, root, cp_utils, math_utils)
    cp = SimpleNamespace(rank=dist.get_rank(), size=CP_SIZE, group=dist.group.WORLD)
    if hasattr(gather_module, "get_parallel_state"):
        gather_module.get_parallel_state = lambda: SimpleNamespace(cp=cp)

    def means(new: list[Tensor], old: list[Tensor], totals: list[int], responses: list[int], masks: Any) -> Tensor:
        full = [
            [gather_module.all_gather_with_cp(*one) for one in zip(values, totals, responses, strict=True)]
            for values in (new, old)
        ]
        return -math_module.compute_gspo_kl(*full, new, masks)

    return means


def compare(name: str, root: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """On a rank: for samples of each length, both results."""
    start_process_group()
    framework, *modules = MODULES[name]
    theirs = their_means(framework, root, *modules)
    found = [results_at(length, theirs) for length in lengths]
    dist.barrier()
    return found


def results_at(length: int, theirs: Callable[..., Tensor]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    responses = [length + i for i in range(NUM_SAMPLES)]
    totals = [n + 3 for n in responses]
    masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in responses]
    layout = ZigzagResponse(totals, responses)
    local = Samples(masks, layout=layout).local(dist.get_rank(), CP_SIZE)
    new, old, slopes = (local.of(torch.randn(layout.total_tokens, generator=generator)) for _ in range(3))
    new.requires_grad_()
    counts = local.counts.tolist()

    def ours() -> Tensor:
        return to_tokens(segment_mean(new - old, local, dist.group.WORLD), local)

    def gathered() -> Tensor:
        return theirs(list(new.split(counts)), list(old.split(counts)), totals, responses, masks)

    return {"ours": measured(ours, new, slopes), "theirs": measured(gathered, new, slopes)}


def measured(compute: Callable[[], Tensor], leaf: Tensor, slopes: Tensor) -> dict[str, Any]:
    """Means, gradient, the bytes of each collective, and how many of these are of the forward pass."""
    exchanged: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        exchanged.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    means = compute()
    forward = len(exchanged)
    (gradient,) = torch.autograd.grad((means * slopes).sum(), leaf)
    dist.all_reduce = all_reduce
    return {"means": means.detach(), "gradient": gradient, "bytes": exchanged, "forward": forward}


@pytest.mark.parametrize("name", MODULES)
def test_the_same_numbers_with_one_collective_instead_of_two_a_sample(name: str) -> None:
    lengths = (24, 240)
    of_ranks = run_ranks(CP_SIZE, compare, name, checkout(MODULES[name][0]), lengths)
    for of_rank in of_ranks:
        for results, length in zip(of_rank, lengths, strict=True):
            ours, theirs = results["ours"], results["theirs"]
            rounding = 2 * length * oracle.ROUNDING  # theirs add so many terms in float32
            for what in ("means", "gradient"):
                largest = float(theirs[what].abs().max())
                torch.testing.assert_close(ours[what], theirs[what], rtol=0, atol=rounding * max(largest, 1))
            assert (ours["forward"], len(ours["bytes"])) == (1, 2)
            assert ours["bytes"] == [8 * NUM_SAMPLES] * 2
            assert theirs["forward"] == 2 * NUM_SAMPLES
            assert sum(theirs["bytes"]) >= 2 * 4 * NUM_SAMPLES * length

"""Plain PyTorch without Megatron: DistributedDataParallel and FSDP average gradients, so a share is times the ranks."""

import itertools
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks, start_process_group
from step_samples import DIVISOR, dealt, step_samples
from steps import ids_of

from megatron_rl_loss import StepTotals, make_pg_loss_reducer

SAMPLES = step_samples(seed=3)


class Table(torch.nn.Module):
    """One parameter a token, its loss: the gradient is the token's weight."""

    def __init__(self) -> None:
        super().__init__()
        losses = [float(loss) for sample in SAMPLES for loss in sample.losses]
        self.losses = torch.nn.Parameter(torch.tensor(losses))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.losses[numbers]


def gradient_of(kind: str, mode: str, factor: float | None) -> list[float]:
    """Of all tokens, after two micro-batches a rank; `factor`: what a share is multiplied by, None for the ranks."""
    import torch.distributed as dist

    start_process_group()
    model: Any = Table()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    factor = dist.get_world_size() if factor is None else factor
    microbatches = dealt(SAMPLES, dist.get_rank(), dist.get_world_size(), 2)
    first = [0, *itertools.accumulate(len(sample.mask) for sample in SAMPLES)]
    mine = [SAMPLES[i] for chosen in microbatches for i in chosen]
    totals = StepTotals.from_loss_masks([one.mask for one in mine], dp_group=dist.group.WORLD, **ids_of(mine))
    for chosen in microbatches:
        samples = [SAMPLES[i] for i in chosen]
        numbers = [n for i in chosen for n in range(first[i], first[i + 1])]
        divisor = DIVISOR if mode == "constant" else None
        masks = [one.mask for one in samples]
        reducer = make_pg_loss_reducer(mode, masks, totals=totals, divisor=divisor, **ids_of(samples))
        (factor * reducer(model(torch.tensor(numbers, dtype=torch.int64)))).backward()
    gradient = next(model.parameters()).grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).tolist()


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_share_times_the_ranks_trains_on_the_step_loss(kind: str, mode: str) -> None:
    expected = torch.cat(oracle.step_gradient(mode, SAMPLES, DIVISOR if mode == "constant" else None))
    for gradient in run_ranks(2, gradient_of, kind, mode, None):
        torch.testing.assert_close(torch.tensor(gradient).double(), expected, rtol=4 * oracle.EXACT, atol=0)


def test_a_share_alone_is_halved_by_two_ranks() -> None:
    """Negative control."""
    expected = torch.cat(oracle.step_gradient("token_mean", SAMPLES))
    for gradient in run_ranks(2, gradient_of, "ddp", "token_mean", 1.0):
        torch.testing.assert_close(2 * torch.tensor(gradient).double(), expected, rtol=4 * oracle.EXACT, atol=0)

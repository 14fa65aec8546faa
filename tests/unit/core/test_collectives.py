"""Collectives over groups that an engine wraps, destroys and builds again, and the words for a group that is no use."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import bytes_broadcast, bytes_gathered, run_ranks, start_process_group

from megatron_rl_loss import Samples, plan_step
from megatron_rl_loss.core.collectives import (
    all_gather_single,
    all_reduce,
    bytes_of_all,
    device_of,
    gather_objects,
    rank_in,
    ranks_of,
    reduce_in_place,
    reduce_scatter_single,
    size_of,
)

RANKS = 2
MASKS: list[list[list[float]]] = [[[1, 1, 0, 1], [0, 0]], [[1, 0.5, 1], [1]]]  # of two ranks


class Reloadable(dist.ProcessGroup):
    """A group as engines wrap it: torch knows the one in `.group` alone, which is None while it is destroyed."""

    def __init__(self, group: Any) -> None:
        super().__init__(rank=group.rank(), size=group.size())  # type: ignore[call-arg]
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None


class Hidden(dist.ProcessGroup):
    """A group that does not say which group it wraps."""

    def __init__(self, group: Any) -> None:
        super().__init__(rank=group.rank(), size=group.size())  # type: ignore[call-arg]


def replace_functions() -> None:
    """As engines do: functions of torch.distributed that take a wrapper by name, but not those of newer versions."""

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(
            *(arg.group if isinstance(arg, Reloadable) else arg for arg in args),
            **{name: value.group if isinstance(value, Reloadable) else value for name, value in kwargs.items()},
        )

    names = ["all_reduce", "all_gather", "all_gather_into_tensor", "get_rank", "get_world_size"]
    for name in [*names, "get_backend", "get_process_group_ranks", "reduce_scatter_tensor"]:
        setattr(dist, name, unwrapping(getattr(dist, name)))


def of_each_collective(group: Any) -> list[Any]:
    """What every collective of the library gives over the group."""
    rank = dist.get_rank()
    counts, computed = torch.tensor([1.0, rank]), torch.tensor([2.0, rank])
    all_reduce(counts, group)
    reduce_in_place(computed, group, dist.ReduceOp.MAX)
    gathered, scattered = torch.empty(4), torch.empty(1)
    all_gather_single(gathered, torch.tensor([rank, 7.0]), group)
    reduce_scatter_single(scattered, torch.tensor([1.0, 10.0]), group)
    objects = gather_objects("x" * 400 * rank, group)
    places = [size_of(group), rank_in(group), ranks_of(group), str(device_of(group))]
    return [counts.tolist(), computed.tolist(), gathered.tolist(), scattered.tolist(), objects, places]


def weights_over(group: Any) -> list[float]:
    plan = plan_step([Samples(MASKS[dist.get_rank()])], "token_mean", dp_group=group, gradients="summed over ranks")
    return plan[0].weights.tolist()


def on_rank(functions_are_replaced: bool) -> dict[str, Any]:
    start_process_group()
    plain: Any = dist.new_group(range(RANKS))
    expected = of_each_collective(plain)
    wrapped = Reloadable(dist.new_group(range(RANKS)))
    twice = Reloadable(wrapped)
    if functions_are_replaced:
        replace_functions()
    results: dict[str, Any] = {"as torch's own": of_each_collective(wrapped) == of_each_collective(twice) == expected}
    results["weights"] = [weights_over(wrapped)]
    says = []
    wrapped.destroy()
    for group in (wrapped, Hidden(plain)):
        with pytest.raises(ValueError, match="a process group of type") as error:
            weights_over(group)
        says.append(str(error.value))
    wrapped.group = dist.new_group(range(RANKS))
    results["weights"].append(weights_over(wrapped))
    dist.destroy_process_group(plain)
    with pytest.raises(ValueError, match="a process group of type") as error:
        all_reduce(torch.zeros(1), plain)
    return results | {"says": [*says, str(error.value)]}


@pytest.mark.parametrize("functions_are_replaced", [False, True])
def test_groups_may_be_wrapped_destroyed_and_built_again(functions_are_replaced: bool) -> None:
    total = float(np.concatenate([mask for masks in MASKS for mask in masks]).sum())
    for rank, results in enumerate(run_ranks(RANKS, on_rank, functions_are_replaced)):
        assert results["as torch's own"]
        for weights in results["weights"]:
            assert np.allclose(weights, np.concatenate(MASKS[rank]) / total, rtol=oracle.EXACT, atol=0)
        destroyed, hidden, stale = results["says"]
        assert destroyed == (
            "a process group of type Reloadable whose group is destroyed: no collective can run over it. Build the "
            "engine's groups again before the step."
        )
        for says, name in ((hidden, "Hidden"), (stale, "ProcessGroup")):
            assert says.startswith(f"a process group of type {name} that torch.distributed does not know: it was des")


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:mpi,cuda:mpi", "cpu"),
        ("cuda:nccl", "cuda:1"),
        ("xpu:xccl", "xpu:2"),
    ],
)
def test_counts_travel_on_a_device_of_the_backend(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 2)
    assert str(device_of(cast(Any, object()))) == device


def gathered_unevenly() -> tuple[bool, list[int], list[int]]:
    start_process_group()
    group, (sent, broadcast) = dist.group.WORLD, (bytes_gathered(), bytes_broadcast())
    rank = dist.get_rank()
    rows = [bytes([number]) * (300_000 if number == 2 else 100 * number) for number in range(4)]
    return gather_objects(rows[rank], group) == rows, sent, broadcast


def test_a_rank_with_much_more_than_the_others_does_not_fill_them_up() -> None:
    for is_right, sent, broadcast in run_ranks(4, gathered_unevenly):
        assert is_right
        assert max(sent) < 1000
        assert sum(broadcast) < 301_000


def test_bytes_of_all_ranks_and_of_few() -> None:
    """Of 1,024 ranks with 64 samples each, and one with 4,096, none receives 64 times what there is."""
    even, uneven = [64 * 48] * 1024, [64 * 48] * 1023 + [4096 * 48]
    assert bytes_of_all(even) == 64 * 48
    assert bytes_of_all([0, 0, 0]) == 0
    most = bytes_of_all(uneven)
    received = 1024 * most + sum(length - most for length in uneven if length > most)
    assert received == sum(uneven)
    assert 1024 * max(uneven) > 50 * received
    assert bytes_of_all([100, 100, 900]) == 900  # a broadcast would cost more

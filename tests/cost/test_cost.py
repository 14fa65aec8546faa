"""What a micro-batch costs, as counts: graph nodes, launches, host reads, bytes kept. Times: tools/bench.

A launch is a torch operation that does work, by the profiler: one kernel on a GPU (a reduction may take two there).
The host looks whether a sum is finite. On a device no value may be read; the fixture `way` brings that about on a CPU.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import graph_nodes
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_rl_loss import Samples, StepTotals, ZigzagTHD, make_pg_loss_reducer
from megatron_rl_loss.losses import segment_scan
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan import Plan

#: Do no work themselves: views, and wrappers of what they are recorded to call.
WRAPPERS = {
    "aten::as_strided", "aten::view", "aten::alias", "aten::expand", "aten::detach", "aten::select", "aten::slice",
    "aten::unsqueeze", "aten::unbind", "aten::reshape", "aten::split", "aten::narrow", "aten::to", "aten::stack",
    "aten::empty", "aten::result_type", "aten::lift_fresh", "aten::resolve_conj", "aten::resolve_neg",
}  # fmt: skip
READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}

#: Whose weights are shared with the metrics, and others; all modes are one sum of weights.
each_kind = pytest.mark.parametrize("mode", ["sample_mean", "constant"])


def microbatch_of(
    num_samples: int, mode: str, device: str = "cpu", num_metrics: int = 5
) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """A micro-batch of the adapter at CP 2, its losses and metrics; tokens in all do not depend on `num_samples`."""

    length = 8192 // num_samples
    masks = [torch.arange(length) % 3 != i % 2 for i in range(num_samples)]
    bounds = list(itertools.accumulate([length] * num_samples, initial=0))
    prompt_ids = [i // 2 for i in range(num_samples)]
    plan = Plan(
        samples=[Samples(masks, layout=ZigzagTHD(bounds), prompt_ids=prompt_ids)],
        modes=LossModes.resolve(mode, divisor=64 if mode == "constant" else None),
        totals=StepTotals.from_loss_masks(masks, prompt_ids=prompt_ids),
        num_microbatches=2,
        cp_rank=1,
        cp_size=2,
        dp_size=2,
    )
    losses = torch.randn(4096, device=device, requires_grad=True)
    metrics = {f"metric{i}": torch.randn(4096, device=device) for i in range(num_metrics)}
    microbatch = plan[0]
    microbatch.loss(losses, metrics)  # the weights are made, and where they are needed
    return microbatch, losses, metrics


def operations(function: Callable[[], Any]) -> list[str]:
    """The outermost operations that are not wrappers, in order of their begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    found: list[str] = []

    def visit(events: list[Any]) -> None:
        for event in sorted(events, key=lambda event: event.time_range.start):
            if event.name.startswith("aten::") and event.name not in WRAPPERS:
                found.append(event.name)
            else:
                visit(event.cpu_children)

    visit([event for event in recorded.events() if event.cpu_parent is None])
    return found


@pytest.fixture(params=["on the host", "as on a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "as on a device":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return str(request.param)


@each_kind
@pytest.mark.usefixtures("way")
def test_launches_grow_neither_with_samples_nor_with_metrics(mode: str) -> None:
    def launches(num_samples: int, num_metrics: int) -> list[str]:
        microbatch, losses, metrics = microbatch_of(num_samples, mode, num_metrics=num_metrics)
        found = operations(lambda: torch.autograd.grad(microbatch.loss(losses, metrics)[0], losses))
        # What Megatron is handed of a report is a number each, on the way into one tensor.
        return [name for name in found if name not in READS]

    assert launches(2, 5) == launches(1024, 5)
    assert len(launches(64, 40)) == len(launches(64, 5)) <= 20


def test_launches_of_a_scan_do_not_grow_with_samples() -> None:
    def launches(num_samples: int) -> list[str]:
        local = Samples([torch.ones(4096 // num_samples)] * num_samples).local(0, 1)
        values = torch.randn(4096, requires_grad=True)
        return operations(lambda: torch.autograd.grad(segment_scan(values, local).sum(), values))

    assert launches(2) == launches(1024)


def test_launches_are_counted() -> None:
    """Negative control: a closure that loops over samples."""
    x = torch.randn(4096)
    assert len(operations(lambda: sum((part * 2).sum() for part in x.split(64)))) >= 2 * 64


@each_kind
def test_a_loss_is_one_node_of_the_graph(mode: str) -> None:
    microbatch, losses, metrics = microbatch_of(2048, mode)
    assert graph_nodes(microbatch.pg_loss(losses)) == 2  # and the leaf
    assert graph_nodes(microbatch.loss(losses, metrics)[0]) == 3  # and Megatron's scale


@each_kind
def test_nothing_is_read_back_from_a_device(mode: str, way: str) -> None:
    microbatch, losses, metrics = microbatch_of(64, mode)
    from megatron_rl_loss.reduction import sums

    # The sums alone: on a CPU, scaling the share by a Python number is recorded as reading that number.
    rows = [(losses, microbatch.pg_loss), *((metric, microbatch.sample_mean) for metric in metrics.values())]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        lists, tolist = [], Tensor.tolist
        patch.setattr(Tensor, "tolist", lambda tensor: lists.append(tensor) or tolist(tensor))
        assert not READS & set(operations(lambda: sums._sums(rows, losses.device)))
    assert bool(lists) == (way == "on the host")


@each_kind
def test_one_float32_a_local_token_is_kept(mode: str) -> None:
    microbatch, losses, _ = microbatch_of(64, mode)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        share = microbatch.pg_loss(losses)
    (weights,) = [one for row in share.grad_fn.rows for one in row if isinstance(one, Tensor)]  # type: ignore[union-attr]
    assert saved == []
    assert (weights.dtype, weights.shape) == (torch.float32, (4096,))
    assert weights is microbatch.pg_loss.weights
    # The loss and its metrics share the weights where they are the same.
    assert (microbatch.pg_loss is microbatch.sample_mean) == (mode == "sample_mean")


def test_it_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    masks = [torch.tensor([1, 0.5, 0, 1]), torch.zeros(2), torch.ones(2)]
    values = torch.tensor([1.0, -2, float("nan"), 4, float("inf"), float("-inf"), 7, 8])
    reducer = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.from_loss_masks(masks))
    for function in (reducer, torch.compile(reducer.__call__, fullgraph=True, backend="aot_eager")):
        losses = values.clone().requires_grad_()
        total = function(losses)
        total.backward()
        assert total.item() == pytest.approx((4 / 2.5 + 7.5) / 3)
        assert losses.grad.tolist() == pytest.approx([x / 30 for x in (4, 2, 0, 4, 0, 0, 5, 5)])


# ---- on a GPU (TEST_DEVICE=cuda)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    if os.environ.get("TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpus
@each_kind
def test_the_host_never_waits_for_the_gpu(mode: str, on_gpu: None) -> None:
    microbatch, losses, metrics = microbatch_of(64, mode, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    microbatch.loss(losses, metrics)[0].backward()


@pytest.mark.gpus
@each_kind
def test_it_can_be_captured_in_a_cuda_graph(mode: str, on_gpu: None) -> None:
    microbatch, losses, metrics = microbatch_of(64, mode, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up, off the default stream
        microbatch.loss(losses, metrics)[0].backward()
    torch.cuda.synchronize()
    losses.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, _, report = microbatch.loss(losses, metrics)
        total.backward()
    with torch.no_grad():
        losses.copy_(torch.randn_like(losses))
    graph.replay()
    expected, _, _ = microbatch.loss(losses, metrics)
    assert torch.allclose(total, expected)
    assert len(report) == 1 + len(metrics)

"""What a micro-batch costs, as counts: graph nodes, launches, host reads, bytes kept. Times: tools/bench.

A launch is a torch operation that does work, by the profiler: one kernel on a GPU (a reduction may take two there). On
the host, sums are looked at for NaN. Elsewhere nothing may be looked at, which "without looking" brings about on a CPU.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from graphs import graph_nodes
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from megatron_rl_loss import Samples, StepTotals, ZigzagTHD, make_pg_loss_reducer
from megatron_rl_loss.megatron import AggregationSettings

NUM_METRICS = 5
#: Do no work themselves: views, and wrappers of what they are recorded to call.
WRAPPERS = {
    "aten::as_strided", "aten::view", "aten::alias", "aten::expand", "aten::detach", "aten::select", "aten::slice",
    "aten::unsqueeze", "aten::unbind", "aten::reshape", "aten::split", "aten::narrow", "aten::to", "aten::item",
    "aten::_local_scalar_dense", "aten::stack", "aten::empty", "aten::result_type", "aten::lift_fresh",
}  # fmt: skip


def microbatch_of(num_samples: int, mode: str, device: str = "cpu") -> tuple[Any, Tensor, dict[str, Tensor]]:
    """A micro-batch of the adapter at CP 2, its losses and metrics; tokens in all do not depend on `num_samples`."""
    from megatron_rl_loss.megatron.microbatch import Microbatch, Step

    length = 8192 // num_samples
    masks = [torch.arange(length) % 3 != i % 2 for i in range(num_samples)]
    bounds = list(itertools.accumulate([length] * num_samples, initial=0))
    samples = Samples(masks, layout=ZigzagTHD(bounds), prompt_ids=[i // 2 for i in range(num_samples)])
    settings = AggregationSettings.resolve(mode, divisor=64 if mode == "constant" else None)
    step = Step(
        aggregation=settings.aggregation,
        totals=StepTotals.from_loss_masks(masks, prompt_ids=[i // 2 for i in range(num_samples)]),
        num_microbatches=2,
        cp_rank=1,
        cp_size=2,
        dp_cp_size=4,
    )
    losses = torch.randn(4096, device=device, requires_grad=True)
    metrics = {f"metric{i}": torch.randn(4096, device=device) for i in range(NUM_METRICS)}
    microbatch = Microbatch(None, samples, step)
    microbatch.loss(losses, metrics)  # the weights are made, and where they are needed
    return microbatch, losses, metrics


def operations(function: Callable[[], Any], wrappers: set[str]) -> list[str]:
    """The outermost operations that are not wrappers, in order of their begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    found: list[str] = []

    def visit(events: list[Any]) -> None:
        for event in sorted(events, key=lambda event: event.time_range.start):
            if event.name.startswith("aten::") and event.name not in wrappers:
                found.append(event.name)
            else:
                visit(event.cpu_children)

    visit([event for event in recorded.events() if event.cpu_parent is None])
    return found


def launches(function: Callable[[], Any]) -> list[str]:
    return operations(function, WRAPPERS)


@pytest.fixture(params=["looking", "without looking"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without looking":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return str(request.param)


@pytest.mark.parametrize("mode", oracle.MODES)
def test_launches_of_a_microbatch_with_all_its_metrics(mode: str, way: str) -> None:
    counted, one = {}, torch.ones(())
    for num_samples in (2, 64, 1024):
        microbatch, losses, metrics = microbatch_of(num_samples, mode)

        def step(microbatch: Any = microbatch, losses: Tensor = losses, metrics: Any = metrics) -> None:
            share = microbatch.loss(losses, metrics)[0]
            torch.autograd.grad(share, losses, one)

        counted[num_samples] = launches(step)
    assert counted[2] == counted[64] == counted[1024]
    one_weight = mode == "sample_mean"  # for the loss and the metrics
    expected = {"looking": 13, "without looking": 9 if one_weight else 10}
    assert len(counted[2]) == expected[way], counted[2]


def test_launches_are_counted(way: str) -> None:
    """Negative control: a closure that loops over samples."""
    x = torch.randn(4096)
    looped = launches(lambda: sum((part * 2).sum() for part in x.split(64)))
    assert len(looped) >= 2 * 64


@pytest.mark.parametrize("mode", oracle.MODES)
@pytest.mark.parametrize("num_samples", [1, 64, 2048])
def test_nodes_of_the_graph(mode: str, num_samples: int, way: str) -> None:
    microbatch, losses, metrics = microbatch_of(num_samples, mode)
    nodes = {"looking": 3, "without looking": 2}[way]  # product and sum, or both in one; and the leaf
    assert graph_nodes(microbatch.pg_loss(losses)) == nodes
    assert graph_nodes(microbatch.loss(losses, metrics)[0]) == nodes + 1  # and Megatron's scale


@pytest.mark.parametrize("mode", oracle.MODES)
def test_nothing_is_read_back_where_nothing_is_looked_at(mode: str, way: str) -> None:
    microbatch, losses, metrics = microbatch_of(64, mode)
    # Scaling by a Python number is recorded as reading that number, on CPU alone: carry() is left out.
    reduce = functools.partial(microbatch.pg_loss.with_metrics, losses, list(metrics.values()), microbatch.sample_mean)
    done = operations(lambda: reduce()[0].backward(), WRAPPERS - {"aten::item"})
    reads = [name for name in done if name in ("aten::item", "aten::is_nonzero")]
    assert len(reads) == {"looking": 1, "without looking": 0}[way]  # the loss; sums of metrics are looked at in NumPy


@pytest.mark.parametrize("mode", oracle.MODES)
def test_one_float32_a_local_token_is_kept(mode: str, way: str) -> None:
    microbatch, losses, _ = microbatch_of(64, mode)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        microbatch.pg_loss(losses)
    assert [(tensor.dtype, tensor.shape, tensor.data_ptr()) for tensor in kept] == [
        (torch.float32, (4096,), microbatch.pg_loss.weights.data_ptr())
    ]
    # The loss and its metrics share the weights where they are the same.
    assert (microbatch.pg_loss is microbatch.sample_mean) == (mode == "sample_mean")


def weighted(losses: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    """A reducer of three samples with a masked one, and the float64 weights it stands for."""
    masks = [[1, 0.5, 0, 1], [0, 0], [1, 1]]
    samples = [oracle.sample([0.0] * len(mask), mask) for mask in masks]
    reducer = make_pg_loss_reducer(
        "sample_mean",
        [torch.tensor(mask) for mask in masks],
        totals=StepTotals.from_loss_masks([s.mask for s in samples]),
    )
    return reducer, torch.cat(oracle.step_gradient("sample_mean", samples))


CASES = {
    "finite": [1.0, -2, 3, 4, 5, 6, 7, 8],
    "NaN and Inf where nothing counts": [1.0, -2, float("nan"), 4, float("inf"), float("-inf"), 7, 8],
    "NaN where it counts": [1.0, float("nan"), 3, 4, 5, 6, 7, 8],
    "Inf where it counts": [1.0, -2, 3, 4, 5, 6, float("inf"), 8],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_both_ways_sum_the_same(values: list[float], dtype: torch.dtype, way: str) -> None:
    losses = torch.tensor(values, dtype=dtype, requires_grad=True)
    reducer, weights = weighted(losses)
    other = losses.detach() * 2
    total, (doubled,) = reducer.with_metrics(losses, [other], reducer)
    expected = (losses.detach().double()[weights != 0] * weights[weights != 0]).sum().float()
    rounding = oracle.sum_error(len(values))  # terms of both signs, whose sum is about as large as they are
    assert torch.allclose(total, expected, rtol=rounding, equal_nan=True)
    assert torch.allclose(doubled, 2 * expected, rtol=rounding, equal_nan=True)
    assert total.dtype == torch.float32
    total.backward()
    assert losses.grad is not None
    assert losses.grad.dtype == dtype
    assert torch.allclose(losses.grad.double(), weights, rtol=2.0**-8 if dtype == torch.bfloat16 else oracle.EXACT)
    total /= 2  # as Megatron divides in place: legal on what a reducer returns


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_the_losses_cannot_hold_are_not_lost(dtype: torch.dtype, way: str) -> None:
    """2e-8, that of a token of 5e7, is 0 in float16; scaled by the carrier or a loss scale the gradient is not."""
    weight = 2e-8
    assert (torch.tensor(weight, dtype=torch.float16) == 0).all()
    reducer = make_pg_loss_reducer("token_mean", [torch.ones(3)], totals=StepTotals(step_tokens=1 / weight))
    losses = torch.tensor([2.0, -0.5, 4.0], dtype=dtype, requires_grad=True)
    share, (metric,) = reducer.with_metrics(losses, [losses.detach()])
    for value in (share.detach(), metric):
        assert float(value) == pytest.approx(5.5 * weight, rel=oracle.sum_error(3))
    (share * 2**16).backward()
    assert losses.grad is not None
    expected = torch.full((3,), weight * 2**16, dtype=torch.float64)
    torch.testing.assert_close(losses.grad.double(), expected, rtol=oracle.EXACT + torch.finfo(dtype).eps / 2, atol=0)


def test_weights_of_different_tokens_are_ignored_apart(way: str) -> None:
    """A mode of one's own may leave out more tokens than the mask does."""
    masks = [torch.tensor([1.0, 1, 0])]
    totals = StepTotals.from_loss_masks(masks)
    own = make_pg_loss_reducer(lambda inputs: [torch.tensor([0.0, 2, 3])], masks, totals=totals)
    losses, metric = torch.tensor([float("nan"), 1, float("nan")]), torch.tensor([4.0, 4, float("nan")])
    total, (mean,) = own.with_metrics(losses, [metric], make_pg_loss_reducer("sample_mean", masks, totals=totals))
    assert (float(total), float(mean)) == (2, 4)


class Counting(TorchFunctionMode):
    """Counts the torch calls that pass through it, as they all would through `torch.set_default_device`."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_function_modes_do_not_slow_a_build_down_by_its_samples(way: str) -> None:
    calls = []
    for num_samples in (2, 1024):
        masks = [torch.ones(8)] * num_samples
        totals = StepTotals.from_loss_masks(masks)
        with Counting() as mode:
            make_pg_loss_reducer("sample_mean", masks, totals=totals)
        calls.append(mode.calls)
    assert calls[1] - calls[0] <= 2 * 1022  # the shape and the dtype of each mask are looked at
    assert calls[0] <= 52


def test_it_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    values = torch.tensor(CASES["NaN and Inf where nothing counts"])
    reducer, weights = weighted(values)
    for graph in (reducer, torch.compile(reducer.__call__, fullgraph=True, backend="aot_eager")):
        losses = values.clone().requires_grad_()
        total = graph(losses)
        total.backward()
        expected = (values.double()[weights != 0] * weights[weights != 0]).sum()
        assert torch.allclose(total.double(), expected)
        assert torch.allclose(losses.grad.double(), weights)


# ---- on a GPU (TEST_DEVICE=cuda)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    if os.environ.get("TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpus
@pytest.mark.parametrize("mode", oracle.MODES)
def test_the_host_never_waits_for_the_gpu(mode: str, on_gpu: None) -> None:
    microbatch, losses, metrics = microbatch_of(64, mode, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    microbatch.loss(losses, metrics)[0].backward()


@pytest.mark.gpus
@pytest.mark.parametrize("mode", oracle.MODES)
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
    assert len(report) == 1 + NUM_METRICS

"""Costs of a micro-batch as counts: graph nodes, launches, host reads, bytes kept. Times: tools/bench.

A launch is a torch operation that does work, by the profiler: one kernel on a GPU (a reduction may take two there).
The host looks whether a sum is finite. On a device no value may be read: the meta device has none, and raises.
Collectives of a plan and of its end are counted in tests/unit/core/test_counting.py and tests/unit/core/test_finish.py.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from device import DEVICE
from graphs import graph_nodes
from ranks import run_ranks, start_process_group
from repository import ROOT
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_loss import (
    Metric,
    Microbatch,
    Samples,
    Term,
    ZigzagTHD,
    keep_tokens,
    log_probs_from_logits,
    measure_tokens,
    pass_gap,
    plan_step,
    segment_scan,
)
from megatron_rl_loss.core import transfers
from megatron_rl_loss.core.carriers import FORMS
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.plan import Plan

#: Do no work themselves: views, and wrappers of what they are recorded to call.
WRAPPERS = {
    "aten::as_strided", "aten::view", "aten::alias", "aten::expand", "aten::detach", "aten::select", "aten::slice",
    "aten::unsqueeze", "aten::unbind", "aten::reshape", "aten::split", "aten::narrow", "aten::to", "aten::stack",
    "aten::empty", "aten::result_type", "aten::lift_fresh", "aten::resolve_conj", "aten::resolve_neg",
}  # fmt: skip
READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}

#: Whose weights are shared with the metrics, and others; all modes are one sum of weights.
each_kind = pytest.mark.parametrize("mode", ["sample_mean", "constant"])


def microbatch_of(num_samples: int, mode: str, **options: Any) -> Microbatch:
    """The second of two CP ranks; tokens in all, 4096 here, do not depend on `num_samples`."""
    length = 8192 // num_samples
    masks = [torch.arange(length) % 3 != i % 2 for i in range(num_samples)]
    bounds = list(itertools.accumulate([length] * num_samples, initial=0))
    ids: Any = {"prompt_ids": [i // 2 for i in range(num_samples)], "term_masks": {"own": masks}}
    samples = [Samples(masks, layout=ZigzagTHD(bounds), **ids) for _ in range(2)]
    divisor = oracle.divisor_of(mode, 64)
    plan = plan_step(samples, mode, divisor=divisor, term_masks=["own"], dp_group=None, **options)
    cp_group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    plan.record.trainer = replace(plan.record.trainer, groups=StepGroups(None, cp_group))
    return Plan(samples, plan.record)[0]


def losses_of(device: str = "cpu", num_metrics: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    metrics = {f"metric{i}": torch.randn(4096, device=device) for i in range(num_metrics)}
    return torch.randn(4096, device=device, requires_grad=True), metrics


def loss_of(microbatch: Microbatch, losses: Tensor, metrics: Any, **options: Any) -> Any:
    microbatch._record.reset()
    return microbatch.loss(losses, metrics, **options)


def operations(function: Callable[[], Any]) -> list[str]:
    """The outermost operations that are not wrappers, in order of their begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    names: list[str] = []

    def visit(events: list[Any]) -> None:
        for event in sorted(events, key=lambda event: event.time_range.start):
            if event.name.startswith("aten::") and event.name not in WRAPPERS:
                names.append(event.name)
            else:
                visit(event.cpu_children)

    visit([event for event in recorded.events() if event.cpu_parent is None])
    return names


@pytest.fixture(params=["on the host", "as on a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as on a device":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@each_kind
@pytest.mark.usefixtures("way")
def test_launches_grow_neither_with_samples_nor_with_metrics(mode: str) -> None:
    def launches(num_samples: int, num_metrics: int) -> list[str]:
        microbatch, (losses, metrics) = microbatch_of(num_samples, mode), losses_of(num_metrics=num_metrics)
        loss_of(microbatch, losses, metrics)  # the weights are made
        names = operations(lambda: torch.autograd.grad(loss_of(microbatch, losses, metrics), losses))
        # A placeholder of each number of the report; and on the host, reads.
        return [name for name in names if name not in READS | {"aten::full"}]

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
    values = torch.randn(4096)
    assert len(operations(lambda: sum((part * 2).sum() for part in values.split(64)))) >= 2 * 64


@each_kind
@pytest.mark.usefixtures("way")
def test_the_graph_does_not_grow_with_samples(mode: str) -> None:
    """The leaf, its rows side by side, without masked tokens, times weights, summed; and the trainer's scale."""
    for num_samples in (2, 2048):
        losses, metrics = losses_of()
        assert graph_nodes(loss_of(microbatch_of(num_samples, mode), losses, metrics)) <= 6


# --- nothing is read back from a device


@each_kind
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_nothing_is_read_back_from_a_device(mode: str, per_token_loss: bool) -> None:
    """Reducer, terms, metrics of every kind, carriers with their token count, gradient, another pass's gap."""
    microbatch, (losses, metrics) = microbatch_of(64, mode, per_token_loss=per_token_loss), losses_of("meta")
    terms: Any = {"pg": losses, "kl": Term(losses * 2, "token_mean", coef=0.1), "nll": Term(losses * 3, mask="own")}
    kinds: Any = {kind: Metric(metrics["metric0"], kind=kind) for kind in ("mean", "min", "max", "variance", "ess")}
    loss, num_tokens, report = microbatch.loss(terms, {**metrics, **kinds}, form="3-tuple")
    loss.backward()
    tensors = [loss, num_tokens, *report.values(), losses.grad]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert num_tokens.dtype == torch.int32
    microbatch.log_probs["then"] = losses.detach()
    assert pass_gap(microbatch, "then", losses).device.type == "meta"
    for form in (form for form in FORMS.values() if per_token_loss in form.carriers):
        microbatch._record.reset()
        microbatch.loss(losses, form=form.name)
    for read in (lambda: float(loss.detach()), lambda: loss.detach().cpu(), lambda: bool(loss.detach() > 0)):
        with pytest.raises((RuntimeError, NotImplementedError)):  # negative control
            read()


#: The file that copies from the host to a device.
HELPER = "core/transfers.py"


def copies_in(root: Path) -> list[str]:
    """Calls that copy to a device elsewhere than in the helper: ``x.to(device)``, ``torch.tensor(..., device=...)``.

    Tensors that lie on one device may be cast alike, by ``x.to(like)``.
    """
    copies = []
    for path in sorted(root.rglob("*.py")):
        if path == root / HELPER:
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            given = [*map(ast.unparse, call.args), *(ast.unparse(keyword.value) for keyword in call.keywords)]
            by_name = {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}
            is_to = name == "to" and any("device" in text and "dtype" not in text for text in given)
            is_made = name in ("tensor", "as_tensor") and by_name.get("device", "'cpu'") != "'cpu'"
            if is_to or is_made or name in ("cuda", "pin_memory") or "non_blocking" in by_name:
                copies.append(f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)}")
    return copies


def test_one_file_copies_from_the_host_to_a_device(tmp_path: Path) -> None:
    """From page-locked memory: other copies wait on the host, and `set_sync_debug_mode` does not see it."""
    assert copies_in(ROOT / "megatron_rl_loss") == []
    (tmp_path / "core").mkdir()
    planted = ["x.to(values.device)", "x.cuda()", "torch.tensor([1.0], device=device)", "x.copy_(y, non_blocking=True)"]
    (tmp_path / "core" / "planted.py").write_text("\n".join([*planted, "x.to(torch.float32)", "torch.tensor([1])"]))
    assert copies_in(tmp_path) == [f"core/planted.py:{n}: {line}" for n, line in enumerate(planted, 1)]


class Copies(TorchDispatchMode):
    """Copies from the host to a device, by where they come from; on the meta device for a GPU."""

    def __init__(self, staged: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.staged, self.kinds = staged, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[1] if func.__name__.startswith("copy_") else args[0] if args else None
        if isinstance(result, Tensor) and isinstance(source, Tensor) and result.is_meta and source.is_cpu:
            waits = not (kwargs or {}).get("non_blocking")
            is_staged = source.untyped_storage().data_ptr() in self.staged
            self.kinds["waits" if waits else "staged" if is_staged else "pageable"] += 1
        return result


def test_copies_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each weight vector for a micro-batch, whatever it has of samples, metrics and terms; all are staged."""
    made, real = list[Tensor](), transfers.pinned

    def pinned(*args: Any) -> Tensor:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(transfers, "pinned", pinned)

    def copies(function: Callable[[], Any]) -> Counter[str]:
        staged = list[int]()
        monkeypatch.setattr(
            transfers, "pinned", lambda *args: (staged.append((t := pinned(*args)).untyped_storage().data_ptr()), t)[1]
        )
        with Copies(staged) as seen:
            function()
        return seen.kinds

    losses, metrics = losses_of("meta")
    for num_samples, mode, number in ((2, "sample_mean", 1), (1024, "sample_mean", 1), (64, "constant", 2)):
        microbatch = microbatch_of(num_samples, mode)
        # A constant's metrics are means over rollouts, whose weights are others.
        assert copies(partial(loss_of, microbatch, losses, metrics)) == {"staged": number}
        assert copies(partial(loss_of, microbatch, losses, metrics)) == {}
    microbatch = microbatch_of(64, "sample_mean")
    terms: Any = {"pg": losses, "kl": Term(losses * 2, "token_mean"), "nll": Term(losses * 3, mask="own")}
    assert copies(lambda: loss_of(microbatch, terms, {})) == {"staged": 3}
    logits, labels = torch.randn(64, 8, device="meta", requires_grad=True), torch.zeros(64, device="meta").long()
    mask = [int(t % 3 > 0) for t in range(64)]
    assert copies(lambda: log_probs_from_logits(logits, labels, token_mask=mask).log_probs.sum().backward()) == {
        "staged": 1
    }
    assert copies(lambda: losses_of()[0].to("meta")) == {"waits": 1}  # negative control


# --- a whole step on two ranks


class Launches(Copies):
    """Of work on the meta device, for a GPU: the operations that launch a kernel, copies to it, and reads back."""

    def __init__(self, staged: list[int]) -> None:
        super().__init__(staged)
        self.names, self.reads = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.kinds.total()
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError):
            self.reads += 1
            raise
        on_device = any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tree_leaves(result))
        if on_device and self.kinds.total() == before and func.name().split(".")[0] not in WRAPPERS:
            self.names.append(func.name())
        return result


def count_step(num_samples: int, num_microbatches: int) -> dict[str, Any]:
    """On a rank: what a step of so many samples in each of its micro-batches costs, all it does counted once."""
    start_process_group()
    group, calls = torch.distributed.group.WORLD, Counter[str]()

    def counted(name: str, collective: Any, *args: Any, **more: Any) -> Any:
        calls["all_gather_single" if name == "all_gather_into_tensor" else name] += 1
        return collective(*args, **more)

    for name in [name for name in COLLECTIVES if hasattr(torch.distributed, name)]:
        setattr(torch.distributed, name, partial(counted, name, getattr(torch.distributed, name)))
    real, staged = transfers.pinned, list[int]()

    def pinned(*args: Any) -> Tensor:
        made.append(real(*args))
        staged.append(made[-1].untyped_storage().data_ptr())
        return made[-1]

    made: list[Tensor] = []
    vars(transfers)["pinned"] = pinned

    def step(device: str) -> Plan:
        samples = [Samples([[1, 1, 0, 1]] * num_samples) for _ in range(num_microbatches)]
        plan = plan_step(samples, "sample_mean", dp_group=group, gradients="averaged over ranks")
        for microbatch in plan:
            losses = torch.ones(4 * num_samples, device=device, requires_grad=True)
            with seen:
                microbatch.loss(losses, {"entropy": losses.detach()}).backward()
        return plan

    seen = Launches(staged)
    step("meta")
    pass_counts = {"plan": dict(calls), "launches": len(seen.names), "copies": dict(seen.kinds), "reads": seen.reads}
    plan = step("cpu")
    calls.clear()
    plan.finish()
    return pass_counts | {"finish": dict(calls)}


COLLECTIVES = (
    *("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast", "all_gather_object"),
    *("reduce_scatter_tensor", "all_to_all_single", "barrier", "all_reduce_coalesced", "reduce"),
)


def test_what_a_small_step_costs_is_what_a_large_one_costs() -> None:
    """Launches, copies and their kind, collectives, reads back: by the number of micro-batches alone."""
    sizes = (1, 1), (48, 1), (1, 4)
    (small, other), (large, _), (several, _) = (run_ranks(2, count_step, *size) for size in sizes)
    assert small == other == large
    assert small["plan"] == {"all_gather_single": 1}
    assert small["finish"] == {"all_reduce": 2}  # what ranks noted, and the sums of the report
    assert small["copies"] == {"staged": 1}
    assert small["reads"] == several["reads"] == 0
    assert small["launches"] <= 20
    assert several == small | {"launches": several["launches"], "copies": {"staged": 4}}
    assert several["launches"] <= 4 * small["launches"]  # some constants of a step are made once


# --- where tensors are made


def small_step(values: Callable[[], Tensor]) -> list[float]:
    """A step with all that a plan makes: weights, terms, metrics, measurements, kept tokens, values of the step."""
    masks = {"own": [[1, 1], [0, 1]]}
    options: Any = {"layout": ZigzagTHD([0, 2, 4]), "prompt_ids": ["a", "b"], "term_masks": masks}
    samples = [Samples([[1, 1], [1, 0]], **options) for _ in range(2)]
    plan = plan_step(samples, "sample_mean", terms={"kl": "token_mean"}, term_masks=["own"], dp_group=None)
    numbers = [measure_tokens(plan, lambda microbatch: values()).quantile(0.5)]
    keep_tokens(plan, "kept", lambda microbatch: values() > 0)
    for microbatch in plan:
        losses = values().requires_grad_()
        kinds: Any = {kind: Metric(values(), kind=kind) for kind in ("mean", "max", "variance")}
        microbatch.loss(
            {"pg": losses, "kl": Term(losses * 2), "x": Term(losses, mask="own"), "y": Term(losses, mask="kept")}, kinds
        ).backward()
        numbers += losses.grad.tolist()
    return numbers + [float(value) for _, value in sorted(plan.finish().items())]


def test_under_a_default_device_that_is_not_the_host() -> None:
    expected = small_step(lambda: torch.tensor([1.0, -2, 3, 4]))
    with torch.device("meta"):
        assert small_step(lambda: torch.tensor([1.0, -2, 3, 4], device="cpu")) == expected


def test_weights_and_reports_of_inference_mode_serve_in_training() -> None:
    plan = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    values = torch.ones(2)
    with torch.inference_mode():
        for form in (form for form in FORMS.values() if False in form.carriers):
            plan[0].loss(values, {"m": values}, form=form.name)
        assert float(plan.finish()["pg_loss"]) == 1
    losses = torch.ones(2, requires_grad=True)
    plan[0].loss(losses, {"m": losses}).backward()
    assert losses.grad.tolist() == [0.5, 0.5]


@each_kind
@pytest.mark.usefixtures("way")
def test_what_is_kept_of_a_local_token(mode: str, request: pytest.FixtureRequest) -> None:
    """Its weight, which its metrics share where it is the same; on a device also a flag of what is left out."""
    microbatch, (losses, metrics) = microbatch_of(64, mode), losses_of()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss_of(microbatch, losses, metrics)
    flags = [torch.bool] * (request.node.callspec.params["way"] == "as on a device")
    assert [kept.dtype for kept in saved if kept.dim()] == [*flags, torch.float32]
    assert {tuple(kept.shape) for kept in saved if kept.dim()} == {(4096,)}
    assert len(microbatch._reducers) == (1 if mode == "sample_mean" else 2)


# ---- on a GPU (TEST_DEVICE=cuda)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    if DEVICE != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpus
@each_kind
def test_the_host_never_waits_for_the_gpu(mode: str, on_gpu: None) -> None:
    """The host does not wait even for the weights of a new micro-batch."""
    microbatch, (losses, metrics) = microbatch_of(64, mode), losses_of("cuda")
    torch.cuda.set_sync_debug_mode("error")
    loss_of(microbatch, losses, metrics).backward()


@pytest.mark.gpus
def test_a_step_on_a_gpu_is_that_on_the_host(on_gpu: None) -> None:
    on_host = small_step(lambda: torch.tensor([1.0, -2, 3, 4]))
    on_device = small_step(lambda: torch.tensor([1.0, -2, 3, 4], device="cuda"))
    assert on_device == pytest.approx(on_host, rel=1e-6)


@pytest.mark.gpus
@each_kind
def test_it_can_be_captured_in_a_cuda_graph(mode: str, on_gpu: None) -> None:
    microbatch, (losses, metrics) = microbatch_of(64, mode), losses_of("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up, off the default stream
        loss_of(microbatch, losses, metrics).backward()
    torch.cuda.synchronize()
    losses.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, _, report = loss_of(microbatch, losses, metrics)
        total.backward()
    with torch.no_grad():
        losses.copy_(torch.randn_like(losses))
    graph.replay()
    assert torch.allclose(total, loss_of(microbatch, losses, metrics))
    assert len(report) == 1 + len(metrics)

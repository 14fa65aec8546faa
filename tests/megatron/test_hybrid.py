"""HybridModel, Megatron's next model: whole steps beside the oracle of a GPT with the same weights, and their proof."""

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpt_oracle
import pytest
import torch
from missing import skip_without
from ranks import run_ranks
from tiny_gpt import HEADS, Case, Layout
from tiny_hybrid import MAMBA, name_in_gpt
from torch import Tensor
from world import World, beyond_bounds, errors_of, trained_in

pytestmark = pytest.mark.slow

#: All layouts of sizes 1 and 2 on up to 8 ranks, and some of size 4; stages are cut by "|", virtual ones too.
LAYOUTS = [
    Layout(tp, sp, pp, vp, cp, dp)
    for (tp, sp), (pp, vp), cp, dp in itertools.product(
        [(1, False), (2, False), (2, True)], [(1, 1), (2, 1), (2, 2)], [1, 2], [1, 2]
    )
    if tp * pp * cp * dp <= 8
]
LAYOUTS += [Layout(1, False, 4, 1, 1, 1), Layout(1, False, 1, 1, 4, 1), Layout(2, True, 4, 1, 1, 1)]

#: Every head with an optimizer, embeddings that are tied or not, a precision, and a loop.
WAYS: list[dict[str, Any]] = [
    {"head": "", "optimizer": "plain", "tied": False, "bf16": False, "loop": "adapter"},
    {"head": "two passes", "optimizer": "distributed+overlap", "tied": True, "bf16": False, "loop": "plan"},
    {"head": "one pass", "optimizer": "plain", "tied": True, "bf16": False, "loop": "adapter"},
    {"head": "one pass, main grad", "optimizer": "distributed+overlap", "tied": False, "bf16": False, "loop": "plan"},
    {"head": "two passes", "optimizer": "plain", "tied": False, "bf16": True, "loop": "adapter"},
]


def ways_in(layout: Layout) -> list[dict[str, Any]]:
    """All of them on one rank and two; elsewhere two in turn, on 8 ranks one, so that each meets every setting."""
    first = LAYOUTS.index(layout)
    in_turn = [WAYS[first % 5], WAYS[(first + 2) % 5]]
    return WAYS if layout.world_size <= 2 else in_turn[: 1 if layout.world_size == 8 else 2]


def test_every_way_meets_every_setting() -> None:
    for field in Layout._fields:
        for value in {getattr(layout, field) for layout in LAYOUTS} - {4}:
            alike_layouts = [layout for layout in LAYOUTS if getattr(layout, field) == value]
            assert all(any(way in ways_in(layout) for layout in alike_layouts) for way in WAYS), (field, value)
    assert {way["head"] for way in WAYS} == {"", *HEADS}
    assert len(LAYOUTS) >= 30


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_of_a_hybrid_equals_the_oracle_of_a_gpt(
    layout: Layout, record_property: Callable[[str, Any], None]
) -> None:
    skip_without("HybridModel")
    cases = [Case(4, "sample_mean", "all", "mean", lopsided=False, **way) for way in ways_in(layout)]
    worst = 0.0
    for world, outcomes, printed in trained_in(layout, [World.of(layout, case) for case in cases], "hybrid"):
        errors = errors_of(outcomes, gpt_oracle.step_of(world.case.shape(layout), "sample_mean", "all"))
        assert not beyond_bounds(world.case, errors), (world.case, errors)
        assert "proved on" in printed, (world.case, printed)
        worst = max(worst, 0.0 if world.case.bf16 else errors["gradients"])
    record_property("hybrid_fp32_gradients_error", worst)


@contextlib.contextmanager
def decided() -> Iterator[set[str]]:
    """A set that gets the names of this rank's parameters whose factor the proof decides inside."""
    from megatron_rl_loss.proof.megatron_step import MegatronStep

    names = set[str]()

    def noted(self: Any) -> None:
        known = {row.name for row in self._source.parameters}
        measure(self)
        alike = self.alike
        names.update(known - {*alike.uncovered, *alike.zero, *alike.unlike})

    measure = MegatronStep.measure
    with patch.object(MegatronStep, "measure", noted):
        yield names


def step_of_experts(model: str, ep: int, tp: int) -> tuple[float, str, set[str], set[str]]:
    """On a rank: how far a step of experts or MTP is from the GPT's with the same weights, and what its proof printed.

    Then the names of the hybrid's parameters, and of those that its proof decides.
    """
    import moe_gpt

    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.megatron.flags import AggregationSettings

    # The hybrid first: it has more layers, and Megatron's log of auxiliary losses keeps the number of the first model.
    models = [moe_gpt.build(model, False, tp=tp, ep=ep, is_hybrid=is_hybrid) for is_hybrid in (True, False)]
    hybrid, gpt = (dict(model.module.named_parameters()) for model in models)
    assert {name_in_gpt(name) for name in hybrid} == set(gpt)
    with torch.no_grad():
        for name, parameter in hybrid.items():
            parameter.copy_(gpt[name_in_gpt(name)])

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        return microbatch.loss(losses * (1.5 + microbatch.data.advantages))

    batches, settings = moe_gpt.step_data(3, with_policy=True), AggregationSettings.resolve("sample_mean")
    gradients, by_model = [], list[set[str]]()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for chunk in models:
            chunk.zero_grad_buffer()
            wrap = LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
            with decided() as names:
                gradients.append(moe_gpt.run_step(chunk, batches, loss_of, wrap))
            by_model.append(names)
    ours, expected = gradients
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    error = max(float((gradient - expected[name_in_gpt(name)]).abs().max()) for name, gradient in ours.items())
    return error / largest, out.getvalue(), set(hybrid), by_model[0]


OF_EXPERTS = [("moe", 1, 1, 1), ("moe", 1, 1, 2), ("moe", 2, 1, 2), ("moe", 2, 1, 4), ("shared", 1, 2, 2)]
#: With the losses of multi-token prediction, whole steps.
OF_EXPERTS += [("moe and mtp", 1, 1, 2), ("mtp", 1, 2, 2), ("mtp", 1, 1, 1)]


@pytest.mark.parametrize(("model", "ep", "tp", "ranks"), OF_EXPERTS)
def test_experts_and_depths_of_a_hybrid_are_those_of_a_gpt(model: str, ep: int, tp: int, ranks: int) -> None:
    skip_without("HybridModel")
    if "mtp" in model:
        skip_without("MTP")
    if model == "moe and mtp":
        skip_without("experts in a hybrid's MTP")
    outcomes = run_ranks(ranks, step_of_experts, model, ep, tp)
    assert max(error for error, *_ in outcomes) < 2e-6
    assert outcomes[0][1].count("proved on") == 2
    for _, _, names, proved_names in outcomes:
        assert any("shared_experts" in name for name in names) == (model == "shared")
        assert any(name.startswith("mtp.") for name in names) == ("mtp" in model)
        assert {name.removeprefix("module.") for name in proved_names} == names


def blocks_of(model: Any) -> dict[str, list[int]]:
    """Of parameters that hold several cut matrices, one below the other: this rank's rows of each."""
    blocks = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "GatedDeltaNet":  # which leaves no mark
            query, value, heads = (
                module.qk_dim_local_tp,
                module.v_dim_local_tp,
                module.num_value_heads // module.tp_size,
            )
            blocks[f"{name}.in_proj.weight"] = [query, query, value, value, heads, heads]
            blocks[f"{name}.conv1d.weight"] = [query, query, value]
    marked = {name: getattr(parameter, "partition_sizes", None) for name, parameter in model.named_parameters()}
    return {name: sizes for name, sizes in marked.items() if sizes} | blocks


def step_of_mixers(pattern: str, tp: int, cp: int) -> tuple[dict[str, Any], list[Any], str, set[str]]:
    """On a rank: its part of a pattern's gradients with their marks, what the proof printed, and what it decided."""
    import moe_gpt
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from table_step import start
    from tiny_gpt import cut_dim, tiny_config
    from tiny_hybrid import sizes_of, tiny_hybrid

    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.megatron.flags import AggregationSettings

    mpu = start(tp, 1, cp)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = tiny_config(Layout(tp, tp > 1, 1, 1, cp, 1), per_token=False, num_layers=4, **sizes_of(pattern))
    model = tiny_hybrid(config, pattern)
    rank, blocks_by_name = mpu.get_tensor_model_parallel_rank(), blocks_of(model)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            dim, size = cut_dim(parameter), list(parameter.shape)
            blocks = blocks_by_name.get(name, [size[dim or 0]])
            whole = [size if dim is None else [*size[:dim], block * tp, *size[dim + 1 :]] for block in blocks]
            generator = torch.Generator().manual_seed(number)
            parts = [torch.randn(shape, generator=generator) * 0.3 for shape in whole]
            mine = parts if dim is None else [part.chunk(tp, dim)[rank] for part in parts]
            parameter.copy_(torch.cat(mine, dim or 0))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)

    def loss_of(microbatch: Any, losses: Tensor) -> Any:
        return microbatch.loss(losses * (1.5 + microbatch.data.advantages))

    wrap = LossAggregation(AggregationSettings.resolve("sample_mean"), lambda batch: batch.samples).wrap_schedule
    with contextlib.redirect_stdout(io.StringIO()) as out, decided() as names:
        gradients = moe_gpt.run_step(model, moe_gpt.step_data(3, with_policy=True), loss_of, wrap)
    marks = [
        (
            name,
            cut_dim(parameter),
            blocks_by_name.get(name),
            getattr(parameter, "sequence_parallel", None),
        )
        for name, parameter in model.module.named_parameters()
    ]
    return {name: gradient.numpy() for name, gradient in gradients.items()}, marks, out.getvalue(), names


def whole_gradients(by_rank: list[Any], tp: int) -> dict[str, Tensor]:
    """Of the first ranks, which are one tensor-parallel group, the gradients put together."""
    whole = {}
    for name, dim, blocks, _ in by_rank[0][1]:
        parts = [torch.from_numpy(gradients[name]) for gradients, *_ in by_rank[:tp]]
        if dim is not None:
            pieces = [part.split(blocks or [part.shape[dim]], dim) for part in parts]
            parts = [torch.cat([torch.cat(block_parts, dim) for block_parts in zip(*pieces, strict=True)], dim)]
        whole[name] = parts[0]
    return whole


OF_MIXERS = [
    (pattern, *layout)
    for pattern in ("M*M-", "G*G-")
    for layout in [(1, 1, 2), (2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 4)]
]


@pytest.mark.parametrize(("pattern", "tp", "cp", "ranks"), OF_MIXERS)
def test_a_step_of_layers_with_a_state_is_the_same_in_every_layout(pattern: str, tp: int, cp: int, ranks: int) -> None:
    skip_without("HybridModel")
    expected = whole_gradients(run_ranks(1, step_of_mixers, pattern, 1, 1), 1)
    by_rank = run_ranks(ranks, step_of_mixers, pattern, tp, cp)
    ours = whole_gradients(by_rank, tp)
    errors = {name: float((ours[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected}
    assert max(errors.values()) < 1e-5, errors
    assert "proved on" in by_rank[0][2]
    for (
        *_,
        proved_names,
    ) in by_rank:  # also those that Megatron marks as cut by TP, and those of which each rank has a copy
        assert {name.removeprefix("module.") for name in proved_names} == set(expected)
    mixer = "mixer." if pattern[0] == "M" else "layers.0.self_attention."
    mixer_parameters = {
        re.split("[._]", name.rpartition(mixer)[2], maxsplit=1)[0] for name in expected if mixer in name
    }
    assert {"A", "dt", "conv1d"} <= mixer_parameters


# ---- Megatron's own builder


#: Sizes of the Mamba layers, as flags.
OF_MAMBA = [flag for name, size in MAMBA.items() for flag in (f"--{name.replace('_', '-')}", str(size))]


def launched(flags: list[str]) -> Any:
    """On a rank: the numbers that the example's launch logged, what it printed, and the classes of model it trained."""
    import packed_attention
    from example_run import train
    from megatron.training.models import hybrid
    from tiny_hybrid import hybrid_spec

    seen, original_build, stack = set[str](), hybrid.HybridModelBuilder.build_model, packed_attention.hybrid_stack_spec

    def build_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original_build(self, *args, **kwargs)
        seen.update({type(model).__name__, *(type(layer).__name__ for layer in model.decoder.layers)})
        return model

    def with_mamba(num_experts: int | None = None) -> Any:
        packed_attention.hybrid_stack_spec = stack
        return hybrid_spec(SimpleNamespace(num_moe_experts=num_experts, mamba_state_dim=1))

    hybrid.HybridModelBuilder.build_model = build_model
    packed_attention.hybrid_stack_spec = with_mamba
    with contextlib.redirect_stdout(io.StringIO()) as out:
        logged = train(flags)
    return logged, out.getvalue(), seen


def test_pretrain_trains_a_hybrid_of_megatrons_own_builder() -> None:
    """By its flag; initial weights are drawn as a GPT's of two blocks, so that all that is logged is the same."""
    skip_without("hybrid pretrain")
    pp = ["--pipeline-model-parallel-size", "2"]
    first, last = run_ranks(2, launched, ["--hybrid-layer-pattern", "*-|*-", *pp])
    assert first[2] == last[2] == {"HybridModel", "TransformerLayer", "MLPLayer"}
    assert "proved on" in first[1]
    expected, _, original_build = run_ranks(2, launched, pp)[-1]
    assert not original_build  # a GPTModel, of another builder
    assert [step["iteration"] for step in last[0]] == [1, 2]
    for step, gpt_step in zip(last[0], expected, strict=True):
        assert step == pytest.approx(gpt_step, rel=1e-4, abs=1e-7)


def test_pretrain_trains_mamba_layers_of_megatrons_own_builder() -> None:
    skip_without("hybrid pretrain")
    pattern = ["--hybrid-layer-pattern", "M-*-", *OF_MAMBA]
    tp = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    for logged, printed, classes in (run_ranks(1, launched, pattern)[0], run_ranks(2, launched, [*pattern, *tp])[0]):
        assert classes == {"HybridModel", "TransformerLayer", "MLPLayer", "MambaLayer"}
        assert "proved on" in printed
        assert len(logged) == 2
        assert all(step["grad_norm"] > 0 for step in logged)

"""`check_packing` finds what a sample sees of its pack, in planted cases of each sort, and nothing where nothing is."""

import re
from dataclasses import replace
from typing import Any

import gpt_oracle
import pytest
import torch
from missing import skip_without
from ranks import run_ranks
from table_step import start
from tiny_gpt import Batch, Layout, tiny_config
from torch import Tensor

from megatron_rl_loss import Samples, check_packing, packed_seq_params


def batch_of(cp_rank: int, cp_size: int) -> Batch:
    """Three samples, each with padding in its slot, and a slot of padding behind them."""
    ragged = [rollout for rollout in gpt_oracle.rollouts_without_old_policy() if len(rollout.tokens) % 2][:3]
    rollouts = []
    for rollout in ragged:
        zeros = [0.0] * len(rollout.tokens)
        rollouts.append(replace(rollout, mask=zeros, advantages=zeros, old_log_probs=zeros))
    return Batch(rollouts, cp_rank, cp_size, filler=True)


def built(pattern: str, layout: Layout, *, is_half: bool = False, **options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from tiny_hybrid import sizes_of, tiny_hybrid

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    layers = sum(symbol not in "|/" for symbol in pattern)
    half: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16} if is_half else {}
    config = tiny_config(layout, per_token=False, num_layers=layers, init_method_std=0.3, **half, **sizes_of(pattern))
    model = tiny_hybrid(config, pattern, **options)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.bfloat16() if is_half else model)


def reported(
    plant: str, pattern: str, layout: Layout, is_half: bool = False
) -> tuple[list[tuple[int, str, int]], str, float]:
    """On a rank: (sample, kind, first token) of each finding, the text, and the largest rounding."""
    mpu = start(layout.tp, layout.pp, layout.cp)
    learned = {"position_embedding_type": "learned_absolute"} if plant == "positions" else {}
    model = built(pattern, layout, is_half=is_half, **learned)
    batch = batch_of(mpu.get_context_parallel_rank(), layout.cp)
    bounds = batch.bounds
    if plant == "attention":
        bounds = torch.tensor([0, int(bounds[-1])], dtype=torch.int32)
    if plant == "padding":  # each token sees the last one, of the slot that holds padding alone
        model.module.decoder.layers[0].register_forward_hook(lambda _, __, out: seen_last(out))
    if plant == "bounds of a mixer":  # which this layer reads, and no total_tokens
        whole = packed_seq_params(torch.tensor([0, int(bounds[-1])], dtype=torch.int32))
        model.module.decoder.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"packed_seq_params": whole}), with_kwargs=True
        )
    positions = batch.positions
    if plant == "positions":
        positions = torch.arange(positions.shape[1])[None]
    packed = packed_seq_params(bounds, None if plant == "state" else model)

    def forward_step(iterator: Any, model: Any) -> Any:
        drawn = next(iterator)
        output = model(drawn.tokens, positions, None, labels=drawn.labels, packed_seq_params=packed)
        return output, lambda output: pytest.fail("the loss function is called")

    tokens = batch.tokens.shape[1] * layout.cp
    report = check_packing(forward_step, batch, model, batch.samples, seq_length=tokens, micro_batch_size=1)
    assert model.training
    return [(found.sample, found.kind, found.position) for found in report.findings], str(report), report.rounding


def seen_last(output: Any) -> Any:
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    seen: Tensor = hidden + hidden[-1:]
    return (seen, *rest) if rest else seen


CLEAN = [
    ("*-*-", Layout(1, False, 1, 1, 1, 1)),
    ("M-*-", Layout(1, False, 1, 1, 1, 1)),
    ("M-*-", Layout(2, True, 1, 1, 1, 1)),
    ("M-|*-", Layout(1, False, 2, 1, 1, 1)),
    ("*-*-", Layout(2, True, 1, 1, 2, 1)),
    ("*-*-", Layout(1, False, 1, 1, 1, 2)),
    ("M-*-", Layout(1, False, 1, 1, 2, 1)),
    ("G-*-", Layout(1, False, 1, 1, 1, 1)),
    ("G-*-", Layout(1, False, 1, 1, 2, 1)),
]


@pytest.mark.parametrize(("pattern", "layout"), CLEAN, ids=str)
def test_nothing_is_found_where_no_sample_sees_another(pattern: str, layout: Layout) -> None:
    skip_without("HybridModel")
    for findings, text, rounding in run_ranks(layout.world_size, reported, "", pattern, layout):
        assert findings == [], text
        assert rounding < 1e-5
        assert text.startswith("No sample depends on its pack")


PLANTED = [
    ("state", "M-*-", Layout(1, False, 1, 1, 1, 1), "a state that runs on", r"layer 1 (MambaLayer)"),
    ("state", "*-M-", Layout(2, True, 1, 1, 1, 1), "a state that runs on", r"layer 3 (MambaLayer)"),
    ("state", "M-|*-", Layout(1, False, 2, 1, 1, 1), "a state that runs on", r"layer 1 (MambaLayer)"),
    ("state", "M-*-", Layout(1, False, 1, 1, 2, 1), "a state that runs on", r"layer 1 (MambaLayer)"),
    ("bounds of a mixer", "G-*-", Layout(1, False, 1, 1, 1, 1), "a state that runs on", r"layer 1 (TransformerLayer)"),
    ("attention", "-*-", Layout(1, False, 1, 1, 1, 1), "attention over bounds", r"layer 2 (TransformerLayer)"),
    ("attention", "*-*-", Layout(2, True, 1, 1, 1, 1), "attention over bounds", r"layer 1 (TransformerLayer)"),
    ("attention", "-|*", Layout(1, False, 2, 1, 1, 1), "attention over bounds", r"layer 2 (TransformerLayer)"),
    ("attention", "*-", Layout(1, False, 1, 1, 2, 1), "attention over bounds", r"layer 1 (TransformerLayer)"),
]


@pytest.mark.parametrize(("plant", "pattern", "layout", "kind", "layer"), PLANTED, ids=str)
def test_what_a_sample_sees_of_others_is_named(plant: str, pattern: str, layout: Layout, kind: str, layer: str) -> None:
    skip_without("HybridModel")
    for findings, text, _ in run_ranks(layout.world_size, reported, plant, pattern, layout):
        assert {found for _, found, _ in findings} == {kind}, text
        assert {1, 2} <= {sample for sample, _, _ in findings}  # behind another one
        if layout.cp == 1:  # causal: the first sample sees none
            assert {sample for sample, _, _ in findings} == {1, 2}
            assert {position for _, _, position in findings} == {0}
        assert layer in text


@pytest.mark.parametrize("plant", ["", "attention"])
def test_what_may_be_rounding_of_bfloat16_is_not_decided(plant: str) -> None:
    """Unless values do not change at all."""
    skip_without("HybridModel")
    ((findings, text, rounding),) = run_ranks(1, reported, plant, "*-", Layout(1, False, 1, 1, 1, 1), True)
    says = r"Not decided: values change by up to \S+, which may be rounding of bfloat16.*Run the check in float32"
    assert not findings
    assert re.match(says if plant else "No sample depends on its pack", text), text
    assert (rounding > 1e-3) == bool(plant)


def test_positions_and_padding_are_named() -> None:
    skip_without("HybridModel")
    one = Layout(1, False, 1, 1, 1, 1)
    ((findings, text, _),) = run_ranks(1, reported, "positions", "*-", one)
    assert findings == [(1, "positions that do not start anew", 0), (2, "positions that do not start anew", 0)], text
    ((findings, text, _),) = run_ranks(1, reported, "padding", "*-", one)
    assert [(sample, kind) for sample, kind, _ in findings] == [(k, "padding that is seen") for k in range(3)], text


def refused(plant: str, layout: Layout) -> str:
    """On a rank: the error for samples of another batch, or for an output without a value per token."""
    mpu = start(layout.tp, layout.pp, layout.cp)
    model, batch = built("*-|*-", layout), batch_of(mpu.get_context_parallel_rank(), layout.cp)
    packed = packed_seq_params(batch.bounds, model)

    def forward_step(iterator: Any, model: Any) -> Any:
        drawn = next(iterator)
        output = model(drawn.tokens, drawn.positions, None, labels=drawn.labels, packed_seq_params=packed)
        return output.sum() if plant == "output" and mpu.is_pipeline_last_stage() else output, None

    samples = Samples([[1.0] * 8]) if plant == "samples" else batch.samples
    with pytest.raises(ValueError, match="Step aborted on all ranks") as error:
        check_packing(forward_step, batch, model, samples, seq_length=batch.tokens.shape[1], micro_batch_size=1)
    return str(error.value)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("samples", "ranks 0, 1: ValueError: input_ids of 16 tokens"),
        ("output", r"\. rank 1: ValueError: a forward step whose output is \(\)"),
    ],
)
def test_what_cannot_be_compared_is_refused_on_all_ranks(plant: str, says: str) -> None:
    """One stage reads the tokens, another one returns the values: neither raises while the other waits."""
    skip_without("HybridModel")
    first, last = run_ranks(2, refused, plant, Layout(1, False, 2, 1, 1, 1))
    assert first == last
    assert re.search(says, first), first

"""What the proof says of single parameters of a real GPT: each is measured, and one that is trained otherwise is named.

All rows of a layout run one after the other on the same ranks. Two parameters that stood for all would prove each of
the wrong ones.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import gpt_oracle
import moe_gpt
import pytest
import torch
from proved_steps import ELSEWHERE, LIMITS, PROVED, Step, attempted
from ranks import run_ranks
from tiny_gpt import Batch, Case, Layout, Ready, output_of, prepared, run_batches, settings_of, start_layout
from torch import Tensor

pytestmark = pytest.mark.slow

RIGHT = Case(4, "token_mean", "all", "mean", bf16=False, optimizer="plain", tied=False, lopsided=False)
TIED = RIGHT._replace(tied=True)
OVERLAPPED = TIED._replace(optimizer="distributed+overlap", lopsided=True)
DP, TP, PP = Layout(1, False, 1, 1, 1, 2), Layout(2, False, 1, 1, 1, 1), Layout(1, False, 2, 1, 1, 1)
SP, CP, VPP = Layout(2, True, 1, 1, 1, 1), Layout(1, False, 1, 1, 2, 1), Layout(1, False, 2, 2, 1, 2)
PP_DP, SP_DP = Layout(1, False, 2, 1, 1, 2), Layout(2, True, 1, 1, 1, 2)


def place() -> dict[str, int]:
    from megatron.core import parallel_state as mpu

    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
    }


def named(ready: Ready) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for chunk in ready.chunks for name, parameter in chunk.module.named_parameters())


# ---- what is planted


def finalised_by(finish: Callable[[list[Any]], object], ready: Ready) -> None:
    """Replace the finalisation; gets the model chunks."""
    ready.config.finalize_model_grads_func = lambda model, *args, **options: finish(model)


def finish_all(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.finish_grad_sync()


def finish_all_but_stage_0(chunks: list[Any]) -> None:
    finish_all(chunks if place()["pp"] else [])


def finish_the_first(chunks: list[Any]) -> None:
    finish_all(chunks[:1])


def after_finalising(change: Callable[[str, Tensor], object], ready: Ready) -> None:
    """Change final gradients, by the names of their parameters."""
    finalize = ready.config.finalize_model_grads_func

    def finalised(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        for name, parameter in named(ready):
            change(name, parameter.main_grad)

    ready.config.finalize_model_grads_func = finalised


def zero_stage_0(name: str, gradient: Tensor) -> None:
    gradient.mul_(float(place()["pp"]))


def scale_norms_of_a_rank(name: str, gradient: Tensor) -> None:
    if "norm" in name and place()["tp"]:
        gradient.mul_(1.5)


def scale_a_rank(name: str, gradient: Tensor) -> None:
    gradient.mul_(1 + 0.01 * place()["dp"])


def scale_a_rank_much(name: str, gradient: Tensor) -> None:
    gradient.mul_(1 + 0.5 * place()["dp"])


def double_norms(name: str, gradient: Tensor) -> None:
    if "norm" in name:
        gradient.mul_(2)


def scale_all_but_two(name: str, gradient: Tensor) -> None:
    if "final_layernorm" not in name and "layers.0.self_attention.linear_proj" not in name:
        gradient.mul_(0.25)


def scale_one(name: str, gradient: Tensor, factor: float = 0.5) -> None:
    if "layers.1.mlp.linear_fc1" in name:
        gradient.mul_(factor)


def change_an_entry(name: str, gradient: Tensor) -> None:
    if "layers.1.mlp.linear_fc1" in name:
        gradient.view(-1)[5] *= 3


def clip(ready: Ready) -> None:
    """Clip gradients inside the finalisation."""
    after_finalising(lambda name, gradient: gradient.mul_(0.0599), ready)


def hook(ready: Ready, factor: float, only: str) -> None:
    for name, parameter in named(ready):
        if only in name:
            parameter.register_hook(lambda gradient: gradient * factor)


def zero_a_ranks_gradients(ready: Ready) -> None:
    if place()["dp"]:
        for name, parameter in named(ready):
            if "mlp" in name:
                parameter.register_hook(lambda gradient: gradient * 0)


def freeze(ready: Ready) -> None:
    """Freeze parameters after they were given to DDP, which has buckets for them."""
    for name, parameter in named(ready):
        parameter.requires_grad_("embedding" not in name and "norm" not in name)


def freeze_stage_0(ready: Ready) -> None:
    for _, parameter in named(ready):
        parameter.requires_grad_(bool(place()["pp"]))


def lose_a_mark(ready: Ready) -> None:
    """A factor of LoRA that all tensor-parallel ranks hold, without the mark by which Megatron sums its gradient."""
    for name, parameter in named(ready):
        if "layers.0.input_layernorm" in name:
            parameter.sequence_parallel = False


def lose_the_mark_of_a_cut(ready: Ready, is_zero: bool = False) -> None:
    """A matrix of which each tensor-parallel rank has a part, as its values show, or as zeros do not."""
    for name, parameter in named(ready):
        if "layers.0.self_attention.linear_proj" in name:
            parameter.tensor_model_parallel = False
            if is_zero:
                parameter.data.zero_()


def add_a_head(ready: Ready) -> None:
    """A value head that is added once DDP is built."""
    ready.chunks[0].module.value_head = torch.nn.Linear(3, 1, bias=False)


def train_conditionally(ready: Ready) -> None:
    """The last stage trains one parameter, in its first micro-batch alone."""
    for name, parameter in named(ready):
        parameter.requires_grad_(not place()["pp"] or "output_layer" in name)
    layer = getattr(ready.chunks[0].module, "output_layer", None)
    if place()["pp"] and layer is not None:
        forward, calls = layer.forward, iter(range(100))

        def conditional(hidden: Tensor, weight: Any = None, **options: Any) -> Any:
            own = layer.weight if weight is None else weight
            return forward(hidden, weight=own if next(calls) == 0 else own.detach(), **options)

        layer.forward = conditional


def drop_a_microbatch(ready: Ready) -> None:
    """The last gradient of a matrix, on one rank."""
    for name, parameter in named(ready):
        if "layers.1.mlp.linear_fc1" in name and place()["dp"]:
            calls = iter(range(100))
            parameter.register_hook(lambda gradient, calls=calls: gradient * (next(calls) != 3))


def forget_padding(ready: Ready) -> None:
    """`param_to_index` as Megatron-Core 0.15 and 0.16 make it: without the padding between parameters."""
    for bucket in (bucket for chunk in ready.chunks for group in chunk.bucket_groups for bucket in group.buckets):
        before, offset = dict(bucket.param_to_index), 0
        for parameter in bucket.params_list:
            bucket.param_to_index[parameter] = (offset, offset + parameter.numel())
            offset += parameter.numel()
        assert bucket.param_to_index != before, "no padding"


class Row(NamedTuple):
    """A step: the case, what is planted, and what the first rank prints, or all ranks raise after ``raises``."""

    layout: Layout
    says: str
    case: Case = RIGHT
    plant: Callable[[Ready], object] | None = None
    reduces_bf16: bool = False


ALL = rf"{PROVED} \d+ tokens.*; by the gradients of all \d+ parameters; losses as given {LIMITS}$"
UNLIKE = r"(?s)PROVED IN PART on .*; {} of {} parameters are not trained by these weights.*{}.*Training goes on"
finalised, BF16 = functools.partial, RIGHT._replace(bf16=True)
#: Layouts and options in which every parameter is trained as it should be.
RIGHTS = {
    **{f"{layout}, tied": Row(layout, ALL, TIED) for layout in (DP, TP, SP, PP, CP)},
    **{f"{layout}, overlapped": Row(layout, ALL, OVERLAPPED) for layout in (DP, PP_DP, VPP, SP_DP)},
    "positions of older versions": Row(
        DP, ALL, OVERLAPPED._replace(scaling="averaged in collective"), plant=forget_padding
    ),
    **{f"{layout}, frozen later": Row(layout, ALL, TIED, plant=freeze) for layout in (DP, SP, PP)},
    "a frozen stage": Row(
        PP, rf"{PROVED}.*; by the gradients of all 8 parameters; losses as given", plant=freeze_stage_0
    ),
    "a parameter of one micro-batch on the last stage": Row(
        PP, rf"{PROVED} .*of all \d+ parameters", plant=train_conditionally
    ),
    "per token": Row(SP_DP, ALL, TIED._replace(scaling="per token")),
    "averaged in collective": Row(DP, ALL, OVERLAPPED._replace(scaling="averaged in collective")),
    "bf16": Row(SP_DP, ALL, OVERLAPPED._replace(bf16=True)),
    "bf16 reduction": Row(
        DP, rf"{PROVED}.*\(weights to within 1.6 %, gradients to [\d.]+ %\)", BF16, reduces_bf16=True
    ),
    "bf16 reduction, x 1.01": Row(
        DP,
        rf"{PROVED}.*\(weights to within 1.6 %, gradients to [\d.]+ %\)",
        BF16,
        reduces_bf16=True,
        plant=finalised(after_finalising, functools.partial(scale_one, factor=1.01)),
    ),
}
#: What trains some parameters otherwise. None may be proved.
WRONG = {
    "only the collective is finished": Row(
        SP, UNLIKE.format(5, 15, r"layernorm.weight \(\S*no multiple"), plant=finalised(finalised_by, finish_all)
    ),
    "stage 0 is never reduced": Row(
        PP_DP, UNLIKE.format(7, 15, "of pipeline stage 0 .no multiple"),
        plant=finalised(finalised_by, finish_all_but_stage_0),
    ),
    "only the first chunk is reduced": Row(
        VPP, r"PROVED IN PART on .*; \d+ of \d+ parameters", plant=finalised(finalised_by, finish_the_first)
    ),
    "stage 0 is zero": Row(
        PP, UNLIKE.format(7, 15, "its final gradient is 0"), plant=finalised(after_finalising, zero_stage_0)
    ),
    "a tensor-parallel rank's norms x 1.5": Row(
        SP, UNLIKE.format(5, 15, r"1.5 times the others|differs between"),
        plant=finalised(after_finalising, scale_norms_of_a_rank),
    ),
    "a mark is lost": Row(
        SP, UNLIKE.format(1, 15, "layers.0.input_layernorm.weight"), plant=lose_a_mark
    ),
    "a cut without a mark": Row(
        TP, r"IN PART .*14 of 15 parameters \(1 not covered, as .*linear_proj.weight: its values differ between tens",
        plant=lose_the_mark_of_a_cut,
    ),
    "a cut of zeros without a mark": Row(
        TP, r"IN PART .*not covered, as .*linear_proj.weight: its gradients differ between tensor-parallel ranks",
        plant=functools.partial(lose_the_mark_of_a_cut, is_zero=True),
    ),
    "a head that was added after DDP": Row(
        DP, r"IN PART .*15 of 16 parameters \(1 not covered, as value_head.weight: Megatron's DDP does not hold it",
        plant=add_a_head,
    ),
    "the embedding's hook x .1, PP 2": Row(
        PP, UNLIKE.format(1, 15, r"embedding.* of pipeline stage 0 \(0.1 times the others\)"),
        plant=functools.partial(hook, factor=0.1, only="embedding"),
    ),
    "all but two x .25": Row(
        DP, r"raises (?s)tokens weigh 0.25 times.*2 of 15 parameters.*\(4 times the others\)",
        plant=finalised(after_finalising, scale_all_but_two),
    ),
    "one x .5": Row(
        DP, UNLIKE.format(1, 15, r"layers.1.mlp.linear_fc1.weight \(0.5 times the others\)"),
        plant=finalised(after_finalising, scale_one),
    ),
    "one entry x 3": Row(
        DP, UNLIKE.format(1, 15, r"linear_fc1.weight \(no multiple"), plant=finalised(after_finalising, change_an_entry)
    ),
    "one x 1.01": Row(
        DP, UNLIKE.format(1, 15, r"linear_fc1.weight \(1.01 times the others\)"),
        plant=finalised(after_finalising, functools.partial(scale_one, factor=1.01)),
    ),
    "one's hook x .5": Row(
        DP, UNLIKE.format(1, 15, r"layers.0.mlp.linear_fc1.weight \(0.5 times the others\)"),
        plant=functools.partial(hook, factor=0.5, only="layers.0.mlp.linear_fc1"),
    ),
    "a rank's gradients zeroed by hooks": Row(
        DP, UNLIKE.format(6, 15, r"mlp.linear_fc1.weight \(no multiple"), plant=zero_a_ranks_gradients
    ),
    "a gradient of one micro-batch dropped": Row(
        DP, UNLIKE.format(1, 15, r"linear_fc1.weight \(no multiple"), plant=drop_a_microbatch
    ),
    "a data-parallel rank x 1.01": Row(
        DP, r"NOT PROVED: .*final gradients are 0.5 or 0.505 times the sum, on different ranks",
        plant=finalised(after_finalising, scale_a_rank),
    ),
    "a shard of the distributed optimizer x 1.5": Row(
        DP, r"IN PART on .*; \d+ of \d+ parameters", OVERLAPPED, plant=finalised(after_finalising, scale_a_rank_much)
    ),
    "a tied embedding is not reduced over stages": Row(
        PP, UNLIKE.format(2, 15, r"embedding.word_embeddings.weight of pipeline stage 0 \(no multiple"), TIED,
        plant=finalised(finalised_by, finish_all),
    ),
    "a sum too many over tensor-parallel ranks": Row(
        SP_DP, UNLIKE.format(5, 15, r"input_layernorm.weight \(2 times the others\)"),
        plant=finalised(after_finalising, double_norms),
    ),
    "clipped in the finalisation": Row(DP, r"NOT PROVED: .*Gradients may have been clipped", plant=clip),
}  # fmt: skip
ROWS = RIGHTS | WRONG


def step_of(row: Row) -> Step:
    """On a rank: the step's outcome; what the proof set is gone afterwards, and it sent few bytes."""
    import megatron.core.distributed as distributed

    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.proof.megatron_step import MegatronStep

    config = distributed.DistributedDataParallelConfig
    if row.reduces_bf16:
        distributed.DistributedDataParallelConfig = lambda **given: config(**given | {"grad_reduce_in_fp32": False})
    case = row.case._replace(microbatches=4)
    try:
        ready, batches = prepared(row.layout, case, gpt_oracle.rollouts_of(case.shape(row.layout)), "packed")
    finally:
        distributed.DistributedDataParallelConfig = config
    if row.plant is not None:
        row.plant(ready)
    planted = sum(len(parameter._backward_hooks or {}) for _, parameter in named(ready))

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = next(iterator)
        return output_of(model, microbatch.data), lambda losses: microbatch.loss(losses * microbatch.data.advantages)

    aggregation = LossAggregation(settings_of(case), Batch.described)

    def run() -> float:
        run_batches(row.layout, ready, forward_step, batches, aggregation.wrap_schedule)
        return 0.0

    measured, measure = list[Any](), MegatronStep.measure

    def noted(self: Any) -> None:
        measured.append(self)
        measure(self)

    with patch.object(MegatronStep, "measure", noted):
        step = attempted(run)
    each = 120 if row.layout.tp > 1 else 24 * (1 + ("distributed" in case.optimizer))
    assert measured[0].sent <= each * measured[0].alike.total + 2048, measured[0].sent
    left = sum(len(parameter._backward_hooks or {}) for _, parameter in named(ready)) - planted
    groups = [group for chunk in ready.chunks for group in chunk.bucket_groups]
    left += sum("start_grad_sync" in vars(group) for group in groups)
    return step._replace(error=float(left))


def run_layout(layout: Layout) -> dict[str, Step]:
    start_layout(layout)
    return {name: step_of(row) for name, row in ROWS.items() if row.layout == layout}


@functools.cache
def outcomes_of(layout: Layout) -> list[dict[str, Step]]:
    return run_ranks(layout.world_size, run_layout, layout, timeout_s=300)


@pytest.mark.parametrize("name", ROWS)
def test_parameters_of_a_gpt(name: str) -> None:
    row = ROWS[name]
    for rank, rank_steps in enumerate(outcomes_of(row.layout)):
        step = rank_steps[name]
        if row.says.startswith("raises "):
            assert re.search(ELSEWHERE if rank else row.says.removeprefix("raises "), step.raised), (rank, step)
        else:
            assert not step.raised, (rank, step)
            assert re.search(row.says if rank == 0 else "^$", step.printed, re.MULTILINE), (rank, step)
            assert step.error == 0, "hooks are left"


# ---- experts


def expert_steps() -> list[Step]:
    """On a rank of two that share the experts: a right step, and one whose experts are scaled."""
    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.megatron.flags import AggregationSettings

    steps = []
    for is_wrong in (False, True):
        model = moe_gpt.build("moe", False, ep=2)
        batches = moe_gpt.step_data(2, with_policy=True)
        if is_wrong:
            ready = Ready(model.config, [model], None)
            after_finalising(lambda name, gradient: gradient.mul_(0.5 if "experts" in name else 1.0), ready)
        aggregation = LossAggregation(AggregationSettings.resolve("token_mean"), Batch.described)

        def run(model: Any = model, batches: Any = batches, aggregation: Any = aggregation) -> float:
            moe_gpt.run_step(model, batches, lambda drawn, losses: drawn.loss(losses), aggregation.wrap_schedule)
            return 0.0

        steps.append(attempted(run))
    return steps


def test_experts_are_measured() -> None:
    right, wrong = run_ranks(2, expert_steps)[0]
    assert re.search(rf"{PROVED}.*by the gradients of all \d+ parameters", right.printed), right
    assert re.search(
        r"PROVED IN PART on .*; \d+ of \d+ parameters.*experts\S* \(0.5 times the others\)", wrong.printed
    ), wrong


@pytest.mark.parametrize(
    ("replica", "ratio", "is_summed", "undecided"),
    [
        ({}, 1.0, False, ""),
        ({}, 2.0, False, "no mark of Megatron says whether their sum is due"),
        ({"is_marked": True}, 1.0, True, ""),
        ({"is_marked": True}, 0.5, True, ""),
        ({"is_in_parts": True}, 1.0, True, ""),
        ({"is_in_parts": True, "is_one_number": True}, 1.0, True, ""),
        ({"is_in_parts": True, "is_one_number": True, "spread": 1.0}, 1.0, True, "it may be cut or whole"),
        ({"has_other_values": True, "is_in_parts": True}, 1.0, False, "no mark of Megatron says that it is cut"),
    ],
)
def test_a_mark_decides_where_numbers_cannot(
    replica: dict[str, Any], ratio: float, is_summed: bool, undecided: str
) -> None:
    """Equal parts, as of packs of identical samples, are summed where Megatron's mark says so, and are else copies."""
    from megatron_rl_loss.proof.bucket_groups import _Replica

    usual = {"has_other_values": False, "is_in_parts": False, "is_marked": False, "is_one_number": False, "spread": 0.0}
    seen = _Replica(**usual | replica)
    assert seen.is_summed == is_summed
    assert bool(seen.undecided(ratio, 2)) == bool(undecided)
    assert undecided in seen.undecided(ratio, 2)

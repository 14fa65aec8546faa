"""Steps that the proof must let pass, stop, or call not proved: a row for each, on the real schedule and DDP.

Rows of a layout run one after the other on the same ranks; what a rank prints and raises in each of its steps is
compared with the row's words. Loops of one's own: test_proof_loops.py.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import gpt_oracle
import pytest
import torch
import torch.distributed as dist
import world
from proved_steps import ELSEWHERE, PROVED, Step, attempted, policy
from ranks import run_ranks, start_process_group
from repository import ROOT
from step_samples import dealt
from table_step import Batch, relative_error, run_schedule, run_step, start, table_model
from tiny_gpt import Batch as GptBatch
from tiny_gpt import Case, Layout, output_of, prepared, run_batches, settings_of, start_layout
from torch import Tensor
from world import CP, DP, TABLE, gradient_of, start_ranks

pytestmark = pytest.mark.slow

#: The line of a step of `LossAggregation`, of which everything was compared.
PROVED_ALL = (
    "megatron_rl_loss: token_mean on the policy loss, aggregation proved on 37 tokens of 13 samples, "
    "3 prompts of 3 to 7; by the gradient of the one parameter(; losses as given)? \\(limits: docs/proof.md\\)$"
)
AVERAGED: Any = "averaged over ranks"
ABORTED = "All ranks aborted before the optimizer step"


# ---- LossAggregation on a table of losses, two data-parallel ranks


def aggregated(loss_of: Callable[..., Any], steps: int = 1, plant: Callable[[Any], None] | None = None) -> list[Step]:
    """On a rank: steps of `LossAggregation` by token_mean, whose loss function is ``loss_of(microbatch, losses)``."""
    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.megatron.flags import AggregationSettings

    batches = [Batch(world.STEP, chosen, 1) for chosen in dealt(world.STEP, dist.get_rank(), 2, 3)]
    model = table_model(TABLE)
    if plant is not None:
        plant(model)

    aggregation = LossAggregation(AggregationSettings.resolve("token_mean"), lambda batch: batch.samples)

    def run() -> float:
        run_step(model, batches, loss_of, aggregation.wrap_schedule)
        return relative_error(model.module.losses.main_grad.cpu(), gradient_of("token_mean"))

    return [attempted(run) for _ in range(steps)]


def as_asked(microbatch: Any, losses: Tensor) -> Any:
    return microbatch.loss(losses)


def divided_by_the_masks_sum(microbatch: Any, losses: Tensor) -> Any:
    return microbatch.loss(policy(microbatch, losses) / microbatch.tokens.mask.sum())


def divided_by_samples(microbatch: Any, losses: Tensor) -> Any:
    tokens = microbatch.tokens
    return microbatch.loss(
        policy(microbatch, losses) / torch.from_numpy(tokens.spread(tokens.samples.mask_sums + 1e-9))
    )


def weighed_by_token(microbatch: Any, losses: Tensor) -> Any:
    weights = 1 + torch.arange(len(losses)) % 3
    return microbatch.loss(policy(microbatch, losses) * weights)


def scaled_alike(microbatch: Any, losses: Tensor) -> Any:
    return microbatch.loss(policy(microbatch, losses) * 0.5)


def with_a_term_that_trains_nothing(microbatch: Any, losses: Tensor) -> Any:
    from megatron_rl_loss import Term

    return microbatch.loss({"pg": losses, "kl": Term(losses.detach(), "token_mean", coef=0.1)})


def with_an_infinite_term_switched_off(microbatch: Any, losses: Tensor) -> Any:
    from megatron_rl_loss import Term

    return microbatch.loss({"pg": losses, "kl": Term(losses * math.inf, "token_mean", coef=0.0)})


def with_a_tapped_term_left_out(microbatch: Any, losses: Tensor) -> Any:
    from megatron_rl_loss.core.aggregation import resolve
    from megatron_rl_loss.core.taps import tap

    tap(2 * losses, "kl", samples=microbatch.samples, coef=0.1, aggregation=resolve("token_mean"))
    return microbatch.loss(losses)


def with_what_one_rank_found_beside(microbatch: Any, losses: Tensor) -> Any:
    from megatron_rl_loss.core.taps import observed_taps

    loss = microbatch.loss(losses)
    observed_taps().added.update({"The loss has more."} if dist.get_rank() else ())
    return loss


def with_a_term_of_changing_coefficient(microbatch: Any, losses: Tensor) -> Any:
    from megatron_rl_loss import Term

    return microbatch.loss({"pg": losses, "kl": Term(0 * losses, "token_mean", coef=1.0 + len(losses))})


def own_backward(change: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any], None]:
    """Plant a fault into the gradient of our own sum, of the reducer, the values and the sum; its value stays."""

    def plant(model: Any) -> None:
        from megatron_rl_loss.core.reducers import WeightedSum

        plain = vars(WeightedSum)["_sum"]

        def changed(self: Any, values: Tensor) -> Tensor:
            total = plain(self, values)
            other = change(self, values, total)
            return other + (total - other).detach()

        WeightedSum._sum = changed  # type: ignore[method-assign]

    return plant


def doubled(reducer: Any, values: Tensor, total: Tensor) -> Tensor:
    return 2 * total


def by_mean_weights(reducer: Any, values: Tensor, total: Tensor) -> Tensor:
    return (values.float() * reducer.weights.mean()).sum(-1)


def double_what_ddp_reduces(model: Any) -> None:
    for bucket in (bucket for buffer in model.buffers for bucket in buffer.buckets):
        bucket.gradient_scaling_factor *= 2


#: Loss function, plant, and what each step prints on the first rank or raises on all.
AGGREGATED: dict[str, tuple[Callable[..., Any], Callable[[Any], None] | None, list[str]]] = {
    "as asked": (as_asked, None, [PROVED_ALL, "^$"]),
    "divided by the mask's sum": (
        divided_by_the_masks_sum,
        None,
        ["Losses are divided by the sum of the mask over the micro-batch.* between ppo_clip_loss and the reducer"],
    ),
    "divided by each sample's mask": (
        divided_by_samples,
        None,
        ["Losses are divided by the sum of the mask over each sample between .*, and the reducer averages them again"],
    ),
    "weighed by token": (
        weighed_by_token,
        None,
        [r"PROVED IN PART on 37 tokens.*not covered: factors of 1 to 3 on tokens between ppo_clip_loss and the"],
    ),
    "scaled alike": (scaled_alike, None, [r"PROVED IN PART on 37.*not covered: a factor of 0.5 on tokens between"]),
    "a term without gradient": (
        with_a_term_that_trains_nothing,
        None,
        ["the term 'kl' with coef=0.1 and values without a graph: it would be added to the loss and train nothing"],
    ),
    "a tapped term left out of the loss": (
        with_a_tapped_term_left_out,
        None,
        ["The kl term has a coefficient, 0.1, and no gradient reaches it"],
    ),
    "a term that one rank found beside": (
        with_what_one_rank_found_beside,
        None,
        ["(?m)token_mean on the policy loss, NOT PROVED: The loss has more.$"],
    ),
    "coefficient 0 of infinite values": (
        with_an_infinite_term_switched_off,
        None,
        [rf"token_mean on the policy loss, {PROVED} 37 tokens.*not covered: kl \(coefficient 0\)"],
    ),
    "a coefficient that changes": (
        with_a_term_of_changing_coefficient,
        None,
        ["Report a metric, or a term of the loss, alike in every micro-batch and on every rank"],
    ),
    "our backward pass doubled": (
        as_asked,
        own_backward(doubled),
        ["A reducer's backward pass does not send its weights: the largest error is 1"],
    ),
    "our backward pass sends mean weights": (
        as_asked,
        own_backward(by_mean_weights),
        ["A reducer's backward pass does not send its weights"],
    ),
    "a fault that the trainer catches": (
        as_asked,
        double_what_ddp_reduces,
        [r"tokens weigh 2 times what they should \(2 = DP\); furthest off: token \d+ of sample \d of "] * 3,
    ),
}  # fmt: skip
AGGREGATED["a loss function's own output"] = (
    lambda microbatch, losses: microbatch.loss(policy(microbatch, losses)),
    None,
    [PROVED_ALL],
)


def run_aggregated() -> dict[str, list[Step]]:
    from megatron_rl_loss.core.reducers import WeightedSum

    start()
    steps_of, plain = {}, vars(WeightedSum)["_sum"]
    for case, (loss_of, plant, words) in AGGREGATED.items():
        steps_of[case] = aggregated(loss_of, len(words), plant)
        WeightedSum._sum = plain  # type: ignore[method-assign]
    return steps_of


@functools.cache
def outcomes_of_aggregated() -> list[dict[str, list[Step]]]:
    return run_ranks(2, run_aggregated)


@pytest.mark.parametrize("case", AGGREGATED)
def test_loss_aggregation(case: str) -> None:
    words = AGGREGATED[case][2]
    for rank, steps_of in enumerate(outcomes_of_aggregated()):
        steps = steps_of[case]
        for step, expected in zip(steps, words, strict=True):
            if "PROVED" in expected.upper() or expected == "^$":
                assert not step.raised
                assert re.search(expected if rank == 0 else "^$", step.printed), (case, rank, step)
            else:
                assert re.search(f"{expected}|{ELSEWHERE}" if rank else expected, step.raised), (case, rank, step)
    exact = case in ("as asked", "a loss function's own output", "coefficient 0 of infinite values")
    assert not exact or steps[0].error < 1e-6


# ---- a loop of one's own, two data- times two context-parallel ranks


def bytes_of_a_step(length: int) -> int:
    """On a rank: the bytes that the proof of a step sends, of samples of that length."""
    import pickle

    from megatron_rl_loss import Samples, ZigzagTHD, plan_step, prove_step
    from megatron_rl_loss.proof import first_step

    _, dp_rank = start_ranks()
    model = table_model([1.0] * (length + 1), forward=lambda losses, numbers: losses[numbers])
    layout = ZigzagTHD([0, length])
    samples = Samples([torch.ones(length)], layout=layout, prompt_ids=[f"prompt {dp_rank}"])
    sent, conclude = [0], first_step.FirstStep._conclude
    all_reduce, gather, single = dist.all_reduce, dist.all_gather_object, dist.all_gather_into_tensor

    def counted(*arguments: Any) -> None:
        def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[0] += tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        def gather_objects(received: Any, value: Any, group: Any = None) -> None:
            sent[0] += len(pickle.dumps(value))
            gather(received, value, group=group)

        def gather_tensors(received: Tensor, tensor: Tensor, **kwargs: Any) -> Any:
            sent[0] += tensor.nbytes
            return single(received, tensor, **kwargs)

        vars(dist).update(all_reduce=reduce, all_gather_object=gather_objects, all_gather_into_tensor=gather_tensors)
        if hasattr(dist, "all_gather_single"):
            vars(dist)["all_gather_single"] = gather_tensors
        conclude(*arguments)

    first_step.FirstStep._conclude = counted  # type: ignore[method-assign, assignment]
    model.zero_grad_buffer()
    plan = plan_step([samples], "prompt_mean", model=model)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = next(iterator)
        return model(torch.arange(length // CP)), lambda losses: microbatch.loss(losses)

    with prove_step(model, plan):
        run_schedule(forward_step, iter(plan), model, 1)
    return sent[0]


def test_what_ranks_exchange_does_not_grow_with_tokens() -> None:
    few, many = (max(run_ranks(CP * DP, bytes_of_a_step, length)) for length in (64, 65536))
    assert abs(many - few) < 200  # the digits of numbers in words
    assert many < 20_000
    print(f"\na proof sends {many:,} bytes from a rank")


# ---- levels that differ between nodes


def leveled(of_ranks: list[str], is_wrong: bool) -> list[Step]:
    os.environ["MEGATRON_RL_LOSS_PROOF"] = of_ranks[int(os.environ["RANK"])]
    start()
    return aggregated(as_asked, 2, double_what_ddp_reduces if is_wrong else None)


@pytest.mark.parametrize("of_ranks", [["off", "error"], ["error", "warn"]], ids=str)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_strictest_level_of_all_ranks_holds(of_ranks: list[str], is_wrong: bool) -> None:
    for rank, steps in enumerate(run_ranks(2, leveled, of_ranks, is_wrong, timeout_s=120)):
        for step in steps:
            assert bool(step.raised) == is_wrong
            assert ABORTED in step.raised or not is_wrong
        assert ("MEGATRON_RL_LOSS_PROOF differs between ranks" in steps[0].printed) == (rank == 0)


def given_up(of_ranks: list[str], way: str) -> tuple[str, bool]:
    """What is printed, and if a step would be measured, where nothing can be proved before there is a step."""
    from megatron_rl_loss.engines.engine_step import EngineStep

    start_process_group() if way == "no groups of Megatron" else start()
    proof = EngineStep(None, "the policy loss", level=of_ranks[int(os.environ["RANK"])])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if way == "in a step":
            proof.doubt = "ids moved."
            with proof.step(table_model(TABLE)):
                pass
        else:
            proof.give_up("ids moved.")
    return printed.getvalue(), proof.is_over


@pytest.mark.parametrize("of_ranks", [["off", "off"], ["off", "warn"]], ids=str)
@pytest.mark.parametrize("way", ["before a step", "in a step", "no groups of Megatron"])
def test_nothing_is_said_to_be_unproved_where_no_rank_asks(of_ranks: list[str], way: str) -> None:
    for rank, (printed, is_over) in enumerate(run_ranks(2, given_up, of_ranks, way, timeout_s=120)):
        assert is_over
        assert ("NOT PROVED: ids moved." in printed) == (rank == 0 and "warn" in of_ranks), printed


def of_interval(intervals: list[int]) -> str:
    from megatron_rl_loss import LossAggregation
    from megatron_rl_loss.megatron.flags import AggregationSettings

    dp_rank = start().get_data_parallel_rank()
    settings = AggregationSettings.resolve("token_mean", audit_interval=intervals[dp_rank])
    aggregation = LossAggregation(settings, lambda batch: batch.samples)
    batches = [Batch(world.STEP, chosen, 1) for chosen in dealt(world.STEP, dp_rank, 2, 3)]
    try:
        run_schedule(lambda *_: None, iter(batches), table_model(TABLE), 3, aggregation.wrap_schedule)
    except Exception as error:
        return str(error)
    return ""


def test_intervals_that_differ_between_ranks_are_refused() -> None:
    for text in run_ranks(2, of_interval, [2, 5], timeout_s=120):
        assert re.search(r"audit interval \d, another rank for something else: all ranks must aggregate alike", text)


# ---- the whole GPT: anchors, and losses in the output head


def trained_gpt(case: str, layout: Layout, steps: int, stack: contextlib.ExitStack) -> list[Step]:
    """On a rank: steps of a tiny GPT, with what `GPTS` plants until the stack is left."""
    import megatron.core.distributed as distributed
    from megatron.core import parallel_state as mpu

    from megatron_rl_loss import Folded, LossAggregation, OutputHead, plan_step, prove_step
    from megatron_rl_loss.proof.sketches import Backward

    def replace(owner: Any, name: str, planted: Any) -> None:
        stack.enter_context(patch.object(owner, name, planted))

    config_class = distributed.DistributedDataParallelConfig
    reduces_bf16 = {"grad_reduce_in_fp32": False}
    if case.startswith("bf16"):
        if "fp32 accumulation" in case:
            reduces_bf16["param_name_patterns_for_fp32_local_accumulation"] = ("all",)  # type: ignore[assignment]
        replace(distributed, "DistributedDataParallelConfig", lambda **options: config_class(**options | reduces_bf16))
    gpt = Case(
        4, "token_mean", "all", "mean", bf16=case.startswith("bf16"), optimizer="plain", tied=False, lopsided=False
    )
    ready, batches = prepared(layout, gpt, gpt_oracle.rollouts_of(gpt.shape(layout)), "packed")
    batches = batches * (8 if "32 micro-batches" in case else 1)
    take, finalize = Backward.take, ready.config.finalize_model_grads_func
    if case == "graphs replay":  # simulated: hooks run in two of four micro-batches
        ready.config.cuda_graph_impl = "local"
        replace(Backward, "take", lambda self, number: take(self, number) if self.num_terms[number] < 2 else None)
    if case == "a silent stage" and mpu.is_pipeline_first_stage():
        replace(Backward, "take", lambda self, number: None)
    if case == "a tensor-parallel rank scaled" and mpu.get_tensor_model_parallel_rank() == 0:
        double_what_ddp_reduces(ready.chunks[0])
    if case == "all but the last norm scaled":

        def finalize_apart(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            for chunk in ready.chunks:
                for name, parameter in chunk.module.named_parameters():
                    if "final_layernorm" not in name:
                        parameter.main_grad *= 0.25

        ready.config.finalize_model_grads_func = finalize_apart

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        taken = next(iterator)
        batch, microbatch = taken if "own loop" in case else (taken.data, taken)
        if not case.startswith("folded"):
            return output_of(model, batch), lambda losses: microbatch.loss(losses * (1.5 + batch.advantages))
        folded = Folded(microbatch, lambda log_probs, _, advantages: (-log_probs * (1.5 + advantages), {}),
                        {"advantages": batch.advantages})  # fmt: skip
        output = output_of(model, batch, OutputHead(chunk_tokens=3), folded)

        def loss_func(output: Any) -> Any:
            summed, _ = output
            return microbatch.loss(
                dataclasses.replace(summed, share=summed.share * (2.0 if "doubled" in case else 1.0))
            )

        return output, loss_func

    wrap: Any = LossAggregation(settings_of(gpt), GptBatch.described).wrap_schedule
    if "own loop" in case:
        wrap = None

    def run() -> float:
        data: list[Any] = batches
        proving: Any = contextlib.nullcontext()
        if "own loop" in case:
            plan = plan_step([batch.samples for batch in batches], "token_mean", model=ready.chunks)
            data, proving = list(zip(batches, plan, strict=True)), prove_step(ready.chunks, plan)
        for chunk in ready.chunks:
            chunk.zero_grad_buffer()
        with proving:
            run_batches(layout, ready, forward_step, data, wrap)
        return 0.0

    return [attempted(run) for _ in range(steps)]


DP_2, PP_2, TP_2 = Layout(1, False, 1, 1, 1, 2), Layout(1, False, 2, 1, 1, 1), Layout(2, False, 1, 1, 1, 1)
#: Layout, and what each step prints on the first rank or raises on all.
GPTS: dict[str, tuple[Layout, list[str]]] = {
    "folded": (DP_2, [rf"{PROVED} \d+ tokens.*; from the share on \(summed in the output head\)", "^$"]),
    "folded, own loop": (DP_2, [rf"{PROVED} \d+ tokens.*; from the share on \(summed in the output head\)", "^$"]),
    "folded, doubled": (DP_2, [r"tokens weigh 2 times what they should \(2 = DP\)"]),
    "bf16 reduction, fp32 accumulation": (DP_2, [rf"{PROVED} .* \(weights to within 1.6 %, gradients to [\d.]+ %\)"]),
    "bf16 reduction, 32 micro-batches": (DP_2, [rf"{PROVED} .* \(weights to within 1.6 %, gradients to [\d.]+ %\)"]),
    "graphs replay": (DP_2, ["NOT PROVED: CUDA graphs replay a backward pass without its hooks", "^$"]),
    "a silent stage": (PP_2, [rf"{PROVED} .*all \d+ parameters \(7 of them from main_grad on\)", "^$"]),
    "a tensor-parallel rank scaled": (
        TP_2,
        [r"Gradients are multiplied by 1 on tensor-parallel rank 1, by 2 on tensor-parallel rank 0: no weight holds"],
    ),
    "all but the last norm scaled": (
        DP_2, [r"(?s)tokens weigh 0.25 times what they should.*1 of 15 parameters .*final_layernorm.weight \(4 times"]
    ),
}  # fmt: skip


def run_gpts(layout: Layout) -> dict[str, list[Step]]:
    start_layout(layout)
    steps_of = {}
    for case, (of_case, words) in GPTS.items():
        if of_case == layout:
            with contextlib.ExitStack() as stack:
                steps_of[case] = trained_gpt(case, layout, len(words), stack)
    return steps_of


@functools.cache
def outcomes_of_gpts(layout: Layout) -> list[dict[str, list[Step]]]:
    return run_ranks(layout.world_size, run_gpts, layout)


@pytest.mark.parametrize("case", GPTS)
def test_a_gpt(case: str) -> None:
    layout, words = GPTS[case]
    for rank, steps_of in enumerate(outcomes_of_gpts(layout)):
        for step, expected in zip(steps_of[case], words, strict=True):
            if step.raised:
                assert re.search(f"{expected}|{ELSEWHERE}" if rank else expected, step.raised), (case, rank, step)
            else:
                assert re.search(expected if rank == 0 else "^$", step.printed), (case, rank, step)


# ---- what is not the proof's, but stopped right runs


def planned_dummies(mode: str) -> list[str]:
    """On one of four data-parallel ranks: in the second step two of them hold an engine's fully masked row alone."""
    from megatron_rl_loss import Samples, plan_step

    state, messages = start(), []
    dp_rank = state.get_data_parallel_rank()
    for number in range(2):
        ids = [f"{dp_rank} {number} {k}" for k in range(2)]
        samples = [Samples([[1, 1, 0], [1]], rollout_ids=ids, prompt_ids=[str(dp_rank)] * 2)]
        if number and dp_rank >= 2:
            samples = [Samples([[0]], rollout_ids=["dummy"], prompt_ids=["dummy"])]
        try:
            plan = plan_step(
                samples, mode, units="active", dp_group=state.get_data_parallel_group(), gradients=AVERAGED
            )
            messages.append(f"{plan.totals.step_active_tokens} tokens")
        except Exception as error:
            messages.append(str(error))
    return messages


def test_ranks_that_hold_an_engines_dummies_train() -> None:
    assert run_ranks(4, planned_dummies, "sample_mean") == [["12 tokens", "6 tokens"]] * 4


def planned_with_masks_cut() -> str:
    from megatron_rl_loss import Samples, ZigzagTHD, plan_step

    cp_rank, dp_rank = start_ranks()
    from megatron.core import parallel_state as mpu

    groups = {"dp_group": mpu.get_data_parallel_group(), "cp_group": mpu.get_context_parallel_group()}
    mask = [1.0, 1.0, 0.0, 0.0] if cp_rank else [0.0, 0.0, 1.0, 1.0]
    try:
        plan_step(
            [Samples([mask], layout=ZigzagTHD([0, 4]), prompt_ids=[str(dp_rank)])],
            "token_mean",
            gradients=AVERAGED,
            **groups,
        )
    except Exception as error:
        return str(error)
    return ""


def test_masks_that_are_0_on_other_ranks_are_named() -> None:
    for text in run_ranks(CP * DP, planned_with_masks_cut):
        assert "pass masks uncut" in text


def test_a_default_launch_loads_no_room_that_diagnoses() -> None:
    """In an interpreter of its own, with torchrun's environment of one rank."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, str(ROOT / "tests/support/launched_rooms.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | rank)
    assert run.returncode == 0, run.stderr[-3000:]
    rooms = json.loads(run.stdout.splitlines()[-1])
    assert "proof" in rooms
    assert rooms.keys().isdisjoint({"audit", "engines", "logprobs", "__main__"})
    print(f"\na default launch loads {sum(rooms.values()):,} lines:", rooms)

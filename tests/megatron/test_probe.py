"""The contract probe against the real Megatron, and against planted changes of it."""

import functools
import time
from typing import Any

import pytest
import torch
from ranks import run_ranks
from table_step import Batch, aggregation, start, step_samples, table_model

pytestmark = pytest.mark.slow


def plant(variant: str, cp_size: int) -> None:
    """Change what the installed schedule does to a loss that comes with a token count."""
    from megatron.core.pipeline_parallel import schedules

    original = schedules.forward_step_calc_loss

    def changed(**kwargs: Any) -> Any:
        if variant == "another signature":
            kwargs.pop("is_last_stage")
            return original(None, **kwargs)
        loss, num_tokens = original(**kwargs)
        if variant == "times cp":
            loss = loss * cp_size
        elif variant == "divided by cp":
            loss = loss / cp_size
        elif variant == "not divided by micro-batches":
            loss = loss * kwargs["num_microbatches"]
        elif variant == "float counts":
            num_tokens = num_tokens.float()
        elif variant == "counts per CP rank":
            num_tokens = num_tokens * cp_size
        return loss, num_tokens

    schedules.forward_step_calc_loss = changed


def verdict(variant: str, per_token: bool, average: bool = False) -> str:
    start(cp=2)
    samples = step_samples(seed=1)
    model = table_model([0.0], per_token=per_token, average_in_collective=average)
    if variant == "DDP by dp alone":
        for buffer in model.buffers:
            buffer.gradient_scaling_factor *= 2
    elif variant:
        plant(variant, cp_size=2)
    step = aggregation(mode="token_mean")
    before = model.module.losses.detach().clone()
    try:
        step.begin_step(iter([Batch(samples, [i], 2) for i in (0, 1, 2)]), model=model, num_microbatches=3)
    except ValueError as error:
        assert torch.equal(model.module.losses, before)
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("per_token", "average"), [(False, False), (True, False), (False, True)])
def test_the_installed_megatron_keeps_the_contract(per_token: bool, average: bool) -> None:
    assert run_ranks(4, functools.partial(verdict, "", per_token, average)) == ["accepted"] * 4


CHANGED = {
    # (variant, per_token): what the refusal says; both numbers, relied on and found
    ("times cp", False): "scales by 0.666666667 where 0.333333333 is relied on",
    ("divided by cp", False): "scales by 0.166666667 where 0.333333333 is relied on",
    ("times cp", True): "scales by 2 where 1 is relied on",
    ("not divided by micro-batches", False): "scales by 1 where 0.333333333 is relied on",
    ("float counts", False): "made 1.0 (torch.float32) of a count of 1 tokens",
    ("counts per CP rank", True): "made 2 (torch.int32) of a count of 1 tokens",
    ("another signature", False): "could not be probed (TypeError",
    ("DDP by dp alone", False): "DDP (gradient_scaling_factor): it scales by 0.5 where 0.25 is relied on",
    ("DDP by dp alone", True): "DDP (gradient_scaling_factor): it scales by 2 where 1 is relied on",
}


@pytest.mark.parametrize(("planted", "text"), CHANGED.items(), ids=lambda value: str(value))
def test_a_changed_megatron_is_refused_on_every_rank(planted: tuple[str, bool], text: str) -> None:
    for refusal in run_ranks(4, functools.partial(verdict, *planted)):
        assert text in refusal


def probes() -> tuple[int, float, Any]:
    """Calls of forward_step_calc_loss by three steps, the probe's cost in ms, and the MoE scale it must not touch."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_rl_loss.megatron.probe import check_contract

    start()
    samples = step_samples(seed=1)
    model = table_model([0.0])
    model.config.num_moe_experts = 2
    calls = 0
    original = schedules.forward_step_calc_loss

    def counted(**kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(**kwargs)

    schedules.forward_step_calc_loss = counted
    step = aggregation(mode="token_mean")
    for _ in range(3):
        step.begin_step(iter([Batch(samples, [0], 1)]), model=model, num_microbatches=1)
    counted_calls, begin = calls, time.perf_counter()
    check_contract(model.config, [model], per_token=False, num_microbatches=1, cp_size=1, dp_cp_size=1)
    return counted_calls, 1000 * (time.perf_counter() - begin), MoEAuxLossAutoScaler.main_loss_backward_scale


def test_it_is_probed_once_and_leaves_no_trace() -> None:
    calls, milliseconds, moe_scale = run_ranks(1, probes)[0]
    assert calls == 1
    assert moe_scale is None
    print(f"the probe took {milliseconds:.2f} ms")

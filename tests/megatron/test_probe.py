"""The contract probe against the real Megatron, and against planted changes of it."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from ranks import run_ranks
from refusals import outcome_of
from step_samples import step_samples
from table_step import Batch, aggregation, begun, start, table_model


@contextlib.contextmanager
def planted(variant: str, cp_size: int) -> Iterator[None]:
    """Change what the installed schedule does to a loss that comes with a token count."""
    from megatron.core.pipeline_parallel import schedules

    original = schedules.forward_step_calc_loss

    @functools.wraps(original)  # the probe asks its signature which groups it takes
    def changed(**kwargs: Any) -> Any:
        if variant == "another signature":
            kwargs.pop("is_last_stage")
            return original(None, **kwargs)
        if variant == "counts in place":
            kwargs["loss_func"](kwargs["output_tensor"])[1].add_(1)
            return original(**kwargs)
        loss, num_tokens = original(**kwargs)
        if variant == "a pair without cp" and len(kwargs["loss_func"](kwargs["output_tensor"])) == 2:
            loss = loss / cp_size
        factors = {"times cp": cp_size, "divided by cp": 1 / cp_size, "a little more": 1.00001}
        loss = loss * (factors | {"not divided by micro-batches": kwargs["num_microbatches"]}).get(variant, 1)
        if variant == "float counts":
            num_tokens = num_tokens.float()
        elif variant == "counts per CP rank":
            num_tokens = num_tokens * cp_size
        return loss, num_tokens

    if variant:
        schedules.forward_step_calc_loss = changed
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original


def returned_as_a_pair(step: Any, data: Any, model: Any, num_microbatches: int) -> None:
    """Begin a step, which says nothing of this form, and return a micro-batch's loss in it."""
    microbatch = next(begun(step, data, model, num_microbatches))
    microbatch.loss(torch.zeros(len(microbatch.tokens), requires_grad=True), form="2-tuple")


Case = tuple[str, bool, bool]  # variant, per-token loss, averaged in the collective


def verdicts(cases: list[Case]) -> list[str]:
    first = 3 * start(cp=2).get_data_parallel_rank()
    samples = step_samples(seed=1)
    texts = []
    for variant, per_token, average in cases:
        model = table_model([0.0], per_token=per_token, average_in_collective=average)
        chunks: Any = model
        if "DDP" in variant:
            for buffer in model.buffers:
                buffer.gradient_scaling_factor *= 1.00001 if variant == "a little more in DDP" else 2
        if variant == "DDP of a second chunk":
            chunks = [table_model([0.0], per_token=per_token), model]
        step = aggregation(mode="token_mean")
        before = model.module.losses.detach().clone()
        data: Any = iter([Batch(samples, [first + i], 2) for i in range(3)])
        with planted("" if "DDP" in variant else variant, cp_size=2):
            iterators = data if chunks is model else [None, data]
            begin: Any = returned_as_a_pair if "a pair" in variant else begun
            texts.append(outcome_of(functools.partial(begin, step, iterators, chunks, 3)))
        assert torch.equal(model.module.losses, before)
    return texts


SOUND: list[Case] = [("", False, False), ("", True, False), ("", False, True), ("a pair", False, False)]


def scales(product: str, relied: str) -> str:
    return f"scales losses by {product}, and this library relies on {relied}"


OF_DDP = "DDP (gradient_scaling_factor): it "
#: What the refusal says: both numbers, found and relied on.
CHANGED: dict[Case, str] = {
    ("times cp", False, False): scales("0.666666667", "0.333333333"),
    ("divided by cp", False, False): scales("0.166666667", "0.333333333"),
    ("times cp", True, False): scales("2", "1"),
    ("a pair without cp", False, False): "2-tuple): it " + scales("0.333333333", "0.666666667"),
    ("not divided by micro-batches", False, False): scales("1", "0.333333333"),
    ("float counts", False, False): "turns a token count of 1 into 1.0 (torch.float32)",
    ("counts per CP rank", True, False): "turns a token count of 1 into 2 (torch.int32)",
    ("counts in place", False, False): "it changes the token count in place",
    ("another signature", False, False): "could not be probed (TypeError",
    # What is relied on is exact: a factor of 1 + 1e-5 is another one.
    ("a little more", False, False): "it scales losses by 0.33333",
    ("a little more", True, False): "it scales losses by 1.00001",
    ("a little more in DDP", False, False): "it " + scales("0.2500025", "0.25"),
    ("DDP by dp alone", False, False): OF_DDP + scales("0.5", "0.25"),
    ("DDP by dp alone", True, False): OF_DDP + scales("2", "1"),
    ("DDP twice", False, True): OF_DDP + scales("0.5", "0.25"),
    ("DDP of a second chunk", False, False): OF_DDP + scales("0.5", "0.25"),
}


def test_the_installed_megatron_keeps_the_contract_and_a_changed_one_is_refused_on_every_rank() -> None:
    for verdict in run_ranks(4, functools.partial(verdicts, [*SOUND, *CHANGED])):
        sound_verdicts, changed_verdicts = verdict[: len(SOUND)], verdict[len(SOUND) :]
        assert sound_verdicts == ["accepted"] * len(SOUND)
        for (case, said), text in zip(CHANGED.items(), changed_verdicts, strict=True):
            assert text.startswith("ContractError: Megatron's "), (case, text)
            assert said in text, case
            assert "Use megatron-core 0.15 to 0.19, or a megatron_rl_loss made for this version" in text


def probes() -> tuple[list[int], list[Any]]:
    """Calls of forward_step_calc_loss after each of three steps, and the scales of auxiliary losses, left alone."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    start()
    samples = step_samples(seed=1)
    model = table_model([0.0])
    model.config.num_moe_experts = model.config.mtp_num_layers = 2
    before = MTPLossAutoScaler.main_loss_backward_scale
    calls = 0
    original = schedules.forward_step_calc_loss

    def counted(**kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(**kwargs)

    schedules.forward_step_calc_loss = counted
    step = aggregation(mode="token_mean")
    after_step = []
    for begin in (begun, returned_as_a_pair, returned_as_a_pair):
        begin(step, iter([Batch(samples, [0], 1)]), model, 1)
        after_step.append(calls)
    untouched = MTPLossAutoScaler.main_loss_backward_scale is before
    return after_step, [MoEAuxLossAutoScaler.main_loss_backward_scale, untouched, model.config.num_moe_experts]


def arguments_in_a_measured_step() -> list[str]:
    """The CP arguments for a Megatron that takes the group alone, whose function a measurement has wrapped."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_rl_loss.megatron.proving import facts_of
    from megatron_rl_loss.megatron.versions import cp_arguments
    from megatron_rl_loss.proof.megatron_step import MegatronStep

    state = start()

    def forward_step_calc_loss(model: Any, output_tensor: Any, loss_func: Any, *, cp_group: Any) -> None: ...

    schedules.forward_step_calc_loss = forward_step_calc_loss
    model = table_model([0.0])
    with MegatronStep(model, facts_of(model)[0]):
        return [*cp_arguments(state.get_context_parallel_group())]


def test_a_probe_in_a_measured_step_calls_megatron_as_it_wants_to_be_called() -> None:
    assert run_ranks(1, arguments_in_a_measured_step) == [["cp_group"]]


def test_a_form_is_probed_once_where_it_is_returned_and_leaves_no_trace() -> None:
    """The first step probes the form that loss functions return by default, and no other."""
    assert run_ranks(1, probes) == [([1, 2, 2], [None, True, 2])]

"""The parts of the output layer in chunks, in a real Megatron GPTModel; whole steps with it are in test_matrix.py."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpt_oracle
import pytest
import torch
from missing import has
from ranks import run_ranks
from refusals import THREE_PARTS
from table_step import start
from tiny_gpt import Case, Layout
from torch import Tensor

IDS = torch.arange(8)[None]


def on_models() -> dict[str, Any]:
    """The result of each check, on a model of its own."""
    from megatron.core.utils import unwrap_model
    from tiny_gpt import build

    start()
    case = Case(1, "sample_mean", "all", "mean", False, "plain", False, False)
    outcomes: dict[str, Any] = {}
    for check in CHECKS:
        chunk = build(Layout(1, False, 1, 1, 1, 1), case, "packed").chunks[0]
        outcomes[check.__name__] = check(chunk, unwrap_model(chunk))
    return outcomes


def call(chunk: Any, context: Any = None, labels: Tensor | None = IDS, **settings: Any) -> Any:
    """The model's own output without settings of a head."""
    from megatron_rl_loss import OutputHead, packed_seq_params

    bounds = torch.tensor([0, 8], dtype=torch.int32)
    packed = packed_seq_params(bounds)
    inputs: Any = {"packed_seq_params": packed, "labels": labels}
    if settings:
        return OutputHead(**settings)(chunk, IDS, IDS, None, context=context, **inputs)
    return chunk(IDS, IDS, None, **inputs)


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def planned(weights: Tensor) -> Any:
    """The plan of one micro-batch with these weights, by row."""
    from megatron_rl_loss import Samples, plan_step

    return plan_step([Samples(list(torch.atleast_2d(weights)))], "token_sum", divisor=1, dp_group=None)


def gives_megatrons_log_probs(chunk: Any, model: Any) -> None:
    from megatron_rl_loss import Tokens

    close: Any = {"rtol": 2e-6, "atol": 1e-6}
    log_probs, entropy = call(chunk, chunk_tokens=3, entropy=True)
    torch.testing.assert_close(log_probs, -call(chunk), **close)
    logits = call(chunk, labels=None).double()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy.double(), expected, **close)

    def of(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]

    cold, none = call(chunk, temperature=0.5)
    assert none is None
    torch.testing.assert_close(cold.double(), of(logits / 0.5), **close)
    narrow, _ = call(chunk, vocab_size=12)
    torch.testing.assert_close(narrow.double(), of(logits[..., :12]), **close)
    keep = (torch.arange(gpt_oracle.VOCAB) < 12).expand(1, 8, -1)
    torch.testing.assert_close(call(chunk, Tokens(keep=keep), chunk_tokens=5)[0], narrow)
    if has("MuP"):
        with changed(model.config, "use_mup", True), changed(model.config, "mup_output_mult", 0.25):
            scaled, _ = call(chunk, chunk_tokens=5)
            torch.testing.assert_close(scaled.double(), of(call(chunk, labels=None).double()), **close)
        assert (scaled - log_probs).abs().max() > 0.01


def runs_hooks_that_come_before(chunk: Any, model: Any) -> list[str]:
    """Hooks like DDP's of --overlap-param-gather, which waits for the weight, and Megatron-FSDP's, with keywords."""
    ran: list[str] = []
    layer = model.output_layer
    layer.register_forward_pre_hook(lambda module, inputs: ran.append("layer" if module is layer else "another"))
    layer.register_forward_pre_hook(lambda module, inputs, named: ran.extend(sorted(named)), with_kwargs=True)
    call(chunk, chunk_tokens=5)
    return ran


def leaves_gradients_to_a_caller_who_sums_them(chunk: Any, model: Any) -> list[bool]:
    """True where the gradient of the hidden states is summed over TP, as the layer says."""
    from megatron_rl_loss.logprobs import megatron_head

    summed, plain = [], vars(megatron_head)["log_probs_from_hidden"]

    def look(*args: Any, **kwargs: Any) -> Any:
        summed.append(args[1].tensor_parallel.sum_gradient)
        return plain(*args, **kwargs)

    with changed(megatron_head, "log_probs_from_hidden", look):
        for disabled in (False, True):
            with changed(model.output_layer, "disable_grad_reduce", disabled):
                call(chunk, chunk_tokens=5)
    return summed


def adds_to_the_main_gradient(chunk: Any, model: Any) -> list[bool]:
    """True where the head itself added, and no hook on the parameter's own gradient; by both passes, a share scaled."""
    from megatron_rl_loss import Folded

    layer, itself, sums = model.output_layer, [], list[Tensor]()
    for fused in (False, True):
        for scale in (0, 1, 3):  # as losses that a slicing gather gave need it (`Gathered`); 0: two passes
            layer.gradient_accumulation_fusion, layer.weight.grad_added_to_main_grad = fused, False
            layer.weight.main_grad.zero_()
            microbatch = planned(torch.ones(8))[0]
            microbatch._policy.gradient_scale = scale
            folded = Folded(microbatch, lambda lp, _: (lp, {}))
            output = call(chunk, folded if scale else None, chunk_tokens=5)[0]
            head_loss = microbatch.loss(output) if scale else output.sum()
            head_loss.backward()
            itself.append(layer.weight.grad_added_to_main_grad)
            sums.append(layer.weight.main_grad / max(scale, 1))
            torch.testing.assert_close(head_loss, -call(chunk).sum())
    assert sums[0].abs().max() > 0
    torch.testing.assert_close(sums, [sums[0]] * 6)
    return itself


def keeps_rows_apart(chunk: Any, model: Any) -> None:
    """Hidden states are [s, b, h]; labels, masks, weights and inputs [b, s], and so is what comes out."""
    from megatron_rl_loss import Folded, OutputHead, Tokens

    rows, length = 2, 5
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(length, rows, gpt_oracle.HIDDEN, generator=generator)
    labels = torch.randint(gpt_oracle.VOCAB, (rows, length), generator=generator)
    values, weights = torch.randn(2, rows, length, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    weights = weights.abs() * mask
    logits = (hidden @ model.output_layer.weight.t()).double().transpose(0, 1)
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * mask
    head: Any = OutputHead(chunk_tokens=3)
    said = (hidden, model.output_layer, model.output_layer.weight, labels)
    log_probs, _ = head.values(*said, Tokens(mask))
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)

    def per_token(log_probs: Tensor, _: Any, values: Tensor) -> Any:
        return log_probs * values, {"seen": values}

    plan = planned(weights)
    folded = Folded(plan[0], per_token, {"values": values})
    summed, token_values = head.values(*said, folded)
    torch.testing.assert_close(summed.share.double(), (expected * values * weights).sum(), rtol=1e-5, atol=1e-6)
    assert torch.equal(token_values["seen"], values * mask)
    plan[0].loss(summed)
    plan.reset()
    row, place = mask.nonzero()[-1].tolist()
    values[row, place] = torch.nan
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_rl_loss").addHandler(handler)
    plan[0].loss(head.values(*said, folded)[0])
    plan.finish()
    assert [f"per_token_loss is nan at token {place} of sample {row}" in line for line in lines] == [True]


def takes_several_ids_and_a_teacher(chunk: Any, model: Any) -> None:
    """Labels and inputs are [b, s, K], the teacher's hidden states [b, s, its width]; both in one pass and in two."""
    from megatron_rl_loss import Folded, OutputHead, Teacher, Tokens

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(5, 2, gpt_oracle.HIDDEN, generator=generator)
    labels = torch.randint(gpt_oracle.VOCAB, (2, 5, 3), generator=generator)
    column, weight = torch.randn(2, 5, 4, generator=generator), torch.randn(gpt_oracle.VOCAB, 4, generator=generator)
    near, weights = torch.randn(2, 5, 3, generator=generator), torch.rand(2, 5, generator=generator)
    log_p = ((hidden @ model.output_layer.weight.t()).double().transpose(0, 1) / 2).log_softmax(-1)
    expected = log_p.gather(-1, labels)
    head: Any = OutputHead(chunk_tokens=3, temperature=2.0)
    said = (hidden, model.output_layer, model.output_layer.weight, labels)
    close: Any = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(head.values(*said, Tokens())[0].double(), expected, **close)
    for temperature in (None, 1.5):  # None: as the head's
        log_q = ((column @ weight.t()).double() / (temperature or 2)).log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        teacher = Teacher(hidden=column, weight=weight, kind="reverse_kl", temperature=temperature)
        outputs = head.values(*said, Tokens(teacher=teacher))
        assert outputs[1] is None
        torch.testing.assert_close([outputs[0].double(), outputs[2].double()], [expected, divergence], **close)
        microbatch = planned(weights)[0]
        folded = Folded(
            microbatch,
            lambda lp, _, near, divergence: ((lp * near).sum(-1) + divergence, {}),
            {"near": near},
            teacher=teacher,
        )
        summed, values = head.values(*said, folded)
        losses = (expected * near).sum(-1) + divergence
        torch.testing.assert_close(summed.share.double(), (losses * weights).sum(), **close)
        torch.testing.assert_close(values["divergence"].double(), divergence, **close)
        microbatch.loss(summed)


def reads_nothing_back(chunk: Any, model: Any) -> None:
    """The head runs on `meta`, which has shapes and no numbers: reading one raises."""
    from megatron_rl_loss import Folded, OutputHead, Tokens

    layer, labels = model.output_layer.to("meta"), torch.zeros(2, 5, dtype=torch.int64, device="meta")
    hidden = torch.zeros(5, 2, gpt_oracle.HIDDEN, device="meta", requires_grad=True)
    weights = torch.ones(2, 5)
    weights[0, 2:] = 0
    microbatch = planned(weights)[0]
    said = (hidden, layer, layer.weight, labels)
    head: Any = OutputHead(chunk_tokens=3, entropy=True)
    head.values(*said, Tokens(microbatch.tokens.mask))[0].sum().backward()
    folded = Folded(
        microbatch, lambda lp, entropy, near: (lp * near - entropy, {"seen": near}), {"near": hidden[..., 0].t()}
    )
    summed, values = head.values(*said, folded)
    microbatch.loss(summed, {"entropy": values["entropy"]}).backward()
    assert hidden.grad is not None
    with pytest.raises(ValueError, match="on the meta device: it must have values"):  # negative control
        head.values(*said, Tokens(labels))


def refuses(chunk: Any, model: Any) -> dict[str, str]:
    """Errors for output layers that do more, by name."""
    from megatron_rl_loss import Folded, OutputHead, Tokens

    layer, said = model.output_layer, {}
    layer.config = copy.copy(layer.config)  # that of other layers stays as it is
    vars(layer).setdefault("gtp_remat_size", 1)  # 0.18 and dev have none

    def tried(name: str, **more: Any) -> None:
        try:
            call(chunk, chunk_tokens=5, **more)
        except (ValueError, TypeError) as error:
            said[name] = str(error)

    tried("legal")
    tried("no labels", labels=None)
    for name, owner, attribute, value in (
        ("GTP", layer, "gtp_remat_size", 2),
        ("defer_embedding_wgrad_compute", layer.config, "defer_embedding_wgrad_compute", True),
        ("CPU offloading", layer.config, "cpu_offloading", True),
        ("overlap-moe-expert-parallel-comm", model.config, "overlap_moe_expert_parallel_comm", True),
        ("CUDA graphs of its layers", model.config, "cuda_graph_impl", "local"),
    ):
        with changed(owner, attribute, value):
            tried(name)
    layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros(gpt_oracle.VOCAB))
    tried("skip_bias_add")
    layer.skip_bias_add, layer.bias = False, None

    def _release_module_fp8_transpose_cache(*_: Any) -> None:
        """Megatron-FSDP's, which changes nothing."""

    for name, register, hook in (
        ("legal hook", layer.register_forward_hook, _release_module_fp8_transpose_cache),
        ("a softcap", layer.register_forward_hook, lambda module, inputs, output: (output[0].tanh(), output[1])),
        ("a backward hook", layer.register_full_backward_hook, lambda module, grad_in, grad_out: None),
        ("one before it", layer.register_full_backward_pre_hook, lambda module, grad_out: None),
    ):
        handle = register(hook)
        tried(name)
        handle.remove()
    tried("a kernel on the CPU", kernel="liger")
    tried("a kernel of one pass", kernel="liger", context=Folded(planned(torch.ones(8))[0], lambda lp, _: (lp, {})))
    not_a_teacher: Any = [torch.ones(1, 8, 2)]
    tried("a list as teacher", context=Tokens(teacher=not_a_teacher))
    try:
        OutputHead()(torch.nn.Linear(2, 2), IDS, labels=IDS)
    except ValueError as error:
        said["OutputHead on a Linear"] = str(error)
    layer.__class__ = type("Adapted", (type(layer),), {"forward": lambda self, *args, **kwargs: None})
    tried("Adapted")
    return said


CHECKS = (
    gives_megatrons_log_probs,
    runs_hooks_that_come_before,
    refuses,
    leaves_gradients_to_a_caller_who_sums_them,
    adds_to_the_main_gradient,
    keeps_rows_apart,
    takes_several_ids_and_a_teacher,
    reads_nothing_back,
)


EXPECTED = {
    "runs_hooks_that_come_before": ["layer", "runtime_gather_output", "weight"],
    "leaves_gradients_to_a_caller_who_sums_them": [True, False],  # what follows: unit/logprobs, "not summed"
    "adds_to_the_main_gradient": [False] * 3 + [True] * 3,
}

#: What the text must say of each layer or call.
REFUSED = {
    "no labels": "without labels",
    "a softcap": "a forward or backward hook",
    "a backward hook": "a forward or backward hook",
    "one before it": "a forward or backward hook",
    "a kernel on the CPU": "with tensors on the CPU",
    "a kernel of one pass": "with a teacher or Folded",
    "a list as teacher": "teacher is a list: it must be a Teacher",
    **{name: name for name in ("GTP", "defer_embedding_wgrad_compute", "CPU offloading", "skip_bias_add", "Adapted")},
    "overlap-moe-expert-parallel-comm": "overlap-moe-expert-parallel-comm: its schedule runs",
    "CUDA graphs of its layers": "CUDA graphs of its layers (--cuda-graph-impl)",
    "OutputHead on a Linear": "OutputHead on a Linear",
}


def test_the_head_of_a_model_and_output_layers_that_do_more() -> None:
    (outcomes,) = run_ranks(1, on_models)
    said = outcomes.pop("refuses")
    assert {name: value for name, value in outcomes.items() if value is not None} == EXPECTED
    assert set(said) == set(REFUSED)
    for name, text in REFUSED.items():
        assert text in said[name]
        assert THREE_PARTS.fullmatch(said[name])


def test_heads_that_cannot_work_are_refused() -> None:
    from megatron_rl_loss import OutputHead

    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        OutputHead(chunk_tokens=0)

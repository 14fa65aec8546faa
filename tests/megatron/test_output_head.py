"""The parts of the output layer in chunks, in a real Megatron GPTModel; whole steps with it are in test_matrix.py."""

import copy
import logging
from typing import Any

import gpt_oracle
import pytest
import torch
from ranks import run_ranks
from refusals import THREE_PARTS
from table_step import start
from tiny_gpt import Case, Layout


def on_models() -> dict[str, Any]:
    """What each check returns, on a model of its own."""
    from megatron.core.utils import unwrap_model
    from tiny_gpt import build

    start()
    case = Case(1, "sample_mean", "all", "mean", False, "plain", False, False)
    found: dict[str, Any] = {}
    for check in CHECKS:
        chunk = build(Layout(1, False, 1, 1, 1, 1), case, "packed").chunks[0]
        found[check.__name__] = check(chunk, unwrap_model(chunk))
    return found


def call(chunk: Any, **more: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ids = torch.arange(8)[None] % gpt_oracle.VOCAB
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=8, max_seqlen_kv=8, **dict.fromkeys(names, bounds))
    more = {"labels": ids} | more
    return chunk(ids, ids, None, packed_seq_params=packed, **more)


def gives_megatrons_log_probs(chunk: Any, model: Any) -> None:
    from megatron_rl_loss import OutputHead, Tokens

    stock = call(chunk)
    log_probs, entropy = call(chunk, output_processor=OutputHead(chunk_tokens=3, entropy=True))
    torch.testing.assert_close(log_probs, -stock, rtol=1e-6, atol=1e-6)
    logits = call(chunk, labels=None).double()
    torch.testing.assert_close(
        entropy.double(), torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-6, atol=1e-6
    )
    cold, none = call(chunk, output_processor=OutputHead(temperature=0.5))
    assert none is None
    ids = torch.arange(8)[None]
    expected = (logits / 0.5).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(cold.double(), expected, rtol=2e-6, atol=1e-6)
    narrow, _ = call(chunk, output_processor=OutputHead(vocab_size=12))
    of_twelve = logits[..., :12].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(narrow.double(), of_twelve, rtol=2e-6, atol=1e-6)
    keep = (torch.arange(gpt_oracle.VOCAB) < 12).expand(1, 8, -1)
    kept, _ = call(chunk, output_processor=OutputHead(), output_processor_context=Tokens(keep=keep))
    torch.testing.assert_close(kept, narrow)


def applies_mups_scale(chunk: Any, model: Any) -> None:
    from megatron_rl_loss import OutputHead

    model.config.use_mup, model.config.mup_output_mult = True, 0.25
    log_probs, _ = call(chunk, output_processor=OutputHead())
    torch.testing.assert_close(log_probs, -call(chunk), rtol=1e-6, atol=1e-6)
    model.config.mup_output_mult = 1.0
    assert (log_probs + call(chunk)).abs().max() > 0.01


def waits_for_its_weight(chunk: Any, model: Any) -> list[str]:
    """As DDP's hook does with --overlap-param-gather."""
    from megatron_rl_loss import OutputHead

    ran: list[str] = []
    model.output_layer.register_forward_pre_hook(lambda module, *_: ran.append(type(module).__name__))
    call(chunk, output_processor=OutputHead())
    return ran


def leaves_gradients_to_a_caller_who_sums_them(chunk: Any, model: Any) -> list[bool]:
    """Whether the gradient of the hidden states is summed over TP, as the layer says."""
    from megatron_rl_loss import OutputHead, output_head

    summed, plain = [], output_head.log_probs_from_hidden

    def look(*args: Any, **kwargs: Any) -> Any:
        summed.append(kwargs["tensor_parallel"].sum_gradient)
        return plain(*args, **kwargs)

    output_head.log_probs_from_hidden = look
    for disabled in (False, True):
        model.output_layer.disable_grad_reduce = disabled
        call(chunk, output_processor=OutputHead())
    output_head.log_probs_from_hidden = plain
    return summed


def adds_to_the_main_gradient(chunk: Any, model: Any) -> list[bool]:
    """Whether the head itself did, and not a hook on the parameter's own gradient."""
    from megatron_rl_loss import OutputHead

    weight, itself, sums = model.output_layer.weight, [], []
    for fused in (False, True):
        model.output_layer.gradient_accumulation_fusion, weight.grad_added_to_main_grad = fused, False
        weight.main_grad.zero_()
        call(chunk, output_processor=OutputHead())[0].sum().backward()
        itself.append(weight.grad_added_to_main_grad)
        sums.append(weight.main_grad.clone())
    assert sums[0].abs().max() > 0
    torch.testing.assert_close(*sums)
    return itself


def reducer_of(weights: torch.Tensor) -> Any:
    """Of samples as long as the rows of the weights."""
    from megatron_rl_loss import Samples
    from megatron_rl_loss.modes.names import resolve
    from megatron_rl_loss.reduction.sums import WeightedSum

    samples = Samples([torch.ones_like(row) for row in torch.atleast_2d(weights)])
    return WeightedSum(weights.reshape(-1), samples.local(0, 1), resolve("token_sum", divisor=1))


def scales_the_gradient_of_a_share(chunk: Any, model: Any) -> None:
    """As losses that a slicing gather gave need it (`Gathered`)."""
    from megatron_rl_loss import Folded, OutputHead

    weight, shares, gradients = model.output_layer.weight, [], []
    for scale in (1, 3):
        weight.main_grad.zero_()
        reducer = reducer_of(torch.ones(8))
        reducer.gradient_scale = scale
        folded = Folded(reducer=reducer, per_token_loss=lambda lp, _: (lp, {}))
        share, _ = call(chunk, output_processor=OutputHead(chunk_tokens=5), output_processor_context=folded)
        share.backward()
        shares.append(share.detach())
        gradients.append(weight.main_grad.clone())
    assert torch.equal(*shares)
    torch.testing.assert_close(gradients[1], 3 * gradients[0])


def keeps_rows_apart(chunk: Any, model: Any) -> None:
    """Hidden states are [s, b, h]; labels, masks, weights and inputs [b, s], and so is what comes out."""
    from megatron_rl_loss import Folded, OutputHead, Tokens

    rows, length = 2, 5
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(length, rows, gpt_oracle.HIDDEN, generator=generator)
    labels = torch.randint(gpt_oracle.VOCAB, (rows, length), generator=generator)
    values, weights = torch.randn(2, rows, length, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    logits = (hidden @ model.output_layer.weight.t()).double().transpose(0, 1)
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * mask
    head, said = OutputHead(chunk_tokens=3), {"hidden_states": hidden, "output_layer": model.output_layer}
    found, _ = head(**said, output_weight=None, labels=labels, context=Tokens(mask))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)

    def per_token(log_probs: Any, _: Any, values: Any) -> Any:
        return log_probs * values, {"seen": values}

    folded = Folded(mask, reducer=reducer_of(weights), per_token_loss=per_token, inputs={"values": values})
    share, of_tokens = head(**said, output_weight=None, labels=labels, context=folded)
    torch.testing.assert_close(share.double(), (expected * values * weights).sum(), rtol=1e-5, atol=1e-6)
    assert torch.equal(of_tokens["seen"], values * mask)

    values[1, 3], mask[1, 3] = torch.nan, True
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_rl_loss").addHandler(handler)
    head(**said, output_weight=None, labels=labels, context=folded)
    assert ["per_token_loss is nan at token 3 of sample 1" in line for line in lines] == [True]


def refuses(chunk: Any, model: Any) -> dict[str, str]:
    """What is said of output layers that do more."""
    from megatron_rl_loss import OutputHead

    head, layer, said = OutputHead(), model.output_layer, {}
    layer.config = copy.copy(layer.config)  # that of other layers stays as it is

    def tried(name: str, **more: Any) -> None:
        try:
            call(chunk, output_processor=head, **more)
        except ValueError as error:
            said[name] = str(error)

    tried("legal")
    tried("no labels", labels=None)
    for name, owner, attribute, value in (
        ("GTP", layer, "gtp_remat_size", 2),
        ("defer_embedding_wgrad_compute", layer.config, "defer_embedding_wgrad_compute", True),
        ("CPU offloading", layer.config, "cpu_offloading", True),
    ):
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        tried(name)
        setattr(owner, attribute, before)
    layer.skip_bias_add, layer.bias = True, torch.nn.Parameter(torch.zeros(gpt_oracle.VOCAB))
    tried("skip_bias_add")
    layer.skip_bias_add, layer.bias = False, None
    handle = layer.register_forward_pre_hook(lambda module, inputs: inputs)
    tried("a hook that changes its input")
    handle.remove()
    layer.__class__ = type("Adapted", (type(layer),), {"forward": lambda self, *args, **kwargs: None})
    tried("Adapted")
    return said


CHECKS = (
    gives_megatrons_log_probs,
    applies_mups_scale,
    waits_for_its_weight,
    refuses,
    leaves_gradients_to_a_caller_who_sums_them,
    adds_to_the_main_gradient,
    scales_the_gradient_of_a_share,
    keeps_rows_apart,
)


EXPECTED = {
    "waits_for_its_weight": ["ColumnParallelLinear"],
    "leaves_gradients_to_a_caller_who_sums_them": [True, False],  # what follows: unit/logprobs, "not summed"
    "adds_to_the_main_gradient": [False, True],
}


#: What the text must say of each layer or call.
REFUSED = {
    "no labels": "without labels",
    **{name: name for name in ("GTP", "defer_embedding_wgrad_compute", "CPU offloading", "skip_bias_add", "Adapted")},
    "a hook that changes its input": "a hook that changes its input",
}


def test_the_head_of_a_model_and_output_layers_that_do_more() -> None:
    (found,) = run_ranks(1, on_models)
    said = found.pop("refuses")
    assert {name: value for name, value in found.items() if value is not None} == EXPECTED
    assert set(said) == set(REFUSED)
    for name, text in REFUSED.items():
        assert text in said[name]
        assert THREE_PARTS.fullmatch(said[name])


def test_chunks_of_no_tokens_are_refused() -> None:
    from megatron_rl_loss.megatron.output_head import OutputHead

    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        OutputHead(chunk_tokens=0)

"""The head in the place of the output layer of real models: what wraps a model, and what calls its layer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gpt_oracle
import pytest
import torch
from missing import skip_without
from ranks import run_ranks
from refusals import THREE_PARTS
from table_step import start
from tiny_gpt import Layout, tiny_config, tiny_model
from tiny_hybrid import tiny_hybrid
from torch import Tensor

TOKENS = 16


def built(kind: str, tp: int, wrapped: bool = True, **settings: Any) -> Any:
    """A GPT of two blocks, or the HybridModel that is one; in Megatron's DDP, whose layers wait for their weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_token_prediction
    from packed_attention import layer_spec

    # By which main asks whether a layer is one of inference, and fails without Transformer Engine: none is.
    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
    tied = settings.pop("tied", False)
    config = tiny_config(
        Layout(tp, tp > 1, 1, 1, 1, 1), per_token=False, **{"num_layers": 4 if kind == "hybrid" else 2, **settings}
    )
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    depths = config.mtp_num_layers or 0
    if kind == "hybrid":
        model = tiny_hybrid(config, "/".join(["*-*-", *["*-"] * depths]), share_embeddings_and_output_weights=tied)
    else:
        block = layer_spec(SimpleNamespace(transformer=config))
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if depths else None
        for layer in mtp.layer_specs if mtp is not None else []:  # the stock local norm refuses sequence parallelism
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = block.layer_norm
        model = tiny_model(config, block, mtp_block_spec=mtp, share_embeddings_and_output_weights=tied)
    if not wrapped:
        return model.cuda()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1000
    )
    return DistributedDataParallel(config, ddp, model.cuda())


def inputs() -> tuple[tuple[Tensor, Tensor, None], dict[str, Any]]:
    from megatron_rl_loss import packed_seq_params

    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(gpt_oracle.VOCAB, (2, 1, TOKENS), generator=generator)
    bounds = torch.tensor([0, 6, TOKENS], dtype=torch.int32)
    packed = packed_seq_params(bounds)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    return (tokens, positions, None), {"labels": labels, "packed_seq_params": packed}


def whole_logits(model: Any, arguments: Any, named: Any) -> Tensor:
    """[b, s, vocabulary] on every rank, by the model's own layer."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits = model(*arguments, **named | {"labels": None})
    return gather_from_tensor_model_parallel_region(logits)


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad_buffer()
    loss.backward()
    model.finish_grad_sync()
    # The distributed optimizer keeps each rank's shard; with one data-parallel rank it is the whole.
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}


def worst(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to the largest entry of all: a tied or idle weight may be near 0."""
    largest = max(float(gradient.abs().max()) for gradient in left.values())
    return max(float((left[name] - right[name]).abs().max()) / largest for name in left)


def compared(kind: str, tp: int, settings: dict[str, Any]) -> dict[str, float]:
    """On a rank: errors of the head's values and gradients, beside those of the model's own logits."""
    from megatron_rl_loss import OutputHead

    start(tp)
    model = built(kind, tp, **settings)
    arguments, named = inputs()
    labels, depths = named["labels"], settings.get("mtp_num_layers")
    slope = torch.linspace(-1, 2, TOKENS)
    head = OutputHead(chunk_tokens=5, entropy=True)
    if depths:  # the losses of later depths are added, with the labels of the call
        log_probs = -model(*arguments, **named)
        entropy = torch.zeros_like(log_probs)
    else:
        log_p = whole_logits(model, arguments, named).double().log_softmax(-1)
        log_probs, entropy = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    expected = gradients_of(model, (log_probs * slope + entropy * slope.flip(0)).sum())
    ours = head(model, *arguments, **named)
    gradients = gradients_of(model, (ours[0] * slope + (0 if depths else ours[1] * slope.flip(0))).sum())
    errors = {"log_probs": float((ours[0] - log_probs).abs().max()), "gradients": worst(expected, gradients)}
    if not depths:
        errors["entropy"] = float((ours[1] - entropy).abs().max())
        ids = torch.stack([labels, labels.roll(1), labels.roll(2)], dim=-1)
        several, _ = head(model, *arguments, **named | {"labels": ids})
        errors["several"] = float((several - log_p.gather(-1, ids)).abs().max())
        errors |= kept_taught_and_folded(model, head, log_p, tp)
    plain = -model(*arguments, **named) if depths else whole_logits(model, arguments, named)
    assert plain.shape == ((1, TOKENS) if depths else (1, TOKENS, gpt_oracle.VOCAB))  # the model is as before
    return errors


def kept_taught_and_folded(model: Any, head: Any, log_p: Tensor, tp: int) -> dict[str, float]:
    """Errors among kept ids, of a teacher's divergence, and of a loss that the head itself sums, in one call each."""
    from megatron.core import parallel_state as mpu

    from megatron_rl_loss import Folded, Samples, Teacher, Tokens, plan_step

    arguments, named = inputs()
    labels, rank = named["labels"][..., None], mpu.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(7)
    is_kept = torch.rand(1, TOKENS, gpt_oracle.VOCAB, generator=generator) < 0.6
    is_kept.scatter_(-1, labels, torch.tensor(True).expand(labels.shape))
    column = torch.randn(1, TOKENS, 4, generator=generator)
    weight = torch.randn(gpt_oracle.VOCAB, 4, generator=generator)

    kept, *_ = head(model, *arguments, **named, context=Tokens(keep=is_kept.chunk(tp, -1)[rank]))
    kept_log_probs = log_p.masked_fill(~is_kept, -torch.inf).log_softmax(-1).gather(-1, labels)[..., 0]

    teacher = Teacher(hidden=column, weight=weight.chunk(tp)[rank].contiguous(), kind="reverse_kl")
    *_, divergence = head(model, *arguments, **named, context=Tokens(teacher=teacher))
    log_q = (column @ weight.t()).double().log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)

    plan = plan_step([Samples([torch.ones(TOKENS)])], "token_mean", dp_group=None)
    folded = Folded(plan[0], lambda log_probs, _, divergence: (divergence - log_probs, {}), teacher=teacher)
    summed, _ = head(model, *arguments, **named, context=folded)
    loss = plan[0].loss(summed).detach()
    mean = (expected - log_p.gather(-1, labels)[..., 0]).mean()
    return {
        "kept": float((kept - kept_log_probs).abs().max()),
        "divergence": float((divergence - expected).abs().max() / expected.abs().max()),
        "folded": float((loss - mean).abs() / mean.abs()),
    }


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "MuP": {"use_mup": True, "mup_base_hidden_size": 8, "mup_output_mult": 0.3},
    "MTP": {"mtp_num_layers": 1},
    "MTP of two depths, tied": {"mtp_num_layers": 2, "tied": True},
    "full recomputation": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
@pytest.mark.parametrize("feature", FEATURES)
def test_values_and_gradients_are_those_of_the_layer(kind: str, feature: str, tp: int) -> None:
    if kind == "hybrid":
        skip_without("HybridModel")
    for need in ("MTP", "MuP"):
        if need in feature:
            skip_without(need)
    for errors in run_ranks(tp, compared, kind, tp, FEATURES[feature]):
        assert max(errors.values()) < 2e-6, errors


def after_a_step(kind: str) -> float:
    """On a rank of two: how far the head's log-probs are from the layer's after a step whose weights still travel."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_rl_loss import OutputHead

    start()
    arguments, named = inputs()

    model = built(kind, 1)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=0.0, use_distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = get_megatron_optimizer(settings, [model])
    model.zero_grad_buffer()
    model(*arguments, **named).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    assert model.module.output_layer._forward_pre_hooks  # which wait; that they run: test_output_head.py
    with torch.no_grad():
        ours, _ = OutputHead(chunk_tokens=5)(model, *arguments, **named)
        return float((ours + model(*arguments, **named)).abs().max())


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_the_head_waits_for_a_weight_that_travels(kind: str) -> None:
    if kind == "hybrid":
        skip_without("HybridModel")
    assert max(run_ranks(2, after_a_step, kind)) < 2e-6


# ---- what stands around a call


def around(kind: str) -> tuple[dict[str, str], dict[str, float]]:
    """On a rank: what calls that fail say, and how far the log-probs after each, and gradients made again, are off."""
    from torch.utils.checkpoint import checkpoint

    from megatron_rl_loss import OutputHead

    start()
    arguments, named = inputs()
    model = built(kind, 1, wrapped=False)
    head, layer = OutputHead(chunk_tokens=5), model.output_layer
    before = -model(*arguments, **named).detach()
    said, errors = dict[str, str](), dict[str, float]()

    def log_probs(**changes: Any) -> Tensor:
        return head(model, *arguments, **named | changes)[0]

    def fails(name: str, undo: Callable[[], None] = lambda: None, **changes: Any) -> None:
        with pytest.raises((ValueError, ZeroDivisionError)) as raised:
            log_probs(**changes)
        undo()
        assert not {"forward", "compute_language_model_loss"} & (vars(layer).keys() | vars(model).keys())
        said[name], errors[name] = str(raised.value), float((log_probs().detach() - before).abs().max())

    fails("labels of another length", labels=named["labels"][:, :-1])
    fails("an error of a layer", model.decoder.register_forward_hook(lambda *_: 1 / 0).remove)
    fails("a head in a head", layer.register_forward_pre_hook(lambda *_: log_probs()).remove)
    if kind == "hybrid":  # a depth without a layer: the head waits for a call that never comes

        def without_depths() -> None:
            model.config.mtp_num_layers = None

        model.config.mtp_num_layers = 1
        fails("fewer calls", without_depths)

    other, seen = built(kind, 1, wrapped=False), list[Tensor]()  # of the same weights
    handle = model.decoder.register_forward_hook(lambda *_: seen.append(head(other, *arguments, **named)[0]))
    errors["two models at once"] = float((log_probs() - before).abs().max())
    handle.remove()
    errors["the inner of two"] = float((seen[0] - before).abs().max())
    model.eval()
    errors["evaluation"] = float((log_probs() - before).abs().max())
    model.train()

    def loss() -> Tensor:
        return (log_probs() * torch.linspace(-1, 2, TOKENS)).sum()

    gradients = []
    for made in (loss(), checkpoint(loss, use_reentrant=False)):
        model.zero_grad()
        made.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    errors["made again backward"] = worst(*gradients)
    return said, errors


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_a_model_is_as_before_a_call(kind: str) -> None:
    if kind == "hybrid":
        skip_without("HybridModel")
    ((said, errors),) = run_ranks(1, around, kind)
    assert max(errors.values()) < 2e-6, errors
    expected = {"a head in a head": "replaced already", "fewer calls": "no more than mtp_num_layers times"}
    assert set(said) == {"labels of another length", "an error of a layer", *expected} - {"fewer calls"} | (
        {"fewer calls"} if kind == "hybrid" else set()
    )
    for name in expected.keys() & said.keys():
        assert expected[name] in said[name]
        assert THREE_PARTS.fullmatch(said[name])

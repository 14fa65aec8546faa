"""The recipe for a Hugging Face checkpoint with the real Megatron-Bridge, against Hugging Face's own model.

A tiny random Qwen2 checkpoint, float32, one process; local layers in the place of Transformer Engine's. The step of
the recipe's loop gives the loss and gradients that `transformers` and the oracle give.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from logged_means import logged_means
from ranks import run_ranks, start_process_group
from torch import Tensor

MISSING = [name for name in ("megatron.bridge", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs Megatron-Bridge: no {' and no '.join(MISSING)}"),
]

ROWS, LENGTH, VOCABULARY = 4, 16, 64
#: Of Megatron's local layers on a CPU: what is fused elsewhere, and float32 throughout.
LOCAL = dict.fromkeys(
    ["gradient_accumulation_fusion", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion",
     "apply_rope_fusion", "persist_layer_norm", "cross_entropy_loss_fusion", "bf16", "fp16"], False,
) | {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "use_cpu_initialization": True}  # fmt: skip


def hugging_face_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).float()


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, labels, advantages and masks, [rows, length]; prompts of 3, ragged ends, and a row without a token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    at, ends = torch.arange(LENGTH), torch.tensor([[16], [9], [0], [12]])
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, LENGTH)
    return tokens[:, :-1], tokens[:, 1:], advantages, ((at >= 3) & (at < ends)).float()


def step_of_the_recipe(folder: str) -> tuple[dict[str, float], Tensor, Tensor]:
    """On a rank: the report of a step, and the gradients of the embedding and of the output layer."""
    import no_transformer_engine

    if importlib.util.find_spec("transformer_engine") is None:
        no_transformer_engine.install()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.utils import get_model_config
    from recipes.hf_checkpoint import load
    from table_step import aggregation, run_schedule

    from megatron_rl_loss import Samples, ZigzagBSHD
    from megatron_rl_loss.megatron import next_microbatch

    def local_layers(config: Any, vp_stage: int | None = None) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = next_microbatch(iterator)
        tokens, labels, advantages, _ = microbatch.data
        output = model(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels=labels)
        return output, lambda loss: microbatch.loss(advantages * loss)

    start_process_group()
    _, model = load(folder, transformer_layer_spec=local_layers, **LOCAL)
    halves = zip(*(values.chunk(2) for values in rows()), strict=True)

    def samples_of(batch: tuple[Tensor, ...]) -> Samples:
        return Samples(list(batch[3]), layout=ZigzagBSHD(*batch[3].shape))

    for chunk in model:
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    whole = aggregation(samples_of, mode="sample_mean")
    report = logged_means(run_schedule(forward_step, iter(halves), model, 2, whole.wrap_schedule))
    inner = model[0].module
    inner = inner.module if hasattr(inner, "module") else inner
    embedding, output = inner.embedding.word_embeddings.weight, inner.output_layer.weight
    return report, embedding.main_grad[:VOCABULARY].clone(), output.main_grad[:VOCABULARY].clone()


def test_the_step_is_that_of_hugging_faces_model(tmp_path: Path) -> None:
    model = hugging_face_model()
    model.save_pretrained(tmp_path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    ((report, embedding, output),) = run_ranks(1, step_of_the_recipe, str(tmp_path))
    model = model.double()
    tokens, labels, advantages, masks = rows()
    log_probs = model(tokens).logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    losses = -advantages.double() * log_probs
    loss = oracle.step_loss("sample_mean", [oracle.Sample(*pair) for pair in zip(losses, masks, strict=True)])
    loss.backward()  # type: ignore[no-untyped-call]
    bound = oracle.chain_error(2, 128)  # the longest sums: a row's logits, and tokens of the step
    assert report["pg_loss"] == pytest.approx(float(loss.detach()), rel=bound)
    for found, expected in ((embedding, model.model.embed_tokens.weight.grad), (output, model.lm_head.weight.grad)):
        assert float((found - expected).abs().max() / expected.abs().max()) < bound

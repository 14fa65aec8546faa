"""Megatron-Bridge's own `train_step` with our modes, from a checkout: BRIDGE_PATH=~/Megatron-Bridge/src.

Real: `train_step` with its reports, `masked_next_token_loss`, Megatron's schedule and DDP; of `recipes/bridge_grpo.py`
the forward step and the description of a batch. The model is a table of losses. Replaced: what its modules import for
checkpoints, configuration, logs and models (`checkouts.BRIDGE`).

And the recipe for a Hugging Face checkpoint with the installed Megatron-Bridge, against Hugging Face's own model.

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
from ranks import RankError, run_ranks, start_process_group
from torch import Tensor

MISSING = [name for name in ("megatron.bridge", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.slow

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

    from megatron_rl_loss import Samples, ZigzagBSHD, next_microbatch

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


@pytest.mark.skipif(bool(MISSING), reason=f"needs Megatron-Bridge: no {' and no '.join(MISSING)}")
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
    loss.backward()
    bound = oracle.chain_error(2, 128)  # the longest sums: a row's logits, and tokens of the step
    assert report["pg_loss"] == pytest.approx(float(loss.detach()), rel=bound)
    for actual, expected in ((embedding, model.model.embed_tokens.weight.grad), (output, model.lm_head.weight.grad)):
        assert float((actual - expected).abs().max() / expected.abs().max()) < bound


def steps_of_bridge(root: str, per_token: bool, own_inside: bool = False) -> dict[str, list[float]]:
    """On a rank: errors of the gradient and of the logged loss in `train_step`, of its loss and of ours by mode.

    `own_inside`: with Bridge's own forward step where ours is expected.
    """
    from bridge_batches import clipped_samples, grpo_batches, of_entries
    from checkouts import BRIDGE, Settings, load
    from step_samples import DIVISOR
    from table_step import aggregation, relative_error, start, table_model
    from world import CP, DP, STEP, TABLE, batches_of

    state = start(cp=CP)
    train, losses = load(BRIDGE, root, *(f"megatron.bridge.training.{name}" for name in ("train", "losses")))
    from megatron.core.process_groups_config import ProcessGroupCollection
    from recipes import bridge_grpo

    from megatron_rl_loss import next_microbatch
    from megatron_rl_loss.engines.bridge import attached

    cp_rank, batches = state.get_context_parallel_rank(), batches_of(state.get_data_parallel_rank())
    # It counts tokens in integers.
    flags = [
        oracle.Sample(sample.losses, (sample.mask != 0).float(), sample.rollout_id, sample.prompt_id) for sample in STEP
    ]
    train.get_num_microbatches = lambda: len(batches)
    cfg = Settings(
        train=Settings(empty_unused_memory_level=0, skip_sync_grad_norm_across_mp=True, micro_batch_size=1),
        optimizer=Settings(), ddp=Settings(), dataset=Settings(dataloader_type="single"), data_parallel_size=DP,
        model=Settings(seq_length=8), dist=Settings(use_decentralized_pg=True),
    )  # fmt: skip
    timer = Settings(start=lambda **_: None, stop=lambda: None)
    optimizer = Settings(zero_grad=lambda: None, step=lambda: (True, 0.0, 0))

    def stock(samples: list[oracle.Sample]) -> Any:
        masks = torch.cat([*(sample.mask for sample in samples), torch.zeros(1)])

        def forward_step(iterator: Iterator[Any], model: Any) -> Any:
            batch = next(iterator)
            numbers = (batch.data if own_inside else batch).local_numbers(cp_rank, CP)
            loss = losses.create_masked_next_token_loss_function(masks[numbers], False, False)
            return model(numbers.cuda()), loss

        return forward_step

    def ours(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = next_microbatch(iterator)
        return model(microbatch.data.local_numbers(cp_rank, CP).cuda()), microbatch.loss

    def errors(
        mode: str, forward_step: Any, samples: list[oracle.Sample], batches: Any = batches, factor: Any = None
    ) -> list[float]:
        """`factor`: of each entry of the table, the derivative of its token's loss."""
        table = TABLE if factor is None else of_entries()[0].tolist()
        model, divisor = table_model(table, per_token=per_token), oracle.divisor_of(mode, DIVISOR)
        logged, *_ = train.train_step(
            forward_step, iter(batches), [model], optimizer, Settings(step=lambda increment: None),
            Settings(cfg=cfg, timers=lambda *_, **__: timer), ProcessGroupCollection.use_mpu_process_groups(),
            train.get_forward_backward_func(pp_size=1, vp_size=None), None,
        )  # fmt: skip
        expected = torch.cat([*oracle.step_gradient(mode, samples, divisor), torch.zeros(1)])
        expected = expected if factor is None else expected * factor
        value = float(oracle.step_loss(mode, samples, divisor))
        (name,) = {"pg_loss", "lm loss"} & set(logged)
        in_value = abs(float(logged[name]) - value) / oracle.step_scale(mode, samples, divisor)
        return [relative_error(model.module.losses.main_grad.cpu(), expected), in_value]

    if own_inside:
        with attached(aggregation(mode="token_mean", with_per_token_loss=per_token)):
            errors("token_mean", stock(flags), flags)
    errors_by_name = {
        name: errors("token_mean", stock(samples), samples)
        for name, samples in (("token mean", flags), ("token mean of fractional masks", STEP))
    }
    for mode in oracle.MODES:
        divisor = oracle.divisor_of(mode, DIVISOR)
        own = aggregation(mode=mode, divisor=divisor, with_per_token_loss=per_token)
        with attached(own):
            errors_by_name[mode] = errors(mode, ours, STEP)
        assert own._proof.outcome == "proved"
    clipped, factor = clipped_samples()
    packed = grpo_batches(state.get_data_parallel_rank())
    train.get_num_microbatches = lambda: len(packed)
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        own = aggregation(bridge_grpo.samples_of, mode=mode, with_per_token_loss=per_token)
        with attached(own):
            errors_by_name[f"recipe, {mode}"] = errors(mode, bridge_grpo.forward_step, clipped, packed, factor)
        assert own._proof.outcome == "proved"
    return errors_by_name


def test_its_own_forward_step_is_refused_on_all_ranks() -> None:
    from checkouts import BRIDGE, checkout

    with pytest.raises(RankError, match="a loss that this micro-batch did not hand out") as caught:
        run_ranks(4, steps_of_bridge, checkout(BRIDGE), False, True)
    assert {*caught.value.errors} == {*range(4)}


@pytest.mark.parametrize("per_token", [False, True])
def test_its_train_step_is_exact_in_every_mode(per_token: bool, record_property: Any) -> None:
    """Bridge's own loss is the token mean only with per-token loss, which Bridge forces for finetuning under CP."""
    from checkouts import BRIDGE, checkout, record_errors

    results = run_ranks(4, steps_of_bridge, checkout(BRIDGE), per_token)
    ours = [name for name in results[0] if name in oracle.MODES or name.startswith("recipe, ")]
    assert len(ours) == len(oracle.MODES) + 3
    assert max(max(of_rank[name]) for of_rank in results for name in ours) < 2e-6
    theirs = {name: error for name, (error, _) in results[0].items() if name not in ours}
    assert [error < 2e-6 for error in theirs.values()] == [per_token, False]
    assert all(error < 2e-6 or error > 1e-2 for error in theirs.values())
    for name, error in theirs.items():
        record_errors(
            record_property, BRIDGE, name + ", per-token loss" * per_token, error, results[0]["token_mean"][0]
        )
    worst = max(results[0][mode][0] for mode in oracle.MODES)
    record_errors(record_property, BRIDGE, "every mode", ours=worst)

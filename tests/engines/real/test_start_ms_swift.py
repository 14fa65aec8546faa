"""ms-swift from its own start: MS_SWIFT_PATH=~/ms-swift, and its transformers, datasets, peft, accelerate, modelscope.

Real: the arguments of `megatron rlhf` as its own parser and dataclasses read them, the import of `--external_plugins`
there, `MegatronRLHF` with its model's config, tokenizer, template and dataset, Megatron's groups as ms-swift
initialises them, `MegatronGRPOTrainer` from its `__init__` through `train`: rewards, encoding, log-probs of the policy
and of the reference, advantages, and a training step.
Stubbed: the GPU, the sampler with its weight transfer, mcore-bridge, checkpoints, and the model, which is a table of
logits whose optimizer keeps gradients; torchrun, whose environment the ranks have.
"""

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from bigram_step import TOLERANCE, VOCABULARY, bigram_model, make_table
from checkouts import MS_SWIFT, Settings, checkout, record_errors, stand_in
from logit_table import KeepsGradients
from ranks import run_ranks
from table_step import relative_error

for package in ("transformers", "datasets", "peft", "accelerate", "modelscope"):
    pytest.importorskip(package)
pytestmark = pytest.mark.slow

_NOT_USED = ("aiohttp", "dacite", "fastapi", "json_repair", "mcore_bridge", "msgspec", "openai", "uvicorn", "trl")
_ALWAYS = ("rlhf_trainers.vllm_client", "rlhf_trainers.grpo_trainer", "ray.megatron.checkpoint_engine")
ENGINE = replace(MS_SWIFT, passed_by=(), stand_ins=(*_NOT_USED, *(f"swift.{name}" for name in _ALWAYS)), replaced=())
DP, PROMPTS, SAMPLES = 2, 4, 4
OPTIONS = "--rlhf_type grpo --loss_type dapo --reward_funcs length --scale_rewards none --beta 0.03 --use_vllm true "
OPTIONS += f"--vllm_mode server --use_gym_env false --num_generations {SAMPLES} --micro_batch_size 2 --max_length 32 "
OPTIONS += f"--global_batch_size {PROMPTS * SAMPLES} --train_iters 1 --padding_free true --attention_backend local "
OPTIONS += "--model_type qwen2 --template dummy --torch_dtype float32 --tuner_type full --finetune true "
OPTIONS += "--ddp_backend gloo --check_model false --dataloader_num_workers 0 --split_dataset_ratio 0 --temperature 1"
REWARDS = """from swift.rewards import ORM, orms


class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(text.split())) for text in completions]


orms["length"] = Length
"""
PLUGIN = """from megatron_rl_loss.engines.ms_swift import aggregate

aggregate("prompt_mean")
"""


def response_of(prompt: str, number: int) -> list[int]:
    """Tokens of a sample; other lengths within a prompt and between prompts."""
    return [1 + (number + 2 * k + len(prompt)) % (VOCABULARY - 1) for k in range(1 + (3 * number + len(prompt)) % 7)]


def write_inputs(folder: Path) -> list[str]:
    """A model's config and tokenizer, a dataset and the plugins; the command's options for them."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    tokenizers: Any = importlib.import_module("tokenizers")

    sizes = dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_key_value_heads"], 1)
    config: Any = Qwen2Config(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, **sizes)
    config.save_pretrained(folder / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict.fromkeys(["eos_token", "pad_token", "unk_token"], "0")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "model")
    prompts = [" ".join("1234"[: i + 1]) for i in range(PROMPTS)]
    rows = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
    for name, text in {"data.jsonl": "\n".join(rows), "rewards.py": REWARDS, "plugin.py": PLUGIN}.items():
        (folder / name).write_text(text)
    paths = {"model": "model", "dataset": "data.jsonl", "output_dir": "output"}
    return [word for name, path in paths.items() for word in (f"--{name}", str(folder / path))]


def stub(encoded: list[tuple[str, Any]], model: Any) -> None:
    """What a machine without a GPU, mcore-bridge and a sampler lacks; `encoded` gets prompts and rows as they are."""
    names = ("base", "rollout_mixin", "grpo_trainer", "rlhf_mixin", "utils")
    modules: list[Any] = [importlib.import_module(f"swift.megatron.trainers.{name}") for name in names]
    base, rollout, trainer, mixin, utils = modules
    model.module.config.bridge = Settings(load_weights=lambda *_: None)
    optimizer: Any = KeepsGradients(model)
    optimizer.param_groups, optimizer.scale_loss = [{"lr": 0.0, "params": [None]}], None
    vars(base).update(
        get_mcore_model=lambda *_: [model.module], wrap_model=lambda *_: [model],
        prepare_mcore_model=lambda args, chunk: chunk, warmup_jit_function=lambda *_: None,
    )  # fmt: skip
    mixin.get_mcore_model = lambda *_: [bigram_model().module]
    base.BaseMegatronTrainer.get_optimizer_and_scheduler = lambda self: (
        optimizer,
        SimpleNamespace(step=lambda increment: None),
    )
    base.BaseMegatronTrainer.save_checkpoint = lambda self: None
    rollout.is_vllm_available = rollout.check_vllm_version_ge = lambda *_: True
    for module in (rollout, trainer):
        module.broadcast_object_list = lambda values, **_: values
    # accelerate gathers nothing on CPUs
    utils.hf_gather = partial(utils.gather, group=dist.group.WORLD)
    utils.hf_gather_object = partial(utils.gather_object, group=dist.group.WORLD)
    rollout.MegatronRolloutMixin._move_model_to_vllm = lambda self: None
    rollout.MegatronRolloutMixin._rollout = lambda self, samples: samples
    rollout.MegatronRolloutMixin._postprocess_rollout_outputs = lambda self, samples, outputs: answered(samples)
    encode = trainer.encode_sample

    def encode_sample(sample: Any, template: Any) -> Any:
        row = encode(sample, template)
        encoded.append((sample.messages[0]["content"], {name: list(row[name]) for name in ("input_ids", "labels")}))
        return row

    trainer.encode_sample = encode_sample


def answered(samples: list[Any]) -> list[Any]:
    """The samples with a sampler's responses; those of a prompt follow each other."""
    for number, sample in enumerate(samples):
        ids = response_of(sample.messages[0]["content"], number % SAMPLES)
        sample.response_token_ids, sample.finish_reason = [ids], "stop"
        sample.messages = [*sample.messages, {"role": "assistant", "content": " ".join(map(str, ids))}]
    return samples


def main(root: str, inputs: list[str], plugins: list[str]) -> tuple[list[tuple[str, Any]], torch.Tensor, str]:
    """On a rank, as the process that torchrun starts: prompts and rows of its samples, the step's gradient,
    the proof's outcome.
    """
    stand_in(ENGINE, root)
    sys.path.append(root)
    rlhf = importlib.import_module("swift.megatron.pipelines.train.rlhf")
    vars(importlib.import_module("swift.megatron.arguments.megatron_args"))["require_version"] = lambda *_: None
    vars(importlib.import_module("swift.megatron.init"))["_patch_mcore_bridge"] = lambda *_: None
    prepare, encoded, made = rlhf.MegatronRLHF.prepare_trainer, list[tuple[str, Any]](), list[Any]()

    def prepare_trainer(self: Any) -> Any:  # once Megatron's groups are there
        made.append(bigram_model())
        stub(encoded, made[0])
        return prepare(self)

    rlhf.MegatronRLHF.prepare_trainer = prepare_trainer
    rlhf.megatron_rlhf_main([*OPTIONS.split(), *inputs, "--external_plugins", *plugins])
    of_ours = importlib.import_module("megatron_rl_loss.engines.replacing").installed("ms-swift")
    return encoded, made[0].module.losses.main_grad.clone(), "" if of_ours is None else of_ours.proof.outcome


def right_gradient(rows: list[tuple[str, Any]], mode: str) -> torch.Tensor:
    """Of the first step of GRPO, in which the policy is its reference, with rewards that are response lengths."""
    table, samples = make_table().double().requires_grad_(), []
    prompts = [prompt for prompt, _ in rows]
    rewards = [sum(label != -100 for label in row["labels"]) for _, row in rows]
    for i, (prompt, row) in enumerate(rows):
        of_prompt = [reward for reward, other in zip(rewards, prompts, strict=True) if other == prompt]
        advantage = rewards[i] - sum(of_prompt) / len(of_prompt)
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])[1:] != -100
        log_probs = table.log_softmax(-1)[ids[:-1], ids[1:]]
        losses = -advantage * (log_probs - log_probs.detach()).exp()
        samples.append(oracle.Sample(losses, mask.float(), None, prompts.index(prompt)))
    (gradient,) = torch.autograd.grad(oracle.step_loss(mode, samples, None), table)
    return gradient


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_launch_with_the_plugin_option(is_ours: bool, record_property: Any, tmp_path: Path) -> None:
    inputs, plugins = write_inputs(tmp_path), [str(tmp_path / name) for name in ("rewards.py", "plugin.py")]
    outcomes = run_ranks(DP, main, checkout(MS_SWIFT), inputs, plugins[: 1 + is_ours])
    rows = [row for of_rank, *_ in outcomes for row in of_rank]
    assert [outcome for *_, outcome in outcomes] == ["proved" if is_ours else ""] * DP
    assert len(rows) == PROMPTS * SAMPLES
    errors = {
        mode: max(relative_error(g.view(VOCABULARY, -1), right_gradient(rows, mode)) for _, g, _ in outcomes)
        for mode in ("prompt_mean", "token_mean")
    }
    if is_ours:
        assert errors["prompt_mean"] < TOLERANCE
        record_errors(record_property, MS_SWIFT, "started: `dapo`", ours=errors["prompt_mean"])
    else:
        assert errors["prompt_mean"] > 1e-2
        record_errors(record_property, MS_SWIFT, "started: `dapo`", own=errors["token_mean"])

"""ms-swift from its own start: MS_SWIFT_PATH=~/ms-swift, and its transformers, datasets, peft, accelerate, modelscope.

Real: `megatron rlhf` as its console script runs it, torchrun and its ranks, the arguments as ms-swift's own parser and
dataclasses read them, the import of `--external_plugins` there, `MegatronRLHF` with its model's config, tokenizer,
template and dataset, Megatron's groups as ms-swift initialises them, `MegatronGRPOTrainer` from its `__init__` through
`train`: rewards, encoding, log-probs of the policy and of the reference, advantages, training steps, each with
ms-swift's `offload_context` before it and its `evaluate` after it, its checkpoint of Megatron's shards, and another
launch from it.
With `--use_ray`, the process that the command starts, its Ray workers and its driver's `GRPOTrainer`, up to a step.
Stubbed: the GPU, the sampler with its weight transfer, mcore-bridge, and the model, a table of logits.
"""

import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from bigram_step import VOCABULARY, bigram_model, k3, make_table
from checkouts import MS_SWIFT, Settings, checkout, record_errors, stand_in
from fork_server import PYTHONPATH
from ranks import run_ranks
from ray_workers import LIMIT, after_import, lines_of, local_ray, nothing, of_workers, stub_names
from refusals import outcome_of
from start_stages import (
    TOLERANCE,
    ConstantRate,
    Start,
    adam,
    assert_said,
    errors_of_steps,
    record_stages,
    right_gradients,
)

ray: Any = pytest.importorskip("ray")
for package in ("transformers", "datasets", "peft", "accelerate", "modelscope"):
    pytest.importorskip(package)
pytestmark = pytest.mark.slow

_NOT_USED = ("aiohttp", "dacite", "fastapi", "json_repair", "mcore_bridge", "msgspec", "openai", "uvicorn", "trl")
_ALWAYS = ("rlhf_trainers.vllm_client", "rlhf_trainers.grpo_trainer")
ENGINE = replace(MS_SWIFT, passed_by=(), stand_ins=(*_NOT_USED, *(f"swift.{name}" for name in _ALWAYS)), replaced=())
DP, PROMPTS, SAMPLES = 2, 4, 4
OPTIONS = "--rlhf_type grpo --loss_type dapo --reward_funcs length --scale_rewards none --beta 0.03 --use_vllm true "
OPTIONS += f"--vllm_mode server --use_gym_env false --num_generations {SAMPLES} --micro_batch_size 2 --max_length 32 "
OPTIONS += f"--global_batch_size {PROMPTS * SAMPLES} --train_iters 1 --padding_free true --attention_backend local "
OPTIONS += "--model_type qwen2 --template dummy --torch_dtype float32 --tuner_type full --finetune true "
OPTIONS += "--ddp_backend gloo --check_model false --dataloader_num_workers 0 --split_dataset_ratio 0 --temperature 1 "
OPTIONS += "--save_safetensors false"
BETA = 0.03
#: Of launches that sleep, evaluate and save.
STAGES = (
    "--offload_model true --offload_optimizer true --eval_iters 1 --eval_steps 1 --save_steps 2 --save_strategy steps"
)
TEXTS = [" ".join("1234"[: i + 1]) for i in range(PROMPTS)]
GRADIENTS = "TEST_GRADIENTS"
IN_RANKS = """import os

if "LOCAL_RANK" in os.environ:
    import ray_workers

    ray_workers.set_up_worker()
"""
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


def options_of(folder: Path, plugins: list[str], steps: int = 1, resumed: bool = False) -> dict[str, list[str]]:
    """The command's options, each with its words."""
    words, paths = OPTIONS.split(), {"--model": "model", "--dataset": "data.jsonl", "--output_dir": "output"}
    if steps > 1:
        words, paths = words + STAGES.split(), paths | {"--val_dataset": "data.jsonl"}
    options = {name: [value] for name, value in zip(words[::2], words[1::2], strict=True)}
    options |= {name: [str(folder / path)] for name, path in paths.items()} | {"--external_plugins": plugins}
    if resumed:
        (tracker,) = (folder / "output").rglob("latest_checkpointed_iteration.txt")
        options |= {"--mcore_model": [str(tracker.parent)], "--finetune": ["false"]}
    return options | {"--train_iters": [str(steps)]}


def write_inputs(folder: Path) -> None:
    """A model's config and tokenizer, a dataset and the plugins."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    tokenizers: Any = importlib.import_module("tokenizers")

    sizes = dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_key_value_heads"], 1)
    config: Any = Qwen2Config(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, **sizes)
    config.save_pretrained(folder / "model")
    # transformers may take Qwen2's tokenizer for it, which knows no other word than these; ms-swift encodes an "a".
    ids = {str(i): i for i in range(VOCABULARY - 1)} | {"a": VOCABULARY - 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict.fromkeys(["eos_token", "pad_token", "unk_token"], "0")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "model")
    rows = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in TEXTS]
    for name, text in {"data.jsonl": "\n".join(rows), "rewards.py": REWARDS, "plugin.py": PLUGIN}.items():
        (folder / name).write_text(text)


def stub() -> None:
    """What a machine without a GPU, mcore-bridge and a sampler lacks, once the engine imports the module of it."""
    model: list[Any] = []  # made once Megatron's groups are there

    def make_model(*_: Any, **__: Any) -> list[Any]:
        model[:] = [bigram_model(use_distributed_optimizer=True)]
        model[0].module.config.bridge = Settings(load_weights=lambda *_: None)
        return [model[0].module]

    def optimizer_and_scheduler(self: Any) -> tuple[Any, Any]:
        return written(adam(model[0])), ConstantRate()

    def base(module: Any) -> None:
        vars(module).update(
            get_mcore_model=make_model, wrap_model=lambda *_: list(model),
            prepare_mcore_model=lambda args, chunk: chunk, warmup_jit_function=lambda *_: None,
        )  # fmt: skip
        module.BaseMegatronTrainer.get_optimizer_and_scheduler = optimizer_and_scheduler
        module.BaseMegatronTrainer.evaluate = evaluation_of(module.BaseMegatronTrainer.evaluate)

    def rollouts(module: Any) -> None:
        module.is_vllm_available = module.check_vllm_version_ge = lambda *_: True
        module.broadcast_object_list = lambda values, **_: values
        mixin = module.MegatronRolloutMixin
        mixin._move_model_to_vllm = lambda self: None
        mixin._rollout = rollout
        mixin._postprocess_rollout_outputs = lambda self, samples, outputs: answered(samples)

    def gathers(module: Any) -> None:  # accelerate gathers nothing on CPUs
        module.hf_gather = lambda *args: module.gather(*args, group=dist.group.WORLD)
        module.hf_gather_object = lambda *args: module.gather_object(*args, group=dist.group.WORLD)

    def of_driver(module: Any) -> None:
        module.GRPOTrainer._generate = lambda self, samples: []
        module.GRPOTrainer._postprocess_rollout = lambda self, samples, outputs: answered(samples)
        module.GRPOTrainer.ckpt_manager = SimpleNamespace(sync_weights=lambda **_: None)

    def checkpoints(module: Any) -> None:  # of mcore-bridge, which has it from Megatron
        module.unwrap_model = importlib.import_module("megatron.core.utils").unwrap_model

    stub_names("swift.megatron.arguments.megatron_args", require_version=nothing)
    stub_names("swift.megatron.init", _patch_mcore_bridge=nothing)
    stub_names("swift.megatron.trainers.rlhf_mixin", get_mcore_model=lambda *_: [bigram_model().module])
    stub_names("swift.megatron.trainers.grpo_trainer", broadcast_object_list=lambda values, **_: values)
    changes: dict[str, Callable[[Any], None]] = {
        "megatron.utils.megatron_lm_utils": checkpoints,
        "megatron.trainers.base": base,
        "megatron.trainers.rollout_mixin": rollouts,
        "megatron.trainers.utils": gathers,
        "ray.megatron.grpo_trainer": of_driver,
    }
    for name, change in changes.items():
        after_import(f"swift.{name}", change)


def rollout(trainer: Any, samples: list[Any]) -> list[Any]:
    """As beside a sampler on the same GPU."""
    if trainer.args.offload_model:
        with trainer.offload_context():
            return samples
    return samples


def written(optimizer: Any) -> Any:
    """The optimizer, which writes all gradients so far into the file of its rank."""
    own_step = optimizer.step

    def step() -> Any:
        result = own_step()
        torch.save(optimizer.gradients, Path(os.environ[GRADIENTS], f"rank{os.environ['RANK']}.pt"))
        return result

    optimizer.step = step
    return optimizer


def evaluation_of(own: Any) -> Any:
    def evaluate(self: Any, val_data_iterator: Any) -> Any:
        metrics = own(self, val_data_iterator)
        print("EVALUATED", {name: float(value) for name, value in metrics.items()}, flush=True)
        return metrics

    return evaluate


def answered(samples: list[Any]) -> list[Any]:
    """The samples with a sampler's responses; those of a prompt follow each other."""
    for number, sample in enumerate(samples):
        ids = response_of(sample.messages[0]["content"], number % SAMPLES)
        sample.response_token_ids, sample.finish_reason = [ids], "stop"
        sample.messages = [*sample.messages, {"role": "assistant", "content": " ".join(map(str, ids))}]
    return samples


def right_gradient(mode: str, table: torch.Tensor) -> torch.Tensor:
    """Of a step of GRPO, with rewards that are response lengths; the reference is the policy before the first step."""
    table, samples, distances = table.clone().requires_grad_(), list[oracle.Sample](), list[oracle.Sample]()
    for number, prompt in enumerate(TEXTS):
        responses = [response_of(prompt, i) for i in range(SAMPLES)]
        for response in responses:
            advantage = len(response) - sum(map(len, responses)) / SAMPLES
            ids = torch.tensor([*map(int, prompt.split()), *response])
            log_probs = table.log_softmax(-1)[ids[:-1], ids[1:]]
            mask = torch.arange(1, len(ids)) >= len(ids) - len(response)
            losses = -advantage * (log_probs - log_probs.detach()).exp()
            samples.append(oracle.Sample(losses, mask.float(), None, number))
            kl = k3(log_probs, make_table().double().log_softmax(-1)[ids[:-1], ids[1:]])
            distances.append(oracle.Sample(kl, mask.float(), None, number))
    loss = oracle.step_loss(mode, samples, None) + BETA * oracle.step_loss("token_mean", distances, None)
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient


def by_torchrun(root: str, folder: Path, plugins: list[str], *further: Any) -> list[str]:
    """`megatron rlhf`, as its console script, which starts torchrun; the lines that are printed."""
    (folder / "sitecustomize.py").write_text(IN_RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"NPROC_PER_NODE": str(DP), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", GRADIENTS: str(folder)}
    variables |= {"PYTHONPATH": os.pathsep.join([str(folder), PYTHONPATH, root])}
    script = "from swift.cli._megatron.main import cli_main; cli_main()"
    options = [word for name, value in options_of(folder, plugins, *further).items() for word in (name, *value)]
    ran = subprocess.run(
        [sys.executable, "-c", script, "rlhf", *options], env=os.environ | variables | of_workers(__name__, root),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout.partition("ChildFailedError")[0][-5000:]
    assert ("EVALUATED" in ran.stdout) == bool(further)
    return lines_of(ran.stdout)


def drive(root: str, config: str) -> list[str]:
    """The process that `megatron rlhf --use_ray --config ...` starts, to the end of a step; the workers' lines."""
    os.environ[GRADIENTS] = str(Path(config).parent)
    with local_ray(__name__, root, gpus=DP, by_engine=True) as lines:
        command = importlib.util.find_spec("swift.cli._megatron.rlhf")
        assert command is not None
        sys.argv = ["rlhf.py", "--use_ray", "--config", config]
        printed: list[str] = []
        shutdown = ray.shutdown
        ray.shutdown = lambda: printed.extend(lines())  # the command ends with it
        try:
            runpy.run_path(str(command.origin), run_name="__main__")
        finally:
            ray.shutdown = shutdown
        return printed


def by_ray(root: str, folder: Path, plugins: list[str]) -> list[str]:
    config, given = folder / "grpo.yaml", options_of(folder, plugins)
    options = [f"{name.removeprefix('--')}: {words[0] if len(words) == 1 else words}" for name, words in given.items()]
    config.write_text("\n".join([*options, f"train: {{gpus: {DP}}}", "rollout: {gpus: 0}"]))
    (lines,) = run_ranks(1, drive, root, str(config))
    return lines


def errors_of(folder: Path, mode: str, steps: int, before: int = 0) -> list[float]:
    """Of the gradients of a launch's steps, by those of steps after `before` others."""
    by_rank = [torch.load(folder / f"rank{rank}.pt") for rank in range(DP)]
    right = right_gradients([partial(right_gradient, mode)] * (before + steps), make_table())
    return errors_of_steps(by_rank, right[before:])


def plugins_in(folder: Path, is_ours: bool) -> list[str]:
    write_inputs(folder)
    return [str(folder / name) for name in ("rewards.py", "plugin.py")][: 1 + is_ours]


PROVED = "prompt_mean on ms-swift's policy loss, token_mean on kl"


def test_a_launch_without_the_plugin(record_property: Any, tmp_path: Path) -> None:
    lines = by_torchrun(checkout(MS_SWIFT), tmp_path, plugins_in(tmp_path, is_ours=False))
    assert_said(lines, "ms-swift", PROVED, is_ours=False)
    assert errors_of(tmp_path, "prompt_mean", 1)[0] > 1e-2
    record_errors(record_property, MS_SWIFT, "started: `dapo`", own=errors_of(tmp_path, "token_mean", 1)[0])


@pytest.mark.timeout(2 * LIMIT + 100)
def test_a_launch_with_the_plugin_option(record_property: Any, tmp_path: Path) -> None:
    """Two steps, each after a sleep, with evaluations, and another launch for a third from their checkpoint."""
    root, plugins = checkout(MS_SWIFT), plugins_in(tmp_path, is_ours=True)
    assert_said(by_torchrun(root, tmp_path, plugins, 2), "ms-swift", PROVED)
    first, woken = errors_of(tmp_path, "prompt_mean", 2)
    assert_said(by_torchrun(root, tmp_path, plugins, 3, True), "ms-swift", PROVED)
    (resumed,) = errors_of(tmp_path, "prompt_mean", 1, before=2)
    record_errors(record_property, MS_SWIFT, "started: `dapo`", ours=first)
    record_stages(record_property, MS_SWIFT, None, Start(None, first, woken, resumed))


def test_a_launch_by_ray(tmp_path: Path) -> None:
    assert_said(by_ray(checkout(MS_SWIFT), tmp_path, plugins_in(tmp_path, is_ours=True)), "ms-swift", PROVED)
    assert errors_of(tmp_path, "prompt_mean", 1)[0] < TOLERANCE


def load_plugin(root: str, plugin: str) -> str:
    """On a rank: what a plugin says in a command that is not Megatron-SWIFT's."""
    stand_in(ENGINE, root)
    sys.path.append(root)
    arguments = importlib.import_module("swift.arguments")
    return outcome_of(lambda: arguments.BaseArguments._import_external_plugins(Settings(external_plugins=[plugin])))


def test_a_plugin_is_refused_where_another_trainer_runs(tmp_path: Path) -> None:
    """`swift rlhf` and `swift rollout` import plugins, too."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (refused,) = run_ranks(1, load_plugin, checkout(MS_SWIFT), str(tmp_path / "plugin.py"))
    assert refused.startswith("ValueError: aggregate(...) in a process without Megatron-SWIFT")

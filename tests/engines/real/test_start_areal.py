"""AReaL from its own start: AREAL_PATH=~/AReaL.

Real: AReaL's command line and config, `_init_scheduler` and `_create_train_engine` of the page's trainer, the scheduler
(local, Ray's and Slurm's with the script that it submits), its workers' server in processes of their own, which import
the page's class by path, the controller's deal of trajectory groups, `create_process_group`, `initialize`,
`compute_logp`, `ppo_update`, `offload`, `onload`, `save` and `load` of the engine, all that a training step calls, and
Megatron's optimizer and checkpoints. Stubbed: the GPU, `torch_memory_saver`, which moves a GPU's memory, Hugging Face's
files, the model, a table of logits, and Slurm's own commands with the container (`slurm_here`).
"""

import contextlib
import dataclasses
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_workers
import slurm_here
import torch
from areal_groups import groups_of_rank
from bigram_step import CLIP_HIGH, CLIP_LOW, PROMPTS, bigram_model, make_batch, right_log_probs
from checkouts import AREAL, checkout
from fork_server import PYTHONPATH
from ranks import run_ranks
from refusals import outcome_of
from start_stages import (
    ADAM,
    LEARNING_RATE,
    Launch,
    assert_said,
    errors_on_rows,
    keeping_gradients,
    record_stages,
    run_stages,
)
from table_step import relative_error

_NEEDED: tuple[str, ...] = ("aiofiles", "aiohttp", "colorlog", "flask", "httpx", "hydra", "lark", "orjson")
for _package in (*_NEEDED, "tenacity", "torchdata", "uvloop"):
    pytest.importorskip(_package, reason=f"AReaL's workers import {_package}, which is not installed")
pytestmark = pytest.mark.slow

DP = 2
_NOT_USED: tuple[str, ...] = ("anthropic", "datasets", "fastapi", "huggingface_hub", "litellm", "mbridge", "numba")
_NOT_USED += (
    "openai",
    "pandas",
    "PIL",
    "pybase64",
    "safetensors",
    "swanlab",
    "tensorboardX",
    "trackio",
    "transformers",
)
_NOT_USED += ("uvicorn", "wandb", "megatron.bridge", "areal.experimental.training_service", "areal.v2")
_NOT_USED += ("areal.engine.sglang_remote", "areal.engine.vllm_remote")
ENGINE = dataclasses.replace(AREAL, passed_by=(), stand_ins=_NOT_USED)
SETTINGS = [
    *(f"actor.backend=megatron:d{DP}p1t1", "actor.dtype=float32", "actor.path=none", "+actor.mb_spec.n_mbs=3"),
    *(f"actor.eps_clip={CLIP_LOW}", f"+actor.eps_clip_higher={CLIP_HIGH}", f"actor.optimizer.lr={LEARNING_RATE}"),
    *(f"actor.optimizer.{name.removeprefix('adam_')}={ADAM[name]}" for name in ("adam_eps", "weight_decay")),
    *(f"actor.optimizer.beta{i}={ADAM[f'adam_beta{i}']}" for i in (1, 2)),
    *("actor.optimizer.gradient_clipping=0.0", "actor.optimizer.warmup_steps_proportion=0"),
    "+actor.megatron.disable_grad_buffers_cpu_backup=true",
]


def stub() -> None:
    """What a machine without GPUs and checkpoints lacks."""
    engine, nothing = importlib.import_module("areal.engine.megatron_engine"), ray_workers.nothing
    vars(engine).update(
        load_hf_tokenizer=nothing, make_mcore_model=lambda **_: [bigram_model(use_distributed_optimizer=True)],
        torch_memory_saver=SimpleNamespace(pause=nothing, resume=nothing), is_tms_enabled=lambda: True,
        configure_pipeline_layer_splits=lambda parallel, hf_config, tf_config: tf_config,
        make_hf_and_mcore_config=lambda *_, **__: (SimpleNamespace(model_type="table"), SimpleNamespace()),
    )  # fmt: skip
    on_this_thread = ray_workers.on_cpu(engine.MegatronEngine.create_process_group)
    create_optimizer = engine.MegatronEngine._create_optimizer

    def keep_gradients(self: Any, ft_spec: Any) -> None:
        create_optimizer(self, ft_spec)
        keeping_gradients(self.optimizer, self.model[0])

    of_engine: dict[str, Any] = {"create_process_group": on_this_thread, "_create_optimizer": keep_gradients}
    of_engine |= {"_build_hf_mcore_bridge": nothing, "_load_model_from_hf": nothing, "kept_gradients": kept_gradients}
    for name, function in of_engine.items():
        setattr(engine.MegatronEngine, name, function)


def kept_gradients(engine: Any) -> list[list[float]]:
    return [gradient.tolist() for gradient in engine.optimizer.gradients]


def drive(root: str, kind: str, ours: bool, checkpoint: str, resumed: bool) -> tuple[Launch, str]:
    """As AReaL's script and trainer; also what AReaL's own trainer says in a script that imported the page's class."""
    with contextlib.ExitStack() as stack:
        folder, _ = stack.enter_context(ray_workers.class_of_page("areal"))
        sys.path[1:1] = PYTHONPATH.split(os.pathsep)
        if kind == "ray":
            stack.enter_context(ray_workers.local_ray(__name__, root, gpus=DP, by_engine=True))
        else:
            ray_workers.forget_torchrun()
            ray_workers.prepare(__name__, root)
        if kind == "slurm":
            slurm_here.install(Path(folder))
        modules = ("api.cli_args", "api.alloc_mode", "trainer.rl_trainer", "api", "infra.utils.concurrent")
        cli, allocations, trainers, apis, concurrent = (importlib.import_module(f"areal.{name}") for name in modules)
        places = [f"cluster.fileroot={folder}", f"cluster.name_resolve.nfs_record_root={folder}/names"]
        asked = [*SETTINGS, *places, f"scheduler.type={kind}"]
        config, _ = cli.load_expr_config(
            ["--config", str(Path(root, "examples/math/gsm8k_grpo_megatron.yaml")), *asked], cli.PPOConfig
        )
        (of_workers,) = config.actor.scheduling_spec
        of_workers.gpu, of_workers.cpu, of_workers.mem = int(kind == "ray"), 1, 1
        of_workers.cmd = f"{sys.executable} -m areal_worker"
        if kind == "ray":
            of_workers.env_vars["PYTHONPATH"] = "elsewhere"  # which that scheduler ignores
        trainer_class = importlib.import_module("areal_actor").Trainer if ours else trainers.PPOTrainer
        trainer = object.__new__(trainer_class)
        trainer.config = config
        trainer.scheduler = scheduler = trainer._init_scheduler()
        scheduler.startup_timeout = 200
        allocation = allocations.ModelAllocation.from_str(config.actor.backend, name="actor")
        actor = trainer._create_train_engine(config.actor, allocation)
        stack.callback(scheduler.delete_workers)
        actor.initialize(role="actor", addr=None, ft_spec=apis.FinetuneSpec(1, 12, 12))
        meta = apis.SaveLoadMeta(checkpoint, "dcp", with_optim=True)

        def evaluate() -> float:
            log_probs = actor.compute_logp(groups_of_rank(0, 1))
            return error_of_log_probs([of_group.to_local() for of_group in log_probs])

        def sleep() -> None:
            actor.offload()
            actor.onload()

        def gradients() -> list[Any]:
            call, name = scheduler.async_call_engine, actor._engine_name
            of_workers = [
                concurrent.run_async_task(call, worker.id, "kept_gradients", name(rank))
                for rank, worker in enumerate(actor.workers)
            ]
            return [[torch.tensor(gradient) for gradient in of_worker] for of_worker in of_workers]

        launch = run_stages(
            resumed, lines=lambda: lines_of(folder), gradients=gradients, evaluate=evaluate, sleep=sleep,
            step=lambda: actor.ppo_update(groups_of_rank(0, 1)), save=lambda: actor.save(meta),
            load=lambda: actor.load(meta),
        )  # fmt: skip
        if kind == "slurm":
            (script,) = Path(folder).rglob("actor.sh")
            assert "singularity exec --no-home --writable-tmpfs --nv --bind /storage:/storage " in script.read_text()
        if not ours:
            return launch, ""
        own = trainers.PPOTrainer._create_train_engine(trainer, config.actor, allocation)
        return launch, outcome_of(lambda: own.ppo_update(groups_of_rank(0, 1)))


def lines_of(folder: str) -> list[str]:
    (log,) = Path(folder, "logs").rglob("actor.log")
    return ray_workers.lines_in(log)


def error_of_log_probs(groups: list[torch.Tensor]) -> float:
    """Of each group's rows; a value belongs to the token that predicts the next one."""
    rows = [row for of_group in groups for row in of_group]
    lengths, right = make_batch()["input_lengths"].tolist(), right_log_probs()
    assert len(rows) == len(PROMPTS)
    of_tokens = [torch.cat([row[: n - 1] for row, n in zip(of, lengths, strict=True)]) for of in (rows, right)]
    return relative_error(*of_tokens)


@pytest.mark.timeout(2 * ray_workers.LIMIT + 100)
@pytest.mark.parametrize(("kind", "ours"), [("local", False), ("local", True), ("ray", True), ("slurm", True)])
def test_a_class_by_path(kind: str, ours: bool, record_property: Any, tmp_path: Path) -> None:
    if kind == "ray":
        pytest.importorskip("ray")
    resumes = (False, True) if ours and kind == "local" else (False,)
    asked = [(kind, ours, str(tmp_path), resumed) for resumed in resumes]
    launches, refused = zip(*(run_ranks(1, drive, checkout(AREAL), *of_launch)[0] for of_launch in asked), strict=True)
    for launch, outcome in zip(launches, refused, strict=True):
        assert_said(launch.lines, "AReaL", "prompt_mean on AReaL's policy loss", ours)
        assert outcome.startswith("ValueError: ppo_update of MegatronPPOActor, beside aggregate(Actor, ...)") == ours

    start = errors_on_rows(launches, DP, "prompt_mean", {}, kl=None)
    start.check(ours)
    if ours:
        record_stages(record_property, AREAL, "`compute_logp`", start)

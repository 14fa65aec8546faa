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
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import pytest
import ray_workers
import slurm_here
import torch
from areal_groups import groups_of_rank
from bigram_step import (
    CLIP_HIGH,
    CLIP_LOW,
    PROMPTS,
    TOLERANCE,
    bigram_model,
    expected,
    make_batch,
    make_table,
    right_log_probs,
)  # fmt: skip
from checkouts import AREAL, checkout, record_errors
from fork_server import PYTHONPATH
from pages import code_of
from ranks import run_ranks
from start_stages import ADAM, LEARNING_RATE, errors_of_steps, keeping_gradients, right_gradients
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
    engine = importlib.import_module("areal.engine.megatron_engine")
    nothing: Any = lambda *_, **__: None  # noqa: E731
    vars(engine).update(
        load_hf_tokenizer=nothing, make_mcore_model=lambda **_: [bigram_model(use_distributed_optimizer=True)],
        torch_memory_saver=SimpleNamespace(pause=nothing, resume=nothing), is_tms_enabled=lambda: True,
        configure_pipeline_layer_splits=lambda parallel, hf_config, tf_config: tf_config,
        make_hf_and_mcore_config=lambda *_, **__: (SimpleNamespace(model_type="table"), SimpleNamespace()),
    )  # fmt: skip
    create_process_group = engine.MegatronEngine.create_process_group
    create_optimizer = engine.MegatronEngine._create_optimizer

    def on_this_thread(self: Any, parallel_strategy: Any = None) -> None:
        megatron_on_cpu.redirect_this_thread()
        create_process_group(self, parallel_strategy)

    def keep_gradients(self: Any, ft_spec: Any) -> None:
        create_optimizer(self, ft_spec)
        keeping_gradients(self.optimizer, self.model[0])

    of_engine: dict[str, Any] = {"create_process_group": on_this_thread, "_create_optimizer": keep_gradients}
    of_engine |= {"_build_hf_mcore_bridge": nothing, "_load_model_from_hf": nothing, "kept_gradients": kept_gradients}
    for name, function in of_engine.items():
        setattr(engine.MegatronEngine, name, function)


def kept_gradients(engine: Any) -> list[list[float]]:
    return [gradient.tolist() for gradient in engine.optimizer.gradients]


#: Gradients of each worker, the workers' lines, the error of log-probs that were computed before the first step, the
#: lines until then, and what AReaL's own trainer says in a script that imported the page's class.
Launched = tuple[list[list[list[float]]], list[str], float, list[str], str]


def drive(root: str, kind: str, ours: bool, checkpoint: str = "", resumed: bool = False) -> Launched:
    """As AReaL's script and trainer, up to a step; with a checkpoint, up to it after two, or from it to one more."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        (shown,) = code_of("engines/areal.md")
        Path(folder, "areal_actor.py").write_text(shown)
        sys.path[:0] = [folder, *PYTHONPATH.split(os.pathsep)]
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
        evaluated, before, meta = 0.0, list[str](), apis.SaveLoadMeta(checkpoint, "dcp", with_optim=True)
        if resumed:
            actor.load(meta)
        elif checkpoint:
            log_probs = actor.compute_logp(groups_of_rank(0, 1))
            evaluated = error_of_log_probs([of_group.to_local() for of_group in log_probs])
            before = lines_of(folder)
            actor.ppo_update(groups_of_rank(0, 1))
            actor.offload()
            actor.onload()
        actor.ppo_update(groups_of_rank(0, 1))
        if checkpoint and not resumed:
            actor.save(meta)
        gradients = [
            concurrent.run_async_task(
                scheduler.async_call_engine, worker.id, "kept_gradients", actor._engine_name(rank)
            )
            for rank, worker in enumerate(actor.workers)
        ]
        if kind == "slurm":
            (script,) = Path(folder).rglob("actor.sh")
            assert "singularity exec --no-home --writable-tmpfs --nv --bind /storage:/storage " in script.read_text()
        lines, refused = lines_of(folder), ""
        if ours:
            own = trainers.PPOTrainer._create_train_engine(trainer, config.actor, allocation)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared in the test
                own.ppo_update(groups_of_rank(0, 1))
            refused = str(caught.value)
        return gradients, lines, evaluated, before, refused


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
    staged = ours and kind == "local"
    asked = [(str(tmp_path), resumed) for resumed in (False, True)] if staged else [("", False)]
    launches = [run_ranks(1, drive, checkout(AREAL), kind, ours, *of_launch)[0] for of_launch in asked]

    def gradient_at(table: torch.Tensor) -> torch.Tensor:
        return expected("prompt_mean", {}, kl=None, table=table)[1]

    right = right_gradients([gradient_at] * 3, make_table())
    if staged:
        (of_steps, _, evaluated, before, _), (of_resumed, *_) = launches
        steps = [[[torch.tensor(of_step) for of_step in worker] for worker in of] for of in (of_steps, of_resumed)]
        first, woken, resumed = *errors_of_steps(steps[0], right[:2]), *errors_of_steps(steps[1], right[2:])
        assert max(evaluated, first, woken, resumed) < TOLERANCE
        assert not any("aggregation proved" in line for line in before)
        record_errors(record_property, AREAL, "started: `compute_logp`, an evaluation", ours=evaluated)
        record_errors(record_property, AREAL, "started: first step", ours=first)
        record_errors(record_property, AREAL, "started: step after sleep", ours=woken)
        record_errors(record_property, AREAL, "started: step from a checkpoint", ours=resumed)
    for gradients, lines, _, _, refused in launches:
        print(*lines, sep="\n")
        assert len(gradients) == DP
        errors = [relative_error(torch.tensor(of_worker[0]).view_as(right[0]), right[0]) for of_worker in gradients]
        assert staged or (max(errors) < TOLERANCE if ours else min(errors) > 1e-2)
        assert refused.startswith("ppo_update of MegatronPPOActor, beside aggregate(Actor, ...)") == ours
        assert any(line.startswith("megatron_rl_loss in AReaL worker 0: replaced") for line in lines) == ours
        assert any("prompt_mean on AReaL's policy loss, aggregation proved on" in line for line in lines) == ours

"""AReaL from its own start: AREAL_PATH=~/AReaL.

Real: AReaL's command line and config, `_init_scheduler` and `_create_train_engine` of the page's trainer, the scheduler
(local, Ray's and Slurm's with the script that it submits), its workers' server in processes of their own, which import
the page's class by path, the controller's deal of trajectory groups, `create_process_group`, `initialize` and
`ppo_update` of the engine, and all that a training step calls. Stubbed: the GPU, Hugging Face's files, the optimizer,
which keeps gradients, the model, a table of logits, and Slurm's own commands with the container (`slurm_here`).
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
from bigram_step import CLIP_HIGH, CLIP_LOW, TOLERANCE, bigram_model, expected
from checkouts import AREAL, checkout, record_errors
from fork_server import PYTHONPATH
from logit_table import KeepsGradients
from pages import code_of
from ranks import run_ranks
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
    *(f"actor.eps_clip={CLIP_LOW}", f"+actor.eps_clip_higher={CLIP_HIGH}"),
]


def stub() -> None:
    """What a machine without GPUs and checkpoints lacks."""
    engine = importlib.import_module("areal.engine.megatron_engine")
    nothing: Any = lambda *_, **__: None  # noqa: E731
    vars(engine).update(
        load_hf_tokenizer=nothing, make_mcore_model=lambda **_: [bigram_model()],
        configure_pipeline_layer_splits=lambda parallel, hf_config, tf_config: tf_config,
        make_hf_and_mcore_config=lambda *_, **__: (SimpleNamespace(model_type="table"), SimpleNamespace()),
    )  # fmt: skip
    create_process_group = engine.MegatronEngine.create_process_group

    def on_this_thread(self: Any, parallel_strategy: Any = None) -> None:
        megatron_on_cpu.redirect_this_thread()
        create_process_group(self, parallel_strategy)

    of_engine: dict[str, Any] = {"create_process_group": on_this_thread, "_create_optimizer": create_optimizer}
    of_engine |= {"_build_hf_mcore_bridge": nothing, "_load_model_from_hf": nothing, "kept_gradients": kept_gradients}
    for name, function in of_engine.items():
        setattr(engine.MegatronEngine, name, function)


def create_optimizer(engine: Any, ft_spec: Any) -> None:
    engine.optimizer, engine.lr_scheduler = KeepsGradients(engine.model[0]), SimpleNamespace(step=lambda _: None)
    engine.optimizer.param_groups = [{"lr": 0.0}]
    engine.optimizer.get_loss_scale = lambda: torch.tensor(1.0)


def kept_gradients(engine: Any) -> list[list[float]]:
    return [gradient.tolist() for gradient in engine.optimizer.gradients]


def drive(root: str, kind: str, ours: bool) -> tuple[list[list[list[float]]], list[str], str]:
    """As AReaL's script and trainer up to a step: gradients of each worker, the workers' lines.

    Then what AReaL's own trainer says in a script that imported the page's class.
    """
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
        actor.ppo_update(groups_of_rank(0, 1))
        gradients = [
            concurrent.run_async_task(
                scheduler.async_call_engine, worker.id, "kept_gradients", actor._engine_name(rank)
            )
            for rank, worker in enumerate(actor.workers)
        ]
        if kind == "slurm":
            (script,) = Path(folder).rglob("actor.sh")
            assert "singularity exec --no-home --writable-tmpfs --nv --bind /storage:/storage " in script.read_text()
        (log,) = Path(folder, "logs").rglob("actor.log")
        lines, refused = ray_workers.lines_in(log), ""
        if ours:
            own = trainers.PPOTrainer._create_train_engine(trainer, config.actor, allocation)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared in the test
                own.ppo_update(groups_of_rank(0, 1))
            refused = str(caught.value)
        return gradients, lines, refused


@pytest.mark.parametrize(("kind", "ours"), [("local", False), ("local", True), ("ray", True), ("slurm", True)])
def test_a_class_by_path(kind: str, ours: bool, record_property: Any) -> None:
    if kind == "ray":
        pytest.importorskip("ray")
    ((gradients, lines, refused),) = run_ranks(1, drive, checkout(AREAL), kind, ours)
    print(*lines, sep="\n")
    _, by_entry, _ = expected("prompt_mean", {}, kl=None)
    steps = [torch.tensor(of_step) for of_worker in gradients for of_step in of_worker]
    errors = [relative_error(of_step.view_as(by_entry), by_entry) for of_step in steps]
    assert len(errors) == DP
    if ours:
        record_errors(record_property, AREAL, "started: prompt mean", ours=max(errors))
    assert max(errors) < TOLERANCE if ours else min(errors) > 1e-2
    assert refused.startswith("ppo_update of MegatronPPOActor, beside aggregate(Actor, ...)") == ours
    assert any(line.startswith("megatron_rl_loss in AReaL worker 0: replaced") for line in lines) == ours
    assert any("prompt_mean on AReaL's policy loss, aggregation proved on" in line for line in lines) == ours

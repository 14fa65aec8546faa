"""RLinf from its own start: RLINF_PATH=~/RLinf, and Ray.

Real: the config of RLinf's example with Hydra, `validate_cfg`, `Cluster` with its managers, placement, the page's class
in `create_group(...).launch(...)`, the worker's `__init__` with Megatron's groups, `init_worker`, `run_inference`,
`run_training` with its count of valid tokens and its offload and onload of weights, gradients and optimizer, twice,
`save_checkpoint`, and `load_checkpoint` and `run_training` of new workers. Megatron's optimizer is real.
Stubbed: the GPU, Hugging Face's files, the channel of rollouts, weight transfer, profilers, and the model, a table of
logits.
"""

import dataclasses
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, LENGTH, ROWS, bigram_model, make_batch, right_log_probs
from checkouts import RLINF, checkout
from ranks import run_ranks
from ray_workers import LIMIT, after_import, class_of_page, gradients_of, local_ray, on_cpu, on_each, stub_names
from rlinf_rows import LEFT, PROMPT, rollout_of_rank
from start_stages import ConstantRate, Launch, adam, assert_said, errors_on_rows, record_stages, run_stages
from table_step import relative_error

pytest.importorskip("ray")
hydra: Any = pytest.importorskip("hydra")
pytestmark = pytest.mark.slow

DP = 2
_REAL = ("rlinf.config", "rlinf.scheduler", *(f"rlinf.utils.{name}" for name in ("flops", "initialize", "logging")))
_NOT_USED = ("rlinf.data.storage", "rlinf.envs", "datasets", "accelerate", "peft", "huggingface_hub", "safetensors")
ENGINE = dataclasses.replace(
    RLINF,
    passed_by=(),
    stand_ins=(
        *(name for name in RLINF.stand_ins if name not in (*_REAL, "rlinf.utils.placement", "rlinf.utils.timers")),
        *_NOT_USED,
    ),
    replaced=("transformers",),
)
SETTINGS = [
    *("cluster.num_nodes=1", f"runner.seq_length={LENGTH + LEFT}", f"data.max_prompt_length={PROMPT + LEFT}"),
    *(f"data.rollout_batch_size={ROWS // 4}", "algorithm.group_size=4", "algorithm.n_minibatches=1"),
    *("algorithm.use_valid_token_scale=True", "algorithm.normalize_advantages=False", "algorithm.entropy_bonus=0"),
    *(f"algorithm.clip_ratio_low={CLIP_LOW}", f"algorithm.clip_ratio_high={CLIP_HIGH}", "algorithm.loss_type=actor"),
    *(f"algorithm.kl_beta={BETA}", "algorithm.kl_penalty_type=k3", "algorithm.recompute_logprobs=False"),
    *("runner.enable_dynamic_batch_size=True", "runner.max_tokens_per_mbs=24", "actor.model.precision=bf16"),
    *("actor.optim.fp16=False", "actor.optim.bf16=True", "actor.model.tensor_model_parallel_size=1"),
    *("actor.model.sequence_parallel=False", "actor.megatron.distributed_backend=gloo"),
    "actor.model.apply_rope_fusion=False",
    *("actor.offload_optimizer=True", "actor.optim.use_distributed_optimizer=False"),
]


def stub() -> None:
    """What a machine without GPUs and checkpoints lacks, once RLinf imports the module of it."""

    def manager(module: Any) -> None:
        module.initialize_megatron = on_cpu(module.initialize_megatron)
        module.hf_tokenizer = lambda *_, **__: SimpleNamespace(eos_token_id=0)
        module.MegatronModelManager.setup_model_and_optimizer = setup_model_and_optimizer
        module.MegatronModelManager._get_pinned_buffer = in_host_memory

    def actor(module: Any) -> None:
        module.MegatronActor.init_worker_customize = lambda self: None  # the transfer of weights to samplers
        module.MegatronActor.broadcast = lambda self, value, groups: value  # by NCCL, in groups of one here

    gpus = "rlinf.scheduler.hardware.accelerators.nvidia_gpu"
    after_import(gpus, lambda module: setattr(module.NvidiaGPUManager, "get_num_devices", staticmethod(lambda: DP)))
    stub_names("rlinf.config", validate_model_cfg_by_hf_config=of_table)
    after_import("rlinf.hybrid_engines.megatron.megatron_model_manager", manager)
    after_import("rlinf.workers.actor.megatron_actor_worker", actor)


def of_table(cfg: Any, hf_model_path: str) -> Any:
    """In the place of what RLinf reads from Hugging Face's files of a model."""
    sizes = {"padded_vocab_size": 100, "num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    sizes |= {"num_query_groups": 1, "ffn_hidden_size": 4, "max_position_embeddings": 64}
    importlib.import_module("omegaconf").OmegaConf.set_struct(cfg, False)
    cfg.model.update(sizes)
    return cfg


def setup_model_and_optimizer(worker: Any) -> None:
    importlib.import_module("rlinf.utils.initialize").set_megatron_args(worker._cfg)  # which its checkpoints ask
    model = bigram_model(use_distributed_optimizer=True)  # RLinf offloads the buffer of weights, which others lack
    model.module.pre_process = model.module.post_process = True
    worker.model, worker.optimizer, worker.lr_scheduler = [model], adam(model), ConstantRate()
    worker.transformer_config = model.config


class Rollouts:
    """In the place of RLinf's channels, which move what is in them between workers by collectives of GPUs."""

    is_local = True

    def get(self) -> Any:
        results = importlib.import_module("rlinf.data.schema.reasoning_results")
        return rollout_of_rank(dist.get_rank(), DP, results)


class Inferred(Rollouts):
    """What `run_inference` reads, from a channel that is not local, and where it puts its results."""

    is_local = False
    results: ClassVar[list[Any]] = []

    def put(self, result: Any, async_op: bool) -> None:
        self.results.append(result)


def error_of_inference(worker: Any) -> float:
    """Of the log-probs of its rows."""
    (result,) = Inferred.results
    mask = (make_batch()["token_mask"] * make_batch()["sample_mask"][:, None])[dist.get_rank() :: DP, PROMPT:]
    right = right_log_probs()[dist.get_rank() :: DP, PROMPT - 1 :] * mask
    return relative_error(result.recomputed_logprobs[:, : right.shape[1]], right)


def in_host_memory(worker: Any, tensor: torch.Tensor) -> torch.Tensor:
    """As RLinf's pinned buffers, which need a GPU: one for the life of a tensor."""
    if not hasattr(tensor, "cpu_data"):
        vars(tensor)["cpu_data"] = torch.empty_like(tensor)
    kept: torch.Tensor = tensor.cpu_data  # type: ignore[attr-defined]
    return kept


def drive(root: str, checkpoint: str, resumed: bool) -> Launch:
    """As RLinf's script and runner."""
    with class_of_page("rlinf") as (folder, variables):
        os.environ |= variables
        with local_ray(__name__, root, gpus=DP, by_engine=True) as lines:
            names = ("config", "scheduler", "utils.placement")
            config, scheduler, placement = (importlib.import_module(f"rlinf.{name}") for name in names)
            folder_of_example = str(Path(root, "examples/reasoning/config/math"))
            with hydra.initialize_config_dir(folder_of_example, version_base="1.1"):
                asked = hydra.compose("qwen2.5-1.5b-grpo-megatron", [*SETTINGS, f"runner.output_dir={folder}"])
            cfg = config.validate_cfg(asked)
            cluster = scheduler.Cluster(cluster_cfg=cfg.cluster)
            places = placement.ModelParallelComponentPlacement(cfg, cluster)
            worker_class = importlib.import_module("rlinf_actor").RlinfActor
            group = worker_class.create_group(cfg, places).launch(
                cluster, name=cfg.actor.group_name, placement_strategy=places.get_strategy("actor")
            )
            group.init_worker().wait()
            workers = [info.worker for info in group.worker_info_list]

            def evaluate() -> float:
                group.run_inference(Inferred(), Inferred()).wait()
                return max(on_each(workers, error_of_inference))

            return run_stages(
                resumed, lines=lines, gradients=lambda: on_each(workers, gradients_of), evaluate=evaluate,
                step=lambda: group.run_training(Rollouts(), compute_rollout_metrics=False).wait(),
                save=lambda: group.save_checkpoint(checkpoint, 2).wait(),
                load=lambda: group.load_checkpoint(checkpoint).wait(),
            )  # fmt: skip


@pytest.mark.timeout(2 * LIMIT + 100)
def test_a_launch_with_the_class_of_the_page(record_property: Any, tmp_path: Path) -> None:
    """RLinf's own class hangs on these rows, of which some are fully masked: a rank then reports other metrics."""
    launches = [run_ranks(1, drive, checkout(RLINF), str(tmp_path), resumed)[0] for resumed in (False, True)]
    for launch in launches:
        assert_said(launch.lines, "RLinf", "prompt_mean on RLinf's policy loss, token_mean on kl")

    assert errors_on_rows(launches, DP, "token_mean", {"kl": "token_mean"}).first > 1e-2
    start = errors_on_rows(launches, DP, "prompt_mean", {"kl": "token_mean"})
    record_stages(record_property, RLINF, "`run_inference`", start)

"""ROLL from its own start, with `offload_nccl`: ROLL_PATH=~/ROLL, and Ray.

Real: ROLL's Hydra config and dataclasses, its resource manager and cluster, the page's worker class by path in Ray,
`initialize` with its strategy, the dispatch of a batch over DP ranks, `compute_log_probs`, `train_step` of worker and
strategy, the wrapped process groups, destroyed and built again between them, `do_checkpoint`, and `initialize` of new
workers with `resume_from_checkpoint`. Megatron's optimizer is real, and so are mcore_adapter's checkpoints.
Stubbed: the GPU and the offload of states from it, Hugging Face's files, NCCL, and the model, a table of logits. No
config turns `offload_nccl` on: since ROLL 0.3.0 `WorkerConfig.__post_init__` sets it to False in every worker's config,
without a condition; the test sets it again.
"""

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bigram_step import BETA, CLIP_HIGH, CLIP_LOW, LENGTH, ROWS, logits, make_batch, make_table, right_log_probs
from checkouts import ROLL, Settings, checkout
from ranks import run_ranks
from ray_workers import LIMIT, class_of_page, local_ray, nothing, on_each
from roll_rows import LEFT, PROMPT, rows_of_rank
from start_stages import ConstantRate, Launch, adam, assert_said, errors_on_rows, record_stages, run_stages
from table_step import relative_error, table_chunk

hydra: Any = pytest.importorskip("hydra")
for _package in ("ray", "tensordict", "dacite", "more_itertools"):
    pytest.importorskip(_package)
pytestmark = pytest.mark.slow

DP, ROWS_OF_A_MICROBATCH = 2, 2
_REAL = ("roll.configs", "roll.distributed", "roll.pipeline.rlvr", "roll.utils", "mcore_adapter.checkpointing")
_NOT_USED: tuple[str, ...] = ("roll.utils.collective", "roll.utils.cuda_ipc_utils", "roll.utils.checkpoint_manager")
_NOT_USED += ("huggingface_hub", "opentelemetry.exporter", "roll.third_party.megatron.optimizer")
ENGINE = dataclasses.replace(
    ROLL, passed_by=(), stand_ins=(*(name for name in ROLL.stand_ins if not name.startswith(_REAL)), *_NOT_USED)
)
_NOTHING_TO_DO = (
    *("default_tokenizer_provider", "default_processor_provider", "bind_megatron_offload_states_func"),
    *("reload_megatron_no_grad_module", "offload_megatron_no_grad_module"),
)
#: Beside those of ROLL's example of an RLVR run.
SETTINGS = f"""
pretrain=none reward_pretrain=none prompt_length=5 response_length={LENGTH + LEFT - 5}
+loss_agg_mode=token-mean num_return_sequences_in_group=4 dual_clip_loss=false ~validation
+use_pg_clip_range=true +pg_clip_low={CLIP_LOW} +pg_clip_high={CLIP_HIGH} +use_kl_loss=true +kl_loss_coef={BETA}
actor_train.training_args.per_device_train_batch_size={ROWS_OF_A_MICROBATCH}
actor_train.training_args.gradient_accumulation_steps={ROWS // DP // ROWS_OF_A_MICROBATCH}
actor_train.strategy_args.strategy_config.use_distributed_optimizer=false
"""
SETTINGS += " ".join(
    f"{role}.device_mapping='list(range({DP}))'"
    for role in ("actor_train", "actor_infer", "reference", "rewards.llm_judge")
)


def stub() -> None:
    """What a machine without GPUs and checkpoints lacks."""
    new_group: Any = dist.new_group

    def without_nccl(*args: Any, backend: Any = None, **options: Any) -> Any:
        return new_group(*args, backend=None if backend == "nccl" else backend, **options)

    dist.new_group = without_nccl
    state: Any = importlib.import_module("megatron.core.parallel_state")
    state.get_data_modulo_expert_parallel_rank = state.get_expert_data_parallel_rank  # its name in an older Megatron
    for name in ("reset_max_memory_allocated", "reset_max_memory_cached", "device_memory_used"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.cuda.device_count = lambda: DP  # the node's, by which ROLL deals out its workers
    platforms = importlib.import_module("roll.platforms")
    of_gpus: Any = {"device_type": "cpu", "__getattr__": lambda self, name: getattr(torch.cuda, name)}
    vars(platforms)["current_platform"] = type("OfGPUs", (platforms.CudaPlatform,), of_gpus)()
    root = next(path for path in reversed(sys.path) if Path(path, ROLL.proof).exists())
    sys.modules["mcore_adapter"] = ModuleType("mcore_adapter")
    vars(sys.modules["mcore_adapter"]).update(
        TrainingArguments=Settings, __path__=[str(Path(root, "mcore_adapter/src/mcore_adapter"))]
    )
    strategies, workers = (
        importlib.import_module(f"roll.{name}")
        for name in ("distributed.strategy.megatron_strategy", "pipeline.base_worker")
    )
    vars(workers).update(default_actor_model_provider=Models, download_model=lambda path: path)
    log_probs_of = strategies.vocab_parallel_logprobs
    vars(strategies).update(
        dict.fromkeys(_NOTHING_TO_DO, nothing),
        get_megatron_optimizer=optimizer_of,
        get_megatron_lr_scheduler=lambda *_, **__: ConstantRate(),
        # It changes logits in place, unless they are of half precision.
        vocab_parallel_logprobs=lambda logits, *args, **options: log_probs_of(logits.clone(), *args, **options),
        collate_fn_to_dict_list=collated,
    )


class Models(list[Any]):
    """As mcore_adapter's models of a worker, which start Megatron's groups: the table of logits."""

    def __init__(self, training_args: Any, **_: Any) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer import TransformerConfig

        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.config: Any = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True
        )
        table = table_chunk(make_table().flatten().tolist(), self.config, logits)
        table.get_batch_on_this_cp_rank = lambda batch, dim3_keys: batch
        self.config.save_pretrained = lambda folder: None
        table.save_pretrained = self.save
        super().__init__([table])

    def get_models(self) -> list[Any]:
        return list(self)

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def save(self, folder: str, ckpt_format: Any) -> None:
        """As the model that mcore_adapter makes."""
        checkpoints = importlib.import_module("mcore_adapter.checkpointing")
        os.makedirs(folder, exist_ok=True)
        state = {"model": checkpoints.generate_model_state_dict(self[0].module)}
        checkpoints.save_config_and_state_dict(folder, self.config, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[0].load_state_dict(state["model"])

    @property
    def models(self) -> list[Any]:
        return list(self)

    @models.setter
    def models(self, models: list[Any]) -> None:
        self[:] = models


def collated(microbatches: list[dict[str, Any]]) -> dict[str, Any]:
    """As ROLL's own, whose module imports transformers."""
    columns = {name: [of_microbatch[name] for of_microbatch in microbatches] for name in microbatches[0]}
    return {
        name: torch.cat(values) if isinstance(values[0], torch.Tensor) else values for name, values in columns.items()
    }


def optimizer_of(config: Any, models: list[Any]) -> Any:
    optimizer = adam(models[0])
    optimizer.reload_states = optimizer.offload_states = lambda **_: None
    return optimizer


def gradients_of(worker: Any) -> list[torch.Tensor]:
    gradients: list[torch.Tensor] = worker.strategy.optimizer.gradients
    return gradients


def group_of(worker: Any) -> tuple[str, bool]:
    """The type of a group, and whether ROLL has destroyed what it wraps."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    return type(group).__name__, getattr(group, "group", "") is None


def drive(root: str, worker_cls: str, checkpoint: str, resumed: bool) -> Launch:
    """As ROLL's script and pipeline."""
    with class_of_page("roll") as (folder, variables):
        asked_by_user = [*SETTINGS.split(), f"+actor_train.worker_cls={worker_cls}", f"logging_dir={folder}"]
        asked_by_user += [f"output_dir={checkpoint}"]
        with hydra.initialize_config_dir(str(Path(root, "examples/qwen2.5-7B-rlvr_megatron")), version_base=None):
            asked = hydra.compose("rlvr_config", asked_by_user)
        os.environ["ROLL_LOG_DIR"] = folder
        with local_ray(__name__, root, gpus=DP, variables=variables | {"ROLL_LOG_DIR": folder}) as lines:
            omegaconf, dacite = importlib.import_module("omegaconf"), importlib.import_module("dacite")
            resources, clusters, protocol, functionals, configs = (
                importlib.import_module(f"roll.{name}")
                for name in (
                    "distributed.scheduler.resource_manager", "distributed.executor.cluster",
                    "distributed.scheduler.protocol", "utils.functionals", "pipeline.rlvr.rlvr_config",
                )
            )  # fmt: skip
            config = dacite.from_dict(configs.RLVRConfig, omegaconf.OmegaConf.to_container(asked, resolve=True))
            config.actor_train.offload_nccl = True
            if resumed:
                (tracker,) = Path(checkpoint).rglob("latest_checkpointed_iteration.txt")
                config.resume_from_checkpoint = str(tracker.parent)
            manager = resources.ResourceManager(config.num_gpus_per_node, config.num_nodes)
            of_worker = config.actor_train
            cluster = clusters.Cluster("actor_train", of_worker.worker_cls, manager, of_worker)
            cluster.initialize(pipeline_config=config, blocking=True)

            def rows() -> Any:
                return rows_of_rank(0, 1, protocol, functionals)

            def gradients() -> list[Any]:
                groups = on_each(cluster.workers, group_of)
                assert groups == [("ReloadableProcessGroup", True)] * DP, groups
                return on_each(cluster.workers, gradients_of)

            return run_stages(
                resumed, lines=lines, gradients=gradients, step=lambda: cluster.train_step(rows(), blocking=True),
                evaluate=lambda: error_of_log_probs(cluster.compute_log_probs(rows(), blocking=True)),
                save=lambda: cluster.do_checkpoint(global_step=2, is_last_step=True, blocking=True),
            )  # fmt: skip


def error_of_log_probs(evaluated: Any) -> float:
    mask = torch.arange(LENGTH) < make_batch()["input_lengths"][:, None]
    mask[:, :PROMPT] = False
    return relative_error(evaluated.batch["log_probs"][:, : LENGTH - 1] * mask[:, 1:], right_log_probs() * mask[:, 1:])


@pytest.mark.timeout(2 * LIMIT + 100)
@pytest.mark.parametrize("ours", [False, True])
def test_a_worker_by_path(ours: bool, record_property: Any, tmp_path: Path) -> None:
    """After each step ROLL destroys all groups, and builds them again before the next."""
    worker_cls = "roll_actor.RollActor" if ours else "roll.pipeline.rlvr.actor_worker.ActorWorker"
    resumes = (False, True) if ours else (False,)
    launches = [run_ranks(1, drive, checkout(ROLL), worker_cls, str(tmp_path), resumed)[0] for resumed in resumes]
    for launch in launches:
        assert_said(launch.lines, "ROLL", "prompt_mean on ROLL's policy loss, token_mean on kl", ours)

    start = errors_on_rows(launches, DP, "prompt_mean", {"kl": "token_mean"})
    start.check(ours)
    if ours:
        record_stages(record_property, ROLL, "`compute_log_probs`", start)

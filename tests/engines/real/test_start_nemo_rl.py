"""NeMo-RL from its own start: NEMO_RL_PATH=~/RL, and Ray.

Real: NeMo-RL's config file with overrides, `init_ray`, its virtual cluster, `Policy` with its worker group,
`GRPOAdvantageEstimator`, `Policy.train` with its sharding and sequence packing, in `eval_mode` too, Ray's pickling of
the loss, in Ray's workers `MegatronPolicyWorker.train` with its micro-batches, schedule and statistics, `Policy`'s
`offload_to_cpu` and `prepare_for_training`, and Megatron's optimizer.
Stubbed: the GPU, the tokenizer, Megatron-Bridge's setup of the model, which is a table of logits, and what the pinned
Megatron-LM has beside a release. Not run: a checkpoint, which that setup loads.
"""

import contextlib
import importlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bigram_step import (
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    LENGTH,
    ROWS,
    bigram_model,
    expected,
    kl_of_nemo_rl,
    make_batch,
    make_table,
)  # fmt: skip
from checkouts import NEMO_RL, Settings, checkout, record_errors
from ranks import run_ranks
from ray_workers import after_import, gradients_of, local_ray, nothing, on_cpu, on_each, stub_names
from refusals import outcome_of
from start_stages import (
    TOLERANCE,
    Launch,
    Start,
    adam,
    after_step,
    assert_said,
    errors_of_steps,
    record_stages,
    right_gradients,
    run_stages,
)  # fmt: skip
from table_step import relative_error

for _package in ("ray", "hydra", "tensordict"):
    pytest.importorskip(_package)
pytestmark = pytest.mark.slow

_REAL = {"ray", "pydantic", "omegaconf", "hydra", "tensordict", "requests", "prometheus_client", "PIL"}
_REAL |= {"nemo_rl.models.policy"}
ENGINE = replace(
    NEMO_RL,
    replaced=("transformers",),  # another version than ms-swift's
    stand_ins=(
        *(name for name in NEMO_RL.stand_ins if name not in _REAL),
        *("torch_memory_saver", "modelopt", "safetensors", "huggingface_hub", "accelerate", "nemo_automodel"),
    ),
)
DP = 2
OVERRIDES = {
    "policy.model_name": "none",
    "policy.train_global_batch_size": ROWS,
    "policy.train_micro_batch_size": 1,
    "policy.max_total_sequence_length": 2 * LENGTH,  # of a pack
    "grpo.use_leave_one_out_baseline": "true",
    "loss_fn.reference_policy_kl_penalty": BETA,
    "loss_fn.ratio_clip_min": CLIP_LOW,
    "loss_fn.ratio_clip_max": CLIP_HIGH,
}


class V1: ...


class V2: ...


def stub() -> None:
    """What a machine without a GPU, Megatron-Bridge and the pinned Megatron-LM lacks."""
    vars(importlib.import_module("transformers"))["__version__"] = "5.0"
    adapter = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
    stub_names(adapter, FullyShardedDataParallelV1=V1, FullyShardedDataParallelV2=V2)
    stub_names("nemo_rl.models.policy.lm_policy", get_default_hf_config=no_flops)
    after_import("nemo_rl.models.policy.workers.megatron_policy_worker", in_worker)
    stub_names("nemo_rl.distributed.numa_utils", bind_to_gpu_numa=nothing)
    vars(torch.cuda)["get_device_name"] = lambda: "cpu"


def no_flops(name: str) -> None:
    raise ValueError("no table of a model's FLOPs")


def in_worker(module: Any) -> None:
    of_device = torch.cuda.current_device

    def setup_distributed() -> None:
        dist.init_process_group("gloo")
        vars(torch.cuda)["current_device"] = lambda: int(os.environ["LOCAL_RANK"])  # compared in the next line

    def validate_model_paths(config: Any) -> tuple[str, str, bool]:
        vars(torch.cuda)["current_device"] = of_device
        return "", "", True

    def identity(value: Any, mp_group: Any) -> Any:
        return value

    unused = ("apply_transformer_engine_patch", "handle_model_import", "log_gpu_memory_diagnostics")
    vars(module).update(
        dict.fromkeys(unused, nothing),
        setup_distributed=on_cpu(setup_distributed),
        validate_model_paths=validate_model_paths,
        validate_and_set_config=lambda *_: Settings(
            megatron_cfg=SimpleNamespace(
                model=SimpleNamespace(cuda_graph_impl="none"), optimizer=None, validate=lambda: None
            ),
            model_cfg=Settings(), dtype=torch.float32,
        ),
        setup_model_and_optimizer=model_and_optimizer,
        finalize_megatron_setup=lambda *_: (None, None, False, dist.get_world_size()),
        get_rank_safe=lambda: int(os.environ["RANK"]),
        get_pg_collection=lambda model: SimpleNamespace(mp=None),
        logical_and_across_model_parallel_group=identity,
        reduce_max_stat_across_model_parallel_group=identity,
        _model_self_packs_for_cp=lambda model: False,
        _model_self_packs_mtp_loss_mask=lambda model: False,
        _model_slices_context_parallel_inputs=lambda model: False,
        _model_accepts_media_token_validity_mask=lambda model: False,
    )  # fmt: skip


def model_and_optimizer(*_: Any, **__: Any) -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    model = bigram_model(per_token=True, use_distributed_optimizer=True)
    scheduler = SimpleNamespace(get_lr=lambda group: 0.0, get_wd=lambda: 0.0, step=lambda increment: None)
    state = Settings(straggler_timer=lambda **_: contextlib.nullcontext(), cfg=Settings(checkpoint=Settings()))
    return Settings(model=model, optimizer=adam(model), scheduler=scheduler, state=state)


def drive(root: str) -> tuple[Launch, str]:
    """As run_grpo.py and steps of `grpo_train`, with what a step with the loss that was wrapped says."""
    os.environ |= {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    with local_ray(__name__, root, gpus=DP, by_engine=True) as lines:
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
        from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
        from nemo_rl.models.policy.lm_policy import Policy
        from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers

        register_omegaconf_resolvers()
        of_file = load_config(str(Path(root, "examples/configs/grpo_math_1B_megatron.yaml")))
        of_file = parse_hydra_overrides(of_file, [f"{key}={value}" for key, value in OVERRIDES.items()])
        config: Any = importlib.import_module("omegaconf").OmegaConf.to_container(of_file, resolve=True)
        init_ray()
        cluster = RayVirtualCluster([DP], num_gpus_per_node=DP)
        tokenizer: Any = SimpleNamespace(pad_token="", eos_token="")
        policy: Any = Policy(cluster, config["policy"], tokenizer, init_reference_model=False)
        try:
            return steps_of(policy, ClippedPGLossFn(ClippedPGLossConfig(**config["loss_fn"])), config, lines)
        finally:
            policy.shutdown()  # its destructor would start another Ray
            cluster.shutdown()


def steps_of(policy: Any, stock: Any, config: Any, lines: Any) -> tuple[Launch, str]:
    """A step by NeMo-RL alone, and stages of ours from there."""
    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from megatron_rl_loss.engines.nemo_rl import aggregate

    batch = BatchedDataDict(make_batch())
    policy.train(batch, stock)
    loss = aggregate(policy, stock, "prompt_mean", kl="token_mean", group_size=4)
    estimator = GRPOAdvantageEstimator(SimpleNamespace(**config["grpo"]), None)
    estimator.compute_advantage(batch["input_ids"][:, :3], torch.ones(ROWS), batch["token_mask"])

    def evaluate() -> float:
        value = float(policy.train(batch, loss, eval_mode=True)["loss"].sum())
        right, _, scale = right_step("prompt_mean", after_step(make_table(), gradient_of("token_mean", make_table())))
        return abs(value - right) / scale

    def sleep() -> None:
        policy.offload_to_cpu()
        policy.prepare_for_training()

    launch = run_stages(
        False, lines=lines, evaluate=evaluate, step=lambda: policy.train(batch, loss), sleep=sleep,
        gradients=lambda: on_each(policy.worker_group.workers, gradients_of),
    )  # fmt: skip
    return launch, outcome_of(lambda: policy.train(batch, stock))


def right_step(mode: str, table: torch.Tensor) -> tuple[float, torch.Tensor, float]:
    return expected(mode, {"kl": "token_mean"}, kl=kl_of_nemo_rl, table=table)


def gradient_of(mode: str, table: torch.Tensor) -> torch.Tensor:
    return right_step(mode, table)[1]


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    ((launch, refused),) = run_ranks(1, drive, checkout(NEMO_RL))
    print(refused)
    proved = "prompt_mean on NeMo-RL's policy loss, token_mean on kl"
    assert_said(launch.lines, "NeMo-RL", proved, does="policy by prompt_mean, kl by token_mean")
    right = right_gradients([partial(gradient_of, mode) for mode in ("token_mean", *["prompt_mean"] * 2)], make_table())
    own, first, woken = errors_of_steps(launch.gradients, right)
    assert own < TOLERANCE < 1e-2 < relative_error(right[0], gradient_of("prompt_mean", make_table()))
    assert refused.startswith("ValueError")
    assert "Pass grpo_train the loss that aggregate(...) returned" in refused
    record_errors(record_property, NEMO_RL, "started: `token_level_loss=true`", own)
    record_stages(record_property, NEMO_RL, "`eval_mode`", Start(launch.evaluated, first, woken))

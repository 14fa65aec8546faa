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
    TOLERANCE,
    bigram_model,
    expected,
    kl_of_nemo_rl,
    make_batch,
    make_table,
)
from checkouts import NEMO_RL, Settings, checkout, record_errors
from ranks import run_ranks
from ray_workers import after_import, gradients_of, local_ray, redirect_this_thread
from start_stages import adam, errors_of_steps, right_gradients
from table_step import relative_error

ray: Any = pytest.importorskip("ray")
pytest.importorskip("hydra")
pytest.importorskip("tensordict")
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
    after_import(
        adapter, lambda module: vars(module).update(FullyShardedDataParallelV1=V1, FullyShardedDataParallelV2=V2)
    )
    after_import("nemo_rl.models.policy.lm_policy", lambda module: setattr(module, "get_default_hf_config", no_flops))
    after_import("nemo_rl.models.policy.workers.megatron_policy_worker", in_worker)
    numa = "nemo_rl.distributed.numa_utils"
    after_import(numa, lambda module: setattr(module, "bind_to_gpu_numa", lambda rank: None))
    vars(torch.cuda)["get_device_name"] = lambda: "cpu"


def no_flops(name: str) -> None:
    raise ValueError("no table of a model's FLOPs")


def in_worker(module: Any) -> None:
    of_device = torch.cuda.current_device

    def setup_distributed() -> None:
        redirect_this_thread()
        dist.init_process_group("gloo")
        vars(torch.cuda)["current_device"] = lambda: int(os.environ["LOCAL_RANK"])  # compared in the next line

    def validate_model_paths(config: Any) -> tuple[str, str, bool]:
        vars(torch.cuda)["current_device"] = of_device
        return "", "", True

    def identity(value: Any, mp_group: Any) -> Any:
        return value

    nothing = ("apply_transformer_engine_patch", "handle_model_import", "log_gpu_memory_diagnostics")
    vars(module).update(
        dict.fromkeys(nothing, lambda *_, **__: None),
        setup_distributed=setup_distributed,
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


#: Gradients of each worker: a step by NeMo-RL alone and two of ours; the loss of an evaluation before these, and what a
#: step with the loss that was wrapped says.
Steps = tuple[list[list[torch.Tensor]], float, str]


def drive(root: str) -> tuple[Steps, list[str]]:
    """As run_grpo.py and steps of `grpo_train`; the workers' lines."""
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
            return steps_of(policy, ClippedPGLossFn(ClippedPGLossConfig(**config["loss_fn"])), config, lines), lines()
        finally:
            policy.shutdown()  # its destructor would start another Ray
            cluster.shutdown()


def steps_of(policy: Any, stock: Any, config: Any, lines: Any) -> Steps:
    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from megatron_rl_loss.engines.nemo_rl import aggregate

    batch = BatchedDataDict(make_batch())
    policy.train(batch, stock)
    loss = aggregate(policy, stock, "prompt_mean", kl="token_mean", group_size=4)
    estimator = GRPOAdvantageEstimator(SimpleNamespace(**config["grpo"]), None)
    estimator.compute_advantage(batch["input_ids"][:, :3], torch.ones(ROWS), batch["token_mask"])
    evaluated = float(policy.train(batch, loss, eval_mode=True)["loss"].sum())
    assert not any("aggregation proved" in line for line in lines())
    policy.train(batch, loss)
    policy.offload_to_cpu()
    policy.prepare_for_training()
    policy.train(batch, loss)
    gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in policy.worker_group.workers])
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared in the test
        policy.train(batch, stock)
    return gradients, evaluated, str(refused.value)


def at(table: torch.Tensor, mode: str) -> tuple[float, torch.Tensor, float]:
    return expected(mode, {"kl": "token_mean"}, kl=kl_of_nemo_rl, table=table)


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    (((gradients, value, refused), lines),) = run_ranks(1, drive, checkout(NEMO_RL))
    print(*lines, refused, value, sep="\n")
    tables: list[torch.Tensor] = []

    def by_prompts(table: torch.Tensor) -> torch.Tensor:
        tables.append(table)
        return at(table, "prompt_mean")[1]

    steps = [lambda table: at(table, "token_mean")[1], by_prompts, by_prompts]
    right = right_gradients(steps, make_table())
    own, first, woken = errors_of_steps(gradients, right)
    right_value, _, scale = at(tables[0], "prompt_mean")
    evaluated = abs(value - right_value) / scale
    assert (
        max(own, evaluated, first, woken)
        < TOLERANCE
        < 1e-2
        < relative_error(gradients[0][0].view_as(right[1]), right[1])
    )
    assert any("NeMo-RL worker 0" in line for line in lines)
    assert any("aggregation proved" in line for line in lines)
    assert "Pass grpo_train the loss that aggregate(...) returned" in refused
    record_errors(record_property, NEMO_RL, "started: `token_level_loss=true`", own)
    record_errors(record_property, NEMO_RL, "started: `eval_mode`, an evaluation", ours=evaluated)
    record_errors(record_property, NEMO_RL, "started: first step", ours=first)
    record_errors(record_property, NEMO_RL, "started: step after sleep", ours=woken)

"""miles from its own start: MILES_PATH=~/miles, and Ray.

Real: miles's command line, placement groups, `RayTrainGroup`, the actor's `__init__`, `init`, `train`, `sleep` and
`wake_up` in Ray's workers with miles's own `ReloadableProcessGroup`, and all that a training step of theirs calls.
Stubbed: the GPU, the sampler and its options, Hugging Face's config and tokenizer, weight transfer, Megatron's fused
cross entropy, and the model, which is a table of logits whose optimizer keeps gradients.
"""

import asyncio
import dataclasses
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkouts import MILES, checkout, record_errors
from ranks import run_ranks
from ray_workers import gradients_of, local_ray
from slime_launches import (
    CP,
    DP,
    HOOKS,
    NOT_USED,
    STARTED,
    TOLERANCE,
    allow_offloading,
    compute_in_float32,
    data_of,
    error_of,
    group_type,
    model_and_optimizer,
    step_of_a_launch,
)  # fmt: skip

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_REAL = ("ray", "pydantic", "miles.utils.audit_utils", "miles.utils.http_utils")
_FURTHER: tuple[str, ...] = ("polars", "mooncake", "pybase64", "setproctitle", "starlette", "uvicorn", "fastapi")
_FURTHER += ("aiofiles", "blobfile", "omegaconf", "httpx", "megatron.training.tokenizer")
ENGINE = dataclasses.replace(
    MILES, stand_ins=(*(name for name in MILES.stand_ins if name not in _REAL), *NOT_USED, *_FURTHER)
)


def stub() -> None:
    """What a machine without GPU, sampler and checkpoint lacks."""
    compute_in_float32()
    torch.cuda.mem_get_info = lambda *_: (2**40, 2**40)
    actor, arguments, initialize = (
        importlib.import_module(f"miles.{name}")
        for name in ("backends.megatron_utils.actor", "utils.arguments", "backends.megatron_utils.initialize")
    )
    no_checkpoint: Any = lambda *_, **__: SimpleNamespace(vocab_size=100)  # noqa: E731
    nothing: Any = lambda *_, **__: None  # noqa: E731
    vars(arguments).update(load_hf_config=no_checkpoint, hf_validate_args=nothing, sglang_validate_args=nothing)
    vars(initialize).update(register_hf_config_aliases=nothing)
    backuper = SimpleNamespace(backup=lambda tag: None, restore=lambda tag: None, backup_tags={"actor"})
    vars(actor).update(
        load_hf_config=no_checkpoint, load_tokenizer=no_checkpoint,
        TensorBackuper=SimpleNamespace(create=lambda **_: backuper),
        UpdateWeightFromDistributed=lambda *_, **__: SimpleNamespace(pop_metrics=dict),
        initialize_model_and_optimizer=model_and_optimizer, verify_megatron_parallel_state=nothing,
    )  # fmt: skip
    vars(importlib.import_module("miles_plugins.models.cp_utils"))["detect_and_setup_hybrid_cp"] = nothing


async def trained(group: Any, args: Any) -> tuple[list[list[torch.Tensor]], str]:
    """Two rollouts, with the workers put to sleep in between."""
    store = importlib.import_module("miles.utils.object_store").get_instance
    await group.init()
    workers = group._actor_handles
    references = [store().put(data_of(step_of_a_launch(), dp_rank)) for dp_rank in range(DP)]
    ray.get([worker.train.remote(0, references) for worker in workers])
    ray.get([worker.__ray_call__.remote(allow_offloading) for worker in workers])
    await group.offload()
    await group.onload()  # miles's groups are other ones from here on, behind the same objects
    ray.get([worker.__ray_call__.remote(allow_offloading, False) for worker in workers])
    ray.get([worker.train.remote(1, references) for worker in workers])
    gradients = ray.get([worker.__ray_call__.remote(gradients_of) for worker in workers])
    return gradients, ray.get(workers[0].__ray_call__.remote(group_type))


def drive(root: str, flags: list[str]) -> tuple[list[list[torch.Tensor]], str, list[str]]:
    """As miles's train.py up to the first rollouts: gradients of each worker, its groups' type, the workers' lines."""
    with local_ray(__name__, root, gpus=DP * CP) as lines:
        sys.argv = ["train.py", *STARTED.split(), *flags]
        args = importlib.import_module("miles.utils.arguments").parse_args()
        args.enable_gloo_process_groups = True  # the installed Megatron has another name for it
        importlib.import_module("miles.utils.object_store").init_instance(args)
        placement = importlib.import_module("miles.ray.placement_group")
        group = placement.allocate_train_group(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, placement.create_placement_groups(args)["actor"],
            role="actor", with_ref=False, rollout_manager=None,
        )  # fmt: skip
        gradients, groups = asyncio.run(trained(group, args))
        return gradients, groups, lines()


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Two rollouts, with the workers put to sleep in between, which destroys all groups and builds them again."""
    gradients, groups, lines = run_ranks(1, drive, checkout(MILES), HOOKS)[0]
    print(groups, *lines, sep="\n")
    assert groups == "ReloadableProcessGroup"
    error = error_of(gradients, "constant", 40.0)
    assert [len(of_worker) for of_worker in gradients] == [2] * DP * CP
    assert error < TOLERANCE
    record_errors(record_property, MILES, "started: two rollouts, groups built again in between", ours=error)

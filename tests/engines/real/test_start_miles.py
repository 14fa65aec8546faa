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
from slime_launches import CP, DP, compute_in_float32
from slime_starts import (
    HOOKS,
    NOT_USED,
    STARTED,
    Rollouts,
    allow_offloading,
    data_of,
    error_of_rollouts,
    group_type,
    step_of_a_launch,
    stub_actor,
)  # fmt: skip

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_REAL = ("ray", "pydantic", "miles.utils.audit_utils", "miles.utils.http_utils")
_FURTHER: tuple[str, ...] = ("polars", "mooncake", "pybase64", "setproctitle", "starlette", "uvicorn", "fastapi")
_FURTHER += ("aiofiles", "blobfile", "omegaconf", "httpx", "sglang_router", "megatron.training.tokenizer")
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
    vars(actor).update(
        load_hf_config=no_checkpoint, load_tokenizer=no_checkpoint, verify_megatron_parallel_state=nothing
    )  # fmt: skip
    stub_actor("miles")
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


def drive(root: str) -> Rollouts:
    """As miles's train.py up to two rollouts, with the hook and its counts."""
    with local_ray(__name__, root, gpus=DP * CP) as lines:
        sys.argv = ["train.py", *STARTED.split(), *HOOKS]
        args = importlib.import_module("miles.utils.arguments").parse_args()
        args.enable_gloo_process_groups = True  # the installed Megatron has another name for it
        importlib.import_module("miles.utils.object_store").init_instance(args)
        placement = importlib.import_module("miles.ray.placement_group")
        group = placement.allocate_train_group(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, placement.create_placement_groups(args)["actor"],
            role="actor", with_ref=False, rollout_manager=None,
        )  # fmt: skip
        gradients, groups = asyncio.run(trained(group, args))
        return gradients, lines(), groups


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Two rollouts, with the workers put to sleep in between, which destroys all groups and builds them again."""
    error = error_of_rollouts(run_ranks(1, drive, checkout(MILES))[0])
    record_errors(record_property, MILES, "started: two rollouts, groups built again in between", ours=error)

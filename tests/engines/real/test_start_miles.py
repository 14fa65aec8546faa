"""miles from its own start: MILES_PATH=~/miles, and Ray.

Real: miles's command line, placement groups, `RayTrainGroup`, the actor's `__init__`, `init`, `compute_log_prob`,
`train`, `sleep`, `wake_up` and `save_model` in Ray's workers with miles's own `ReloadableProcessGroup`, all that a
training step of theirs calls, and `init` of new workers with `--load`.
Stubbed: the GPU, the sampler and its options, Hugging Face's config and tokenizer, weight transfer, Megatron's fused
cross entropy, and the model, a table of logits, by miles's option for a provider of models.
"""

import asyncio
import dataclasses
import importlib
import tempfile
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
    Start,
    allow_offloading,
    arguments_of,
    data_of,
    error_of_log_probs,
    group_type,
    keep_gradients,
    step_of_a_launch,
    step_to_evaluate,
    stub_names,
    stub_transfer,
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
    no_checkpoint: Any = lambda *_, **__: SimpleNamespace(vocab_size=100)  # noqa: E731
    nothing: Any = lambda *_, **__: None  # noqa: E731
    of_megatron = "miles.backends.megatron_utils"
    no_options = {"hf_validate_args": nothing, "sglang_validate_args": nothing}
    stub_names("miles.utils.arguments", load_hf_config=no_checkpoint, **no_options)
    stub_names(f"{of_megatron}.initialize", register_hf_config_aliases=nothing)
    of_actor = {"load_hf_config": no_checkpoint, "load_tokenizer": no_checkpoint}
    stub_names(f"{of_megatron}.actor", verify_megatron_parallel_state=nothing, **of_actor)
    stub_transfer("miles")
    stub_names("miles_plugins.models.cp_utils", detect_and_setup_hybrid_cp=nothing)


def error_of_evaluation(actor: Any, references: Any) -> float:
    """In a worker: of the log-probs that its forward-only pass gives."""
    module = importlib.import_module(type(actor).__module__)
    data, held = module.get_rollout_data(actor.args, references, witness_info=None)
    with held:
        iterator, num_microbatches = module.get_data_iterator(actor.args, actor.model, data)
        return error_of_log_probs(actor.compute_log_prob(iterator, num_microbatches, rollout_id=0), data)


async def trained(launch: Any, lines: Any) -> Start:
    """An evaluation and two rollouts, with the workers put to sleep in between, and one from their checkpoint."""
    group, store = launch(), importlib.import_module("miles.utils.object_store").get_instance
    of_steps, to_evaluate = (
        [store().put(data_of(step, dp_rank)) for dp_rank in range(DP)]
        for step in (step_of_a_launch(), step_to_evaluate())
    )

    def of_each(group: Any, function: Any, *given: Any) -> Any:
        return ray.get([worker.__ray_call__.remote(function, *given) for worker in group._actor_handles])

    await group.init()
    of_each(group, keep_gradients)
    evaluated, before = max(of_each(group, error_of_evaluation, to_evaluate)), lines()
    ray.get([worker.train.remote(0, of_steps) for worker in group._actor_handles])
    of_each(group, allow_offloading)
    await group.offload()
    await group.onload()  # miles's groups are other ones from here on, behind the same objects
    of_each(group, allow_offloading, False)
    ray.get([worker.train.remote(1, of_steps) for worker in group._actor_handles])
    await group.save_model(1)
    gradients, groups = of_each(group, gradients_of), of_each(group, group_type)[0]
    for worker in group._actor_handles:
        ray.kill(worker)
    group = launch(resumed=True)
    await group.init()
    of_each(group, keep_gradients)
    ray.get([worker.train.remote(2, of_steps) for worker in group._actor_handles])
    return Start(evaluated, before, gradients, of_each(group, gradients_of), lines(), groups)


def drive(root: str) -> Start:
    """As miles's train.py, with the hook and its counts."""
    with local_ray(__name__, root, gpus=DP * CP) as lines, tempfile.TemporaryDirectory() as folder:
        placement = importlib.import_module("miles.ray.placement_group")
        of_workers: list[Any] = []

        def launch(resumed: bool = False) -> Any:
            loaded = ["--load", f"{folder}/saved"] if resumed else ["--ref-load", folder]
            args = arguments_of("miles", [*HOOKS, *loaded, "--save", f"{folder}/saved"])
            if not resumed:
                importlib.import_module("miles.utils.object_store").init_instance(args)
            of_workers[:] = of_workers or [placement.create_placement_groups(args)["actor"]]
            nodes = args.actor_num_nodes, args.actor_num_gpus_per_node
            no_others: dict[str, Any] = {"role": "actor", "with_ref": False, "rollout_manager": None}
            return placement.allocate_train_group(args, *nodes, *of_workers, **no_others)

        return asyncio.run(trained(launch, lines))


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Sleep destroys all groups, and they are built again when workers wake up; the third rollout is of new workers."""
    (start,) = run_ranks(1, drive, checkout(MILES))
    evaluated, (first, woken, resumed) = start.errors()
    record_errors(record_property, MILES, "started: `compute_log_prob`, an evaluation", ours=evaluated)
    record_errors(record_property, MILES, "started: first step", ours=first)
    record_errors(record_property, MILES, "started: step after sleep", ours=woken)
    record_errors(record_property, MILES, "started: step from a checkpoint", ours=resumed)

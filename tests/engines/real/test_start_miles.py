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
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import slime_starts
import torch
from checkouts import MILES
from ray_workers import nothing, stub_names
from slime_launches import compute_in_float32
from slime_starts import HOOKS, NOT_USED, error_of_log_probs, record_start, started, stub_transfer

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
    of_megatron = "miles.backends.megatron_utils"
    no_options = {"hf_validate_args": nothing, "sglang_validate_args": nothing}
    stub_names("miles.utils.arguments", load_hf_config=no_checkpoint, **no_options)
    stub_names(f"{of_megatron}.initialize", register_hf_config_aliases=nothing)
    of_actor = {"load_hf_config": no_checkpoint, "load_tokenizer": no_checkpoint}
    stub_names(f"{of_megatron}.actor", verify_megatron_parallel_state=nothing, **of_actor)
    stub_transfer("miles")
    stub_names("miles_plugins.models.cp_utils", detect_and_setup_hybrid_cp=nothing)


class Calls(slime_starts.Calls):
    """Those of miles's train.py."""

    handles, start = "_actor_handles", "init"
    of_group: ClassVar[dict[str, Any]] = {"role": "actor", "with_ref": False, "rollout_manager": None}

    def __init__(self, engine: str, args: Any) -> None:
        self.ray, self.store = ray, importlib.import_module("miles.utils.object_store")
        self.store.init_instance(args)

    def put(self, data: dict[str, Any]) -> Any:
        return self.store.get_instance().put(data)

    def train(self, group: Any, rollout: int, data: list[Any]) -> Any:
        return ray.get([worker.train.remote(rollout, data) for worker in group._actor_handles])

    def wait(self, result: Any) -> None:
        asyncio.run(result)

    @staticmethod
    def error_of_evaluation(actor: Any, references: Any) -> float:
        module = importlib.import_module(type(actor).__module__)
        data, held = module.get_rollout_data(actor.args, references, witness_info=None)
        with held:
            iterator, num_microbatches = module.get_data_iterator(actor.args, actor.model, data)
            return error_of_log_probs(actor.compute_log_prob(iterator, num_microbatches, rollout_id=0), data)


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Sleep destroys all groups, and they are built again when workers wake up; the third rollout is of new workers."""
    record_start(record_property, MILES, started(__name__, MILES, HOOKS, Calls))

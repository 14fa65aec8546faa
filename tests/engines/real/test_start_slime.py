"""slime from its own start: SLIME_PATH=~/slime, and Ray.

Real: slime's command line, placement groups, `RayTrainGroup`, the actor's `__init__`, `init`, `compute_log_prob`,
`train`, `sleep`, `wake_up` and `save_model` in Ray's workers with slime's own `ReloadableProcessGroup`, all that a
training step of theirs calls, and `init` of new workers with `--load`.
Stubbed: the GPU, the sampler, Hugging Face's config, tokenizer and weights, weight transfer, and the model, a table of
logits, by slime's option for a provider of models.
"""

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkouts import SLIME
from slime_starts import HOOKS, MISSPELT, NOT_USED, assert_misspelt_option_is_said, record_start, started, stub_files

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ENGINE = dataclasses.replace(SLIME, stand_ins=(*SLIME.stand_ins, *NOT_USED, "sglang", "sglang_router"))


def stub() -> None:
    """What a machine without GPU, sampler and checkpoint lacks."""
    cpu = torch.device("cpu")
    accelerator = importlib.import_module("slime.utils.accelerator")
    vars(accelerator)["_ACCELERATOR"] = SimpleNamespace(
        device=lambda index=None: cpu, device_type="cpu", current_device=lambda: cpu, set_device=lambda index: None,
        set_allocator_expandable_segments=lambda: False, synchronize=lambda *_: None, empty_cache=lambda: None,
        mem_get_info=lambda *_: (2**40, 2**40), memory_allocated=lambda *_: 0, memory_reserved=lambda *_: 0,
        communication_backend_name="gloo", is_available=lambda: True, visible_devices_env_key=lambda: "NONE",
        resolve_visible_device_id=int, communication_backend=lambda default: default, supports=lambda capability: False,
        manual_seed=lambda seed: None, distributed_device_id=lambda index=None: None,
    )  # fmt: skip
    stub_files("slime")


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Sleep destroys all groups, and they are built again when workers wake up; the third rollout is of new workers."""
    record_start(record_property, SLIME, started(__name__, SLIME, HOOKS))


def test_a_misspelt_option_is_said_in_the_worker() -> None:
    assert_misspelt_option_is_said(started(__name__, SLIME, MISSPELT), "slime")

"""vime from its own start: VIME_PATH=~/vime, and Ray.

Real and stubbed is what test_start_slime.py says of slime, of which vime is a fork; stubbed is also a module of
Megatron that the installed version has elsewhere.
"""

import dataclasses
from typing import Any

import pytest
import torch
from checkouts import VIME
from slime_starts import HOOKS, MISSPELT, NOT_USED, assert_misspelt_option_is_said, record_start, started, stub_files

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_STUBBED = (*(name for name in VIME.stand_ins if name != "ray"), "vllm", "vllm_router", "megatron.training.tokenizer")
ENGINE = dataclasses.replace(VIME, stand_ins=(*_STUBBED, *NOT_USED))


def stub() -> None:
    """What a machine without GPU, sampler and checkpoint lacks."""
    torch.cuda.mem_get_info = lambda *_: (2**40, 2**40)
    stub_files("vime")


def test_workers_of_a_launch_aggregate_as_asked(record_property: Any) -> None:
    """Sleep destroys all groups, and they are built again when workers wake up; the third rollout is of new workers."""
    record_start(record_property, VIME, started(__name__, VIME, HOOKS))


def test_a_misspelt_option_is_said_in_the_worker() -> None:
    assert_misspelt_option_is_said(started(__name__, VIME, MISSPELT), "vime")

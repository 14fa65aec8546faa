"""Imports of the fork server before it forks ranks: the real Megatron stack, redirected if tests run on the CPU."""

import argparse
import contextlib
import gc
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until all is imported: see conftest.py

from device import DEVICE

if DEVICE == "cpu":
    import megatron_on_cpu

    megatron_on_cpu.install()

import megatron.training  # noqa: F401
import packed_attention  # noqa: F401
import pretrain_grpo  # noqa: F401
import table_step  # noqa: F401
import world  # noqa: F401


def prepare_launches() -> None:
    """Megatron parses the sources of its dataclasses whenever it builds its parser: half the time of a small launch."""
    import megatron.core.tokenizers.text  # noqa: F401
    from megatron.training import argument_utils, arguments

    factory, known = argument_utils.ArgumentGroupFactory, dict[type, Any]()
    read = factory._get_field_docstrings

    def read_once(self: Any, config: type) -> Any:
        if config not in known:
            known[config] = read(self, config)
        return known[config]

    factory._get_field_docstrings = read_once
    arguments.add_megatron_arguments(argparse.ArgumentParser())


with contextlib.suppress(ImportError, AttributeError):  # older versions have neither
    prepare_launches()
gc.freeze()  # ranks share these pages as long as no collection of theirs goes through them
gc.enable()

"""A local Ray without GPUs whose workers prepare themselves for an engine: where its code lies, what is stubbed.

A driver runs in a process of its own (`run_ranks(1, drive, ...)`); each worker is a new process, as on a cluster. Ray is
told of GPUs that do not exist, for engines ask for them; CUDA is the CPU in every process (`megatron_on_cpu`).
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkouts
from checkouts import Framework, stand_in
from fork_server import PYTHONPATH

_ENGINE = "TEST_RAY_ENGINE"
#: torchrun's, which `run_ranks` gives the driver: each engine sets those of its workers.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LINE = re.compile(r"^.*?(megatron_rl_loss(?: in [^:]+)?: .*)$", re.MULTILINE)


def prepare(name: str, root: str, stub: str, more: tuple[str, ...]) -> None:
    """In a process: the engine's code is importable, what is not installed has stand-ins, and `stub` has been called.

    `stub` is the dotted name of a function of a test file, which replaces what needs a GPU, a sampler or a checkpoint.
    """
    framework: Framework = getattr(checkouts, name)
    stand_in(replace(framework, stand_ins=(*framework.stand_ins, *more)), root)
    sys.path.append(root)
    module, _, function = stub.rpartition(".")
    getattr(importlib.import_module(module), function)()


def set_up_worker() -> None:
    """Called by Ray in every new worker, before it has any of the engine's code."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    prepare(*json.loads(os.environ[_ENGINE]))


@contextmanager
def local_ray(
    name: str, root: str, stub: str, more: tuple[str, ...] = (), *, gpus: int, variables: dict[str, str] | None = None
) -> Iterator[Callable[[], list[str]]]:
    """Ray for a driver of the engine `checkouts.<name>`; gives what returns the library's lines of all workers so far.

    `variables` are those of the user's runtime environment.
    """
    import ray

    for variable in [*_OF_TORCHRUN, *(key for key in os.environ if key.startswith("TORCHELASTIC"))]:
        os.environ.pop(variable, None)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts its entries
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    of_engine = json.dumps([name, root, stub, more])
    environment = {"PYTHONPATH": PYTHONPATH, _ENGINE: of_engine, "OMP_NUM_THREADS": "1", **(variables or {})}
    prepare(name, root, stub, more)
    ray.init(
        num_cpus=2 * gpus + 2, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
        object_store_memory=2**27,
        runtime_env={"env_vars": environment, "worker_process_setup_hook": "ray_workers.set_up_worker"},
    )  # fmt: skip
    logs = Path(importlib.import_module("ray._private.worker")._global_node.get_logs_dir_path())

    def lines() -> list[str]:
        found = [line for log in sorted(logs.glob("worker-*.out")) for line in _LINE.findall(log.read_text())]
        return [*dict.fromkeys(found)]

    try:
        yield lines
    finally:
        ray.shutdown()

"""A local Ray without GPUs whose workers prepare themselves for an engine: where its code lies, what is stubbed.

A driver runs in a process of its own (`run_ranks(1, drive, ...)`), each worker in a new one, as on a cluster. Ray is
told of GPUs that do not exist, because engines ask for them; CUDA is the CPU in every process (`megatron_on_cpu`).
"""

import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkouts import stand_in
from fork_server import PYTHONPATH

_ENGINE = "TEST_RAY_ENGINE"
#: torchrun's, which `run_ranks` gives the driver: each engine sets those of its workers.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LINE = re.compile(r"^.*?(megatron_rl_loss(?: in [^:]+)?: .*)$", re.MULTILINE)


def prepare(module: str, root: str) -> None:
    """In a process: the engine's code is importable, and what is missing here is stubbed.

    `module` is that of a test file: its `ENGINE` has the stand-ins, its `stub()` replaces what needs a GPU, a sampler
    or a checkpoint.
    """
    test: Any = importlib.import_module(module)
    stand_in(test.ENGINE, root)
    sys.path.append(root)
    test.stub()


def set_up_worker() -> None:
    """Called by Ray in every new worker, before it has any of the engine's code."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    prepare(*json.loads(os.environ[_ENGINE]))


@contextmanager
def local_ray(
    module: str, root: str, *, gpus: int, variables: dict[str, str] | None = None, seconds: int = 140
) -> Iterator[Callable[[], list[str]]]:
    """Ray for a driver, prepared as in `prepare`; gives what returns the library's lines of all workers so far.

    `variables` are those of the user's runtime environment. After so many seconds a driver that hangs ends, and Ray
    with it.
    """
    ray: Any = importlib.import_module("ray")

    for variable in [*_OF_TORCHRUN, *(key for key in os.environ if key.startswith("TORCHELASTIC"))]:
        os.environ.pop(variable, None)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts its entries
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {"PYTHONPATH": PYTHONPATH, _ENGINE: json.dumps([module, root]), "OMP_NUM_THREADS": "1"}
    prepare(module, root)
    ray.init(
        num_cpus=16 * gpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
        object_store_memory=2**27,
        runtime_env={
            "env_vars": environment | (variables or {}), "worker_process_setup_hook": "ray_workers.set_up_worker",
        },
    )  # fmt: skip
    node = importlib.import_module("ray._private.worker")._global_node
    logs = Path(node.get_logs_dir_path())

    def lines() -> list[str]:
        found = [line for log in sorted(logs.glob("worker-*.out")) for line in _LINE.findall(log.read_text())]
        return [*dict.fromkeys(found)]

    def end() -> None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        os._exit(1)  # Ray's calls do not return where a worker hangs

    watch = threading.Timer(seconds, end)
    watch.start()
    try:
        yield lines
    finally:
        watch.cancel()
        ray.shutdown()

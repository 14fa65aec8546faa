"""A local Ray without GPUs whose workers prepare themselves for an engine: where its code lies, what is stubbed.

A driver runs in a process of its own (`run_ranks(1, drive, ...)`), each worker in a new one, as on a cluster. Ray is
told of GPUs that do not exist, because engines ask for them; CUDA is the CPU in every process (`megatron_on_cpu`).
"""

import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron_on_cpu
from checkouts import stand_in
from fork_server import PYTHONPATH
from pages import code_of

#: Seconds that guard against hangs; `run_ranks` and pytest end a test somewhat later.
LIMIT = 540
os.environ.setdefault("RAY_raylet_start_wait_time_s", "200")  # on a busy machine; Ray reads it when it is imported
os.environ.setdefault("RAY_enable_worker_prestart", "0")  # an idle worker imports as much as one of the engine
_ENGINE = "TEST_RAY_ENGINE"
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


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """In `stub()`: `change(module)` when the engine imports it, or now if it is imported.

    An import by the test may be too early, for Ray that is called at import, or in another order than the engine's.
    """
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, change))


def stub_names(module: str, **names: Any) -> None:
    """In `stub()`: put the names into the module when the engine imports it."""
    after_import(module, lambda imported: vars(imported).update(names))


def nothing(*_: Any, **__: Any) -> None:
    """In the place of an engine's function that has nothing to do here."""


class _AfterImport:
    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which makes CUDA the CPU in its thread: Ray's for an actor that has async methods, or an engine's.

    The main thread of a process has that from its start.
    """

    def call(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            megatron_on_cpu.redirect_this_thread()
        return function(*args, **options)

    return call


def set_up_worker() -> None:
    """Called by Ray in every new worker, before it has any of the engine's code."""
    megatron_on_cpu.install()
    prepare(*json.loads(os.environ[_ENGINE]))


def of_workers(module: str, root: str) -> dict[str, str]:
    """The variables by which `set_up_worker` prepares a process."""
    return {_ENGINE: json.dumps([module, root])}


def forget_torchrun() -> None:
    """In a driver: drop the variables that `run_ranks` gave it, since an engine sets those of its workers."""
    for variable in [*_OF_TORCHRUN, *(key for key in os.environ if key.startswith("TORCHELASTIC"))]:
        os.environ.pop(variable, None)


@contextmanager
def class_of_page(engine: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A new folder with the engine's page's code as `{engine}_actor`, which this process and workers can import.

    For workers that needs the variables which are given beside the folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        (shown,) = code_of(f"engines/{engine}.md")
        Path(folder, f"{engine}_actor.py").write_text(shown)
        sys.path.insert(0, folder)
        yield folder, {"PYTHONPATH": os.pathsep.join([folder, PYTHONPATH])}


@contextmanager
def local_ray(
    module: str, root: str, *, gpus: int, variables: dict[str, str] | None = None, by_engine: bool = False,
) -> Iterator[Callable[[], list[str]]]:  # fmt: skip
    """Ray for a driver, prepared as in `prepare`; gives what returns the library's lines of all workers so far.

    `variables` are those of the user's runtime environment. With `by_engine`, Ray starts when the engine's own code
    calls `ray.init`, with the runtime environment of that call. After `LIMIT` seconds a driver that hangs ends, and Ray
    with it, and says so in the last output that the failed test shows.
    """
    ray: Any = importlib.import_module("ray")

    forget_torchrun()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts its entries
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **of_workers(module, root)}
    prepare(module, root)
    init = ray.init

    def start(runtime_env: Any = None, namespace: str | None = None, **_: Any) -> Any:
        given = environment | (runtime_env or {}).get("env_vars", {})
        hook = {"env_vars": given, "worker_process_setup_hook": "ray_workers.set_up_worker"}
        return init(
            num_cpus=16 * gpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
            object_store_memory=2**27, runtime_env=hook, namespace=namespace,
        )  # fmt: skip

    ray.init = start
    if not by_engine:
        ray.init({"env_vars": variables or {}})

    def end() -> None:
        said = f"Watchdog: {module} had not ended after {LIMIT} s. A worker hangs, or the machine is busy."
        os.write(2, f"{said}\n".encode())
        if _node() is not None:
            os.write(2, "\n".join(["The library's lines until then:", *lines_of_workers(), ""]).encode())
            _node().kill_all_processes(check_alive=False, allow_graceful=False)
        os._exit(1)  # Ray's calls do not return where a worker hangs

    watch = threading.Timer(LIMIT, end)
    watch.start()
    try:
        yield lines_of_workers
    finally:
        watch.cancel()
        ray.shutdown()
        ray.init = init


def _node() -> Any:
    return importlib.import_module("ray._private.worker")._global_node


def lines_of_workers() -> list[str]:
    """In a driver or a worker: the library's lines of all workers so far, each once for a worker."""
    logs = sorted(Path(_node().get_logs_dir_path()).glob("worker-*.out"))
    return [line for log in logs for line in dict.fromkeys(lines_in(log))]


def on_each(workers: Any, function: Callable[..., Any], *given: Any) -> list[Any]:
    """Of each of Ray's workers, what `function(worker, *given)` returns there."""
    ray: Any = importlib.import_module("ray")
    results: list[Any] = ray.get([worker.__ray_call__.remote(function, *given) for worker in workers])
    return results


def gradients_of(worker: Any) -> list[Any]:
    """In a worker: what its optimizer, of `keeping_gradients`, was handed."""
    return list(worker.optimizer.gradients)


def lines_in(log: Path) -> list[str]:
    """The library's lines in a log."""
    return lines_of(log.read_text())


def lines_of(text: str) -> list[str]:
    return _LINE.findall(text)

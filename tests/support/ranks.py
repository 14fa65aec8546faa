"""Run a function on several ranks, forked from one warm process that has imported Megatron.

The standard library's fork server is that process: it is started once, imports `warm_megatron`, and forks a fresh rank
in a few milliseconds. Every rank has pristine globals. The server never runs a kernel, so forking it is safe.

With ``TEST_DEVICE=cuda`` every rank is a new process with a GPU of its own and NCCL: a process that has looked at its
GPUs must not be forked. A test for more ranks than the machine has GPUs is skipped.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repository import EXAMPLES, ROOT

ON_GPUS = os.environ.get("TEST_DEVICE") == "cuda"

#: Where ranks find the modules of the functions they are handed: every folder of tests, support, the example.
_TESTS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})
PYTHONPATH = os.pathsep.join([*_TESTS, str(ROOT / "tests" / "support"), str(EXAMPLES), str(ROOT)])
_context: Any = multiprocessing.get_context("spawn" if ON_GPUS else "forkserver")
if not ON_GPUS:
    _context.set_forkserver_preload(["warm_megatron"])


def warm_up() -> None:
    """Start the process that forks ranks, without waiting for what it imports."""
    if not ON_GPUS:
        os.environ["PYTHONPATH"] = PYTHONPATH  # the server and its children find the same modules as this process
        multiprocessing.forkserver.ensure_running()


class RankError(RuntimeError):
    """Some ranks failed. `errors` holds the exception text by rank; ranks that were stopped have none."""

    def __init__(self, errors: dict[int, str], output: str) -> None:
        self.errors = errors
        listed = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
        super().__init__(f"{listed}\n--- last output\n{output[-3000:]}")


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
    """``function(*args)`` on every rank, in this process's environment and torchrun's; the results by rank.

    Raises RankError once every rank has ended, or `timeout_s` after the start if some hang.
    """
    if ON_GPUS and world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, there are {torch.cuda.device_count()}")
    warm_up()
    # In this process, as torchrun has it: a port that is chosen here for a rank may be taken before the rank is there.
    store = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The server keeps the environment it was started in; ranks get that of now.
    variables = dict(os.environ) | environment(world_size, store.port)
    pipes: dict[Connection, int] = {}
    processes = []
    with tempfile.NamedTemporaryFile(mode="r", suffix=".log") as log:
        for rank in range(world_size):
            receive, send = _context.Pipe(duplex=False)
            call = (send, log.name, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, args)
            process = _context.Process(target=_rank_main, args=call, daemon=False)
            process.start()
            send.close()
            pipes[receive] = rank
            processes.append(process)
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while pipes and (left := deadline - time.monotonic()) > 0:
            for receive in wait(list(pipes), timeout=left):
                rank = pipes.pop(receive)  # type: ignore[call-overload]
                try:
                    succeeded, value = pickle.loads(receive.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "ended without a result"
                (results if succeeded else errors)[rank] = value
        errors |= dict.fromkeys(pipes.values(), f"still running after {timeout_s} s")
        for process in processes:
            process.join(timeout=5 if not errors else 0.5)
            # The whole group: saving a checkpoint starts a helper process that would outlive its rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if errors:
            raise RankError(errors, Path(log.name).read_text(errors="replace"))
    return [results[rank] for rank in range(world_size)]


def environment(world_size: int, port: int) -> dict[str, str]:
    """The environment of torchrun but for a rank's number; the store listens at `port`."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with tensor or context parallelism
    }


def start_process_group() -> None:
    """On a rank: torch's default group."""
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPUS else "gloo")


def bytes_reduced() -> list[int]:
    """On a rank, whose process ends with the test: the bytes of each later call of `all_reduce`."""
    sent, all_reduce = list[int](), dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    return sent


def _rank_main(
    send: Connection, log: str, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    with open(log, "ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        send.send_bytes(pickle.dumps(outcome))
    # Not a plain return: gloo's threads and Megatron's atexit hooks would wait for peers that are gone.
    os._exit(0)

"""Run a function on several ranks, forked from one warm process that has imported Megatron (`fork_server`).

With ``TEST_DEVICE=cuda`` ranks have GPUs and NCCL. Where there are fewer GPUs than ranks, up to four share one: each
names a host of its own to NCCL, which refuses two ranks of one host on one GPU, and sends by sockets. They take turns
on the GPU, which is slow; tests for more ranks are skipped.
"""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from fork_server import PYTHONPATH, connect


def warm_up() -> None:
    """Have the server import what ranks need, without waiting for it."""
    connect().close()


RANKS_PER_GPU = 4


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
    gpus = torch.cuda.device_count() if DEVICE == "cuda" else world_size
    if world_size > RANKS_PER_GPU * gpus:
        pytest.skip(f"needs {world_size} ranks, {gpus} GPUs have {RANKS_PER_GPU * gpus}")
    # In this process, as torchrun has it: a port that is chosen here for a rank may be taken before the rank is there.
    store = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = dict(os.environ) | environment(world_size, store.port) | {"PYTHONPATH": PYTHONPATH}
    ranks: dict[Connection, int] = {}
    with tempfile.NamedTemporaryFile(mode="r", suffix=".log") as log:
        for rank in range(world_size):
            connection = connect()
            rank_variables = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus)}
            if world_size > gpus:
                rank_variables |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
            connection.send_bytes(pickle.dumps((os.getcwd(), sys.path, rank_variables, log.name)))
            connection.send_bytes(pickle.dumps((function, args)))
            ranks[connection] = rank
        processes = [pickle.loads(connection.recv_bytes()) for connection in ranks]
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while ranks and (left := deadline - time.monotonic()) > 0:
            for receive in wait(list(ranks), timeout=left):
                rank = ranks.pop(receive)  # type: ignore[call-overload]
                try:
                    succeeded, value = pickle.loads(receive.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "ended without a result"
                (results if succeeded else errors)[rank] = value
        errors |= dict.fromkeys(ranks.values(), f"still running after {timeout_s} s")
        for process in processes:
            _end(process, 5 if not errors else 0.5)
        if errors:
            raise RankError(errors, Path(log.name).read_text(errors="replace"))
    return [results[rank] for rank in range(world_size)]


def _end(process: int, timeout_s: float) -> None:
    """Wait for the end of a rank, or kill it then, with what it has started: saving a checkpoint starts a helper."""
    with contextlib.suppress(ProcessLookupError):
        is_over = os.pidfd_open(process)
        wait([is_over], timeout_s)
        os.close(is_over)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


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
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")


def bytes_reduced() -> list[int]:
    """On a rank, whose process ends with the test: the bytes of each later call of `all_reduce`."""
    return _bytes_sent("all_reduce", 0)


def bytes_gathered() -> list[int]:
    """On a rank, whose process ends with the test: the bytes that each later all-gather into one tensor sends."""
    return _bytes_sent("all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor", 1)


def bytes_broadcast() -> list[int]:
    """As `bytes_gathered`, of broadcasts."""
    return _bytes_sent("broadcast", 0)


def _bytes_sent(name: str, argument: int) -> list[int]:
    sent, collective = list[int](), getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        sent.append(args[argument].nbytes)
        return collective(*args, **kwargs)

    setattr(dist, name, counting)
    return sent

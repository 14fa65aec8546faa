"""A process that has imported Megatron and forks ranks in a few milliseconds, one for all workers of a run of tests.

It imports at the first request, and ends with the process that started it. Every rank has pristine globals. The server
never runs a kernel, so forking it is safe.

With ``TEST_DEVICE=cuda`` it may not call CUDA either. Where an import did, every rank is a new process instead.
"""

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from device import DEVICE
from repository import EXAMPLES, ROOT

#: Where ranks find the modules of the functions they are handed: every folder of tests, support, the example.
_TESTS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})
PYTHONPATH = os.pathsep.join([*_TESTS, str(ROOT / "tests" / "support"), str(EXAMPLES), str(ROOT)])
#: Where tests run on GPUs: whether there are any is asked of NVML.
WITHOUT_CALLS_OF_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if DEVICE == "cuda" else {}
_ADDRESS = "TEST_FORK_SERVER"
_of_this_process: list[Any] = []


def start() -> None:
    """Start the server for this process and those that it starts later: they find its address in the environment."""
    folder = tempfile.TemporaryDirectory(prefix="ranks")
    address = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        command = [sys.executable, __file__, str(listener.fileno())]
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closed when this process ends
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": PYTHONPATH} | WITHOUT_CALLS_OF_CUDA,
        )
    _of_this_process[:] = server, folder
    os.environ[_ADDRESS] = address


def stop() -> None:
    server, folder = _of_this_process
    server.stdin.close()
    server.wait()
    folder.cleanup()


def connect() -> Connection:
    """To a rank, which waits for its call (see `_run_rank`); it ends at once if the connection is closed instead."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(os.environ[_ADDRESS])
    return Connection(client.detach())


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
        return  # nobody asked for a rank
    import torch  # not earlier: pytest's own process needs none of it

    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says that it has neither Transformer Engine nor Apex
        importlib.import_module("warm_megatron")  # unless Megatron is not installed: tests of the core need none
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # a rank that has ended
        connection = listener.accept()[0].detach()
        if os.fork() == 0:
            listener.close()
            if DEVICE == "cuda" and torch.cuda._is_in_bad_fork():
                os.set_inheritable(connection, True)
                os.execv(sys.executable, [sys.executable, __file__, "rank", str(connection)])
            _run_rank(Connection(connection))
        os.close(connection)


def _run_rank(connection: Connection) -> None:
    """Send the number of this process, receive a call, and send whether it succeeded and its result or error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    try:
        connection.send_bytes(pickle.dumps(os.getpid()))
        folder, path, environment, log = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        os._exit(0)
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    try:
        function, args = pickle.loads(connection.recv_bytes())
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        connection.send_bytes(pickle.dumps(outcome))
    # Not a plain return: gloo's threads and Megatron's atexit hooks would wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _run_rank(Connection(int(sys.argv[2])))
    _serve(socket.socket(fileno=int(sys.argv[1])))

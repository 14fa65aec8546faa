"""Run unmodified Megatron-Core and megatron.training without a GPU, on CPU and gloo, for trials and tests.

Megatron asks for "cuda" in many places. `install` redirects these requests to the CPU: it rewrites the device argument
of torch calls, and replaces the entry points of `torch.cuda` that have no meaning on a CPU (streams, events, memory
statistics, random states). `torch.cuda.is_available()` still returns False. No collective, no matrix product and no
function of Megatron that computes a number is replaced, so losses and gradients are Megatron's.

The redirect is slow, and no test of GPU kernels, NCCL, Transformer Engine, CUDA graphs or streams. Three functions of
Megatron's start-up are skipped; none of them computes (`prepare_training`).

Call `install()` before anything imports `megatron`, and `prepare_training()` before `pretrain`. Line numbers in the
comments are those of megatron-core 0.19.2.
"""

import contextlib
import functools
import os
import sys
import types
from typing import Any

import torch

# Imported before torch.cuda is patched: it keys a table by these functions and refuses two equal ones.
import torch._dynamo
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _means_cuda(device: object) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


#: Functions that name a device by position, in their output or in their name.
_NAME_A_DEVICE = {torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type, torch.Tensor.pin_memory}


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites "cuda" in the arguments of every torch function that runs under it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func not in _NAME_A_DEVICE:
                return func(*args)  # nearly every call: what is done before is most of the redirect's cost
            kwargs = {}
        elif "device" in kwargs or "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # what is offloaded, of which the original's storage is then emptied
        if func is torch.Tensor.to and len(args) > 1 and _means_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers compare it with "torch.cuda.FloatTensor" and so on (optimizer.py:1009, clip_grads.py:174).
            return func(*args).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")  # if redirected twice
        return func(*args, **kwargs)


class _NoStream:
    """A stream or an event on a CPU, where all operations run in order."""

    cuda_stream = 0
    device_index = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _NoStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)


class _CpuGenerators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


_installed: _CudaMeansCpu | None = None


def install() -> None:
    """Redirect "cuda" to the CPU for the life of this process's main thread. A second call does nothing.

    Raises RuntimeError on a machine with a GPU, and after an import of megatron, which keeps what this replaces.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("install() on a machine with a GPU: Megatron needs no CPU redirect there. Drop the call.")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron was imported before install(): the redirect comes too late. Call install() first.")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile
    os.environ.setdefault(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1"
    )  # asked for below compute capability 10 (arguments.py:1414)
    _replace_cuda_runtime()
    _installed = redirect_this_thread()


def redirect_this_thread() -> Any:
    """Redirect calls of the thread that calls this, too: each thread has function modes of its own. Gives the mode."""
    mode = _CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    return mode


def _replace_cuda_runtime() -> None:
    stream = _NoStream()
    cuda: Any = torch.cuda

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    replaced = {
        # A device, not an index: function modes are off inside backward, where Megatron allocates on it.
        "current_device": lambda: CPU,
        "device_count": lambda: 1,  # 0 makes initialize.py skip the model-parallel groups silently
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0),
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "memory_stats": lambda *args: {},
        "is_current_stream_capturing": lambda: False,
        # The CPU's generator is "the CUDA generator". torch.manual_seed calls manual_seed_all: it must not recurse.
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "default_generators": _CpuGenerators(),
        "_lazy_call": lambda call, **kwargs: call(),
    }
    no_ops = (
        "set_device synchronize empty_cache ipc_collect set_stream reset_peak_memory_stats manual_seed_all _lazy_init"
    )
    replaced |= dict.fromkeys(no_ops.split(), nothing)
    zeros = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    replaced |= dict.fromkeys(zeros.split(), zero)
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing


def prepare_training() -> None:
    """Let `megatron.training.pretrain` start without a GPU.

    `initialize_megatron` gets the argument that CUDA is not needed, which `pretrain` does not pass on. Its warm-up of
    fused kernels is skipped: it draws random numbers, as many as the layout asks for, from the generator that
    ``--use-cpu-initialization`` uses for the weights.
    """
    from megatron.training import initialize, training

    if not isinstance(training.initialize_megatron, functools.partial):
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    initialize._warmup_jit_function = lambda tp_size=None: None

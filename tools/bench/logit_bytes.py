"""Count the bytes that log-probs and entropy move per logit, forward and backward; needs no GPU.

    python tools/bench/logit_bytes.py [--slime PATH]

A lower bound of the time on a GPU, whose memory is what limits these functions. Operations of torch are counted by its
dispatcher: a tensor counts where it has at least half as many entries as the logits, once for each operation that reads
it and once for each that writes it. No cache is counted: a block of plain torch holds all logits, as on a device. Loads
and stores of the Triton kernels are counted in Triton's interpreter, which runs them on the CPU.

*Must move* is one read forward, one read and one write backward. *Launches* are operations of torch that do work, and
kernels; small ones too.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
import torch.distributed as dist
from logprobs import ENTROPY, megatron, ours, slimes
from timing import flags, peers, publish
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_loss.logprobs import choice
from megatron_rl_loss.logprobs.kept_ids import KeptIds
from megatron_rl_loss.logprobs.reading import Reading

TOKENS, VOCABULARY, KEPT = 64, 8192, 64
LOGITS = TOKENS * VOCABULARY
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Operations that move nothing.
FREE = {
    "view", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "expand", "detach", "alias", "as_strided",
    "unsafe_view", "unbind", "split", "reshape", "reshape_alias", "empty", "empty_like", "new_empty", "permute",
    "new_empty_strided", "empty_strided", "lift_fresh",
}  # fmt: skip
#: Operations that touch few entries of a large tensor.
AT_LABELS = ("index_put", "index", "scatter_add", "gather")
#: Operations that do not read the tensor that they write.
WRITE_ALONE = ("zeros", "zeros_like", "new_zeros", "fill", "zero", "copy", "new_full", "full")


class Counted(TorchDispatchMode):
    """The bytes of large tensors, and the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.launches = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].strip("_")
        if name not in FREE:
            self.launches += 1
            if name not in AT_LABELS:
                read = args[1:] if name in WRITE_ALONE else args
                self.bytes += large(read) + large(result)
        return result


def large(tensors: Any) -> int:
    """Bytes of the large tensors among these, each once."""
    found = {
        (tensor.data_ptr(), tensor.numel()): tensor.nbytes
        for tensor in tree_leaves(tensors)
        if isinstance(tensor, Tensor) and 2 * tensor.numel() >= LOGITS
    }
    return sum(found.values())


@contextmanager
def counting_kernels(counted: Counted) -> Iterator[None]:
    """Add what Triton's interpreter loads and stores, of the kernels of log-probs."""
    from triton.runtime import interpreter

    from megatron_rl_loss.logprobs import triton_kernels

    builder, choice.DEVICES = interpreter.InterpreterBuilder, {"cuda", "cpu"}
    load, store = builder.create_masked_load, builder.create_masked_store
    names = ("statistics", "combine", "differentiate")
    launches = {name: getattr(triton_kernels, name) for name in names}

    def counted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        counted.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(self, pointers, mask, *more)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        counted.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return store(self, pointers, value, mask, *more)

    def counted_launch(launch: Callable[..., Any], kernels: int) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            launched = counted.launches
            with torch.utils._python_dispatch._disable_current_modes():  # what the interpreter itself does
                result = launch(*args, **more)
            counted.launches = launched + kernels
            return result

        return run

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    for name in names:
        setattr(triton_kernels, name, counted_launch(launches[name], 2 if name == "differentiate" else 1))
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store, choice.DEVICES = load, store, {"cuda"}
        for name in names:
            setattr(triton_kernels, name, launches[name])


def count(way: Callable[..., Any], dtype: torch.dtype, uses_kernels: bool) -> Counted:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    with Counted() as counted:
        if uses_kernels:
            with counting_kernels(counted):
                differentiate(way, logits, labels)
        else:
            differentiate(way, logits * 1, labels)  # others overwrite the logits
            counted.bytes -= 2 * logits.nbytes  # the product
            counted.launches -= 1
    return counted


def differentiate(way: Callable[..., Any], logits: Tensor, labels: Tensor) -> None:
    values = [value for value in way(logits, labels) if value is not None]
    torch.autograd.grad(values, logits, [torch.empty_like(value) for value in values])


def main() -> None:
    args = flags(__doc__, "slime").parse_args()
    torch.set_num_threads(1)
    assert hasattr(Reading, "_block_tokens")
    Reading._block_tokens = lambda self, device: TOKENS  # type: ignore[method-assign]
    keep = torch.ones(TOKENS, VOCABULARY, dtype=torch.bool)
    ways: dict[str, tuple[Callable[..., Any], bool]] = {"Megatron, eager": (megatron, False)}
    for _, formulas in peers(args, SimpleNamespace()).values():
        for entropy, name in ENTROPY.items():
            ways[f"slime{name}"] = partial(slimes, formulas, -1, entropy=entropy), False
    for entropy, name in ENTROPY.items():
        ways[f"ours, plain torch{name}"] = partial(ours, entropy=entropy, kernel="torch"), False
    for entropy, name in ENTROPY.items():
        ways[f"ours, kernels{name}"] = partial(ours, entropy=entropy), True
    ways["ours, kernels, entropy, mask of kept ids"] = partial(ours, entropy=True, keep=keep), True
    ids = torch.rand(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).topk(KEPT).indices.sort().values
    kept = KeptIds(ids.flatten(), torch.arange(0, KEPT * TOKENS + 1, KEPT))
    ways[f"ours, kernels, entropy, {KEPT} kept ids"] = partial(ours, entropy=True, keep=kept), True
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [{"way": "must move"} | {f"{name}, bytes": 3 * dtype.itemsize for name, dtype in DTYPES.items()}]
        for way, (function, uses_kernels) in ways.items():
            row: dict[str, Any] = {"way": way}
            for name, dtype in DTYPES.items():
                count(function, dtype, uses_kernels)  # what a process does once: it compares kernels with plain torch
                counted = count(function, dtype, uses_kernels)
                row |= {f"{name}, bytes": round(counted.bytes / LOGITS, 1), f"{name}, launches": counted.launches}
            rows.append(row)
        dist.destroy_process_group()
    publish("logit_bytes", args, {"bytes per logit, forward and backward": rows})


if __name__ == "__main__":
    main()

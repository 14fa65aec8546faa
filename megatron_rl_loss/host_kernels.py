"""Joining masks, weighing them and weighted sums in C: host_kernels.c, in fewer passes than torch and NumPy need.

It is compiled when the package is installed, if there is a C compiler with OpenMP. Where it is not, or the environment
variable ``MEGATRON_RL_LOSS_HOST_KERNELS`` is 0, `available` is False, and `Samples` and reducers take torch and NumPy.
"""

import ctypes
import importlib.util
import os
import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

Array = np.ndarray[Any, Any]

#: Masks that can be read -> their place in FLAGS_OF_KIND in host_kernels.c. (An int8 of -1 reads as 255: refused too.)
_KINDS = {
    torch.bool: 0,
    torch.uint8: 0,
    torch.int8: 0,
    torch.int16: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.float32: 4,
    torch.float64: 5,
}
_INTERFACE = 1
#: Tokens worth a thread.
_TOKENS_A_THREAD = 2**17


def _load() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("megatron_rl_loss._host_kernels")
    if found is None or found.origin is None or os.environ.get("MEGATRON_RL_LOSS_HOST_KERNELS") == "0":
        return None
    try:
        library = ctypes.CDLL(found.origin)
        if ctypes.c_int64.in_dll(library, "mrl_interface").value != _INTERFACE:
            raise OSError(f"{found.origin} was compiled from another version: install megatron_rl_loss again")
    except OSError as error:
        warnings.warn(f"megatron_rl_loss goes without its host kernels, NumPy takes over: {error}", stacklevel=1)
        return None
    library.mrl_weigh_flags.restype = library.mrl_weighted_sums.restype = None
    return library


_library = _load()


def available() -> bool:
    """Whether these functions can be called."""
    return _library is not None


def are_readable(tensors: Sequence[Tensor], on_host: bool | None = None) -> bool:
    """Whether the values of these tensors, all of one dtype, lie in the host's memory one after the other.

    `on_host`: whether they are all on the host, where the caller knows.
    """
    return (
        (all(map(attrgetter("is_cpu"), tensors)) if on_host is None else on_host)
        and set(map(type, tensors)) <= {Tensor, Parameter}  # others may have no memory of their own
        and all(map(Tensor.is_contiguous, tensors))
        and not (tensors[0].is_floating_point() and any(map(Tensor.is_neg, tensors)))
    )


def join_flags(
    masks: Sequence[Tensor], dtypes: set[torch.dtype], starts: Array, lengths: Array, total_tokens: int
) -> tuple[Array, Array] | None:
    """Masks of zeros and ones in one buffer, and how many ones there are in each.

    Args:
        masks: 1-D tensors on one device, at least one.
        dtypes: those of the masks.
        starts, lengths: of each mask in the buffer, int64 [num_samples]; in order, without overlap, within the buffer.

    Returns:
        uint8 [total_tokens], 0 between the masks, and int64 [num_samples]; None if these masks cannot be read, or hold
        anything but 0 and 1.
    """
    first = masks[0]
    if len(dtypes) == 1 and are_readable(masks, on_host=first.is_cpu):
        addresses = np.fromiter(map(Tensor.data_ptr, masks), np.int64, len(masks))
    else:
        first = torch.cat(list(masks)).detach().cpu()
        addresses = first.data_ptr() + (lengths.cumsum() - lengths) * first.element_size()
    kind = _KINDS.get(first.dtype)
    if kind is None or not are_readable([first]):
        return None
    flags, ones = np.empty(total_tokens, np.uint8), np.empty(len(masks), np.int64)
    sizes = kind, len(masks), total_tokens
    odd = _call("mrl_join_flags", *sizes, addresses, lengths, starts, flags, ones, _num_threads(total_tokens))
    return None if odd else (flags, ones)


def weigh_flags(flags: Array, starts: Array, sample_weights: Array, segments: tuple[Array, Array]) -> Array:
    """``flags[t] * sample_weights[i]``, with i the sample of token t, float32 [num_local_tokens].

    Args:
        flags, starts: the buffer of `join_flags` and where each sample begins in it.
        sample_weights: float32 [num_samples].
        segments: starts and lengths of the pieces of the buffer that are wanted, int64 [num_segments]; in order,
            without overlap, within the buffer.
    """
    num_local = int(segments[1].sum())
    weights = np.empty(num_local, np.float32)
    sizes = len(starts), len(segments[0]), num_local
    _call("mrl_weigh_flags", *sizes, flags, starts, *segments, sample_weights, weights, _num_threads(num_local))
    return weights


def weighted_sums(rows: Sequence[Tensor], weights: Tensor) -> Tensor:
    """``sum_t weights[t] * row[t]`` over the tokens of weight other than 0, float32 [num_rows]; summed in float64.

    Rows and weights are `are_readable` float32 tensors [num_tokens].
    """
    addresses = np.array([row.data_ptr() for row in rows], np.int64)
    num_tokens = weights.numel()
    threads = _num_threads(num_tokens)
    sums = np.zeros((threads, len(rows)))
    _call("mrl_weighted_sums", len(rows), num_tokens, addresses, weights.data_ptr(), sums, threads)
    return torch.from_numpy(sums.sum(0).astype(np.float32))


def _num_threads(num_tokens: int) -> int:
    return max(1, min(torch.get_num_threads(), num_tokens // _TOKENS_A_THREAD))


def _call(name: str, *arguments: int | Array) -> int:
    """Call a C function that takes int64 numbers and addresses."""
    held = [given if isinstance(given, int) else np.ascontiguousarray(given) for given in arguments]
    passed = [
        ctypes.c_int64(given if isinstance(given, int) else given.__array_interface__["data"][0]) for given in held
    ]
    return int(getattr(_library, name)(*passed) or 0)

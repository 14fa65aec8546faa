"""Copies from the host to a device: from page-locked memory, so that the host waits for nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pinned(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory on the host to be written and then copied to a device: page-locked where this process uses a GPU.

    A copy from other memory waits, on the host, for what the device has to do before it.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_initialized())


def written_on_host(length: int, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Tensor]:
    """An array to be written, and a tensor of its memory: `pinned` where this process uses a GPU."""
    if torch.cuda.is_initialized():
        tensor = pinned(length, torch.from_numpy(np.empty(0, dtype)).dtype)
        return tensor.numpy(), tensor
    array = np.empty(length, dtype)
    return array, torch.from_numpy(array)


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device, as that dtype if one is given; from the host without waiting for the device."""
    dtype = dtype or values.dtype
    if not values.is_cpu or device.type == "cpu":
        return values.to(device, dtype)
    staged = values
    if not values.is_pinned() or values.dtype != dtype:
        staged = pinned(values.shape, dtype).copy_(values)
    return staged.to(device, non_blocking=True)


def on_device(array: npt.NDArray[Any], device: torch.device | str | None) -> Tensor:
    """An array on a device (default: torch's), as `to_device`; on the host a copy only of what must not be changed."""
    if not isinstance(device, torch.device):
        device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cpu" or torch.compiler.is_compiling():
        own = array if array.flags.writeable else array.copy()  # torch warns of an array that is not to be changed
        return torch.from_numpy(own).to(device)
    staged = pinned(array.shape, torch.from_numpy(np.empty(0, array.dtype)).dtype)
    np.copyto(staged.numpy(), array)
    return staged.to(device, non_blocking=True)

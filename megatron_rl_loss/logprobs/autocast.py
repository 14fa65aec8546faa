"""`torch.autocast` around an output layer: its casts are made once, so that backward has them too, wherever it runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Factor = TypeVar("Factor", Tensor, Tensor | None)


def as_autocast(one: Factor) -> Factor:
    """What autocast would make of a product's factor."""
    if one is None:
        return one
    device = one.device.type
    if one.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return one
    return one.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else one


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operations in the dtypes that they are given, whatever autocast is on."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()

"""Labels of samples, in a form that ranks compare; loaded where samples have some."""

from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_loss.errors import is_number
from megatron_rl_loss.step.masks import to_array


def plain_label(label: Any) -> Any:
    """A label in the form that replicas compare: numbers and texts unchanged, sets sorted, other objects by type."""
    if isinstance(label, Tensor | np.ndarray):
        return to_array(label).tolist()
    if isinstance(label, list | tuple):
        return [plain_label(entry) for entry in label]
    if isinstance(label, dict):
        return sorted(repr((plain_label(key), plain_label(value))) for key, value in label.items())
    if isinstance(label, set | frozenset):
        return sorted(repr(plain_label(entry)) for entry in label)
    if isinstance(label, np.generic):
        return label.item()
    return label if isinstance(label, str | bytes | int | float | None) else type(label).__qualname__


def as_numbers(labels: Any) -> Any:
    """A list of numbers as an array, so that modes may calculate with it; other labels as they are."""
    is_list = isinstance(labels, list | tuple) and all(is_number(label) for label in labels)
    return np.array(labels) if is_list else labels

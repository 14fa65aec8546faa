"""What kernels found wrong in the values that they read: flags in the host's memory, which nobody waits for.

A kernel that reads a wrong label stores it here, and makes that token's log-prob NaN, so that no step trains on it
unseen. A wrong kept id is stored here too, and left out of the token's ids. The host looks at the flags when the next
pass begins, forward or backward, and where all ranks begin a step and raise together.
"""

import atexit
import logging
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import LATE_CHECKS

logger = logging.getLogger(__name__)

KEPT_RULE = (
    "ids must be from 0 to the size of the vocabulary, or they would be left out in silence. Drop padding from ids, "
    "and count none of it in offsets."
)
LABEL_RULE = (
    "labels must be ids from 0 to the size of the vocabulary. Pass token_mask with 0 at tokens that do not count; "
    "their labels may be anything."
)
PROBABILITIES = "logits whose first row is above 0 and sums to 1"
PROBABILITY_RULE = "these are probabilities, and a softmax of them is nearly flat. Pass what the output layer returns."
MASK_RULE = (
    "it must hold bools, or numbers >= 0. Pass the loss mask, neither labels nor an attention mask that is added to "
    "scores."
)


@cache
def _flags() -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Seven numbers, and NumPy's view of them.

    Is a label wrong, that label, the vocabulary, probabilities, a mask, is a kept id wrong, that id.
    """
    # A GPU writes to pinned memory of the host by the same address.
    flags = torch.zeros(7, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
    atexit.register(_log_flagged)
    LATE_CHECKS.append(raise_flagged)
    return flags, flags.numpy()


def tensor() -> Tensor:
    """The flags, for a kernel."""
    return _flags()[0]


def raise_flagged() -> None:
    """Raise ValueError for what a kernel of an earlier call found wrong, once; waits for no device."""
    if not _flags.cache_info().currsize:  # no kernel has run
        return
    values = _flags()[1]
    if not values.any():
        return
    is_label_wrong, label, size, has_probabilities, is_mask_wrong, is_kept_id_wrong, kept_id = values.tolist()
    values[:] = 0
    if is_label_wrong:
        raise ValueError(f"a label {label} in a vocabulary of {size}: {LABEL_RULE}")
    if is_kept_id_wrong:
        raise ValueError(f"KeptIds with an id {kept_id} in a vocabulary of {size}: {KEPT_RULE}")
    if has_probabilities:
        raise ValueError(f"{PROBABILITIES}: {PROBABILITY_RULE}")
    if is_mask_wrong:
        raise ValueError(f"a token mask with a number below 0, or NaN: {MASK_RULE}")


def _log_flagged() -> None:
    """At the end of a process that looked no more."""
    try:
        raise_flagged()
    except ValueError as error:
        logger.error("log-probs were made of %s", error)

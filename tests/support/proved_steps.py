"""Steps whose first one is proved: what was printed and raised, and how far the gradient is from the oracle's."""

import contextlib
import io
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROVED = "aggregation proved on"
#: The end of each line that proves something.
LIMITS = r"\(limits: docs/proof.md\)"
IN_PART = "aggregation PROVED IN PART on"
#: What all ranks but the first raise where a step is aborted: a job prints the reason once.
ELSEWHERE = "The error of the first rank of this model says why"


class Step(NamedTuple):
    """On a rank: what a step printed, what it raised, and the gradient's error against the oracle."""

    printed: str
    raised: str
    error: float


def attempted(run: Callable[[], float]) -> Step:
    """The outcome of a step that gives its error; of what is printed, the proof's words."""
    out, error, raised = io.StringIO(), math.nan, ""
    with contextlib.redirect_stdout(out):
        try:
            error = run()
        except Exception as exception:
            raised = f"{type(exception).__name__}: {exception}"
    return Step("".join(re.findall(r"megatron_rl_loss: .*\n(?:(?!loss aggr).*\n)*", out.getvalue())), raised, error)


def policy(microbatch: Any, losses: Tensor) -> Tensor:
    """A clipped loss of ratio 1 and advantage -1: the loss's slope by the table's entry is 1."""
    from megatron_rl_loss import ppo_clip_loss

    log_probs = losses - losses.detach() - 1
    return ppo_clip_loss(log_probs, log_probs.detach(), torch.full_like(losses, -1), microbatch).per_token_loss

"""Compare this package's losses and modes with polgrad's reference semantics, in float64, by polgrad's own check.

    pip install --no-deps --target FOLDER polgrad
    PYTHONPATH=FOLDER python tools/bench/conformance.py

polgrad draws the batches, and compares the value and the gradient by the log-probs, which must agree to 1e-9. Its
"log-probs" are normal, so half are above 0, which this package refuses: losses of single tokens are compared by their
formulas, which check nothing, and GSPO, which knows only differences of log-probs, with 10 less on both sides.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from polgrad import ALGORITHMS  # type: ignore[import-not-found]
from polgrad.testing import assert_conforms  # type: ignore[import-not-found]
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer, policy_loss
from megatron_rl_loss.losses.by_name import formula_of

SEQUENCE_LENGTH = 8
#: polgrad's algorithm: our mode, its divisor, and our loss with its settings.
ROWS: dict[str, tuple[str, float | None, str, dict[str, Any]]] = {
    "ppo": ("token_mean", None, "ppo", {}),
    "grpo": ("sample_mean", None, "ppo", {}),
    "dr_grpo": ("constant", SEQUENCE_LENGTH, "ppo", {}),
    "dapo": ("token_mean", None, "ppo", {"clip_high": 0.28}),
    "gspo": ("sample_mean", None, "gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("token_mean", None, "cispo", {"clip_high": 0.2}),
    "reinforce_pp": ("sample_mean", None, "ppo", {}),
}


def ours(mode: str, divisor: float | None, name: str, settings: dict[str, Any]) -> Callable[..., Tensor]:
    """The loss of a batch [batch, seq] as polgrad calls it."""

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        samples = Samples(list(response_mask.double()))
        reducer = make_pg_loss_reducer(mode, samples, totals=StepTotals.of(samples), divisor=divisor)
        token_advantages = advantages.repeat_interleave(logprobs.shape[1])
        if name == "gspo":
            now, old = logprobs.flatten() - 10, old_logprobs.flatten() - 10
            return reducer(
                policy_loss(name, now, old, token_advantages, samples.local(0, 1), **settings).per_token_loss
            )
        formula = formula_of(name, dtype=torch.float64, **settings)
        return reducer(formula(logprobs.flatten(), old_logprobs.flatten(), token_advantages))

    return loss


def main() -> None:
    print(f"polgrad {version('polgrad')}, torch {torch.__version__}: largest relative difference of 64 batches")
    for name, (mode, divisor, loss, settings) in ROWS.items():
        report = assert_conforms(
            ours(mode, divisor, loss, settings),
            replace(ALGORITHMS[name].loss, norm_len=divisor),
            shapes=((4, SEQUENCE_LENGTH),),
        )
        print(f"{name:<13}{mode:<12} value {report.max_loss_rel_diff:.1e}  gradient {report.max_grad_rel_diff:.1e}")


if __name__ == "__main__":
    main()

"""`assert_exact`: `check_loss` as an assertion, for the tests of another project; and the same as a pytest fixture.

from megatron_rl_loss import assert_exact

def test_my_loss():
    assert_exact(my_loss, "token_mean", call="verl")
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl_loss.audit.loss_check import check_loss
from megatron_rl_loss.core.modes import Mode, ModeFunction


def assert_exact(
    loss_fn: Callable[..., Tensor] | None = None, mode: str | Mode | ModeFunction | None = None, **options: Any
) -> None:
    """Raise AssertionError unless a loss function gives every token the weight of a mode, in every cut of a step.

    The error names the cuts that fail and the likely cause, and draws the smallest step that shows it.

    Args:
        loss_fn, mode, options: as in `check_loss`. Without a mode the weights of cut and uncut steps must agree.

    Raises:
        AssertionError: with the report of `check_loss`.
        TypeError, ValueError: as `check_loss`.
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    report = check_loss(loss_fn, mode, **options)
    if not report.sound:
        raise AssertionError(str(report))

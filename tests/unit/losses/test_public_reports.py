"""Public reports of this field as rows: the fault as it was reported, and what the library says or computes of it.

Those of losses, advantages and off-policy corrections; reports on what engines and Megatron do are proved in
tests/museum and tests/megatron.
"""

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_rl_loss import (
    Gate,
    Samples,
    ZigzagTHD,
    check_loss,
    gae,
    importance_weights,
    kl_estimate,
    policy_loss,
    whiten_advantages,
)

NOW = torch.tensor([-1.0, -2.0, -0.5, -3.0])
LOCAL = Samples([[1, 1, 1], [1]]).local(0, 1)


def trained() -> torch.Tensor:
    return NOW.clone().requires_grad_()


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def warned(call: Callable[[], Any], text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        call()


def k3_overflows() -> None:
    """slime#2198, TRL#6550: a log-ratio of -50 loses the step; a bound leaves that token out."""
    far = torch.tensor([-51.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -2.5])
    warned(lambda: kl_estimate(far, reference, torch.ones(2)), "has a log-prob 50 below")
    slopes = torch.autograd.grad(kl_estimate(far, reference, torch.ones(2), bound=20.0).sum(), far)[0]
    assert slopes.tolist() == pytest.approx([0, 1 - math.exp(-0.5)])


def reward_on_a_masked_tail() -> None:
    """miles#1827: it vanishes beside rewards that count."""
    local = Samples([[1, 1, 0]]).local(0, 1)
    warned(lambda: gae(torch.tensor([0.1, 0.1, 1.0]), torch.zeros(3), local), "behind its last active token")


def turns_as_steps() -> None:
    """AReaL#1600: a turn is a step, and lambda is of each sample."""
    samples = Samples([[1, 1, 0, 1, 1]], ids={"turn": [[0, 0, -1, 1, 1]]})
    rewards, values = torch.tensor([0, 0, 9.0, 0, 1]), torch.tensor([0.5, 9, 9, 0.25, 9])
    found, returns = gae(rewards, values, samples.local(0, 1), gamma=1.0, lam=torch.tensor([0.5]), steps="turn")
    last = 1 - 0.25
    first = 0.25 - 0.5 + 0.5 * last
    assert found.tolist() == pytest.approx([first, first, 0, last, last])
    assert returns.tolist() == pytest.approx([first + 0.5] * 2 + [0] + [1.0] * 2)


def whitening() -> None:
    """slime#2235, miles#3229, Relax#192: over all tokens of the step; a rank without a token takes part."""
    empty, filled = Samples([]).local(0, 1), Samples([[1, 1], [1]]).local(0, 1)
    none, some = whiten_advantages([torch.zeros(0), torch.tensor([1.0, 2, 6])], [empty, filled], dp_cp_group=None)
    assert len(none) == 0
    assert some.tolist() == pytest.approx([(x - 3) / math.sqrt(14 / 3) for x in (1, 2, 6)])


def product_of_9000_ratios() -> None:
    """NeMo-RL#2269: a product over a long sequence as its weight."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_rl_loss").addHandler(handler)
    try:
        samples = Samples([[1] * 9000] * 8)
        log_ratio = torch.full((samples.total_tokens,), -5e-4)
        importance_weights(log_ratio, Gate(level="sequence", aggregate="sum", high=2.0), samples.local(0, 1))
    finally:
        logging.getLogger("megatron_rl_loss").removeHandler(handler)
    assert any("take aggregate='mean'" in text for text in records)


def selected(losses: Any, mask: Any, step_tokens: Any) -> Any:
    return (losses * mask * (losses.detach() > losses.mean())).sum() / step_tokens


def selection_inside_a_micro_batch() -> None:
    """verl#7829, AReaL#1730: the cut changes which tokens are trained."""
    assert "trains on other tokens than uncut" in str(check_loss(selected, draws=6))


REPORTS: dict[str, Callable[[], None]] = {
    "slime#2198, TRL#6550": k3_overflows,
    "miles#1827": reward_on_a_masked_tail,
    "AReaL#1600": turns_as_steps,
    "slime#2235, miles#3229, Relax#192": whitening,
    "NeMo-RL#2269": product_of_9000_ratios,
    "open-instruct#534": lambda: refused(
        lambda: kl_estimate(trained(), NOW, LOCAL, estimator="k1"), "its gradient is that of the log-prob alone"
    ),
    "slime#179": lambda: refused(lambda: importance_weights(trained() - NOW, Gate(high=2.0)), "a weight is a constant"),
    "SkyRL#1492": lambda: warned(
        lambda: policy_loss("ppo", trained(), NOW, torch.tensor([0.0, 0, 1, 1]), LOCAL),
        "advantages of exactly 0 at 2 of 3 active tokens",
    ),
    "verl#7829, AReaL#1730": selection_inside_a_micro_batch,
    "Megatron-LM#2909, #3551": lambda: refused(
        lambda: Samples([[1] * 4] * 2, layout=ZigzagTHD([0, 4, 4, 8], filler_slots=1)), "never count them"
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report(report: str) -> None:
    REPORTS[report]()


def test_right_uses_beside_them_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gae(torch.tensor([0.1, 0.1, 0.0]), torch.zeros(3), Samples([[1, 1, 0]]).local(0, 1))
        kl_estimate(NOW, NOW - 1, LOCAL, estimator="k1")
        importance_weights(NOW - (NOW + 0.01), Gate(high=2.0))
        policy_loss("ppo", trained(), NOW, torch.tensor([0.5, -1, 1, 1]), LOCAL)

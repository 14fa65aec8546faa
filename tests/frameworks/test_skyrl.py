"""SkyRL's drop-in: advantages whose plain sum of losses is the step's loss, against the float64 formulas.

SkyRL itself is run by real/test_real_skyrl.py.
"""

import inspect
from typing import Any

import oracle
import pytest
import torch
from peer_steps import Batch, random_batch
from torch import Tensor

from megatron_rl_loss.frameworks.skyrl import apply_loss_reduction_to_advantages_minibatch as drop_in

LENGTH = 48
MODES = {
    "token_mean": ("token_mean", None),
    "sequence_mean": ("sample_mean", None),
    "seq_mean_token_sum_norm": ("constant", float(LENGTH)),
    "prompt_mean": ("prompt_mean", None),
}


def in_order(batch: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """The batch with the rows of a prompt next to each other, as SkyRL has them, and its prompt boundaries."""
    order = sorted(range(batch.rows), key=lambda row: batch.prompts[row])
    prompts = [batch.prompts[row] for row in order]
    edges = [row for row in range(batch.rows) if row == 0 or prompts[row] != prompts[row - 1]]
    ordered = Batch(batch.losses[order], batch.masks[order], prompts)
    return ordered, list(zip(edges, [*edges[1:], batch.rows], strict=True))


def error_of(advantages: Tensor, batch: Batch, mode: str) -> float:
    """SkyRL adds (loss * mask).sum(), of all micro-batches and ranks: a token's part of that sum, beside the oracle's.

    The worst error, relative to the largest part.
    """
    ours, divisor = MODES[mode]
    samples = [
        oracle.Sample(loss, mask, None, prompt)
        for loss, mask, prompt in zip(batch.losses.double(), batch.masks, batch.prompts, strict=True)
    ]
    expected = torch.stack(oracle.step_gradient(ours, samples, divisor)) * batch.losses.double()
    return float((advantages.double() * batch.masks - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_the_sum_is_the_steps_loss(mode: str, seed: int) -> None:
    batch, boundaries = in_order(random_batch(seed))
    advantages = drop_in(batch.losses, batch.masks, mode, 2, LENGTH, boundaries)
    assert error_of(advantages, batch, mode) < oracle.EXACT
    assert not advantages[batch.masks == 0].any()
    halved = Batch(batch.losses, batch.masks * torch.where(torch.rand_like(batch.masks) < 0.5, 0.5, 1), batch.prompts)
    assert error_of(drop_in(batch.losses, halved.masks, mode, 2, LENGTH, boundaries), halved, mode) < oracle.EXACT


def test_negative_control_of_the_comparison() -> None:
    """Another mode, another length, and other boundaries are seen."""
    batch, boundaries = in_order(random_batch(2))
    for mode in MODES:
        for other in set(MODES) - {mode}:
            assert error_of(drop_in(batch.losses, batch.masks, other, 2, LENGTH, boundaries), batch, mode) > 1e-2
    longer = drop_in(batch.losses, batch.masks, "seq_mean_token_sum_norm", 2, LENGTH + 1, boundaries)
    assert error_of(longer, batch, "seq_mean_token_sum_norm") > 1e-2
    together = drop_in(batch.losses, batch.masks, "prompt_mean", 2, LENGTH, [(0, batch.rows)])
    assert error_of(together, batch, "prompt_mean") > 1e-2


def test_the_signature_is_skyrls() -> None:
    """As of a9564572."""
    required = ["advantages", "loss_mask", "loss_reduction", "micro_batch_size", "max_seq_len"]
    parameters = inspect.signature(drop_in).parameters
    assert list(parameters) == [*required, "prompt_boundaries"]
    assert parameters["prompt_boundaries"].default is None


ADVANTAGES, MASK = torch.ones(3, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def call(mode: str = "token_mean", boundaries: Any = None, **changed: Any) -> Tensor:
    arguments = {"advantages": ADVANTAGES, "loss_mask": MASK} | changed
    return drop_in(**arguments, loss_reduction=mode, micro_batch_size=1, max_seq_len=8, prompt_boundaries=boundaries)


def test_worked_by_hand() -> None:
    torch.testing.assert_close(call(), MASK / 4)
    torch.testing.assert_close(call("sequence_mean"), MASK / torch.tensor([[9.0], [3.0], [1.0]]))
    torch.testing.assert_close(call("seq_mean_token_sum_norm"), MASK / 24)
    torch.testing.assert_close(call("prompt_mean", [(0, 2), (2, 3)]), MASK / 8)
    torch.testing.assert_close(call("prompt_mean", [(1, 3), (0, 1)]), MASK / torch.tensor([[6.0], [2.0], [1.0]]))
    nan = ADVANTAGES.masked_fill(MASK == 0, float("nan"))
    torch.testing.assert_close(call(advantages=nan), MASK / 4)
    assert call(advantages=ADVANTAGES.bfloat16(), loss_mask=MASK.bool()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("mode", "boundaries", "changed", "error"),
    [
        ("token_mean_legacy", None, {}, "a mean of micro-batch means.*'token_mean'"),
        ("token-mean", None, {}, "skyrl has no such setting. Did you mean token_mean"),
        ("prompt_mean", None, {}, "'prompt_mean' of SkyRL without prompt_ids.*Pass prompt_boundaries"),
        ("prompt_mean", [(0, 2)], {}, r"prompt_boundaries \[\(0, 2\)\] for 3 rows: every row must belong to one"),
        ("prompt_mean", [(0, 2), (1, 3)], {}, "every row must belong to one prompt"),
        ("prompt_mean", [(0, 2), (2, 4)], {}, "every row must belong to one prompt"),
        ("prompt_mean", [(0, 2), (2, 2), (2, 3)], {}, "every row must belong to one prompt"),
        ("token_mean", None, {"loss_mask": MASK[:2]}, r"loss_mask of shape \(2, 4\): both must be \[rows, tokens\]"),
        ("token_mean", None, {"advantages": ADVANTAGES / 0}, "advantages with NaN or Inf at active tokens"),
    ],
)
def test_refused(mode: str, boundaries: Any, changed: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call(mode, boundaries, **changed)
    call("prompt_mean", [(0, 2), (2, 3)])

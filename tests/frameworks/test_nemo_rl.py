"""The columns that a driver of NeMo-RL sends, and the loss that goes to its workers; the rest is in `real`."""

import pickle
from typing import Any

import oracle
import pytest
import torch
from peer_steps import later_tokens_more
from torch import Tensor

from megatron_rl_loss.frameworks.nemo_rl import aggregate

PROMPTS = [5, 5, 6, 7, 7, 7]
MASKS = [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
VALID = [1, 1, 1, 1, 0, 1]


class Kind:
    def __init__(self, value: str) -> None:
        self.value = value


class Loss:
    """As much of a `ClippedPGLossFn` as is asked for here."""

    positive_example_nll_weight, reference_policy_kl_penalty, metric_normalizations = 0.0, 0.1, {"loss": "tokens"}

    def __init__(self, kind: str = "token_level") -> None:
        self.loss_type = Kind(kind)


class Policy:
    def __init__(self) -> None:
        self.cfg = {"train_global_batch_size": 6}

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: int | None = None) -> Any:
        return data


def batch() -> dict[str, Tensor]:
    ids = torch.tensor([[prompt, 1, *range(3)] for prompt in PROMPTS])
    mask, valid = torch.tensor(MASKS, dtype=torch.float32), torch.tensor(VALID, dtype=torch.float32)
    return {"input_ids": ids, "token_mask": mask, "sample_mask": valid}


@pytest.mark.parametrize("steps", [1, 2])
def test_columns_are_weights_times_the_count_that_they_are_divided_by(steps: int) -> None:
    policy, given = Policy(), batch()
    loss = aggregate(policy, Loss(), "prompt_mean", kl="sample_mean", units="active")
    found = policy.train(given, loss, gbs=6 // steps)
    assert "loss_weights_of_policy" not in given
    for rows in (slice(start, start + 6 // steps) for start in range(0, 6, 6 // steps)):
        masks = (given["token_mask"] * given["sample_mask"][:, None])[rows, 1:]
        for name, mode, units in (("policy", "prompt_mean", "active"), ("kl", "sample_mean", "all")):
            prompts = zip(masks, PROMPTS[rows], range(6)[rows], strict=True)
            samples = [  # without a token that is trained on, the whole row is the prompt
                oracle.Sample(torch.zeros(4).double(), mask, None, prompt if any(MASKS[row]) else f"row {row}")
                for mask, prompt, row in prompts
            ]
            weights = torch.stack(oracle.step_gradient(mode, samples, None, units))
            column = found[f"loss_weights_of_{name}"][rows]
            assert not column[:, 0].any()
            torch.testing.assert_close(column[:, 1:].double(), weights * masks.sum(), rtol=1e-6, atol=0)


def test_losses_of_samples_get_one_weight_each() -> None:
    policy = Policy()
    loss = aggregate(policy, Loss("sequence_level"), "token_mean")
    column = policy.train(batch(), loss_fn=loss)["loss_weights_of_policy"]
    torch.testing.assert_close(column, 5 * torch.tensor([3.0, 1, 2, 2, 0, 0]) / 8)
    uneven = aggregate(policy, Loss("sequence_level"), later_tokens_more)
    with pytest.raises(ValueError, match="Set token_level_loss=true"):
        policy.train(batch(), uneven)


def test_other_losses_go_by_and_the_loss_travels() -> None:
    policy, given = Policy(), batch()
    loss = aggregate(policy, Loss(), "token_mean")
    assert policy.train(given, Loss()) is given
    sent = pickle.loads(pickle.dumps(loss))
    assert sent.metric_normalizations == {"loss": "tokens"}
    assert sent.loss_type.value == "token_level"


def test_a_term_that_grpo_cannot_have_is_refused() -> None:
    loss: Any = Loss()
    loss.positive_example_nll_weight = 0.5
    with pytest.raises(ValueError, match="grpo_train passes no rewards"):
        aggregate(Policy(), loss, "token_mean")

"""SkyRL's own trainer and losses with our normalisation of advantages, from a checkout: SKYRL_PATH=~/SkyRL.

Real: `RayPPOTrainer._normalize_advantages` over several mini-batches, `compute_prompt_boundaries`, the policy loss and
its sum; gradients are averaged over gloo and multiplied as its workers do. Not run: Ray, the workers, an engine.
"""

import random
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import SKYRL, checkout, load
from ranks import RankError, run_ranks, start_process_group
from torch import Tensor

TOLERANCE = 2e-6
MAX_SEQ_LEN = 48
MODES: dict[str, tuple[str, float | None]] = {
    "token_mean": ("token_mean", None),
    "sequence_mean": ("sample_mean", None),
    "seq_mean_token_sum_norm": ("constant", float(MAX_SEQ_LEN)),
    "prompt_mean": ("prompt_mean", None),
}
MINI_BATCHES = [(0, 6), (6, 14)]
UIDS = ["a", "a", "b", "b", "b", "b", "c", "d", "d", "d", "e", "e", "f", "f"]  # the last two are masked

pytestmark = pytest.mark.slow


class Batch(dict[str, Any]):
    """As much of a TrainingInputBatch as the trainer asks for."""

    def __getitem__(self, key: Any) -> Any:
        return (
            Batch({name: values[key] for name, values in self.items()})
            if isinstance(key, slice)
            else super().__getitem__(key)
        )


def make_batch(seed: int) -> dict[str, Tensor]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, tokens = len(UIDS), 11
    mask = torch.zeros(rows, tokens)
    for i in range(rows - 2):
        length = rng.randint(1, tokens)
        mask[i, :length] = (torch.rand(length) < 0.7).float()
        mask[i, rng.randrange(length)] = 1
    mask[3] = 0
    log_probs = -torch.rand(rows, tokens)
    return {
        "loss_mask": mask,
        "response_mask": torch.ones(rows, tokens),
        "advantages": torch.randn(rows, 1).expand(rows, tokens).clone(),
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.4 * torch.randn(rows, tokens),
    }


def expected(batch: dict[str, Tensor], mode: str, rows: slice) -> tuple[float, Tensor, float]:
    """Value, gradient by log-prob and scale of a mini-batch, in float64."""
    ours, divisor = MODES[mode]
    table = batch["log_probs"].double().requires_grad_()
    ratio, advantages = (table - batch["old_log_probs"].double()).exp(), batch["advantages"].double()
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
    samples = [oracle.Sample(losses[i], batch["loss_mask"][i], None, UIDS[i]) for i in range(len(UIDS))[rows]]
    value = oracle.step_loss(ours, samples, divisor)
    (gradient,) = torch.autograd.grad(value, table)
    return float(value.detach()), gradient, oracle.step_scale(ours, samples, divisor)


def step_errors(root: str, seed: int, modes: list[str], drop_in: bool) -> list[float]:
    """On a rank: the worst error over two steps in each mode."""
    start_process_group()
    names = "train.trainer", "backends.skyrl_train.utils.ppo_utils", "train.dataset.preprocess"
    trainer, ppo_utils, preprocess = load(SKYRL, root, *(f"skyrl.{name}" for name in names))
    if drop_in:
        from megatron_rl_loss.frameworks.skyrl import apply_loss_reduction_to_advantages_minibatch

        trainer.apply_loss_reduction_to_advantages_minibatch = apply_loss_reduction_to_advantages_minibatch
    rank, dp = dist.get_rank(), dist.get_world_size()
    batch = make_batch(seed)
    algorithm = SimpleNamespace(
        advantage_batch_normalize=False,
        loss_reduction=None,
        max_seq_len=MAX_SEQ_LEN,
        policy_loss_type="regular",
        eps_clip_low=0.2,
        eps_clip_high=0.28,
        off_policy_correction=SimpleNamespace(
            tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
            outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
        ),
    )  # fmt: skip
    found = []
    for mode in modes:
        algorithm.loss_reduction = mode
        cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=2))
        normalized = trainer.RayPPOTrainer._normalize_advantages(
            SimpleNamespace(cfg=cfg), Batch(batch), MINI_BATCHES, preprocess.compute_prompt_boundaries(UIDS)
        )["advantages"]
        errors = []
        for start, end in MINI_BATCHES:
            table = batch["log_probs"].clone().requires_grad_()
            mine, total = list(range(start + rank, end, dp)), torch.zeros(())
            for chosen in (mine[:1], mine[1:]):
                if not chosen:
                    continue
                policy_loss = ppo_utils.PolicyLossRegistry.get("regular")
                loss, _ = policy_loss(
                    table[chosen],
                    batch["old_log_probs"][chosen],
                    normalized[chosen],
                    config=algorithm,
                    loss_mask=batch["loss_mask"][chosen],
                    rollout_logprobs=None,
                )
                (loss * dp).backward()  # grad_sum_correction_factor of its workers
                total += loss.detach()
            gradient = torch.zeros_like(table) if table.grad is None else table.grad
            for values in (gradient, total):
                dist.all_reduce(values)
            value, by_token, scale = expected(batch, mode, slice(start, end))
            in_gradient = float((gradient.double() / dp - by_token).abs().max() / by_token.abs().max())
            errors.append(oracle.worst_error(abs(float(total) - value) / scale, in_gradient, table.numel()))
        found.append(max(errors))
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_steps_are_exact_with_ours_and_with_theirs(dp: int) -> None:
    for drop_in in (True, False):
        for errors in run_ranks(dp, step_errors, checkout(SKYRL), 1, list(MODES), drop_in):
            assert max(errors) < TOLERANCE


def test_the_legacy_mean_is_refused_and_theirs_depends_on_the_cut() -> None:
    """Negative control of the refusal: their value is none of the step's token mean."""
    with pytest.raises(RankError, match=r"skyrl:token_mean_legacy.*a mean of micro-batch means"):
        run_ranks(1, legacy_error, checkout(SKYRL), True)
    assert run_ranks(1, legacy_error, checkout(SKYRL), False)[0] > 1e-2


def legacy_error(root: str, drop_in: bool) -> float:
    MODES["token_mean_legacy"] = MODES["token_mean"]
    return step_errors(root, 1, ["token_mean_legacy"], drop_in)[0]

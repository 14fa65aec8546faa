"""A step for slime's and miles's real `train_one_step`: rollouts whose model is a table of logits.

Every token's id is its number in the step, and the logits at it are 0 but for one, of the token after it: the table's
entry. So a token's log-prob, its clipped loss and the step's loss are known functions of the table, stated in float64
apart from all that is tested, and the gradient that Megatron's schedule and DDP arrive at can be compared with theirs.

No `World`: the engines' own code cuts the batches, calls the model and makes log-probs of its logits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from table_step import table_model
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
PADDING, FIRST = 0, 2  # token ids


@dataclass
class Rollout:
    """One sample. `kept` is its mask after rejection, which is `mask` where nothing is rejected."""

    prompt: int
    mask: Tensor
    kept: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    rollout: int
    ids: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def response(self) -> int:
        return len(self.mask)

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Step:
    """Samples, and which of them each micro-batch of each DP rank has."""

    samples: list[Rollout]
    dealt: list[list[list[int]]]
    num_rollouts: int
    table: Tensor

    @property
    def vocabulary(self) -> int:
        return len(self.table)


def make_step(
    seed: int, dp: int, *, masked: bool = True, rejected: bool = False, split: bool = False, microbatches: int = 2,
    count: int = 12, empty: Sequence[int] = (3, 7),
) -> Step:  # fmt: skip
    """Ragged samples; some fully masked from the start, some emptied by rejection, some two of one rollout."""
    rng = random.Random(seed)
    samples, next_id = [], FIRST
    for i in range(count):
        prompt, response = rng.choice([1, 2, 5, 9]), rng.choice([1, 2, 3, 6, 11])
        mask = torch.tensor([rng.choice([0, 1, 1]) for _ in range(response)], dtype=torch.int32)
        mask[rng.randrange(response)] = 1
        if masked and i in empty:
            mask.zero_()
        kept = mask.clone()
        if rejected and i in (5, 8):
            kept.zero_()
        elif rejected:
            kept *= torch.tensor([rng.choice([0, 1, 1, 1]) for _ in range(response)], dtype=torch.int32)
        values = torch.tensor([[rng.uniform(-2, 2), rng.uniform(-0.4, 0.4)] for _ in range(response)])
        rollout = Rollout(prompt, mask, kept, values[:, 0], values[:, 1], i - i % 2 if split else i)
        rollout.ids = torch.arange(next_id, next_id + rollout.total)
        next_id += rollout.total
        samples.append(rollout)
    table = torch.tensor([rng.uniform(-1, 1) for _ in range(next_id + 1)])
    step = Step(samples, _deal(rng, len(samples), dp, microbatches), len({sample.rollout for sample in samples}), table)
    log_probs = log_probs_of(step, table.double())
    for sample, current in zip(samples, log_probs, strict=True):
        sample.old_log_probs = (current + sample.old_log_probs).float()  # ratios on both sides of the clip
    return step


def _deal(rng: random.Random, count: int, dp: int, microbatches: int) -> list[list[list[int]]]:
    """Uneven, but every micro-batch has a sample."""
    order = rng.sample(range(count), count)
    slots = [[order.pop()] for _ in range(dp * microbatches)]
    for i in order:
        rng.choice(slots).append(i)
    return [slots[rank::dp] for rank in range(dp)]


def log_probs_of(step: Step, table: Tensor) -> list[Tensor]:
    """Log-probs of response tokens: each is the table's entry of the token before it, against zeros."""
    log_probs = []
    for sample in step.samples:
        entries = table[sample.ids[sample.prompt - 1 : -1]]
        log_probs.append(entries - torch.log(entries.exp() + step.vocabulary - 1))
    return log_probs


def expected(
    step: Step,
    mode: str,
    divisor: float | None = None,
    units: str = "all",
    weights: Sequence[Sequence[float]] | None = None,
) -> tuple[float, Tensor, float]:
    """Value, gradient by table entry, and scale of the step's loss, in float64, over what rejection kept.

    A token mean divides by the tokens before rejection, as slime's and miles's counts do. `weights`, a row for each
    sample, are the masks of a ``token_sum``.
    """
    table = step.table.double().requires_grad_()
    samples = list[oracle.Sample]()
    for sample, log_probs in zip(step.samples, log_probs_of(step, table), strict=True):
        ratio = (log_probs - sample.old_log_probs.double()).exp()
        advantages = sample.advantages.double()
        losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
        row_mask = sample.kept if weights is None else torch.tensor(weights[len(samples)], dtype=torch.float64)
        samples.append(oracle.Sample(losses, row_mask, sample.rollout))
    loss = oracle.step_loss(mode, samples, divisor, units)
    scale = oracle.step_scale(mode, samples, divisor, units)
    if mode == "token_mean":
        share = sum(float(sample.kept.sum()) for sample in step.samples) / sum(
            float(sample.mask.sum()) for sample in step.samples
        )
        loss, scale = loss * share, scale * share
    (gradient,) = torch.autograd.grad(loss, table)
    return float(loss.detach()), gradient, scale


def rollout_data(steps: Sequence[Step], dp_rank: int, slice_with_cp: Any) -> dict[str, Any]:
    """The data of several steps in a rank's `DataIterator`; `slice_with_cp` is their cut of a response's values."""
    data: dict[str, list[Any]] = {}
    indices: list[list[int]] = []
    for step in steps:
        for chosen in step.dealt[dp_rank]:
            begun = len(data.get("tokens", []))
            indices.append(list(range(begun, begun + len(chosen))))
            for sample in (step.samples[i] for i in chosen):
                siblings = [other for other in step.samples if other.rollout == sample.rollout]
                old, advantages = (
                    slice_with_cp(values, sample.total, sample.response)
                    for values in (sample.old_log_probs, sample.advantages)
                )
                row = {
                    "tokens": sample.ids,
                    "total_lengths": sample.total,
                    "response_lengths": sample.response,
                    "loss_masks": sample.mask,
                    "log_probs": old,
                    "rollout_log_probs": old,
                    "ref_log_probs": old,
                    "advantages": advantages,
                    "rollout_mask_sums": torch.tensor(float(sum(int(other.mask.sum()) for other in siblings))),
                }
                for name, value in row.items():
                    data.setdefault(name, []).append(value)
    return data | {
        "micro_batch_indices": indices,
        "num_microbatches": [len(step.dealt[dp_rank]) for step in steps],
        "num_rollouts": [step.num_rollouts for step in steps],
        "global_batch_sizes": [step.num_rollouts for step in steps],
    }


def reject(steps: Sequence[Step]) -> Any:
    """A function for their ``--custom-tis-function-path``: it rejects tokens as the steps say, and weights none."""
    kept = {id(sample.mask): sample.kept for step in steps for sample in step.samples}

    def rejecting(*, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
        return pg_loss, [kept[id(mask)] for mask in loss_masks], {}

    return rejecting


def logit_model(table: Tensor, *, per_token: bool = False) -> Any:
    """The table as a model, in Megatron's own DDP; the tokens are the first or the only argument it looks at."""
    return table_model(table.tolist(), per_token=per_token, forward=logits)


def logits(table: Tensor, input_ids: Tensor) -> Tensor:
    """[..., tokens] -> [..., tokens, vocabulary]"""
    zeros = torch.zeros(*input_ids.shape, len(table))
    return zeros.scatter(-1, (input_ids + 1)[..., None], table[input_ids][..., None])


class KeepsGradients:
    """An optimizer whose steps keep what Megatron hands it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: list[Tensor] = []

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, int]:
        self.gradients.append(self.model.module.losses.main_grad.clone())
        return True, 0.0, 0


def errors_of(step: Step, mode: str, divisor: float | None, value: float, gradient: Tensor, **options: Any) -> float:
    """The worse of value's and gradient's error, as `oracle.worst_error`; `options` as in `expected`."""
    loss, by_entry, scale = expected(step, mode, divisor, **options)
    in_gradient = float((gradient.double() - by_entry).abs().max() / by_entry.abs().max())
    return oracle.worst_error(abs(value - loss) / scale, in_gradient, sum(sample.response for sample in step.samples))

"""What reaches Megatron must be what the micro-batch handed out: wrong loss functions in the real schedule, by ranks.

Each wrong use stands beside its legal neighbours.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from table_step import Batch, aggregation, start, step_samples, table_model

SAMPLES = step_samples(seed=1)
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]
ENTRIES = sum(len(sample.mask) for sample in SAMPLES)

# What a loss function returns: (micro-batch, its losses, the micro-batch before it) -> what Megatron is given.
LossFunc = Callable[[Any, torch.Tensor, Any], Any]


def mean(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean()


def changed_in_place(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    loss.mul_(0.5)
    return loss, count, report


def called_and_ignored(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    microbatch.loss(losses)
    return losses.sum(), torch.tensor(1, dtype=torch.int32), {}


def plus_kl(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss + 0.1 * losses.square().mean(), count, report


def scaled(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss / 2, count, report


def counted_anew(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss, count.clone(), report


def without_its_count(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, _, report = microbatch.loss(losses)
    return loss, report


def earlier_one(microbatch: Any, losses: torch.Tensor, earlier: Any) -> Any:
    carried = microbatch.loss(losses)
    return carried if earlier is None else earlier


def own_share(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    return microbatch.carry((losses * 0.1).sum(), {})


def kl_in_the_share(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    share = microbatch.pg_loss(losses) + 0.1 * microbatch.sample_mean(losses.square())
    return microbatch.carry(share, {"pg_loss": share})


def with_a_report_of_ones_own(microbatch: Any, losses: torch.Tensor, _: Any) -> Any:
    loss, count, report = microbatch.loss(losses)
    return loss, count, {**report, "lr": torch.tensor(1.0)}


WRONG: dict[str, tuple[LossFunc, str]] = {
    "the stock 2-tuple": (lambda m, losses, _: (mean(losses), {}), "loss_func returned 2 values"),
    "the stock 3-tuple": (
        lambda m, losses, _: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int32), {}),
        "neither its loss() nor its carry() was called",
    ),
    "a bare loss": (lambda m, losses, _: mean(losses), "loss_func returned a Tensor"),
    "its count dropped": (without_its_count, "loss_func returned 2 values"),
    "divided by the number of micro-batches": (scaled, "a loss that this micro-batch did not hand out"),
    "a KL term on top": (plus_kl, "put further terms into the share"),
    "changed in place": (changed_in_place, "it was changed in place"),
    "called, and something else returned": (called_and_ignored, "a loss that this micro-batch did not hand out"),
    "another count": (counted_anew, "a token count that this micro-batch did not hand out"),
    "an earlier micro-batch's": (earlier_one, "a loss that this micro-batch did not hand out"),
    "a share of no reducer": (own_share, "put together without this micro-batch's reducers"),
}
RIGHT: dict[str, LossFunc] = {
    "loss": lambda m, losses, _: m.loss(losses),
    "carry": kl_in_the_share,
    "a report of one's own": with_a_report_of_ones_own,
    "loss, called again": lambda m, losses, _: (m.loss(losses), m.loss(losses))[1],
}


def outcome_of(model: Any, loss_of: LossFunc, *, forward_only: bool = False, takes: int = 1) -> str:
    """A step of two micro-batches through Megatron's schedule: the refusal, or "accepted"."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    earlier: list[Any] = []

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        microbatch = [next(iterator) for _ in range(takes)][-1]
        losses = model(microbatch.data.local_numbers(0, 1).cuda())

        def loss_func(losses: torch.Tensor) -> Any:
            returned = loss_of(microbatch, losses, earlier[0] if earlier else None)
            earlier.append(returned)
            return returned

        return losses, loss_func

    model.zero_grad_buffer()
    batches = [Batch(SAMPLES, chosen, 1) for chosen in ([0, 1, 2], [3, 4, 5, 6])]
    step = aggregation(mode="sample_mean", with_per_token_loss=True)
    try:
        step.wrap_schedule(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    except (ValueError, TypeError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def all_outcomes(per_token: bool) -> dict[str, list[str]]:
    start()
    model = table_model(TABLE, per_token=per_token)
    functions = {name: loss_of for name, (loss_of, _) in WRONG.items()} | RIGHT
    return {
        name: [outcome_of(model, loss_of, forward_only=forward_only) for forward_only in (False, True)]
        for name, loss_of in functions.items()
    }


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
def test_only_what_was_handed_out_reaches_megatron(per_token: bool) -> None:
    """In training and in evaluation."""
    found = run_ranks(1, all_outcomes, per_token)[0]
    for name, (_, text) in WRONG.items():
        for outcome in found[name]:
            assert outcome.startswith("ValueError: "), (name, outcome)
            assert text in outcome, (name, outcome)
    for name in RIGHT:
        assert found[name] == ["accepted", "accepted"], name


def outcome_of_two_taken() -> str:
    start()
    return outcome_of(table_model(TABLE), RIGHT["loss"], takes=2)


def test_a_forward_step_takes_one_micro_batch() -> None:
    assert "forward_step took 2 micro-batches from its iterator" in run_ranks(1, outcome_of_two_taken)[0]

"""Steps counted for the hooks of slime and miles, over Megatron's real groups: slime's data of a rollout; a
`train_one_step` and a data iterator of miles's shape.

slime and miles themselves are run by real/test_real_slime_miles.py and test_real_miles_fsdp.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks

from megatron_rl_loss.frameworks import miles, slime
from megatron_rl_loss.frameworks.step_counts import StepCounts, counts_of_this_step

MASKS = [torch.tensor(mask, dtype=torch.int32) for mask in ([1, 0, 1], [0, 0], [1], [1, 1, 1, 1], [0], [1, 1])]


@dataclass
class DataIterator:
    """As miles's, before it hands out anything."""

    rollout_data: dict[str, Any]
    micro_batch_size: int | None = None
    micro_batch_indices: list[list[int]] | None = None
    offset: int = 0


def train_one_step(
    args: Any, rollout_id: int, step_id: int, data_iterator: Any, model: Any, num_microbatches: int, num_rollouts: int
) -> Any:
    """As miles's: returns the counts that the hooks know while it runs; or it fails."""
    if step_id == 13:
        raise RuntimeError("the step failed")
    return counts_of_this_step()


def install(*, step: Any = train_one_step, replicas: int = 1, meshes: Any = ()) -> Any:
    """Modules of miles's names; returns that of `train_one_step`."""
    size = SimpleNamespace(rank=0, size=1)
    state = SimpleNamespace(indep_dp=SimpleNamespace(size=replicas), cp=size, meshes=dict.fromkeys(meshes))
    values: dict[str, dict[str, Any]] = {
        "miles": {}, "miles.backends": {}, "miles.backends.megatron_utils": {}, "miles.backends.training_utils": {},
        "miles.utils": {}, "miles.backends.megatron_utils.model": {"train_one_step": step},
        "miles.backends.training_utils.parallel": {"_parallel_state": state, "get_parallel_state": lambda: state},
        "miles.utils.multi_lora": {"is_multi_lora_enabled": lambda args: getattr(args, "multi_lora", False)},
    }  # fmt: skip
    for name, attributes in values.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    model = sys.modules["miles.backends.megatron_utils.model"]
    vars(sys.modules["miles.backends.megatron_utils"])["model"] = model
    return model


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The launch's args; modules of miles's names go when the test ends."""
    from megatron.training import global_vars

    before = dict(sys.modules)
    monkeypatch.setenv("RANK", "1")  # says nothing
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace())
    yield global_vars._GLOBAL_ARGS
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


# --- what is counted


def begin(cp: int) -> tuple[int, Any]:
    """On a rank: its DP rank, and Megatron's global arguments, empty."""
    from table_step import start

    dp_rank = start(cp=cp).get_data_parallel_rank()
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = SimpleNamespace()
    return dp_rank, global_vars._GLOBAL_ARGS


def counts_in_miles(cp: int, bad_rank: int | None) -> list[Any]:
    """Steps of a rank, by indices and by slices, with and without padded rows; and what is known in between."""
    dp_rank, args = begin(cp)
    model = install()
    miles.count_steps(args)
    miles.count_steps(args)  # once is enough
    mine = MASKS[dp_rank::2]
    first = [2] if dp_rank != bad_rank else [3]  # there is no fourth sample
    by_indices = DataIterator({"loss_masks": mine}, micro_batch_indices=[first, [0, 1]])
    by_slices = DataIterator({"loss_masks": mine, "max_seq_lens": [24] * 3}, micro_batch_size=1)
    found = []
    for iterator, offset, count in ((by_indices, 0, 1), (by_indices, 1, 1), (by_slices, 0, 2), (by_slices, 2, 1)):
        iterator.offset = offset
        found.append(model.train_one_step(args, 3, 0, [iterator], None, count, num_rollouts=7))
        found.append(counts_of_this_step())
    return found


def counts_in_slime(cp: int, bad_rank: int | None) -> list[Any]:
    """The first two of these steps, as slime hands them to its postprocess hook; DP rank 1 has a micro-batch more."""
    dp_rank, args = begin(cp)
    mine = MASKS[dp_rank::2]
    data = {
        "loss_masks": mine if dp_rank != bad_rank else [-mask - 1 for mask in mine],
        "micro_batch_indices": [[2], [0, 1], []] if dp_rank else [[2], [0], [1]],
        "num_microbatches": [1, 2],
        "global_batch_sizes": [7, 8],
    }
    slime.count_steps(args, 7, data)
    found = []
    for step_id in range(2):
        slime.begin_step(args, 7, step_id, None, None, None)
        found.append(counts_of_this_step())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_a_steps_counts_are_those_of_all_its_ranks(cp: int) -> None:
    """By hand: DP rank 0 holds MASKS 0, 2, 4, and rank 1 holds 1, 3, 5."""

    def counts(tokens: int, samples: int, padded: int | None) -> StepCounts:
        return StepCounts(
            step_tokens=tokens, num_samples=samples, num_masked_samples=1, global_batch_size=7, padded_length=padded
        )

    steps = [counts(2, 2, None), counts(7, 4, None)]  # of samples 4 and 5; of 0, 2, 1 and 3
    for found in run_ranks(2 * cp, counts_in_miles, cp, None):
        assert found[1::2] == [None] * 4
        assert found[::2] == [*steps, counts(7, 4, 24), counts(2, 2, 24)]
    steps[1] = replace(steps[1], global_batch_size=8)
    assert run_ranks(2 * cp, counts_in_slime, cp, None) == [steps] * 2 * cp


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "error"), [(counts_in_miles, "rank 1: IndexError"), (counts_in_slime, "must be finite and >= 0")]
)
def test_a_rank_that_cannot_count_stops_all_ranks(counts: Any, error: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, counts, 1, 1)
    assert set(caught.value.errors) == {0, 1}
    assert all(error in text for text in caught.value.errors.values())


def test_a_step_that_fails_leaves_no_counts(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"step_tokens": 1, "num_samples": 1, "num_masked_samples": 0, "global_batch_size": 1}
    monkeypatch.setattr(miles, "_counts", lambda iterator, num_microbatches, num_rollouts: counts)
    model = install()
    miles.count_steps(args)
    assert model.train_one_step(args, 0, 0, [None], None, 1, 1) == StepCounts(**counts)
    with pytest.raises(RuntimeError, match="the step failed"):
        model.train_one_step(args, 0, 13, [None], None, 1, 1)
    assert counts_of_this_step() is None


# --- what is refused


def other_step(args: Any, data_iterator: Any, num_microbatches: int, global_batch_size: int) -> None: ...


def test_launches_that_cannot_be_counted_are_refused(args: Any) -> None:
    install(step=other_step)
    with pytest.raises(ValueError, match=r"no num_rollouts \(args, data_iterator, num_microbatches, global_batch_siz"):
        miles.count_steps(args)
    model = install(replicas=2)
    args.multi_lora = True
    with pytest.raises(ValueError, match=r"every adapter has a batch of its own.*Drop --custom-megatron-init-path"):
        miles.count_steps(args)
    args.multi_lora = False
    miles.count_steps(args)
    with pytest.raises(ValueError, match="Megatron's groups end at a replica"):
        model.train_one_step(args, 0, 0, [DataIterator({"loss_masks": MASKS}, 6)], None, 1, 1)


def test_fsdp_is_asked_for_its_own_place_and_has_no_token_mean(args: Any) -> None:
    """It has no Megatron to ask, and never divides by the step's tokens. Without its meshes it is another backend's."""
    sample, losses = ([5], [3], MASKS[:1]), torch.tensor([1.0, 2.0, 4.0])
    for meshes in ([], ["dp", "fsdp"]):
        install(meshes=meshes)
        if not meshes:
            with pytest.raises(ValueError, match="no parallel state in Megatron"):
                slime.sample_mean(*sample, False)
    assert float(slime.sample_mean(*sample, False)(losses)) == 2.5
    counts = StepCounts(step_tokens=4, num_samples=1, num_masked_samples=0, global_batch_size=2)
    counted = slime.make_hook("token_mean", step_counts=lambda: counts)  # whoever knows the step may say so
    assert float(counted(*sample, False)(losses)) == 5.0 * 2 / 4
    for hook, per_token in ((slime.token_mean, True), (slime.token_mean, False), (counted, True)):
        with pytest.raises(ValueError, match=r"never divides by the step's tokens.*--train-backend megatron"):
            hook(*sample, per_token)

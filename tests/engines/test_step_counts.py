"""Steps counted for the hooks of slime and miles, over Megatron's real groups: functions and iterators of their shape.

slime and miles themselves are run by real/test_real_slime_miles.py and test_real_miles_fsdp.py, which CI skips: it has
no checkout.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks
from torch import Tensor

from megatron_rl_loss.core.taps import Taps, observe
from megatron_rl_loss.engines import replacing, slime
from megatron_rl_loss.engines.slime import Now, StepCounts, count_steps

MASKS = [torch.tensor(mask, dtype=torch.int32) for mask in ([1, 0, 1], [0, 0], [1], [1, 1, 1, 1], [0], [1, 1])]


@dataclass
class DataIterator:
    """A stand-in for the engines' `DataIterator`, before it gives a batch."""

    rollout_data: dict[str, Any]
    micro_batch_size: int | None = None
    micro_batch_indices: list[list[int]] | None = None
    offset: int = 0


def step_of_miles(args: Any, step_id: int, data_iterator: Any, num_microbatches: int, num_rollouts: int) -> Any:
    """A stand-in for miles's `train_one_step`: returns the counts that hooks know while it runs, or raises."""
    if step_id == 13:
        raise RuntimeError("the step failed")
    return slime._now().counts


def step_of_slime(
    args: Any, step_id: int, data_iterator: Any, num_microbatches: int, step_global_batch_size: int
) -> Any:
    return slime._now().counts


def loss_function(args: Any, batch: dict[str, Any], logits: Any) -> Any:
    """A stand-in for the engines' `loss_function`, which counts 1 token for each sample without one."""
    tokens = sum(mask.sum().clamp(min=1) for mask in batch["loss_masks"])
    return 7.0, tokens, {"keys": ["loss"], "values": torch.tensor([tokens, 7.0])}


def sum_of_sample_mean() -> Any:
    """A stand-in for the engines' maker of a reducer."""
    return torch.sum


def install(engine: str = "miles", *, step: Any = None, meshes: Any = ()) -> Any:
    """Modules of the engine's names; returns that of `train_one_step`."""
    replacing._REGISTRY.clear()
    size = SimpleNamespace(rank=0, size=1)
    state = SimpleNamespace(indep_dp=SimpleNamespace(size=1), cp=size, meshes=dict.fromkeys(meshes))
    step = step or (step_of_miles if engine == "miles" else step_of_slime)
    of_losses = ("megatron", "training")
    values: dict[str, dict[str, Any]] = {
        "": {}, ".backends": {}, ".backends.megatron_utils": {}, ".backends.training_utils": {}, ".utils": {},
        ".backends.megatron_utils.model": {"train_one_step": step, "loss_function": loss_function},
        **{f".backends.{of}_utils.cp_utils": {"get_sum_of_sample_mean": sum_of_sample_mean} for of in of_losses},
        ".backends.training_utils.parallel": {"_parallel_state": state, "get_parallel_state": lambda: state},
        ".utils.multi_lora": {"is_multi_lora_enabled": lambda args: getattr(args, "multi_lora", False)},
    }  # fmt: skip
    for name, attributes in values.items():
        sys.modules[engine + name] = ModuleType(engine + name)
        vars(sys.modules[engine + name]).update(attributes)
    return sys.modules[f"{engine}.backends.megatron_utils.model"]


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The launch's args; modules of miles's names go when the test ends."""
    before = dict(sys.modules)
    monkeypatch.setenv("RANK", "1")  # says nothing
    yield SimpleNamespace(calculate_per_token_loss=True, loss_type="value_loss", recompute_loss_function=False)
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


# --- what is counted


def counts_in(engine: str, cp: int, bad_rank: int | None) -> list[Any]:
    """Steps of a rank, by indices and by slices, with and without padded rows; and what is known in between."""
    from table_step import start

    dp_rank, args = start(cp=cp).get_data_parallel_rank(), Namespace(loss_type="value_loss")
    model = install(engine)
    count_steps(args)
    count_steps(args)  # once is enough
    mine = MASKS[dp_rank::2]
    first = [2] if dp_rank != bad_rank else [3]  # there is no fourth sample
    by_indices = DataIterator({"loss_masks": mine}, micro_batch_indices=[first, [0, 1]])
    by_slices = DataIterator({"loss_masks": mine, "max_seq_lens": [24] * 3}, micro_batch_size=1)
    results = []
    for iterator, offset, count in ((by_indices, 0, 1), (by_indices, 1, 1), (by_slices, 0, 2), (by_slices, 2, 1)):
        iterator.offset = offset
        results.append(model.train_one_step(args, 0, [iterator], count, 7))
        results.append(slime._now().counts)
    assert replacing.installed(engine).proof is None  # of a critic
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "cp"), [("miles", 1), ("miles", 2), ("slime", 2)])
def test_a_steps_counts_are_those_of_all_its_ranks(engine: str, cp: int) -> None:
    """Counts by hand: DP rank 0 holds MASKS 0, 2, 4, and rank 1 holds 1, 3, 5."""
    # Of samples 4 and 5; of 0, 2, 1 and 3; twice.
    steps = [(2, 2, 7, None), (7, 4, 7, None), (7, 4, 7, 24), (2, 2, 7, 24)]
    for results in run_ranks(2 * cp, counts_in, engine, cp, None):
        assert results[::2] == steps
        assert results[1::2] == [None] * 4


@pytest.mark.slow
def test_a_rank_that_cannot_count_stops_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, counts_in, "miles", 1, 1)
    assert set(caught.value.errors) == {0, 1}
    assert all("rank 1: IndexError" in text for text in caught.value.errors.values())


def test_a_step_divides_by_mask_tokens_while_it_is_counted(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails divides so, too; outside of steps, and without per-token loss, nothing changes."""
    counts = StepCounts(1, 1, 1)
    monkeypatch.setattr(slime, "_counts", lambda *_: (counts, []))

    def step(args: Any, step_id: int, data_iterator: Any, num_microbatches: int, num_rollouts: int) -> Any:
        loss, tokens, log = model.loss_function(args, {"loss_masks": MASKS[:2]}, logits=None)
        nothing: list[Any] = [None] * 3
        return step_of_miles(args, step_id, *nothing), loss, tokens, log["values"].tolist()

    model = install(step=step)
    count_steps(args)
    assert model.train_one_step(args, 0, [None], 1, 1) == (counts, 7.0, 2, [2, 7])
    with pytest.raises(RuntimeError, match="the step failed"):
        model.train_one_step(args, 13, [None], 1, 1)
    assert slime._now().counts is None
    assert model.loss_function(args, {"loss_masks": MASKS[:2]}, None)[1] == 3
    args.calculate_per_token_loss = False
    assert model.train_one_step(args, 0, [None], 1, 1)[2:] == (3, [3, 7])


# --- terms beside the policy loss


#: What the loss function makes of pg_loss and of the engine's means, of KL and entropy; the factors that are then told.
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "as configured": (lambda pg, entropy, kl: pg - 0.1 * entropy + 0.2 * kl, ""),
    "scaled": (lambda pg, entropy, kl: 7 * (pg - 0.1 * entropy + 0.2 * kl) / 3, ""),
    "KL times 10": (lambda pg, entropy, kl: pg - 0.1 * entropy + 2.0 * kl, "loss: -0.1, 2; "),
    "KL detached": (lambda pg, entropy, kl: pg - 0.1 * entropy + 0.2 * kl.detach(), "loss: -0.1; "),
    "KL twice, by its gradient": (lambda pg, entropy, kl: pg - 0.1 * entropy + 0.4 * kl - 0.2 * kl.detach(), "0.4; "),
    "the sign of the bonus": (lambda pg, entropy, kl: pg + 0.1 * entropy + 0.2 * kl, "loss: 0.1, 0.2; "),
    "neither": (lambda pg, entropy, kl: pg * 1, "loss: none; "),
}


@pytest.mark.parametrize("kl_value", [0.0, 3.0])
@pytest.mark.parametrize("name", LOSSES)
def test_terms_have_the_factors_of_the_flags(name: str, kl_value: float, args: Any) -> None:
    """Whatever a term's value is in the step."""
    make, says = LOSSES[name]
    vars(args).update(entropy_coef=0.1, kl_loss_coef=0.2, use_kl_loss=True)
    policy, entropy, kl = (torch.tensor(value, requires_grad=True) for value in (0.5, 2.0, kl_value))
    taps = Taps()
    with observe(taps):
        slime._check_factors(
            slime.ENGINES[-1], args, make(policy, entropy, kl), Now(policy=policy, means=[entropy, kl])
        )
    assert len(taps.added) == bool(says)
    assert all(f"{says}by --kl-loss-coef and --entropy-coef they are: -0.1, 0.2" in told for told in taps.added)


# --- what is refused


def other_step(args: Any, data_iterator: Any, num_microbatches: int, global_batch_size: int) -> None: ...


def test_launches_that_cannot_be_counted_are_refused(args: Any) -> None:
    install(step=other_step)
    with pytest.raises(
        ValueError, match=r"train_one_step\(args, .*, global_batch_size\): .*num_rollouts\)\. Use miles 31f"
    ):
        count_steps(args)
    model = install()
    args.multi_lora = True
    with pytest.raises(ValueError, match=r"every adapter has a batch of its own.*Drop --custom-megatron-init-path"):
        count_steps(args)
    args.multi_lora = False
    count_steps(args)
    sys.modules["miles.backends.training_utils.parallel"]._parallel_state.indep_dp.size = 2
    with pytest.raises(ValueError, match="Megatron's groups span one replica only"):
        model.train_one_step(args, 0, [DataIterator({"loss_masks": MASKS}, 6)], 1, 1)
    args.loss_type, args.custom_pg_loss_reducer_function_path = "policy_loss", None
    with pytest.raises(ValueError, match="without --custom-pg-loss-reducer-function-path: miles ignores options"):
        count_steps(args)


def test_fsdp_is_asked_for_its_own_place_and_has_no_token_mean(args: Any) -> None:
    """FSDP runs without Megatron and never divides by a step's tokens. Without meshes a state is another backend's."""
    sample, losses = ([5], [3], MASKS[:1]), torch.tensor([1.0, 2.0, 4.0])
    for meshes in ([], ["dp", "fsdp"]):
        install(meshes=meshes)
        if not meshes:
            with pytest.raises(ValueError, match="no parallel state in Megatron"):
                slime.sample_mean(*sample, False)
    assert float(slime.sample_mean(*sample, False)(losses)) == 2.5
    for per_token in (True, False):
        with pytest.raises(ValueError, match=r"never divides by the step's tokens.*--train-backend megatron"):
            slime.token_mean(*sample, per_token)

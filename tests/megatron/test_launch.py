"""A launch: which process groups it takes, what `attached` replaces in Megatron, and the first step's line."""

import contextlib
import functools
import io
import os
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import RankError, run_ranks
from refusals import outcome_of
from step_samples import step_samples
from table_step import Batch, aggregation, logged_by_step, start, table_model

from megatron_rl_loss import Samples, StepTotals, ZigzagTHD, make_pg_loss_reducer
from megatron_rl_loss import AggregationSettings, LossAggregation
from megatron_rl_loss.plan import plan_step

SAMPLES = step_samples(seed=1)
TABLE = [float(loss) for sample in SAMPLES for loss in sample.losses] + [0.0]


def outcomes_of_groups() -> dict[str, str]:
    state = start(cp=2)
    with_cp = {"dp_group": state.get_data_parallel_group(with_context_parallel=True)}
    options: dict[str, dict[str, Any]] = {
        "unsaid": {},
        "said to be none": {"dp_group": None},
        "dp": {"dp_group": state.get_data_parallel_group()},
        "dp and cp": with_cp | {"replica_groups": [state.get_context_parallel_group()]},
    }
    found = {}
    for name, groups in options.items():
        count = functools.partial(StepTotals.from_loss_masks, [torch.ones(2)], **groups)
        outcome = outcome_of(count)
        found[name] = str(count().step_tokens) if outcome == "accepted" else outcome
    masks, cut = [torch.ones(4)], {"layout": ZigzagTHD([0, 4]), "cp_rank": 0, "cp_size": 2}
    for name, groups in (("reducer, dp", options["dp"]), ("reducer, dp and cp", with_cp)):
        totals = StepTotals.from_loss_masks(masks, **groups)
        found[name] = outcome_of(functools.partial(make_pg_loss_reducer, "token_mean", masks, totals=totals, **cut))
        by_hand = functools.partial(plan_step, [Samples(masks, layout=cut["layout"])], "token_mean", totals=totals)
        found[f"plan, {name}"] = outcome_of(
            functools.partial(by_hand, **options["dp"], cp_group=state.get_context_parallel_group())
        )
    model = table_model([0.0], ddp=False)
    partial = LossAggregation(
        AggregationSettings.resolve(),
        lambda batch: batch.samples,
        pg_collection=ProcessGroupCollection(dp=dist.group.WORLD),
    )
    found["partial"] = outcome_of(lambda: partial.begin_step(iter([]), model=model, num_microbatches=1))
    return found


def test_the_groups_are_said() -> None:
    for found in run_ranks(4, outcomes_of_groups):
        assert "totals of 4 ranks without a dp_group" in found["unsaid"]
        assert "shares the ranks" in found["dp and cp"]
        assert (found["said to be none"], found["dp"]) == ("2.0", "4.0")
        assert found["reducer, dp"] == found["plan, reducer, dp"] == "accepted"
        for name in ("reducer, dp and cp", "plan, reducer, dp and cp"):
            assert "totals over a dp_group of 4 ranks, and cp_size=2, in a job of 4 ranks" in found[name]
        assert "a ProcessGroupCollection without tp, pp, cp, dp_cp" in found["partial"]


def groups_of_models() -> list[str]:
    """Which groups a step is reduced over: what the launch gives, else the model's, else Megatron's parallel state."""
    state = start(cp=2)
    names = ["tp", "pp", "cp", "dp", "dp_cp"]
    whole = ProcessGroupCollection.use_mpu_process_groups(names)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    one_rank = ProcessGroupCollection(**dict.fromkeys(names, alone))
    found = []
    for given, of_model in ((None, None), (one_rank, None), (None, one_rank), (whole, one_rank)):
        model = table_model([0.0], ddp=False)
        if of_model is not None:
            model.pg_collection = of_model
        step = LossAggregation(AggregationSettings.resolve(), lambda batch: batch.samples, pg_collection=given)
        batch = Batch(SAMPLES, [0], 2 if (given or of_model or whole) is whole else 1)
        handed = list(step.begin_step(iter([batch]), model=model, num_microbatches=1))
        found.append(len(handed[0].pg_loss.weights))
    assert state.get_context_parallel_world_size() == 2
    return found


def test_the_groups_are_the_launchs_or_the_models_or_megatrons() -> None:
    """A rank that is its own context-parallel group holds all tokens of its micro-batch, one of two holds half."""
    length = len(SAMPLES[0].mask)
    halves, all_of_it = -(-length // 4) * 4 // 2, -(-length // 2) * 2
    assert run_ranks(2, groups_of_models) == [[halves, all_of_it, all_of_it, halves]] * 2


def attached() -> None:
    """What is in the place of Megatron's names inside and after `attached`."""
    from megatron.training import training

    lines: list[str] = []
    given: list[Any] = []

    def training_log(loss_dict: Any, total: Any = None, lr: float = 0.0, iteration: int = 0, scale: float = 1.0) -> str:
        lines.append("Megatron's line")
        return "logged"

    training.get_forward_backward_func = lambda: lambda **kwargs: given.append(kwargs) or "stored"  # type: ignore[func-returns-value]
    training.training_log = training_log
    training.get_args = lambda: SimpleNamespace(log_interval=2)
    training.print_rank_last = lines.append
    before = training.get_forward_backward_func, training.training_log
    model = table_model([0.0], ddp=False)
    options = {"num_microbatches": 2, "seq_length": 8}
    with aggregation(mode="token_mean").attached():
        assert training.get_forward_backward_func is not before[0]
        batches = iter([Batch(SAMPLES, [0], 1), Batch(SAMPLES, [1], 1)])
        schedule = training.get_forward_backward_func()
        assert schedule(forward_step_func=print, data_iterator=batches, model=model, **options) == "stored"
        losses = {"pg_loss": torch.tensor(-0.25), "kl": torch.tensor(2.0)}
        for iteration in (1, 2):
            assert training.training_log(losses, {}, 0.1, iteration, 1.0) == "logged"
        assert training.training_log(losses, iteration=4) == "logged"
        with pytest.raises(RuntimeError, match=r"attached\(\) inside attached\(\)"), aggregation().attached():
            pass
    assert (training.get_forward_backward_func, training.training_log) == before
    with pytest.raises(KeyError), aggregation().attached():
        raise KeyError
    assert (training.get_forward_backward_func, training.training_log) == before
    (kwargs,) = given
    assert [len(one.data.samples.loss_masks) for one in kwargs.pop("data_iterator")] == [1, 1]
    assert kwargs.pop("forward_step_func").__wrapped__ is print
    assert kwargs == {"model": model, **options}
    values = "alone | pg_loss: -2.500000E-01 | kl: 2.000000E+00 |"
    of_2, of_4 = (f"   of iteration {iteration:8d} {values}" for iteration in (2, 4))
    assert lines == ["Megatron's line"] * 2 + [of_2, "Megatron's line", of_4]


def announced() -> str:
    """What the first of two steps prints, and its summary; then `attached`."""
    start()
    model = table_model(TABLE)
    step = aggregation(mode="constant", divisor=40960)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for _ in range(2):
            step.begin_step(iter([Batch(SAMPLES, list(range(13)), 1)]), model=model, num_microbatches=1)
    attached()
    return f"{out.getvalue()}|{step.summary}"


def test_the_first_step_is_told_in_a_line_and_attached_puts_back_what_it_replaced() -> None:
    text, _, summary = run_ranks(1, announced)[0].rpartition("|")
    assert text.count("\n") == 1
    rollouts = len({sample.rollout_id for sample in SAMPLES})
    masked = sum(
        all(float(one.mask.sum()) == 0 for one in SAMPLES if one.rollout_id == name)
        for name in {sample.rollout_id for sample in SAMPLES}
    )
    entries = sum(len(sample.mask) for sample in SAMPLES)
    active = sum(int((sample.mask != 0).sum()) for sample in SAMPLES)
    assert text.startswith("loss aggregation: constant, divisor 40960, unit counting all | ")
    assert f"{rollouts} rollouts" in text
    assert f"{active} of {entries} tokens active, {masked} rollouts fully masked" in text
    assert re.search(r"\| 1 micro-batches x DP 1, CP 1\n$", text)
    assert eval(summary) == {
        "rollouts": rollouts, "active_rollouts": rollouts - masked, "tokens": entries, "active_tokens": active,
    }  # fmt: skip


# ---- what the first step warns of

RAGGED = [[1.0] * 3, [1.0] * 5]
SUSPICIOUS: dict[str, tuple[str, Any, str]] = {
    # mode, (DP rank) -> samples of its two micro-batches, and what is said
    "sound": ("prompt_mean", lambda rank: [{"prompt_ids": [f"{rank}.{i}"] * 2} for i in range(2)], ""),
    "ids counted in each micro-batch": (
        "prompt_mean", lambda rank: [{"prompt_ids": [0, 0], "tokens": torch.tensor(rank)}] * 2, "one prompt group",
    ),
    "ids of samples": (
        "prompt_mean", lambda rank: [{"prompt_ids": [f"{rank}.{i}.{j}" for j in range(2)]} for i in range(2)],
        "every prompt group of the step has one rollout",
    ),
    "ids that the mode does not look at": (
        "sample_mean", lambda rank: [{"prompt_ids": [0, 0], "tokens": torch.tensor(rank)}] * 2, "",
    ),
    "the same data on two ranks": (
        "token_mean", lambda rank: [{"tokens": torch.arange(8)}] * 2, "DP ranks 0 and 1 hold samples with the same",
    ),
    "the same masks, and nothing else known": ("token_mean", lambda rank: [{}] * 2, ""),
}  # fmt: skip


def warnings_of_steps() -> dict[str, list[list[str]]]:
    """Of two steps of each case, on two DP ranks with groups of their own."""
    start()
    found = {}
    for name, (mode, samples_of, _) in SUSPICIOUS.items():
        group, said = dist.new_group([0, 1]), []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as Python has it: once
            for _ in range(2):
                masks = [torch.tensor(mask) for mask in RAGGED]
                plan_step([Samples(masks, **ids) for ids in samples_of(dist.get_rank())], mode, dp_group=group)
                said.append([str(warning.message) for warning in caught])
                caught.clear()
        found[name] = said
    return found


def test_a_suspicious_first_step_is_warned_of_once() -> None:
    first, second = run_ranks(2, warnings_of_steps)
    assert not any(any(said) for said in second.values())
    for name, (_, _, text) in SUSPICIOUS.items():
        (said, again) = first[name]
        assert len(said) == bool(text), name
        assert text in "".join(said)
        assert again == []


# ---- an error inside the pipeline on one rank

REASON = "rank 0: ValueError: the reward model is gone"


def failing(case: str, port: Path) -> None:
    """On a rank of two: rank 0's loss function fails. It keeps the store, but for torchrun's, and in one case stays."""
    fails, waits = os.environ["RANK"] == "0", port.with_suffix(".pid")
    if not fails:
        waits.write_text(str(os.getpid()))
    if case != "torchrun":
        if fails:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port.with_suffix(".part").write_text(str(store.port))
            port.with_suffix(".part").rename(port)
        while not port.exists():
            time.sleep(0.05)
        os.environ["MASTER_PORT"] = port.read_text()
    start()

    def forward_step(iterator: Any, model: Any) -> Any:
        microbatch = next(iterator)

        def loss_func(losses: torch.Tensor) -> Any:
            if fails:
                raise ValueError("the reward model is gone")
            return microbatch.loss(losses)

        return model(microbatch.data.local_numbers(0, 1)), loss_func

    try:
        batches = [Batch(SAMPLES, [0], 1), Batch(SAMPLES, [1], 1)]
        logged_by_step(aggregation(mode="token_mean"), forward_step, batches, table_model(TABLE))
    finally:
        while fails and case == "stays" and Path("/proc", waits.read_text()).exists():
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["torchrun", "ends", "stays"])
def test_an_error_of_one_rank_ends_all_with_its_reason(case: str, tmp_path: Path) -> None:
    """Within seconds: gloo waits for 30 minutes."""
    began = time.monotonic()
    with pytest.raises(RankError, match=f"rank 1: no rank can end its step. {REASON}") as caught:
        run_ranks(2, failing, case, tmp_path / "port")
    assert time.monotonic() - began < 60
    assert REASON.removeprefix("rank 0: ") in caught.value.errors[0]
    if case == "stays":  # rank 1 waits in a collective: its process is ended
        assert caught.value.errors[1] == "ended without a result"
    else:
        assert f"BadBatchError: The step was ended, no weight was changed. {REASON}" in caught.value.errors[1]

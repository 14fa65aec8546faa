"""A rank is killed (SIGKILL) in the middle of a run of the example, which is resumed in another layout.

The others must end by the broken connection (gloo here; with NCCL that is its watchdog's work, not tested), not by the
timeout of a collective. A resumed run's losses, metrics and grad norms must equal those of a run nobody interrupted.
"""

import io
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from example_run import train
from ranks import RankError, run_ranks

pytestmark = pytest.mark.slow

RESUME = ["--no-load-rng", "--override-opt-param-scheduler"]
SECONDS_TO_END = 300.0  # half of the time-out of a collective; measured: 0.1 to 2


def train_and_die(flags: list[str], moment: Path) -> list[dict[str, float]]:
    """`train`, but rank 1 is killed as it reads data for step 3."""
    import pretrain_grpo
    from megatron.training import get_args

    packs_of_rank = vars(pretrain_grpo)["packs_of_rank"]

    def packs(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for pack in packs_of_rank(*args, **kwargs):
            if get_args().curr_iteration + 1 == 3 and os.environ["RANK"] == "1":
                moment.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield pack

    vars(pretrain_grpo)["packs_of_rank"] = packs
    return train(flags)


def train_and_listen(flags: list[str]) -> tuple[list[dict[str, float]], list[str]]:
    """`train`, and the warnings of a launch."""
    told = io.StringIO()
    logging.getLogger("megatron_rl_loss.megatron.launch").addHandler(logging.StreamHandler(told))
    return train(flags), told.getvalue().splitlines()


def test_a_resumed_job_with_another_mode_is_told(tmp_path: Path) -> None:
    saved, other = str(tmp_path / "saved"), ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "400"]
    run_ranks(1, train, ["--save", saved, "--save-interval", "1", "--train-iters", "1"])
    ((steps, told),) = run_ranks(1, train_and_listen, ["--load", saved, *RESUME, "--train-iters", "2", *other])
    assert [step["iteration"] for step in steps] == [2]  # it goes on
    (line,) = told
    assert line.startswith("loss aggregation: constant, divisor 400; the checkpoint was trained with")
    assert "trained with loss aggregation: sample_mean: the loss changes" in line
    ((_, told),) = run_ranks(1, train_and_listen, ["--load", saved, "--finetune", "--train-iters", "1", *other])
    assert told == []  # a new training from these weights


def test_a_rank_killed_before_the_collectives_of_a_step_loses_that_step(tmp_path: Path, record_property: Any) -> None:
    first, moment, saved = str(tmp_path / "first"), tmp_path / "moment", tmp_path / "saved"
    run_ranks(1, train, ["--save", first, "--save-interval", "1", "--train-iters", "1"])
    ((uninterrupted, told),) = run_ranks(1, train_and_listen, ["--load", first, *RESUME, "--train-iters", "4"])
    assert told == []
    assert [step["iteration"] for step in uninterrupted] == [2, 3, 4]
    # Steps differ, or resuming at a wrong one would not be seen.
    assert len({round(step["grad_norm"], 4) for step in uninterrupted}) == 3

    flags = ["--load", first, *RESUME, "--save", str(saved), "--save-interval", "1", "--train-iters", "8"]
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_and_die, flags, moment)
    record_property("seconds_to_end", seconds := time.time() - float(moment.read_text()))
    assert seconds < SECONDS_TO_END
    assert "onnection" in caught.value.errors[0]
    assert "ended without a result" in caught.value.errors[1]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"

    layout = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--sequence-parallel"]
    steps = run_ranks(4, train, ["--load", str(saved), *RESUME, *layout, "--train-iters", "4"])[-1]
    # Two layers of sums over 256 tokens; then a second step of Adam.
    for step, expected in zip(steps, uninterrupted[1:], strict=True):
        assert step == pytest.approx(expected, rel=2 * oracle.chain_error(4, 256), abs=1e-9)
    record_property("cases", sum(map(len, steps)))

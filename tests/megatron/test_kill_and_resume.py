"""Launches that die: one rank is killed in the middle of a run, and the run is resumed in another layout.

The example, a real `megatron.training.pretrain`, saves a checkpoint after every step. What a resumed run does must
equal what a run that nobody interrupted does: losses, metrics and grad norms of the steps after the checkpoint, which
depend on all weights and on the optimizer's state.

Killed is SIGKILL: the rank says nothing. The others must end by the broken connection (gloo here; with NCCL that is its
watchdog's work, not tested), not by the timeout of a collective.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import psutil
import pytest
from example_run import DATA, EXAMPLES, MODEL, TRAINING, train
from ranks import RankError, run_ranks

pytestmark = pytest.mark.slow

TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
#: On four processes.
LAYOUTS = {"tp 2 x cp 2": [TP, "2", CP, "2", "--sequence-parallel"], "pp 2 x cp 2": [PP, "2", CP, "2"]}
RESUME = ["--no-load-rng", "--override-opt-param-scheduler"]
LAST_STEP = 6
SECONDS_TO_END = 300.0  # half of the time-out of a collective; measured: 0.1 to 2

Uninterrupted = tuple[str, dict[int, dict[str, float]]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """A run of one process that nothing happens to: where its first step is saved, and its later steps."""
    folder = str(tmp_path_factory.mktemp("first"))
    run_ranks(1, train, ["--save", folder, "--save-interval", "1", "--train-iters", "1"])
    steps = run_ranks(1, train, ["--load", folder, *RESUME, "--train-iters", str(LAST_STEP)])[-1]
    found = {int(step["iteration"]): step for step in steps}
    assert list(found) == list(range(2, LAST_STEP + 1))
    # Steps differ, or resuming at a wrong one would not be seen.
    assert len({round(step["grad_norm"], 4) for step in steps}) == len(steps)
    return folder, found


def last_saved(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def assert_resumes(folder: Path, layout: str, uninterrupted: Uninterrupted) -> int:
    """Two steps from the last complete checkpoint, as if nothing had happened; the number of values compared."""
    saved = last_saved(folder)
    resumed = ["--load", str(folder), *RESUME, *LAYOUTS[layout], "--train-iters", str(saved + 2)]
    steps = run_ranks(4, train, resumed)[-1]
    assert [step["iteration"] for step in steps] == [saved + 1, saved + 2]
    for step in steps:
        # Two layers of sums over 256 tokens; then a second step of Adam.
        expected = uninterrupted[1][int(step["iteration"])]
        assert step == pytest.approx(expected, rel=2 * oracle.chain_error(4, 256), abs=1e-9)
    return sum(len(step) for step in steps)


# ---- killed


def test_a_killed_torchrun_launch_ends_and_resumes_in_another_layout(
    uninterrupted: Uninterrupted, tmp_path: Path, record_property: Any
) -> None:
    command = [str(EXAMPLES / "launch_grpo.sh"), "2", *MODEL.split(), *DATA.split(), *TRAINING.split()]
    saved = tmp_path / "saved"
    command += [CP, "2", "--load", uninterrupted[0], *RESUME]
    command += ["--save", str(saved), "--save-interval", "1"]
    # Into a file: a helper process of the killed rank's checkpointing (a multiprocessing manager) survives it, and
    # would keep a pipe open for ever.
    log = tmp_path / "log"
    with log.open("wb") as sink:
        launcher = subprocess.Popen(
            [*command, "--train-iters", "1000"],
            env=os.environ | {"PYTHON": sys.executable},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    left_behind: list[psutil.Process] = []
    try:
        while launcher.poll() is None and not re.search(rb" iteration +3/", log.read_bytes()):
            time.sleep(0.05)
        assert launcher.poll() is None, log.read_text(errors="replace")[-3000:]
        workers = psutil.Process(launcher.pid).children()  # the launcher became torchrun (exec)
        ranks = {process.environ()["RANK"]: process for process in workers if _is_rank(process)}
        assert len(ranks) == 2
        left_behind = ranks["1"].children(recursive=True)
        ranks["1"].kill()
        killed = time.monotonic()
        returncode = launcher.wait(timeout=600)
        seconds = time.monotonic() - killed
    finally:
        launcher.terminate()  # torchrun ends its ranks; nothing to do if it has ended
        for process in left_behind:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    text = log.read_text(errors="replace")
    record_property("seconds_to_end", seconds)
    assert seconds < SECONDS_TO_END
    assert returncode != 0
    assert "Signal 9 (SIGKILL) received" in text, text[-3000:]
    assert last_saved(saved) in (2, 3, 4)
    record_property("cases", assert_resumes(saved, "pp 2 x cp 2", uninterrupted))


def _is_rank(process: psutil.Process) -> bool:
    return "pretrain_grpo.py" in " ".join(process.cmdline())


def train_and_die(flags: list[str], moment: Path) -> list[dict[str, float]]:
    """`train`, but rank 1 is killed as it reads data for step 4."""
    import pretrain_grpo
    from megatron.training import get_args

    packs_of_rank = pretrain_grpo.packs_of_rank

    def packs(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for pack in packs_of_rank(*args, **kwargs):
            if get_args().curr_iteration + 1 == 4 and os.environ["RANK"] == "1":
                moment.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield pack

    pretrain_grpo.packs_of_rank = packs
    return train(flags)


def test_a_rank_killed_before_the_collectives_of_a_step_loses_that_step(
    uninterrupted: Uninterrupted, tmp_path: Path, record_property: Any
) -> None:
    moment, saved = tmp_path / "moment", tmp_path / "saved"
    flags = ["--load", uninterrupted[0], *RESUME, "--save", str(saved), "--save-interval", "1", "--train-iters", "8"]
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_and_die, flags, moment)
    record_property("seconds_to_end", seconds := time.time() - float(moment.read_text()))
    assert seconds < SECONDS_TO_END
    assert "onnection" in caught.value.errors[0]
    assert "ended without a result" in caught.value.errors[1]
    assert last_saved(saved) == 3
    record_property("cases", assert_resumes(saved, "tp 2 x cp 2", uninterrupted))

"""The main job: `examples/pretrain_grpo.py`, a real `megatron.training.pretrain`, in several layouts.

A checkpoint is saved once, by one process, and resumed in every layout for two steps on the same rollouts. Losses,
metrics and grad norms must agree; grad norms are those of the whole model before clipping.
"""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
from example_run import EXAMPLES, check_refused_on_every_rank, train
from ranks import RankError, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

MODES = {
    "sample_mean": ["--loss-aggregation", "sample_mean"],
    "prompt_mean": ["--loss-aggregation", "prompt_mean"],
    "token_mean": ["--loss-aggregation", "token_mean"],
    "constant": ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "40960"],
}
TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp 2 x cp 2": (4, [TP, "2", CP, "2", "--sequence-parallel"]),
    "dp 4": (4, []),
    "pp 2 x cp 2": (4, [PP, "2", CP, "2"]),
    "cp 4": (4, [CP, "4"]),
}


def write_rollouts(path: Path) -> None:
    """Ragged responses, fractional and empty masks, rollouts of one to three samples, prompt groups of 2 to 6, old
    log-probs that make the ratio clip on both sides."""
    rng = random.Random(11)
    lines = []
    for prompt in range(8):
        prompt_tokens = [rng.randrange(1, 32) for _ in range(rng.randint(1, 9))]
        for attempt in range(rng.randint(2, 6)):
            reward = rng.random()
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                length = rng.choice([1, 2, 5, 12, 31])
                mask = [rng.choice([0, 0.5, 1, 1, 1]) for _ in range(length)]
                record = {
                    "prompt_tokens": prompt_tokens,
                    "response_tokens": [rng.randrange(32) for _ in range(length)],
                    "loss_mask": mask if rng.random() > 0.15 else [0] * length,
                    "reward": reward,
                    "prompt_id": prompt,
                    "rollout_id": f"{prompt}.{attempt}",
                    "old_log_probs": [-rng.uniform(2.5, 4.5) for _ in range(length)],
                }
                lines.append(json.dumps(record))
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that resume from a checkpoint of one step, saved by one process."""
    folder = tmp_path_factory.mktemp("start")
    write_rollouts(folder / "rollouts.jsonl")
    data = ["--rollouts", str(folder / "rollouts.jsonl")]
    save = ["--save", str(folder / "checkpoint"), "--save-interval", "1", "--train-iters", "1"]
    run_ranks(1, train, [*data, *save])
    return [
        *data,
        "--load",
        str(folder / "checkpoint"),
        "--no-load-rng",
        "--override-opt-param-scheduler",
        "--train-iters",
        "3",
    ]


def last_rank(world_size: int, flags: list[str]) -> list[dict[str, float]]:
    return run_ranks(world_size, train, flags)[-1]


@pytest.fixture(scope="module")
def on_one_process(start: list[str]) -> Any:
    @functools.cache
    def run(mode: str) -> list[dict[str, float]]:
        return last_rank(1, [*start, *MODES[mode]])

    return run


def assert_same_steps(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [step["iteration"] for step in actual] == [2, 3]
    for step, reference in zip(actual, expected, strict=True):
        # Two layers, four with virtual stages, of sums over 256 tokens; then a second step of Adam.
        assert step == pytest.approx(reference, rel=2 * oracle.chain_error(4, 256), abs=1e-9)


#: Each mode in a layout with CP and in one without; the weights of all modes in all layouts are unit tests.
PAIRS = [
    ("tp 2 x cp 2", "sample_mean"),
    ("tp 2 x cp 2", "prompt_mean"),
    ("dp 4", "prompt_mean"),
    ("dp 4", "token_mean"),
    ("pp 2 x cp 2", "token_mean"),
    ("pp 2 x cp 2", "constant"),
    ("cp 4", "constant"),
    ("cp 4", "sample_mean"),
]


@pytest.mark.parametrize(("layout", "mode"), PAIRS)
def test_a_step_is_the_same_in_every_layout(layout: str, mode: str, start: list[str], on_one_process: Any) -> None:
    world_size, flags = LAYOUTS[layout]
    assert_same_steps(last_rank(world_size, [*start, *flags, *MODES[mode]]), on_one_process(mode))


POLICY_LOSSES = {
    "gspo": ["--clip-low", "0.5", "--clip-high", "0.5"],
    "luspo": ["--loss-aggregation", "trl:luspo", "--clip-low", "0.5", "--clip-high", "0.5"],
    "gmpo": [],
    "gspo_token": ["--loss-aggregation", "token_mean", "--clip-low", "0.5", "--clip-high", "0.5"],
    "cispo": ["--loss-aggregation", "prompt_mean"],
    "sapo": [],
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_is_the_same_in_every_layout(name: str, start: list[str], on_one_process: Any) -> None:
    """Sequences lie on two CP ranks, whose sums go forward and backward through the real schedule."""
    asked = [*start, "--policy-loss", name, *POLICY_LOSSES[name]]
    alone = last_rank(1, asked)
    for layout in ("tp 2 x cp 2", "pp 2 x cp 2", "cp 4") if name == "gspo" else ("tp 2 x cp 2",):
        world_size, flags = LAYOUTS[layout]
        assert_same_steps(last_rank(world_size, [*asked, *flags]), alone)
    ppo = on_one_process("sample_mean")[0]
    assert abs(alone[0]["grad_norm"] - ppo["grad_norm"]) > 1e-2 * ppo["grad_norm"]


def test_modes_and_unit_counting_differ_on_this_data(start: list[str], on_one_process: Any) -> None:
    """If they did not, agreement between layouts would prove nothing."""
    active = last_rank(1, [*start, *MODES["sample_mean"], "--loss-aggregation-units", "active"])
    steps = [on_one_process(mode)[0] for mode in MODES] + [active[0]]
    # Losses and grad norms alike; constant's are far smaller, so compare what is left of a common factor too.
    for value in ("pg_loss", "grad_norm"):
        values = sorted(abs(step[value]) for step in steps)
        assert all(b > 1.01 * a for a, b in itertools.pairwise(values)), values
    assert 0 < steps[0]["clip_fraction"] < 1


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
def test_the_per_token_carrier_changes_nothing(mode: str, start: list[str], on_one_process: Any) -> None:
    flags = ["--calculate-per-token-loss", "--loss-aggregation-with-per-token-loss", CP, "2"]
    assert_same_steps(last_rank(4, [*start, *flags, *MODES[mode]]), on_one_process(mode))


OTHER_SETTINGS = {
    "virtual pipeline stages": (
        4,
        [PP, "2", CP, "2", "--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "4"],
        ["--num-layers", "4"],
    ),
    "overlapped reduce, distributed optimizer": (
        4,
        [CP, "2", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--no-load-optim"],
        ["--no-load-optim"],
    ),
    "average in collective": (4, [CP, "2", "--ddp-average-in-collective"], []),
    "default mode": (4, [CP, "2"], MODES["sample_mean"]),
    "per-token flag alone": (4, [CP, "2", "--calculate-per-token-loss"], MODES["token_mean"]),
}


@pytest.mark.parametrize(("world_size", "flags", "reference"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS.keys())
def test_other_megatron_settings(
    world_size: int, flags: list[str], reference: list[str], start: list[str], tmp_path: Path
) -> None:
    if "--num-layers" in reference:  # another model needs a checkpoint of its own
        save = [*start[:2], *reference, "--save", str(tmp_path), "--save-interval", "1", "--train-iters", "1"]
        run_ranks(1, train, save)
        start = [*start[:2], "--load", str(tmp_path), *start[4:]]
    assert_same_steps(last_rank(world_size, [*start, *flags]), last_rank(1, [*start, *reference]))


# ---- launched as a user does


def launch(processes: int, *flags: str, check: bool = True) -> str:
    command = [str(EXAMPLES / "launch_grpo.sh"), str(processes), "--global-batch-size", "4", *flags]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode == 0) == check, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_launch_line_with_its_progress_and_tensorboard(tmp_path: Path) -> None:
    parallel = [TP, "1", CP, "2"]
    mode = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "40960"]
    text = launch(2, *parallel, *mode, "--train-iters", "2", "--tensorboard-dir", str(tmp_path))
    assert "loss aggregation: constant, divisor 40960, unit counting all" in text
    progress = re.findall(r"iteration +2/ +2 \|.*pg_loss: (\S+) \|.*grad norm: (\S+) \|", text)
    alone = re.findall(r"of iteration +2 alone \| pg_loss: (\S+) \| log_prob: (-\S+) \|", text)
    assert len(progress) == len(alone) == 1, text[-3000:]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"pg_loss", "log_prob", "grad-norm"} <= set(events.Tags()["scalars"])


REFUSED = {
    "unknown mode": (["--loss-aggregation", "dapo"], "there is no such mode"),  # the others: test_bad_input.py
    "micro-batches of two packs": (["--micro-batch-size", "2"], "a micro-batch is one pack"),
    "batch ramp-up": (["--rampup-batch-size", "4", "4", "8"], "--rampup-batch-size: a step's packs are fixed here"),
    "a policy loss with a mode that makes another of it": (
        ["--policy-loss", "gmpo", "--loss-aggregation", "token_mean"],
        "what its paper says by sample_mean alone",
    ),
    "a clip range of a loss that has none": (
        ["--policy-loss", "sapo", "--clip-high", "0.28"],
        "clip_high=0.28 for the policy loss sapo",
    ),
    "packs too short": (["--seq-length", "64", "--max-position-embeddings", "64"], "do not fit into 8 packs"),
}


@pytest.mark.parametrize(("flags", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_of_a_real_launch(flags: list[str], reason: str) -> None:
    check_refused_on_every_rank(flags, reason)


def test_a_bad_line_stops_the_launch_before_anything_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text((EXAMPLES / "arithmetic.jsonl").read_text().replace('"loss_mask":[', '"loss_mask":[-1,', 1))
    with pytest.raises(RankError, match=r"rollouts\.jsonl, line 1: loss_mask has"):
        run_ranks(1, train, ["--rollouts", str(path)])

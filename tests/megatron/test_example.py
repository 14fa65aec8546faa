"""The main job: `examples/pretrain_grpo.py`, a real `megatron.training.pretrain`, in several layouts.

A checkpoint is saved once, by one process, and resumed for two steps on the same rollouts in every layout, with stock
and with chunked log-probs. Losses, metrics and grad norms must agree with one process; grad norms are those of the
whole model before clipping. The weights of all modes in all layouts are unit tests.
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
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
STAGES = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]
#: On four processes.
LAYOUTS = {
    "tp 2 x cp 2": [TP, "2", CP, "2", "--sequence-parallel"],
    "dp 4": [],
    "pp 2 x cp 2": [PP, "2", CP, "2"],
    "cp 4": [CP, "4"],
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


Steps = list[dict[str, float]]


class Runs:
    """Two steps from a checkpoint of one step of each model; every launch is run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_rollouts(folder / "rollouts.jsonl")
        self.steps = functools.cache(self._steps)
        self._saved = functools.cache(self._save)

    def _save(self, model: tuple[str, ...]) -> list[str]:
        data = ["--rollouts", str(self.folder / "rollouts.jsonl"), *model]
        checkpoint = str(self.folder / f"checkpoint{'-'.join(model)}")
        run_ranks(1, train, [*data, "--save", checkpoint, "--save-interval", "1", "--train-iters", "1"])
        resume = ["--no-load-rng", "--override-opt-param-scheduler", "--train-iters", "3"]
        return [*data, "--load", checkpoint, *resume]

    def _steps(self, world_size: int, flags: tuple[str, ...], model: tuple[str, ...]) -> Steps:
        return run_ranks(world_size, train, [*self._saved(model), *flags])[-1]

    def alone(self, *flags: str, model: tuple[str, ...] = ()) -> Steps:
        return self.steps(1, flags, model)

    def on_four(self, *flags: str, model: tuple[str, ...] = ()) -> Steps:
        return self.steps(4, flags, model)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


#: Two layers, four with virtual stages, of sums over 256 tokens; then a second step of Adam.
OF_LAYOUTS = 2 * oracle.chain_error(4, 256)


def assert_same_steps(actual: Steps, expected: Steps, rel: float = OF_LAYOUTS) -> None:
    assert [step["iteration"] for step in actual] == [2, 3]
    for step, reference in zip(actual, expected, strict=True):
        assert {name: step[name] for name in reference} == pytest.approx(reference, rel=rel, abs=1e-7)


WIDE = ["--clip-low", "0.5", "--clip-high", "0.5"]
FOUR_LAYERS = ("--num-layers", "4")
PER_TOKEN = ["--calculate-per-token-loss", "--loss-aggregation-with-per-token-loss"]
#: Flags of four processes beside those of one; of both.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "tp 2 x cp 2": (LAYOUTS["tp 2 x cp 2"], MODES["prompt_mean"]),
    "dp 4": (LAYOUTS["dp 4"], MODES["token_mean"]),
    "pp 2 x cp 2": (LAYOUTS["pp 2 x cp 2"], MODES["constant"]),
    "cp 4": (LAYOUTS["cp 4"], MODES["sample_mean"]),
    "per-token carrier": ([*PER_TOKEN, CP, "2"], MODES["prompt_mean"]),
    "average in collective": ([CP, "2", "--ddp-average-in-collective"], []),
    "overlap": ([CP, "2", *OVERLAP, "--no-load-optim"], ["--no-load-optim"]),
    # A sequence's ratio is a sum over CP ranks, forward and backward, between the schedule's own collectives.
    "gspo": (LAYOUTS["tp 2 x cp 2"], ["--policy-loss", "gspo", *WIDE]),
    "gspo, pp 2 x cp 2": (LAYOUTS["pp 2 x cp 2"], ["--policy-loss", "gspo", *WIDE]),
    "luspo": (LAYOUTS["cp 4"], ["--policy-loss", "luspo", "--loss-aggregation", "trl:luspo", *WIDE]),
    "gmpo": (LAYOUTS["tp 2 x cp 2"], ["--policy-loss", "gmpo"]),
    "gspo_token": (LAYOUTS["cp 4"], ["--policy-loss", "gspo_token", *MODES["token_mean"], *WIDE]),
    "cispo": (LAYOUTS["tp 2 x cp 2"], ["--policy-loss", "cispo", *MODES["prompt_mean"]]),
    "sapo": (LAYOUTS["dp 4"], ["--policy-loss", "sapo"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_in_every_layout(case: str, runs: Runs) -> None:
    of_four, of_both = CASES[case]
    assert_same_steps(runs.on_four(*of_four, *of_both), runs.alone(*of_both))
    if "--policy-loss" in of_both:
        norm, ppo = (run[0]["grad_norm"] for run in (runs.alone(*of_both), runs.alone(*MODES["sample_mean"])))
        assert abs(norm - ppo) > 1e-2 * ppo, "another loss would not be seen"


def test_flags_that_say_nothing_new(runs: Runs) -> None:
    assert_same_steps(runs.on_four(CP, "2"), runs.alone(*MODES["sample_mean"]))
    assert_same_steps(runs.on_four(CP, "2", "--calculate-per-token-loss"), runs.alone(*MODES["token_mean"]))


def test_modes_and_unit_counting_differ_on_this_data(runs: Runs) -> None:
    """If they did not, agreement between layouts would prove nothing."""
    steps = [runs.alone(*mode)[0] for mode in MODES.values()]
    steps.append(runs.alone(*MODES["sample_mean"], "--loss-aggregation-units", "active")[0])
    for value in ("pg_loss", "grad_norm"):
        values = sorted(abs(step[value]) for step in steps)
        assert all(b > 1.01 * a for a, b in itertools.pairwise(values)), values
    assert 0 < steps[0]["clip_fraction"] < 1


# ---- chunked log-probs

CHUNKED = ["--log-probs", "chunked", "--log-probs-chunk-tokens", "37"]
RECOMPUTED = ["--old-log-probs", "recomputed", "--kl-beta", "0.1"]
#: Of losses and grad norms of stock in the same layout.
SAME = 1e-5


@pytest.mark.parametrize("layout", [*LAYOUTS, "overlap"])
def test_chunked_is_stock(layout: str, runs: Runs) -> None:
    flags = LAYOUTS.get(layout, [TP, "2", *OVERLAP, "--no-load-optim"])
    stock, chunked = runs.on_four(*flags), runs.on_four(*flags, *CHUNKED)
    assert_same_steps(chunked, stock, SAME)
    assert all(0 < step["entropy"] < 3.5 for step in chunked)  # log(32)
    assert "entropy" not in stock[0]


@pytest.mark.parametrize("layout", ["tp 2 x cp 2", "pp 2 x cp 2", "dp 4"])
def test_recomputed_log_probs_and_entropy_bonus_in_every_layout(layout: str, runs: Runs) -> None:
    alone = runs.alone(*RECOMPUTED)
    assert_same_steps(runs.on_four(*LAYOUTS[layout], *RECOMPUTED, *CHUNKED), alone, SAME)
    # The old policy is the one in training before its one step; the reference is that of the launch's first step.
    assert [step["clip_fraction"] for step in alone] == [0, 0]
    assert alone[0]["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert alone[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert alone[1]["reference_kl"] > 1e-6
    bonus = [*CHUNKED, *RECOMPUTED, "--entropy-bonus", "0.01", "--temperature", "0.9"]
    assert_same_steps(runs.on_four(*LAYOUTS[layout], *bonus), runs.alone(*bonus), SAME)


def test_virtual_pipeline_stages(runs: Runs) -> None:
    assert_same_steps(runs.on_four(*STAGES, CP, "2", model=FOUR_LAYERS), runs.alone(model=FOUR_LAYERS))
    recomputed = [*RECOMPUTED, *CHUNKED]
    assert_same_steps(
        runs.on_four(*STAGES, *recomputed, model=FOUR_LAYERS), runs.alone(*recomputed, model=FOUR_LAYERS), SAME
    )


def test_the_flags_change_what_they_say(runs: Runs) -> None:
    """Negative controls: agreement would prove nothing if nothing differed."""
    variants = [[], ["--entropy-bonus", "0.05"], ["--temperature", "0.8"], ["--kl-beta", "2"]]
    norms = sorted(runs.alone(*CHUNKED, *more)[1]["grad_norm"] for more in variants)
    assert all(b > (1 + 10 * SAME) * a for a, b in itertools.pairwise(norms)), norms


# ---- launched as a user does


def test_the_launch_line_with_its_progress_and_tensorboard(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "launch_grpo.sh"), "2", "--global-batch-size", "4", TP, "1", CP, "2", *MODES["constant"]]
    done = subprocess.run(
        [*command, "--train-iters", "2", "--tensorboard-dir", str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert "loss aggregation: constant, divisor 40960, unit counting all" in text
    progress = re.findall(r"iteration +2/ +2 \|.*pg_loss: (\S+) \|.*grad norm: (\S+) \|", text)
    alone = re.findall(r"of iteration +2 alone \| pg_loss: (\S+) \| log_prob: (-\S+) \|", text)
    assert len(progress) == len(alone) == 1, text[-3000:]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"pg_loss", "log_prob", "grad-norm"} <= set(events.Tags()["scalars"])


#: By the example; what the package refuses is in test_bad_input.py.
REFUSED = {
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
    "a temperature with the stock head": (["--temperature", "0.7"], "with --log-probs stock: it has neither"),
    "a KL term beside an overlapped gather": (["--kl-beta", "0.1", *OVERLAP], "weights are exchanged in place"),
    "a temperature of 0": (["--log-probs", "chunked", "--temperature", "0"], "temperature is 0"),
}


@pytest.mark.parametrize(("flags", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_of_a_real_launch(flags: list[str], reason: str) -> None:
    check_refused_on_every_rank(flags, reason)


def test_a_bad_line_stops_the_launch_before_anything_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text((EXAMPLES / "arithmetic.jsonl").read_text().replace('"loss_mask":[', '"loss_mask":[-1,', 1))
    with pytest.raises(RankError, match=r"rollouts\.jsonl, line 1: loss_mask has"):
        run_ranks(1, train, ["--rollouts", str(path)])

"""The main job: `examples/pretrain_grpo.py`, a real `megatron.training.pretrain`, in several layouts.

A checkpoint is saved once, by one process, and resumed for two steps on the same rollouts in other layouts. Losses,
metrics and grad norms must agree with one process; grad norms are those of the whole model before clipping. Modes,
carriers, optimizers and output layers over all layouts: test_matrix.py; `pretrain` against the oracle: test_worlds.py.
Losses over CP: test_formulas.py.
"""

import functools
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
from example_run import train
from missing import skip_without
from online.rows import split_over_samples
from online_rollouts import some_rollouts
from ranks import RankError, run_ranks
from repository import EXAMPLES
from rollouts import write_rollouts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow

MODES = {
    mode: ["--loss-aggregation", mode, *(["--loss-aggregation-divisor", "40960"] if oracle.divisor_of(mode, 1) else [])]
    for mode in ("sample_mean", "prompt_mean", "token_mean", "constant")
}
TP, PP, CP = ([f"--{axis}-parallel-size", "2"] for axis in ("tensor-model", "pipeline-model", "context"))
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
Steps = list[dict[str, float]]


class Runs:
    """Two steps from a checkpoint of one step of each model; every launch is run once."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(11)
        uneven = [rollout for i, rollout in enumerate(some_rollouts(8, 6, seed=11)) if i % 6 < 2 + i // 6 % 5]
        rollouts = [split_over_samples(rollout, rng.choice([1, 1, 2, 3])) for rollout in uneven]
        write_rollouts(folder / "rollouts.jsonl", list(itertools.chain(*rollouts)))
        self.folder = folder
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

    def on(self, world_size: int, *flags: str, model: tuple[str, ...] = ()) -> Steps:
        return self.steps(world_size, flags, model)


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
CHUNKED = ["--log-probs", "chunked", "--log-probs-chunk-tokens", "37"]
RECOMPUTED = ["--old-log-probs", "recomputed", "--kl-beta", "0.1"]
BONUS = [*CHUNKED, "--entropy-bonus", "0.05", "--temperature", "0.8"]
#: Processes, flags of theirs beside those of one; of both.
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "overlap, chunked, per-token loss alone": (
        2, [*OVERLAP, *CHUNKED, "--calculate-per-token-loss", "--no-load-optim"],
        [*MODES["token_mean"], "--no-load-optim"],
    ),
    # A sequence's ratio is a sum over CP ranks, forward and backward, between the schedule's own collectives.
    "gspo": (4, [*PP, *CP], ["--policy-loss", "gspo", *WIDE]),
    "gmpo": (4, [*TP, *CP, "--sequence-parallel"], ["--policy-loss", "gmpo"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_in_every_layout(case: str, runs: Runs) -> None:
    skip_without("pretrain")
    world_size, layout_flags, common_flags = CASES[case]
    assert_same_steps(runs.on(world_size, *layout_flags, *common_flags), runs.on(1, *common_flags))


def test_modes_losses_and_flags_differ_on_this_data(runs: Runs) -> None:
    """Otherwise agreement between layouts would prove nothing."""
    token_mean_flags = CASES["overlap, chunked, per-token loss alone"][2]
    modes = [MODES["sample_mean"], MODES["prompt_mean"], token_mean_flags, MODES["constant"]]
    steps = [runs.on(1, *mode)[0] for mode in modes]
    for value in ("pg_loss", "grad_norm"):
        values = sorted(abs(step[value]) for step in steps)
        assert all(b > 1.01 * a for a, b in itertools.pairwise(values)), values
    assert 0 < steps[0]["clip_fraction"] < 1
    for changed in (CASES["gspo"][2], CASES["gmpo"][2], BONUS):
        norm, ppo = runs.on(1, *changed)[0]["grad_norm"], steps[0]["grad_norm"]
        assert abs(norm - ppo) > 1e-2 * ppo, changed


#: Of losses and grad norms, where both sides have the same log-probs.
SAME = 1e-5


def test_recomputed_log_probs_and_entropy_bonus_over_virtual_stages(runs: Runs) -> None:
    alone = runs.on(1, *RECOMPUTED, model=FOUR_LAYERS)
    # The old policy is the one in training before its one step; the reference is that of the launch's first step.
    assert [step["clip_fraction"] for step in alone] == [0, 0]
    assert alone[0]["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert alone[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert alone[1]["reference_kl"] > 1e-6
    assert_same_steps(runs.on(1, *RECOMPUTED, *CHUNKED, model=FOUR_LAYERS), alone, SAME)
    bonus = [*RECOMPUTED, *BONUS]
    expected = runs.on(1, *bonus, model=FOUR_LAYERS)
    assert all(0 < step["entropy"] < 3.5 for step in expected)  # log(32)
    stages = [*PP, "--num-layers-per-virtual-pipeline-stage", "1", *TP, "--sequence-parallel"]
    assert_same_steps(runs.on(4, *stages, *bonus, model=FOUR_LAYERS), expected, SAME)


# ---- launched as a user does


def test_the_launch_line_with_its_progress_and_tensorboard(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "launch_grpo.sh"), "2", "--num-layers", "2", *CP, *MODES["constant"]]
    done = subprocess.run(
        [*command, "--train-iters", "2", "--tensorboard-dir", str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert "loss aggregation: constant, divisor 40960" in text
    progress = re.findall(r"iteration +2/ +2 \|.*grad norm: (\S+) \|", text)
    below = re.findall(r"iteration +2, values below 0 \|.* log_prob: (-\S+) \|", text)
    assert len(progress) == len(below) == 1, text[-3000:]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"pg_loss", "log_prob", "grad-norm"} <= set(events.Tags()["scalars"])


#: By the example; what the package refuses is in test_bad_input.py.
REFUSED = {
    "micro-batches of two packs": (["--micro-batch-size", "2"], "a micro-batch is one pack"),
    "batch ramp-up": (["--rampup-batch-size", "4", "4", "8"], "--rampup-batch-size: a step's packs are fixed here"),
    "a policy loss with a mode that makes another of it": (
        ["--policy-loss", "gmpo", "--loss-aggregation", "token_mean"],
        "its paper's by sample_mean alone",
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
    with pytest.raises(RankError, match=re.escape(reason)):
        run_ranks(1, train, flags)


def test_a_bad_line_stops_the_launch_before_anything_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text((EXAMPLES / "arithmetic.jsonl").read_text().replace('"loss_mask":[', '"loss_mask":[-1,', 1))
    with pytest.raises(RankError, match=r"rollouts\.jsonl, line 1: loss_mask has"):
        run_ranks(1, train, ["--rollouts", str(path)])

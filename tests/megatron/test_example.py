"""The main job: `examples/pretrain_grpo.py`, a real `megatron.training.pretrain`, in several layouts.

A checkpoint is saved once, by one process, and resumed for two steps on the same rollouts in other layouts. Losses,
metrics and grad norms must agree with one process; grad norms are those of the whole model before clipping. Modes,
carriers, optimizers and output layers over all layouts: test_matrix.py. Losses over CP: test_losses_over_cp.py.
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
from example_run import EXAMPLES, train
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
TP2_CP2 = [TP, "2", CP, "2", "--sequence-parallel"]
PP2_CP2 = [PP, "2", CP, "2"]


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
CHUNKED = ["--log-probs", "chunked", "--log-probs-chunk-tokens", "37"]
RECOMPUTED = ["--old-log-probs", "recomputed", "--kl-beta", "0.1"]
#: Flags of four processes beside those of one; of both.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "constant, pp 2 x cp 2": (PP2_CP2, MODES["constant"]),
    "per-token carrier": ([*PER_TOKEN, CP, "2"], MODES["prompt_mean"]),
    "average in collective": ([CP, "2", "--ddp-average-in-collective"], MODES["sample_mean"]),
    "per-token loss alone": ([CP, "2", "--calculate-per-token-loss"], MODES["token_mean"]),
    "overlap, chunked": ([TP, "2", *OVERLAP, *CHUNKED, "--no-load-optim"], ["--no-load-optim"]),
    # A sequence's ratio is a sum over CP ranks, forward and backward, between the schedule's own collectives.
    "gspo": (PP2_CP2, ["--policy-loss", "gspo", *WIDE]),
    "gmpo": (TP2_CP2, ["--policy-loss", "gmpo"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_in_every_layout(case: str, runs: Runs) -> None:
    of_four, of_both = CASES[case]
    assert_same_steps(runs.on_four(*of_four, *of_both), runs.alone(*of_both))


def test_modes_losses_and_flags_differ_on_this_data(runs: Runs) -> None:
    """If they did not, agreement between layouts would prove nothing."""
    steps = [runs.alone(*mode)[0] for mode in MODES.values()]
    steps.append(runs.alone(*MODES["sample_mean"], "--loss-aggregation-units", "active")[0])
    for value in ("pg_loss", "grad_norm"):
        values = sorted(abs(step[value]) for step in steps)
        assert all(b > 1.01 * a for a, b in itertools.pairwise(values)), values
    assert 0 < steps[0]["clip_fraction"] < 1
    changes = [CASES["gspo"][1], CASES["gmpo"][1], [*CHUNKED, "--entropy-bonus", "0.05", "--temperature", "0.8"]]
    for changed in changes:
        norm, ppo = runs.alone(*changed)[0]["grad_norm"], steps[0]["grad_norm"]
        assert abs(norm - ppo) > 1e-2 * ppo, changed


#: Of losses and grad norms, where both sides have the same log-probs.
SAME = 1e-5


def test_recomputed_log_probs_and_entropy_bonus(runs: Runs) -> None:
    alone = runs.alone(*RECOMPUTED)
    # The old policy is the one in training before its one step; the reference is that of the launch's first step.
    assert [step["clip_fraction"] for step in alone] == [0, 0]
    assert alone[0]["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert alone[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert alone[1]["reference_kl"] > 1e-6
    assert_same_steps(runs.alone(*RECOMPUTED, *CHUNKED), alone, SAME)
    bonus = [*CHUNKED, *RECOMPUTED, "--entropy-bonus", "0.01", "--temperature", "0.9"]
    expected = runs.alone(*bonus)
    assert all(0 < step["entropy"] < 3.5 for step in expected)  # log(32)
    assert_same_steps(runs.on_four(*TP2_CP2, *bonus), expected, SAME)


def test_virtual_pipeline_stages(runs: Runs) -> None:
    recomputed = [*RECOMPUTED, *CHUNKED]
    expected = runs.alone(*recomputed, model=FOUR_LAYERS)
    assert_same_steps(runs.on_four(*STAGES, CP, "2", *recomputed, model=FOUR_LAYERS), expected, SAME)


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
    with pytest.raises(RankError, match=re.escape(reason)):
        run_ranks(1, train, flags)


def test_a_bad_line_stops_the_launch_before_anything_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text((EXAMPLES / "arithmetic.jsonl").read_text().replace('"loss_mask":[', '"loss_mask":[-1,', 1))
    with pytest.raises(RankError, match=r"rollouts\.jsonl, line 1: loss_mask has"):
        run_ranks(1, train, ["--rollouts", str(path)])

"""`examples/pretrain_grpo.py` with --log-probs chunked gives the losses and grad norms of stock in every layout.

A checkpoint is saved once and resumed for two steps, as in `test_example`. Here both heads run in the same layout, and
the chunked one also recomputes old log-probs, adds a KL term and an entropy bonus.
"""

import functools
import itertools
from pathlib import Path

import pytest
from example_run import check_refused_on_every_rank, train
from ranks import run_ranks

pytestmark = pytest.mark.slow

TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, []),
    "tp 2 x cp 2": (4, [TP, "2", CP, "2", "--sequence-parallel"]),
    "dp 4": (4, []),
    "pp 2 x cp 2": (4, [PP, "2", CP, "2"]),
    "cp 4": (4, [CP, "4"]),
    "overlapped reduce and gather, distributed optimizer": (
        4,
        [TP, "2", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--no-load-optim"],
    ),
}
CHUNKED = ["--log-probs", "chunked", "--log-probs-chunk-tokens", "37"]
#: The issue's, of losses and grad norms; the other metrics are means of values of both signs.
SAME = 1e-5


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("start")
    run_ranks(1, train, ["--save", str(folder), "--save-interval", "1", "--train-iters", "1"])
    flags = ["--no-load-rng", "--override-opt-param-scheduler", "--train-iters", "3"]
    return ["--load", str(folder), *flags]


@functools.cache
def steps(world_size: int, flags: tuple[str, ...]) -> list[dict[str, float]]:
    return run_ranks(world_size, train, list(flags))[-1]


def assert_same(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) == 2
    for step, reference in zip(actual, expected, strict=True):
        for name in reference:
            assert step[name] == pytest.approx(reference[name], rel=SAME, abs=1e-7), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_is_stock(layout: str, start: list[str]) -> None:
    world_size, flags = LAYOUTS[layout]
    stock = steps(world_size, (*start, *flags))
    chunked = steps(world_size, (*start, *flags, *CHUNKED))
    assert_same(chunked, stock)
    for step in chunked:
        assert 0 < step["entropy"] < 3.5  # log(32)
    assert "entropy" not in stock[0]


RECOMPUTED = ["--old-log-probs", "recomputed", "--kl-beta", "0.1"]


@pytest.mark.parametrize("layout", ["tp 2 x cp 2", "pp 2 x cp 2", "dp 4"])
def test_recomputed_log_probs_and_entropy_bonus_in_every_layout(layout: str, start: list[str]) -> None:
    world_size, flags = LAYOUTS[layout]
    alone = steps(1, (*start, *RECOMPUTED))
    assert_same(steps(world_size, (*start, *flags, *RECOMPUTED, *CHUNKED)), alone)
    # The old policy is the one in training before its one step; the reference is that of the launch's first step.
    assert [step["clip_fraction"] for step in alone] == [0, 0]
    assert alone[0]["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert alone[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert alone[1]["reference_kl"] > 1e-6
    bonus = (*start, *CHUNKED, *RECOMPUTED, "--entropy-bonus", "0.01", "--temperature", "0.9")
    assert_same(steps(world_size, (*bonus, *flags)), steps(1, bonus))


def test_virtual_pipeline_stages(start: list[str], tmp_path: Path) -> None:
    model = ["--num-layers", "4"]
    run_ranks(1, train, [*model, "--save", str(tmp_path), "--save-interval", "1", "--train-iters", "1"])
    flags = ("--load", str(tmp_path), *start[2:], *model, *RECOMPUTED, *CHUNKED)
    cut = (PP, "2", "--num-layers-per-virtual-pipeline-stage", "1")
    assert_same(steps(2, (*flags, *cut)), steps(1, flags))


def test_the_flags_change_what_they_say(start: list[str]) -> None:
    """Negative controls: agreement would prove nothing if nothing differed."""
    variants = [(), ("--entropy-bonus", "0.05"), ("--temperature", "0.8"), ("--kl-beta", "2")]
    norms = sorted(steps(1, (*start, *CHUNKED, *more))[1]["grad_norm"] for more in variants)
    assert all(b > (1 + 10 * SAME) * a for a, b in itertools.pairwise(norms)), norms


REFUSED: dict[str, tuple[list[str], str]] = {
    "a temperature with the stock head": (["--temperature", "0.7"], "with --log-probs stock: it has neither"),
    "an entropy bonus with the stock head": (["--entropy-bonus", "0.1"], "with --log-probs stock: it has neither"),
    "a KL term beside an overlapped gather": (
        ["--kl-beta", "0.1", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        "weights are exchanged in place",
    ),
    "a temperature of 0": (["--log-probs", "chunked", "--temperature", "0"], "temperature is 0"),
}


@pytest.mark.parametrize(("flags", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_of_a_real_launch(flags: list[str], reason: str) -> None:
    check_refused_on_every_rank(flags, reason)

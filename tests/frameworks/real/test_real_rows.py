"""Rows that no other test has, through engines' real code in every mode, against float64: set checkouts as there.

Steps are those of the engines' own files. Their rows are replaced on the ranks: another number of micro-batches of
other sizes, responses of one token, first tokens that are masked, fully masked rows, prompts on several ranks; and
steps of one row, on one rank or beside another rank's fully masked row.
"""

import importlib
from functools import partial
from typing import Any, NamedTuple

import bigram_step
import pytest
from checkouts import Framework, checkout, record_errors
from logit_table import make_step
from ranks import run_ranks
from slime_launches import case as slime_case

#: What float32 leaves of a step loss and of a gradient, relative to the largest entry.
BOUND = 5e-7
Names = dict[str, Any]  # of `bigram_step`, with other values
UNEVEN: Names = {
    "SEED": 29, "ROWS": 12, "CUTS": [(0, 2), (2, 3), (3, 5), (5, 6)], "PROMPTS": [0, 1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4],
    "LATE": [0, 3, 8, 9], "SPARSE": [4, 7], "INVALID": [1, 6], "SHORT": [2, 6, 11],
}  # fmt: skip
ALONE: Names = {
    "SEED": 31, "ROWS": 1, "CUTS": [(0, 6)], "PROMPTS": [0], "LATE": [0], "SPARSE": [], "INVALID": [], "SHORT": [],
}  # fmt: skip
BESIDE_A_MASKED_ROW = ALONE | {"ROWS": 2, "PROMPTS": [0, 1], "INVALID": [1]}
STAGED, FROZEN = {"STAGES": 2}, {"FROZEN": True}
ONE_TOKEN = ALONE | {"LATE": [], "SHORT": [0]}

pytestmark = pytest.mark.slow


class Steps(NamedTuple):
    """Launches of an engine whose file trains on `bigram_step`: (ranks, context-parallel ranks), and its settings."""

    engine: str
    worlds: tuple[tuple[int, int], ...] = ((4, 2), (1, 1))
    uneven: Names = {}  # noqa: RUF012
    alone: Names = {}  # noqa: RUF012


ENGINES = [
    Steps("areal", uneven={"n_mbs": 2}, alone={"n_mbs": 1}),
    Steps("roll", ((2, 1), (1, 1))),
    Steps("rlinf", ((2, 1), (1, 1))),
    Steps("nemo_rl"),
    Steps("ms_swift", alone={"num_generations": 1}),
    Steps("skyrl", uneven={"rows": 2}, alone={"rows": 1}),
]


def on_these_rows(engine: str, rows: Names, root: str, cp: int, cases: list[Names]) -> Any:
    """On a rank: what the engine's own `train` returns."""
    module = importlib.import_module(f"test_real_{engine}")
    for names in (vars(bigram_step), vars(module)):
        names.update({name: value for name, value in rows.items() if name in names})
    return module.train(root, cp, cases)


def assert_exact(record_property: Any, steps: Steps, rows: Names, launch: tuple[int, int], of_case: Names) -> None:
    module, (ranks, cp) = importlib.import_module(f"test_real_{steps.engine}"), launch
    framework: Framework = vars(module)[steps.engine.upper()]
    cases = [{"mode": mode, "settings": settings} | of_case for mode, settings in module.MODES.items()]
    for results in run_ranks(ranks, on_these_rows, steps.engine, rows, checkout(framework), cp, cases):
        for case, result in zip(cases, results, strict=True):
            assert max(result["errors"].values()) < BOUND, (case, result["errors"])
            record_errors(record_property, framework, "every mode, other rows", ours=result["errors"]["gradient"])


@pytest.mark.parametrize("steps", ENGINES, ids=lambda steps: steps.engine)
def test_uneven_rows(steps: Steps, record_property: Any) -> None:
    assert_exact(record_property, steps, UNEVEN, steps.worlds[0], steps.uneven)


@pytest.mark.parametrize("rows", ["alone", "one token", "beside a masked row"])
@pytest.mark.parametrize("steps", ENGINES, ids=lambda steps: steps.engine)
def test_a_step_of_one_row_is_proved(steps: Steps, rows: str, record_property: Any) -> None:
    kinds = {"alone": ALONE, "one token": ONE_TOKEN, "beside a masked row": BESIDE_A_MASKED_ROW}
    launch = steps.worlds[0] if rows == "beside a masked row" else (steps.worlds[0][1], steps.worlds[0][1])
    assert_exact(record_property, steps, kinds[rows], launch, steps.alone)


@pytest.mark.parametrize("engine", ["skyrl", "ms_swift"])
@pytest.mark.parametrize("rows", [STAGED, FROZEN], ids=["PP 2", "LoRA"])
def test_pipelines_and_frozen_parameters_are_no_faults(engine: str, rows: Names, record_property: Any) -> None:
    """The table stands for a model with adapters: a half of it is not trained."""
    (steps,) = (candidate for candidate in ENGINES if candidate.engine == engine)
    assert_exact(record_property, steps, rows, (rows.get("STAGES", 1) * 2, 1), {})


# ---- engines that call hooks, whose steps are of `logit_table`: (ranks, context-parallel ranks, step)

OF_HOOKS: dict[str, tuple[int, int, Names]] = {
    "uneven": (4, 2, {"seed": 46, "dp": 2, "count": 11, "empty": (0, 5), "microbatches": 3}),
    "alone": (2, 2, {"seed": 34, "dp": 1, "count": 1, "empty": (), "microbatches": 1}),
    "beside a masked row": (4, 2, {"seed": 24, "dp": 2, "count": 2, "empty": (1,), "microbatches": 1}),
}


@pytest.mark.parametrize("rows", OF_HOOKS)
@pytest.mark.parametrize("peer", ["slime", "miles", "vime"])
def test_rows_of_hooks(peer: str, rows: str, record_property: Any) -> None:
    module = importlib.import_module("test_real_slime_miles")
    framework, (ranks, cp, of_step) = module.PEERS[peer], OF_HOOKS[rows]
    steps = [partial(make_step, **of_step)]
    hooks = {"sample_mean": "sample_mean", "constant": "constant_40", "token_mean": "token_mean"}
    cases = [slime_case(peer, mode, hook, steps, counted=True) for mode, hook in hooks.items()]
    cases.append(slime_case(peer, "token_mean", "token_mean", steps, counted=True, calculate_per_token_loss=True))
    for errors_of_cases in run_ranks(ranks, module.train, peer, checkout(framework), cp, cases):
        worst = max(map(max, errors_of_cases))
        assert worst < BOUND, errors_of_cases
        record_errors(record_property, framework, "every mode, other rows", ours=worst)

"""Rows that no other test has, through engines' real code in every mode, against float64: set checkouts as there.

Steps are those of the engines' own files. Their rows are replaced on the ranks: another number of micro-batches of
other sizes, responses of one token, first tokens that are masked, fully masked rows, prompts on several ranks; and
steps of one row, on one rank or beside another rank's fully masked row.
"""

import importlib
import random
from functools import partial
from typing import Any, NamedTuple

import oracle
import pytest
import step_samples
import world
from bigram_step import Names, on_these_rows
from checkouts import BRIDGE, VERL, Framework, checkout, record_errors
from logit_table import make_step
from ranks import run_ranks
from slime_launches import case as slime_case

#: What float32 leaves of a step loss and of a gradient, relative to the largest entry.
BOUND = 5e-7
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
GROUPED: Names = {
    "SEED": 37, "ROWS": 8, "CUTS": [(0, 6)], "PROMPTS": [0, 0, 1, 1, 2, 2, 3, 3], "LATE": [], "SPARSE": [],
    "INVALID": [], "SHORT": [],
}  # fmt: skip
#: Of a mode by prompt where nobody says how many samples a prompt has: prompts, what the proof is, and what it says.
OF_UNKNOWN_SIZE = {
    "groups": (GROUPED["PROMPTS"], "proved in part", "groups of prompts are as given: "),
    "one group": ([0] * 8, "not proved", "All 8 samples have one prompt id"),
    "groups of one": (list(range(8)), "not proved", "Each of 8 prompts has one sample"),
}

pytestmark = pytest.mark.slow


class Steps(NamedTuple):
    """Launches of an engine whose file trains on `bigram_step`: (ranks, context-parallel ranks), and its settings."""

    engine: str
    worlds: tuple[tuple[int, int], ...] = ((4, 2), (1, 1))
    uneven: Names = {}  # noqa: RUF012
    alone: Names = {}  # noqa: RUF012


ENGINES = [
    Steps("areal", uneven={"n_mbs": 2}, alone={"n_mbs": 1}),
    Steps("roll", ((2, 1), (1, 1)), alone={"group_size": 1}),
    Steps("rlinf", ((2, 1), (1, 1)), alone={"group_size": 1}),
    Steps("nemo_rl", alone={"group_size": 1}),
    Steps("ms_swift", alone={"group_size": 1}),
    Steps("skyrl", uneven={"rows": 2}, alone={"rows": 1, "group_size": 1}),
]


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


@pytest.mark.parametrize("groups", OF_UNKNOWN_SIZE)
@pytest.mark.parametrize("steps", ENGINES, ids=lambda steps: steps.engine)
def test_groups_of_which_nobody_said_the_size(steps: Steps, groups: str) -> None:
    module, (prompts, outcome, says) = importlib.import_module(f"test_real_{steps.engine}"), OF_UNKNOWN_SIZE[groups]
    settings = {name: value for name, value in module.MODES["prompt_mean"].items() if name != "group_size"}
    case = {"mode": "prompt_mean", "settings": settings, "group_size": None, "outcome": outcome, "says": says}
    root, rows = checkout(vars(module)[steps.engine.upper()]), GROUPED | {"PROMPTS": prompts}
    ranks = 1 if groups == "one group" else 2  # AReaL's controller sends a group to one rank
    for (result,) in run_ranks(ranks, on_these_rows, steps.engine, rows, root, 1, [case | steps.uneven]):
        assert max(result["errors"].values()) < BOUND, result["errors"]


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


# ---- engines whose steps are of `world`: the table of all tokens' losses


def samples_of(rows: Names) -> list[oracle.Sample]:
    """Samples of rows that are described as those of `bigram_step`; a token in the middle is a tool's."""
    rng, samples = random.Random(rows["SEED"]), list[oracle.Sample]()
    for i, prompt in enumerate(rows["PROMPTS"]):
        length = 1 if i in rows["SHORT"] else rng.randint(3, 13)
        mask = [float(position != 2 and i not in rows["INVALID"]) for position in range(length)]
        if i in rows["LATE"]:
            mask[0] = 0.0
        if i in rows["SPARSE"]:
            mask[1:] = [entry * (rng.random() < 0.3) for entry in mask[1:]]
        losses = [rng.uniform(-3, 3) for _ in range(length)]
        samples.append(oracle.sample(losses, mask, rollout_id=i, prompt_id=prompt))
    return samples


def cut_as(rows: Names, samples: list[oracle.Sample], dp_rank: int, dp_size: int, _: int) -> list[list[int]]:
    """In the place of `dealt`: a rank's rows in the micro-batches of `CUTS`."""
    mine = list(range(dp_rank, len(samples), dp_size))
    return [mine[begin * len(mine) // 6 : end * len(mine) // 6] for begin, end in rows["CUTS"]]


def on_these_samples(engine: str, rows: Names, dp: int, function: str, *args: Any) -> Any:
    """On a rank: what a function of the engine's own file returns."""
    module, samples = importlib.import_module(f"test_real_{engine}"), samples_of(rows)
    table = [float(loss) for sample in samples for loss in sample.losses] + [0.0]
    values = {"STEP": samples, "TABLE": table, "DP": dp, "OF_SAMPLES": {}, "dealt": partial(cut_as, rows)}
    for names in (vars(world), vars(step_samples), vars(module)):
        names.update({name: value for name, value in values.items() if name in names})
    return vars(module)[function](*args)


#: Rows, and the data-parallel ranks that have them, at CP 2.
OF_WORLD = {
    "uneven": (UNEVEN, 2),
    "alone": (ALONE, 1),
    "one token": (ONE_TOKEN, 1),
    "beside a masked row": (BESIDE_A_MASKED_ROW, 2),
}


@pytest.mark.parametrize("rows", OF_WORLD)
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_of_verl(per_token: bool, rows: str, record_property: Any) -> None:
    """Actor and critic by verl's losses in its Megatron engine: all terms in each mode, and each proved."""
    these, dp = OF_WORLD[rows]
    all_modes = importlib.import_module("test_real_verl").MODES
    modes = [mode for mode in all_modes if not (per_token and mode == "seq-mean-token-mean")]
    launch = "verl", these, dp, "first_steps", checkout(VERL), per_token, modes
    for rank, models in enumerate(run_ranks(2 * dp, on_these_samples, *launch)):
        assert len(models) == 2 * len(modes)
        assert rank or all("aggregation proved on" in model.printed for model in models)
        worst = max(model.error for model in models)
        assert worst < BOUND, [model.error for model in models]
        record_errors(record_property, VERL, "every mode, other rows", ours=worst)


@pytest.mark.parametrize("rows", OF_WORLD)
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_of_bridge(per_token: bool, rows: str, record_property: Any) -> None:
    """Each mode by `LossAggregation`, and by the recipe's clipped loss, proved in Bridge's `train_step`."""
    these, dp = OF_WORLD[rows]
    for errors in run_ranks(
        2 * dp, on_these_samples, "bridge", these, dp, "steps_of_bridge", checkout(BRIDGE), per_token
    ):
        ours = {name: pair for name, pair in errors.items() if name in oracle.MODES or name.startswith("recipe, ")}
        assert len(ours) == len(oracle.MODES) + 3
        worst = max(map(max, ours.values()))
        assert worst < BOUND, ours
        record_errors(record_property, BRIDGE, "every mode, other rows", ours=worst)

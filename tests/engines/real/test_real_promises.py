"""Each promise of the engines' page, in each engine that it names: plants in copies of the engines' real code.

Real, and replaced, is what the engine's own file of this folder says.
"""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import checkouts
import pytest
from added_terms import CALL, TERMS
from bigram_step import PROMPTS, on_these_rows
from page_promises import FAULTS, GROUPS, IN_PART, LISTS, STEP, Groups, Launch, Source
from plants import MORE_TERMS, planted, record_plant
from promises import EDITS, ENGINES, HOOKS, NOT_PROVED, NOT_SEEN, PROMISES, SITES, STOPS
from ranks import RankError, run_ranks

pytestmark = pytest.mark.slow
FRAMEWORKS = {engine: vars(checkouts)[engine.upper()] for engine in ENGINES}
STOPPED = "the first training step does something else|calls of agg_loss|must be a count of the whole step"
EDITED = [(change, engine) for change, by_engine in EDITS.items() for engine in by_engine]


def module_of(engine: str) -> Any:
    return importlib.import_module(f"test_real_{'slime_miles' if engine in HOOKS else engine}")


def launched(engine: str, root: str, outcomes: list[tuple[str, str]]) -> None:
    """Steps of a copy of the engine, each with an added term or none, which end as is said of each."""
    module = module_of(engine)
    if engine in HOOKS:
        flags: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
        steps = [partial(module.make_step, 7, 1)]
        for term, outcome in outcomes:
            launch = module.case(engine, "sample_mean", "sample_mean", steps, counted=True, **flags) | {"term": term}
            if outcome == NOT_PROVED:
                with pytest.raises(RankError, match=f"{MORE_TERMS}|{module.OTHER_WEIGHT}"):
                    run_ranks(1, module.train, engine, root, 1, [launch])
            else:
                run_ranks(1, module.train, engine, root, 1, [launch])
    elif engine == "verl":
        launch_verl = partial(module.first_steps, added=[term for term, _ in outcomes])
        modes = ["token-mean"] * len(outcomes)
        actors = run_ranks(module.DP * module.CP, launch_verl, root, False, modes)[0][::2]
        for (term, outcome), actor in zip(outcomes, actors, strict=True):
            assert (MORE_TERMS if outcome == NOT_PROVED else "aggregation proved on") in actor.printed, term
    else:
        words = {NOT_PROVED: {"outcome": "not proved", "says": MORE_TERMS}}
        of_step = {"mode": "sample_mean", "settings": module.MODES["sample_mean"]}
        cases = [of_step | {"term": term} | words.get(outcome, {}) for term, outcome in outcomes]
        run_ranks(1, module.train, root, 1, cases)


@pytest.mark.parametrize("engine", SITES)
def test_a_term_that_is_added_is_not_proved(engine: str, tmp_path: Path, record_property: Any) -> None:
    """Whatever the term; without one, the same copy is proved. Of verl's actor: nobody knows a critic's terms."""
    site, framework = SITES[engine], FRAMEWORKS[engine]
    call = CALL.format(**dict(zip(("log_probs", "old", "mask"), site.names, strict=True)))
    root = planted(framework, tmp_path, {site.file: (site.old, site.new.replace("{}", call))})
    outcomes = {term: PROMISES[f"term added to the loss function: {term}"][engine] for term in TERMS}
    launched(engine, root, [("", NOT_SEEN), *outcomes.items()])
    for term in TERMS:
        record_plant(record_property, framework, f"a term added to the loss: {term}", "says that it is not proved")


@pytest.mark.parametrize(("change", "engine"), EDITED)
def test_a_change_ends_as_promised(change: str, engine: str, tmp_path: Path, record_property: Any) -> None:
    outcome, framework = PROMISES[change][engine], FRAMEWORKS[engine]
    root = planted(framework, tmp_path, EDITS[change][engine])
    if outcome == STOPS:
        with pytest.raises(RankError, match=STOPPED):
            launched(engine, root, [("", outcome)])
        record_plant(record_property, framework, change, "stopped")
        return
    launched(engine, root, [("", outcome)])
    if outcome != NOT_SEEN:
        record_plant(record_property, framework, change, f"says that it is {outcome.lower()}")


LAUNCHES = [
    pytest.param(page, launch, id=f"{page}: {promise.words}{number or ''}")
    for page, headings in LISTS.items()
    for promises in headings.values()
    for promise in promises
    for number, launch in enumerate(promise.shown)
    if isinstance(launch, Launch)
]


@pytest.mark.parametrize(("engine", "launch"), LAUNCHES)
def test_a_setting_ends_as_the_page_says(engine: str, launch: Launch, tmp_path: Path) -> None:
    framework, module = FRAMEWORKS[engine], module_of(engine)
    root = planted(framework, tmp_path, launch.edits) if launch.edits else checkouts.checkout(framework)
    arguments = launch.world[0], module.train, root, launch.world[1], [launch.case]
    if not launch.stops:
        run_ranks(*arguments)
        return
    with pytest.raises(RankError, match=launch.says) as caught:
        run_ranks(*arguments)
    assert {*caught.value.errors} == {*range(launch.world[0])}


SOURCES = [
    (page, promised)
    for page, headings in LISTS.items()
    for promises in headings.values()
    for promise in promises
    for promised in promise.shown
    if isinstance(promised, Source)
]


@pytest.mark.parametrize(("engine", "source"), SOURCES)
def test_a_file_of_the_engine_lacks_what_the_page_says(engine: str, source: Source) -> None:
    text = Path(checkouts.checkout(FRAMEWORKS[engine]), source.file).read_text()
    assert source.lacks not in text


@pytest.mark.parametrize("groups", [row for row in GROUPS if row.case is not None], ids=lambda row: " ".join(row.words))
def test_wrong_ids_of_prompts_end_as_the_page_says(groups: Groups) -> None:
    """Rows of which each prompt has at most four, by the right ids and by each fault."""
    outcomes = dict(zip(FAULTS, groups.outcomes, strict=True))
    step = STEP | (groups.case or {})
    cases = {fault: step | {"ids": make(PROMPTS)} for fault, make in FAULTS.items()}
    ends = {NOT_SEEN: "proved", IN_PART: "proved in part"}
    goes_on = [
        cases[fault] | {"outcome": ends.get(end, "not proved")} for fault, end in outcomes.items() if end != STOPS
    ]
    right = step | {"ids": PROMPTS, "outcome": "proved in part" if IN_PART in groups.outcomes else "proved"}
    root = checkouts.checkout(FRAMEWORKS[groups.engine])
    launch = partial(
        on_these_rows, groups.engine, {"LATE": [], "INVALID": []}
    )  # each prompt ends where its mask begins
    run_ranks(1, launch, root, 1, [right, *goes_on])
    for fault in [fault for fault, end in outcomes.items() if end == STOPS]:
        with pytest.raises(RankError, match=STOPPED):
            run_ranks(1, launch, root, 1, [cases[fault]])

"""The promises of the engines' pages against the registry of what shows them: pages lack none, and have no other."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_promises import GROUPS, LISTS, SENTENCES, Change, Fault, Launch, Shown, Tested, bullet, groups_table
from pages import ENGINE_PAGES, FENCED
from promises import EDITS, ENGINES, HOOKS, NOT_SEEN, OWN, PROMISES, SITES, own_faults, table
from repository import ROOT

PAGES = [ROOT / "docs" / "engines.md", *ENGINE_PAGES]
PROMISE = re.compile(
    r"\b([Ss]tops?|[Rr]efus\w+|[Aa]bort\w*|NOT (PROVED|CHECKED|IN FORCE)|PROVED IN PART|[Nn]ot (proved|seen)|"
    r"ends with an error|[Rr]aises?)\b"
)
#: The sentence with the counts of planted faults, which test_pages.py compares with their file.
COUNTS = "Tests also plant ["


def promising(text: str) -> Iterator[str]:
    """The sentences and rows of tables that say how something ends, in one line each."""
    text = re.sub(r"^#.*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-|] ?)", text):
        words = " ".join(block.split())
        for sentence in [words] if words.startswith("|") else re.split(r"(?<=[.:]) (?=[A-Z*`\[])", words):
            if PROMISE.search(sentence):
                yield sentence.removeprefix("- ")


def without_what_is_made(page: Path) -> str:
    """A page's text without its lists and tables that the registry makes, each of which it must have."""
    text = page.read_text()
    made = [bullet(heading, promises) for heading, promises in LISTS.get(page.stem, {}).items()]
    for part in [table(), groups_table()] if page.stem == "engines" else made:
        assert part in text, f"{page.name} must have:\n{part}"
        text = text.replace(part, "\n")
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_promises_what_the_registry_has(page: Path) -> None:
    left = [line for line in promising(without_what_is_made(page)) if not line.startswith(COUNTS)]
    assert sorted(left) == sorted(SENTENCES.get(page.stem, {}))


def test_every_page_of_the_registry_is_there() -> None:
    assert {*LISTS, *SENTENCES} <= {page.stem for page in PAGES}


def test_a_promise_that_the_registry_lacks_would_be_seen() -> None:
    """Negative control: in prose, in a list, in a table; a page without a promise has none."""
    text = "# Aborts\n\nText. It stops if\nnot. More.\n\n- **Refused**: all.\n- Fine.\n\n| a | NOT PROVED |\n"
    text += "```\nstops\n```\n"
    assert [*promising(text)] == ["It stops if not.", "**Refused**: all.", "| a | NOT PROVED |"]


ALL: list[tuple[str, str, Shown]] = [
    *((page, promise.words, by) for page, lists in LISTS.items() for of in lists.values() for promise in of
      for by in promise.shown),
    *((page, sentence, by) for page, sentences in SENTENCES.items() for sentence, shown in sentences.items()
      for by in shown),
    *(("engines", " ".join(row.words), row.by) for row in GROUPS if row.by is not None),
]  # fmt: skip


def test_each_promise_is_shown() -> None:
    """But for sentences that say what words mean."""
    assert all(promise.shown for lists in LISTS.values() for promises in lists.values() for promise in promises)
    unshown = [sentence for sentences in SENTENCES.values() for sentence, shown in sentences.items() if not shown]
    assert len(unshown) == 3
    assert all(re.match(r"\*Stops\* means|Each engine's page has", sentence) for sentence in unshown)
    assert all((row.case is None) != (row.by is None) for row in GROUPS)


def code_of_test(where: str) -> str:
    """The code of a test, and of what it names in its file."""
    path, _, name = where.partition("::")
    source = (ROOT / path).read_text()
    nodes: dict[str, ast.AST] = {}
    for node in ast.parse(source).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for known in [getattr(node, "name", ""), *(word.id for target in targets if target for word in ast.walk(target)
                                                   if isinstance(word, ast.Name))]:  # fmt: skip
            nodes.setdefault(known, node)
    assert isinstance(nodes.get(name), ast.FunctionDef), f"{path} has no {name}"
    reached, left = list[str](), [name]
    while left:
        if (here := left.pop()) in nodes and here not in reached:
            reached.append(here)
            left += [word.id for word in ast.walk(nodes[here]) if isinstance(word, ast.Name)]
    return "".join(
        "".join(source.splitlines(keepends=True)[first_line(nodes[known]) - 1 : vars(nodes[known])["end_lineno"]])
        for known in reached
    )


def first_line(node: Any) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


@pytest.mark.parametrize("where", dict.fromkeys(by.where for *_, by in ALL if isinstance(by, Tested)))
def test_tests_that_are_named_are_there_and_have_the_setting(where: str) -> None:
    code = code_of_test(where)
    settings = [by.setting for *_, by in ALL if isinstance(by, Tested) and by.where == where]
    assert [setting for setting in settings if setting not in code] == []


def test_a_setting_that_a_test_lacks_would_be_seen() -> None:
    """Negative control."""
    where = "tests/engines/real/test_real_roll.py::test_a_worker_that_trains_without_the_class_says_so"
    assert "fsdp2_train" in code_of_test(where)
    assert "test_packed_rows_are_proved" not in code_of_test(where)


def test_changes_that_are_named_are_tried_in_these_engines() -> None:
    changes = [by for *_, by in ALL if isinstance(by, Change)]
    assert changes
    assert all({*by.engines} <= PROMISES[by.name].keys() for by in changes)


def test_launches_of_a_page_are_of_an_engine_that_trains_here() -> None:
    """test_real_promises.py runs these, by the `train` of the engine's file."""
    of_pages = {page for page, _, by in ALL if isinstance(by, Launch)} | {row.engine for row in GROUPS if row.case}
    assert of_pages <= {*ENGINES} - {*HOOKS, "verl"}


def test_each_change_has_one_plant() -> None:
    for change, outcomes in PROMISES.items():
        for engine in outcomes:
            is_term = change.startswith("term added to the loss function") and engine in SITES
            plants = [is_term, engine in EDITS.get(change, {}), engine in OWN.get(change, {})]
            assert sum(plants) == 1, (change, engine)
    assert all(engine in PROMISES[change] for plants in (EDITS, OWN) for change in plants for engine in plants[change])


@pytest.mark.parametrize("engine", [*ENGINES, "slime_miles"])
def test_faults_that_are_named_are_among_the_engines_own(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "engines" / "real"), *sys.path])
    module = importlib.import_module(f"test_real_{'slime_miles' if engine in HOOKS else engine}")
    named = {faults[engine] for faults in OWN.values() if engine in faults}
    named |= {by.name for page, _, by in ALL if isinstance(by, Fault) and (by.engine or page) == engine}
    assert named <= own_faults(module, engine)
    assert NOT_SEEN not in [PROMISES[change][engine] for change, faults in OWN.items() if engine in faults]

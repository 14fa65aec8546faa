"""Refusals as data: every text has its parts, every place that refuses names one, and none is left over."""

import ast
import string
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from refusals import THREE_PARTS

import megatron_rl_loss
from megatron_rl_loss import BadBatchError, errors
from megatron_rl_loss.errors import ContractError, explain, refused

SOURCE = Path(megatron_rl_loss.__path__[0])
TEXTS = ConfigParser(interpolation=None, delimiters=("=",))
TEXTS.read(SOURCE / "refusals.ini", encoding="utf-8")
PARTS = ("given", "rule", "remedy")
KINDS = {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError,
         "AttributeError": AttributeError, "BadBatchError": BadBatchError, "ContractError": ContractError}  # fmt: skip


def facts_of(name: str) -> set[str]:
    """The names of the facts that a refusal's text has places for."""
    fields = [field for part in PARTS for _, field, _, _ in string.Formatter().parse(TEXTS[name][part])]
    return {field for field in fields if field is not None}


@pytest.mark.parametrize("name", TEXTS.sections())
def test_a_text_has_its_three_parts(name: str) -> None:
    section = TEXTS[name]
    assert set(section) - {"kind"} == set(PARTS)
    assert section.get("kind", "ValueError") in KINDS
    for part in PARTS:
        assert section[part] == section[part].strip() != ""
        assert not section[part].endswith((".", ":")), "the dots and the colon are put there"
    error = refused(name, **dict.fromkeys(facts_of(name), 7))
    assert type(error) is KINDS[section.get("kind", "ValueError")]
    assert THREE_PARTS.fullmatch(str(error))


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call of what looks up a refusal: where it is, of which function."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and path.name != "errors.py":
                yield f"{path.name}:{node.lineno}", node.func.id, node


def names_in(said: ast.expr) -> list[str]:
    """What is said as a refusal's name; none where it is handed on."""
    if isinstance(said, ast.IfExp):
        return names_in(said.body) + names_in(said.orelse)
    return [said.value] if isinstance(said, ast.Constant) and isinstance(said.value, str) else []


NAMED_AT = {"refused": 0, "explain": 0, "require": 1}  # the argument that names the refusal


def test_every_place_names_a_refusal_and_no_text_is_left_over() -> None:
    used = {name for _, called, call in calls() if called in NAMED_AT for name in names_in(call.args[NAMED_AT[called]])}
    assert used == set(TEXTS.sections())


def test_every_place_gives_the_facts_that_its_text_asks_for() -> None:
    checked = 0
    for where, called, call in calls():
        given = {keyword.arg for keyword in call.keywords}
        if called in ("refused", "explain") and None not in given:  # else there are facts made elsewhere
            for name in names_in(call.args[0]):
                assert facts_of(name) == given, (where, name)
                checked += 1
    assert checked > 50


def test_facts_are_put_in_as_they_are() -> None:
    assert explain("unknown_mode", mode="{x}", choices="Choose one of a % b") == (
        "loss aggregation '{x}': there is no such mode. Choose one of a % b."
    )


def test_a_missing_text_or_fact_does_not_pass_silently() -> None:
    with pytest.raises(KeyError):
        refused("no_such_refusal")
    with pytest.raises(KeyError, match="mode"):
        refused("unknown_mode", choices="a")


def test_errors_of_ones_own_are_value_errors() -> None:
    """Whoever catches ValueError catches them."""
    assert issubclass(BadBatchError, ValueError)
    assert issubclass(errors.ContractError, ValueError)

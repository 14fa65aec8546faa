"""The API reference, which `tools/docs.sh` builds: every public name, and every loss, stands there."""

import inspect
import re
from typing import Any

import api_reference
from repository import ROOT

import megatron_rl_loss
from megatron_rl_loss.losses.by_name import POLICY_LOSSES


def test_every_public_name_is_shown_once_with_its_docstring() -> None:
    pages = api_reference.pages()
    assert set(vars(megatron_rl_loss)["__all__"]) == {name for names in api_reference.PUBLIC.values() for name in names}
    for name in vars(megatron_rl_loss)["__all__"]:
        assert f"- [`{name}`](" in pages["README.md"]
        (text,) = (text for text in pages.values() if f"\n## `{name}`\n" in text)
        public = getattr(megatron_rl_loss, name)
        assert f"```python\nfrom megatron_rl_loss import {name}\n" in text
        first = (inspect.getdoc(public) or "").partition("\n")[0].replace("``", "`")
        assert not callable(public) or (first and first in text), name


def test_no_other_name_is_public_and_each_is_shown_once() -> None:
    texts = "".join(api_reference.pages().values())
    for module, names in api_reference.OTHERS.items():
        for name in names:
            assert name not in vars(megatron_rl_loss)["__all__"]
            assert texts.count(f"```python\nfrom megatron_rl_loss.{module} import {name}\n") == 1, name


def test_every_policy_loss_is_shown() -> None:
    shown = {name for names in (*api_reference.PUBLIC.values(), *api_reference.OTHERS.values()) for name in names}
    for loss in POLICY_LOSSES.values():
        function = getattr(loss.compute, "func", loss.compute).__name__
        assert function in shown, f"{function} lacks its row in OTHERS, tools/api_reference.py"


def documented() -> dict[str, Any]:
    """Every public name, and what users call of a public class."""
    members: dict[str, Any] = {}
    for name in vars(megatron_rl_loss)["__all__"]:
        public = members[name] = getattr(megatron_rl_loss, name)
        if inspect.isclass(public):
            named = [member for member in vars(public) if not member.startswith("_")]
            members |= {f"{name}.{member}": getattr(public, member) for member in named}
    return members


def test_a_docstring_fits_a_screen() -> None:
    """What is longer stands on a page of docs/."""
    lines = {name: len((inspect.getdoc(member) or "").splitlines()) for name, member in documented().items()}
    assert lines["plan_step"] > 20  # negative control: they are read
    assert {name: number for name, number in lines.items() if number > 30} == {}


def test_each_argument_of_a_plan_is_on_the_page() -> None:
    page = (ROOT / "docs/tasks.md").read_text().partition("### Arguments of `plan_step`\n")[2].partition("\n## ")[0]
    named = [
        name for cell in re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE) for name in re.findall(r"\w+", cell)
    ]
    assert sorted(named) == sorted(inspect.signature(megatron_rl_loss.plan_step).parameters)

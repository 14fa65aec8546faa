"""The API reference in docs/api is what the sources say: every public name, its signature, its docstring."""

import importlib
import inspect

import api_reference
import pytest

PAGES = api_reference.pages()


def test_pages_are_current() -> None:
    stale = [page.name for page, text in PAGES.items() if not page.exists() or page.read_text() != text]
    assert not stale, "run python tools/api_reference.py"
    assert set(api_reference.TO.glob("*")) == set(PAGES)


@pytest.mark.parametrize("page", api_reference.PAGES)
def test_a_page_has_every_name_as_it_is_imported(page: str) -> None:
    """Docstrings are read from sources: those of the objects themselves are the same."""
    text = PAGES[api_reference.TO / f"{page}.md"]
    for module in api_reference.PAGES[page]:
        names = api_reference.names_in(module)
        assert names or module.startswith("frameworks")
        for name in names:
            found = getattr(importlib.import_module(f"megatron_rl_loss.{module}".rstrip(".")), name)
            if f"## `{name}`" not in text:
                assert f"- [`{name}`](" in text
            elif inspect.isfunction(found) or inspect.isclass(found):
                assert (inspect.getdoc(found) or "").partition("\n")[0].replace("``", "`") in text, name

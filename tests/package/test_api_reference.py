"""The API reference in docs/api is what the sources say: every public name, its signature, its docstring."""

import importlib
import inspect
import sys
from pathlib import Path

import api_reference
import pytest


def test_pages_are_current() -> None:
    pages = api_reference.pages()
    stale = [page.name for page, text in pages.items() if not page.exists() or page.read_text() != text]
    assert not stale, "run python tools/api_reference.py"
    assert set(api_reference.TO.glob("*")) == set(pages)


@pytest.mark.parametrize("page", api_reference.PAGES)
def test_a_page_has_every_name_as_it_is_imported(page: str) -> None:
    """Docstrings are read from sources: those of the objects themselves are the same."""
    text = api_reference.pages()[api_reference.TO / f"{page}.md"]
    for module in api_reference.PAGES[page]:
        names = api_reference.names_in(module)
        assert names or module.startswith("frameworks")
        for name in names:
            found = getattr(importlib.import_module(f"megatron_rl_loss.{module}".rstrip(".")), name)
            if f"## `{name}`" not in text:
                assert f"- [`{name}`](" in text
            elif inspect.isfunction(found) or inspect.isclass(found):
                assert (inspect.getdoc(found) or "").partition("\n")[0].replace("``", "`") in text, name


def test_a_page_that_is_not_current_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def main(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["api_reference.py", *words])
        api_reference.main()

    monkeypatch.setattr(api_reference, "TO", tmp_path)
    main()
    main("--check")
    page = tmp_path / "step.md"
    page.write_text(page.read_text().replace("cp_rank: int", "cp_rank: float", 1))
    with pytest.raises(SystemExit, match=r"not current: step\.md\. Run python tools/api_reference\.py"):
        main("--check")

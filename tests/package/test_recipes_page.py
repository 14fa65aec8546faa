"""docs/recipes.md shows every recipe, as it is, and none is longer than a page."""

import sys
from pathlib import Path

import pytest
import show_recipes
from repository import EXAMPLES

from megatron_rl_loss.__main__ import example_files, with_companions

RECIPES = sorted((EXAMPLES / "recipes").iterdir())
FILES = [path for path in RECIPES if path.is_file()]


def test_the_page_shows_every_recipe_as_it_is() -> None:
    page = show_recipes.PAGE.read_text()
    assert show_recipes.with_code(page) == page
    shown = show_recipes.shown_files(page)
    assert sorted(shown) == [f"examples/recipes/{path.name}" for path in FILES]
    for file in shown:
        assert f"```\n{(show_recipes.ROOT / file).read_text()}```" in page.replace("```python", "```").replace(
            "```bash", "```"
        )


def test_a_page_with_other_code_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control."""
    page = tmp_path / "recipes.md"
    page.write_text(show_recipes.PAGE.read_text().replace("reducer(policy.per_token_loss)", "reducer(policy.ppo_kl)"))
    monkeypatch.setattr(show_recipes, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["show_recipes.py", "--check"])
    with pytest.raises(SystemExit, match=r"Run python tools/show_recipes\.py"):
        show_recipes.main()
    monkeypatch.setattr(sys, "argv", ["show_recipes.py"])
    show_recipes.main()
    assert "policy.ppo_kl" not in page.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_stands_alone(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    assert with_companions(f"recipes/{path.name}", EXAMPLES) == [f"recipes/{path.name}"]
    assert f"recipes/{path.name}" in example_files(EXAMPLES)

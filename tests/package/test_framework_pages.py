"""The pages on other frameworks say what is so: their names, the versions that were read, and code that runs."""

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from repository import ROOT

from megatron_rl_loss.modes.names import NAMES, NUMBER, resolve

PEERS = {peer.alias: peer for peer in NAMES}
PAGES = ROOT / "docs" / "frameworks"


PAGE_OF = {framework: f"{framework}.md" for framework, _ in (alias.split(":") for alias in PEERS)} | {
    "tinker": "skyrl.md"
}


def test_every_name_is_on_its_frameworks_page_and_no_other() -> None:
    for framework, page in PAGE_OF.items():
        named = set(re.findall(rf"\b{framework}:[\w=-]+", (PAGES / page).read_text()))
        names = {alias.replace(NUMBER, "8192") for alias in PEERS if alias.startswith(f"{framework}:")}
        assert named == names, page
        for alias in named:
            if PEERS.get(alias) is None or PEERS[alias].mode:
                resolve(alias, divisor=None if PEERS.get(alias) is None else needed_divisor(alias))


def needed_divisor(alias: str) -> float | None:
    return 4096.0 if isinstance(PEERS[alias].divisor, str) else None


def test_the_index_says_which_version_was_read_and_the_pages_the_same() -> None:
    rows = re.findall(r"^\| \[.*", (PAGES / "README.md").read_text(), flags=re.MULTILINE)
    linked = {page: row for row in rows for page in re.findall(r"\((\w+\.md)", row)}
    assert set(linked) >= set(PAGE_OF.values())
    for page in PAGE_OF.values():
        commits = re.findall(r"`([0-9a-f]{8})` \((\d{4}-\d\d-\d\d)\)", (PAGES / page).read_text())
        assert len(commits) == 1, page
        assert f"`{commits[0][0]}` ({commits[0][1]})" in linked[page]


def test_the_folding_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ModuleType("skyrl.train.trainer")
    package = ModuleType("skyrl.train")
    package.trainer = trainer  # type: ignore[attr-defined]
    for module in (ModuleType("skyrl"), package, trainer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "skyrl.md").read_text(), flags=re.DOTALL)
    masks = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])
    names: dict[str, Any] = {"loss_masks": list(masks), "uids": ["a", "b"]}
    for block in blocks:
        exec(block, names)
    normalise = trainer.apply_loss_reduction_to_advantages_minibatch
    advantages = normalise(torch.ones(2, 4), masks, "prompt_mean", 1, 8, [(0, 1), (1, 2)])
    torch.testing.assert_close(advantages, masks / torch.tensor([[6.0], [2.0]]))
    assert names["datum_advantages"][1] == pytest.approx([-0.7 / 4, 0, 0, 0])

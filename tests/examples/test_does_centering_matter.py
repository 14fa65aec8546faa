"""examples/does_centering_matter.py: its arms differ by the correction alone, and the page shows what it prints."""

import copy
import json
import sys
from pathlib import Path

import does_centering_matter as example
import pytest
import torch
from matter.policy import GPT
from repository import ROOT

PAGE = (ROOT / "docs/matter.md").read_text()


def test_a_short_run_of_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms of a seed begin alike; with the trainer's own logits a correction changes nothing."""
    monkeypatch.setattr(example, "STEPS", 2)
    monkeypatch.setattr(example, "LATE", 0)
    monkeypatch.setattr(example, "warm_start", lambda seed, task: GPT(8, 31))
    output = tmp_path / "runs.jsonl"
    words = ["does_centering_matter.py", "--seeds", "0", "--output", str(output)]
    for _ in range(2):  # the second repeats nothing
        monkeypatch.setattr(sys, "argv", words)
        example.main()
    runs = [json.loads(line) for line in output.read_text().splitlines()]
    assert [run["arm"] for run in runs] == list(example.ARMS)
    torch.manual_seed(0)
    start = GPT(8, 31)
    trained = list[torch.Tensor]()
    for grid, _, centres in ((0.0, None, False), (0.0, None, True), (example.GRID, None, True)):
        monkeypatch.setitem(example.ARMS, "tried", (grid, None, centres))
        policy = copy.deepcopy(start)
        example.train(policy, 0, "tried")
        trained.append(torch.cat([weight.detach().flatten() for weight in policy.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=1e-5)
    assert (trained[1] - trained[2]).abs().max() > 1e-4


def test_the_pages_table_is_the_one_that_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["does_centering_matter.py", "--output", str(ROOT / "docs/matter/centering.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    example.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(example.ARMS)
    for line in printed:
        assert line in PAGE, line

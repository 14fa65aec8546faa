"""examples/does_it_matter.py: the cut of micro-batches decides the run, by formulas and through Megatron."""

import json
import random
import runpy
import sys
from pathlib import Path

import does_it_matter as example
import pytest
import torch
import vary_matter
from matter.report import late
from ranks import run_ranks
from repository import ROOT

PAGE = (ROOT / "docs/matter.md").read_text()


@pytest.mark.slow
def test_the_cut_decides_and_where_wrong_answers_end_at_once_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(tmp_path / "runs.jsonl")
    monkeypatch.setattr(example, "ARMS", [example.EXACT, example.ONE_ROW])
    words = ["does_it_matter.py", "--output", output, "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", words)
    example.main()
    monkeypatch.setattr(sys, "argv", [*words, "--after-wrong", "end"])
    runpy.run_path(example.__file__, run_name="__main__")  # of two arms by itself
    runs = [json.loads(line) for line in Path(output).read_text().splitlines()]
    rewards = {(run["after_wrong"], run["arm"], run["seed"]): late(run, "reward") for run in runs}
    exact, one_row = (rewards["limit", arm.name, 0] for arm in (example.EXACT, example.ONE_ROW))
    assert exact is not None
    assert one_row is not None
    assert exact > 0.8
    assert one_row < 0.65
    ends = [rewards["end", arm.name, 0] for arm in (example.EXACT, example.ONE_ROW)]
    assert min(reward or 0 for reward in ends) > 0.8  # the control: lengths carry no reward


def errors_of_arms() -> list[float]:
    """On a rank: the formula's gradient against that of Megatron's `forward_step_calc_loss` and schedule, by arm."""
    model, generator, errors = example.warm_start(0, "limit", 5), torch.Generator().manual_seed(0), []
    prompts, answers = (rows.repeat_interleave(example.GROUP, 0) for rows in example.problems(2, random.Random(0)))
    batch = example.sample(model, prompts, answers, "limit", generator)
    batch = batch._replace(reward=(torch.arange(len(answers)) % 3 == 0).float())
    for arm in example.ARMS:
        gradients = []
        for backward in (example.backward, example.backward_in_megatron):
            model.zero_grad()
            backward(arm, model, batch, torch.Generator().manual_seed(1))
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        errors.append(float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()))
    return errors


def test_megatrons_own_schedule_makes_the_same_gradient() -> None:
    """Sums of some 300 float32 terms of both signs: 1e-5 of the largest entry."""
    (errors,) = run_ranks(1, errors_of_arms)
    assert len(errors) == 4
    assert max(errors) < 1e-5


def test_the_pages_tables_are_those_that_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, variations = (str(ROOT / f"docs/matter/{name}.jsonl") for name in ("runs", "variations"))
    for main, words in (
        (example.main, ["--output", runs]),
        (vary_matter.main, ["--exact", runs, "--output", variations]),
    ):
        monkeypatch.setattr(sys, "argv", ["script", *words])
        main()
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) > 10
        for line in printed:
            assert line in PAGE, line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--output", "no/such/folder/runs.jsonl"], "Name a file that this script wrote, or a new one"),
        (["--output", "{tmp}/runs.jsonl"], "names none. Pass --seeds 0 1 2"),
        (["--output", "{tmp}/runs.jsonl", "--plot", "{tmp}/x.doc"], "no picture has that ending"),
        (["--output", "{tmp}/runs.jsonl", "--after-wrong", "stop"], "invalid choice"),
    ],
)
def test_wrong_uses(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *(word.replace("{tmp}", str(tmp_path)) for word in words)])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err

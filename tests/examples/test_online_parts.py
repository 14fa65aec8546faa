"""Parts of the online example: its task, its rows and its report."""

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from online.report import Report, describe, zero_variance_groups
from online.rows import deal, make_rows
from online.task import MAX_RESPONSE, PROMPT_LENGTH, VOCABULARY, Problem, decode, draw_problems, encode
from online_rollouts import some_rollouts
from rollouts import Rollout, read_rollouts, with_advantages, write_rollouts

# ---- the task

SUM = Problem(347, 586)
RESPONSES = {
    "933$": 1.0,
    "<13,13,09>933$": 1.0,
    "<933$": 0.0,  # no ">": the answer is all of it
    ">933$": 1.0,
    "932$": 0.0,
    "0933$": 0.0,
    "933": 0.0,  # no end mark
    "933$$": 0.0,
    "": 0.0,
    "<" + "1" * (MAX_RESPONSE - 6) + ">933$": 1.0,  # as long as is allowed
    "<" + "1" * (MAX_RESPONSE - 5) + ">933$": 0.0,
}


@pytest.mark.parametrize(("response", "reward"), RESPONSES.items())
def test_the_checker(response: str, reward: float) -> None:
    assert SUM.reward(response) == reward


def test_worked_and_plain_examples_are_right_and_fit() -> None:
    assert (SUM.prompt, SUM.plain(), SUM.worked()) == ("347+586=", "933$", "<13,13,09>933$")
    for problem in draw_problems("training", 500, random.Random(0)):
        for text in (problem.plain(), problem.worked()):
            assert problem.reward(text) == 1
            assert decode(encode(text)) == text
        assert len(encode(problem.prompt)) == PROMPT_LENGTH
        *columns, last = (int(column) for column in problem.worked()[1:].partition(">")[0].split(","))
        # Each column's last digit, and the whole of the last one, spell the sum from its end.
        assert str(last) + "".join(str(column % 10) for column in reversed(columns)) == problem.plain()[:-1]


def test_no_problem_is_in_both_splits() -> None:
    training, held_out = (set(draw_problems(split, 2000, random.Random(1))) for split in ("training", "held out"))
    assert not training & held_out


# ---- rows


def test_rows_hold_what_each_position_predicts() -> None:
    rollouts = with_advantages(some_rollouts(2, 3, seed=0))
    rows = make_rows(rollouts, multiple=4)
    assert rows.tokens.shape[1] % 4 == 0
    for row, rollout in enumerate(rollouts):
        text = rollout.prompt_tokens + rollout.response_tokens
        assert rows.tokens[row, : len(text) - 1].tolist() == text[:-1]
        assert rows.labels[row, : len(text) - 1].tolist() == text[1:]
        predicted = [t for t in range(len(text) - 1) if t + 1 >= len(rollout.prompt_tokens)]
        assert rows.samples.loss_masks[row][predicted].tolist() == rollout.loss_mask
        assert rows.samples.loss_masks[row].sum() == sum(rollout.loss_mask)
        assert rows.sampler_log_probs is not None
        assert rows.sampler_log_probs[row, predicted].tolist() == pytest.approx(rollout.old_log_probs)
        assert rows.advantages[row, predicted].tolist() == pytest.approx([rollout.advantage] * len(predicted))
        assert not rows.advantages[row, len(text) - 1 :].any()


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples for 2 micro-batches on each of 3"):
        deal(some_rollouts(1, 5, seed=1), num_microbatches=2, dp_rank=0, dp_size=3, cp_size=1)


def test_written_rollouts_are_read_back(tmp_path: Path) -> None:
    rollouts = with_advantages(some_rollouts(3, 4, seed=3))
    write_rollouts(tmp_path / "step.jsonl", rollouts)
    assert read_rollouts(tmp_path / "step.jsonl", vocab_size=len(VOCABULARY)) == rollouts


# ---- the report


def answered(response: str, reward: float, prompt: int) -> Rollout:
    return Rollout(encode("347+586="), encode(response), [1.0] * len(response), reward, prompt, response)


def test_a_step_in_numbers() -> None:
    rollouts = [answered("933$", 1, 0), answered("<13,13,09>933$", 1, 0), answered("<9$", 0, 1), answered("9$", 0, 1)]
    lengths = {"length": (4 + 14 + 3 + 2) / 4, "length_right": 9, "length_wrong": 2.5}
    assert describe(rollouts) == {"reward": 0.5, "working": 0.5} | lengths
    assert "length_right" not in describe(rollouts[2:])
    assert zero_variance_groups(rollouts) == 2
    assert zero_variance_groups([*rollouts, answered("1$", 0, 0)]) == 1


def test_where_a_step_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: logged.append("finished")
    )
    stub = {"__spec__": types.SimpleNamespace(), "init": lambda **settings: logged.append(settings["project"]) or run}
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(**stub))
    with Report(tmp_path, {"seed": 3, "path": tmp_path}, tensorboard=True, wandb_project="adding") as report:
        report.write(1, {"reward": 0.5})
        report.write(2, {"reward": 0.75})
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(1, 0.5), (2, 0.75)]
    assert json.loads((tmp_path / "settings.json").read_text())["seed"] == 3
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert logged == ["adding", (1, {"reward": 0.5}), (2, {"reward": 0.75}), "finished"]


def test_wandb_that_is_not_installed_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wandb is not installed"):
        Report(tmp_path / "run", {}, tensorboard=False, wandb_project="adding")
    assert not (tmp_path / "run").exists()

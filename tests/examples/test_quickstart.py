"""The first script of README: it needs no Megatron, and prints the gradients that plain float64 arithmetic gives."""

import ast
import re
import runpy
import sys

import oracle
import pytest
from pages import code_of
from repository import EXAMPLES

SCRIPT = EXAMPLES / "quickstart.py"
PRINTED = 0.5e-5 + 3e-7  # five digits are printed of a float32 sum of 11 terms below 1


def gradient_of(weights: list[list[float]], responses: list[list[int]], advantages: list[float]) -> list[float]:
    """Of three equal logits: a token of weight w adds -w A (1 at its own logit, less 1/3 at each)."""
    gradient = [0.0, 0.0, 0.0]
    for row_weights, tokens, advantage in zip(weights, responses, advantages, strict=True):
        for weight, token in zip(row_weights, tokens, strict=True):
            for k in range(3):
                gradient[k] -= weight * advantage * ((k == token) - 1 / 3)
    return gradient


def test_it_prints_one_gradient_for_every_cut_and_the_other_loss_prints_one_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the package itself needs no Megatron: tests/package/test_package.py."""
    monkeypatch.setitem(sys.modules, "megatron", None)
    data = runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    responses, advantages = data["RESPONSES"], data["ADVANTAGES"]
    samples = [
        oracle.sample([0.0] * len(tokens), [1.0] * len(tokens), prompt_id=prompt)
        for tokens, prompt in zip(responses, data["PROMPTS"], strict=True)
    ]
    exact = gradient_of(oracle.step_weights("prompt_mean", samples), responses, advantages)
    rows = re.findall(r"^(\[\[.*\]\]) +(.*)$", printed, flags=re.MULTILINE)
    others = set()
    for shown, numbers in rows:
        cut = ast.literal_eval(shown)
        sizes = {row: sum(len(responses[response]) for response in rows_of) for rows_of in cut for row in rows_of}
        means = [[1 / sizes[row] / len(cut)] * len(tokens) for row, tokens in enumerate(responses)]
        gradient = [float(number) for number in numbers.split()]
        assert gradient[:3] == pytest.approx(exact, abs=PRINTED)
        assert gradient[3:] == pytest.approx(gradient_of(means, responses, advantages), abs=PRINTED)
        others.add(tuple(gradient[3:]))
    assert len(rows) == len(others) == 3
    assert code_of("../README.md", "console")[1:] == [printed]

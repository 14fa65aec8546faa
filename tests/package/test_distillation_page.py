"""docs/distillation.md: its loop gives the oracle's gradient, and its numbers are those of its files.

Its `forward_step` runs in tests/megatron/test_distillation.py.
"""

import json
import re
from typing import Any

import oracle
import plot_online
import pytest
import torch
from divergence_oracle import divergence
from pages import code_of
from repository import ROOT

from megatron_rl_loss import Samples

PAGE = (ROOT / "docs/distillation.md").read_text()
WIDTH, VOCABULARY = 8, 11


def test_the_loop_gives_the_gradient_of_policy_and_divergence() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)]
    teachers = [torch.nn.Embedding(VOCABULARY, 5), torch.nn.Linear(5, VOCABULARY, bias=False)]
    masks = [[[1, 1, 0, 1], [1, 0]], [[0, 0], [1, 0.5, 1]]]
    prompts, batches = [["a", "a"], ["a", "b"]], []
    for of_batch in masks:
        total = sum(map(len, of_batch))
        tokens = {name: torch.randint(VOCABULARY, (total,)) for name in ("tokens", "labels")}
        batches.append(tokens | {"old_log_probs": -1.5 - torch.rand(total), "advantages": torch.randn(total)})
    names: dict[str, Any] = {}
    exec(code_of("distillation.md")[0], names)
    names["train"](
        *models,
        *teachers,
        batches,
        lambda: [Samples(mask, prompt_ids=ids) for mask, ids in zip(masks, prompts, strict=True)],
    )
    found = [model.weight.grad.double() for model in models]

    embedding, head, *taught = (model.weight.detach().double().requires_grad_() for model in [*models, *teachers])
    policy, kl = [], []
    for batch, of_batch, of_prompts in zip(batches, masks, prompts, strict=True):
        p = (embedding[batch["tokens"]] @ head.T).softmax(-1)
        q = (taught[0][batch["tokens"]] @ taught[1].T).softmax(-1).detach()
        log_p = p[torch.arange(len(p)), batch["labels"]].log()
        ratio, advantages = (log_p - batch["old_log_probs"].double()).exp(), batch["advantages"].double()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        lengths = [len(mask) for mask in of_batch]
        for values, into in ((losses, policy), (divergence(p, q, "reverse_kl"), kl)):
            parts = zip(values.split(lengths), of_batch, of_prompts, strict=True)
            into += [oracle.Sample(part, torch.tensor(mask), None, prompt) for part, mask, prompt in parts]
    loss = oracle.step_loss("prompt_mean", policy) + 0.5 * oracle.step_loss("token_mean", kl)
    for one, right in zip(found, torch.autograd.grad(loss, [embedding, head]), strict=True):
        torch.testing.assert_close(
            one, right, rtol=0, atol=float(oracle.chain_error(2, VOCABULARY) * right.abs().max())
        )


def test_the_run_is_that_of_the_file_and_learns() -> None:
    runs = json.loads((ROOT / "docs/online/teacher-cpu.json").read_text())
    taught = next(run for run in runs if run["settings"].get("taught"))
    rewards = [seen["held_out_reward"] for seen in taught["evaluations"]]
    assert rewards[0] < 0.35
    assert rewards[-1] >= 0.65
    assert taught["seconds"] < 120
    assert taught["settings"]["policy_coef"] == 0
    assert plot_online.table(runs) in PAGE
    assert f"{taught['seconds']:.0f} seconds" in PAGE


def test_memory_and_times_are_those_of_the_file() -> None:
    tables = json.loads((ROOT / "docs/bench/distillation-cpu.json").read_text())
    rows = [row for name in ("top-k", "whole") for row in tables[name]]
    section = PAGE[PAGE.index("## Memory and time") :].split("\n## ")[0]
    shown = {cell for line in re.findall(r"^\| [^-].*", section, re.MULTILINE)[1:] for cell in line.split("|")[3:-1]}
    numbers = {f"{row[key]:,.{digits}f}" for row in rows for key, digits in KEYS if key in row}
    assert len(shown) > 8
    assert {cell.strip() for cell in shown} - numbers <= {"", "does not fit"}


KEYS = (("peak extra MB", 0), ("seconds", 1))


@pytest.mark.parametrize("table", ["top-k", "whole"])
def test_ours_takes_an_eighth_of_the_naive_memory_and_no_more_than_others(table: str) -> None:
    rows = json.loads((ROOT / "docs/bench/distillation-cpu.json").read_text())[table]
    for tokens in {row["tokens"] for row in rows}:
        peaks = {row["way"]: row["peak extra MB"] for row in rows if row["tokens"] == tokens}
        ours = [peaks.pop(way) for way in ("ours, two passes", "ours, one pass")]
        assert len(peaks) > 3
        assert max(ours) <= peaks["naive"] / (8 if tokens >= 8192 else 1)
        assert max(ours) <= min(peaks.values())

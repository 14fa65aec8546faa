"""docs/logprobs.md: its code runs, its loop gives the oracle's gradient, and its numbers are those of its files.

`OutputHead` runs in tests/megatron/test_output_head.py, the recipe `distill.py` in test_distillation.py there.
"""

import json
import re
import textwrap
from typing import Any

import oracle
import pytest
import torch
from divergence_oracle import divergence
from pages import code_under
from repository import ROOT

from megatron_rl_loss import Samples, plan_step

PAGE = (ROOT / "docs/logprobs.md").read_text()
BYTES = json.loads((ROOT / "docs/bench/logit_bytes-cpu.json").read_text())
WIDTH, VOCABULARY = 8, 11


def test_the_loop_gives_the_gradient_of_policy_and_divergence() -> None:
    torch.manual_seed(0)
    models: list[Any] = [torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)]
    teachers: list[Any] = [torch.nn.Embedding(VOCABULARY, 5), torch.nn.Linear(5, VOCABULARY, bias=False)]
    masks: list[list[list[float]]] = [[[1, 1, 0, 1], [1, 0]], [[0, 0], [1, 0.5, 1]]]
    prompts, batches = [["a", "a"], ["a", "b"]], list[dict[str, torch.Tensor]]()
    for batch_masks in masks:
        total = sum(map(len, batch_masks))
        tokens = {name: torch.randint(VOCABULARY, (total,)) for name in ("tokens", "labels")}
        batches.append(tokens | {"old_log_probs": -1.5 - torch.rand(total), "advantages": torch.randn(total)})
    names: dict[str, Any] = {}
    exec(code_under("logprobs.md", "In a training loop"), names)
    names["train"](
        *models,
        *teachers,
        batches,
        lambda: [Samples(mask, prompt_ids=ids) for mask, ids in zip(masks, prompts, strict=True)],
    )
    gradients = [model.weight.grad.double() for model in models]

    embedding, head, *taught = (model.weight.detach().double().requires_grad_() for model in [*models, *teachers])
    policy, kl = list[oracle.Sample](), list[oracle.Sample]()
    for batch, batch_masks, batch_prompts in zip(batches, masks, prompts, strict=True):
        p = (embedding[batch["tokens"]] @ head.T).softmax(-1)
        q = (taught[0][batch["tokens"]] @ taught[1].T).softmax(-1).detach()
        log_p = p[torch.arange(len(p)), batch["labels"]].log()
        ratio, advantages = (log_p - batch["old_log_probs"].double()).exp(), batch["advantages"].double()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        lengths = [len(mask) for mask in batch_masks]
        for values, into in ((losses, policy), (divergence(p, q, "reverse_kl"), kl)):
            parts = zip(values.split(lengths), batch_masks, batch_prompts, strict=True)
            into += [oracle.Sample(part, torch.tensor(mask), None, prompt) for part, mask, prompt in parts]
    loss = oracle.step_loss("prompt_mean", policy) + 0.5 * oracle.step_loss("token_mean", kl)
    for gradient, right in zip(gradients, torch.autograd.grad(loss, [embedding, head]), strict=True):
        torch.testing.assert_close(
            gradient, right, rtol=0, atol=float(oracle.chain_error(2, VOCABULARY) * right.abs().max())
        )


def test_the_run_is_that_of_the_file_and_learns() -> None:
    runs = json.loads((ROOT / "docs/online/teacher-cpu.json").read_text())
    taught = next(run for run in runs if run["settings"].get("taught"))
    rewards = [seen["held_out_reward"] for seen in taught["evaluations"]]
    assert rewards[0] < 0.35
    assert rewards[-1] >= 0.65
    assert taught["seconds"] < 120
    assert taught["settings"]["policy_coef"] == 0
    text = " ".join(PAGE.split())
    (alone,) = (run for run in runs if run is not taught)
    assert f"from {rewards[0]:.2f} to {rewards[-1]:.2f} in {taught['settings']['steps']} steps" in text
    assert f"{taught['seconds']:.0f} seconds" in text
    assert f"by reward alone to {alone['evaluations'][-1]['held_out_reward']:.2f}:" in text


def test_memory_and_times_of_log_probs_are_those_of_the_file() -> None:
    tables = json.loads((ROOT / "docs/bench/logprobs-cpu.json").read_text())
    ways_by_size: dict[str, dict[str, dict[str, Any]]] = {}
    for row in tables["memory from hidden states"]:
        if row["dtype"] == "float32":
            ways_by_size.setdefault(f"{row['tokens']:,} by {row['vocabulary']:,}", {})[row["way"]] = row
    shown = re.findall(r"^\| ([\d,]+) \S ([\d,]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert shown
    for tokens, ids, cells in shown:
        ways = ways_by_size[f"{tokens} by {ids}"]
        unfused, fused = (ways[f"ours, {way}, entropy"] for way in ("two passes", "one pass"))
        megatron = f"{ways['megatron']['peak extra MB']:,.0f}" if "megatron" in ways else "not run"
        numbers = [
            f"{number:,.0f}" for number in (unfused["logits MB"], unfused["peak extra MB"], fused["peak extra MB"])
        ]
        assert cells.split(" | ") == [numbers[0], megatron, *numbers[1:]]
    times = {row["way"]: row["to megatron"] for row in tables["time from hidden states"]}
    one_pass, two_passes = (f"{times[f'ours, {way}, entropy']:.2f}" for way in ("one pass", "two passes"))
    text = " ".join(PAGE.split())
    assert f"One pass takes {one_pass} times as long as Megatron's" in text
    assert f"two passes take {two_passes} times as long" in text
    parts = json.loads((ROOT / "docs/bench/gpu-nvidia-h200.json").read_text())["parts"]
    (figures,) = (part["figures"] for part in parts if part["part"] == "logprobs")
    times = {row["way"]: row["to megatron"] for row in figures["hidden"]}
    one_pass, two_passes = (f"{times[f'ours, {way}, entropy']:.2f}" for way in ("one pass", "two passes"))
    assert f"On one H200 these are {one_pass} and {two_passes} times" in text


def test_bytes_per_logit_and_what_is_predicted_of_them() -> None:
    (rows,) = (rows for name, rows in BYTES.items() if name != "machine")
    section = PAGE[PAGE.index("## On a GPU") : PAGE.index("## Limits")]
    shown = re.findall(r"^\| ([\w, ]+) \| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    counted = [(row["way"], f"{row['fp32, bytes']:g}", f"{row['bf16, bytes']:g}") for row in rows]
    assert shown == counted
    parts = json.loads((ROOT / "docs/bench/gpu-nvidia-h200.json").read_text())["parts"]
    (figures,) = (part["figures"] for part in parts if part["part"] == "logprobs")
    times = {row["way"]: row["ms"] for row in figures["logits"] if (row["tokens"], row["vocabulary"]) == (8192, 32768)}
    bytes_of, entries = {row["way"]: row["fp32, bytes"] for row in rows}, 8192 * 32768
    rate = bytes_of["Megatron, eager"] * entries / times["megatron"] / 1e9  # TB/s of a time in ms
    text = " ".join(section.split())
    assert f"We predict {bytes_of['ours, kernels'] * entries / rate / 1e9:.2f} ms for 8,192" in text
    assert f"at {rate:.1f} TB/s" in text
    assert f"Megatron's took {times['megatron']:.2f} ms and plain torch {times['ours']:.2f} ms" in text


def test_random_cases_are_those_of_the_tool() -> None:
    """`python tools/compare_kernels.py --cases 300 --tp 1 2 3 --out docs/bench` makes the file."""
    compared = json.loads((ROOT / "docs/bench/compare_kernels-cpu.json").read_text())
    about = compared["about"]
    assert about["beyond a bound"] == 0
    assert max(row["largest error / bound"] for row in compared["errors"]) <= 1
    assert about["row stride"] > 2**31
    first, second, last = sorted(about["tp"])
    on_ranks = f"with the vocabulary on {first}, {second} and {last} ranks each"
    assert f"{about['cases']} random cases {on_ranks}" in " ".join(PAGE.split())


def test_instructions_per_logit_are_those_of_the_compiled_kernels() -> None:
    """And no program spills. `python tools/compile_kernels.py --capability 90 --out docs/bench` makes the file."""
    rows = json.loads((ROOT / "docs/bench/kernels-sm_90.json").read_text())["programs"]
    assert not any(row["stack"] for row in rows)
    kinds: dict[str, list[float]] = {"unaligned": [], "left out": [], "others": []}
    for row in (row for row in rows if row["instructions"] is not None):
        call = row["call"]
        kind = "unaligned" if "32767" in call else "left out" if re.search("mask of ids|padding", call) else "others"
        kinds[kind].append(row["instructions"])
    most = {kind: f"{max(instructions):.1f}".removesuffix(".0") for kind, instructions in kinds.items()}
    expected = (
        f"at most {most['others']} instructions per logit, {most['left out']} with a mask of ids or padding, and "
        f"{most['unaligned']} if 16 does not divide"
    )
    assert expected in " ".join(PAGE.split())


def test_memory_of_distillation_is_that_of_the_file() -> None:
    tables = json.loads((ROOT / "docs/bench/distillation-cpu.json").read_text())
    rows = {(row["way"], name): row for name in ("top-k", "whole") for row in tables[name] if row["tokens"] == 8192}
    keys = [(way, name) for way in ("ours, two passes", "naive") for name in ("top-k", "whole")]
    shown = [f"{rows[key]['peak extra MB']:,.0f}" for key in keys]
    assert rows["naive", "whole"]["foreseen"]
    sentence = (
        "takes {} MB at the teacher's top 64 ids and {} MB over the vocabulary. "
        "A naive implementation takes {} MB and, extrapolated, {} MB ("
    )
    assert sentence.format(*shown) in " ".join(PAGE.split())


def test_the_code_for_a_megatron_model_gives_the_step_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stands for its own output; the real one runs in tests/megatron/test_output_head.py."""
    pytest.importorskip("megatron.core")
    from megatron_rl_loss import OutputHead

    monkeypatch.setattr(OutputHead, "__call__", lambda _, model, *args, labels, context=None: model(context))
    (microbatch,) = plan = plan_step([Samples([[1, 1, 0], [1]])], "token_mean", dp_group=None)
    log_probs, entropy = torch.tensor([[-1.0, -2, -3, -4]], requires_grad=True), torch.tensor([[1.0, 2, 3, 4]])

    def model(folded: Any) -> Any:
        if folded is None:
            return log_probs, entropy
        inputs = {name: column.flatten() for name, column in folded.inputs.items()}
        losses, metrics = folded.per_token_loss(log_probs.flatten(), entropy.flatten(), **inputs)
        summed = folded.microbatch.summed((losses * folded.microbatch.weights).sum(), losses)
        return summed, {"log_probs": log_probs, "entropy": entropy, **metrics}

    old, advantages = log_probs.detach() - torch.tensor([[0, 0.1, 0, 0.5]]), torch.ones(1, 4)
    names: dict[str, Any] = dict.fromkeys(("tokens", "positions", "labels"))
    names |= {"torch": torch, "microbatch": microbatch, "model": model, "old": old, "advantages": advantages}
    exec("def run():\n" + textwrap.indent(code_under("logprobs.md", "In a Megatron model"), "    "), names)
    names["run"]()
    report = plan.finish()
    losses = -(log_probs.detach() - old).exp().clamp(max=1.2) - 0.001 * entropy
    assert report["pg_loss"].item() == pytest.approx((losses * torch.tensor([1, 1, 0, 1])).sum().item() / 3)
    assert report["clip_fraction"].item() == pytest.approx(0.5)  # of two samples


@pytest.mark.parametrize("table", ["top-k", "whole"])
def test_ours_takes_an_eighth_of_the_naive_memory_and_no_more_than_others(table: str) -> None:
    rows = json.loads((ROOT / "docs/bench/distillation-cpu.json").read_text())[table]
    for tokens in {row["tokens"] for row in rows}:
        peaks = {row["way"]: row["peak extra MB"] for row in rows if row["tokens"] == tokens}
        ours = [peaks.pop(way) for way in ("ours, two passes", "ours, one pass")]
        assert peaks
        assert max(ours) <= peaks["naive"] / (8 if tokens >= 8192 else 1)
        assert max(ours) <= min(peaks.values())

"""docs/losses.md: its functions are there, its flags are the example's, its code runs."""

import math
import re
from argparse import ArgumentParser
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import code_under
from repository import EXAMPLES, ROOT
from torch import Tensor

import megatron_rl_loss
from megatron_rl_loss import (
    Gate,
    Metric,
    Samples,
    add_loss_aggregation_args,
    group_relative_advantages,
    importance_weights,
    kl_estimate,
    plan_step,
    policy_loss,
    ppo_clip_loss,
)
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.losses.by_name import POLICY_LOSSES, check_goes_with

PAGE = (ROOT / "docs/losses.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]


def test_every_policy_loss_has_its_row_and_paper_and_functions_are_public() -> None:
    for name in POLICY_LOSSES:
        rows = [row for row in ROWS if re.search(rf"(--policy-loss |, )`?{name}\b", row)]
        assert rows, f"policy loss {name!r}: add its row to docs/losses.md"
        cites = re.search(r"\(https://arxiv\.org/abs/\d{4}\.\d{5}\)", "".join(rows))
        assert cites, (
            f"policy loss {name!r}: its row in docs/losses.md must link its paper, (https://arxiv.org/abs/...)"
        )
    named = set(re.findall(r"`(\w+(?:_loss|_estimate|_weights|_sequences|_masks|_advantages))\b", PAGE))
    assert named
    in_modules = set(re.findall(r"`(\w+)` of `megatron_rl_loss\.", PAGE))  # test_pages.py looks for them there
    assert named <= {"megatron_rl_loss", *vars(megatron_rl_loss)["__all__"]} | in_modules
    in_code = set(re.findall(r'policy_loss\(\s*"(\w+)"', PAGE + (ROOT / "docs/names.md").read_text()))
    assert in_code
    assert in_code <= set(POLICY_LOSSES)


def test_what_a_row_combines_goes_together_and_its_flags_are_the_examples() -> None:
    combined = re.findall(r"`--policy-loss (\w+) --loss-aggregation (\S+?)`", PAGE)
    assert combined
    for name, mode in combined:
        check_goes_with(name, resolve(mode))
    parser = add_loss_aggregation_args(ArgumentParser())
    text = (EXAMPLES / "pretrain_grpo.py").read_text() + "".join(f'"{flag}"' for flag in parser._option_string_actions)
    flags = {flag for span in re.findall(r"`(--[^`]+)`", PAGE) for flag in re.findall(r"--[a-z-]+", span)}
    assert flags
    assert not [flag for flag in flags if f'"{flag}"' not in text]


def test_the_clip_range_has_one_default() -> None:
    """That of the function, of the loss by name, of the example's flags, and on the page: 0.2 on both sides."""
    old, advantages = torch.full((4,), -2.0), torch.tensor([1.0, 1.0, -1.0, -1.0])
    now = old + torch.tensor([1.19, 1.21, 0.81, 0.79]).log()
    for loss in (ppo_clip_loss, partial(policy_loss, "ppo")):
        outputs = loss(now, old, advantages, torch.ones(4))
        assert outputs.clipped.tolist() == [0, 1, 0, 1]
        assert outputs.per_token_loss.tolist() == pytest.approx([-1.19, -1.2, 0.81, 0.8])
    assert "`--policy-loss ppo` is the default. Its clip range is 0.2 on both sides, as in `ppo_clip_loss`." in PAGE
    example = (EXAMPLES / "pretrain_grpo.py").read_text()
    for flag in ("--clip-low", "--clip-high"):  # without one, the loss's own
        assert re.search(rf'"{flag}", type=float, help="[^"]*default: the loss\'s, PPO 0\.2\."\)', example)


def test_where_other_frameworks_differ_the_page_says_how_to_have_theirs() -> None:
    """The table's middle column, as formulas, by its last column; their code itself: tests/engines/real."""
    table = PAGE.partition("## Where other frameworks differ")[2].partition("\n## ")[0]
    local, mask = Samples([[1, 0, 1], [1, 1, 1]]).local(0, 1), torch.tensor([[1.0, 0, 1], [1, 1, 1]])
    old, r, k = torch.full((2, 3), -2.0), torch.tensor([[0.9, 1, 1.3], [1, 1.1, 0.8]]), torch.rand(2, 3) + 0.5
    now, advantages, log_k = (old + r.log()).requires_grad_(), torch.tensor([[1.0] * 3, [-2.0] * 3]), k.log()

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    def ours(name: str, weights: Tensor | None = None, **settings: Any) -> Tensor:
        flat = now.flatten(), old.flatten(), advantages.flatten(), local
        return policy_loss(name, *flat, importance_weights=weights, **settings).per_token_loss.view(2, 3) * mask

    sequence_weights = importance_weights(log_k.flatten(), Gate(high=9.0, level="sequence", action="clamp"), local)
    clipped = torch.where(advantages < 0, r.log().clamp(min=-0.4), r.log().clamp(max=0.4))
    geo_mean = -advantages * mean(clipped).exp() * mean(log_k).exp() * mask
    assert "`geo_mean`" in table
    assert torch.allclose(ours("gmpo", sequence_weights), geo_mean)
    assert 'policy_loss("gspo_token", ...)' in table
    gspo = -advantages * mean(r.log()).exp() * k * mask
    weighed = ours("gspo_token", k.flatten(), clip_low=0.9, clip_high=5)
    assert torch.allclose(weighed, gspo)
    assert torch.allclose(torch.autograd.grad(weighed.sum(), now)[0], gspo)  # each token's own, also by its weight
    assert "no gradient beyond" in table
    far = torch.tensor([-8.0], requires_grad=True)
    kl_estimate(far, torch.tensor([-3.0]), torch.ones(1)).backward()
    assert far.grad is not None
    assert far.grad.item() == pytest.approx(1 - math.exp(5))
    assert "| the reward itself | 0 |" in table
    rewards = [3.0, 0.0, 1.0]
    assert group_relative_advantages(rewards, [0, 1, 1], epsilon=1e-4).tolist() == pytest.approx(
        [0, *(sign * 0.5 / (0.5**0.5 + 1e-4) for sign in (-1, 1))]
    )
    assert "`epsilon=1e-4`" in table
    assert "`clip_high=4.0`, its distance from 1" in table
    high = policy_loss("cispo", torch.tensor([-1.0]), torch.tensor([-4.0]), torch.ones(1), torch.ones(1), clip_high=4.0)
    assert high.per_token_loss.item() == pytest.approx(5)  # -5 A log_prob
    assert '`2 * kl_estimate(..., estimator="k2")`' in table
    assert torch.allclose(2 * kl_estimate(now, old, mask, estimator="k2"), r.log().square() * mask, atol=1e-6)


def test_code_runs() -> None:
    terms = code_under("losses.md", "Several terms, each with its own aggregation")
    metrics = code_under("losses.md", "Metrics")
    block = code_under("losses.md", "Write your own loss")
    gates = code_under("losses.md", "Off-policy corrections")
    centred = code_under("losses.md", "Score centering")
    carried = code_under("losses.md", "Carry a loss away")
    over_step = code_under("losses.md", "Select tokens over the step")
    local = Samples([torch.ones(3), torch.ones(2)]).local(0, 1)
    handed: list[Any] = []
    microbatch = SimpleNamespace(
        tokens=local,
        cp_group=None,
        totals=None,
        loss=lambda *terms, **metrics: handed.append((*terms, *metrics.values())),
    )
    old = torch.full((1, 5), -2.0)
    names: dict[str, Any] = {
        "microbatch": microbatch,
        "log_probs": (old + 1e-4).requires_grad_(),
        "old_log_probs": old,
        "rollout_log_probs": old - torch.tensor([[0.001, 0, 0, 0.5, 0.5]]),
        "advantages": torch.ones(1, 5),
    }
    exec(block, names)
    gated = dict(names)
    exec(gates, gated)
    assert gated["weights"].flatten().tolist() == pytest.approx([math.exp(0.001), 1, 1, math.exp(0.5), math.exp(0.5)])
    logits, rollout_ids = torch.zeros(1, 5, 4, requires_grad=True), torch.tensor([[[0, 3]] * 5])
    labels, sampler = torch.ones(1, 5, dtype=torch.int64), torch.full((1, 5, 2), 0.4).log()
    logit_inputs = {"logits": logits, "labels": labels, "rollout_ids": rollout_ids, "rollout_log_probs": sampler}
    exec(centred, names | logit_inputs | {"torch": torch, "tp_group": None})
    exec(carried, graphed := dict(names))
    assert graphed["losses"].shape == (1, 5)
    exec(terms, names | dict.fromkeys(("losses", "kl", "entropy"), torch.ones(1, 5)))
    values = dict.fromkeys(("losses", "kl", "entropy", "ratio", "weights"), torch.ones(1, 5))
    exec(metrics, names | values)
    (terms, _), (_, asked) = handed
    assert {(metric.over, metric.kind) for metric in asked.values() if isinstance(metric, Metric)} == {
        ("tokens", "mean"), ("sample_mean", "mean"), ("samples", "max"), ("tokens", "variance"), ("tokens", "ess"),
        ("turn", "mean"),
    }  # fmt: skip
    assert terms["kl"].mode == terms["nll"].mode == "token_mean"
    assert (terms["nll"].mask, terms["entropy"].mode, terms["entropy"].coef) == ("correct", None, -0.001)
    loss = names["policy"].per_token_loss
    assert loss.tolist() == [pytest.approx([-1.0004] * 3 + [0] * 2, rel=1e-3)]
    loss.sum().backward()
    assert names["log_probs"].grad.shape == (1, 5)
    plan = plan_step([Samples([torch.ones(5)])], "token_mean", dp_group=None)
    passes = (torch.zeros(5), torch.arange(5.0))
    forward = SimpleNamespace(plan=plan, log_probs=lambda names, _: plan[0].log_probs.update(zip(names, passes)))  # noqa: B905
    names = {"call_model": None}
    exec(over_step, names)
    names["before_step"](forward)
    loss = names["policy_loss"](plan[0], passes[0], torch.arange(5.0).requires_grad_())
    assert float(loss.detach()) == 4

"""`docs/proof.md`: its table is the code's, its loops are proved, and what no proof can see, as it says, is unseen."""

import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from pages import code_of
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import Samples, plan_step, ppo_clip_loss, prove_step
from megatron_rl_loss.proof.findings import LIMITS, WRONG, Severity
from megatron_rl_loss.proof.outcomes import ProofLevel

PAGE = (ROOT / "docs/proof.md").read_text()


def rows_of(page: str) -> Iterator[dict[str, str]]:
    """The rows of the first table under "Four words", by the cells of its head."""
    lines = re.findall(r"^\|(.*)\|$", page.partition("## Four words")[2].partition("\n## ")[0], flags=re.MULTILINE)
    head, _, *rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    names = [name.partition("`")[0] for name in head]
    return (dict(zip(names, row, strict=True)) for row in rows)


def test_the_table_is_what_the_code_does() -> None:
    rows = {row["outcome"]: row for row in rows_of(PAGE)}
    assert [*rows] == [severity.word for severity in Severity]
    levels = set(get_args(ProofLevel)) - {"off"}
    for severity in Severity:
        row = rows[severity.word]
        assert levels == row.keys() - {"outcome", "it means"}
        assert {level: row[level] for level in levels} == {
            level: "aborts" if severity.stops(level) else "trains" for level in levels
        }
    assert not any(severity.stops("off") for severity in Severity)
    assert WRONG.stops("error")


def test_a_line_names_this_page() -> None:
    (path,) = re.findall(r"docs/\S+\.md", LIMITS)
    assert (ROOT / path).read_text() == PAGE


def test_the_tests_that_it_names_are_there() -> None:
    paths = re.findall(r"`(tests/\S+\.py)`", PAGE)
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


# ---- its loops


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def batches_of() -> tuple[list[Tensor], list[Samples]]:
    torch.manual_seed(1)
    return [torch.randn(5, 3), torch.randn(4, 3)], [Samples([[1, 1], [1, 0, 1]]), Samples([[1, 1, 1, 1]])]


@pytest.mark.parametrize("number", range(3))
def test_a_loop_of_the_page_is_proved(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    batches, samples = batches_of()
    actor, critic = net(), net()
    plans = [plan_step(samples, mode, dp_group=None) for mode in ("token_mean", "sample_mean")]

    def losses_of(model: Any, *others: Any) -> Any:
        batch, models = others[-1], [model, *others[:-1]]
        model_losses = [one(batch)[:, 0] ** 2 for one in models]
        return model_losses if len(model_losses) > 1 else model_losses[0]

    names = {
        **{"prove_step": prove_step, "batches": batches, "losses_of": losses_of, "model": actor, "plan": plans[0]},
        **{"actor": actor, "critic": critic, "actor_plan": plans[0], "critic_plan": plans[1]},
        "optimizer": torch.optim.SGD(actor.parameters(), lr=0.0),
        "supervised_loss": lambda model: model(batches[0]).mean(),
    }
    exec(code_of("proof.md")[number], names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (2 if number == 1 else 1)
    assert all("aggregation proved on " in line and line.endswith(LIMITS) for line in lines)


# ---- what no proof can see


def scaled_output(model: Any, losses: Callable[[], Tensor]) -> Tensor:
    """A layer's output is multiplied by a hook."""
    model[1].register_forward_hook(lambda module, inputs, output: output * 0.5)
    return losses()


def scaled_between(model: Any, losses: Callable[[], Tensor]) -> Tensor:
    """The gradient that one part of the model hands to the part before it, as between pipeline stages."""
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return losses()


def hook_on_losses(model: Any, losses: Callable[[], Tensor]) -> Tensor:
    """A hook doubles the gradient of the log-probs, before a loss function takes them."""
    made = losses()
    made.register_hook(lambda gradient: gradient * 2)
    return made


@pytest.mark.parametrize("plant", [scaled_output, scaled_between, hook_on_losses])
def test_what_no_proof_can_see_is_proved(plant: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And changes the gradients: else the page would warn of nothing."""
    (batch, _), (samples, _) = batches_of()
    gradients = []
    for planted in (False, True):
        model, plan = net(), plan_step([samples], "token_mean", dp_group=None)

        def losses(model: Any = model) -> Tensor:
            log_probs: Tensor = model(batch)[:, 0] - 2
            return log_probs

        with prove_step(model, plan, level="strict"):
            log_probs = plant(model, losses) if planted else losses()
            policy = ppo_clip_loss(log_probs, log_probs.detach(), torch.ones(5), plan[0])
            plan[0].loss(policy.per_token_loss).backward()
        gradients.append(model[0].weight.grad)
        assert "aggregation proved on 4 tokens" in capsys.readouterr().out
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)

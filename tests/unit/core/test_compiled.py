"""What torch compiles: a reducer as a whole, and the loss of a plan. In one file: the compiler is slow to load."""

import pytest
import torch
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer, plan_step


@pytest.fixture(autouse=True)
def with_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def test_a_reducer_compiles_whole() -> None:
    masks = [torch.tensor([1, 0.5, 0, 1]), torch.zeros(2), torch.ones(2)]
    values = torch.tensor([1.0, -2, float("nan"), 4, float("inf"), float("-inf"), 7, 8])
    reducer = make_pg_loss_reducer("sample_mean", masks, totals=StepTotals.of(masks))
    within = torch.compile(lambda losses: reducer(losses * 1), fullgraph=True, backend="aot_eager")
    for function in (reducer, torch.compile(reducer.__call__, fullgraph=True, backend="aot_eager"), within):
        losses = values.clone().requires_grad_()
        total = function(losses)
        total.backward()
        assert total.item() == pytest.approx((4 / 2.5 + 7.5) / 3)
        assert losses.grad.tolist() == pytest.approx([numerator / 30 for numerator in (4, 2, 0, 4, 0, 0, 5, 5)])


def test_the_loss_of_a_plan_is_compiled() -> None:
    plan = plan_step([Samples([[1, 1], [1, 0, 1]]), Samples([[1]])], "token_mean", dp_group=None)
    values, is_compiling = torch.ones(5, requires_grad=True), list[bool]()

    def loss_of(values: Tensor) -> Tensor:
        is_compiling.append(torch.compiler.is_compiling())
        loss: Tensor = plan[0].loss(values * 1.0)
        return loss

    torch.compile(loss_of, backend="eager")(values).backward()
    assert is_compiling == [True]
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.2, 0.2, 0.2, 0, 0.2])
    assert plan.record.is_carried == [True, False]

"""Public reports of this field as rows: the fault as it was reported, and what the library says or computes of it.

`REPORTS` are shown here, `ELSEWHERE` names the test that shows them, and `OUT_OF_SCOPE` says why there is none.
tests/support/published.py has those of bugs that change the weight of a token.
"""

import ast
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import (
    Gate,
    Samples,
    ZigzagTHD,
    check_loss,
    gae,
    group_relative_advantages,
    importance_weights,
    kl_estimate,
    plan_step,
    policy_loss,
    weights_column,
    whiten_advantages,
)

NOW = torch.tensor([-1.0, -2.0, -0.5, -3.0])
LOCAL = Samples([[1, 1, 1], [1]]).local(0, 1)


def trained() -> torch.Tensor:
    return NOW.clone().requires_grad_()


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def warned(call: Callable[[], Any], text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        call()


def k3_overflows() -> None:
    """slime#2198, TRL#6550: a log-ratio of -50 loses the step; a bound leaves that token out."""
    far = torch.tensor([-51.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -2.5])
    warned(lambda: kl_estimate(far, reference, torch.ones(2)), "has a log-prob 50 below")
    slopes = torch.autograd.grad(kl_estimate(far, reference, torch.ones(2), bound=20.0).sum(), far)[0]
    assert slopes.tolist() == pytest.approx([0, 1 - math.exp(-0.5)])


def reward_on_a_masked_tail() -> None:
    """miles#1827: it vanishes beside rewards that count."""
    local = Samples([[1, 1, 0]]).local(0, 1)
    warned(lambda: gae(torch.tensor([0.1, 0.1, 1.0]), torch.zeros(3), local), "behind its last active token")


def turns_as_steps() -> None:
    """AReaL#1600: a turn is a step, and lambda is of each sample."""
    samples = Samples([[1, 1, 0, 1, 1]], ids={"turn": [[0, 0, -1, 1, 1]]})
    rewards, values = torch.tensor([0, 0, 9.0, 0, 1]), torch.tensor([0.5, 9, 9, 0.25, 9])
    found, returns = gae(rewards, values, samples.local(0, 1), gamma=1.0, lam=torch.tensor([0.5]), steps="turn")
    last = 1 - 0.25
    first = 0.25 - 0.5 + 0.5 * last
    assert found.tolist() == pytest.approx([first, first, 0, last, last])
    assert returns.tolist() == pytest.approx([first + 0.5] * 2 + [0] + [1.0] * 2)


def whitening() -> None:
    """slime#2235, miles#3229, Relax#192: over all tokens of the step; a rank without a token takes part."""
    empty, filled = Samples([]).local(0, 1), Samples([[1, 1], [1]]).local(0, 1)
    none, some = whiten_advantages([torch.zeros(0), torch.tensor([1.0, 2, 6])], [empty, filled], dp_cp_group=None)
    assert len(none) == 0
    assert some.tolist() == pytest.approx([(x - 3) / math.sqrt(14 / 3) for x in (1, 2, 6)])


def product_of_9000_ratios() -> None:
    """NeMo-RL#2269: a product over a long sequence as its weight."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_rl_loss").addHandler(handler)
    try:
        samples = Samples([[1] * 9000] * 8)
        log_ratio = torch.full((samples.total_tokens,), -5e-4)
        importance_weights(log_ratio, Gate(level="sequence", aggregate="sum", high=2.0), samples.local(0, 1))
    finally:
        logging.getLogger("megatron_rl_loss").removeHandler(handler)
    assert any("Take aggregate='mean'" in text for text in records)


def selected(losses: Any, mask: Any, step_tokens: Any) -> Any:
    return (losses * mask * (losses.detach() > losses.mean())).sum() / step_tokens


def selection_inside_a_micro_batch() -> None:
    """verl#7829, AReaL#1730: the cut changes which tokens are trained."""
    assert "trains on other tokens than uncut" in str(check_loss(selected, draws=6))


def local_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def mean_of_a_ranks_own_tokens() -> None:
    """prime-rl#1960, #1961: micro-batches and ranks are averaged, whatever number of tokens they have."""
    report = str(check_loss(local_mean, draws=1))
    assert "over data-parallel ranks: tokens weigh" in report
    assert "divided by the tokens of the micro-batch, not of the step" in report


def a_mean_over_masked_entries() -> None:
    """Fast-LLM#426, where the sum is masked; open-instruct#535, where the KL term is not."""
    report = str(check_loss(lambda losses, mask: (losses * mask).sum() / mask.numel(), draws=3))
    assert "with masked tokens behind rows: tokens weigh" in report
    report = str(check_loss(lambda losses, mask: losses.mean() + 0 * mask.sum(), draws=3))
    assert "of all weight lies on padding" in report


def masked_values_leak() -> None:
    """AReaL#1346, Soup#723: by the sequence's advantage, or its ratio; Soup#342: inf x 0 is not a number."""
    local = Samples([[1, 1, 0, 0]]).local(0, 1)
    found = list[Tensor]()
    for of_masked in (0.0, 10.0, math.inf):
        advantages, old = torch.ones(4), NOW.clone()
        advantages[2:], old[2:] = of_masked, -of_masked
        now = trained()
        policy_loss("gspo", now, old, advantages, local).per_token_loss.sum().backward()
        assert now.grad is not None
        found.append(now.grad)
    assert found[0].tolist() == pytest.approx([-1, -1, 0, 0])
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def a_ratio_overflows() -> None:
    """miles#1363: NaN logits behind exp of a log-ratio of 200, clipped and not."""
    for sign in (1, -1):
        now = trained()
        loss = policy_loss("ppo", now, NOW - 200, sign * torch.ones(4), LOCAL).per_token_loss
        loss.sum().backward()
        assert loss.isfinite().all()
        assert now.grad is not None
        assert now.grad.isfinite().all()


def parts_of_a_rollout() -> None:
    """miles#1927: a rollout that was split into two samples counts once, and each of its tokens alike."""
    samples = Samples([[1, 1], [1], [1, 1]], rollout_ids=[0, 0, 1])
    weights = torch.cat(weights_column("sample_mean", samples, dp_group=None))
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4])


def rows_of_padding() -> None:
    """Agent-R1#88: rows that even out the ranks are masked; they count in no denominator of active units."""
    padded = Samples([[1, 1], [1], [0]])
    for mode in ("token_mean", "sample_mean"):
        weights = weights_column(mode, padded, units="active", dp_group=None)
        alone = weights_column(mode, Samples([[1, 1], [1]]), units="active", dp_group=None)
        assert [part.tolist() for part in weights] == [*(part.tolist() for part in alone), [0]]


def a_metric_of_another_width() -> None:
    """RLinf#1471: a metric per action dimension over a mask per action."""
    microbatch = plan_step([Samples([[1, 1, 1], [1]])], "token_mean", dp_group=None)[0]
    with pytest.raises(ValueError, match=r"the metric 'kl' of shape \(4, 7\)"):
        microbatch.loss(trained(), {"kl": torch.ones(4, 7)})


REPORTS: dict[str, Callable[[], None]] = {
    "prime-rl#1960, #1961": mean_of_a_ranks_own_tokens,
    "Fast-LLM#426, open-instruct#535": a_mean_over_masked_entries,
    "AReaL#1346, Soup#342, #723": masked_values_leak,
    "miles#1363": a_ratio_overflows,
    "miles#1927": parts_of_a_rollout,
    "Agent-R1#88": rows_of_padding,
    "RLinf#1471": a_metric_of_another_width,
    "OpenRLHF#1250": lambda: warned(
        lambda: group_relative_advantages([1.0, 3.0], [0, 1]), "every prompt group has one sample"
    ),
    "slime#2198, TRL#6550": k3_overflows,
    "miles#1827": reward_on_a_masked_tail,
    "AReaL#1600": turns_as_steps,
    "slime#2235, miles#3229, Relax#192": whitening,
    "NeMo-RL#2269": product_of_9000_ratios,
    "open-instruct#534": lambda: refused(
        lambda: kl_estimate(trained(), NOW, LOCAL, estimator="k1"), "its gradient is that of the log-prob alone"
    ),
    "slime#179": lambda: refused(lambda: importance_weights(trained() - NOW, Gate(high=2.0)), "a weight is a constant"),
    "SkyRL#1492, #1507": lambda: warned(
        lambda: policy_loss("ppo", trained(), NOW, torch.tensor([0.0, 0, 1, 1]), LOCAL),
        "advantages of exactly 0 at 2 of 3 active tokens",
    ),
    "verl#7829, AReaL#1730": selection_inside_a_micro_batch,
    "Megatron-LM#2909, #3551": lambda: refused(
        lambda: Samples([[1] * 4] * 2, layout=ZigzagTHD([0, 4, 4, 8], filler_slots=1)), "never count them"
    ),
}

#: The fault, and the file and test that show what the library does.
ELSEWHERE: dict[str, tuple[str, str, str]] = {
    "mcore-bridge#173, ART#619": (
        "a replicated LoRA factor whose gradient is not summed over tensor-parallel ranks",
        "tests/megatron/test_proof_parameters.py", "test_parameters_of_a_gpt",
    ),
    "VeOmni#1120, DeepSpeed#6841": (
        "a gather over context-parallel ranks whose backward pass sums where it should slice",
        "tests/unit/core/test_sums.py", "test_a_gather_by_its_backward",
    ),
    "VeOmni#1115": (
        "gradients reduced over data-parallel ranks alone where context parallelism cuts rows",
        "tests/plain/test_plain_proof.py", "test_a_loop_in_plain_torch",
    ),
    "TransformerEngine#2892, Megatron-LM#5541": (
        "padding behind the last sample that the model cuts with it",
        "tests/megatron/test_packed_bounds.py",
        "test_padding_that_the_model_cuts_with_a_sample_is_no_dummy_sequence",
    ),
    "SkyRL#2259": (
        "the entropy of logits of -inf",
        "tests/unit/logprobs/test_logprobs.py", "test_logits_far_apart_and_infinite_ones",
    ),
    "verl#5349": (
        "a last block of the vocabulary whose missing ids count as logits of 0",
        "tests/unit/logprobs/test_triton.py", "test_random_cases",
    ),
    "TRL#6078": (
        "GMPO takes another aggregation than its setting says",
        "tests/unit/losses/test_formulas.py", "test_value_and_gradient_in_every_layout",
    ),
}  # fmt: skip
OUT_OF_SCOPE = {
    "torchtitan#2387, transformers#48687, Megatron-LM#5916": "gradients of routers and experts over expert-parallel "
    "ranks are the model's; the proof says how many parameters it has not proved",
}
#: Their faults are not written down anywhere in this repository, so that nothing here shows what the library does.
WITHOUT_A_ROW = (
    "OpenRLHF#853", "verl#2857", "verl#6240", "verl#7439", "rllm#630", "xtuner#2095", "miles#1383", "NeMo-RL#4158",
    "ROLL#447", "TRL#6121", "TRL#6713", "TRL#7012", "slime#1860", "EasyR1#11012", "DeepSpeed#8614", "marin#5676",
    "baselines#765", "Megatron-Bridge#3117",
)  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_a_report(report: str) -> None:
    REPORTS[report]()


@pytest.mark.parametrize("report", ELSEWHERE)
def test_the_test_of_a_report_is_there(report: str) -> None:
    _, file, name = ELSEWHERE[report]
    tree = ast.parse((ROOT / file).read_text())
    assert name in {function.name for function in tree.body if isinstance(function, ast.FunctionDef)}


def test_a_report_is_in_one_table() -> None:
    def whole(reports: str) -> list[str]:
        """A number alone is of the project before it."""
        project, names = "", list[str]()
        for report in reports.split(", "):
            project = report.partition("#")[0] or project
            names.append(f"{project}#{report.partition('#')[2]}")
        return names

    named = [
        name for table in (REPORTS, ELSEWHERE, OUT_OF_SCOPE, WITHOUT_A_ROW) for key in table for name in whole(key)
    ]
    assert len(named) == len(set(named))


def test_right_uses_beside_them_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gae(torch.tensor([0.1, 0.1, 0.0]), torch.zeros(3), Samples([[1, 1, 0]]).local(0, 1))
        kl_estimate(NOW, NOW - 1, LOCAL, estimator="k1")
        importance_weights(NOW - (NOW + 0.01), Gate(high=2.0))
        policy_loss("ppo", trained(), NOW, torch.tensor([0.5, -1, 1, 1]), LOCAL)

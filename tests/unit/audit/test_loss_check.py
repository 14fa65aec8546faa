"""`check_loss` passes exact loss functions and modes, and finds what is wrong with published ones and other faults.

Beside each published function stands the weight that it gives a token, worked out by hand from counts (`published`): on
the step that a finding shows, that is what must have been measured.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import check_my_loss
import published
import pytest
import torch
from counted_steps import Row, Step
from published import DP, MICROBATCHES, UNCUT, masked_mean, share, total
from refusals import refusal_tests, refusals
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import check_loss
from megatron_rl_loss.audit import drawn_steps
from megatron_rl_loss.audit.drawn_steps import DrawnSample, LossCase
from megatron_rl_loss.audit.simulation import CALLS, GIVEN, LossCall, measure

pytestmark = pytest.mark.slow  # hundreds of random steps

ADDED, PADDED, TOGETHER = LossCall(dp="sum"), "with masks as long as padded slots", "over all of these together"

# ---- published formulas that are not what they are meant to be

PUBLISHED = {bug.id: bug for bug in published.BUGS if bug.loss_fn is not None}


def step_of(case: LossCase, padded: bool) -> Step:
    """The same step to count by hand."""
    ids = itertools.count()
    rows = [
        [[Row(one.mask, one.rollout if case.split_rollouts else next(ids), one.prompt) for one in k] for k in rank]
        for rank in case.ranks
    ]
    longest = max(len(sample.mask) for sample in case.samples)
    return Step(rows, case.cp_size, length=longest if padded and case.cp_size > 1 else None)


@pytest.mark.parametrize("bug", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_function_is_found(bug: published.Bug) -> None:
    report = check_loss(bug.loss_fn, bug.asked, call=bug.call, draws=6, divisor=bug.divisor)
    assert not report.sound
    assert report.invariant == (set(bug.cuts) == {UNCUT})
    assert {finding.cut for finding in report.findings} == set(bug.cuts), str(report)
    rows = (CALLS[bug.call] if isinstance(bug.call, str) else bug.call).rows
    for finding in report.findings:
        assert finding.kind == "weights"
        assert finding.cut in str(report)
        case = finding.case
        expected = bug.weights(step_of(case, rows == "padded").counted)
        assert finding.weights == pytest.approx(expected.tolist(), rel=1e-6)
        # The smallest step that shows it: two parts of what is cut, and one of all else.
        parts = {MICROBATCHES: case.num_microbatches, DP: case.dp_size, published.CP: case.cp_size}
        assert parts == {cut: 1 + (cut == finding.cut) for cut in parts}
        assert sum(len(sample.mask) for sample in case.samples) <= 4, str(case)


# ---- exact ones


ROLLOUTS = {"step_samples": "step_rollouts"}
PROMPTS = {"rollout_tokens": "prompt_tokens", "step_samples": "step_prompts"}
#: The loss function, its mode, its call, and a divisor.
EXACT: dict[str, tuple[Callable[..., Tensor], str, LossCall | str, float | None]] = {
    "TRL dr_grpo": (
        lambda x, m, gradient_accumulation_steps: ((x * m).sum(-1) / 16).mean() / gradient_accumulation_steps,
        "trl:dr_grpo", "trl", 16,
    ),
    "transformers": (
        lambda x, m, num_items_in_batch: share(x, m, num_items_in_batch), "token_mean", "transformers", None
    ),
    "prime-rl": (
        lambda xs, ms, loss_scale: published.total_of_lists(xs, ms) / loss_scale.clamp(min=1),
        "token_mean", "prime_rl", None,
    ),
    "open-instruct, OpenRLHF, CP and all": (
        lambda x, m, step_tokens, world_size: share(x, m, step_tokens) * world_size,
        "token_mean", LossCall(cp="mean"), None,
    ),
    "rollouts": (published.rows_for_rollouts, "sample_mean", replace(ADDED, split_rollouts=True, names=ROLLOUTS), None),
    "prompts": (published.rows_for_rollouts, "prompt_mean", replace(ADDED, names=PROMPTS), None),
    "packed, by index, CP": (
        lambda x, m, sample_index, sample_tokens, step_samples:
            (x * m / sample_tokens.clamp(min=1)[sample_index]).sum() / step_samples,
        "sample_mean", LossCall(rows="packed", dp="sum", cp="sum"), None,
    ),
    "PPO": (
        lambda new, m, old_log_probs, advantages, step_tokens:
            share(-(new - old_log_probs).exp() * advantages, m, step_tokens),
        "token_mean", replace(ADDED, takes="log_probs"), None,
    ),
    "in place": (lambda x, m, step_tokens: x.mul_(m.clamp_(max=1)).sum() / step_tokens, "token_mean", ADDED, None),
}  # fmt: skip


@pytest.mark.parametrize("row", EXACT.values(), ids=EXACT)
def test_an_exact_formula_passes_and_the_same_scaled_does_not(row: Any) -> None:
    """Half as much again is the negative control: it shows in the uncut step, whatever the formula."""
    loss_fn, mode, call, divisor = row
    report = check_loss(loss_fn, mode, call=call, draws=5, divisor=divisor)
    assert (report.sound, report.invariant, report.findings) == (True, True, ()), str(report)
    assert str(report).splitlines()[0].endswith(": sound")
    scaled = functools.wraps(loss_fn)(lambda *args, **kwargs: 1.5 * loss_fn(*args, **kwargs))
    report = check_loss(scaled, mode, call=call, draws=3, divisor=divisor)
    assert report.invariant
    (finding,) = report.findings
    assert finding.cut == UNCUT
    assert finding.factors == pytest.approx((1.5, 1.5))


def test_the_example_says_what_its_functions_are(capsys: pytest.CaptureFixture[str]) -> None:
    check_my_loss.main()
    first_lines = [line for line in capsys.readouterr().out.splitlines() if line and line[0] in "abcm"]
    assert [line.split(": ")[-1] for line in first_lines] == ["NOT invariant", "sound", "sound", "NOT invariant"]


def test_methods_objects_and_partials_are_functions_too() -> None:
    class Loss:
        def __call__(self, losses: Tensor, mask: Tensor) -> Any:
            return total(losses, mask)

        def of_step(self, losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
            return share(losses, mask, step_tokens)[None]

    for function in (Loss(), lambda *args: total(*args), functools.partial(share, step_tokens=1)):
        assert check_loss(function, "token_sum", call=ADDED, draws=3).sound
    assert check_loss(Loss().of_step, "token_mean", call=ADDED, draws=3).sound
    assert not check_loss(share, "token_sum", call=ADDED, draws=3).sound


# ---- other faults


def needs_two_rows(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    if len(losses) < 2:
        raise RuntimeError("cannot normalise one row")
    return share(losses, mask, step_tokens)


def third(losses: Tensor, mask: Tensor, microbatch: int, dp_rank: int, cp_rank: int) -> Tensor:
    if (microbatch, dp_rank, cp_rank) == (1, 1, 1):
        raise KeyError("here")
    return total(losses, mask)


def zero_by_zero(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1)).mean()


FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "clipped": (lambda x, m, step_tokens: share(x.clamp(max=1), m, step_tokens), "values", "not linear in the losses"),
    "normalised by the losses": (lambda x, m: total(x, m) / total(x, m).abs().detach(), "values", "not linear in the"),
    "dropout": (lambda x, m: total(torch.nn.functional.dropout(x), m), "chance", "called twice with the same losses"),
    "raises": (needs_two_rows, "raises", "it raises RuntimeError: cannot normalise one row"),
    "no graph": (lambda x, m: total(x, m) if m.any() else torch.zeros(()), "no graph", "has no graph, so nothing is "),
    "a number for nothing": (lambda x, m: total(x, m) if m.any() else 0, "no loss", "it returns a int, no tensor"),
    "0/0": (zero_by_zero, "NaN", "the gradient is NaN or infinite at 2 of 2 tokens"),
    "an infinite gradient": (
        lambda x, m: total(x, m) - total(x, 1 - m).mul(0).abs().sqrt(),
        "NaN", "the gradient is NaN or infinite at 1 of 1 tokens",
    ),
    "masked tokens trained": (lambda x, m, step_tokens: x.sum() / step_tokens, "weights", "(padding|tokens) weighs?"),
    "the mask off by one": (lambda x, m, step_tokens: share(x, m.roll(1, -1), step_tokens), "weights", "weigh"),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "kind", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_told(loss_fn: Callable[..., Any], kind: str, text: str) -> None:
    of_step = "step_tokens" in inspect.signature(loss_fn).parameters
    report = check_loss(loss_fn, "token_mean" if of_step else "token_sum", call=ADDED, draws=6)
    assert not report.sound
    assert not report.invariant or kind == "weights"
    finding = next(finding for finding in report.findings if finding.kind == kind)
    assert re.search(text, finding.says)
    assert finding.says in str(report)
    assert kind == "chance" or len(finding.case.samples) <= 2, str(finding.case)


def test_what_is_no_fault_where_the_call_is_another() -> None:
    every_row = LossCall(dp="mean", microbatches="mean", masked_samples=False, even_microbatches=True)
    assert check_loss(zero_by_zero, "sample_mean", call=every_row, draws=4).sound
    default, note = check_loss(lambda x, m, num_item=None: total(x, m), "token_sum", call=ADDED, draws=4).notes
    assert default == "parameter num_item was left at its default"
    assert "NaN at a masked token" in note
    assert not check_loss(lambda x, m: torch.where(m != 0, x, 0).sum(), "token_sum", call=ADDED, draws=4).notes


#: Function, its mode, its call, the cut that shows it, what is said, and how many times too much tokens weigh.
TOLD: dict[str, tuple[Callable[..., Any], str, LossCall, str, str, Any]] = {
    "nothing trained": (lambda x, m: 0 * x.sum(), "token_mean", LossCall(), UNCUT, "", (0, 0)),
    "the wrong way round": (
        lambda x, m, step_tokens: -share(x, m, step_tokens),
        "token_mean", ADDED, UNCUT, "all tokens weigh -1 times what they should, on every step alike$", (-1, -1),
    ),
    "one call fails": (
        third, "token_sum", replace(ADDED, cp="sum"), TOGETHER,
        r"it raises KeyError: 'here' \(micro-batch 1, DP rank 1, CP rank 1\)$", None,
    ),
    "what breaks only together": (
        lambda x, m, num_microbatches, dp_size: total(x, m) * (1 + (min(num_microbatches, dp_size) > 1)),
        "token_sum", ADDED, TOGETHER, "", (2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "mode", "call", "cut", "says", "factors"), TOLD.values(), ids=TOLD)
def test_where_it_fails_is_told(loss_fn: Any, mode: str, call: Any, cut: str, says: str, factors: Any) -> None:
    (finding,) = check_loss(loss_fn, mode, call=call, draws=4).findings
    assert finding.cut == cut
    assert re.match(says, finding.says)
    if factors:
        assert finding.factors == pytest.approx(factors)
    assert (finding.case.num_microbatches, finding.case.dp_size) == ((1, 1) if cut == UNCUT else (2, 2))


@pytest.mark.parametrize("mode", [None, "token_mean"])
def test_what_fails_on_some_uncut_steps_alone_is_told(mode: str | None) -> None:
    def not_of_five(losses: Tensor, mask: Tensor, step_samples: int, step_tokens: Tensor) -> Tensor:
        if step_samples == 5:
            raise IndexError("five")
        return share(losses, mask, step_tokens)

    report = check_loss(not_of_five, mode, call=ADDED)
    assert {finding.kind for finding in report.findings} <= {"raises", "weights"}
    assert "it raises IndexError: five" in str(report)


@pytest.mark.parametrize("seed", [0, 20])
def test_a_finding_can_be_had_again_and_the_report_is_plain_data(seed: int) -> None:
    report = check_loss(masked_mean, "token_mean", call=published.MEANS, seed=seed, draws=4)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["sound"], data["invariant"]) == (False, False)
    assert [finding["cut"] for finding in data["findings"]] == [MICROBATCHES, DP]
    for finding, plain in zip(report.findings, data["findings"], strict=True):
        assert tuple(measure(masked_mean, published.MEANS, finding.case).weights) == finding.weights
        assert eval(plain["case"], vars(drawn_steps)) == finding.case
    assert str(check_loss(masked_mean, "token_mean", call=published.MEANS, seed=seed, draws=4)) == str(report)


# ---- what a function is given


def test_everything_that_can_be_asked_for_is_given() -> None:
    """Of every name in the table, and no other, in every shape of rows."""
    seen: dict[str, Any] = {}

    def asks_for_all(losses: Any, mask: Any, **given: Any) -> Tensor:
        seen.update(given)
        return sum(part.sum() for part in losses) if isinstance(losses, list) else losses.sum()

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in GIVEN]
    two = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("log_probs", "mask")]
    asks_for_all.__signature__ = inspect.Signature([*two, *parameters])
    rows = (DrawnSample((1, 0, 1)), DrawnSample((0, 0)))
    for shape in ("padded", "packed", "lists"):
        seen.clear()
        call = LossCall(takes="log_probs", rows=shape, cp="sum")
        measure(asks_for_all, call, LossCase(((rows,), (rows[:1],)), 2))
        assert set(seen) == set(GIVEN)
        assert (int(seen["step_tokens"]), int(seen["rank_tokens"]), seen["step_samples"]) == (4, 2, 3)
        assert (seen["world_size"], seen["dp_rank"], seen["cp_rank"]) == (4, 1, 1)
        assert seen["cu_seqlens"].tolist() == [0, 4]


CUTS = {"zigzag": [0, 1, 1, 0], "contiguous": [0, 0, 1, 1], "gathered": [-1] * 4, "responses": [1, 1, 1, 1]}


@pytest.mark.parametrize("cut", CUTS)
def test_a_context_parallel_rank_holds_what_the_cut_says(cut: Any) -> None:
    """Of a row of 4 tokens; as a response behind 3 of a prompt, in 8 slots, its losses lie one before its tokens."""
    call = LossCall(rows="packed", cp="sum", cp_cut=cut)
    step = measure(total, call, LossCase((((DrawnSample((1,) * 4),),),), 2))
    assert step.tokens.cp_rank.tolist() == CUTS[cut]


def test_the_page_names_everything_there_is() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    fields = {field.name for field in dataclasses.fields(LossCall)}
    assert fields | set(GIVEN) | set(CALLS) <= set(re.findall(r"`(\w+)`", page))


# ---- wrong uses


def by_typo(losses: Tensor, mask: Tensor, step_token: Tensor) -> Tensor:
    return share(losses, mask, step_token)


def policy_gradient(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, step_tokens: Tensor) -> Tensor:
    return share(-(log_probs - old_log_probs).exp(), mask, step_tokens)


def check(loss_fn: Any = share, mode: Any = "token_mean", **options: Any) -> Any:
    return check_loss(loss_fn, mode, **{"call": ADDED, "draws": 1, **options})


PLAIN: dict[str, Any] = {}
LISTS = {"loss_fn": published.total_of_lists, "mode": "token_sum", "call": LossCall(rows="lists", dp="sum")}
REFUSALS = {
    **refusals(
        check,
        ({"call": "verk"}, "call 'verk': .*Did you mean verl[?]", {"call": "pytorch"}),
        ({"mode": None, "divisor": 8}, "divisor 8 and units None without a mode", {"mode": None}),
        ({"draws": 0}, "draws is 0", PLAIN),
        ({"seed": -1}, "seed is -1", {"seed": 1}),
        ({"mode": "constant"}, "divisor", {"mode": "constant", "divisor": 8.0}),
        ((lambda losses, mask: losses * mask,), "returns torch.float32 of shape \\(2, 3\\), not one number", PLAIN),
        ((lambda x, mask: (total(x, mask), {}),), "returns a tuple, no tensor: return the loss alone", PLAIN),
        ((lambda x, mask: total(x, mask).detach(),), "has no graph", PLAIN),
        ({"call": LossCall(rows="lists")}, "raises TypeError", LISTS),
    ),
    **refusals(
        check,
        ((torch.zeros(()),), "loss_fn is a Tensor.*Pass the function", PLAIN),
        ((lambda losses: losses.sum(),), "takes losses: .*Wrap it: lambda losses, mask", (total, "token_sum")),
        (
            (by_typo,),
            "'step_token' that has no default.*Did you mean step_tokens[?]",
            {"loss_fn": by_typo, "call": replace(ADDED, names={"step_token": "step_tokens"})},
        ),
        (
            (policy_gradient,),
            "asks for 'old_log_probs': .*takes=\"log_probs\"",
            {"loss_fn": policy_gradient, "call": replace(ADDED, takes="log_probs")},
        ),
        ((None, None), "check_loss of nothing.*Give loss_fn or mode", (None, "token_sum")),
        ({"call": object()}, "call is a object: .*Choose one of pytorch, ", PLAIN),
        error=TypeError,
    ),
    **refusals(
        LossCall,
        ({"cp_cut": "responses", "cp": "sum"}, "cp_cut is 'responses', and LossCall.rows 'padded'", PLAIN),
        ({"dp": "average"}, "LossCall.dp 'average'", {"dp": "mean"}),
        ({"cp": True}, "LossCall.cp True", {"cp": "sum"}),
        ({"cp_cut": "gathered"}, "cp_cut is 'gathered', and LossCall.cp None", {"cp_cut": "gathered", "cp": "mean"}),
        ({"names": {"n": "tokens"}}, "'tokens': .*step_tokens", {"names": {"n": "step_tokens"}}),
    ),
    **refusals(
        LossCall,
        ({"split_rollouts": "no"}, "LossCall.split_rollouts is 'no'", {"split_rollouts": False}),
        ({"names": ["step_tokens"]}, "LossCall.names is a list", {"names": {}}),
        error=TypeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)


def test_the_functions_own_error_is_the_cause() -> None:
    with pytest.raises(ValueError, match="raises ZeroDivisionError") as caught:
        check_loss(lambda losses, mask: losses.sum() / (1 // 0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

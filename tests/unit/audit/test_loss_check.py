"""`check_loss` passes exact functions and modes, and finds what is wrong with published ones, whose weights on the step
that a finding shows are worked out by hand (`published`), and other faults."""

import dataclasses
import functools
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import check_my_loss
import numpy as np
import oracle
import published
import pytest
import torch
from counted_steps import Row, Step
from published import ADDED, DP, MEANS, MICROBATCHES, UNCUT, masked_mean, row_means, share, total
from refusals import refusal_tests, refusals
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import Mode, Sum, check_loss
from megatron_rl_loss.audit import simulation
from megatron_rl_loss.audit.drawing import PADDED, TOGETHER
from megatron_rl_loss.audit.simulation import CALLS, PARAMETERS, DrawnRow, DrawnStep, LossCall, measure
from megatron_rl_loss.core.aggregation import resolve, weigh
from megatron_rl_loss.core.modes import ModeInputs

pytestmark = pytest.mark.slow  # hundreds of random steps

PUBLISHED = {bug.id: bug for bug in published.BUGS if bug.loss_fn is not None}


def step_of(drawn: DrawnStep, padded: bool) -> Step:
    """The same step to count by hand."""
    rows: list[list[list[Row]]] = [[[] for _ in range(drawn.num_microbatches)] for _ in range(drawn.dp_size)]
    for row in drawn.rows:
        rows[row.dp_rank][row.microbatch].append(Row(row.mask, row.rollout, row.prompt))
    longest = max(len(row.mask) for row in drawn.rows) if padded and drawn.cp_size > 1 else None
    return Step(rows, drawn.cp_size, length=longest)


#: The weights that a mode asks for, by hand.
ASKED: dict[str, Callable[..., Any]] = {
    "token_mean": lambda t, divisor: t.m / t.T,
    "sample_mean": lambda t, divisor: t.m / np.maximum(t.R, 1) / t.N,
    "constant": lambda t, divisor: t.m / divisor / t.N,
    "verl:seq-mean-token-sum": lambda t, divisor: t.m / t.N,
}


#: By row of `published.BUGS`: a part of what must be said of the function's weights; None where it cannot be told.
CAUSES: dict[int, str | None] = {
    1: "x CP: the loss is multiplied by CP once too often",
    3: "the CP rank's piece of the micro-batch, not of the step",
    9: "tokens of the micro-batch, not of the step", 10: "tokens of the micro-batch, not of the step", 11: None,
    12: "sample means, over the samples of the step", 14: "token means of the micro-batch, weighted by its samples",
    15: "x K: micro-batches are summed", 16: "x 1/CP: gradients of CP ranks are summed and then averaged",
    17: "x 1/DP²: a denominator is multiplied by DP", 18: "x N: never divided by the number of units",
    21: "x K: micro-batches are summed", 23: "tokens of the micro-batch, not of the step",
    24: "x 1/T: divided by the number of tokens twice", 26: "tokens of the micro-batch, not of the step",
    28: "tokens of the micro-batch, not of the step", 31: "tokens of the micro-batch, not of the step",
    32: "tokens of the DP rank, not of the step", 36: "x 1/K: nothing undoes",
    38: "tokens of the DP rank, not of the step",
    39: "not divided by any count of tokens", 42: "the tokens, and one for each fully masked sample",
    45: "x N/rows: rows were counted, not rollouts", 46: "tokens of the micro-batch, not of the step",
    53: "tokens of the micro-batch, not of the step, x DP·K: the parts' means are summed",
}  # fmt: skip


@pytest.mark.parametrize("bug", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_function_is_found(bug: published.Bug) -> None:
    report = check_loss(bug.loss_fn, bug.asked, call=bug.call, draws=8, divisor=bug.divisor)
    assert not report.sound
    assert report.invariant == (set(bug.cuts) == {UNCUT})
    assert {finding.cut for finding in report.findings} == set(bug.cuts), str(report)
    assert len(str(report).splitlines()) <= 15
    cause = CAUSES[bug.row]
    assert cause in report.causes[0] if cause else "the cause cannot be told" in str(report)
    rows = (CALLS[bug.call] if isinstance(bug.call, str) else bug.call).rows
    for finding in report.findings:
        assert finding.kind == "weights"
        assert f"  {finding.cut}: {finding.says}" in str(report).splitlines()
        t = step_of(finding.step, rows == "padded").counted
        assert finding.weights == pytest.approx(bug.weights(t).tolist(), rel=1e-6)
        assert finding.expected == pytest.approx(ASKED[bug.asked](t, bug.divisor).tolist(), rel=1e-6)
        # The smallest step that shows it: two parts of what is cut, and one of all else.
        parts = {MICROBATCHES: t.K, DP: t.D, published.CP: t.C}
        assert parts == {cut: 1 + (cut == finding.cut) for cut in parts}
        assert len(t.m) <= 14, finding.step


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("report", published.REPORTS, ids=lambda report: report.where)
def test_a_function_of_a_public_report_gets_its_cause(report: published.Reported, seed: int) -> None:
    found = check_loss(report.loss_fn, report.asked, call=report.call, draws=8, seed=seed)
    assert not found.sound
    said = [*(finding.says for finding in found.findings if finding.kind != "NaN"), *found.causes[:1]]
    assert any(report.cause in text for text in said), str(found)
    # No other cause beside it: what is selected, or missing, or a ratio of 1.
    assert "selects" not in str(found)
    assert "have no weight" not in str(found)
    assert " weigh 1 times" not in str(found)


def test_every_published_function_is_judged() -> None:
    assert len(PUBLISHED) + len(published.REPORTS) >= 27
    assert {bug.row for bug in PUBLISHED.values()} == set(CAUSES)


def selected_by_advantage(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """The tokens of a micro-batch whose advantage is above the micro-batch's mean."""
    on = advantages > advantages[mask != 0].mean()
    return total(-(log_probs - old_log_probs).exp() * advantages * on, mask)


def test_selecting_is_told_from_whitening() -> None:
    call = LossCall(takes="log_probs", dp="sum")
    assert "it selects them" in str(check_loss(selected_by_advantage, call=call, draws=8))
    assert "whitens advantages" in str(check_loss(published.whitened_here, call=call, draws=8))
    centred = lambda x, m, old_log_probs, advantages: total(  # noqa: E731
        -(x - old_log_probs).exp() * (advantages - advantages[m != 0].mean()), m
    )
    assert "it centres advantages itself" in str(check_loss(centred, call=call, draws=8))


def test_what_is_assumed_is_said_from_every_field() -> None:
    """Each field, moved to each of its other values, changes the line."""
    base = LossCall(cp="sum", rows="packed")
    moved: dict[str, list[Any]] = {
        "takes": ["log_probs"], "rows": ["padded", "lists"], "names": [{"n": "step_tokens"}], "microbatches": ["mean"],
        "dp": ["sum"], "cp": ["mean", None], "cp_cut": ["contiguous"], "even_microbatches": [True],
        "masked_samples": [False], "fractional_masks": [False], "split_rollouts": [True],
        "returns": ["megatron", "megatron_per_token"],
    }  # fmt: skip
    assert set(moved) == {field.name for field in dataclasses.fields(LossCall)}
    texts = [replace(base, **{name: value}).describe() for name, values in moved.items() for value in values]
    assert len({base.describe(), *texts}) == 1 + len(texts)
    even = str(check_loss(share, "token_mean", call=replace(ADDED, even_microbatches=True), draws=2))
    assert "SOUND: share is token_mean, however the step is cut into micro-batches of as many rows" in even


def test_a_quarter_of_the_draws_has_masks_of_weights() -> None:
    seen = list[bool]()

    def watched(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
        seen.append(bool(((mask != 0) & (mask != 1)).any()))
        return share(losses, mask, step_tokens)

    assert check_loss(watched, "token_mean", call=ADDED, draws=8).sound
    assert any(seen)
    seen.clear()
    assert check_loss(watched, "token_mean", call=replace(ADDED, fractional_masks=False), draws=8).sound
    assert not any(seen)


DIVISORS = {"constant": 8.0, "token_sum": 8.0}


def means_of_prompts(losses: Tensor, mask: Tensor, prompt_ids: list[int], of_samples: bool = False) -> Tensor:
    """The mean over the micro-batch's prompts of token means, or of the means of their samples."""
    rows = [torch.tensor(prompt_ids) == prompt for prompt in sorted(set(prompt_ids))]
    means = [row_means(losses[at], mask[at]).mean() if of_samples else masked_mean(losses[at], mask[at]) for at in rows]
    return torch.stack(means).mean()


SPLIT, CP_MEANS = replace(ADDED, split_rollouts=True), LossCall(microbatches="mean", cp="mean", split_rollouts=True)
#: Plausible wrong functions of each mode (with divisor 8), their calls and their causes; empty where no row has them.
PLAUSIBLE: dict[str, tuple[Callable[..., Tensor], str, LossCall, str]] = {
    "token means": (masked_mean, "token_mean", MEANS, "divided by the tokens of the micro-batch, not of the step"),
    "token means, CP": (masked_mean, "token_mean", CP_MEANS,
        "divided by the tokens of the CP rank's piece of the micro-batch, not of the step"),
    "sample means": (lambda x, m: row_means(x, m).mean(), "sample_mean", MEANS,
        "sample means, over the samples of the micro-batch, not of the step"),
    "rows": (published.rows_for_rollouts, "sample_mean", SPLIT,
        "every token alike, x N/rows: rows were counted, not rollouts"),
    "prompt means": (means_of_prompts, "prompt_mean", MEANS, "prompt means inside the micro-batch, over its prompts"),
    "group means": (functools.partial(means_of_prompts, of_samples=True), "prompt_mean", MEANS,
        "prompt means of sample means inside the micro-batch"),
    "samples for prompts": (lambda x, m, step_samples: row_means(x, m).sum() / step_samples, "prompt_mean", ADDED,
        "sample means, over the samples of the step"),
    "no number of samples": (lambda x, m: total(x, m) / 8, "constant", ADDED,
        "every token alike, x N: never divided by the number of units"),
    "another divisor": (lambda x, m: total(x, m) / 16, "token_sum", ADDED,
        "one factor for all tokens, 0.5, which is no product of the step's sizes and counts"),
    "by samples": (lambda x, m, step_samples: total(x, m) / step_samples, "token_mean", ADDED,
        "not divided by any count of tokens, x 1/N"),
    "by prompts": (lambda x, m, step_prompts, step_tokens: share(x, m, step_tokens) / step_prompts, "token_mean", ADDED,
        "every token alike, x 1/P"),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "mode", "call", "cause"), PLAUSIBLE.values(), ids=PLAUSIBLE)
def test_no_draw_gets_a_false_cause(loss_fn: Any, mode: str, call: LossCall, cause: str) -> None:
    for seed in range(int(os.environ.get("CHECK_LOSS_SEEDS", "2"))):
        report = check_loss(loss_fn, mode, divisor=DIVISORS.get(mode), call=call, draws=5, seed=seed)
        assert report.causes == (cause,) * bool(cause), seed
        assert f"  fits: {cause}" in str(report) or not cause


ROLLOUTS = {"step_samples": "step_rollouts"}
PROMPTS = {"rollout_tokens": "prompt_tokens", "step_samples": "step_prompts"}
#: The loss function, its mode, its call, and a divisor.
EXACT: dict[str, tuple[Callable[..., Tensor], str, LossCall | str, float | None]] = {
    "TRL dr_grpo": (
        lambda x, m, gradient_accumulation_steps: ((x * m).sum(-1) / 16).mean() / gradient_accumulation_steps,
        "trl:dr_grpo", "trl", 16),
    "transformers": (lambda x, m, num_items_in_batch: share(x, m, num_items_in_batch),
        "token_mean", "transformers", None),
    "prime-rl": (lambda xs, ms, loss_scale: published.total_of_lists(xs, ms) / loss_scale.clamp(min=1),
        "token_mean", "prime_rl", None),
    "open-instruct, OpenRLHF, CP and all": (
        lambda x, m, step_tokens, world_size: share(x, m, step_tokens) * world_size,
        "token_mean", LossCall(cp="mean"), None),
    "rollouts": (published.rows_for_rollouts, "sample_mean", replace(SPLIT, names=ROLLOUTS), None),
    "prompts": (published.rows_for_rollouts, "prompt_mean", replace(ADDED, names=PROMPTS), None),
    "packed, by index, CP": (
        lambda x, m, sample_index, sample_tokens, step_samples:
            (x * m / sample_tokens.clamp(min=1)[sample_index]).sum() / step_samples,
        "sample_mean", LossCall(rows="packed", dp="sum", cp="sum"), None),
    "PPO": (
        lambda new, m, old_log_probs, advantages, step_tokens:
            share(-(new - old_log_probs).exp() * advantages, m, step_tokens),
        "token_mean", replace(ADDED, takes="log_probs"), None),
    "in place": (lambda x, m, step_tokens: x.mul_(m.clamp_(max=1)).sum() / step_tokens, "token_mean", ADDED, None),
}  # fmt: skip


@pytest.mark.parametrize("row", EXACT.values(), ids=EXACT)
def test_an_exact_formula_passes_and_the_same_scaled_does_not(row: Any) -> None:
    """Half as much again is the negative control: it shows in the uncut step, whatever the formula."""
    loss_fn, mode, call, divisor = row
    report = check_loss(loss_fn, mode, call=call, draws=3, divisor=divisor)
    assert (report.sound, report.invariant, report.findings) == (True, True, ()), str(report)
    assert str(report).startswith("SOUND: ")
    scaled = functools.wraps(loss_fn)(lambda *args, **kwargs: 1.5 * loss_fn(*args, **kwargs))
    report = check_loss(scaled, mode, call=call, draws=3, divisor=divisor)
    assert report.invariant
    (finding,) = report.findings
    assert finding.cut == UNCUT
    assert (finding.low, finding.high) == pytest.approx((1.5, 1.5))


def test_the_example_says_what_its_functions_are(capsys: pytest.CaptureFixture[str]) -> None:
    check_my_loss.main()
    heads = [line for line in capsys.readouterr().out.splitlines() if "SOUND" in line]
    said = ["is not invariant; expected token_mean", *["is token_mean, however the step is cut"] * 2]
    assert [head.split(" ", 2 + head.startswith("NOT"))[-1] for head in heads] == [*said, said[0]]


def test_methods_objects_and_partials_are_functions_too() -> None:
    class Loss:
        def __call__(self, losses: Tensor, mask: Tensor) -> Any:
            return total(losses, mask)

        def of_step(self, losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
            return share(losses, mask, step_tokens)[None]

    bound: Any = {"step_tokens": 1}
    functions: list[Any] = [Loss(), lambda *args: total(*args), functools.partial(share, **bound)]
    for function in functions:
        report = check_loss(function, "token_sum", call=ADDED, draws=3)
        assert (report.sound, len(report.notes)) == (True, 1)
    assert check_loss(Loss().of_step, "token_mean", call=ADDED, draws=3).sound


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
    "a number for nothing": (lambda x, m: total(x, m) if m.any() else 0, "no loss", "it returns a int, not a tensor"),
    "0/0": (zero_by_zero, "NaN", r"NaN or infinite at \d of \d tokens, perhaps .* 0/0 over a row without an active"),
    "0/0 of a micro-batch": (lambda x, m: total(x, m) / m.sum(), "NaN", "perhaps .* 0/0 in a micro-batch without an"),
    "no 0/0": (lambda x, m: total(x, m) * torch.where(m.all(), torch.nan, 1.0), "NaN", r"at \d of \d tokens$"),
    "an infinite gradient": (lambda x, m: total(x, m) - total(x, 1 - m).mul(0).abs().sqrt(), "NaN", "NaN or infinite"),
    "an infinite gradient of padding": (
        lambda x, m: total(x, m) + 0 * torch.where(x == 0, x, 1).sqrt().sum(), "NaN", "NaN or infinite at padding"),
    "masked tokens trained": (lambda x, m, step_tokens: x.sum() / step_tokens, "weights", "trained|lies on padding"),
    "off by one": (lambda x, m, step_tokens: share(x, m.roll(1, -1), step_tokens), "weights", "off by one|padding|no "),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "kind", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_told(loss_fn: Callable[..., Any], kind: str, text: str) -> None:
    of_step = "step_tokens" in inspect.signature(loss_fn).parameters
    report = check_loss(loss_fn, "token_mean" if of_step else "token_sum", call=ADDED, draws=8)
    assert not report.sound
    assert not report.invariant or kind == "weights"
    finding = next(finding for finding in report.findings if finding.kind == kind)
    assert re.search(text, finding.says)
    assert finding.says in str(report)
    assert len(finding.step.rows) <= 4, finding.step


def above(bound: Any) -> Callable[..., Tensor]:
    """A loss of the tokens whose losses are above a bound, of its micro-batch's mean, say."""

    def selected(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
        return share(losses * (losses.detach() > bound(losses)), mask, step_tokens)

    return selected


def test_a_selection_by_value_is_sound_unless_the_cut_changes_it() -> None:
    """Without a mode gradients of cut and uncut steps are compared; with one such a loss is no aggregation."""
    fixed, relative = above(lambda losses: 0.5), above(lambda losses: losses.mean())
    assert check_loss(fixed, call=ADDED, draws=6).sound
    report = check_loss(relative, call=ADDED, draws=6)
    assert {finding.cut for finding in report.findings} >= {MICROBATCHES, DP}
    assert all("trains on other tokens than uncut: it selects them" in f.says for f in report.findings[:2])
    assert "keep_tokens" in str(report)
    for function in (fixed, relative):
        (finding,) = check_loss(function, "token_mean", call=ADDED, draws=3).findings
        assert finding.kind == "values"
    clipped = check_loss(lambda x, m, step_tokens: share(x.clamp(max=1), m, step_tokens), call=ADDED, draws=6)
    assert clipped.sound


def test_a_masked_mean_of_each_micro_batch_is_named_before_its_nan() -> None:
    """The page's own example: the cause is the division, and 0/0 one of its signs."""
    head, first, *rest = str(check_loss(masked_mean_as_written, "token_mean")).splitlines()
    assert head == "NOT SOUND: masked_mean_as_written is not invariant; expected token_mean"
    assert re.search(r"over micro-batches: tokens weigh .* times their uncut weight", first)
    assert any("NaN or infinite" in line for line in rest)
    assert any("fits: divided by the tokens of the micro-batch, not of the step" in line for line in rest)


def masked_mean_as_written(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def test_a_mode_in_the_place_of_the_function_is_told() -> None:
    with pytest.raises(TypeError, match=r"loss_fn is 'token_mean': .* the mode comes second. Pass check_loss"):
        check_loss("token_mean", masked_mean_as_written)  # type: ignore[arg-type]


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
    "one call fails": (third, "token_sum", replace(ADDED, cp="sum"), TOGETHER,
        r"it raises KeyError: 'here' \(micro-batch 1, DP rank 1, CP rank 1\)$", None),
    "what breaks only together": (
        lambda x, m, num_microbatches, dp_size: total(x, m) * (1 + (min(num_microbatches, dp_size) > 1)),
        "token_sum", ADDED, TOGETHER, "", (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "mode", "call", "cut", "says", "factors"), TOLD.values(), ids=TOLD)
def test_where_it_fails_is_told(loss_fn: Any, mode: str, call: Any, cut: str, says: str, factors: Any) -> None:
    (finding,) = check_loss(loss_fn, mode, call=call, draws=4).findings
    assert finding.cut == cut
    assert re.match(says, finding.says)
    if factors:
        assert (finding.low, finding.high) == pytest.approx(factors)
    assert finding.step[1:3] == ((1, 1) if cut == UNCUT else (2, 2))


@pytest.mark.parametrize("seed", [0, 20])
def test_a_finding_can_be_had_again_and_the_report_is_plain_data(seed: int) -> None:
    report = check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=4)
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["sound"], data["invariant"]) == (False, False)
    assert [finding["cut"] for finding in data["findings"]] == [MICROBATCHES, DP]
    for finding, plain in zip(report.findings, data["findings"], strict=True):
        assert tuple(measure(masked_mean, MEANS, finding.step).weights) == finding.weights
        assert eval(plain["step"], vars(simulation)) == finding.step
    assert str(check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=4)) == str(report)


def test_everything_that_can_be_asked_for_is_given() -> None:
    """Every name in the table, and no other, in every shape of rows."""
    seen: dict[str, Any] = {}

    def asks_for_all(losses: Any, mask: Any, **by_name: Any) -> Tensor:
        seen.update(by_name)
        return sum(part.sum() for part in losses) if isinstance(losses, list) else losses.sum()

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in PARAMETERS]
    two = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("log_probs", "mask")]
    vars(asks_for_all)["__signature__"] = inspect.Signature([*two, *parameters])
    rows = DrawnRow((1, 0, 1)), DrawnRow((0, 0)), DrawnRow((1, 0, 1), dp_rank=1)
    for shape in ("padded", "packed", "lists"):
        seen.clear()
        measure(asks_for_all, LossCall(takes="log_probs", rows=shape, cp="sum"), DrawnStep(rows, 1, 2, 2))
        assert set(seen) == set(PARAMETERS)
        assert (int(seen["step_tokens"]), int(seen["rank_tokens"]), seen["step_samples"]) == (4, 2, 3)
        assert (seen["world_size"], seen["dp_rank"], seen["cp_rank"]) == (4, 1, 1)
        assert seen["cu_seqlens"].tolist() == [0, 4]


#: Of some cuts, by hand; every cut is drawn in `test_built_in_modes_are_invariant`.
HELD = {"zigzag": [0, 1, 1, 0], "contiguous": [0, 0, 1, 1], "gathered": [-1] * 4, "responses": [1, 1, 1, 1]}
TREE = LossCall(rows="packed", dp="sum", cp="sum", cp_cut="tree")


@pytest.mark.parametrize("cut", HELD)
def test_a_context_parallel_rank_holds_what_the_cut_says(cut: Any) -> None:
    """A row of 4 tokens; as a response behind 3 of a prompt, in 8 slots, its losses lie one before its tokens."""
    call = LossCall(rows="packed", cp="sum", cp_cut=cut)
    step = measure(total, call, DrawnStep((DrawnRow((1,) * 4),), cp_size=2))
    assert step.tokens.cp_rank.tolist() == HELD[cut]


def test_a_context_parallel_rank_holds_slots_of_a_tree() -> None:
    """Rows a a a a and a a b b are slots a a a a b b, padded to 8: chunks of 2 lie on ranks 0, 1, 1 and 0."""
    step = measure(total, TREE, DrawnStep((DrawnRow((1, 1, 1, 0)), DrawnRow((1, 1, 1, 0), 1)), cp_size=2))
    assert step.tokens.cp_rank.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert step.weights.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]


def once_a_slot(losses: Tensor, mask: Tensor, local: Any, step_tokens: Tensor) -> Tensor:
    """A slot that several samples share is read by one of them alone."""
    first = torch.zeros_like(losses)
    first[np.unique(local.samples.layout.slots[local.positions], return_index=True)[1]] = 1
    return (losses * mask * first).sum() / step_tokens


def over_the_step(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    return (losses * mask).sum() / step_tokens


@pytest.mark.parametrize("returns", ["loss", "megatron_per_token"])
def test_functions_are_checked_over_a_tree(returns: Any) -> None:
    call, loss_fn = replace(TREE, returns=returns), over_the_step if returns == "loss" else stock
    report = check_loss(loss_fn, "token_mean", call=call, draws=6)
    assert report.sound, str(report)
    assert "tree CP ranks summed" in " ".join(str(report).split())


def test_faults_over_a_tree_are_found() -> None:
    report = check_loss(once_a_slot, "token_mean", call=TREE, draws=6)
    assert report.findings[0].cut == UNCUT
    report = check_loss(masked_mean, "token_mean", call=replace(TREE, dp="mean", cp="mean", microbatches="mean"))
    assert {finding.cut for finding in report.findings} == {MICROBATCHES, DP, "over context-parallel ranks"}


def test_the_help_lists_every_parameter_and_the_page_every_trainer() -> None:
    help_of_call, page = LossCall.__doc__ or "", (ROOT / "docs" / "audit.md").read_text()
    fields = {field.name for field in dataclasses.fields(LossCall)}
    assert set(re.findall(r"^        (\w+):", help_of_call, flags=re.MULTILINE)) == fields
    (listed,) = re.findall(r"^    - .*(?=\n\n)", help_of_call, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"``(\w+)``", listed)) == set(PARAMETERS)
    assert "`help(LossCall)`" in page
    assert set(CALLS) <= set(re.findall(r"`([\w ]+)`", " ".join(page.split())))


@pytest.mark.parametrize("units", oracle.BY_MASKS)
@pytest.mark.parametrize("mode", [*oracle.MODES, *oracle.BY_IDS])
def test_built_in_modes_are_invariant(mode: str, units: Any) -> None:
    assert check_loss(mode=mode, divisor=oracle.divisor_of(mode, 8.0, optional=True), units=units, draws=2).sound


def sum_by_prompts(step: ModeInputs) -> float:
    return 1 / step.units("prompt")


DEPENDS: dict[str, tuple[Any, Any]] = {
    "tokens here": (lambda of: 1 / max(1.0, float(of.batch.mask_sums.sum())), published.BOTH),
    "samples here": (lambda of: 1 / max(1, len(of.batch)), published.BOTH),
    "lengths": (lambda of: [torch.full((int(n),), 1 / int(n)) for n in of.batch.mask_lengths], [PADDED]),
}


@pytest.mark.parametrize(("mode", "cuts"), DEPENDS.values(), ids=DEPENDS)
def test_what_a_mode_depends_on_is_found(mode: Any, cuts: Any) -> None:
    report = check_loss(mode=mode, draws=8)
    finding = report.findings[0]
    assert {shown.cut for shown in report.findings} == set(cuts)
    assert not report.invariant
    assert len(finding.step.rows) <= 3
    assert finding.weights != pytest.approx(finding.expected)


def test_modes_of_ones_own_and_functions_beside_them() -> None:
    rising = lambda of: [torch.arange(0.0, int(n)) for n in of.batch.mask_lengths]  # noqa: E731
    assert check_loss(mode=rising, draws=6).sound
    assert check_loss(mode=sum_by_prompts, draws=6).sound
    assert check_loss(lambda x, m, step_prompts: total(x, m) / step_prompts, sum_by_prompts, call=ADDED, draws=6).sound
    assert "sum_by_prompts" in str(check_loss(share, sum_by_prompts, draws=6))


def test_without_a_mode_invariance_is_all_that_is_asked() -> None:
    assert check_loss(lambda losses, mask: total(losses, mask) / 8, call=ADDED, draws=4).sound
    assert check_loss(published.lists_by_smaller, call="prime_rl", draws=4).sound
    assert not check_loss(masked_mean, call=ADDED, draws=4).invariant


# ---- wrong uses


def by_typo(losses: Tensor, mask: Tensor, step_token: Tensor) -> Tensor:
    return share(losses, mask, step_token)


def of_log_probs(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, step_tokens: Tensor) -> Tensor:
    return share(-(log_probs - old_log_probs).exp(), mask, step_tokens)


def check(loss_fn: Any = share, mode: Any = "token_mean", **options: Any) -> Any:
    return check_loss(loss_fn, mode, **{"call": ADDED, "draws": 1, **options})


def by_task(step: Any) -> Any:
    return 1 / (step.tokens("sample") * step.samples("task") * step.units("task"))


def by_turns(step: Any) -> Any:
    return 1 / (step.tokens("turn") * step.units("turn"))


def by_label(step: Any) -> Any:
    return 1.0 + np.array(step.label("kind"))


def task_of(row: Any) -> int:
    return int(row.prompt // 2)


PLAIN: dict[str, Any] = {}
MEGATRON: Any = {"loss_fn": lambda x, mask: (total(x, mask), {}), "mode": None, "call": "megatron"}
WITH_TASKS = {"loss_fn": None, "mode": by_task, "ids": {"task": task_of}}
WITH_KINDS = {"loss_fn": None, "mode": by_label, "labels": {"kind": task_of}}
TYPO, LOG_PROBS = replace(ADDED, names={"step_token": "step_tokens"}), replace(ADDED, takes="log_probs")
LISTS = {"loss_fn": published.total_of_lists, "mode": "token_sum", "call": LossCall(rows="lists", dp="sum")}
REFUSALS = {
    **refusals(
        check,
        ({"call": "verk"}, "call 'verk': .*Did you mean verl[?]", {"call": "pytorch"}),
        ({"mode": None, "divisor": 8}, "divisor 8 and units None without a mode", {"mode": None}),
        ({"draws": 0}, "draws is 0", PLAIN),
        ({"seed": -1}, "seed is -1", {"seed": 1}),
        ({"mode": "constant"}, "divisor", {"mode": "constant", "divisor": 8.0}),
        (
            (lambda losses, mask: losses * mask,),
            "returns torch.float32 of shape .*, not a tensor with one",
            PLAIN,
        ),
        (
            (lambda x, mask: (total(x, mask), {}),),
            "returns a tuple, not a tensor.*or .megatron_per_token. with",
            PLAIN,
        ),
        ((lambda x, mask: total(x, mask).detach(),), "has no graph", PLAIN),
        ({"call": LossCall(rows="lists")}, "raises TypeError", LISTS),
        (
            {"loss_fn": total, "mode": "token_sum", "call": "megatron"},
            r"it returns a Tensor .*must return \(loss, num_tokens, report\) or \(loss, report\) to Megatron's",
            MEGATRON,
        ),
        (
            (None, by_task),
            r"check_loss draws rows with .* turn ids: give it .*ids={.*without ids\['task'\]",
            WITH_TASKS,
        ),
        ((None, by_label), r"check_loss draws rows .*labels={.*no label 'kind'", WITH_KINDS),
        ({"call": object()}, "call <object .*Choose one of pytorch, ", PLAIN),
        ((None, None), "loss_fn None, .*Name a mode", (None, "token_sum")),
        (
            (lambda losses: losses.sum(),),
            "takes 1 positional argument but 2 were given.*wrap the function",
            (total, "token_sum"),
        ),
        (
            (by_typo,),
            "missing 1 required .* 'step_token'.*named step_tokens, rank_tokens.*names=[.]",
            {"loss_fn": by_typo, "call": TYPO},
        ),
        ((of_log_probs,), "missing 1 .* 'old_log_probs'.*takes=[.]", {"loss_fn": of_log_probs, "call": LOG_PROBS}),
    ),
    **refusals(
        check,
        ((torch.zeros(()),), "loss_fn is a Tensor.*Pass the function", PLAIN),
        (
            (Mode(name="own", function=by_turns), None),
            "loss_fn is the mode 'own': .* alone by check_loss.mode=",
            {"loss_fn": None, "mode": Mode(name="own", function=by_turns)},
        ),
        error=TypeError,
    ),
    **refusals(
        check,
        ((None, lambda step: -1.0), "^token weights down to -1 from the mode", (None, lambda step: 1.0)),
    ),
    **refusals(
        LossCall,
        ({"cp_cut": "responses", "cp": "sum"}, "cp_cut is 'responses' with cp 'sum', rows 'padded'", PLAIN),
        ({"cp_cut": "tree", "cp": "sum"}, "cp_cut is 'tree' with cp 'sum', rows 'padded'", PLAIN),
        ({"dp": "average"}, "LossCall.dp is 'average': it must be one of 'mean', 'sum'", {"dp": "mean"}),
        ({"cp": True}, "LossCall.cp is True", {"cp": "sum"}),
        ({"cp_cut": "gathered"}, "cp_cut is 'gathered' with cp None", {"cp_cut": "gathered", "cp": "mean"}),
        ({"names": {"n": "tokens"}}, "'tokens': .*step_tokens", {"names": {"n": "step_tokens"}}),
        ({"split_rollouts": "no"}, "LossCall.split_rollouts is 'no'", {"split_rollouts": False}),
    ),
    **refusals(LossCall, ({"names": ["step_tokens"]}, "LossCall.names is a list", {"names": {}}), error=TypeError),
}

test_refusals = refusal_tests(REFUSALS)


def stock(losses: Tensor, mask: Tensor) -> Any:
    return (losses * mask).sum(), mask.sum(), {}


def pair(losses: Tensor, mask: Tensor, step_tokens: Tensor, num_microbatches: int, dp_size: int) -> Any:
    return (losses * mask).sum() / step_tokens * num_microbatches * dp_size, {}


def pair_times_cp(losses: Tensor, mask: Tensor, cp_size: int, **counts: Any) -> Any:
    return pair(losses, mask, **counts)[0] * cp_size, {}


pair_times_cp.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    lambda losses, mask, cp_size, step_tokens, num_microbatches, dp_size: None
)
AGAIN = "you multiply by CP, and Megatron multiplies a 2-tuple by CP again"


@pytest.mark.parametrize(
    ("loss_fn", "call", "cause"),
    [
        (stock, "megatron", "divided by the tokens of the CP rank's piece of the micro-batch"),
        (stock, "megatron_per_token", ""),
        (pair, "megatron", ""),
        (pair_times_cp, "megatron", AGAIN),
    ],
)
def test_loss_functions_of_megatrons_schedule(loss_fn: Any, call: str, cause: str) -> None:
    report = check_loss(loss_fn, "token_mean", call=call, draws=4)
    assert report.sound == (not cause)
    assert not cause or cause in report.causes[0]


def test_a_failed_call_tells_what_its_trainer_passes() -> None:
    """The trainer's own names among the parameters, and that rows come as lists."""

    def misnamed(losses: Tensor, mask: Tensor, num_items: Tensor) -> Tensor:
        return (losses * mask).sum() / num_items

    with pytest.raises(
        ValueError,
        match=r"Parameters named num_items_in_batch, gradient_accumulation_steps, step_tokens, .* get values",
    ):
        check_loss(misnamed, call="transformers")

    def of_another(
        losses: Tensor, mask: Tensor, gradient_accumulation_steps: int, num_items_in_batch: Tensor
    ) -> Tensor:
        return (losses * mask).sum() / num_items_in_batch / gradient_accumulation_steps

    with pytest.raises(ValueError, match=r"num_items_in_batch gets one with call='transformers' or call='trl'[.]"):
        check_loss(of_another)

    def of_log_probs(losses: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        return -(losses * advantages * mask).sum()

    takes = r'totals get values[.] advantages gets one with LossCall\(takes="log_probs"\), for a function of log-probs'
    with pytest.raises(ValueError, match=takes):
        check_loss(of_log_probs)
    (cause, *_) = check_loss(of_another, "token_mean", call="transformers", draws=2).causes
    assert "x 1/K" in cause
    with pytest.raises(
        ValueError,
        match="given losses and masks as the first two arguments, which are lists of one tensor per row, and",
    ):
        check_loss(lambda losses, mask: losses[mask.bool()].sum(), call="prime_rl")


def test_a_tuple_is_spoken_of_where_there_is_one() -> None:
    """Without Megatron a factor of CP is the function's own, or a sum that should be a mean."""
    call = LossCall(cp="sum")

    def times_cp(losses: Tensor, mask: Tensor, step_tokens: Tensor, dp_size: int, cp_size: int) -> Tensor:
        return share(losses, mask, step_tokens) * dp_size * cp_size

    (cause, *_) = check_loss(times_cp, "token_mean", call=call, draws=4).causes
    assert "multiplied by CP once too often" in cause
    assert "tuple" not in cause


def test_modes_over_ones_own_ids_and_labels() -> None:
    """A mode that counts by the micro-batch would not be invariant: it is found by its ids, too."""
    known = dict(zip(("ids", "labels"), ({"task": task_of}, {"kind": lambda row: row.prompt % 2}), strict=True))
    for mode in (by_task, by_label):
        assert check_loss(mode=mode, draws=2, **known).sound  # type: ignore[arg-type]
    of_place = check_loss(mode=by_task, draws=4, ids={"task": lambda row: row.microbatch})
    assert not of_place.invariant

    def by_tasks(losses: Tensor, mask: Tensor, local: Any, totals: Any, dp_size: int) -> Tensor:
        weights = weigh(resolve(by_task), local, totals).view(losses.shape)
        return (losses * weights).sum() * dp_size

    assert check_loss(by_tasks, by_task, draws=2, ids={"task": task_of}).sound
    assert not check_loss(by_tasks, "prompt_mean", draws=2, ids={"task": task_of}).sound


def test_the_functions_own_error_is_the_cause() -> None:
    with pytest.raises(ValueError, match="it raises KeyError") as caught:
        check_loss(lambda losses, mask: losses.sum() / dict[str, float]()["n"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_mode_over_a_sum_that_it_declares_is_checked() -> None:
    declared: Any = Mode(
        name="declared", function=lambda step: 1 / step.sum("all"), sums={"all": Sum(of=lambda rows: rows.mask_sums)}
    )
    assert check_loss(mode=declared, draws=3).sound


def test_a_dropped_last_column_is_spoken_of_where_padding_hides_it() -> None:
    def without_the_last(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
        return (losses * mask)[:, :-1].sum() / step_tokens

    said = str(check_loss(without_the_last, mode="token_mean"))
    assert "the padding decides which tokens have a weight: in this step they have the right one" in said
    assert "0 that should have none" not in said

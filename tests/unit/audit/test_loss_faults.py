"""`check_loss`: other faults of a loss function, how it is called, what is reported, and what is refused."""

import dataclasses
import doctest
import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from published import ADDED, DP, MEANS, MICROBATCHES, UNCUT, masked_mean, share, total, total_of_lists
from refusals import Refusal, check_refusal, each_of
from repository import ROOT
from torch import Tensor

from megatron_rl_loss.audit import CALLS, GIVEN, LossCall, check_loss, drawn_steps, loss_check, simulation
from megatron_rl_loss.audit.drawn_steps import DrawnSample, LossCase
from megatron_rl_loss.audit.simulation import measure

pytestmark = pytest.mark.slow  # hundreds of random steps

TOGETHER = "over all of these together"


@pytest.mark.parametrize("module", [loss_check, simulation])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def needs_two_rows(losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
    if len(losses) < 2:
        raise RuntimeError("cannot normalise one row")
    return share(losses, mask, step_tokens)


def not_of_five(losses: Tensor, mask: Tensor, step_samples: int, step_tokens: Tensor) -> Tensor:
    if step_samples == 5:
        raise IndexError("five")
    return share(losses, mask, step_tokens)


def third(losses: Tensor, mask: Tensor, microbatch: int, dp_rank: int, cp_rank: int) -> Tensor:
    if (microbatch, dp_rank, cp_rank) == (1, 1, 1):
        raise KeyError("here")
    return total(losses, mask)


def zero_by_zero(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1)).mean()


FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "clipped": (
        lambda losses, mask, step_tokens: share(losses.clamp(max=1), mask, step_tokens),
        "values", "not linear in the losses",
    ),
    "normalised by the losses": (
        lambda losses, mask: total(losses, mask) / total(losses, mask).abs().detach().clamp(min=1e-3),
        "values", "not linear in the losses",
    ),
    "dropout": (
        lambda losses, mask, step_tokens: share(torch.nn.functional.dropout(losses, 0.5), mask, step_tokens),
        "chance", "called twice with the same losses",
    ),
    "raises": (needs_two_rows, "raises", "it raises RuntimeError: cannot normalise one row"),
    "no graph": (
        lambda losses, mask, step_tokens: share(losses, mask, step_tokens) if mask.any() else torch.zeros(()),
        "no graph", "what it returns has no graph, so nothing is trained",
    ),
    "a number for nothing": (
        lambda losses, mask, step_tokens: share(losses, mask, step_tokens) if mask.any() else 0,
        "no loss", "it returns a int, no tensor",
    ),
    "0/0": (zero_by_zero, "NaN", "the gradient is NaN or infinite at 2 of 2 tokens"),
    "an infinite gradient": (
        lambda losses, mask: total(losses, mask) - total(losses, 1 - mask).mul(0).abs().sqrt(),
        "NaN", "the gradient is NaN or infinite at 1 of 1 tokens",
    ),
    "masked tokens trained": (
        lambda losses, mask, step_tokens: losses.sum() / step_tokens, "weights", "padding weighs|masked tokens weigh",
    ),
    "the mask off by one": (
        lambda losses, mask, step_tokens: share(losses, mask.roll(1, -1), step_tokens), "weights", "weigh",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "kind", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_told(loss_fn: Callable[..., Any], kind: str, text: str) -> None:
    report = check_loss(loss_fn, "token_mean", call=ADDED, draws=6)
    assert not report.sound
    assert not report.invariant or kind == "weights"
    finding = next(finding for finding in report.findings if finding.kind == kind)
    assert re.search(text, finding.says)
    assert finding.says in str(report)
    assert kind == "chance" or len(finding.case.samples) <= 2, str(finding.case)


def test_where_nothing_is_masked_there_is_no_0_by_0() -> None:
    every_row = LossCall(dp="mean", microbatches="mean", masked_samples=False, even_microbatches=True)
    assert check_loss(zero_by_zero, "sample_mean", call=every_row, draws=4).sound


def test_nothing_trained_and_the_wrong_way_round_are_told() -> None:
    (nothing,) = check_loss(lambda losses, mask: 0 * losses.sum(), "token_mean", draws=4).findings
    assert (nothing.cut, nothing.factors) == (UNCUT, (0, 0))
    (finding,) = check_loss(
        lambda losses, mask, step_tokens: -share(losses, mask, step_tokens), "token_mean", call=ADDED, draws=4
    ).findings
    assert finding.says == "all tokens weigh -1 times what they should, on every step alike"


@pytest.mark.parametrize("mode", [None, "token_mean", "sample_mean"])
def test_what_fails_on_some_uncut_steps_alone_is_told(mode: str | None) -> None:
    report = check_loss(not_of_five, mode, call=ADDED)
    assert {finding.kind for finding in report.findings} <= {"raises", "weights"}
    assert "it raises IndexError: five" in str(report)


def test_which_call_failed_is_told() -> None:
    (finding,) = check_loss(third, "token_sum", call=LossCall(dp="sum", cp="sum"), draws=4).findings
    assert finding.cut == TOGETHER
    assert finding.says == "it raises KeyError: 'here' (micro-batch 1, DP rank 1, CP rank 1)"


def test_what_breaks_only_together_is_found() -> None:
    def product(losses: Tensor, mask: Tensor, step_tokens: Tensor, num_microbatches: int, dp_size: int) -> Tensor:
        return share(losses, mask, step_tokens) * (2 if min(num_microbatches, dp_size) > 1 else 1)

    (finding,) = check_loss(product, "token_mean", call=ADDED, draws=4).findings
    assert finding.cut == TOGETHER
    assert (finding.case.num_microbatches, finding.case.dp_size) == (2, 2)
    assert finding.factors == pytest.approx((2, 2))


def test_what_is_no_fault_is_noted() -> None:
    def with_option(losses: Tensor, mask: Tensor, step_tokens: Tensor, num_item: Any = None) -> Tensor:
        return share(losses, mask, step_tokens)

    default, note = check_loss(with_option, "token_mean", call=ADDED, draws=4).notes
    assert default == "parameter num_item was left at its default"
    assert "NaN at a masked token" in note
    selecting = lambda losses, mask, step_tokens: torch.where(mask != 0, losses, 0).sum() / step_tokens  # noqa: E731
    assert not check_loss(selecting, "token_mean", call=ADDED, draws=4).notes


def test_methods_and_objects_are_functions_too() -> None:
    class Loss(torch.nn.Module):
        def forward(self, losses: Tensor, mask: Tensor) -> Tensor:
            return total(losses, mask)

        def __call__(self, losses: Tensor, mask: Tensor) -> Any:
            return super().__call__(losses, mask)

        def of_step(self, losses: Tensor, mask: Tensor, step_tokens: Tensor) -> Tensor:
            return share(losses, mask, step_tokens)[None]

    assert check_loss(Loss(), "token_sum", call=ADDED, draws=3).sound
    assert check_loss(Loss().of_step, "token_mean", call=ADDED, draws=3).sound
    assert check_loss(lambda *args: total(*args), "token_sum", call=ADDED, draws=3).sound


def test_what_is_bound_is_not_given() -> None:
    bound = functools.partial(share, step_tokens=1)
    assert check_loss(bound, "token_sum", call=ADDED, draws=4).sound
    assert not check_loss(share, "token_sum", call=ADDED, draws=4).sound


@pytest.mark.parametrize("seed", [0, 1, 20])
def test_a_finding_can_be_had_again_and_the_report_is_plain_data(seed: int) -> None:
    report = check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=4)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["sound"], data["invariant"]) == (False, False)
    assert [finding["cut"] for finding in data["findings"]] == [MICROBATCHES, DP]
    for finding, plain in zip(report.findings, data["findings"], strict=True):
        assert tuple(measure(masked_mean, MEANS, finding.case).weights) == finding.weights
        assert eval(plain["case"], vars(drawn_steps)) == finding.case
    assert str(check_loss(masked_mean, "token_mean", call=MEANS, seed=seed, draws=4)) == str(report)


def test_everything_that_can_be_asked_for_is_given() -> None:
    """Of every name in the table, and no other, in every shape of rows."""
    seen: dict[str, Any] = {}

    def asks_for_all(losses: Any, mask: Any, **given: Any) -> Tensor:
        seen.update(given)
        return sum(part.sum() for part in losses) if isinstance(losses, list) else losses.sum()

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in GIVEN]
    two = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("log_probs", "mask")]
    asks_for_all.__signature__ = inspect.Signature([*two, *parameters])  # type: ignore[attr-defined]
    rows = (DrawnSample((1, 0, 1)), DrawnSample((0, 0)))
    for shape in ("padded", "packed", "lists"):
        seen.clear()
        call = LossCall(takes="log_probs", rows=shape, cp="sum")  # type: ignore[arg-type]
        measure(asks_for_all, call, LossCase(((rows,), (rows[:1],)), 2))
        assert set(seen) == set(GIVEN)
        assert (int(seen["step_tokens"]), int(seen["rank_tokens"]), seen["step_samples"]) == (4, 2, 3)
        assert (seen["world_size"], seen["dp_rank"], seen["cp_rank"]) == (4, 1, 1)


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


def items_in_batch(losses: Tensor, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return share(losses, mask, num_items_in_batch)


def policy_gradient(log_probs: Tensor, mask: Tensor, old_log_probs: Tensor, step_tokens: Tensor) -> Tensor:
    return share(-(log_probs - old_log_probs).exp(), mask, step_tokens)


def accepted(loss_fn: Any = share, mode: Any = "token_mean", **options: Any) -> Callable[[], Any]:
    return lambda: check_loss(loss_fn, mode, **{"call": ADDED, "draws": 1, **options})


REFUSALS: dict[str, Refusal] = {
    "a result for a function": (
        accepted(torch.zeros(())), TypeError, "loss_fn is a Tensor.*Pass the function", accepted(),
    ),
    "a function of losses alone": (
        accepted(lambda losses: losses.sum()), TypeError, "takes losses: .*Wrap it: lambda losses, mask",
        accepted(lambda losses, mask: total(losses, mask), "token_sum"),
    ),
    "a parameter that nobody fills": (
        accepted(by_typo), TypeError, "'step_token' that has no default.*Did you mean step_tokens[?]",
        accepted(by_typo, call=replace(ADDED, names={"step_token": "step_tokens"})),
    ),
    "another call's word": (
        accepted(items_in_batch), TypeError, "'num_items_in_batch' that has no default",
        accepted(items_in_batch, call="transformers"),
    ),
    "a function of log-probs given losses": (
        accepted(policy_gradient), TypeError, "asks for 'old_log_probs': .*takes=\"log_probs\"",
        accepted(policy_gradient, call=LossCall(takes="log_probs", dp="sum")),
    ),
    "neither a function nor a mode": (
        lambda: check_loss(draws=1), TypeError, "check_loss of nothing.*Give loss_fn or mode",
        lambda: check_loss(mode="token_sum", draws=1),
    ),
    "responses that are not packed": (
        lambda: LossCall(cp_cut="responses", cp="sum"), ValueError, "cp_cut is 'responses', and LossCall.rows 'padded'",
        lambda: LossCall(cp_cut="responses", cp="sum", rows="packed"),
    ),
    "an unknown call": (
        accepted(call="verk"), ValueError, "call 'verk': .*Did you mean verl[?]", accepted(call="pytorch"),
    ),
    "a trainer of one's own": (
        accepted(call=object()), TypeError, "call is a object: .*Choose one of pytorch, ", accepted(),
    ),
    "a word for neither sum nor mean": (
        lambda: LossCall(dp="average"), ValueError, "LossCall.dp 'average'", lambda: LossCall(dp="mean"),  # type: ignore
    ),
    "context parallelism as a flag": (
        lambda: LossCall(cp=True), ValueError, "LossCall.cp True", lambda: LossCall(cp="sum"),  # type: ignore
    ),
    "a cut for no ranks": (
        lambda: LossCall(cp_cut="gathered"), ValueError, "cp_cut is 'gathered', and LossCall.cp None",
        lambda: LossCall(cp_cut="gathered", cp="mean"),
    ),
    "a divisor of no mode": (
        accepted(mode=None, divisor=8), ValueError, "divisor 8 and units None without a mode", accepted(mode=None),
    ),
    "a flag that is none": (
        lambda: LossCall(split_rollouts="no"), TypeError, "LossCall.split_rollouts is 'no'",  # type: ignore
        lambda: LossCall(split_rollouts=False),
    ),
    "a name for nothing": (
        lambda: LossCall(names={"n": "tokens"}), ValueError, "'tokens': .*step_tokens",
        lambda: LossCall(names={"n": "step_tokens"}),
    ),
    "names that are no mapping": (
        lambda: LossCall(names=["step_tokens"]), TypeError, "LossCall.names is a list",  # type: ignore[arg-type]
        lambda: LossCall(names={}),
    ),
    "no draws": (accepted(draws=0), ValueError, "draws is 0", accepted()),
    "a seed below 0": (accepted(seed=-1), ValueError, "seed is -1", accepted(seed=1)),
    "constant without its divisor": (
        accepted(mode="constant"), ValueError, "divisor", accepted(mode="constant", divisor=8.0),
    ),
    "losses that are not reduced": (
        accepted(lambda losses, mask: losses * mask), ValueError,
        "returns torch.float32 of shape \\(2, 3\\), not one number", accepted(),
    ),
    "metrics beside the loss": (
        accepted(lambda losses, mask: (total(losses, mask), {})), ValueError,
        "returns a tuple, no tensor: return the loss alone", accepted(),
    ),
    "a loss without a graph": (
        accepted(lambda losses, mask: total(losses, mask).detach()), ValueError, "has no graph", accepted(),
    ),
    "lists to a function of rows": (
        accepted(call=LossCall(rows="lists")), ValueError, "raises TypeError",
        accepted(total_of_lists, "token_sum", call=LossCall(rows="lists", dp="sum")),
    ),
}  # fmt: skip


@each_of(REFUSALS)
def test_refused(refused: Any, error: type[Exception], text: str, accepted: Any) -> None:
    check_refusal(refused, error, text, accepted)


def test_the_functions_own_error_is_the_cause() -> None:
    with pytest.raises(ValueError, match="raises ZeroDivisionError") as caught:
        check_loss(lambda losses, mask: losses.sum() / (1 // 0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

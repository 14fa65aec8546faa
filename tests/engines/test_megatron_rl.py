"""The `loss_func` for Megatron-LM's train_rl.py against the float64 formulas of the modes, on Megatron's real schedule.

`forward_step` below has the shape of train_rl.py's: it takes a batch of its iterator and returns per-token losses and a
partial of `loss_func`. The model is a table of losses, so its gradient is the tokens' weights. Not exercised:
train_rl.py itself (real/test_real_train_rl.py, which CI skips: it has no checkout), a language model, NCCL.
"""

import contextlib
import io
import math
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from logged_means import logged_means
from page_promises import FAULTS, GROUPS
from promises import NOT_PROVED, NOT_SEEN
from ranks import run_ranks
from torch import Tensor
from train_rl_in_small import (
    SEQ_LENGTH,
    Bin,
    Row,
    batch_of,
    install_state,
    loss_func,
    make_rows,
    runtime_state,
    step_of,
    terms,
)

pytest.importorskip("megatron.training")

from megatron_rl_loss import Microbatch, add_loss_aggregation_args
from megatron_rl_loss.engines import megatron_rl

KEYS = ["pg_loss"] + [
    f"rl/{name}"
    for name in ("kl_term", "pi_over_pi_old", "entropy_term", "truncated_from_above", "truncated_from_below")
]


# --- on Megatron


@dataclass(frozen=True)
class Case:
    """A step, and the flags of a launch; without a mode it is stock."""

    mode: str | None
    divisor: float | None = None
    units: str = "active"
    packed: bool = True
    cp_losses: Any = "gathered"
    seed: int = 3
    masks_by: int = 0  # positions that masks are wrong by
    group_size: int | None = None
    fault: str = ""  # of the prompts' ids

    def step(self, dp: int, cp: int) -> tuple[list[Row], list[list[Bin]]]:
        return step_of(self.seed, dp, cp, packed=self.packed, cp_losses=self.cp_losses)


def run_on_megatron(cp: int, cases: list[Case]) -> list[tuple[Tensor, dict[str, float]]]:
    """On a rank: the gradient by loss after Megatron's schedule, DDP and finalisation, and what it would log."""
    monkeypatch = pytest.MonkeyPatch()  # for the life of this process
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from table_step import start, table_model

    state = start(cp=cp)
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    dp = state.get_data_parallel_world_size()
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    rows_of = megatron_rl.rows_of

    def run(case: Case) -> tuple[Tensor, dict[str, float]]:
        def shifted(masks: Tensor, edges: Any, cp_losses: Any) -> Any:
            return rows_of(masks.roll(case.masks_by, 1), edges, cp_losses)

        monkeypatch.setattr(megatron_rl, "rows_of", shifted)
        rows, dealt = case.step(dp, cp)
        bins = dealt[dp_rank]
        install_state(runtime_state(bins, rows), monkeypatch)
        table = [*torch.cat([row.sample.poisoned().losses for row in rows]).tolist(), math.nan]
        masks = torch.cat([row.token_mask[1:] for row in rows] + [torch.zeros(1)])
        first = [sum(len(row.losses) for row in rows[:i]) for i in range(len(rows))]
        batches = [batch_of(of_bin, rows, index) for index, of_bin in enumerate(bins)]

        def bin_of(batch: Any) -> Bin:
            return next(of_bin for known, of_bin in zip(batches, bins, strict=True) if known is batch)

        def forward_step(iterator: Iterator[Any], model: Any, loss_only: bool = False) -> Any:
            of_bin = bin_of(next(iterator))
            held = of_bin.held(rows, case.cp_losses, cp_rank, cp)
            numbers = of_bin.shape(torch.tensor([-1 if at is None else first[at[0]] + at[1] for at in held]))
            output = model(numbers % len(masks))
            return output, terms(output, masks[numbers])

        ids = [row.prompt for row in rows]
        ids = FAULTS[case.fault](ids) if case.fault else ids

        def prompts(batch: Any) -> dict[str, list[int]]:
            return {"prompt_ids": [ids[i] for i in bin_of(batch).numbers]}

        schedule, wrapped = get_forward_backward_func(), forward_step
        if case.mode is not None:
            flags = ["--loss-aggregation", case.mode, "--loss-aggregation-units", "active"]
            flags += ["--loss-aggregation-divisor", str(case.divisor)] if case.divisor else []
            aggregation = megatron_rl.loss_aggregation(
                parsed(*flags, grpo_group_size=case.group_size), cp_losses=case.cp_losses, ids_of=prompts
            )
            schedule, wrapped = aggregation.wrap_schedule(schedule), megatron_rl.with_loss_aggregation(forward_step)
        model = table_model(table)
        model.zero_grad_buffer()
        sizes = {"num_microbatches": len(batches), "seq_length": 8, "micro_batch_size": 1}
        stored = schedule(forward_step_func=wrapped, data_iterator=iter(batches), model=model, **sizes)
        return model.module.losses.main_grad.double().cpu(), logged_means(stored)

    return [run(case) for case in cases]


def printed_on_megatron(cp: int, cases: list[Case]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_on_megatron(cp, cases)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_ids_of_prompts_are_not_proved(packed: bool) -> None:
    """A prompt has three rows, of which one may be masked. Ids alone tell of groups that are larger, or of one row."""
    (row,) = (row for row in GROUPS if row.by is not None and "train_rl.py" in row.words[0])
    cases = [Case("prompt_mean", packed=packed, group_size=3, fault=fault) for fault in ("", *FAULTS)]
    printed, _ = run_ranks(2, printed_on_megatron, 1, cases)
    said = re.findall("aggregation proved on |NOT PROVED", printed)
    assert said == [
        {NOT_SEEN: "aggregation proved on ", NOT_PROVED: NOT_PROVED}[end] for end in (NOT_SEEN, *row.outcomes)
    ]


def error_of(gradient: Tensor, expected: list[Tensor]) -> float:
    whole = torch.cat([*expected, torch.zeros(1)])  # the last entry is padding
    return float((gradient - whole).abs().max() / whole.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cp", "packed", "cp_losses"),
    [(1, True, "gathered"), (2, True, "sliced"), (2, False, "gathered"), (4, False, "sliced")],
)
def test_every_mode_is_exact(cp: int, packed: bool, cp_losses: str) -> None:
    """The gradient is the mode's; reports are the loss that is trained on, and token means over the step."""
    modes = [("sample_mean", None), ("prompt_mean", None), ("token_mean", None), ("constant", 7.0)]
    cases = [Case(mode, divisor, packed=packed, cp_losses=cp_losses, seed=cp) for mode, divisor in modes]
    rows, _ = cases[0].step(4 // cp, cp)
    samples = [row.sample for row in rows]
    active = torch.cat([row.losses[row.token_mask[1:] != 0] for row in rows])
    metrics = [2 * active, 3 * active, 4 * active, (active > 0).double(), (active < -1).double()]
    bound = oracle.sum_error(sum(len(row.losses) for row in rows))
    for results in run_ranks(4, run_on_megatron, cp, cases):
        for case, (gradient, logged) in zip(cases, results, strict=True):
            assert case.mode is not None
            assert error_of(gradient, oracle.step_gradient(case.mode, samples, case.divisor, "active")) < oracle.EXACT
            loss = float(oracle.step_loss(case.mode, samples, case.divisor, "active"))
            assert list(logged) == KEYS
            assert logged["pg_loss"] == pytest.approx(loss, abs=3 * bound)  # shares are at most 3
            for name, values in zip(KEYS[1:], metrics, strict=True):
                assert logged[name] == pytest.approx(float(values.mean()), abs=12 * bound)  # 4 * 3 at most


@pytest.mark.slow
def test_negative_controls() -> None:
    """Stock is a mean over bins and none of the modes; masks that are a position off reach losses of no token."""
    stock, late = Case(None), Case("token_mean", packed=False, masks_by=1)
    rows, dealt = stock.step(2, 1)
    ((of_stock, _), (of_late, logged)), _ = run_ranks(2, run_on_megatron, 1, [stock, late])
    samples = [row.sample for row in rows]
    assert math.isnan(logged["pg_loss"])
    assert error_of(of_late, oracle.step_gradient("token_mean", samples)) > 1e-2
    for mode in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        for units in ("all", "active"):
            divisor = oracle.divisor_of(mode, 7.0)
            assert error_of(of_stock.nan_to_num(), oracle.step_gradient(mode, samples, divisor, units)) > 1e-2
    bins = [of_bin for bins in dealt for of_bin in bins]
    weights = {
        i: 1 / len(bins) / max(sum(float(rows[j].token_mask.sum()) for j in of_bin.numbers), 1)
        for of_bin in bins
        for i in of_bin.numbers
    }
    expected = [row.token_mask[1:].double() * weights[i] for i, row in enumerate(rows)]
    assert error_of(of_stock.nan_to_num(), expected) < oracle.EXACT


# --- refusals


def parsed(*flags: str, **megatron: Any) -> Namespace:
    args = add_loss_aggregation_args(ArgumentParser()).parse_args(flags)
    vars(args).update({"check_for_spiky_loss": False} | megatron)
    return args


def asked(mode: str, *flags: str, cp_losses: Any = "gathered", **megatron: Any) -> str:
    args = parsed("--loss-aggregation", mode, *flags, **megatron)
    return megatron_rl.loss_aggregation(args, cp_losses=cp_losses).settings.modes.policy.mode.name


ACTIVE, DIVISOR = ("--loss-aggregation-units", "active"), ("--loss-aggregation-divisor", "8")


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        *((flags, {}, "Add --loss-aggregation-units active") for flags in (["sample_mean"], ["constant", *DIVISOR])),
        (["token_mean"], {"cp_losses": "zigzag"}, "Choose one of gathered, sliced"),
        (["token_mean"], {"check_for_spiky_loss": True}, "a policy loss is near 0"),
    ],
)
def test_unusable_settings(arguments: Any, options: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    with pytest.raises(ValueError, match=error):
        asked(*arguments, **options)
    assert asked(*arguments, *ACTIVE) == arguments[0]
    assert asked("token_mean") == "token_mean"


def test_whether_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's ignore_unknown_args lets a misspelt flag pass."""
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    assert not megatron_rl.is_asked_for(parsed(calculate_per_token_loss=True))  # that is Megatron's
    for flags in (ACTIVE, ["--custom-pg-loss-reducer-function-path", "a.b"]):
        assert megatron_rl.is_asked_for(parsed(*flags)), flags
    with pytest.raises(ValueError, match="the flags were never registered"):
        megatron_rl.is_asked_for(Namespace())
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--loss-agregation", "sample_mean"])
    with pytest.raises(ValueError, match="Write --loss-aggregation"):
        megatron_rl.is_asked_for(parsed())


ON_FIRST, NUMBER = make_rows(1, 2), (torch.tensor(0),)
ON_FIRST[1].token_mask[0] = 1
UNPACKED = Bin([0, 1], [], False)


@pytest.mark.parametrize(
    ("batch", "held", "error"),
    [
        ([torch.zeros(2)] * 5, Bin([0], [0, 4], True), "a batch of 5"),
        (torch.zeros(3), Bin([0], [0, 4], True), "a batch of Tensor"),
        (NUMBER, Bin([0], [0, 99], True), "from 0 to 99 in a bin of 96"),
        (NUMBER, Bin([0], [2, 40], True), "from 2 to 40"),
        (NUMBER, Bin.pack(ON_FIRST, [0, 1], 1), "set on a sequence's first token"),
        (batch_of(UNPACKED, ON_FIRST, 0), UNPACKED, "set on a sequence's first token"),
    ],
)
def test_unknown_batches_and_masks_on_first_tokens(
    batch: Any, held: Bin, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_state(runtime_state([held], ON_FIRST), monkeypatch)
    with pytest.raises(ValueError, match=error):
        megatron_rl.samples_of(batch)


def test_a_row_that_ends_with_its_bin_and_an_empty_bin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's slot loses the position that predicts nothing; an empty bin has no sample."""
    bins = [Bin([0, 1], [0, 5, SEQ_LENGTH], True), Bin([], [0], True)]
    rows = [Row(torch.ones(5), torch.zeros(4).double(), 0), Row(torch.ones(91), torch.zeros(90).double(), 0)]
    for row in rows:
        row.token_mask[0] = 0
    install_state(runtime_state(bins, rows), monkeypatch)
    full = megatron_rl.samples_of((torch.tensor(0),))
    assert [mask.sum().item() for mask in full.loss_masks] == [4, 90]
    assert full.local(0, 1).mask.tolist() == [1, 1, 1, 1, 0] + [1] * 90
    for cp_losses, size in (("gathered", SEQ_LENGTH - 1), ("sliced", SEQ_LENGTH)):
        empty = megatron_rl.samples_of((torch.tensor(1),), cp_losses=cp_losses)  # type: ignore[arg-type]
        assert len(empty) == 0
        assert len(empty.local(0, 1)) == size


def test_what_is_no_train_rl_forward_step_is_refused() -> None:
    microbatch = object.__new__(Microbatch)
    microbatch.data = None

    def other(mask: Tensor, output_tensor: Tensor) -> None: ...

    for reduce in (loss_func, partial(other, torch.ones(3))):
        wrapped = megatron_rl.with_loss_aggregation(lambda iterator, model, reduce=reduce: (torch.zeros(3), reduce))
        with pytest.raises(ValueError, match=r"it must be a partial of loss_func\(loss_mask, kl_term"):
            wrapped(iter([microbatch]), None)
    with pytest.raises(TypeError, match=r"with aggregation\.attached\(\)"):
        wrapped(iter([None]), None)

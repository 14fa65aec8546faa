"""The `loss_func` for Megatron-LM's train_rl.py against the float64 formulas of the modes.

`forward_step` below has the shape of train_rl.py's (core_v0.19.0 and main d98e8a64): it takes a batch of its iterator
and returns per-token losses and a partial of `loss_func`. `megatron_step` states Megatron's scaling of a 3-tuple
independently, in float64, over every DP rank, micro-batch and CP rank. Not exercised: train_rl.py itself, a language
model, NCCL. Megatron's real schedule, DDP and groups are, at the end.
"""

import math
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

pytest.importorskip("megatron.training")

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.frameworks import megatron_rl
from megatron_rl_loss.megatron import Microbatch
from megatron_rl_loss.megatron.flags import AggregationSettings, add_loss_aggregation_args
from megatron_rl_loss.megatron.microbatch import Step

TOLERANCE = oracle.EXACT
LAYOUTS = [(dp, cp) for dp in (1, 2, 4) for cp in (1, 2, 4)]
MODES = [("sample_mean", None), ("prompt_mean", None), ("token_mean", None), ("constant", 7.0)]
KEYS = ["lm loss"] + [
    f"rl/{name}"
    for name in ("kl_term", "pi_over_pi_old", "entropy_term", "truncated_from_above", "truncated_from_below")
]
SEQ_LENGTH = 96


# --- a train_rl.py in small: rows, bins, the iterator's batches, forward_step


@dataclass
class Row:
    """A row of tokens: a mask entry a token, and the loss of every token but the first, at the position before it."""

    token_mask: Tensor
    losses: Tensor
    prompt: int

    @property
    def sample(self) -> oracle.Sample:
        return oracle.Sample(self.losses, self.token_mask[1:], None, self.prompt)


def make_rows(seed: int, num_rows: int) -> list[Row]:
    """Ragged rows whose prompts are masked; some masked in whole, as those that train_rl.py fills up with."""
    rng = random.Random(seed)
    rows = []
    for i in range(num_rows):
        length = rng.choice([2, 3, 5, 9, 14, 20])
        prompt = rng.randrange(1, length)
        mask = [0.0] * prompt + [float(rng.random() < 0.8) for _ in range(length - prompt)]
        if i in (1, 6):
            mask = [0.0] * length
        losses = torch.tensor([rng.uniform(-3, 3) for _ in range(length - 1)], dtype=torch.float64)
        rows.append(Row(torch.tensor(mask), losses, i // 3))
    return rows


@dataclass
class Bin:
    """What a rank's micro-batch holds: rows (by number) in slots of a packed row, or a row each."""

    numbers: list[int]
    starts: list[int]
    packed: bool

    @staticmethod
    def pack(rows: list[Row], numbers: list[int], slot_multiple: int) -> "Bin":
        starts = [0]
        for i in numbers:
            starts.append(starts[-1] + -(-len(rows[i].token_mask) // slot_multiple) * slot_multiple)
        return Bin(numbers, starts, True)

    def slots(self, rows: list[Row]) -> list[list[oracle.Token]]:
        """By token position p: the row and the place of the loss at p, which is that of token p + 1."""
        sizes = [SEQ_LENGTH] * len(self.numbers)
        if self.packed:
            sizes = [end - begin for begin, end in pairwise(self.starts)]
        slots: list[list[oracle.Token]] = [
            [(i, t) if t + 1 < len(rows[i].token_mask) else None for t in range(size)]
            for i, size in zip(self.numbers, sizes, strict=True)
        ]
        if self.packed and self.starts[-1] < SEQ_LENGTH:
            slots.append([None] * (SEQ_LENGTH - self.starts[-1]))
        return slots

    def held(self, rows: list[Row], cp_losses: str, cp_rank: int, cp: int) -> list[oracle.Token]:
        slots = self.slots(rows)
        if cp_losses == "sliced":
            return oracle.zigzag(slots, cp_rank, cp)
        whole = [token for slot in slots for token in slot]
        rest = [whole[k : k + SEQ_LENGTH] for k in range(0, len(whole), SEQ_LENGTH)]
        return [token for row in rest for token in row[:-1]]

    def token_masks(self, rows: list[Row]) -> Tensor:
        masks = torch.zeros(1 if self.packed else len(self.numbers), SEQ_LENGTH)
        for k, i in enumerate(self.numbers):
            begin = self.starts[k] if self.packed else 0
            masks[0 if self.packed else k, begin : begin + len(rows[i].token_mask)] = rows[i].token_mask
        return masks


def runtime_state(bins: list[Bin], rows: list[Row]) -> SimpleNamespace:
    """Megatron's RL runtime state, as far as it tells of the packing of one DP rank."""
    masks = torch.cat([one.token_masks(rows) for one in bins]) if bins else torch.zeros(0, SEQ_LENGTH)
    info = SimpleNamespace(
        bin_seq_indices=[one.numbers for one in bins],
        seq_starts={k: one.starts if one.numbers else [] for k, one in enumerate(bins)},
        seq_lengths=[len(row.token_mask) for row in rows],
    )
    return SimpleNamespace(packing_context=SimpleNamespace(packed_loss_mask=masks, packing_info=info))


def install_state(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    module = ModuleType("megatron.rl.rl_utils")
    module.get_rl_runtime_state = lambda: state  # type: ignore[attr-defined]
    for name, value in (("megatron.rl", ModuleType("megatron.rl")), ("megatron.rl.rl_utils", module)):
        if monkeypatch is None:
            sys.modules[name] = value
        else:
            monkeypatch.setitem(sys.modules, name, value)


def batch_of(one: Bin, rows: list[Row], index: int) -> Any:
    if one.packed:
        return (torch.tensor(index),)
    masks = one.token_masks(rows)
    nothing = torch.zeros(len(one.numbers))
    return [nothing, nothing, nothing, masks, nothing, nothing, nothing]


def loss_func(
    loss_mask: Tensor,
    kl_term: Tensor,
    ratios: Tensor,
    entropy_term: Tensor,
    truncated_from_above: Tensor,
    truncated_from_below: Tensor,
    output_tensor: Tensor,
) -> Any:
    """train_rl.py's (0.19 at cp 1, main): a bin's token sum and its token count, of at least 1."""
    total = loss_mask.sum().clamp(min=1)
    losses = torch.nan_to_num(output_tensor)
    return (losses * loss_mask).sum(), total.int(), {}


def terms(output: Tensor, loss_mask: Tensor) -> Any:
    values = output.detach()
    return partial(loss_func, loss_mask, 2 * values, 3 * values, 4 * values, values > 0, values < -1)


# --- Megatron's scaling, stated independently


def step_of(seed: int, dp: int, cp: int, *, packed: bool, cp_losses: str) -> tuple[list[Row], list[list[Bin]]]:
    """Rows dealt unevenly over bins of DP ranks: all ranks have three bins, some may be empty when packed."""
    rows = make_rows(seed, 13)
    rng = random.Random(seed)
    # 2 * cp as main pads slots under context parallelism; unaligned without it.
    multiple = 2 * cp if cp_losses == "sliced" or cp > 1 else 1
    dealt: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(dp)]
    for i in rng.sample(range(len(rows)), len(rows)):
        fits = [
            numbers
            for bins in dealt
            for numbers in bins
            if not packed or Bin.pack(rows, [*numbers, i], multiple).starts[-1] <= SEQ_LENGTH
        ]
        rng.choice(fits).append(i)
    if not packed:  # every unpacked micro-batch has a row
        everyone = [numbers for bins in dealt for numbers in bins]
        for numbers in everyone:
            if not numbers:
                numbers.append(max(everyone, key=len).pop())
    return rows, [
        [Bin.pack(rows, numbers, multiple) if packed else Bin(numbers, [], False) for numbers in bins] for bins in dealt
    ]


def megatron_step(
    rows: list[Row],
    dealt: list[list[Bin]],
    cp: int,
    settings: AggregationSettings | None,
    cp_losses: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    described_as: str | None = None,
    check_for_nan: bool = True,
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Value, gradient and logged report of a step; without settings, of the stock `loss_func`."""
    monkeypatch.setattr(megatron_rl, "get_args", lambda: Namespace(check_for_nan_in_loss_and_grad=check_for_nan))
    dp = len(dealt)
    samples = [row.sample for row in rows]
    totals = StepTotals.from_loss_masks([one.mask for one in samples], prompt_ids=[row.prompt for row in rows])
    leaves = [row.sample.poisoned().losses.float().requires_grad_() for row in rows]
    padding = torch.tensor(float("nan"), requires_grad=True)
    value = torch.zeros((), dtype=torch.float64)
    logged: dict[str, Tensor] = {}
    for bins in dealt:
        install_state(runtime_state(bins, rows) if bins[0].packed else SimpleNamespace(), monkeypatch)
        steps = []
        for cp_rank in range(cp):
            place = {"num_microbatches": len(bins), "cp_rank": cp_rank, "cp_size": cp, "dp_cp_size": dp * cp}
            steps.append(settings and Step(aggregation=settings.aggregation, totals=totals, **place))
        for index, one in enumerate(bins):
            batch = batch_of(one, rows, index)
            for cp_rank, step in enumerate(steps):
                held = one.held(rows, cp_losses, cp_rank, cp)
                parts = [padding if at is None else leaves[at[0]][at[1]] for at in held]
                num_rows = 1 if one.packed else len(one.numbers)
                output = torch.stack(parts).reshape(num_rows, -1)
                held_mask = torch.tensor([0.0 if at is None else rows[at[0]].token_mask[at[1] + 1] for at in held])

                def forward_step(
                    iterator: Iterator[Any],
                    model: Any,
                    loss_only: bool = False,
                    output: Tensor = output,
                    mask: Tensor = held_mask,
                ) -> Any:
                    next(iterator)
                    return output, terms(output, mask.reshape(output.shape))

                if step is None:
                    output, reduce = forward_step(iter([batch]), None)
                else:
                    prompts = [rows[i].prompt for i in one.numbers]
                    described = megatron_rl.samples_of(batch, cp_losses=described_as or cp_losses, prompt_ids=prompts)
                    wrapped = megatron_rl.with_loss_aggregation(forward_step)
                    output, reduce = wrapped(iter([Microbatch(batch, described, step)]), None)
                loss, num_tokens, report = reduce(output)
                value = value + loss.double() / num_tokens.clamp(min=1) / len(bins) / (dp * cp)
                for name, pair in report.items():
                    logged[name] = logged.get(name, torch.zeros(2, dtype=torch.float64)) + pair.double()
    gradients = list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    return float(value.detach()), gradients, {name: float(pair[0] / pair[1]) for name, pair in logged.items()}


def disagreement(result: Any, rows: list[Row], mode: str, divisor: float | None, units: str = "active") -> float:
    value, gradients, _ = result
    samples = [row.sample for row in rows]
    expected = torch.cat(oracle.step_gradient(mode, samples, divisor, units))
    in_value = abs(value - float(oracle.step_loss(mode, samples, divisor, units)))
    in_gradient = (torch.cat([one.double() for one in gradients]) - expected).abs().max() / expected.abs().max()
    scale = oracle.step_scale(mode, samples, divisor, units)
    return oracle.worst_error(in_value / scale, float(in_gradient), oracle.num_tokens(samples))


# --- parity


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
@pytest.mark.parametrize("cp_losses", ["gathered", "sliced"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_every_mode_is_exact(dp: int, cp: int, cp_losses: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dealt = step_of(dp + cp, dp, cp, packed=packed, cp_losses=cp_losses)
    for mode, divisor in MODES:
        settings = AggregationSettings.resolve(mode=mode, divisor=divisor, units="active")
        result = megatron_step(rows, dealt, cp, settings, cp_losses, monkeypatch)
        assert disagreement(result, rows, mode, divisor) < TOLERANCE
        assert_report(result[2], result[0], rows)


def assert_report(logged: dict[str, float], loss: float, rows: list[Row]) -> None:
    """The keys of train_rl.py: the loss that is trained on, and token means over the step."""
    assert list(logged) == KEYS
    terms = sum(len(row.losses) for row in rows)
    # The shares are at most 3, and added up in float32 on the one side, in float64 on the other.
    assert logged["lm loss"] == pytest.approx(loss, abs=3 * oracle.sum_error(terms))
    active = torch.cat([row.losses[row.token_mask[1:] != 0] for row in rows])
    expected = [(2 * active), (3 * active), (4 * active), (active > 0).double(), (active < -1).double()]
    for name, values in zip(KEYS[1:], expected, strict=True):
        assert logged[name] == pytest.approx(float(values.mean()), abs=12 * oracle.sum_error(terms))  # 4 * 3 at most


# --- negative controls


@pytest.mark.parametrize("packed", [True, False])
def test_negative_control_stock_is_a_mean_over_bins_and_none_of_the_modes(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, dealt = step_of(3, 2, 1, packed=packed, cp_losses="gathered")
    result = megatron_step(rows, dealt, 1, None, "gathered", monkeypatch)
    of_bins = []
    for one in (one for bins in dealt for one in bins):
        members = [rows[i].sample for i in one.numbers]
        of_bins.append(float(oracle.step_loss("token_mean", members)))
    error = 3 * oracle.sum_error(SEQ_LENGTH)
    assert result[0] == pytest.approx(sum(of_bins) / len(of_bins), abs=error)  # what the documents say of it
    for mode, divisor in MODES:
        for units in ("all", "active"):
            assert disagreement(result, rows, mode, divisor, units) > 1e-2


def test_negative_control_gathered_losses_taken_for_sliced_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dealt = step_of(3, 2, 2, packed=True, cp_losses="gathered")
    settings = AggregationSettings.resolve(mode="token_mean")
    for cp_losses, described_as in (("gathered", "sliced"), ("sliced", "gathered")):
        with pytest.raises(ValueError, match="per_token_loss of shape"):
            megatron_step(rows, dealt, 2, settings, cp_losses, monkeypatch, described_as=described_as)


def test_negative_control_fully_masked_rows_count_with_unit_counting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dealt = step_of(3, 2, 1, packed=True, cp_losses="gathered")
    result = megatron_step(rows, dealt, 1, AggregationSettings.resolve(mode="sample_mean"), "gathered", monkeypatch)
    assert disagreement(result, rows, "sample_mean", None, "all") < TOLERANCE
    assert disagreement(result, rows, "sample_mean", None, "active") > 1e-2


def test_negative_control_masks_that_are_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dealt = step_of(3, 2, 1, packed=False, cp_losses="gathered")
    sound = megatron_rl.rows_of

    def unshifted(masks: Tensor, edges: Any, cp_losses: Any) -> Any:
        return sound(torch.nn.functional.pad(masks, (1, 0))[:, :-1], edges, cp_losses)

    monkeypatch.setattr(megatron_rl, "rows_of", unshifted)
    settings = AggregationSettings.resolve(mode="token_mean")
    result = megatron_step(rows, dealt, 1, settings, "gathered", monkeypatch, check_for_nan=False)
    assert math.isnan(result[0])  # a position too late, losses are looked at that stand for no token: NaN here


# --- refusals


def parsed(*flags: str, **megatron: Any) -> Namespace:
    args = add_loss_aggregation_args(ArgumentParser()).parse_args(flags)
    vars(args).update({"check_for_spiky_loss": False} | megatron)
    return args


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_unit_counting_all_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    flags = ["--loss-aggregation", mode, *(["--loss-aggregation-divisor", "8"] if mode == "constant" else [])]
    with pytest.raises(ValueError, match="Add --loss-aggregation-units active"):
        megatron_rl.loss_aggregation(parsed(*flags))
    assert megatron_rl.loss_aggregation(parsed(*flags, "--loss-aggregation-units", "active")).settings.mode_name == mode
    assert megatron_rl.loss_aggregation(parsed("--loss-aggregation", "token_mean")).settings.mode_name == "token_mean"


def test_without_a_flag_train_rl_is_to_train_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    assert not megatron_rl.is_asked_for(parsed())
    assert not megatron_rl.is_asked_for(parsed(calculate_per_token_loss=True))  # that is Megatron's
    for flags in (
        ["--loss-aggregation", "sample_mean"],
        ["--loss-aggregation-units", "active"],
        ["--loss-aggregation-divisor", "8"],
        ["--loss-aggregation-empty-step", "error"],
        ["--custom-pg-loss-reducer-function-path", "a.b"],
    ):
        assert megatron_rl.is_asked_for(parsed(*flags)), flags


def test_a_misspelt_flag_does_not_train_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's ignore_unknown_args lets it pass."""
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--loss-agregation", "sample_mean"])
    with pytest.raises(ValueError, match="Write --loss-aggregation"):
        megatron_rl.is_asked_for(parsed())
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    with pytest.raises(ValueError, match="the flags were never registered"):
        megatron_rl.is_asked_for(Namespace())


def test_other_unusable_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_rl.py"])
    args = parsed("--loss-aggregation", "token_mean")
    with pytest.raises(ValueError, match="Choose one of gathered, sliced"):
        megatron_rl.loss_aggregation(args, cp_losses="zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a policy loss is around 0"):
        megatron_rl.loss_aggregation(parsed("--loss-aggregation", "token_mean", check_for_spiky_loss=True))


@pytest.mark.parametrize(
    ("batch", "edges", "error"),
    [
        ([torch.zeros(2)] * 5, None, "a batch of 5"),
        (torch.zeros(3), None, "a batch of Tensor"),
        ((torch.tensor(0),), [0, 99], "from 0 to 99 in a bin of 96"),
        ((torch.tensor(0),), [2, 40], "from 2 to 40"),
    ],
)
def test_unknown_batches_are_refused(batch: Any, edges: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = runtime_state([Bin([0], edges or [0, 4], True)], make_rows(1, 3))
    install_state(state, monkeypatch)
    with pytest.raises(ValueError, match=error):
        megatron_rl.samples_of(batch)


@pytest.mark.parametrize("packed", [True, False])
def test_a_mask_on_a_first_token_is_refused(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(1, 2)
    rows[1].token_mask[0] = 1
    one = Bin.pack(rows, [0, 1], 1) if packed else Bin([0, 1], [], False)
    install_state(runtime_state([one], rows), monkeypatch)
    with pytest.raises(ValueError, match="set on a sequence's first token"):
        megatron_rl.samples_of(batch_of(one, rows, 0))


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


def test_a_nan_share_is_handed_to_megatrons_rerun_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, bool]] = []

    def validate_result(*, result: Tensor, rejection_func: Any, fatal: bool, **_: Any) -> None:
        seen.append((float(result), fatal and bool(rejection_func(result))))

    monkeypatch.setattr(
        megatron_rl, "get_rerun_state_machine", lambda: SimpleNamespace(validate_result=validate_result)
    )
    rows, dealt = step_of(3, 1, 1, packed=True, cp_losses="gathered")
    megatron_step(rows, dealt, 1, AggregationSettings.resolve(mode="token_mean"), "gathered", monkeypatch)
    assert len(seen) == 3
    assert not any(rejected for _, rejected in seen)
    rows[0].losses[rows[0].token_mask[1:] != 0] = float("nan")
    megatron_step(rows, dealt, 1, AggregationSettings.resolve(mode="token_mean"), "gathered", monkeypatch)
    assert [math.isnan(value) for value, _ in seen[3:]] == [rejected for _, rejected in seen[3:]]
    assert sum(rejected for _, rejected in seen) == 1


def test_what_is_no_train_rl_forward_step_is_refused() -> None:
    samples = Samples([torch.ones(3)])
    step = Step(
        aggregation=AggregationSettings.resolve().aggregation,
        totals=StepTotals.from_loss_masks(samples.loss_masks),
        num_microbatches=1,
        cp_rank=0,
        cp_size=1,
        dp_cp_size=1,
    )

    def microbatches() -> Iterator[Microbatch]:
        return iter([Microbatch(None, samples, step)])

    def other(mask: Tensor, output_tensor: Tensor) -> None: ...

    for reduce in (loss_func, partial(other, torch.ones(3))):
        wrapped = megatron_rl.with_loss_aggregation(lambda iterator, model, reduce=reduce: (torch.zeros(3), reduce))
        with pytest.raises(ValueError, match=r"it must be a partial of loss_func\(loss_mask, kl_term"):
            wrapped(microbatches(), None)
    with pytest.raises(TypeError, match=r"with aggregation\.attached\(\)"):
        wrapped(iter([None]), None)


# --- Megatron's real schedule, DDP and groups


def errors_on_megatron(cp: int, packed: bool, cp_losses: Any) -> list[float]:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from table_step import relative_error, start, table_model

    state = start(cp=cp)
    sys.argv = ["train_rl.py"]
    megatron_rl.get_args = lambda: Namespace(check_for_nan_in_loss_and_grad=True)
    dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    rows, dealt = step_of(4, state.get_data_parallel_world_size(), cp, packed=packed, cp_losses=cp_losses)
    bins = dealt[dp_rank]
    install_state(runtime_state(bins, rows))
    first = [0]
    for row in rows:
        first.append(first[-1] + len(row.losses))
    table = [float(loss) for row in rows for loss in row.sample.poisoned().losses] + [float("nan")]
    batches = [batch_of(one, rows, index) for index, one in enumerate(bins)]

    def number_of(batch: Any) -> int:
        return next(k for k, known in enumerate(batches) if known is batch)

    def forward_step(iterator: Iterator[Any], model: Any, loss_only: bool = False) -> Any:
        index = number_of(next(iterator))
        held = bins[index].held(rows, cp_losses, cp_rank, cp)
        numbers = torch.tensor([first[-1] if at is None else first[at[0]] + at[1] for at in held])
        output = model(numbers.reshape(1 if packed else len(bins[index].numbers), -1))
        return output, terms(output, torch.zeros(()))

    def prompts(batch: Any) -> list[int]:
        return [rows[i].prompt for i in bins[number_of(batch)].numbers]

    errors = []
    for mode, divisor in MODES:
        flags = ["--loss-aggregation", mode, "--loss-aggregation-units", "active"]
        flags += ["--loss-aggregation-divisor", str(divisor)] if divisor else []
        aggregation = megatron_rl.loss_aggregation(parsed(*flags), cp_losses=cp_losses, prompt_ids_of=prompts)
        model = table_model(table)
        model.zero_grad_buffer()
        stored = aggregation.wrap_schedule(get_forward_backward_func())(
            forward_step_func=megatron_rl.with_loss_aggregation(forward_step),
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=8,
            micro_batch_size=1,
        )
        assert list(stored[0]) == KEYS
        expected = oracle.step_gradient(mode, [row.sample for row in rows], divisor, "active")
        errors.append(relative_error(model.module.losses.main_grad, torch.cat([*expected, torch.zeros(1)])))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("cp_losses", ["gathered", "sliced"])
def test_gradients_through_megatron(cp: int, packed: bool, cp_losses: str) -> None:
    for errors in run_ranks(4, errors_on_megatron, cp, packed, cp_losses):
        assert max(errors) < TOLERANCE

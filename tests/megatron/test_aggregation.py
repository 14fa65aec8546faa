"""The adapter against the real Megatron-Core: DDP, schedules, `finalize_model_grads`, process groups, on gloo ranks.

The model is a table with one parameter for every token of the step, which is that token's loss. So the gradient after
Megatron's whole way (schedule scaling, DDP, reduction, per-token division) is the token's weight, to be compared with
the float64 oracle. Not exercised here: NCCL, GPU kernels, a language model (see test_example.py).
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from table_step import (
    ALL_SETTINGS,
    Batch,
    aggregation,
    dealt,
    one_step,
    relative_error,
    start,
    step_samples,
    table_model,
)

from megatron_rl_loss import BadBatchError, Samples, StepTotals, ZigzagTHD
from megatron_rl_loss.megatron import AggregationSettings

slow = pytest.mark.slow


def errors_in_layout(
    tp: int, cp: int, num_microbatches: int, gathered: bool, uneven: bool, ddp_options: dict[str, Any]
) -> list[Any]:
    """Worst relative errors of gradient, loss and metric for every mode, unit counting and carrier."""
    state = start(tp=tp, cp=cp)
    dp_rank = state.get_data_parallel_rank()
    dp_size = state.get_data_parallel_world_size()
    samples = step_samples(seed=1)
    table = [float(loss) for sample in samples for loss in sample.losses] + [float("nan")]  # padding is NaN
    chosen = dealt(samples, dp_rank, dp_size, num_microbatches)
    if uneven and dp_rank == 0:
        chosen.append([])
    found = []
    for per_token in (False, True):
        model = table_model(table, per_token=per_token, **ddp_options)
        for settings in ALL_SETTINGS:
            batches = [Batch(samples, which, cp, gathered) for which in chosen]
            step = aggregation(**settings, with_per_token_loss=True)
            gradient, logged = one_step(model, batches, step)
            oracle_args = (settings["mode"], samples, settings["divisor"], settings["units"])
            expected = torch.cat([*oracle.step_gradient(*oracle_args), torch.zeros(1)])  # type: ignore[arg-type]
            sample_mean = oracle.step_loss("sample_mean", samples, None, settings["units"])  # type: ignore[arg-type]
            found.append(
                {
                    "case": f"{settings} per_token={per_token}",
                    "gradient": relative_error(gradient, expected),
                    "loss": abs(logged["pg_loss"] - float(oracle.step_loss(*oracle_args)))  # type: ignore[arg-type]
                    / oracle.step_scale(*oracle_args),  # type: ignore[arg-type]
                    "metric": abs(logged["twice"] / 2 - float(sample_mean))
                    / oracle.step_scale("sample_mean", samples, None, settings["units"]),  # type: ignore[arg-type]
                }
            )
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2": (2, {"cp": 2, "num_microbatches": 2}),
    "dp 1": (1, {"num_microbatches": 3}),
    "dp 4": (4, {"num_microbatches": 1}),
    "cp 2 x dp 2": (4, {"cp": 2, "num_microbatches": 3}),
    "cp 4": (4, {"cp": 4, "num_microbatches": 3}),
    "tp 2 x cp 2": (4, {"tp": 2, "cp": 2, "num_microbatches": 2}),
    "cp 2 x dp 2, one DP rank with an empty micro-batch more": (4, {"cp": 2, "num_microbatches": 2, "uneven": True}),
    "cp 2 x dp 2, gathered": (4, {"cp": 2, "num_microbatches": 2, "gathered": True}),
    "cp 2 x dp 2, overlap": (4, {"cp": 2, "num_microbatches": 3, "ddp_options": {"overlap_grad_reduce": True}}),
}
QUICK = ["cp 2"]


@pytest.mark.gpus
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else slow) for name in LAYOUTS])
def test_gradient_loss_and_metrics_equal_the_oracle(name: str) -> None:
    world_size, layout = LAYOUTS[name]
    layout = {"tp": 1, "cp": 1, "gathered": False, "uneven": False, "ddp_options": {}} | layout
    of_sums = oracle.sum_error(oracle.num_tokens(step_samples(seed=1)))
    for rank, cases in enumerate(run_ranks(world_size, functools.partial(errors_in_layout, **layout))):
        assert len(cases) == 2 * len(ALL_SETTINGS)
        for case in cases:
            assert case["gradient"] < oracle.EXACT, (rank, case)
            assert case["loss"] < of_sums, (rank, case)
            assert case["metric"] < of_sums, (rank, case)


def stock_gradient_error(cp: int) -> float:
    """Megatron's own 3-tuple with local token counts instead of our carrier."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state = start(cp=cp)
    samples = step_samples(seed=1)
    table = [float(loss) for sample in samples for loss in sample.losses] + [0.0]
    model = table_model(table)
    batches = [Batch(samples, which, cp) for which in dealt(samples, state.get_data_parallel_rank(), 4 // cp, 3)]
    cp_rank = state.get_context_parallel_rank()

    def forward_step(iterator: Iterator[Batch], model: Any) -> Any:
        batch = next(iterator)
        losses = model(batch.local_numbers(cp_rank, cp).cuda())
        mask = batch.samples.local(cp_rank, cp).mask.cuda()
        num_tokens = (mask != 0).sum().int()
        return losses, lambda losses: ((losses * mask).sum(), num_tokens, {})

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=3, seq_length=8,
        micro_batch_size=1,
    )  # fmt: skip
    expected = torch.cat([*oracle.step_gradient("token_mean", samples), torch.zeros(1)])
    return relative_error(model.module.losses.main_grad.cpu(), expected)


@slow
@pytest.mark.gpus
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_comparison_sees_megatrons_stock_aggregation(cp: int) -> None:
    """Negative control: the same data and comparison, with mean of micro-batch means (museum rows 3 and 9)."""
    assert min(run_ranks(4, functools.partial(stock_gradient_error, cp))) > 0.1


# ---- the look-ahead


def looked_ahead() -> None:
    """Iterators of every kind, one rank."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    start()
    samples = step_samples(seed=2)
    model = table_model([0.0])
    step = aggregation(mode="token_mean")

    def batches(first: int, count: int) -> list[Batch]:
        return [Batch(samples, [(first + i) % len(samples)], 1) for i in range(count)]

    # A plain iterator: exactly the step's micro-batches are taken, the rest stays.
    source = iter(batches(0, 5))
    handed = list(step.begin_step(source, model=model, num_microbatches=3))
    assert [m.data.samples.mask_lengths for m in handed] == [b.samples.mask_lengths for b in batches(0, 3)]
    assert len({id(m.totals) for m in handed}) == 1
    assert len(list(source)) == 2
    # Megatron's rerun iterator gives the same step again.
    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    rerun = RerunDataIterator(iter(batches(0, 4)))
    first = list(step.begin_step(rerun, model=model, num_microbatches=2))
    rerun.rewind()
    again = list(step.begin_step(rerun, model=model, num_microbatches=2))
    assert [a.totals.step_tokens for a in first] == [a.totals.step_tokens for a in again]
    # Virtual pipeline stages: a list in, a list out, every chunk with its own data and the same totals.
    chunks = step.begin_step([iter(batches(0, 2)), None, iter(batches(0, 2))], model=[model] * 3, num_microbatches=2)
    assert chunks[1] is None
    pairs = list(zip(chunks[0], chunks[2], strict=True))
    assert len(pairs) == 2
    assert all(a.totals is b.totals and a.data is not b.data for a, b in pairs)
    # The last chunk that reads data computes the loss: it is its data that is described and counted.
    first, last = batches(4, 2), batches(4, 2)
    chunks = step.begin_step([iter(first), iter(last), None], model=[model] * 3, num_microbatches=2)
    assert [[m.data for m in chunk] for chunk in (chunks[0],)] == [first]
    handed = list(chunks[1])
    assert [m.data for m in handed] == last
    assert [m.samples for m in handed] == [batch.samples for batch in last]
    assert handed[0].totals.step_tokens == sum(float(batch.samples.mask_sums.sum()) for batch in last)
    # Without a number, Megatron's current one is read at the call.
    calculator.init_num_microbatches_calculator(0, None, 2, 1, 1, False)
    assert len(list(step.begin_step(iter(batches(0, 9)), model=model))) == 2
    calculator.reconfigure_num_microbatches_calculator(0, None, 4, 1, 1, False)
    assert len(list(step.begin_step(iter(batches(0, 9)), model=model))) == 4
    # Known counts: those of the first step are compared with the masks, then the user's numbers are used.
    counts = [6.5, 300.0, 100.0, 1.0]
    known = aggregation(mode="token_mean", totals_of=lambda step: StepTotals(step_tokens=counts.pop(0)))
    for expected in (6.5, 300):
        (first, *_) = known.begin_step(iter(batches(0, 3)), model=model, num_microbatches=3)
        assert first.totals.step_tokens == expected
    chunks = known.begin_step([iter(batches(0, 3)) for _ in range(2)], model=[model] * 2, num_microbatches=1)
    assert next(chunks[1]).totals.step_tokens == 100
    with pytest.raises(ValueError, match=r"samples whose step_tokens alone are .*: the totals say 1"):
        known.begin_step(iter(batches(0, 3)), model=model, num_microbatches=3)
    with pytest.raises(ValueError, match=r"step_tokens of 300 from totals_of: the masks of all ranks have 6\.5"):
        aggregation(mode="token_mean", totals_of=lambda step: StepTotals(step_tokens=300)).begin_step(
            iter(batches(0, 3)), model=model, num_microbatches=3
        )


def test_the_look_ahead_takes_every_kind_of_iterator() -> None:
    run_ranks(1, looked_ahead)


def collectives_of_steps() -> list[dict[str, int]]:
    """Of a step without ids, of one by ids, and of one whose counts are known."""
    start(cp=2)
    samples = step_samples(seed=1)
    model = table_model([0.0], ddp=False)
    counts: dict[str, int] = {}
    for name in ("all_reduce", "all_gather", "all_to_all_single", "all_gather_object", "broadcast"):
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    found = []
    by_hand: list[StepTotals] = []
    for mode, known in (("token_mean", False), ("prompt_mean", False), ("prompt_mean", True)):
        step = aggregation(mode=mode, totals_of=(lambda _: by_hand[0]) if known else None)
        batches = [Batch(samples, [i], 2) for i in (0, 1, 2)]
        if mode == "token_mean":
            for batch in batches:
                batch.samples.rollout_ids = None
        if known:
            for _ in range(2):  # the first step is compared with the masks, the second asks once for metrics
                step.begin_step(iter(batches), model=model, num_microbatches=3)
        counts.clear()
        microbatches = step.begin_step(iter(batches), model=model, num_microbatches=3)
        by_hand[:] = [step._last_step.totals]
        if not known:
            for microbatch in microbatches:
                num_local = len(microbatch.samples.local(0, 2))
                microbatch.loss(torch.zeros(1, num_local, requires_grad=True), {"metric": torch.zeros(1, num_local)})
        found.append(dict(counts))
    return found


def test_one_collective_round_a_step_and_none_a_microbatch() -> None:
    without_ids = {"all_reduce": 2}  # a sum over dp, a maximum over cp (tp and pp have one rank)
    by_id = {"all_reduce": 3, "all_to_all_single": 3}  # and the exchange by id
    for found in run_ranks(4, collectives_of_steps):
        assert found == [without_ids, by_id, {}]


# ---- a bad batch on one rank


def bad_iterator(what: str, good: list[Batch]) -> Any:
    def raising() -> Iterator[Batch]:
        yield good[0]
        raise OSError("disk gone")

    return {
        "loader raises": raising,
        "iterator ends": lambda: iter(good[:1]),
        "NaN mask": lambda: iter([good[0], "nan"]),
        "wrong type": lambda: iter([good[0], "not samples"]),
        "no prompt ids": lambda: iter([good[0], "no prompt ids"]),
        "cannot be cut": lambda: iter([good[0], "cannot be cut"]),
        "no iterator": lambda: None,
    }[what]()


def described(batch: Any) -> Any:
    if batch == "nan":
        return Samples([torch.tensor([1.0, float("nan")])])
    if batch == "no prompt ids":
        return Samples([torch.ones(4)], layout=ZigzagTHD([0, 4]))
    if batch == "cannot be cut":
        return Samples([torch.ones(3)], layout=ZigzagTHD([0, 3]), prompt_ids=[0])
    return batch.samples if isinstance(batch, Batch) else batch


def outcomes_with_bad_rank(whats: list[str], bad_rank: int, tp: int, pp: int, cp: int) -> dict[str, str]:
    state = start(tp=tp, pp=pp, cp=cp)
    samples = step_samples(seed=1)
    model = table_model([0.0], ddp=False)
    chosen = dealt(samples, state.get_data_parallel_rank(), state.get_data_parallel_world_size(), 2)
    texts = {}
    for what in whats:
        good = [Batch(samples, which, cp) for which in chosen]
        iterator = bad_iterator(what, good) if dist.get_rank() == bad_rank else iter(good)
        texts[what] = "no error"
        try:
            aggregation(described, mode="prompt_mean").begin_step(iterator, model=model, num_microbatches=2)
        except BadBatchError as error:
            texts[what] = str(error)
    return texts


BAD = {
    "loader raises": "OSError: disk gone",
    "iterator ends": "ended after 1 of the step's 2 micro-batches",
    "NaN mask": "holds nan: token weights must be finite",
    "wrong type": "samples_of returned a str",
    "no prompt ids": "samples without prompt_ids",
    "cannot be cut": "must be a multiple of 2 * cp_size = 4",
    "no iterator": "no data iterator",
}


@functools.cache
def texts_of_bad_batches() -> list[dict[str, str]]:
    return run_ranks(4, functools.partial(outcomes_with_bad_rank, list(BAD), 2, 1, 1, 2), timeout_s=60)


@pytest.mark.parametrize(("what", "reason"), BAD.items(), ids=BAD.keys())
def test_a_bad_batch_on_one_rank_raises_on_every_rank(what: str, reason: str) -> None:
    for texts in texts_of_bad_batches():
        assert "no weight was changed" in texts[what]
        assert "rank 2: " in texts[what]
        assert reason in texts[what]


@slow
@pytest.mark.parametrize(("tp", "pp", "cp"), [(2, 1, 2), (2, 2, 1), (1, 4, 1), (1, 2, 2)])
def test_errors_reach_tensor_context_and_pipeline_ranks(tp: int, pp: int, cp: int) -> None:
    function = functools.partial(outcomes_with_bad_rank, ["loader raises"], 5, tp, pp, cp)
    for texts in run_ranks(8, function, timeout_s=60):
        assert "rank 5: OSError: disk gone" in texts["loader raises"]


def outcome_with_different_data(pp: int) -> str:
    start(pp=pp, cp=4 // pp)
    samples = step_samples(seed=1)
    batch = Batch(samples, [0, 1] if dist.get_rank() == 3 else [0, 2], 4 // pp)
    try:
        aggregation().begin_step(iter([batch]), model=table_model([0.0], ddp=False), num_microbatches=1)
    except BadBatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("pp", [pytest.param(1, marks=slow), 2])
def test_ranks_that_should_hold_the_same_samples_are_compared(pp: int) -> None:
    for text in run_ranks(4, functools.partial(outcome_with_different_data, pp)):
        assert "were given different samples" in text


def stage_without_data() -> str:
    """Only the last pipeline stage reads data; the first has no iterator."""
    state = start(pp=2)
    samples = step_samples(seed=1)
    chosen = dealt(samples, state.get_data_parallel_rank(), 2, 1)
    last = state.is_pipeline_last_stage()
    iterator = iter([Batch(samples, chosen[0], 1)]) if last else None
    step = aggregation(mode="prompt_mean")
    handed = step.begin_step(iterator, model=table_model([0.0], ddp=False), num_microbatches=1)
    return "nothing" if handed is None else f"{next(handed).totals.prompts.all} prompts"


def test_a_pipeline_stage_may_read_no_data_unless_it_computes_the_loss() -> None:
    assert run_ranks(4, stage_without_data) == ["nothing", "nothing", "3 prompts", "3 prompts"]


def test_ranks_report_their_errors() -> None:
    """The harness itself: a failing rank must not look like a pass."""
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(2, functools.partial(divmod, 1, 0))


# ---- steps without active tokens, settings, reports


def empty_steps() -> dict[tuple[str, bool], Any]:
    """With either carrier, whether it is to be an error or not."""
    start(cp=2)
    samples = [oracle.sample([1.0] * 4, [0] * 4, rollout_id=f"r{i}", prompt_id="p") for i in range(2)]
    found: dict[tuple[str, bool], Any] = {}
    for per_token in (False, True):
        model = table_model([1.0] * 9, per_token=per_token)
        for empty in ("warn", "error"):
            step = aggregation(mode="sample_mean", units="active", empty_step=empty, with_per_token_loss=True)
            try:
                gradient, logged = one_step(model, [Batch(samples, [0, 1], 2), Batch(samples, [], 2)], step)
                found[empty, per_token] = gradient.abs().max().item(), logged
            except BadBatchError as error:
                found[empty, per_token] = str(error)
    return found


def test_a_step_without_active_tokens() -> None:
    for found in run_ranks(2, empty_steps):
        for per_token in (False, True):
            assert found["warn", per_token] == (0, {"pg_loss": 0, "twice": 0})
            assert "a step without one active token" in found["error", per_token]


def refused_settings() -> list[str]:
    """Configs under which the loss would not be exact, and the text of each refusal."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_rl_loss.megatron import LossAggregation

    start()
    samples = step_samples(seed=1)

    class NeverScales(_BaseDataParallel):  # type: ignore[misc]
        """Stands in for Torch FSDP2's wrapper, which needs a GPU: like it, leaves `scale_gradients` undone."""

    def attempt(model: Any, **settings: Any) -> str:
        try:
            aggregation(**settings).begin_step(iter([Batch(samples, [0], 1)]), model=model, num_microbatches=1)
        except ValueError as error:
            return str(error)
        return "accepted"

    def attempt_tokens(number: int, model: Any) -> str:
        counts = [1, number]  # the first step's are compared with the masks
        known = {"step_tokens": 1.0}
        try:
            step = aggregation(
                mode="token_mean", totals_of=lambda batches: StepTotals(**known, step_active_tokens=counts.pop(0))
            )
            for _ in range(2):
                step.begin_step(iter([Batch(samples, [0], 1)]), model=model, num_microbatches=1)
        except BadBatchError as error:
            return str(error)
        return "accepted"

    per_token = table_model([0.0], ddp=False, per_token=True)
    hybrid = table_model([0.0], ddp=False)
    hybrid.config.hybrid_context_parallel = True
    partial_groups = LossAggregation(
        AggregationSettings.resolve(),
        lambda batch: batch.samples,
        pg_collection=ProcessGroupCollection(dp=dist.group.WORLD),
    )
    texts = [
        attempt(per_token, mode="sample_mean"),
        attempt(per_token, mode="sample_mean", with_per_token_loss=True),
        attempt(per_token, mode="token_mean"),
        attempt(NeverScales(per_token.config, per_token), mode="token_mean"),
        attempt(NeverScales(hybrid.config, table_model([0.0], ddp=False)), mode="token_mean"),
        attempt(hybrid, mode="token_mean"),
    ]
    try:
        partial_groups.begin_step(iter([]), model=table_model([0.0], ddp=False), num_microbatches=1)
    except ValueError as error:
        texts.append(str(error))
    plain = table_model([0.0], ddp=False)
    return [*texts, *(attempt_tokens(*one) for one in ((2**31, per_token), (2**31 - 1, per_token), (2**31, plain)))]


def test_refusals_by_the_models_config() -> None:
    texts = run_ranks(1, refused_settings)[0]
    assert "--loss-aggregation-with-per-token-loss" in texts[0]
    assert texts[1] == texts[2] == "accepted"
    assert "NeverScales: it never divides gradients by the token count" in texts[3]
    assert "--hybrid-context-parallel" in texts[4]
    assert "--hybrid-context-parallel" in texts[5]
    assert "a ProcessGroupCollection without tp, pp, cp, dp_cp" in texts[6]
    assert "2147483648 active tokens with per-token loss: Megatron sums token counts as int32" in texts[7]
    assert texts[8] == texts[9] == "accepted"


def bad_reports() -> list[str]:
    start()
    samples = step_samples(seed=1)
    batches = [Batch(samples, [0], 1), Batch(samples, [1], 1)]
    first, second = aggregation().begin_step(iter(batches), model=table_model([0.0], ddp=False), num_microbatches=2)
    losses = [torch.zeros(len(samples[i].mask) + len(samples[i].mask) % 2, requires_grad=True) for i in (0, 1)]
    first.loss(losses[0], {"kl": losses[0]})
    texts = []
    for call in (
        lambda: second.loss(losses[1], {}),
        lambda: second.loss(losses[1], {"entropy": losses[1]}),
        lambda: second.loss(torch.zeros(77)),
        lambda: second.loss(losses[1], {"kl": torch.zeros(77)}),
    ):
        try:
            call()
            texts.append("accepted")
        except ValueError as error:
            texts.append(str(error))
    second.loss(losses[1], {"kl": losses[1]})
    return texts


def test_reports_must_be_alike_and_of_the_layout() -> None:
    missing, renamed, losses, metric = run_ranks(1, bad_reports)[0]
    assert "reports ['pg_loss'] after one that reported ['pg_loss', 'kl']" in missing
    assert "reports ['pg_loss', 'entropy']" in renamed
    assert "per_token_loss of shape (77,)" in losses
    assert "of shape (77,)" in metric


def attached_names() -> tuple[list[bool], list[str], list[Any]]:
    """What is in the place of Megatron's names inside and after `attached`; the lines logged; the schedule's call."""
    from megatron.training import training

    start()
    lines: list[str] = []
    given: list[Any] = []

    def get_schedule() -> Any:
        return lambda **kwargs: given.append(kwargs) or "stored"

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> str:
        lines.append("Megatron's line")
        return "logged"

    training.get_forward_backward_func, training.training_log = get_schedule, training_log
    training.get_args = lambda: SimpleNamespace(log_interval=2)
    training.print_rank_last = lines.append
    before = training.get_forward_backward_func, training.training_log
    samples = step_samples(seed=1)
    seen = []
    with aggregation(mode="token_mean").attached():
        seen.append(training.get_forward_backward_func is not before[0])
        batches = iter([Batch(samples, [0], 1), Batch(samples, [1], 1)])
        model = table_model([0.0], ddp=False)
        stored = training.get_forward_backward_func()(
            forward_step_func=print, data_iterator=batches, model=model, num_microbatches=2, seq_length=8
        )
        seen.append(stored == "stored")
        losses = {"pg_loss": torch.tensor(-0.25), "kl": torch.tensor(2.0)}
        for iteration in (1, 2):
            seen.append(training.training_log(losses, {}, 0.1, iteration, 1.0) == "logged")
        seen.append(training.training_log(losses, iteration=4) == "logged")
        try:
            with aggregation().attached():
                pass
        except RuntimeError as error:
            seen.append("attached() inside attached()" in str(error))
    seen.append((training.get_forward_backward_func, training.training_log) == before)
    try:
        with aggregation().attached():
            raise KeyError
    except KeyError:
        seen.append((training.get_forward_backward_func, training.training_log) == before)
    (kwargs,) = given
    handed = [(type(one).__name__, len(one.data.samples.loss_masks)) for one in kwargs.pop("data_iterator")]
    assert kwargs.pop("forward_step_func").__wrapped__ is print
    return seen, lines, [handed, kwargs.pop("model") is model, kwargs]


def test_attached_wraps_pretrain_and_puts_back_what_it_replaced() -> None:
    ((seen, lines, (handed, same_model, others)),) = run_ranks(1, attached_names)
    assert seen == [True] * 8
    assert handed == [("Microbatch", 1)] * 2
    assert same_model
    assert others == {"num_microbatches": 2, "seq_length": 8}
    values = "alone | pg_loss: -2.500000E-01 | kl: 2.000000E+00 |"
    of_2, of_4 = (f"   of iteration {iteration:8d} {values}" for iteration in (2, 4))
    assert lines == ["Megatron's line"] * 2 + [of_2, "Megatron's line", of_4]


def groups_of_models() -> list[str]:
    """Which groups a step is reduced over: what the launch gives, else the model's, else Megatron's parallel state."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_rl_loss.megatron import LossAggregation

    state = start(cp=2)
    names = ["tp", "pp", "cp", "dp", "dp_cp"]
    whole = ProcessGroupCollection.use_mpu_process_groups(names)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    one_rank = ProcessGroupCollection(**dict.fromkeys(names, alone))
    samples = step_samples(seed=1)
    found = []
    for given, of_model in ((None, None), (one_rank, None), (None, one_rank), (whole, one_rank)):
        model = table_model([0.0], ddp=False)
        if of_model is not None:
            model.pg_collection = of_model
        step = LossAggregation(AggregationSettings.resolve(), lambda batch: batch.samples, pg_collection=given)
        batch = Batch(samples, [0], 2 if (given or of_model or whole) is whole else 1)
        handed = list(step.begin_step(iter([batch]), model=model, num_microbatches=1))
        found.append(len(handed[0].pg_loss.weights))
    assert state.get_context_parallel_world_size() == 2
    return found


def test_the_groups_are_the_launchs_or_the_models_or_megatrons() -> None:
    """A rank that is its own context-parallel group holds all tokens of its micro-batch, one of two holds half."""
    length = len(step_samples(seed=1)[0].mask)
    halves, all_of_it = -(-length // 4) * 4 // 2, -(-length // 2) * 2
    assert run_ranks(2, groups_of_models) == [[halves, all_of_it, all_of_it, halves]] * 2

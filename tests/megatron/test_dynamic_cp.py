"""Context-parallel groups that change between micro-batches: Megatron's scheduler, groups, schedule and DDP.

Lengths go from 1 to 64. On four ranks `BalancedCPScheduler` deals sequences to groups of 1, 2 and 4 ranks, so that
numbers of micro-batches differ between ranks. Two loops: Megatron's `hybrid_context_parallel` schedule, one sequence a
micro-batch; and its usual schedule over packs that were dealt beforehand, as verl does.
"""

import importlib.util
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpt_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import VERL, checkout, load
from gpt_steps import FP32_BOUNDS, collect, mode_of, output_of
from ranks import run_ranks
from refusals import outcome_of
from step_samples import DIVISOR
from table_step import Batch, relative_error, run_schedule, start, table_model
from tiny_gpt import Batch as GptBatch
from tiny_gpt import Case, Layout, build
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.audit import judge
from megatron_rl_loss.losses import gspo_loss, ppo_clip_loss, whiten
from megatron_rl_loss.plan import plan as plans
from megatron_rl_loss.reduction import Metric
from megatron_rl_loss.step.counting import reduce_step_totals

RANKS = 4
LENGTHS = [64, 33, 1, 17, 5, 9, 40, 2, 3, 12, 8, 1, 27, 6]
#: Of each micro-batch, the sequences of each rank: what a scheduler returns.
Groups = list[list[list[int]]]
#: Packs as `DefaultDynamicCPScheduler` makes them: one for each rank, the same for the ranks of a group.
PACKS: Groups = [
    [[0], [0], [0], [0]], [[1, 2], [1, 2], [6], [6]],
    [[3, 5], [3, 5], [12], [4, 7, 8]], [[9], [10], [13, 11], [13, 11]],
]  # fmt: skip
#: The same for two ranks.
FEW: Groups = [[[0], [0]], [[1, 2], [6]], [[3, 5], [12]], [[4, 7, 8], [4, 7, 8]], [[9, 11], [10, 13]]]


def step_of_lengths() -> list[oracle.Sample]:
    """Losses, which are log-probs too; fractional and full masks, split rollouts, uneven prompt groups."""
    rng, samples = random.Random(23), []
    for i, length in enumerate(LENGTHS):
        mask = [0.0 if i in (4, 10) else rng.choice([0, 1, 1, 0.5]) for _ in range(length)]
        mask[-1] = float(i not in (4, 10))
        losses = [rng.uniform(-3, -0.1) for _ in range(length)]
        samples.append(oracle.sample(losses, mask, rollout_id=f"r{i - i % 3 // 2}", prompt_id=f"p{min(i // 3, 2)}"))
    return samples


STEP = step_of_lengths()
TABLE = [float(x) for one in STEP for x in one.losses] + [0.0]
_rng = random.Random(3)
#: What GSPO takes beside log-probs; float32 numbers.
OLD = torch.tensor([x + _rng.uniform(-0.002, 0.002) for x in TABLE])
ADVANTAGES = torch.tensor([_rng.choice([-1, 1]) * _rng.uniform(0.5, 2) for _ in STEP] + [0.0])
ADVANTAGES = ADVANTAGES.repeat_interleave(torch.tensor([*LENGTHS, 1]))


def has(file: str, text: str) -> bool:
    """Whether a file of the installed Megatron-Core has a text."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    return text in (Path(found.origin).parent / file).read_text()


HYBRID = ("pipeline_parallel/schedules.py", "hybrid_context_parallel_forward_backward(")
OF_DEV = ("datasets/data_schedule.py", "class DefaultDynamicCPScheduler")


def gspo_of_step() -> list[tuple[Tensor, oracle.Sample]]:
    """The log-probs of each sequence, float32 numbers as the model has them, and its GSPO losses in float64."""
    firsts, found = [sum(LENGTHS[:i]) for i in range(len(STEP))], []
    for one, first in zip(STEP, firsts, strict=True):
        of, mask = slice(first, first + len(one.mask)), one.mask.double()
        log_probs = torch.tensor(TABLE[of]).double().requires_grad_()
        ratio = ((log_probs - OLD[of].double()) * mask).sum().div(mask.sum().clamp(min=1e-30)).exp()
        loss = torch.maximum(-ADVANTAGES[of] * ratio, -ADVANTAGES[of] * ratio.clamp(1 - 3e-4, 1 + 4e-4))
        found.append((log_probs, replace(one, losses=loss)))
    return found


def expected(mode: str, units: str, loss: str) -> tuple[Tensor, float, float]:
    """Of the step: the gradient by each entry of the table, the loss, and what its error is relative to."""
    leaves = [one.losses.float().double().requires_grad_() for one in STEP]
    samples = [replace(one, losses=leaf) for one, leaf in zip(STEP, leaves, strict=True)]
    if loss == "gspo":
        leaves, samples = map(list, zip(*gspo_of_step(), strict=True))  # type: ignore[assignment]
    divisor = DIVISOR if mode == "constant" else None
    total = oracle.vl_norm(samples) if mode == "vl_norm" else oracle.step_loss(mode, samples, divisor, units)
    slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
    of = [replace(one, losses=one.losses.detach().abs()) for one in samples]
    scale = oracle.vl_norm(of) if mode == "vl_norm" else oracle.step_loss(mode, of, divisor, units)
    return torch.cat([*slopes, torch.zeros(1)]), float(total.detach()), float(scale)


def start_dynamic(tp: int = 1) -> tuple[Any, Any, Callable[[int], Any]]:
    """On a rank: Megatron's state, its group over DP x CP, and its group of each size."""
    from megatron.core import parallel_state

    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    name = "dynamic" if "dynamic_context_parallel" in known else "hybrid"
    barrier = dist.barrier
    with patch.object(
        dist, "barrier", lambda group=None, **_: barrier(group)
    ):  # dev names a device, which gloo refuses
        state = start(tp=tp, cp=2 // tp, **{f"{name}_context_parallel": True})
    of_size = getattr(state, f"get_{name}_data_context_parallel_groups")
    # Before dev there is no group of one rank.
    dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    return state, dp_cp, lambda size: None if size == 1 else of_size(group_size=size)  # before dev there is none of one


def balanced(dp_cp: Any, lengths: Sequence[int]) -> Groups:
    """By Megatron's scheduler, a longest sequence over all ranks."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    groups: Groups
    scheduler = BalancedCPScheduler(-(-max(lengths) // dp_cp.size()), dp_cp)
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return groups


def hands_of(groups: Groups, rank: int, one_by_one: bool) -> list[tuple[list[int], int]]:
    """Of each micro-batch of a rank, its sequences and the size of its group."""
    return [
        (ids, sum(set(ids) <= set(others) for others in group))
        for group in groups
        for ids in ([[i] for i in group[rank]] if one_by_one else [group[rank]])
    ]


def of_dev(dp_cp: Any) -> Groups:
    """By the scheduler that verl calls, which Megatron-Core dev has."""
    from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler

    groups: Groups
    scheduler = DefaultDynamicCPScheduler(16, 2, dp_cp.size() // 2, None)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(LENGTHS)))
    return groups


def run_loop(hybrid: bool, model: Any, groups: Groups, hands: Any, forward_step: Any) -> Any:
    """Megatron's hybrid schedule, to which one `next` gives the step, on the first TP rank; or its usual one."""
    if not hybrid:
        return run_schedule(forward_step, iter([{}] * len(hands)), model, len(hands))
    from megatron.core import parallel_state

    model.config.hybrid_context_parallel = True
    whole = iter([({i: {} for ids, _ in hands for i in ids}, groups)])
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return run_schedule(forward_step, whole if first else None, model, 1)


def engine_of_verl(root: str) -> Callable[[Any, Tensor], Any]:
    """What verl's Megatron engine does to what a loss function returned, for a rank's tokens."""
    (module,) = load(VERL, root, "verl.workers.engine.megatron.transformer_impl")
    engine = SimpleNamespace(
        prepare_model_outputs=lambda output, data: output,
        get_data_parallel_group=lambda: None,
        engine_config=SimpleNamespace(dynamic_context_parallel=True, use_remove_padding=True),
        tf_config=SimpleNamespace(calculate_per_token_loss=True),
    )

    def scale(returned: Any, numbers: Tensor) -> Any:
        here = int((numbers < len(TABLE) - 1).sum())
        data = {"input_ids": numbers, "num_micro_batch": 4, "dp_size": 1, "routed_num_tokens": sum(LENGTHS)}
        data |= {module.DCP_LOCAL_NUM_TOKENS: here}
        *carried, output = module.MegatronEngineWithLMHead.postprocess_micro_batch_func(
            engine, None, data, forward_only=False, loss_function=lambda **_: returned
        )
        return *carried, output["metrics"]

    return scale


Found = dict[tuple[str, str, str], tuple[float, float]]


def errors(
    loop: str, tp: int = 1, packs: Groups | None = None, planted: str = "", verl: str = ""
) -> tuple[Found, list[Any]]:
    """On a rank: of every mode and loss the errors of gradient and logged loss; and the audits of every mode."""
    from logged_means import logged_means

    from megatron_rl_loss.audit.megatron import Audit
    from megatron_rl_loss.megatron import plan_step
    from megatron_rl_loss.modes import vl_norm_undivided as vl_norm

    warnings.filterwarnings("error", message=".*hold samples with the same")
    _, dp_cp, group_of = start_dynamic(tp)
    hybrid, engine = loop == "hybrid", engine_of_verl(verl) if verl else None
    groups = balanced(dp_cp, LENGTHS) if hybrid else of_dev(dp_cp) if loop == "dev" else packs or PACKS
    hands = hands_of(groups, dp_cp.rank(), hybrid)
    batches = [Batch(STEP, ids, size, cp_group=group_of(size)) for ids, size in hands]
    found, verdicts = {}, []
    for (mode, units), loss in itertools.product([*oracle.COUNTINGS, ("vl_norm", "all")], ("plain", "gspo")):
        if units == "active" and loss == "gspo":
            continue
        model = table_model(TABLE, per_token=True)
        if hybrid:
            model.config.hybrid_context_parallel = True
        options: Any = {"divisor": DIVISOR if mode == "constant" else None, "model": model, "dynamic_cp": not hybrid}
        options |= {} if mode == "vl_norm" else {"units": units}
        samples = [batch.samples for batch in batches]
        plan = plan_step(samples, vl_norm if mode == "vl_norm" else mode, **options)
        if planted:  # a sequence counted on each rank of its group
            each = [Batch(STEP, ids, size).samples for ids, size in hands]
            warnings.simplefilter("ignore")
            totals = reduce_step_totals(each, dp_group=dp_cp, statistics=plan.modes.statistics)
            plan = replace(plan, totals=replace(totals, step_active_tokens=plan.totals.step_active_tokens))
        assert [one.cp_size for one in plan] == [size for _, size in hands]
        if (mode, loss) == ("token_mean", "plain"):
            held = [batch.local_numbers(one.cp_rank, one.cp_size) for batch, one in zip(batches, plan, strict=True)]
            whole = torch.cat([one.mask for one in STEP] + [torch.zeros(1)]) != 0
            active, white = OLD[whole], whiten([OLD[one] for one in held], plan, dp_group=dp_cp)
            for numbers, values in zip(held, white, strict=True):
                torch.testing.assert_close(values, ((OLD[numbers] - active.mean()) / active.std()) * whole[numbers])
        turns = iter(zip(batches, plan, strict=True))

        def forward_step(iterator: Iterator[Any] | None, model: Any, turns: Any = turns, loss: str = loss) -> Any:
            assert (iterator is None) == (hybrid and tp > 1 and dist.get_rank() % tp > 0)
            if iterator is not None:
                next(iterator)
            batch, microbatch = next(turns)
            numbers = batch.local_numbers(microbatch.cp_rank, microbatch.cp_size)

            def loss_func(output: Tensor) -> Any:
                if loss == "gspo":
                    output = gspo_loss(output, OLD[numbers], ADVANTAGES[numbers], microbatch).per_token_loss
                metrics = {"most": Metric(output.detach(), kind="max")}
                if engine is None:
                    return microbatch.loss(output, metrics)
                return engine(microbatch.loss(output, metrics, form="verl"), numbers)

            return model(numbers.cuda()), loss_func

        with Audit(model) as audit:
            stored = run_loop(hybrid, model, groups, hands, forward_step)
        plan.finish_metrics(stored)
        gradient, value, scale = expected(mode, units, loss)
        logged = logged_means(stored)
        in_gradient = relative_error(model.module.losses.main_grad.cpu(), gradient)
        found[mode, units, loss] = in_gradient, abs(logged["pg_loss"] - value) / scale
        if loss == "plain":
            assert logged["most"] == pytest.approx(
                max(float(one.losses[one.mask != 0].max()) for one in STEP if one.mask.any())
            )
            if mode != "vl_norm" and units == "all":
                verdicts += [judge(step, plan.modes.policy) for step in audit.steps.values()]
    return found, verdicts


@pytest.mark.parametrize(
    ("loop", "tp", "packs"),
    [
        ("hybrid", 1, None),
        ("hybrid", 2, None),
        ("packs", 1, PACKS),
        ("packs", 2, FEW),
        ("dev", 1, None),
        ("verl", 1, None),
    ],
)
def test_every_mode_is_exact(loop: str, tp: int, packs: Groups | None, record_property: Any) -> None:
    if (loop == "hybrid" and not has(*HYBRID)) or (loop == "dev" and not has(*OF_DEV)):
        pytest.skip("not in this Megatron-Core: see tools/test_versions.sh")
    of_sum = oracle.sum_error(oracle.num_tokens(STEP))
    verl = checkout(VERL) if loop == "verl" else ""
    for rank, (found, verdicts) in enumerate(run_ranks(RANKS, errors, loop, tp, packs, "", verl)):
        for case, (of_gradient, of_value) in found.items():
            assert of_gradient < oracle.EXACT, (case, of_gradient)
            assert of_value < of_sum, (case, of_value)
        record_property("dynamic_cp_error", max(error for error, _ in found.values()))
        assert len(verdicts) == (len(oracle.MODES) if rank == 0 else 0)
        assert all(verdict.sound for verdict in verdicts), [str(verdict) for verdict in verdicts]


def test_a_sequence_counted_on_each_rank_of_its_group_is_seen() -> None:
    (found, verdicts), *_ = run_ranks(RANKS, errors, "packs", 1, None, "counted on each rank")
    for (mode, units, loss), (of_gradient, _) in found.items():
        right = mode in ("constant", "token_sum")  # rollouts are told apart by their ids
        assert (of_gradient < oracle.EXACT) if right else (of_gradient > 0.05), (mode, units, loss, of_gradient)
    assert [verdict.sound for verdict in verdicts] == [False, False, False, True, True]


# --- what is refused


def refused() -> dict[str, str]:
    """On a rank: what is said of each wrong step."""
    from megatron_rl_loss.megatron import plan_step

    state, dp_cp, group_of = start_dynamic()
    model = table_model(TABLE, per_token=True)
    hands = hands_of(PACKS, dp_cp.rank(), one_by_one=False)

    def samples(**changes: Any) -> list[Samples]:
        return [Batch(STEP, ids, size, cp_group=group_of(size), **changes).samples for ids, size in hands]

    def other() -> list[Samples]:
        given = samples()
        if dp_cp.rank() == 1:
            given[1] = Batch(STEP, [2, 1], 2, cp_group=group_of(2)).samples
        return given

    static = [Batch(STEP, ids, 4).samples for ids, _ in hands]
    plan = plan_step(samples(), "token_mean", model=model, dynamic_cp=True)
    mean = plans.plan_step(samples(), "token_mean", dp_group=dp_cp)
    batch, microbatch = Batch(STEP, *hands[0]), plan[0]
    numbers = batch.local_numbers(microbatch.cp_rank, microbatch.cp_size)
    losses = OLD[numbers].clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "other samples": lambda: plan_step(other(), "token_mean", model=model, dynamic_cp=True),
        "DP alone": lambda: plans.plan_step(samples(), "token_mean", dp_group=state.get_data_parallel_group()),
        "the launch's group": lambda: plan_step(static, "token_mean", model=model),
        "no per-token loss": lambda: plan_step(samples(), "token_mean", model=table_model(TABLE), dynamic_cp=True),
        "a pair": lambda: plan[0].loss(losses, form="nemo_rl"),
        "a mean": lambda: mean[0].loss(losses, form="mean"),
        "a 3-tuple": lambda: mean[0].loss(losses),
        "the launch's size": lambda: gspo_loss(
            losses, OLD[numbers], ADVANTAGES[numbers], microbatch, state.get_context_parallel_group()
        ),
        "the sum": lambda: mean[0].loss(losses, form="sum"),
        "verl": lambda: plan[0].loss(losses, form="verl"),
    }
    return {name: outcome_of(call) for name, call in calls.items()}


REFUSED = {
    "other samples": "ranks of a micro-batch's cp_group were given different samples",
    "DP alone": "Pass the group over DP x CP",
    "the launch's group": "were given different samples for this step",
    "no per-token loss": "Turn calculate_per_token_loss on",
    "a pair": "form='nemo_rl' with per-token loss, in a step whose cp_groups change",
    "a mean": "form='mean' without per-token loss, in a step whose cp_groups change",
    "a 3-tuple": "form='3-tuple' without per-token loss, in a step whose cp_groups change",
    "the launch's size": "a cp_group of 2 ranks: the micro-batch is cut for 4",
    "the sum": "accepted",
    "verl": "accepted",
}


def test_what_is_refused_on_every_rank() -> None:
    for said in run_ranks(RANKS, refused):
        for name, text in REFUSED.items():
            assert text in said[name], (name, said[name])


# --- a scheduler that packs anew

SCHEDULED = [("dp_balanced", 2, 1), ("dp_balanced", 1, 2), ("default_dynamic_cp", 2, 1), ("default_dynamic_cp", 1, 2)]


def packed_errors(scheduler: str, tp: int, cp: int) -> list[tuple[int, float]]:
    """On a rank: of two steps in every mode, the number of micro-batches and the error of the gradient."""
    from megatron.core.datasets.data_schedule import wrap_data_iterator

    from megatron_rl_loss.megatron import from_first_tp_rank, plan_step

    dynamic = scheduler == "default_dynamic_cp"
    if dynamic:
        state, dp_cp, group_of = start_dynamic(tp)
    else:
        state = start(tp=tp, cp=cp)
        dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    dp, dp_rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    multiple, tp_group = 2 * dp_cp.size(), state.get_tensor_model_parallel_group()
    firsts = list(itertools.accumulate(LENGTHS, initial=0))
    found = []
    for (mode, units), step in itertools.product(oracle.COUNTINGS, [range(len(STEP)), [0, 2, 3, 7]]):
        model = table_model(TABLE, per_token=True)
        model.config.sequence_packing_scheduler = scheduler
        model.config.max_seqlen_per_dp_cp_rank = 64 // (dp_cp.size() if dynamic else cp)
        model.config.min_dynamic_context_parallel_size = 1
        mine = list(step)[dp_rank::dp]
        rows = []
        for i in mine:
            size = -(-LENGTHS[i] // multiple) * multiple
            numbers = torch.full((size,), len(TABLE) - 1)
            numbers[: LENGTHS[i]] = torch.arange(firsts[i], firsts[i + 1])
            mask = torch.zeros(size)
            mask[: LENGTHS[i]] = STEP[i].mask
            row = {"tokens": numbers, "labels": numbers, "position_ids": torch.arange(size), "loss_mask": mask}
            row |= {"original_seq_len": torch.tensor([LENGTHS[i]]), "padded_seq_len": torch.tensor([size])}
            rows.append({name: value.cuda() for name, value in row.items()})
        given = iter(rows) if tp_group.rank() == 0 else None
        iterator, count, *_ = wrap_data_iterator(given, model.config, len(mine))
        assert (iterator is None) == (tp_group.rank() > 0)
        batches: list[Any] = []

        def describe(batches: Any = batches, iterator: Any = iterator, count: int = count) -> list[Samples]:
            batches += from_first_tp_rank(lambda: [next(iterator) for _ in range(count)], tp_group)
            samples = []
            for batch in batches:
                bounds = batch["cu_seqlens_padded"].tolist()
                ids = [firsts.index(int(batch["tokens"][start])) for start in bounds[:-1]]
                size = int(batch["local_cp_size"]) if dynamic else 1
                samples.append(
                    Samples(
                        [batch["loss_mask"][a:b].cpu() for a, b in itertools.pairwise(bounds)],
                        layout=ZigzagTHD(bounds),
                        rollout_ids=[str(STEP[i].rollout_id) for i in ids],
                        prompt_ids=[str(STEP[i].prompt_id) for i in ids],
                        cp_group=group_of(size) if dynamic else None,
                    )
                )
            return samples

        divisor = DIVISOR if mode == "constant" else None
        plan = plan_step(
            describe, mode, units=units, divisor=divisor, model=model, dynamic_cp=dynamic, num_microbatches=count
        )
        turns = iter(zip(batches, plan, strict=True))

        def forward_step(_: Any, model: Any, turns: Any = turns) -> Any:
            batch, microbatch = next(turns)
            return model(microbatch.local(batch["tokens"]).cuda()), microbatch.loss

        run_schedule(forward_step, None, model, count)
        chosen = [STEP[i] for i in step]
        right = [torch.zeros(length, dtype=torch.float64) for length in LENGTHS]
        for i, slope in zip(step, oracle.step_gradient(mode, chosen, divisor, units), strict=True):
            right[i] = slope
        gradient = model.module.losses.main_grad.cpu()
        found.append((count, relative_error(gradient, torch.cat([*right, torch.zeros(1)]))))
    return found


@pytest.mark.parametrize(("scheduler", "tp", "cp"), SCHEDULED)
def test_a_step_that_a_scheduler_packed(scheduler: str, tp: int, cp: int, record_property: Any) -> None:
    if not has("datasets/data_schedule.py", f'"{scheduler}"'):
        pytest.skip("not in this Megatron-Core: see tools/test_versions.sh")
    for found in run_ranks(RANKS, packed_errors, scheduler, tp, cp):
        assert len({count for count, _ in found}) == 2  # it changes from step to step
        assert max(error for _, error in found) < oracle.EXACT, found
        record_property("dynamic_cp_error", max(error for _, error in found))


# --- a GPT


GPT_CASES = [
    Case(1, mode, "all", "per token", bf16=False, optimizer="plain", tied=False, lopsided=False)
    for mode in oracle.MODES
]
LAYOUT = Layout(1, False, 1, 1, 2, 2)


def gpt_errors(rollouts: list[gpt_oracle.Rollout]) -> list[dict[str, Any]]:
    """On a rank: the gradients of PPO in each mode, sequences dealt by Megatron's scheduler."""
    from megatron_rl_loss.megatron import plan_step

    _, dp_cp, group_of = start_dynamic()
    groups = balanced(dp_cp, [len(one.tokens) for one in rollouts])
    hands = hands_of(groups, dp_cp.rank(), one_by_one=True)
    found = []
    for case in GPT_CASES:
        ready = build(LAYOUT, case, "packed")
        (model,) = ready.chunks
        places = [(0 if size == 1 else group_of(size).rank(), size, group_of(size)) for _, size in hands]
        batches = [
            GptBatch([rollouts[i] for i in ids], cp_rank, size, filler=False, cp_group=group)
            for (ids, _), (cp_rank, size, group) in zip(hands, places, strict=True)
        ]
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        plan = plan_step([one.samples for one in batches], model=model, dynamic_cp=True, **mode_of(case))
        turns = iter(zip(batches, plan, strict=True))

        def forward_step(iterator: Any, model: Any, turns: Any = turns, alone: Any = alone) -> Any:
            next(iterator)
            batch, microbatch = next(turns)
            batch.cp_group = batch.cp_group or alone
            for layer in model.module.decoder.layers:  # Megatron-Core dev does so itself, for RoPE
                layer.self_attention.pg_collection.cp = batch.cp_group

            def loss_func(output: Tensor) -> Any:
                clip = {"clip_low": gpt_oracle.CLIP_LOW, "clip_high": gpt_oracle.CLIP_HIGH}
                return microbatch.loss(
                    ppo_clip_loss(-output, batch.old_log_probs, batch.advantages, **clip).per_token_loss
                )

            return output_of(model, batch.cuda()), loss_func

        run_loop(has(*HYBRID), model, groups, hands, forward_step)
        found.append(
            {name: torch.from_numpy(value) for name, (value, _) in collect([model], of_gradients=True).items()}
        )
    return found


def test_a_gpt_trains_on_the_step_of_one_process(record_property: Any) -> None:
    shape = GPT_CASES[0].shape(LAYOUT)
    for found in run_ranks(RANKS, gpt_errors, gpt_oracle.rollouts_of(shape)):
        for case, gradients in zip(GPT_CASES, found, strict=True):
            right = gpt_oracle.step_of(shape, case.mode, case.units).gradients
            assert gradients.keys() == right.keys()
            worst = max(relative_error(gradients[name], right[name]) for name in right)
            record_property("dynamic_cp_gpt_error", worst)
            assert worst < FP32_BOUNDS["gradients"], (case.mode, worst)

"""Context-parallel groups that change between micro-batches: Megatron's scheduler, groups, schedule and DDP.

Lengths go from 1 to 64. On four ranks `BalancedCPScheduler` deals sequences to groups of 1, 2 and 4 ranks, so that
numbers of micro-batches differ between ranks. Two loops: Megatron's `hybrid_context_parallel` schedule, one sequence a
micro-batch; and its usual schedule over packs that were dealt beforehand, as verl does. Schedulers that pack anew:
test_dynamic_packs.py.
"""

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import VERL, checkout, load
from dynamic_steps import LENGTHS, RANKS, STEP, TABLE, Groups, balanced, hands_of, run_loop, start_dynamic
from missing import skip_without
from ranks import run_ranks
from refusals import outcome_of
from sequence_formulas import gspo, scan
from step_samples import DIVISOR
from table_step import Batch, relative_error, table_model
from torch import Tensor

from megatron_rl_loss import Metric, Samples, Term, keep_tokens, plan_step, segment_scan
from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import count_step
from megatron_rl_loss.losses.sequence import gspo_loss

pytestmark = pytest.mark.slow

#: Packs as `DefaultDynamicCPScheduler` makes them: one for each rank, the same for the ranks of a group.
PACKS: Groups = [
    [[0], [0], [0], [0]], [[1, 2], [1, 2], [6], [6]],
    [[3, 5], [3, 5], [12], [4, 7, 8]], [[9], [10], [13, 11], [13, 11]],
]  # fmt: skip

_rng = random.Random(3)
#: What GSPO takes beside log-probs; float32 numbers.
OLD = torch.tensor([entry + _rng.uniform(-0.002, 0.002) for entry in TABLE])
ADVANTAGES = torch.tensor([_rng.choice([-1, 1]) * _rng.uniform(0.5, 2) for _ in STEP] + [0.0])
SIZES = [*LENGTHS, 1]
ADVANTAGES = ADVANTAGES.repeat_interleave(torch.tensor(SIZES))
GAMMA = 0.9  # of a loss of discounted sums along each sequence
#: Tokens that `Plan.keep` keeps.
KEPT = torch.arange(len(TABLE)) % 3 > 0


def gspo_of_step() -> list[tuple[Tensor, oracle.Sample]]:
    """The log-probs of each sequence, float32 numbers as the model has them, and its GSPO losses in float64."""
    firsts, sequences = [sum(LENGTHS[:i]) for i in range(len(STEP))], []
    for sample, first in zip(STEP, firsts, strict=True):
        of = slice(first, first + len(sample.mask))
        log_probs = torch.tensor(TABLE[of]).double().requires_grad_()
        values = {"log_probs": log_probs, "old_log_probs": OLD[of].double(), "advantages": ADVANTAGES[of]}
        sequences.append((log_probs, replace(sample, losses=gspo(values, sample.mask.double()))))
    return sequences


def expected(mode: str, units: str, loss: str) -> tuple[Tensor, float, float]:
    """The step's gradient by each entry of the table, the loss, and the scale of the loss's error."""
    leaves = [sample.losses.float().double().requires_grad_() for sample in STEP]
    masks = [
        sample.mask * kept if loss == "kept" else sample.mask
        for sample, kept in zip(STEP, KEPT.split(SIZES), strict=False)
    ]
    losses = leaves
    if loss == "scan":
        losses = [scan(leaf, mask, GAMMA) for leaf, mask in zip(leaves, masks, strict=True)]
    samples = [replace(sample, losses=of, mask=mask) for sample, of, mask in zip(STEP, losses, masks, strict=True)]
    if loss == "gspo":
        leaves, samples = map(list, zip(*gspo_of_step(), strict=True))
    divisor = oracle.divisor_of(mode, DIVISOR)
    total = oracle.vl_norm(samples) if mode == "vl_norm" else oracle.step_loss(mode, samples, divisor, units)
    slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
    of = [replace(sample, losses=sample.losses.detach().abs()) for sample in samples]
    scale = oracle.vl_norm(of) if mode == "vl_norm" else oracle.step_loss(mode, of, divisor, units)
    return torch.cat([*slopes, torch.zeros(1)]), float(total.detach()), float(scale)


def dev_groups(dp_cp: Any) -> Groups:
    """Groups by the scheduler that verl calls, which Megatron-Core dev has."""
    from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler

    groups: Groups
    scheduler = DefaultDynamicCPScheduler(64 // dp_cp.size(), 2, dp_cp.size() // 2, None)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(LENGTHS)))
    return groups


def engine_of_verl(root: str) -> Callable[[Any, Tensor], Any]:
    """verl's Megatron engine: a function of a loss function's return value and of a rank's tokens."""
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


Errors = dict[tuple[str, str, str], tuple[float, float]]


def errors(loop: str, tp: int = 1, planted: bool = False, verl: str = "") -> tuple[Errors, list[Any]]:
    """On a rank: of every mode and loss the errors of gradient and logged loss; and the audits of every mode."""
    from logged_means import logged_means
    from recipes.paper_modes import vl_norm

    from megatron_rl_loss import Audit

    warnings.filterwarnings("error", message=".*hold samples with the same")
    _, dp_cp, group_of = start_dynamic(tp)
    hybrid, engine = loop == "hybrid", engine_of_verl(verl) if verl else None
    groups = balanced(dp_cp, LENGTHS) if hybrid else dev_groups(dp_cp) if loop == "dev" else PACKS
    hands = hands_of(groups, dp_cp.rank(), hybrid)
    batches = [Batch(STEP, ids, size, cp_group=group_of(size)) for ids, size in hands]
    errors_by_case, verdicts = {}, []
    further = itertools.product((("token_mean", "all"), ("prompt_mean", "all")), ("gspo", "scan", "kept"))
    plain = [((mode, units), "plain") for mode, units in (*oracle.COUNTINGS, ("vl_norm", "all"))]
    for (mode, units), loss in [*plain, *further]:
        model = table_model(TABLE, per_token=True)
        if hybrid:
            model.config.hybrid_context_parallel = True
        options: Any = {"divisor": oracle.divisor_of(mode, DIVISOR), "model": model, "dynamic_cp": not hybrid}
        options |= {} if mode == "vl_norm" else {"units": units}
        samples = [batch.samples for batch in batches]
        plan = plan_step(samples, vl_norm if mode == "vl_norm" else mode, **options)
        if planted:  # a sequence counted on each rank of its group
            each = [Batch(STEP, ids, size).samples for ids, size in hands]
            warnings.simplefilter("ignore")
            totals = count_step(each, StepGroups(dp_cp), sums=plan.record.modes.sums)
            tokens = plan.totals.step_active_tokens
            plan.record.totals = replace(totals, step_active_tokens=tokens, dynamic_cp=True)
        assert [microbatch.cp_size for microbatch in plan] == [size for _, size in hands]
        if loss == "kept":
            numbers_of = {
                id(microbatch): batch.local_numbers(microbatch.cp_rank, microbatch.cp_size)
                for batch, microbatch in zip(batches, plan, strict=True)
            }
            keep_tokens(plan, "kept", lambda microbatch, numbers_of=numbers_of: KEPT[numbers_of[id(microbatch)]])  # type: ignore[misc]
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
                if loss == "scan":
                    output = segment_scan(output, microbatch, gamma=GAMMA)
                metrics = {"most": Metric(output.detach(), kind="max")}
                losses = {"pg": Term(output, mask="kept")} if loss == "kept" else output
                if engine is None:
                    return microbatch.loss(losses, metrics)
                return engine(microbatch.loss(losses, metrics, form="verl"), numbers)

            return model(numbers.cuda()), loss_func

        with Audit(model) as audit:
            stored = run_loop(hybrid, model, groups, hands, forward_step)
        plan.finish(stored)
        gradient, value, scale = expected(mode, units, loss)
        logged = logged_means(stored)
        in_gradient = relative_error(model.module.losses.main_grad.cpu(), gradient)
        errors_by_case[mode, units, loss] = (
            in_gradient,
            abs(logged["pg" if loss == "kept" else "pg_loss"] - value) / scale,
        )
        if loss == "plain":
            assert logged["most"] == pytest.approx(
                max(float(sample.losses[sample.mask != 0].max()) for sample in STEP if sample.mask.any())
            )
            if mode != "vl_norm" and units == "all":
                verdicts += [judge(step, plan.record.modes.policy) for step in audit.steps.values()]
    return errors_by_case, verdicts


@pytest.fixture(autouse=True)
def changing_groups() -> None:
    skip_without("changing groups")


@pytest.mark.parametrize(
    ("loop", "tp", "ranks"), [("hybrid", 2, RANKS), ("packs", 1, RANKS), ("dev", 1, 8), ("verl", 1, RANKS)]
)
def test_every_mode_is_exact(loop: str, tp: int, ranks: int, record_property: Any) -> None:
    if loop in ("hybrid", "dev"):
        skip_without("hybrid" if loop == "hybrid" else "DefaultDynamicCPScheduler")
    sum_error = oracle.sum_error(oracle.num_tokens(STEP))
    verl = checkout(VERL) if loop == "verl" else ""
    for rank, (errors_by_case, verdicts) in enumerate(run_ranks(ranks, errors, loop, tp, False, verl)):
        for case, (gradient_error, value_error) in errors_by_case.items():
            assert gradient_error < oracle.EXACT, (case, gradient_error)
            assert value_error < sum_error, (case, value_error)
        record_property("dynamic_cp_error", max(error for error, _ in errors_by_case.values()))
        assert len(verdicts) == (len(oracle.MODES) if rank == 0 else 0)
        assert all(verdict.sound for verdict in verdicts), [str(verdict) for verdict in verdicts]


def test_a_sequence_counted_on_each_rank_of_its_group_is_seen() -> None:
    (errors_by_case, verdicts), *_ = run_ranks(RANKS, errors, "packs", 1, True)
    for (mode, units, loss), (gradient_error, _) in errors_by_case.items():
        # Rollouts are told apart by their ids; what is kept is counted anew.
        right = loss == "kept" or mode in ("constant", "token_sum")
        assert (gradient_error < oracle.EXACT) if right else (gradient_error > 0.05), (
            mode,
            units,
            loss,
            gradient_error,
        )
    assert [verdict.sound for verdict in verdicts] == [False, False, False, True, True]


# --- what is refused


def refused() -> dict[str, str]:
    """On a rank: what is said of each wrong step."""

    state, dp_cp, group_of = start_dynamic()
    model = table_model(TABLE, per_token=True)
    hands = hands_of(PACKS, dp_cp.rank(), one_by_one=False)

    def samples(**changes: Any) -> list[Samples]:
        return [Batch(STEP, ids, size, cp_group=group_of(size), **changes).samples for ids, size in hands]

    def other() -> list[Samples]:
        microbatches = samples()
        if dp_cp.rank() == 1:
            microbatches[1] = Batch(STEP, [2, 1], 2, cp_group=group_of(2)).samples
        return microbatches

    static = [Batch(STEP, ids, 4).samples for ids, _ in hands]
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    staged = SimpleNamespace(tp=alone, pp=dp_cp, cp=alone, dp=alone, dp_cp=alone)
    hybrid = table_model(TABLE, per_token=True)
    hybrid.config.hybrid_context_parallel = True
    told: Any = {"gradients": "averaged over ranks"}
    plan = plan_step(samples(), "token_mean", model=model, dynamic_cp=True)
    grouped_plan = plan_step(samples(), "token_mean", dp_group=dp_cp, **told)
    batch, microbatch = Batch(STEP, *hands[0]), plan[0]
    numbers = batch.local_numbers(microbatch.cp_rank, microbatch.cp_size)
    losses = OLD[numbers].clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "other samples": lambda: plan_step(other(), "token_mean", model=model, dynamic_cp=True),
        "DP alone": lambda: plan_step(samples(), "token_mean", dp_group=state.get_data_parallel_group(), **told),
        "the launch's group": lambda: plan_step(static, "token_mean", model=model),
        "no per-token loss": lambda: plan_step(samples(), "token_mean", model=table_model(TABLE), dynamic_cp=True),
        "hybrid over stages": lambda: plan_step(None, "token_mean", model=hybrid, pg_collection=staged),
        "a pair": lambda: plan[0].loss(losses, form="nemo_rl"),
        "a 3-tuple": lambda: grouped_plan[0].loss(losses, form="3-tuple"),
        "the launch's size": lambda: gspo_loss(
            losses, OLD[numbers], ADVANTAGES[numbers], microbatch, state.get_context_parallel_group()
        ),
        "a loop's": lambda: grouped_plan[0].loss(losses),
        "verl": lambda: plan[0].loss(losses, form="verl"),
    }
    return {name: outcome_of(call) for name, call in calls.items()}


REFUSED = {
    "other samples": "ranks of a micro-batch's cp_group were given different samples",
    "DP alone": "Pass the group over DP x CP",
    "the launch's group": "were given different samples for this step",
    "no per-token loss": "Turn calculate_per_token_loss on",
    "hybrid over stages": "--hybrid-context-parallel with 4 pipeline stages",
    "a pair": "form='nemo_rl' with per-token loss, in a step whose cp_groups change",
    "a 3-tuple": "form='3-tuple' without per-token loss, in a step whose cp_groups change",
    "the launch's size": "a cp_group of 2 ranks: the micro-batch is cut for 4",
    "a loop's": "accepted",
    "verl": "accepted",
}


def test_what_is_refused_on_every_rank() -> None:
    for said in run_ranks(RANKS, refused):
        for name, text in REFUSED.items():
            assert text in said[name], (name, said[name])

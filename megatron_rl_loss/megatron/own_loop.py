"""`prove_first_step`: the proof of the first step in a loop of one's own, around Megatron's schedule."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.collectives import check_together
from megatron_rl_loss.core.counting import UnitCounting
from megatron_rl_loss.core.errors import check_callable
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.record import PlanUse, plan_of_model, plan_without_model
from megatron_rl_loss.megatron.probe import check_fresh_gradients
from megatron_rl_loss.megatron.proving import MegatronFirstStep, facts_of
from megatron_rl_loss.proof.outcomes import ProofLevel, proof_level

Schedule = Callable[..., Any]

_REMEDY = (
    "Give plan_step and prove_first_step one mode, or prove_first_step none: each model is then proved by its plan's. "
    "Return what microbatch.loss(...) returned, all of it and unchanged; put a coefficient into a Term."
)


def prove_first_step(
    forward_backward_func: Schedule,
    mode: str | Mode | ModeFunction | None = None,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    level: ProofLevel | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Schedule:
    """Wrap Megatron's schedule so that its first training step is proved; for a loop of your own.

        forward_backward_func = prove_first_step(get_forward_backward_func(), "prompt_mean")

    The proof covers the policy loss and every term that names a mode. The first rank prints one line. A step
    whose plan no loss came from is a fault; without a plan and without a tapped loss the line says
    NOT PROVED, and the first step with a plan is proved.

    Args:
        forward_backward_func: the schedule; all ranks call it together, with ``model=``.
        mode, divisor, units: as in `make_pg_loss_reducer`. None: that of each model's plan, and each model is proved.
        level: ``error`` raises on every rank before the optimizer step, ``strict`` also where parameters disagree,
            ``warn`` prints, ``off`` measures nothing; default: the environment's ``MEGATRON_RL_LOSS_PROOF``, else
            ``error``.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.

    Raises:
        ValueError, TypeError: unusable settings.
        BadBatchError: on every rank, in the first training step, for wrong weights, or a plan that no loss came from;
            in the first two, for gradients that were not 0 before a plan's first micro-batch.
    """
    check_callable(
        "the schedule", forward_backward_func, "it must be Megatron's function", "Pass get_forward_backward_func()"
    )
    asked = None if mode is None else resolve(mode, divisor=divisor, units=units)
    level_asked = proof_level(level)
    options: Any = {"level": level_asked, "pg_collection": pg_collection, "remedy": _REMEDY, "awaits_plan": True}
    new_proof = partial(MegatronFirstStep, asked, "the policy loss", **options)
    first, proofs = new_proof(), WeakKeyDictionary[Any, MegatronFirstStep]()
    num_trained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @wraps(forward_backward_func)
    def proved(*args: Any, **kwargs: Any) -> Any:
        model, trains = kwargs["model"], not kwargs.get("forward_only")
        chunk = model[0] if isinstance(model, list) else model
        proof = proofs.setdefault(chunk, new_proof()) if mode is None else first
        plan = plan_of_model(chunk) if trains else None
        if plan is not None and (not plan.is_handed_out or all(plan.is_carried)):
            plan = None  # skipped, or of a step that is over
        if plan is None and trains and mode is not None:  # without a mode it may be another model's
            plan = plan_without_model()
        if trains and level_asked != "off" and num_trained.get(chunk, 0) < 2:
            num_trained[chunk] = num_trained.get(chunk, 0) + 1
            _check_fresh(model, plan, pg_collection)
        with proof.step(model, trains=trains, plan=plan):
            return forward_backward_func(*args, **kwargs)

    return proved


def _check_fresh(model: Any, plan: PlanUse | None, pg_collection: ProcessGroupCollection | None) -> None:
    """Reject gradients that are not 0 before a plan's first micro-batch, on all ranks of the model together."""
    groups, _ = facts_of(model, pg_collection)

    def check() -> None:
        if plan is not None and not any(plan.is_carried):
            check_fresh_gradients(model if isinstance(model, list) else [model])

    check_together(check, [groups.dp_cp, groups.tp, groups.pp])

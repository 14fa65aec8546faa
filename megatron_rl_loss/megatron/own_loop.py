"""`prove_first_step`: the proof of the first step in a loop of one's own, around Megatron's schedule."""

import gc
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.collectives import check_together
from megatron_rl_loss.core.counting import UnitCounting
from megatron_rl_loss.core.errors import check_callable
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.plan import Plan
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

    The proof covers the policy loss and every term that names a mode. The first rank prints one line. A step that
    takes micro-batches of a plan and no loss of theirs is a fault. Of one that takes none, without a tapped loss, the
    line says NOT PROVED, and the first step with a plan is proved: a plan may be skipped, or serve for something else.

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
        plan = None
        if trains and not (proof.is_over and num_trained.get(chunk, 0) >= 2):
            named = [plan_of_model(chunk), plan_without_model() if mode is not None else None]  # else another model's
            plan = next((use for use in named if use is not None and _is_of_step(use, [args, kwargs])), None)
        if trains and level_asked != "off" and num_trained.get(chunk, 0) < 2:
            num_trained[chunk] = num_trained.get(chunk, 0) + 1
            _check_fresh(model, plan, pg_collection)
        with proof.step(model, trains=trains, plan=plan):
            return forward_backward_func(*args, **kwargs)

    return proved


#: The search for a plan ends after so many objects that may lead to one: a dataset may have millions.
_MOST_OBJECTS = 10_000
_LEAVES = (type, ModuleType, torch.nn.Module, torch.Tensor, np.ndarray, str, bytes, int, float)


def _is_of_step(plan: PlanUse, given: Any) -> bool:
    """True if micro-batches of the plan, or the plan to take some from, can be reached from what a schedule is given.

    Any other plan was skipped, is of a step that is over, or served for something else. Sets `is_handed_out`, True for
    micro-batches: of a plan alone, the step must still take some.
    """
    if all(plan.is_carried):
        return False
    objects, known, finds_plan = deque([given]), set[int](), False
    plan.is_handed_out = False
    while objects and len(known) < _MOST_OBJECTS:
        found = objects.popleft()
        if id(found) in known or isinstance(found, _LEAVES):
            continue
        known.add(id(found))
        if isinstance(found, Microbatch):
            if found.plan is plan:
                plan.is_handed_out = True
                return True
        elif isinstance(found, Plan):
            finds_plan |= found.record.use is plan
        elif isinstance(found, FunctionType):  # of its module only what it names
            named = [found.__globals__[name] for name in found.__code__.co_names if name in found.__globals__]
            objects += [found.__closure__, found.__defaults__, found.__kwdefaults__, *named]
        else:
            objects += gc.get_referents(found)
    return finds_plan


def _check_fresh(model: Any, plan: PlanUse | None, pg_collection: ProcessGroupCollection | None) -> None:
    """Reject gradients that are not 0 before a plan's first micro-batch, on all ranks of the model together."""
    groups, _ = facts_of(model, pg_collection)

    def check() -> None:
        if plan is not None and not any(plan.is_carried):
            check_fresh_gradients(model if isinstance(model, list) else [model])

    check_together(check, [groups.dp_cp, groups.tp, groups.pp])

"""`plan_step`: a step counted before its first micro-batch, with the groups of a Megatron model or with given ones."""

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, get_args

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.plan.checks import EmptyStep, check_samples
from megatron_rl_loss.plan.facts import check_finished
from megatron_rl_loss.plan.plan import Plan, make_plan
from megatron_rl_loss.step.collectives import Group, StepGroups, attempt, stated_dp_group
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

#: With a model's first chunk: of each micro-batch of its last plan, True once it was trained on.
_LAST = "_carried_by_megatron_rl_loss"


def plan_step(
    samples: Sequence[Samples] | Callable[[], Sequence[Samples]] | None,
    mode: str | Mode | ModeFunction,
    *,
    model: Any = None,
    pg_collection: Any = None,
    dynamic_cp: bool = False,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    terms: Mapping[str, str | Mode | ModeFunction | None] | None = None,
    term_masks: Sequence[str] = (),
    dp_group: Group | EllipsisType | None = ...,
    cp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    per_token_loss: bool = False,
    num_microbatches: int | None = None,
    empty_step: EmptyStep = "warn",
) -> Plan:
    """Count a step over all ranks, in one round of collectives. All ranks call it together, before they train.

    >>> plan = plan_step([Samples([[1, 1]]), Samples([[1, 1, 1]])], "token_mean", dp_group=None)
    >>> plan[0].weights, plan[1](torch.ones(3))
    (tensor([0.2000, 0.2000]), tensor(0.6000))

    In a loop that drives Megatron's schedule itself, groups and `per_token_loss` come from the model:

        plan = plan_step(describe, "prompt_mean", model=model)  # describe() gives a Samples for each micro-batch
        ...
        return plan[i].loss(losses)  # in the loss function of micro-batch i

    Args:
        samples: one `Samples` for each micro-batch of this rank, in order; empty ones for filler micro-batches. Or a
            function that makes them: an error of a mask or of your loader then raises on every rank too. None on a
            pipeline stage that reads no data.
        mode, divisor, units: as in `make_pg_loss_reducer`; ranks are checked to agree.
        model: the Megatron model chunk, or list of chunks, that the schedule is called with. The installed
            Megatron is checked to scale losses as the carriers expect.
        pg_collection: Megatron's process groups; default: the model's, else its parallel state.
        dynamic_cp: with a model, context-parallel groups change between micro-batches, each of which names its own:
            ``Samples(..., cp_group=...)``. Counts are then summed over DP x CP. True by default where the model's
            config has it.
        terms: modes by the names of the loss's terms, for `Term`s without a mode. A term whose mode declares sums of
            its own must be declared here.
        term_masks: names of the samples' ``term_masks`` that terms use; their counts travel with the others.
        dp_group: the data-parallel group *without* context parallelism, or with it where `Samples` have a `cp_group`
            of their own; None where this rank holds the whole step. Required where `torch.distributed` has several
            ranks.
        cp_group: the context-parallel group; None where tokens are not cut.
        replica_groups: further groups whose ranks hold the same samples (tensor, pipeline parallel).
        per_token_loss: Megatron's `calculate_per_token_loss`.
        num_microbatches: the number that the schedule is called with; by default that of `samples`. DP ranks may
            differ in it where the schedule allows that.
        empty_step: for a step without an active token: ``warn`` and go on with zero gradients, or ``error``.

    Raises:
        BadBatchError: on every rank (the error itself where there is one), if any rank's samples are unusable, do not
            agree with those of its replicas or miss the ids that a mode needs; with a model, if some micro-batches of
            its last plan were trained on, and others not.
        ContractError: Megatron scales losses in another way.
        ValueError, TypeError: unusable settings; no `dp_group` argument in a job of several ranks; groups together with
            a model; a model config under which the loss would not be exact.
    """
    asked = attempt(lambda: LossModes.resolve(mode, divisor=divisor, units=units, terms=terms))
    modes = asked if isinstance(asked, LossModes) else LossModes.resolve("token_sum")  # the error goes to all ranks
    check_choice("empty_step", empty_step, get_args(EmptyStep))
    if isinstance(term_masks, str):
        raise TypeError(f"term_masks is {term_masks!r}: it must be a list of names. Pass [{term_masks!r}].")
    if model is None:
        if pg_collection is not None or dynamic_cp:
            raise ValueError("pg_collection or dynamic_cp without a model: both describe a model. Pass model= too.")
        groups = StepGroups(stated_dp_group(dp_group, "a plan"), cp_group, tuple(replica_groups))
    else:
        if not isinstance(dp_group, EllipsisType) or cp_group is not None or replica_groups or per_token_loss:
            raise ValueError(
                "model= together with groups or per_token_loss: the model brings both. Pass the model alone, with "
                "pg_collection= for other groups."
            )
        from megatron_rl_loss.megatron.planning import settings_of

        groups, per_token_loss = settings_of(model, pg_collection, dynamic_cp=dynamic_cp)
    first_chunk = model[0] if isinstance(model, list) else model

    def describe() -> Sequence[Samples] | None:
        if isinstance(asked, Exception):
            raise asked
        if model is not None:
            check_finished(first_chunk.__dict__.pop(_LAST, ()))
        made = samples() if callable(samples) else samples
        return check_samples(made, num_microbatches, modes, groups, term_masks)

    plan = make_plan(
        attempt(describe),
        modes,
        groups,
        num_microbatches,
        term_masks=term_masks,
        per_token_loss=per_token_loss,
        empty_step=empty_step,
    )
    if model is not None:
        first_chunk.__dict__[_LAST] = plan.facts.is_carried
    return plan

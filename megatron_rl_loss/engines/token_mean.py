"""AReaL, ROLL and RLinf, which train on the token mean of an optimizer step: any mode, by a worker of your own.

    from areal.engine import MegatronPPOActor  # or FSDPPPOActor
    from megatron_rl_loss.engines.token_mean import aggregate

    class Actor(MegatronPPOActor):  # in a module that AReaL's workers can import
        pass

    aggregate(Actor, "prompt_mean", group_size=8)

Each token's advantage is multiplied by its weight in the mode * T during the engine's step method, where T is the
engine's divisor. Losses must be proportional to the advantage; other terms stay token means. Imports no engine.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.engines import areal, rlinf, roll
from megatron_rl_loss.engines.places import swapped
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced, is_replaced
from megatron_rl_loss.engines.weighed_batches import Batch, StepArguments
from megatron_rl_loss.extend import LossModes, ModeFunction, Promises, UnitCounting

__all__ = ["aggregate"]
#: By the package of the class.
ENGINES = {"areal": areal.ENGINE, "roll": roll.ENGINE, "rlinf": rlinf.ENGINE}


def aggregate(
    owner: Any,
    mode: str | Mode | ModeFunction,
    *,
    group_size: int | None = None,
    divisor: float | None = None,
    units: UnitCounting | None = None,
) -> Replaced:
    """Make workers of that class train on the mode.

    Args:
        owner: AReaL: a subclass of ``MegatronPPOActor`` or ``FSDPPPOActor``, or, without a controller, that class.
            ROLL: ``MegatronTrainStrategy``. RLinf: a subclass of ``MegatronActor``.
        group_size: rows generated for each prompt, which the proof compares; default: the engine's setting. If neither
            is known, a mode by prompt is proved in part.
        mode, divisor, units: as in `make_pg_loss_reducer`.

    Raises:
        ValueError, TypeError: a class that has an aggregation, or of another engine; unusable settings.
        BadBatchError: on every rank, in a step: settings of the engine that break the token mean; a mode by prompt
            where prompts are unknown; weights that differ within a sample for losses of sequences; a first step in
            which a token has a weight that the mode does not ask for.
    """
    modes, group_size = LossModes.resolve(mode, divisor=divisor, units=units), Promises.checked_size(group_size)
    packages = [base.__module__.partition(".")[0] for base in getattr(owner, "__mro__", ())]
    engine = next((ENGINES[package] for package in packages if package in ENGINES), None)
    if engine is None:
        raise ValueError(f"{owner!r}: it must be a class of {', '.join(ENGINES)}. Pass one, or a subclass.")

    def step(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        if not engine.trains(arguments["self"]):
            return stock()
        proof = replaced.proof
        batches, columns, _ = engine.weigh(modes, arguments, proof, group_size)
        proves = proof is not None and not proof.is_over
        with ExitStack() as stack:
            for batch, own in zip(batches, columns, strict=True):
                stack.enter_context(_instead(batch, own))
            stack.enter_context(engine.replace_loss(arguments, partial(engine.tap, arguments)))
            result = running(stock, arguments)
        if proves and not (proof.outcome or proof.is_over):
            proof.give_up("no schedule of Megatron ran in the step.")
        return result

    def running(stock: Callable[[], Any], arguments: StepArguments) -> Any:
        with swapped(vars(replaced), {"now": arguments["self"]}):
            return stock()

    further = [Function(owner, *function) for function in engine.further]
    if engine.schedule and hasattr(owner, engine.schedule):
        further.append(Function(owner, engine.schedule, [], running))
    checks = [check for check in engine.checks(owner) if not is_replaced(check.owner, check.name, check.kind)]
    replaced = Replaced(engine.name, engine.versions, [Function(owner, *engine.step, step), *further, *checks])
    where = f"{owner.__name__}.{engine.step[0]}"
    never = f"{where} called no policy loss, or was not called. Use {engine.name} {engine.versions}."

    def trains_policy() -> bool:
        return replaced.now is not None and engine.trains(replaced.now)

    beside = engine.unmeasured
    replaced.proof = prove(engine.name, modes.policy, beside=beside, never=never, trains_policy=trains_policy)
    if hasattr(owner, "as_controller") and owner.__module__.partition(".")[0] in (*ENGINES, "__main__"):
        owner.as_controller = _refuse_controller
    return replaced


@contextmanager
def _instead(batch: Batch, columns: Mapping[str, Tensor]) -> Iterator[None]:
    """Those columns in the batch inside a ``with``, of which it has "advantages" of its own."""
    plain = batch["advantages"]
    try:
        for name, column in columns.items():
            batch[name] = column
        yield
    finally:
        for name in columns:
            del batch[name]
        batch["advantages"] = plain


def _refuse_controller(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "a controller of a class of AReaL's own or of a main script: workers import that class anew, without the "
        "aggregation. Put a subclass, and its aggregate(...) call, into a module that workers can import."
    )

"""The proof of the first training step of an engine that calls Megatron's schedules itself."""

import sys
from collections.abc import Callable
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.engines.loss_trials import LossPaths, WeighedMicrobatch
from megatron_rl_loss.engines.policy_tap import tap_policy
from megatron_rl_loss.engines.replacing import Function, Replaced, announce
from megatron_rl_loss.extend import (
    Aggregation,
    Promises,
    UnitCounting,
    chunks_of,
    proof_level,
    resolve,
    run_schedules_by,
)


def prove(
    engine: str,
    asked: Aggregation | None,
    loss: str = "policy loss",
    *,
    trains_policy: Callable[[], bool] = lambda: True,
    each_model: bool = False,
    **words: Any,
) -> Any:
    """The `EngineStep`, with its `words`, of this process's next training step, at the environment's level.

    Returns None, and prints that nothing is proved, without Megatron.

    Args:
        trains_policy: returns True, on all ranks alike, if the call of a schedule trains the policy.
        each_model: prove the next step of each model; a process may hold an actor and a critic.
    """
    if "megatron.core.pipeline_parallel" not in sys.modules:
        announce(f"{engine}: NOT PROVED: Megatron-Core is not loaded")
        return None
    from megatron_rl_loss.engines.engine_step import EngineStep

    proof = EngineStep(asked, f"{engine}'s {loss}", level=proof_level(), is_of_engine=True, **words)
    proofs: WeakKeyDictionary[Any, EngineStep] = WeakKeyDictionary()  # an address is used again

    def run(schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"]
        own = proofs.setdefault(chunks_of(model)[0], copy(proof)) if each_model else proof
        with own.step(model, trains=not (proof.is_over or kwargs.get("forward_only")) and trains_policy()):
            result = schedule(*args, **kwargs)
        if proof.is_over:
            put_back()
        return result

    put_back = run_schedules_by(run)
    return proof


def prove_policy_loss(
    owner: Any,
    name: str,
    row: LossPaths,
    mode: str | Mode | ModeFunction,
    describe: Callable[[dict[str, Any]], WeighedMicrobatch],
    *,
    engine: str = "this engine",
    group_size: int | Callable[[dict[str, Any]], int] | None = None,
    divisor: float | None = None,
    units: UnitCounting | None = None,
) -> Replaced:
    """Prove the first training step of an engine into which you multiplied weights yourself.

    Where an engine trains on the mean over the step's T tokens, advantages * `weights_column` * T train on any mode.
    Call this in each process that trains, before its first step, once. It aggregates nothing. A token that does not
    weigh what the mode asks for aborts all ranks before the optimizer step.

        LOSS = LossPaths("log_probs", "batch.advantages", {"batch.old_log_probs": "old"})
        prove_policy_loss(losses, "ppo_loss", LOSS, "prompt_mean", describe)

    Args:
        owner, name: the module or class, and the name, of the engine's loss function: the outermost one, which gets the
            batch as it was sent, so that changes inside are measured too. It returns the loss of a micro-batch, or a
            tuple that begins with it. Modules that imported the function get the measured one too.
        row: where the function finds log-probs, advantages and old log-probs.
        mode, divisor, units: as they were asked for, in `weights_column`.
        describe: the function's arguments by name -> `WeighedMicrobatch`: masks and ids as your batch has them, not as
            the engine's code does inside; the factors; and the advantages before they were multiplied.
        engine: words for the printed line.
        group_size: samples generated for each prompt; for a mode by prompt a larger group of ids is then a fault. Or
            the function's arguments by name -> that number by the engine's config; a larger group is then not proved.

    Raises:
        ValueError, TypeError: a function that is missing or replaced already; as `make_pg_loss_reducer`; in a step,
            paths that the function's arguments do not have, and `WeighedMicrobatch` without plain advantages.
        BadBatchError: on every rank, in the first training step, for wrong weights.
    """
    asked = resolve(mode, divisor=divisor, units=units)
    if not callable(describe):
        raise TypeError(
            f"describe is a {type(describe).__name__}: it must be a function of the loss function's arguments by name. "
            "Return a WeighedMicrobatch of them."
        )
    sure_size = None if callable(group_size) else Promises.checked_size(group_size)

    def measured(arguments: dict[str, Any]) -> WeighedMicrobatch:
        microbatch = describe(arguments)
        if callable(group_size) and replaced.proof is not None:
            replaced.proof.promises = Promises(Promises.checked_size(group_size(arguments), "group_size(arguments)"))
        if not isinstance(microbatch, WeighedMicrobatch) or microbatch.plain is None:
            raise TypeError(
                f"describe(arguments) returned {type(microbatch).__name__}: it must be a WeighedMicrobatch with plain, "
                "the advantages before they were weighed, or weights that nobody multiplied would pass for right. Keep "
                "them as another column of the batch."
            )
        return microbatch

    def call(stock: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        return tap_policy(row, stock, arguments, lambda: measured(arguments))

    function = Function(owner, name, (), call, bool, kind="a proof")
    replaced = Replaced(f"proof of {engine}", "in the version that its row was written for", [function])
    replaced.proof = prove(engine, asked, beside="other terms are not measured", never=f"{name} was not called.")
    if replaced.proof is not None and not callable(group_size):
        replaced.proof.promises = Promises(sure_size, is_group_size_sure=True)
    return replaced

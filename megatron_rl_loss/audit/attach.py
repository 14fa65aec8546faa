"""Importing this module audits a training step of the process that imports it, wherever an engine trains.

Name it where the engine imports a module in its workers (verl's ``external_lib``, a plugin), or `attach` where it calls
a function there (slime's ``--custom-megatron-init-path``, Ray's ``worker_process_setup_hook``). `VARIABLE` holds the
options of ``python -m megatron_rl_loss audit``. The first rank prints and writes the verdicts; then Megatron's schedule
is as it was and training goes on, with the numbers that it would have had. An error of the audit is printed.
"""

import functools
import json
import os
import shlex
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

from megatron_rl_loss.audit.launch import (
    SCHEDULES,
    add_audit_options,
    measure_once,
    report_verdicts,
    samples_of,
    when_imported,
)
from megatron_rl_loss.step.collectives import attempt, world_rank

#: Of the environment: ``--json verdicts.json --expect token_mean``, say.
VARIABLE = "MEGATRON_RL_LOSS_AUDIT"


def attach(*_: Any) -> None:
    """For engines that name a function; takes and ignores what they call it with. The import has done all."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{VARIABLE}={os.environ.get(VARIABLE, '')!r}: {message}. It takes the options of "
            "python -m megatron_rl_loss audit, without the script."
        )


def _arm() -> None:
    parser = _Parser(add_help=False)
    add_audit_options(parser)
    try:
        words = shlex.split(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        parser.error(str(error))
    options = parser.parse_args(words)
    when_imported(SCHEDULES, functools.partial(measure_once, options, _measured))


def _measured(options: Namespace, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the schedule returns. Only an error of the schedule leaves this function."""
    with ExitStack() as stack:
        audit: Any = attempt(lambda: stack.enter_context(_audit(options, kwargs)))
        result = schedule(*args, **kwargs)
        failure = audit if isinstance(audit, Exception) else attempt(stack.close)
    if failure is not None or not audit.finalized_later:
        _conclude(options, audit, failure)
        return result
    owner = _finalizer(kwargs["model"])
    finalize = owner.run_pending_grad_sync

    def finalize_and_conclude() -> None:
        del owner.run_pending_grad_sync  # the method is there again
        finalize()
        _conclude(options, audit, attempt(audit.measure))

    owner.run_pending_grad_sync = finalize_and_conclude
    return result


def _audit(options: Namespace, kwargs: dict[str, Any]) -> Any:
    from megatron_rl_loss.audit.megatron.audit import Audit

    audit = Audit(kwargs["model"], samples_of=samples_of(options))
    kwargs["data_iterator"] = audit.watch(kwargs.get("data_iterator"))
    audit.finalized_later = _finalizer(kwargs["model"]) is not None
    return audit


def _finalizer(model: Any) -> Any:
    """Who finalises gradients after the schedule, before the optimizer's step, as SkyRL's model does; else None."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0] if isinstance(model, list) else model)
    owner = getattr(config.finalize_model_grads_func, "__self__", None)
    return owner if hasattr(owner, "run_pending_grad_sync") else None


def _conclude(options: Namespace, audit: Any, failure: Exception | None) -> None:
    """Print and write what was found, on the first rank; or that the audit failed, on any."""
    outcome: Any = failure
    if failure is None and audit.is_first_rank:
        print(f"The audit of training step {options.step} of this process; training goes on:", flush=True)
        outcome = attempt(lambda: report_verdicts(options, audit))
    if isinstance(outcome, Exception):
        attempt(lambda: _say(options, outcome))


def _say(options: Namespace, failure: Exception) -> None:
    why = f"The audit failed, and training goes on. {type(failure).__name__}: {failure}"
    print(f"NO VERDICT: {why}", flush=True)
    traceback.print_exception(failure)
    if options.json is not None and world_rank() == 0:
        options.json.write_text(json.dumps({"error": why}) + "\n")


_arm()

"""Importing this module audits a training step of the process that imports it, wherever an engine trains.

Name it where the engine imports a module in its workers (verl's ``external_lib``, a plugin), or `attach` where it calls
a function there (slime's ``--custom-megatron-init-path``, Ray's ``worker_process_setup_hook``). `VARIABLE` holds the
options of ``python -m megatron_rl_loss audit``. The first rank prints and writes the verdicts; training goes on with
the numbers that it would have had. A process that never imports Megatron-Core is left as it is.
"""

import os
import shlex
from argparse import ArgumentParser
from typing import Any, NoReturn

from megatron_rl_loss.audit.launch import add_audit_options, audit_once

#: An environment variable: ``--json verdicts.json --expect token_mean``, say.
VARIABLE = "MEGATRON_RL_LOSS_AUDIT"


def attach(*_: Any) -> None:
    """A function for engines that name one; it ignores its arguments, since the import does all."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        given, remedy = f"{VARIABLE}={os.environ.get(VARIABLE, '')!r}", "It takes the options of the audit command"
        raise ValueError(f"{given}: {message}. {remedy} (python -m megatron_rl_loss audit --help), without a script.")


def _audit() -> None:
    parser = _Parser(add_help=False)
    add_audit_options(parser)
    try:
        words = shlex.split(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        parser.error(str(error))
    options = parser.parse_args(words)
    header = f"The audit of training step {options.step} of this process; training goes on:"
    audit_once(options, lambda text, status: print(header, text, sep="\n", flush=True) if text else None)


_audit()

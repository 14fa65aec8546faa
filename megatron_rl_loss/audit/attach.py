"""An audit by import: the process that imports this module has one of its training steps measured.

Name the module in an engine's setting for imports in workers (verl's ``external_lib``, a plugin), or name `attach` in
its setting for a function (slime's ``--custom-megatron-init-path``, Ray's ``worker_process_setup_hook``). `VARIABLE`
holds the options of ``python -m megatron_rl_loss audit``. The first rank prints and writes the verdicts; training goes
on, with unchanged numbers. Processes that never import Megatron-Core are not affected.
"""

import os
import shlex
from argparse import ArgumentParser
from typing import Any, NoReturn

from megatron_rl_loss.audit.launch import add_audit_options, audit_once
from megatron_rl_loss.core.errors import print_text

#: An environment variable, for example ``--json verdicts.json --expect token_mean``.
VARIABLE = "MEGATRON_RL_LOSS_AUDIT"


def attach(*_: Any) -> None:
    """Do nothing, whatever the arguments: engines that name a function import the module, which starts the audit."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{VARIABLE}={os.environ.get(VARIABLE, '')!r}: {message}. Set the variable to options of the audit command "
            "(python -m megatron_rl_loss audit --help), without a script."
        )


def _audit() -> None:
    parser = _Parser(add_help=False)
    add_audit_options(parser)
    try:
        words = shlex.split(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        parser.error(str(error))
    options = parser.parse_args(words)
    header = f"The audit of training step {options.step} of this process; training goes on:"
    audit_once(options, lambda text, status: print_text(f"{header}\n{text}") if text else None)


_audit()

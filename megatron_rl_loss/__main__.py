"""``python -m megatron_rl_loss``: ``modes``, and what every framework calls them; ``audit`` of a training script."""

import os
import sys
from argparse import ArgumentParser

from megatron_rl_loss.aliases import format_modes
from megatron_rl_loss.audit.launch import add_audit_options, run_audit


def main() -> None:
    parser = ArgumentParser(prog="python -m megatron_rl_loss", description="Policy-gradient loss aggregation.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("modes", help="print the modes, their formulas and flags, and what other frameworks call them")
    add_audit_options(commands.add_parser("audit", help="run your training script until one step of it is measured"))
    options = parser.parse_args()
    if options.command == "audit":
        sys.exit(run_audit(options))
    try:
        print(format_modes(), flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

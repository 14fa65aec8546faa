"""``python -m megatron_rl_loss``: ``modes`` and what frameworks call them; ``example``; ``audit`` of your script."""

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_rl_loss.audit.launch import add_audit_options, run_audit
from megatron_rl_loss.example_files import copy_example, format_examples
from megatron_rl_loss.modes.names import format_modes


def main() -> None:
    parser = ArgumentParser(prog="python -m megatron_rl_loss", description="Policy-gradient loss aggregation.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("modes", help="print the modes, their formulas and flags, and other frameworks' names")
    example = commands.add_parser("example", help="list the examples, or copy one out with the files it needs")
    example.add_argument("name", metavar="NAME", nargs="?", help="a file of the list, also without suffix or folder")
    example.add_argument("--to", metavar="FOLDER", type=Path, default=Path(), help="where to; default: here")
    add_audit_options(commands.add_parser("audit", help="run your training script until one step of it is measured"))
    options = parser.parse_args()
    if options.command == "audit":
        sys.exit(run_audit(options))
    try:
        print(format_modes() if options.command == "modes" else _run_example(options), flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as refusal:
        parser.error(str(refusal))


def _run_example(options: Namespace) -> str:
    """What `example` prints."""
    if options.name is None:
        return format_examples()
    return "\n".join(map(str, copy_example(options.name, options.to)))


if __name__ == "__main__":
    main()

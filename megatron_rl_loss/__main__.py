"""``python -m megatron_rl_loss``: ``modes`` and what frameworks call them; ``example``; ``audit``; ``log-probs``.

The examples lie beside the package in a checkout, inside it in a wheel.
"""

import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_rl_loss.audit.launch import add_audit_options, add_script, run_audit
from megatron_rl_loss.audit.log_prob_gap import compare_dumps
from megatron_rl_loss.errors import did_you_mean
from megatron_rl_loss.modes.names import format_modes

_INSIDE = Path(__file__).parent / "examples"
EXAMPLES = _INSIDE if _INSIDE.is_dir() else _INSIDE.parents[1] / "examples"
_ON_CPU = ("megatron_on_cpu.py", "packed_attention.py")
_LAUNCH = ("pretrain_grpo.py", "pretrain_of_version.py", "rollouts.py", "arithmetic.jsonl", "launch_grpo.sh", *_ON_CPU)
#: Files that go with an example; others go alone.
COMPANIONS = {
    **dict.fromkeys(["audit_own_loop.py", "on_cpu.py"], _ON_CPU),
    **dict.fromkeys(["launch_grpo.sh", "launch_grpo.slurm", "pretrain_grpo.py"], _LAUNCH),
    "online_grpo.py": ("online/*.py", "rollouts.py", *_ON_CPU),
    "recipes/own_loop.py": ("megatron_on_cpu.py",),
}


def main() -> int:
    """Run the command of ``sys.argv``; its exit status."""
    parser = ArgumentParser(prog="python -m megatron_rl_loss", description="Policy-gradient loss aggregation.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("modes", help="print the modes, their formulas and flags, and other frameworks' names")
    example = commands.add_parser("example", help="list the examples, or copy one out with the files it needs")
    example.add_argument("name", metavar="NAME", nargs="?", help="a file of the list, also without suffix or folder")
    example.add_argument("--to", metavar="FOLDER", type=Path, default=Path(), help="where to; default: here")
    audit = commands.add_parser("audit", help="run your training script until one step of it is measured")
    add_audit_options(audit)
    add_script(audit)
    gap = commands.add_parser(
        "log-probs",
        help="compare two dumps of log-probs, and show what explains their gap",
        description="Dumps: slime's debug dumps; a .pt of lists or 1-D tensors, or a dict of these by sample id; a "
        ".jsonl with a list per line. Exit status 2 where samples or tokens could not be compared.",
    )
    gap.add_argument("theirs", metavar="ROLLOUT", type=Path, help="dump of the sampler")
    gap.add_argument("ours", metavar="TRAIN", type=Path, help="dump of the trainer; its masks count, if it has any")
    status = 0
    try:
        try:
            options = parser.parse_args()
            text, status = run_audit(options) if options.command == "audit" else _run(options)
            if text:
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a terminal may know ASCII alone
                print(text.encode(encoding, errors="replace").decode(encoding))
        finally:
            sys.stdout.flush()  # --help has printed, too
    except BrokenPipeError:  # the reader, `head` for example, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as refusal:
        parser.error(str(refusal))
    return status


def _run(options: Namespace) -> tuple[str, int]:
    """A command's text and exit status."""
    if options.command == "log-probs":
        compared = compare_dumps(options.theirs, options.ours)
        return f"ours: {options.ours}, theirs: {options.theirs}\n{compared}", 2 if compared.left_out else 0
    if options.command == "modes":
        return format_modes(), 0
    if options.name is None:
        return format_examples(), 0
    return "\n".join(map(str, copy_example(options.name, options.to))), 0


def example_names() -> list[str]:
    """Paths of the examples, relative to their folder."""
    paths = [*EXAMPLES.iterdir(), *(EXAMPLES / "recipes").iterdir()]
    return sorted(path.relative_to(EXAMPLES).as_posix() for path in paths if path.suffix in (".py", ".sh", ".slurm"))


def find_example(name: str) -> str:
    """The example of that path, file name, or either without the suffix; ValueError for none, or several."""
    names = example_names()
    found = [one for one in names if name in (one, one.rpartition(".")[0], Path(one).name, Path(one).stem)]
    if len(found) > 1:
        raise ValueError(f"example {name!r}: there are several of that name. Write one of {', '.join(found)}.")
    if not found:
        raise ValueError(f"example {name!r}: there is none of that name. {did_you_mean(name, names)}.")
    return found[0]


def copy_example(name: str, into: Path) -> list[Path]:
    """Copy an example, with what it needs, into a folder, which is made; the paths of these files.

    Files that are there already and equal stay. Raises ValueError for an unknown name, and if a file that is there
    differs; then nothing is written.
    """
    file = find_example(name)
    sources = [path for pattern in (file, *COMPANIONS.get(file, ())) for path in sorted(EXAMPLES.glob(pattern))]
    copies = {source: into / source.relative_to(EXAMPLES).as_posix().removeprefix("recipes/") for source in sources}
    if others := [str(copy) for source, copy in copies.items() if copy.exists() and not _equal(source, copy)]:
        raise ValueError(
            f"a copy of example {name!r}: a copy overwrites nothing, and another {', '.join(others)} is there already. "
            "Choose another folder with --to."
        )
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return list(copies.values())


def _equal(source: Path, copy: Path) -> bool:
    return copy.is_file() and copy.read_bytes() == source.read_bytes()


def format_examples() -> str:
    """A line for each example: its name and the first sentence of its docstring or first comment."""
    texts = {name: (EXAMPLES / name).read_text(encoding="utf-8") for name in example_names()}
    return "\n".join(f"{name:<36}{_first_sentence(text)}".rstrip() for name, text in texts.items())


def _first_sentence(text: str) -> str:
    match = re.match(r'(?:#![^\n]*\n)?(?:"""|# )(.+?)(?:\.\s|:\n|\n\s*\n|\n#\s*\n|"""|$)', text, re.DOTALL)
    return re.sub(r"\s*\n#?\s*", " ", match[1]) if match else ""


if __name__ == "__main__":
    sys.exit(main())

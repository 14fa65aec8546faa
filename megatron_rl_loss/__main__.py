"""``python -m megatron_rl_loss``: ``modes`` and what frameworks call them; ``example``; ``audit`` of your script.

The examples lie beside the package in a checkout, inside it in a wheel. Every file in that folder is an example.
"""

import ast
import os
import re
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from megatron_rl_loss.audit.launch import add_audit_options, add_script, run_audit
from megatron_rl_loss.errors import did_you_mean
from megatron_rl_loss.modes.names import format_modes

_PACKAGE = Path(__file__).parent


def main() -> None:
    parser = ArgumentParser(prog="python -m megatron_rl_loss", description="Policy-gradient loss aggregation.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("modes", help="print the modes, their formulas and flags, and other frameworks' names")
    example = commands.add_parser("example", help="list the examples, or copy one out with the files it needs")
    example.add_argument("name", metavar="NAME", nargs="?", help="a file of the list, also without suffix or folder")
    example.add_argument("--to", metavar="FOLDER", type=Path, default=Path(), help="where to; default: here")
    audit = commands.add_parser("audit", help="run your training script until one step of it is measured")
    add_audit_options(audit)
    add_script(audit)
    options = parser.parse_args()
    if options.command == "audit":
        sys.exit(run_audit(options))
    try:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may know ASCII alone
        if options.command == "modes":
            text = format_modes()
        elif options.name is None:
            text = format_examples()
        else:
            text = "\n".join(map(str, copy_example(options.name, options.to)))
        print(text, flush=True)
    except BrokenPipeError:  # the reader, `head` for example, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as refusal:
        parser.error(str(refusal))


def examples_folder() -> Path:
    """Where the examples are."""
    inside = _PACKAGE / "examples"
    return inside if inside.is_dir() else _PACKAGE.parent / "examples"


def example_files(folder: Path) -> list[str]:
    """Every file below `folder`, as a path relative to it."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if "__pycache__" not in path.parts)


def find_example(name: str, folder: Path) -> str:
    """The file that is meant: by its path, its file name, or either without the suffix.

    Raises ValueError for a name that fits none, or several.
    """
    files = {file: Path(file) for file in example_files(folder)}
    fitting = [f for f, path in files.items() if name in (path.with_suffix("").as_posix(), path.name, path.stem)]
    if name in files:
        return name
    if len(fitting) > 1:
        raise ValueError(f"example {name!r}: there are several of that name. Write one of {', '.join(fitting)}.")
    if not fitting:
        raise ValueError(f"example {name!r}: there is none of that name. {did_you_mean(name, list(files))}.")
    return fitting[0]


def with_companions(file: str, folder: Path) -> list[str]:
    """`file`, and every file beside and below it that it imports or names, and those that they do, and so on."""
    home = Path(file).parent
    near = [path for path in map(Path, example_files(folder)) if path.is_relative_to(home)]
    needed, waiting = [], [Path(file)]
    while waiting:
        needed.append(waiting.pop())
        text = (folder / needed[-1]).read_text()
        modules = set(_imports(text)) if needed[-1].suffix == ".py" else set()
        for path in near:
            wanted = _module(path.relative_to(home)) in modules or _names(text, path, needed[-1].parent)
            if wanted and path not in [*needed, *waiting]:
                waiting.append(path)
    return [file, *sorted(path.as_posix() for path in needed[1:])]


def _names(text: str, path: Path, folder: Path) -> bool:
    """Whether `text`, of a file in `folder`, has the file name of `path`."""
    if not path.is_relative_to(folder):
        return False
    return re.search(rf"(?<![\w.]){re.escape(path.relative_to(folder).as_posix())}\b", text) is not None


def _module(path: Path) -> str | None:
    """What `path` is imported as; None if it is no Python."""
    parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
    return ".".join(parts) if path.suffix == ".py" else None


def _imports(code: str) -> Iterator[str]:
    """Modules that `code` may import, and the packages they are in."""
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def copy_example(name: str, into: Path) -> list[Path]:
    """Copy an example, with what it needs, into a folder, which is made; the files that were written.

    Raises ValueError for an unknown name, and if one of the files is there already; then nothing is written.
    """
    folder = examples_folder()
    file = find_example(name, folder)
    home = Path(file).parent
    copies = {folder / one: into / Path(one).relative_to(home) for one in with_companions(file, folder)}
    if existing := [str(copy) for copy in copies.values() if copy.exists()]:
        raise ValueError(
            f"a copy of example {name!r}: a copy overwrites nothing, and {', '.join(existing)} is there already. "
            "Choose another folder with --to."
        )
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return list(copies.values())


def format_examples() -> str:
    """A line for each example: its name and the first sentence of its docstring or first comment."""
    folder = examples_folder()
    sentences = {file: _first_sentence((folder / file).read_text()) for file in example_files(folder)}
    width = max(map(len, sentences)) + 2
    return "\n".join(f"{file:<{width}}{sentence}".rstrip() for file, sentence in sentences.items())


def _first_sentence(text: str) -> str:
    match = re.match(r'(?:#![^\n]*\n)?(?:"""|# )(.+?)(?:\.\s|:\n|\n\s*\n|\n#\s*\n|"""|$)', text, re.DOTALL)
    return re.sub(r"\s*\n#?\s*", " ", match[1]) if match else ""


if __name__ == "__main__":
    main()

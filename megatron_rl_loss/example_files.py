"""The examples as files: what there is, what one needs beside it, and a copy of it for the user to change.

They lie beside the package in a checkout, inside it in a wheel. Whatever is in that folder is an example.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_rl_loss.errors import did_you_mean

_PACKAGE = Path(__file__).parent


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
    files = example_files(folder)
    fitting = [name] if name in files else [file for file in files if name in _spellings(Path(file))]
    if len(fitting) > 1:
        raise ValueError(f"example {name!r}: there are several of that name. Write one of {', '.join(fitting)}.")
    if not fitting:
        raise ValueError(f"example {name!r}: there is none of that name. {did_you_mean(name, files)}.")
    return fitting[0]


def _spellings(file: Path) -> tuple[str, ...]:
    return file.with_suffix("").as_posix(), file.name, file.stem


def with_companions(file: str, folder: Path) -> list[str]:
    """`file`, and whatever it imports or names of the files beside and below it, and they of those, and so on."""
    home = Path(file).parent
    near = [path for path in map(Path, example_files(folder)) if path.is_relative_to(home)]
    needed, waiting = [], [Path(file)]
    while waiting:
        needed.append(waiting.pop())
        text = (folder / needed[-1]).read_text()
        modules = set(_imported(text)) if needed[-1].suffix == ".py" else set()
        for path in near:
            wanted = _module(path.relative_to(home)) in modules or _is_named(path, needed[-1].parent, text)
            if wanted and path not in [*needed, *waiting]:
                waiting.append(path)
    return [file, *sorted(path.as_posix() for path in needed[1:])]


def _is_named(path: Path, beside: Path, text: str) -> bool:
    """Whether `text`, of a file in the folder `beside`, has the file name of `path`."""
    if not path.is_relative_to(beside):
        return False
    return re.search(rf"(?<![\w.]){re.escape(path.relative_to(beside).as_posix())}\b", text) is not None


def _module(path: Path) -> str | None:
    """What `path` is imported as; None if it is no Python."""
    parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
    return ".".join(parts) if path.suffix == ".py" else None


def _imported(code: str) -> Iterator[str]:
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
    if there := [str(copy) for copy in copies.values() if copy.exists()]:
        raise ValueError(
            f"a copy of example {name!r}: a copy overwrites nothing, and {', '.join(there)} is there already. Choose "
            "another folder with --to."
        )
    for source, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return list(copies.values())


def format_examples() -> str:
    """A line an example: its name and the first sentence of what it says of itself."""
    folder = examples_folder()
    told = {file: _first_sentence((folder / file).read_text()) for file in example_files(folder)}
    width = max(map(len, told)) + 2
    return "\n".join(f"{file:<{width}}{sentence}".rstrip() for file, sentence in told.items())


def _first_sentence(text: str) -> str:
    found = re.match(r'(?:#![^\n]*\n)?(?:"""|# )(.+?)(?:\.\s|:\n|\n\s*\n|\n#\s*\n|"""|$)', text, re.DOTALL)
    return re.sub(r"\s*\n#?\s*", " ", found[1]) if found else ""

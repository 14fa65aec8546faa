"""The commands of ``python -m megatron_rl_loss``: ``modes``, ``example``, ``audit`` and ``log-probs``.

A checkout has the examples beside the package, a wheel inside it.
"""

import json
import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_rl_loss import __version__
from megatron_rl_loss.audit.launch import add_audit_options, add_script, run_audit
from megatron_rl_loss.audit.log_prob_dumps import COLUMNS, compare_dumps
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.columns import weights_column
from megatron_rl_loss.core.counting import COUNTINGS, UnitCounting
from megatron_rl_loss.core.errors import check_choice, did_you_mean, print_text
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.names import (
    FRAMEWORKS,
    differs_by_version,
    format_frameworks,
    format_modes,
    format_versions,
    framework_as_data,
    modes_as_data,
    weighable,
)

#: The command of an installed package, which does what ``python -m megatron_rl_loss`` does.
SCRIPT = "megatron-rl-loss"
#: README's small step: losses and masks of four responses.
LOSSES = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0], [-1.0, 0.5, 2.0, 7.0, 1.0, 3.0], [2.0]]
MASKS = [[1, 1, 1, 1], [1, 1], [1, 1, 0, 1, 0, 0], [0]]

_INSIDE = Path(__file__).parent / "examples"
EXAMPLES = _INSIDE if _INSIDE.is_dir() else _INSIDE.parents[1] / "examples"
_ON_CPU = ("megatron_on_cpu.py", "packed_attention.py")
_LAUNCH = ("pretrain_grpo.py", "pretrain_of_version.py", "rollouts.py", "arithmetic.jsonl", "launch_grpo.sh", *_ON_CPU)
#: Files that are copied with an example; other examples are copied alone.
COMPANIONS = {
    **dict.fromkeys(["audit_own_loop.py", "on_cpu.py"], _ON_CPU),
    **dict.fromkeys(["launch_grpo.sh", "launch_grpo.slurm", "pretrain_grpo.py"], _LAUNCH),
    "does_it_matter.py": ("matter/*.py", "megatron_on_cpu.py"),
    "does_centering_matter.py": ("does_it_matter.py", "matter/*.py", "megatron_on_cpu.py"),
    "online_grpo.py": ("online/*.py", "rollouts.py", *_ON_CPU),
    "recipes/own_loop.py": _ON_CPU,
    "recipes/tree_gpt.py": ("megatron_on_cpu.py", "packed_attention.py"),
    "recipes/verl_rows_proof.py": ("recipes/verl_rows.py",),
}


def make_parser() -> ArgumentParser:
    """The parser of all commands, from which completion for a shell is made, too."""
    is_script = Path(sys.argv[0]).stem == SCRIPT
    prog = SCRIPT if is_script else "python -m megatron_rl_loss"
    parser = ArgumentParser(prog=prog, description="Policy-gradient loss aggregation.")
    parser.add_argument("--version", action="version", version=f"megatron_rl_loss {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    modes = commands.add_parser(
        "modes", help="print the modes, their formulas, their flags and other frameworks' names for them"
    )
    modes.add_argument(
        "mode",
        metavar="MODE",
        nargs="?",
        help="print the weights that this mode gives a small step, and of another framework's name what it means in "
        "each known version; of a framework, its names",
    )
    modes.add_argument("--all", action="store_true", help="print the names of every other framework, too")
    modes.add_argument("--json", metavar="OUT", type=Path, help="write this as JSON to a file; - is standard output")
    modes.add_argument(
        "--divisor", "--loss-aggregation-divisor", metavar="D", type=float, help="of constant or token_sum"
    )
    modes.add_argument("--units", "--loss-aggregation-units", metavar="COUNTING", help=" or ".join(COUNTINGS))
    example = commands.add_parser("example", help="list the examples, or copy one with the files that it needs")
    example.add_argument(
        "name", metavar="NAME", nargs="?", help="a file of the list; suffix and folder may be left out"
    )
    example.add_argument(
        "--to", metavar="FOLDER", type=Path, default=Path(), help="folder of the copy; default: the current one"
    )
    audit = commands.add_parser("audit", help="run your training script until one of its steps is measured")
    add_audit_options(audit)
    add_script(audit)
    gap = commands.add_parser(
        "log-probs",
        help="compare two dumps of log-probs and explain their gap",
        description="A dump is one of: a debug dump of slime, miles or vime; NeMo-RL's train_data_step*.jsonl, which "
        "has both sides; SGLang's answers; a .pt file with a list of lists or 1-D tensors, or a dict of these by "
        "sample id; a .jsonl file with a list or an object per line. Of objects the side decides the column: "
        + "; ".join(f"{side}: {', '.join(names)}" for side, names in COLUMNS.items())
        + ". The exit status is 2 if samples or tokens could not be compared.",
    )
    gap.add_argument(
        "train", metavar="TRAIN", type=Path, help="dump of the trainer; its loss masks are used if it has any"
    )
    gap.add_argument("rollout", metavar="ROLLOUT", type=Path, help="dump of the sampler")
    return parser


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status."""
    parser, status = make_parser(), 0
    (commands,) = (action for action in parser._actions if action.dest == "command")
    try:
        try:
            if sys.argv[1:] and not sys.argv[1].startswith("-"):
                check_choice("command", sys.argv[1], commands.choices or ())
            options = parser.parse_args(sys.argv[1:] or ["--help"])
            status = 2 if options.command == "audit" else 0  # of an audited script that a closed pipe ends
            text, status = run_audit(options) if options.command == "audit" else _run(options)
            if text:
                print_text(text)
        finally:
            if sys.stdout is not None:  # None where a shell closed it: >&-
                sys.stdout.flush()  # --help has printed, too
    except BrokenPipeError:  # the reader, `head` for example, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as refusal:
        parser.error(str(refusal))
    return status


def _run(options: Namespace) -> tuple[str, int]:
    """Text and exit status of a command other than ``audit``."""
    if options.command == "log-probs":
        compared = compare_dumps(options.train, options.rollout)
        return str(compared), 2 if compared.left_out else 0
    if options.command == "modes":
        return _modes(options), 0
    if options.name is None:
        return format_examples(), 0
    return "\n".join(map(str, copy_example(options.name, options.to))), 0


def _modes(options: Namespace) -> str:
    """Text of the command ``modes``; ``--json`` writes its data."""
    mode, flags = options.mode, (options.divisor, options.units)
    if mode is not None:
        framework, rest = re.fullmatch("([^@:]*)(.*)", mode, re.DOTALL).groups()  # type: ignore[union-attr]
        spelt = framework.lower().replace("-", "_")  # OpenRLHF, NeMo-RL:sample_mean
        mode = spelt + rest if spelt in FRAMEWORKS else mode
    if (mode is None or mode in FRAMEWORKS) and flags != (None, None):
        raise ValueError("flags without a mode: they are a mode's. Name one: modes constant, for example.")
    if options.all and mode is not None:
        raise ValueError(f"--all with {mode}: it prints the names of every framework. Drop one of the two.")
    if options.json is not None:
        if mode is None:
            data = modes_as_data()
        elif mode in FRAMEWORKS:
            data = framework_as_data(mode)
        else:
            data = weigh_small_step(mode, *flags)
        text = json.dumps(data, indent=1)
        if str(options.json) == "-":
            return text
        try:
            options.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--json {options.json}: the file cannot be written ({error.strerror}). Give a path that can."
            ) from None
        return ""
    if mode is None:
        return format_modes() + ("\n\n" + format_frameworks()) * options.all
    if mode in FRAMEWORKS:
        return format_frameworks([mode])
    if ":" in mode and re.split("[@:]", mode)[0] in FRAMEWORKS:
        if differs_by_version(mode):  # the table is the answer: there is no one set of weights
            choices = weighable(mode)
            hint = f"For weights write one: {choices}." if choices else "None of them has weights of its own."
            return f"{format_versions(mode)}\nIts versions differ. {hint}"
        print_text(format_versions(mode) + "\n")  # before a refusal, which may ask for a divisor
    return format_weights(mode, *flags)


def weigh_small_step(mode: str, divisor: float | None = None, units: UnitCounting | None = None) -> dict[str, Any]:
    """README's small step with the weight of each token, and its loss, as plain data; errors as of `weights_column`."""
    aggregation = resolve(mode, divisor=divisor, units=units)
    prompt_ids, session_ids = ["a", "a", "b", "b"], ["s", "s", "t", "u"]
    turn_ids = [[0, 0, 1, 1], [2, 2], [3, 3, -1, 4, -1, -1], [-1]]
    ids: dict[str, Any] = {"session": session_ids, "turn": turn_ids}
    samples = Samples(MASKS, prompt_ids=prompt_ids, ids=ids, labels={"counted": [True] * len(MASKS)})
    columns = weights_column(aggregation.mode, samples, divisor=divisor, units=units, dp_group=None)
    weights = [column.tolist() for column in columns]
    rows = zip(prompt_ids, session_ids, turn_ids, MASKS, LOSSES, weights, strict=True)
    names = ("prompt", "session", "turns", "mask", "losses", "weights")
    return {
        "mode": aggregation.mode.name,
        "formula": aggregation.mode.formula,
        "divisor": divisor,
        "units": aggregation.units,
        "responses": [dict(zip(names, row, strict=True)) for row in rows],
        "loss": sum(
            float(column.double() @ torch.tensor(losses, dtype=torch.float64))
            for column, losses in zip(columns, LOSSES, strict=True)
        ),
    }


def format_weights(mode: str, divisor: float | None = None, units: UnitCounting | None = None) -> str:
    """`weigh_small_step` as a table."""
    step = weigh_small_step(mode, divisor, units)
    flags = f"counting {step['units']} units" + (f", divisor {divisor:g}" if divisor is not None else "")
    lines = [f"{mode}, {flags}: {step['formula']}", "", "response  prompt  session  weights of its tokens"]
    for number, row in enumerate(step["responses"]):
        shown = " ".join(f"{weight:.4f}" for weight in row["weights"])
        lines.append(f"{number:<10}{row['prompt']:<8}{row['session']:<9}{shown}")
    return "\n".join(
        [*lines, "", f"With the losses {' '.join(map(str, LOSSES))} the step's loss is {step['loss']:.6f}."]
    )


def example_names() -> list[str]:
    """Paths of the examples, relative to their folder."""
    paths = [*EXAMPLES.iterdir(), *(EXAMPLES / "recipes").iterdir()]
    return sorted(path.relative_to(EXAMPLES).as_posix() for path in paths if path.suffix in (".py", ".sh", ".slurm"))


def find_example(name: str) -> str:
    """The example with that path or file name, suffix optional. Raises ValueError if there is none, or several."""
    names = example_names()
    matches = [
        example
        for example in names
        if name in (example, example.rpartition(".")[0], Path(example).name, Path(example).stem)
    ]
    if len(matches) > 1:
        raise ValueError(f"example {name!r}: several examples have that name. Write one of {', '.join(matches)}.")
    if not matches:
        stems = [Path(example).stem for example in names]
        short = [
            stem if stems.count(stem) == 1 else Path(example).name for example, stem in zip(names, stems, strict=True)
        ]
        raise ValueError(f"example {name!r}: there is no such example. {did_you_mean(Path(name).stem, short)}.")
    return matches[0]


def copy_example(name: str, into: Path) -> list[Path]:
    """Copy an example and the files that it needs into a folder, which is made; the paths of these files.

    Files that are there already and equal stay as they are. Raises ValueError for an unknown name, for a folder that
    cannot be written, and for a file that is there and differs; then nothing is written.
    """
    file = find_example(name)
    sources = [path for pattern in (file, *COMPANIONS.get(file, ())) for path in sorted(EXAMPLES.glob(pattern))]
    copies = {source: into / source.relative_to(EXAMPLES).as_posix().removeprefix("recipes/") for source in sources}
    try:
        missing = {source: copy for source, copy in copies.items() if not os.path.lexists(copy)}
        others = [str(copy) for source, copy in copies.items() if source not in missing and not _equal(source, copy)]
        if not others:
            for folder in {copy.parent for copy in missing.values()}:
                folder.mkdir(parents=True, exist_ok=True)
            for source, copy in missing.items():
                shutil.copy(source, copy)
    except OSError as error:
        copied = f"a copy of example {name!r} in the folder {str(into)!r}"
        raise ValueError(
            f"{copied}: the folder cannot be written ({error.strerror}: {error.filename}). Choose another with --to."
        ) from None
    if others:
        raise ValueError(
            f"a copy of example {name!r}: a copy overwrites nothing, and these files differ: {', '.join(others)}. "
            "Choose another folder with --to."
        )
    return list(copies.values())


def _equal(source: Path, copy: Path) -> bool:
    return copy.is_file() and copy.read_bytes() == source.read_bytes()


def format_examples() -> str:
    """A line for each example: its name and the first sentence of its docstring or first comment."""
    texts = {name: (EXAMPLES / name).read_text(encoding="utf-8") for name in example_names()}
    return "\n".join(f"{name:<36}{_first_sentence(text)}".rstrip() for name, text in texts.items())


def _first_sentence(text: str) -> str:
    match = re.match(r'(?:#![^\n]*\n)?(?:"""|# )(.+?)(?:\.\s|:\n|\n\s*\n|\n#\s*\n|"""|$)', text, re.DOTALL)
    return re.sub(r"\s*\n#?\s*", " ", match[1]).rstrip(".") if match else ""


if __name__ == "__main__":
    sys.exit(main())

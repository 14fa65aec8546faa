"""Write docs/refusals.md: every wrong use that a test tries, what is said then, and where it is tested.

    python tools/list_refusals.py            # writes the page
    python tools/list_refusals.py --check    # writes nothing; fails if the page is not what would be written

Tests hold refusals as tables of data. They are imported here and read, not run; so it needs what the tests need.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS, PAGE = ROOT / "tests", ROOT / "docs" / "refusals.md"
HEAD = """# What is refused, and what is said

Every wrong use that a test tries. What is said is a fragment of the text; all texts say what was given, which rule it
breaks and what to do. Beside nearly every wrong use the test has its nearest legal neighbour, which is accepted.
Written by `tools/list_refusals.py` from the tables of the tests; do not edit it here.
"""


@dataclass(frozen=True)
class Refused:
    """One wrong use: what it is called, the type of the error where the table says it, and a fragment of its text."""

    use: str
    error: str
    text: str


def plain(pattern: str) -> str:
    """A regular expression as text."""
    text = re.sub(r"(?<!\\)\.[*+]\??", " ... ", pattern.replace("(?s)", "").replace("[?]", "?"))
    return re.sub(r" +", " ", re.sub(r"\\(.)", r"\1", text)).strip()


def from_refusals(table: dict[str, Any]) -> Iterator[Refused]:
    """Tables of `support/refusals.py`: call, error, pattern, legal neighbour."""
    for use, (_, error, pattern, _) in table.items():
        yield Refused(use, error.__name__, plain(pattern))


def from_rows(rows: Iterable[Any]) -> Iterator[Refused]:
    """Rows of launches."""
    for row in rows:
        yield Refused(row.name, "argparse" if row.error == "SystemExit" else row.error, row.given)


def with_text_last(error: str, *, patterns: bool = False) -> Callable[[dict[Any, Any]], Iterator[Refused]]:
    """Tables whose rows end with the text; rows without one are legal uses."""

    def read(table: dict[Any, Any]) -> Iterator[Refused]:
        for use, row in table.items():
            text = row if isinstance(row, str) else row[-1]
            if text:
                yield Refused(
                    use if isinstance(use, str) else _of_probe(*use), error, plain(text) if patterns else text
                )

    return read


def _of_probe(variant: str, per_token: bool, averaged: bool) -> str:
    extras = [", per-token loss"] * per_token + [", averaged in the collective"] * averaged
    return f"a Megatron changed: {variant}{''.join(extras)}"


@dataclass(frozen=True)
class Table:
    title: str
    path: str  # below tests
    name: str = "REFUSALS"
    read: Callable[[Any], Iterator[Refused]] = from_refusals


TABLES = [
    Table("Masks", "unit/test_samples.py"),
    Table("Ids of rollouts and prompts", "unit/test_ids.py"),
    Table("Layouts", "unit/test_layouts.py"),
    Table("Totals of the step", "unit/test_totals.py"),
    Table("Modes, and totals that do not fit", "unit/test_weights.py"),
    Table("Reducers and the losses they are given", "unit/test_reduction.py"),
    Table("Pictures of a measured step", "unit/test_audit_picture.py"),
    Table("What must be said", "unit/test_said_at_the_door.py"),
    Table("Counts, sizes and ranks", "unit/test_checks.py"),
    Table("Log-probs from logits", "unit/test_logprobs.py"),
    Table("Log-probs and losses from hidden states", "unit/test_chunked_head.py"),
    Table("Other projects' kernels", "unit/test_kernels.py"),
    Table("Modes of one's own", "unit/test_modes.py"),
    Table("Statistics of modes", "unit/test_paper_modes.py"),
    Table("Modes with sums of their own, under frameworks' hooks", "frameworks/test_modes_under_hooks.py"),
    Table("Names of other frameworks", "unit/test_aliases.py", "REFUSED", with_text_last("ValueError", patterns=True)),
    Table("Sums over sequences", "unit/test_segments.py"),
    Table("Policy losses and advantages", "unit/test_losses.py"),
    Table("Policy losses of a sequence", "unit/test_sequence_losses.py"),
    Table("Policy losses by name", "unit/test_policy_losses.py"),
    Table("Corrections off policy", "unit/test_off_policy.py"),
    Table("Loss functions of any trainer", "unit/test_check_loss.py"),
    Table("Flags, as the library sees them", "unit/test_arguments.py"),
    Table("Terms of a loss", "megatron/test_terms.py"),
    Table("Metrics", "megatron/test_metrics.py"),
    Table("Micro-batches", "megatron/test_microbatch.py"),
    Table("Copies of examples", "package/test_example_command.py"),
    Table("Launches: flags, data, configuration, losses, files", "megatron/test_bad_input.py", "ROWS", from_rows),
    Table("What a loss function returns", "megatron/test_handover.py", "WRONG", with_text_last("ValueError")),
    Table("Totals that a user knows", "megatron/test_handover.py", "TOTALS", with_text_last("")),
    Table("A Megatron that scales otherwise", "megatron/test_probe.py", "CHANGED", with_text_last("ContractError")),
    Table(
        "A bad batch in the middle of a launch", "megatron/test_kill_and_resume.py", "FAULTS",
        with_text_last("BadBatchError"),
    ),
    Table("The example's flags", "megatron/test_example.py", "REFUSED", with_text_last("")),
    Table("Its flags of log-probs", "megatron/test_log_probs_example.py", "REFUSED", with_text_last("")),
    Table("Output layers that do more", "megatron/test_output_head.py", "REFUSED", with_text_last("ValueError")),
    Table("The example's file", "examples/test_rollouts.py", "BAD_LINES", with_text_last("ValueError", patterns=True)),
]  # fmt: skip


def left_out() -> list[str]:
    """Tables of refusals in the tests that are not listed above."""
    listed = {(table.path, table.name) for table in TABLES}
    found = {
        (path.relative_to(TESTS).as_posix(), name)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(\w+): dict\[str, Refusal\] = ", path.read_text(), re.MULTILINE)
    }
    return sorted(f"{path}: {name}" for path, name in found - listed)


def read(table: Table) -> list[Refused]:
    sys.path[:0] = [str((TESTS / table.path).parent)]
    try:
        module = importlib.import_module(Path(table.path).stem)
    finally:
        del sys.path[0]
    return list(table.read(getattr(module, table.name)))


def cell(text: str) -> str:
    """Code, in a row of a Markdown table."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}".replace("|", r"\|")


def section(table: Table, refused: list[Refused]) -> str:
    lines = [f"## {table.title}", "", "| wrong use | what is said | where tested |", "|---|---|---|"]
    for one in refused:
        use = one.use.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")
        said = f"{one.error}: {cell(one.text)}" if one.error else cell(one.text)
        lines.append(f"| {use} | {said} | `{table.path}` |")
    return "\n".join(lines) + "\n"


def page() -> str:
    if missing := left_out():
        raise SystemExit(f"tables that this tool does not know: {', '.join(missing)}. Add them to TABLES.")
    return "\n".join([HEAD, *(section(table, read(table)) for table in TABLES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if the page is not up to date.")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(TESTS / "support"), str(ROOT / "examples")]
    text = page()
    if not args.check:
        args.page.write_text(text)
    elif args.page.read_text() != text:
        raise SystemExit(f"{args.page} is not what the tests say. Run python tools/list_refusals.py.")


if __name__ == "__main__":
    main()

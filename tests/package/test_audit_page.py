"""docs/audit-report.md shows reports as they are, and names the shapes that there are."""

import re
from typing import get_args

import audit_examples

from megatron_rl_loss.audit.report import Shape
from megatron_rl_loss.audit.verdict import TOLERANCES

PAGE = audit_examples.PAGE.read_text()


def test_every_example_is_what_the_audit_says() -> None:
    shown = dict(audit_examples.BLOCK.findall(PAGE))
    assert set(shown) == set(audit_examples.EXAMPLES)
    for name, example in audit_examples.EXAMPLES.items():
        assert shown[name].rstrip("\n") == example(), f"python {audit_examples.__name__}.py --write renews them"


def test_another_report_would_be_seen() -> None:
    """Negative control."""
    changed = PAGE.replace("NOT SOUND", "SOUND")
    assert changed != PAGE
    assert audit_examples.with_examples(changed) == PAGE


def test_all_shapes_are_in_the_table() -> None:
    table = PAGE[PAGE.index("## Shapes") : PAGE.index("## What it cannot")]
    named = {
        name for first in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", first)
    }
    assert named == set(get_args(Shape))


def test_tolerances_are_the_codes() -> None:
    said = re.search(
        r"within rounding: (\S+), relative, for float32 gradients; (\S+) and (\S+) where", " ".join(PAGE.split())
    )
    assert said is not None
    assert [f"{TOLERANCES[name]:.1e}" for name in ("float32", "float16", "bfloat16")] == [
        f"{float(number):.1e}" for number in said.groups()
    ]

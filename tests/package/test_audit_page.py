"""docs/audit.md shows reports as they are."""

import re

import audit_examples

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


def test_tolerances_are_the_codes() -> None:
    said = re.search(r"(\S+) for float32 gradients, (\S+) for float16, (\S+) for bfloat16", " ".join(PAGE.split()))
    assert said is not None
    assert [f"{TOLERANCES[name]:.1e}" for name in ("float32", "float16", "bfloat16")] == [
        f"{float(number):.1e}" for number in said.groups()
    ]

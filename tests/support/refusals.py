"""Tables of refusals: the refused call, its error, and the nearest legal neighbour, which is accepted."""

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

Call = Callable[[], Any]
#: The refused call, the error's type, a regular expression of its text, and the accepted neighbour.
Refusal = tuple[Call, type[Exception], str, Call]

#: What was given, the rule it breaks, what to do.
THREE_PARTS = re.compile(r"(?s).+?: .+\. .+\.")


def outcome_of(call: Call) -> str:
    """Type and text of the exception, or "accepted"; of SystemExit, what argparse printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            call()
    except SystemExit:
        return f"SystemExit: {printed.getvalue()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(
    make: Callable[..., Any], *rows: tuple[Any, str, Any], error: type[Exception] = ValueError
) -> dict[str, Refusal]:
    """Rows of wrong arguments, the error's text and the nearest right arguments: a dict of keywords, or a tuple."""

    def calling(arguments: Any) -> Call:
        return lambda: make(**arguments) if isinstance(arguments, dict) else make(*arguments)

    called = getattr(make, "__name__", "call")
    return {
        f"{called}, {error.__name__} {i}: {text}": (calling(wrong), error, text, calling(right))
        for i, (wrong, text, right) in enumerate(rows)
    }


def check_refusal(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    with pytest.raises(error, match=f"(?s){text}") as caught:
        refused()
    assert caught.type is error
    assert THREE_PARTS.fullmatch(str(caught.value)), str(caught.value)
    accepted()


def refusal_tests(table: Mapping[str, Refusal]) -> Any:
    """A test of every row: ``test_refusals = refusal_tests(TABLE)``."""

    @pytest.mark.parametrize(("refused", "error", "text", "accepted"), table.values(), ids=table.keys())
    def test(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
        check_refusal(refused, error, text, accepted)

    return test


# --- rows of launches, which more is known of


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    covers: str  # the kind of misuse; for configurations a fragment of docs/support.md
    error: str  # type of the exception
    value: str  # what the text must say was passed
    remedy: str = ""  # what it must say to do
    bad: Any
    good: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    styled: bool = True  # by this package, not by argparse or the user's own code


def in_three_parts(text: str, row: Row) -> bool:
    """True if the text has three parts for every rank that raised: the value, the rule, the remedy, in this order."""
    reasons = re.split(r"(?:^Step aborted on all ranks before the optimizer ran\. |; )rank \d+: \w+: ", text)
    said = [reason for reason in reasons if row.value in reason]
    pattern = re.compile(
        rf".*{re.escape(row.value)}[^\n]*?: .+\. .*{re.escape(row.remedy)}.*\.$"
        if row.remedy not in row.value
        else r".+: .+\. .+\.$"
    )
    return bool(said) and all(pattern.match(reason) for reason in said)

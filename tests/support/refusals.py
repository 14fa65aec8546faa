"""Tables of refusals: the refused call, its error, and the nearest legal neighbour, which is accepted."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Call = Callable[[], Any]
#: The refused call, the error's type, a regular expression of its text, and the accepted neighbour.
Refusal = tuple[Call, type[Exception], str, Call]

#: What was given, the rule it breaks, what to do.
THREE_PARTS = re.compile(r"(?s).+?: .+\. .+\.")


def each_of(table: Mapping[str, Refusal]) -> Any:
    """Decorator: a test of every row."""
    return pytest.mark.parametrize(("refused", "error", "text", "accepted"), table.values(), ids=table.keys())


def check_refusal(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    with pytest.raises(error, match=f"(?s){text}") as caught:
        refused()
    assert caught.type is error
    assert THREE_PARTS.fullmatch(str(caught.value)), str(caught.value)
    accepted()

"""For tools/docs.sh: doctests in docstrings become blocks of code, where Markdown would read quotes of quotes."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestFences(griffe.Extension):  # type: ignore[misc]
    def on_object(self, *, obj: Any, **unused: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)

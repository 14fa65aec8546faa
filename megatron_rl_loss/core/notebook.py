"""Tables by which a notebook shows samples and plans: their first rows, and the first numbers of each."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from megatron_rl_loss.core.errors import only_if

#: Rows of a table, and numbers in a cell of it.
SHOWN_ROWS, SHOWN_NUMBERS = 8, 6


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], num_rows: int) -> str:
    """A table of the rows that are shown, of so many; texts are escaped."""
    lines = [f"<table><caption>{escape(caption)}</caption>"]
    for tag, cells in [("th", head), *(("td", row) for row in rows)]:
        lines.append("<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>")
    if num_rows > len(rows):
        lines.append(f'<tr><td colspan="{len(head)}">and {num_rows - len(rows):,} more</td></tr>')
    return "\n".join([*lines, "</table>"])


def first_numbers(values: Iterable[float]) -> str:
    """The first of some numbers, in a few digits."""
    texts = [f"{value:.4g}" for value in islice(values, SHOWN_NUMBERS + 1)]
    return " ".join(texts[:SHOWN_NUMBERS] + only_if(len(texts) > SHOWN_NUMBERS, ["..."]))

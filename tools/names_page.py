"""Put the tables of other frameworks' settings into docs/names.md, from those that the code uses.

python tools/names_page.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from megatron_rl_loss.engines.names import FRAMEWORKS, LOSSES, NAMES, NUMBER, OWN_CODE, PeerName

PAGE = ROOT / "docs" / "names.md"
BLOCK = re.compile(r"<!-- settings: (\w+) -->\n(?:\|.*\n)*(?:\n- The code for .*\n)*")


def table(framework: str) -> str:
    """Table of a framework's settings: our mode of each, and differences of the framework's own code."""
    setting, default, version = FRAMEWORKS[framework]
    version = re.sub(r"\b[0-9a-f]{8}\b", r"`\g<0>`", version)
    rows: dict[tuple[str, str], list[str]] = {}
    notes: dict[str, list[str]] = {}
    for peer in NAMES:
        if peer.framework == framework:
            own = OWN_CODE.get(_alias(peer), "")
            rows.setdefault((_mode(peer), own), []).append(_name(peer) + " (default)" * (peer.name == default))
            notes.setdefault(own, []).append(f"`{_alias(peer)}`")
    of_rows = [own for _, own in rows]
    lines = [f"| `{setting}` | mode in {version} |", "|---|---|"]
    for (mode, own), names in rows.items():
        remark = f"; its code {own}" if own and of_rows.count(own) == 1 else ""
        lines.append(f"| {', '.join(names)} | {mode}{remark} |")
    shared = [(own, names) for own, names in notes.items() if own and of_rows.count(own) > 1]
    return "\n".join([*lines, *(f"\n- The code for {', '.join(names)} {own}." for own, names in shared)])


def with_tables(page: str) -> str:
    """The page with current tables."""
    return BLOCK.sub(lambda match: f"<!-- settings: {match[1]} -->\n{table(match[1])}\n", page)


def _alias(peer: PeerName) -> str:
    return f"{peer.framework}:{peer.name}".replace(NUMBER, "8192")


def _name(peer: PeerName) -> str:
    loss = f" with `--policy-loss {LOSSES[_alias(peer)]}`" if _alias(peer) in LOSSES else ""
    return f"`{_alias(peer)}`{loss}"


def _mode(peer: PeerName) -> str:
    if peer.refused:
        return f"refused: {peer.refused.partition(',')[0].removeprefix('a ')}; nearest is `{peer.mode}`"
    named = f"`{peer.divisor}`" if isinstance(peer.divisor, str) else peer.divisor
    divisor = ", the number as divisor" if peer.name == NUMBER else f", divisor {named}" if peer.divisor else ""
    units = ", active units" if peer.units == "active" else ""
    return f"`{peer.mode}`{divisor}{units}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

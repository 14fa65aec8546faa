"""Put the tables of other frameworks' settings into docs/names.md, from those that the code uses.

python tools/names_page.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from megatron_rl_loss.modes.names import FRAMEWORKS, LOSSES, NAMES, NUMBER, OWN_CODE, PeerName

PAGE = ROOT / "docs" / "names.md"
BLOCK = re.compile(r"<!-- settings: (\w+) -->\n(?:\|.*\n)*")


def table(framework: str) -> str:
    """Table of a framework's settings: our mode of each, and differences of the framework's own code."""
    setting, default, version = FRAMEWORKS[framework]
    version = re.sub(r"\b[0-9a-f]{8}\b", r"`\g<0>`", version)
    names: dict[str, list[str]] = {}
    for peer in NAMES:
        if peer.framework == framework:
            names.setdefault(_mode(peer), []).append(_name(peer) + " (default)" * (peer.name == default))
    rows = [f"| {', '.join(same)} | {mode} |" for mode, same in names.items()]
    return "\n".join([f"| `{setting}` | mode, as read in {version} |", "|---|---|", *rows])


def with_tables(page: str) -> str:
    """The page with current tables."""
    return BLOCK.sub(lambda found: f"<!-- settings: {found[1]} -->\n{table(found[1])}\n", page)


def _alias(peer: PeerName) -> str:
    return f"{peer.framework}:{peer.name}".replace(NUMBER, "8192")


def _name(peer: PeerName) -> str:
    loss = f" with `--policy-loss {LOSSES[_alias(peer)]}`" if _alias(peer) in LOSSES else ""
    return f"`{_alias(peer)}`{loss}"


def _mode(peer: PeerName) -> str:
    if peer.refused:
        return f"refused: {peer.refused}; nearest is `{peer.mode}`"
    named = f", its `{peer.divisor}` as divisor" if isinstance(peer.divisor, str) else f", divisor {peer.divisor}"
    divisor = ", the number as divisor" if peer.name == NUMBER else named if peer.divisor else ""
    units = ", active units" if peer.units == "active" else ""
    own = OWN_CODE.get(_alias(peer))
    return f"`{peer.mode}`{divisor}{units}" + (f"; its own code {own}" if own else "")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

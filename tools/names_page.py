"""Put the tables of other frameworks' settings into docs/names.md, from those that the code uses.

python tools/names_page.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from megatron_rl_loss.modes.names import FRAMEWORKS, LOSSES, NAMES, NUMBER, OWN_CODE, PeerName, formula_of

PAGE = ROOT / "docs" / "names.md"
BLOCK = re.compile(r"<!-- settings: (\w+) -->\n(?:\|.*\n)*")


def table(framework: str) -> str:
    """A framework's settings: value, step loss, our flags, and what its own code does."""
    setting, default, version = FRAMEWORKS[framework]
    version = re.sub(r"\b[0-9a-f]{8}\b", r"`\g<0>`", version)
    rows = [f"| `{setting}` | step loss | here | its own code: {version} |", "|---|---|---|---|"]
    for peer in NAMES:
        if peer.framework == framework:
            value = ("a number" if peer.name == NUMBER else f"`{peer.name}`") + " (default)" * (peer.name == default)
            rows.append(f"| {value} | {_formula(peer)} | {_here(peer)} | {_own(peer)} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page with each of them as it is now."""
    return BLOCK.sub(lambda found: f"<!-- settings: {found[1]} -->\n{table(found[1])}\n", page)


def _formula(peer: PeerName) -> str:
    return peer.refused or formula_of(peer).replace("sum", "Σ").replace("*", "·")


def _here(peer: PeerName) -> str:
    alias = f"{peer.framework}:{peer.name}".replace(NUMBER, "8192")
    if peer.refused:
        return f"`{alias}` is refused; nearest is `{peer.mode}`"
    loss = f", `--policy-loss {LOSSES[alias]}`" if alias in LOSSES else ""
    divisor = f", its `{peer.divisor}` as divisor" if isinstance(peer.divisor, str) else ""
    return f"`{alias}`{loss}{divisor}"


def _own(peer: PeerName) -> str:
    return OWN_CODE.get(f"{peer.framework}:{peer.name}", "" if peer.refused else "the same")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

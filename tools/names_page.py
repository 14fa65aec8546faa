"""Put the tables of other frameworks' settings into docs/names.md, from the code's table and docs/names.json.

python tools/names_page.py
"""

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tools")) if path not in sys.path]

from check_names import compared, stored

from megatron_rl_loss.engines.names import FRAMEWORKS, NAMES, NUMBER, PeerName

PAGE = ROOT / "docs" / "names.md"
BLOCK = re.compile(r"<!-- settings: (\w+) -->\n(?:\|.*\n)*(?:\nVersions .*\n)?")


def table(framework: str) -> str:
    """Table of a framework's settings: our mode of each by version, and what the framework's own code does."""
    row = FRAMEWORKS[framework]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for peer in NAMES:
        if peer.framework == framework:
            ranged = f"{peer.versions[0]} to {peer.versions[-1]}" if len(peer.versions) > 1 else peer.versions[0]
            rows.setdefault((_commits(ranged), _mode(peer), _own_code(peer)), []).append(_name(peer))
    lines = [f"| `{row.setting}` | versions | mode | its own code |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {ranged} | {mode} | {own} |" for (ranged, mode, own), names in rows.items()]
    found = {how: [version for version, its in row.versions.items() if its == how] for how in ("run", "read")}
    said = "; ".join(f"{how}: {_commits(', '.join(versions))}" for how, versions in found.items() if versions)
    return "\n".join([*lines, "", f"Versions {said}. Source: {row.source}."])


@cache
def _measured() -> dict[PeerName, list[str]]:
    """What tools/check_names.py found of each row, in words."""
    words: dict[PeerName, list[str]] = {}
    for _, _, peer, named, _ in compared(stored()):
        words.setdefault(peer, []).append(f"{named.words} in every cut" if named.exact else named.words)
    return words


def _own_code(peer: PeerName) -> str:
    """What was found by running it; else what was read."""
    if peer in _measured():
        return "; or ".join(dict.fromkeys(_measured()[peer]))
    return f"{peer.own_code or ('' if peer.refused else 'as the mode')} (read)".strip()


def with_tables(page: str) -> str:
    """The page with current tables."""
    return BLOCK.sub(lambda match: f"<!-- settings: {match[1]} -->\n{table(match[1])}\n", page)


def _commits(text: str) -> str:
    return re.sub(r"\b(?=\d*[a-f])[0-9a-f]{8}\b", r"`\g<0>`", text)


def _name(peer: PeerName) -> str:
    loss = f" with `--policy-loss {peer.loss}`" * bool(peer.loss)
    default = " (default)" * (peer.name == FRAMEWORKS[peer.framework].default)
    return f"`{peer.alias.replace(NUMBER, '8192')}`{loss}{default}"


def _mode(peer: PeerName) -> str:
    if peer.refused:
        return f"refused: {peer.refused.partition(',')[0].removeprefix('a ')}; nearest is `{peer.mode}`"
    named = f"`{peer.divisor}`" if isinstance(peer.divisor, str) else peer.divisor
    divisor = ", the number as divisor" if peer.name == NUMBER else f", divisor {named}" if peer.divisor else ""
    units = ", active units" if peer.units == "active" else ""
    return f"`{peer.mode}`{divisor}{units}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

"""Write the API reference into a folder: an index, and a page per room of the package, of signatures and docstrings.

    python tools/api_reference.py build/pages/docs/api      # tools/docs.sh does it

The tool reads sources and imports nothing, so any Python makes the same pages.
"""

import ast
import contextlib
import functools
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[1]
#: A page, and the modules whose docstrings are its sections. A name stands in the closest section above its module.
PAGES = {room: [room] for room in ("losses", "logprobs", "megatron", "proof")}
PAGES |= {"core": ["core", "trees", "planning"], "audit": ["audit", "audit.megatron"], "engines": ["engines"]}
PAGES["engines"] += sorted(f"engines.{file.stem}" for file in ROOT.glob("megatron_rl_loss/engines/[a-z]*.py"))
#: The names that are importable from `megatron_rl_loss`, by the module that defines them.
PUBLIC: dict[str, list[str]] = {}
_STUB = ast.parse((ROOT / "megatron_rl_loss" / "__init__.pyi").read_text()).body
for _line in [line for line in _STUB if isinstance(line, ast.ImportFrom)]:
    for _name in _line.names:
        if _name.asname == _name.name:  # a stub exports what it imports as itself
            PUBLIC.setdefault(str(_line.module).partition(".")[2], []).append(_name.name)
#: Others, importable from their module: classes that users are handed, and what pages name.
OTHERS = {
    "core.samples": ["LocalTokens"],
    "core.aggregation": ["resolve"],
    "core.reducers": ["WeightedSum"],
    "losses.ratio": ["PolicyLoss"],
    "losses.sampler_columns": ["likeliest_ids", "sampled_log_probs", "ids_and_log_probs"],
    "losses.by_name": ["formula_of"],
    "losses.token": ["cispo_loss", "sapo_loss", "cfpo_loss", "dppo_loss"],
    "losses.sequence": ["gspo_loss", "gmpo_loss", "vespo_loss"],
    "logprobs.kept_ids": ["KeptIds"],
    "trees.edges": ["Edges"],
    "core.plan": ["Plan"],
    "core.measure": ["Measurement"],
    "megatron.flags": ["AggregationSettings"],
    "megatron.forward_pass": ["ForwardPass"],
    "audit.simulation": ["LossCall"],
    "audit.tokens": ["MeasuredStep"],
    "audit.log_prob_gap": ["LogProbGap"],
    "audit.loss_report": ["LossReport"],
    "audit.judge": ["judge"],
    "audit.verdict": ["Verdict"],
}
SECTION = re.compile(r"^(Args|Attributes|Raises[^\n:]*|Returns):\n((?:(?:    .*)?(?:\n|$))+)", re.MULTILINE)
BLOCK = re.compile(r"^(>>>|===).*(?:\n.+)*", re.MULTILINE)


def source_of(module: str) -> str:
    path = ROOT.joinpath("megatron_rl_loss", *module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module))


def value_of(module: str, name: str) -> Any:
    """The literal that a module assigns to a name, or None."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and name in [getattr(target, "id", None) for target in node.targets]:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    return None


def names_in(section: str) -> list[tuple[str, str]]:
    """Modules and the names that they add to a section, public ones first; for an engine's module, its ``__all__``."""
    if section.startswith("engines."):
        return [(section, name) for name in value_of(section, "__all__") or PUBLIC.get(section, ())]
    sections = sorted((module for modules in PAGES.values() for module in modules), key=len)
    listed = [(module, name) for names_of in (PUBLIC, OTHERS) for module, names in names_of.items() for name in names]
    return [entry for entry in listed if [s for s in sections if f"{entry[0]}.".startswith(f"{s}.")][-1] == section]


def find(module: str, name: str) -> tuple[list[str], ast.stmt]:
    """The definition of a name, found through imports: the lines of its file, and the statement."""
    for node in reversed(tree_of(module).body):  # of overloads, the last
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return find(str(node.module).partition(".")[2], name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        if name in [getattr(target, "id", getattr(target, "name", None)) for target in targets]:
            return source_of(module).splitlines(), node
    raise SystemExit(f"{module} has no {name}")


def code(lines: list[str], node: ast.stmt) -> str:
    """The signature as written, for a class with fields and constructor; for other names the whole statement."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return "\n".join(lines[node.lineno - 1 : node.end_lineno])
    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = "\n".join(lines[begin - 1 : max(node.body[0].lineno - 1, node.lineno)]).rstrip(". ").removesuffix(":")
    parts = [
        member for member in node.body if isinstance(member, ast.AnnAssign) or getattr(member, "name", "") == "__init__"
    ]
    return "\n".join([text, *(code(lines, member) for member in parts if isinstance(node, ast.ClassDef))])


def as_markdown(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    def section(match: re.Match[str]) -> str:
        body = dedent(match[2]).strip()
        if match[1] != "Returns":
            body = re.sub(r"^([^:\n]+): ", r"- `\1`: ", re.sub(r"\n +", " ", body), flags=re.MULTILINE)
        return f"**{match[1]}**\n\n{body}\n\n"

    text = SECTION.sub(section, (ast.get_docstring(node) or "").replace("``", "`") + "\n")
    return BLOCK.sub(lambda block: f"```{'pycon' if block[1] == '>>>' else 'text'}\n{block[0]}\n```", text).strip()


def entry(lines: list[str], node: ast.stmt, name: str, level: str = "##", home: str = "") -> str:
    """Heading, code below its import, docstring; of a class its public methods too."""
    line = f"from {home} import {name}\n\n" if home else ""
    parts = [f"{level} `{name}`", f"```python\n{line}{dedent(code(lines, node))}\n```"]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        parts.append(as_markdown(node))
    if isinstance(node, ast.ClassDef):
        methods = [method for method in node.body if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)]
        shown = [method for method in methods if not method.name.startswith("_") or method.name == "__call__"]
        parts += [entry(lines, method, f"{name}.{method.name}", f"{level}#") for method in shown]
    return "\n\n".join(filter(None, parts))


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    texts, links = {}, []
    for page, sections in PAGES.items():
        parts = []
        for section in sections:
            parts += [f"# megatron_rl_loss.{section}", as_markdown(tree_of(section))]
            for module, name in names_in(section):
                is_public = name in PUBLIC.get(module, ())
                home = "megatron_rl_loss" if is_public else f"megatron_rl_loss.{module}"
                parts.append(entry(*find(module, name), name, home=home))
                links += [f"- [`{name}`]({page}.md#{name.lower()})"] * is_public
        texts[f"{page}.md"] = "\n\n".join(filter(None, parts)) + "\n"
    listed = "\n".join(sorted(links))
    return texts | {"README.md": f"# megatron_rl_loss\n\n{as_markdown(tree_of(''))}\n\n{listed}\n"}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (folder / file).write_text(text)

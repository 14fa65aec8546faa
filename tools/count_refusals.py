"""Which share of a package's code refuses what it is given.

    python tools/count_refusals.py               # megatron_rl_loss
    python tools/count_refusals.py PACKAGE_FOLDER

A code line is one that is not blank, a comment or a part of a docstring. A refusal is

- a `raise` of something new (not one that only passes an exception on), or `torch._assert_async`,
- an assignment of what they alone are made of: texts and facts,
- an `if`, `for`, `with`, `except` or function that holds nothing but refusals,
- a function that returns an exception, or a class that is one.

Calls of functions that do nothing but refuse (`check_cp(...)`, `require(...)`) are counted apart, and so are texts that
are kept as data, in *.ini files: to move a text there does not make a package simpler.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "megatron_rl_loss"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STATEMENTS = (ast.stmt, ast.ExceptHandler)
MAKERS = (ast.Raise, ast.FunctionDef, ast.Assign, ast.AnnAssign)


def lines_of(node: ast.stmt | ast.ExceptHandler) -> set[int]:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return set(range(first, (node.end_lineno or node.lineno) + 1))


def body_of(scope: Scope) -> list[ast.stmt]:
    """Without the docstring."""
    return scope.body[1:] if docstring_of(scope) else scope.body


def docstring_of(scope: Scope) -> ast.stmt | None:
    first = scope.body[0] if scope.body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def code_lines(source: str, tree: ast.Module) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for scope in ast.walk(tree):
        if isinstance(scope, SCOPES) and (docstring := docstring_of(scope)):
            lines -= lines_of(docstring)
    return lines


def is_exception(type_: ast.expr) -> bool:
    name = ast.unparse(type_).strip("'\"")
    return name.isidentifier() and name.endswith(("Error", "Exception"))


class Refusals:
    """The statements of a module that are refusals."""

    def __init__(self, tree: ast.Module, checks: frozenset[str] = frozenset()) -> None:
        self._checks = checks | {"_assert_async"}
        self._found: set[ast.AST] = set()
        number = -1
        while number < len(self._found):  # a text may be made of another one
            number = len(self._found)
            self._found |= {node for node in ast.walk(tree) if isinstance(node, STATEMENTS) and self._refuses(node)}
            for scope in ast.walk(tree):
                if isinstance(scope, SCOPES):
                    self._found |= self._facts_of(scope)

    @property
    def lines(self) -> set[int]:
        return {line for node in self._found if isinstance(node, STATEMENTS) for line in lines_of(node)}

    @property
    def functions(self) -> set[str]:
        """That return nothing and do nothing but refuse."""
        functions = {node for node in self._found if isinstance(node, ast.FunctionDef)}
        return {node.name for node in functions if node.returns is None or ast.unparse(node.returns) == "None"}

    def _facts_of(self, scope: Scope) -> set[ast.AST]:
        """Assignments of what only exceptions are made of."""
        makers = [node for node in ast.walk(scope) if node in self._found and isinstance(node, MAKERS)]
        serving = {inner for maker in makers if maker is not scope for inner in ast.walk(maker)}
        reads = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        facts = {read.id for read in reads} - {read.id for read in reads if read not in serving}
        assignments = (node for node in ast.walk(scope) if isinstance(node, ast.Assign | ast.AnnAssign))
        return {node for node in assignments if (names := names_set_by(node)) and names <= facts}

    def _refuses(self, node: ast.AST) -> bool:
        if node in self._found:
            return True
        if isinstance(node, ast.Raise):
            return node.exc is not None and not isinstance(node.exc, ast.Name)
        if isinstance(node, ast.ClassDef):
            return any(map(is_exception, node.bases))
        if isinstance(node, ast.FunctionDef):
            makes_one = node.returns is not None and is_exception(node.returns)
            return makes_one or self._all_refuse(body_of(node))
        if isinstance(node, ast.Expr):
            call = node.value
            return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in self._checks
        if isinstance(node, ast.If | ast.For):
            return self._all_refuse(node.body) and all(map(self._refuses, node.orelse))
        return isinstance(node, ast.With | ast.ExceptHandler) and self._all_refuse(node.body)

    def _all_refuse(self, body: Sequence[ast.stmt]) -> bool:
        return bool(body) and all(map(self._refuses, body))


def names_set_by(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Empty where more than names is assigned to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {one.id for one in flat if isinstance(one, ast.Name)}
    return names if all(isinstance(one, ast.Name) for one in flat) else set()


@dataclass(frozen=True)
class Counts:
    code: int
    refusals: int
    calls: int
    raises: int


def count(package: Path) -> Iterator[tuple[Path, Counts]]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    found = {path: Refusals(tree) for path, tree in trees.items()}
    checks = frozenset(name for refusals in found.values() for name in refusals.functions)
    for path, tree in trees.items():
        code = code_lines(path.read_text(), tree)
        refusals = found[path].lines & code
        with_calls = Refusals(tree, checks).lines & code
        raises = sum(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))
        yield path, Counts(len(code), len(refusals), len(with_calls - refusals), raises)


def texts(package: Path) -> tuple[int, int]:
    """How many refusals *.ini files hold, and their lines."""
    number = lines = 0
    for path in sorted(package.rglob("*.ini")):
        parser = ConfigParser(interpolation=None, delimiters=("=",))
        parser.read_string(path.read_text())
        number += len(parser.sections())
        lines += sum(bool(line.strip()) and not line.startswith(("#", ";")) for line in path.read_text().splitlines())
    return number, lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("package", type=Path, nargs="?", default=PACKAGE, help="Its folder.")
    package = parser.parse_args(arguments).package
    counts = dict(count(package))
    print("code  refusals  calls of checks")
    for path, one in counts.items():
        print(f"{one.code:4}  {one.refusals:8}  {one.calls:15}  {path.relative_to(package.parent)}")
    code, refusals, calls, raises = (
        sum(getattr(one, name) for one in counts.values()) for name in ("code", "refusals", "calls", "raises")
    )
    number, lines = texts(package)
    print(f"{code:4}  {refusals:8}  {calls:15}  in all")
    print(f"\n{refusals} of {code} code lines are refusals: {refusals / code:.1%}")
    print(f"{refusals + calls} with calls of functions that only refuse: {(refusals + calls) / code:.1%}")
    print(f"beside the code, {number} texts of refusals in {lines} lines of *.ini files; raise statements: {raises}")
    share = (refusals + calls + lines) / (code + lines)
    print(f"{refusals + calls + lines} of {code + lines} lines of code and texts: {share:.1%}")


if __name__ == "__main__":
    main()

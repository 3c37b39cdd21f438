"""What can be counted about Python source: sizes, nesting, names. Pure: text in, facts out."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

BANNED_WORDS: Final = frozenset({"manager", "util", "utils", "helper", "helpers", "info", "v2"})
"""Words that say nothing; `data` is left to the reader."""

TERMS: Final = (("field", "manager"),)
"""Pairs of words that are terms of others: Kubernetes' server-side apply has field managers."""

_BLOCKS: Final = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_WORD: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+[0-9]*|[A-Z]+|[0-9]+")


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """One function or method."""

    path: str
    name: str
    line: int
    lines: int
    """From `def` to the last line, docstring included, decorators not."""
    nesting: int
    """Control blocks inside each other; `elif` is not a level."""
    is_handler: bool = False
    """A decorated function of a module `handlers`: one that kopf calls."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One source file."""

    path: str
    lines: int
    functions: tuple[FunctionFacts, ...]
    banned: tuple[str, ...]
    """`line name` of each definition whose name has a banned word."""
    broad_excepts: tuple[int, ...]
    """Lines of `except Exception` and wider that do not raise again."""
    todos: tuple[int, ...]


def facts(path: str, source: str) -> FileFacts:
    """Count what a file holds. `SyntaxError` when it is no Python."""
    tree = ast.parse(source)
    lines = source.splitlines()
    nodes = list(ast.walk(tree))
    return FileFacts(
        path=path,
        lines=len(lines),
        functions=tuple(_function(path, node) for node in nodes if isinstance(node, _FUNCTIONS)),
        banned=tuple(_banned_definitions(path, nodes)),
        broad_excepts=tuple(n.lineno for n in nodes if isinstance(n, ast.ExceptHandler) and _is_broad(n)),
        todos=tuple(i for i, line in enumerate(lines, 1) if re.search(r"#.*\b(TODO|FIXME|XXX)\b", line)),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that `share` of the values do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def words(name: str) -> list[str]:
    """Words of an identifier, lower case: `KVPoolInfo_v2` has `kv`, `pool`, `info`, `v2`."""
    return [word.lower() for part in name.split("_") for word in _WORD.findall(part)]


def is_banned(name: str) -> bool:
    """Whether an identifier holds a banned word outside a term."""
    found = words(name)
    for i, word in enumerate(found):
        is_term = any(tuple(found[i - k : i - k + len(t)]) == t for t in TERMS for k in range(min(i + 1, len(t))))
        if word in BANNED_WORDS and not is_term:
            return True
    return False


def nesting(body: Sequence[ast.stmt]) -> int:
    """How deep control blocks lie in each other; functions inside count as the block that they stand in."""
    return max((_depth(statement) for statement in body), default=0)


def _function(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> FunctionFacts:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    is_handler = path.endswith("/handlers.py") and any(isinstance(d, ast.Call) for d in node.decorator_list)
    return FunctionFacts(path, node.name, node.lineno, lines, nesting(node.body), is_handler)


def _depth(statement: ast.stmt) -> int:
    inner = [child for child in ast.walk(statement) if isinstance(child, ast.stmt) and child is not statement]
    if isinstance(statement, _FUNCTIONS):
        return 0  # Measured as a function of its own.
    if not isinstance(statement, _BLOCKS):
        return 0 if not inner else nesting(getattr(statement, "body", []))
    return max([1 + nesting(block) for block in _branches(statement)], default=1)


def _branches(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """Bodies of a block. The lone `if` of an `else` is an `elif`: its bodies are taken, not itself."""
    if isinstance(statement, ast.Match):
        yield from (case.body for case in statement.cases)
        return
    yield getattr(statement, "body", [])
    yield from (handler.body for handler in getattr(statement, "handlers", []))
    yield getattr(statement, "finalbody", [])
    otherwise = getattr(statement, "orelse", [])
    if isinstance(statement, ast.If) and len(otherwise) == 1 and isinstance(otherwise[0], ast.If):
        yield from _branches(otherwise[0])
    else:
        yield otherwise


def _banned_definitions(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    module = path.rsplit("/", 1)[-1].removesuffix(".py")
    if is_banned(module):
        yield f"1 {module}"
    for node in nodes:
        name = _defined_name(node)
        if is_banned(name):
            yield f"{node.lineno} {name}"  # type: ignore[attr-defined]


def _defined_name(node: ast.AST) -> str:
    """Name that a node defines: class, function, argument, or target of an assignment."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {node.id for node in caught if isinstance(node, ast.Name)}
    is_wide = handler.type is None or bool(names & {"Exception", "BaseException"})
    return is_wide and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))

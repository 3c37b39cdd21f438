"""One change of a source text, whose place is found by scope and syntax, not by lines.

What is to be replaced is written as Python and must stand exactly once in its scope. Syntax trees are compared, so
layout, parentheses and comments do not count; the rest of the text stays as it is, byte for byte. It is one of

- an expression, replaced by an expression (parts of f-strings are no places);
- statements in a row, replaced by other statements or, with an empty text, taken out;
- a head that ends with a colon (`while True:`, `except OSError as e:`), replaced by another one for the same body.
"""

import ast
import copy
import difflib
import functools
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

_BODIES: Final = ("body", "orelse", "finalbody", "handlers")
_COLON: Final = re.compile(rb"(?:#.*\n|[^#:])*:")
"""From the last expression of a head to its end; comments may hold colons."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class MutationError(ValueError):
    """A change that fits in no place, or in several, or that is no Python."""


@dataclass(frozen=True, slots=True)
class Change:
    """What stands once in a scope of a module, or in a text file, and what comes in its place."""

    old: str
    new: str
    module: str = ""
    scope: str = ""
    """Qualified name of a function or class; empty for the whole module."""
    file: str = ""
    """Path of a text file, instead of a module."""

    @property
    def where(self) -> str:
        """The place as errors and tables name it."""
        return self.file or f"{self.module}:{self.scope}".removesuffix(":")


class _Kind(Enum):
    """What a piece of code is, which says how another one comes in its place."""

    EXPRESSION = auto()
    STATEMENTS = auto()
    WHOLE_BODY = auto()
    """All statements of a body, which must not become empty."""
    HEAD = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of a source text."""

    kind: _Kind
    line: int
    column: int
    start: int
    end: int
    """Positions are bytes, in the line and in the text."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A text and what its syntax tree's positions mean in it."""

    text: bytes
    tree: ast.Module
    line_starts: tuple[int, ...]

    def place(self, kind: _Kind, first: Any, last: Any) -> _Place:
        """From one node to the end of another one."""
        decorators = getattr(first, "decorator_list", ())
        line = min([first.lineno, *(decorator.lineno for decorator in decorators)])
        start, end = self.line_starts[line - 1] + first.col_offset, self.line_starts[last.end_lineno - 1]
        return _Place(kind, line, first.col_offset, start, end + last.end_col_offset)


def mutate(source: str, change: Change) -> str:
    """Make a change in the text of its file. Raises `MutationError` unless it fits in exactly one place."""
    if change.file:
        if (times := source.count(change.old)) != 1:
            raise MutationError(f"{change.where}: old stands there {times} times, 1 wanted: {_first(change.old)}")
        return source.replace(change.old, change.new)
    places = _places(source, change)
    if len(places) != 1:
        lines = f" (lines {', '.join(str(place.line) for place in places)})" if places else ""
        told = f"old stands there {len(places)} times{lines}, 1 wanted: {_first(change.old)}"
        raise MutationError(f"{change.where}: {told}")
    text = _replaced(source.encode(), places[0], change.new.strip("\n")).decode()
    try:
        ast.parse(text)
    except SyntaxError as e:
        raise MutationError(f"{change.where}: with new line {e.lineno} does not parse, {e.msg}") from e
    return text


def scopes_with(source: str, change: Change) -> list[str]:
    """Qualified names of the innermost scopes of a text in which `old` stands."""
    if not all(word in source for word in re.findall(r"\w+", change.old)):
        return []  # Long before a syntax tree is made.
    everywhere = Change(change.old, change.new)
    return [_scope_at(_read(source).tree, place.line) for place in _places(source, everywhere)]


def _first(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return first + " ..." * bool(more)


def _replaced(text: bytes, place: _Place, new: str) -> bytes:
    if place.kind is _Kind.EXPRESSION:
        new = f"({new})"  # Whatever stands around it.
    elif place.kind is _Kind.WHOLE_BODY and not new:
        new = "pass"
    elif place.kind is not _Kind.HEAD:
        new = _indented(new, " " * place.column)
    return text[: place.start] + new.encode() + text[place.end :]


def _indented(statements: str, margin: str) -> str:
    """Statements for a place behind a margin."""
    text = textwrap.indent(statements, margin)
    if margin and statements:
        (block,) = _statements(f"if True:\n{text}", "new")
        assert isinstance(block, ast.If)
        if [*map(ast.dump, block.body)] != [*map(ast.dump, _statements(statements, "new"))]:
            raise MutationError(f"new holds a string of several lines, which an indent changes: {_first(statements)}")
    return text.removeprefix(margin)


@functools.lru_cache(maxsize=2048)
def _read(source: str) -> _Source:
    """Many changes are looked for in one text."""
    text = source.encode()
    lengths = map(len, text.splitlines(keepends=True))
    return _Source(text, ast.parse(text), tuple(itertools.accumulate(lengths, initial=0)))


def _places(source: str, change: Change) -> list[_Place]:
    """Where `old` stands in the scope. Raises `MutationError` for an unknown scope, and for what is no Python."""
    read = _read(source)
    nodes = itertools.chain.from_iterable(map(_inside, _scopes(read.tree, change)))
    if change.old.rstrip().endswith(":"):
        _head(change.new)
        return list(_heads(read, nodes, change.old.strip()))
    old, new = _statements(change.old, "old"), _statements(change.new, "new")
    if not old:
        raise MutationError(f"{change.where}: old is empty")
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        return list(_expressions(read, nodes, old[0].value))
    return list(_runs(read, nodes, old))


def _statements(text: str, what: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as e:
        raise MutationError(f"{what} does not parse, {e.msg}: {_first(text)}") from e


def _expressions(read: _Source, nodes: Iterable[ast.AST], old: ast.expr) -> Iterator[_Place]:
    wanted = ast.dump(old)
    for node in nodes:
        if type(node) is type(old) and ast.dump(node) == wanted:
            yield read.place(_Kind.EXPRESSION, node, node)


def _runs(read: _Source, nodes: Iterable[ast.AST], old: Sequence[ast.stmt]) -> Iterator[_Place]:
    types, wanted = [type(statement) for statement in old], [ast.dump(statement) for statement in old]
    for body in (value for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, list)):
        for i in range(len(body) - len(old) + 1):
            run = body[i : i + len(old)]
            if [type(statement) for statement in run] != types or [ast.dump(statement) for statement in run] != wanted:
                continue
            place = read.place(_Kind.WHOLE_BODY if len(run) == len(body) else _Kind.STATEMENTS, run[0], run[-1])
            if read.text.startswith(b"elif", place.start):
                raise MutationError(f"line {place.line}: an elif is no statement by itself, change its head")
            yield place


def _heads(read: _Source, nodes: Iterable[ast.AST], old: str) -> Iterator[_Place]:
    wanted = _head(old)
    (keyword,) = re.findall(r"^\w+", old)
    for node in nodes:
        if type(node) is not type(wanted) or ast.dump(bare := _bodiless(node)) != ast.dump(wanted):
            continue
        whole = read.place(_Kind.HEAD, node, node)
        inner = [read.place(_Kind.EXPRESSION, n, n).end for n in ast.walk(bare) if hasattr(n, "end_lineno")]
        colon = _COLON.match(read.text, max(end for end in (whole.start, *inner[1:])))
        if colon and read.text.startswith(keyword.encode(), whole.start):
            yield _Place(_Kind.HEAD, whole.line, whole.column, whole.start, colon.end())


def _head(text: str) -> ast.AST:
    """The compound statement or handler that begins so, without its body."""
    text = text.strip()
    if not text.endswith(":"):
        raise MutationError(f"a head ends with a colon: {_first(text)}")
    if text.startswith("except"):
        (whole,) = _statements(f"try: ...\n{text} ...", "head")
        assert isinstance(whole, ast.Try)
        return _bodiless(whole.handlers[0])
    return _bodiless(_statements(f"{re.sub('^elif', 'if', text)} ...", "head")[0])


def _bodiless(node: ast.AST) -> ast.AST:
    bare = copy.copy(node)
    for field in set(_BODIES).intersection(node._fields):
        setattr(bare, field, [])
    return bare


def _scopes(tree: ast.Module, change: Change) -> list[ast.AST]:
    """What has the scope's name: a property and its setter have the same."""
    found: list[ast.AST] = [tree]
    for name in change.scope.split(".") if change.scope else ():
        there = [definition for scope in found for definition in _definitions(scope)]
        found = [definition for definition in there if definition.name == name]
        if not found:
            alike = difflib.get_close_matches(name, {definition.name for definition in there})
            told = f"; alike: {', '.join(alike)}" if alike else ""
            raise MutationError(f"{change.where}: no function or class {name} there{told}")
    return found


def _definitions(scope: ast.AST) -> Iterator[_Definition]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Definition):
            yield node
        elif not isinstance(node, ast.expr):
            yield from _definitions(node)


def _scope_at(scope: ast.AST, line: int) -> str:
    for definition in _definitions(scope):
        if definition.lineno <= line <= (definition.end_lineno or 0):
            return f"{definition.name}.{_scope_at(definition, line)}".removesuffix(".")
    return ""


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all within it but for parts of f-strings, whose positions Python 3.11 does not know."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _inside(child)

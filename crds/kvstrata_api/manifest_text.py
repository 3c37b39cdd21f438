"""Manifests as text: objects with the lines that their fields stand on. Pure.

Scalars are read as kubectl reads them: times stay texts, and 12e45 is a number; lists are taken apart.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from kvstrata_api.errors import InvalidInputError

_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """SafeLoader to which a time is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+\Z"), list("-+.0123456789")
)
"""A revision such as 12e45 is a number to kubectl, with or without a dot, and has to be quoted."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One object of a text, and where its fields are."""

    obj: Mapping[str, Any]
    node: yaml.MappingNode = field(repr=False)

    def line(self, path: str) -> int:
        """Line of a field such as `spec.tiers[0].type`, or of the nearest one above that is there; from 1."""
        return _walk(self.node, path)[0]

    def text(self, path: str) -> str:
        """What is written there; empty for a field that is absent, or that holds others."""
        _, node, rest = _walk(self.node, path)
        return str(node.value) if isinstance(node, yaml.ScalarNode) and not rest else ""

    def repeated(self) -> Iterator[tuple[str, int]]:
        """Keys that a mapping has twice, by path and line of the second; the last one counts."""
        yield from _repeated(self.node, "")


def read(text: str) -> Iterator[Placed]:
    """Every object of a text, those of lists one by one; empty documents are passed over.

    Raises `InvalidInputError` with the line of what is no YAML, or no mapping, once the objects before it were given.
    """
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            found = loader.construct_document(node) if node is not None else None
            if found is not None and node is not None:
                yield from _objects(found, node)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise InvalidInputError(f"{mark.line + 1 if mark else 1}: {e.problem or e.context}") from e
    except yaml.YAMLError as e:
        raise InvalidInputError(f"1: {e}") from e
    finally:
        loader.dispose()


def _objects(found: Any, node: yaml.Node) -> Iterator[Placed]:
    if not isinstance(found, Mapping) or not isinstance(node, yaml.MappingNode):
        raise InvalidInputError(f"{node.start_mark.line + 1}: {type(found).__name__}, a mapping wanted")
    items = found.get("items")
    if not isinstance(items, list):
        yield Placed(found, node)
        return
    (listed,) = [value for key, value in node.value if key.value == "items"][-1:]
    for item, at in zip(items, listed.value, strict=True):
        yield from _objects(item, at)


def _walk(node: yaml.Node, path: str) -> tuple[int, yaml.Node, str]:
    """Follow a path as far as it goes: the line, the node there, and what is left of the path."""
    line, rest = node.start_mark.line + 1, path
    while rest:
        if isinstance(node, yaml.SequenceNode) and rest.startswith("["):
            index, _, behind = rest[1:].partition("]")
            if int(index) >= len(node.value):
                break
            node = node.value[int(index)]
            line, rest = node.start_mark.line + 1, behind.removeprefix(".")
            continue
        # Keys may have dots: the longest that fits, and of equal ones the last, which counts.
        fitting = [
            (len(str(key.value)), at, key, value)
            for at, (key, value) in enumerate(node.value if isinstance(node, yaml.MappingNode) else ())
            if rest == key.value or rest.startswith((f"{key.value}.", f"{key.value}["))
        ]
        if not fitting:
            break
        length, _, key, node = max(fitting, key=lambda one: one[:2])
        line, rest = key.start_mark.line + 1, rest[length:].removeprefix(".")
    return line, node, rest


def _repeated(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, f"{path}[{index}]")
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            where = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                yield where, key.start_mark.line + 1
            seen.add(key.value)
            yield from _repeated(value, where)

"""Manifests as text: objects with the lines that their fields stand on. Pure.

Scalars are read as kubectl reads them: times stay texts, 12e45 is a number, and keys that are numbers or booleans are
texts; lists are taken apart.
"""

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from kvstrata_api.errors import InvalidInputError

DEPTH_MAX: Final = 100
"""Levels of one document: schemas in CRDs have 40, and Python follows some 300."""
ALIASED_MAX: Final = 100_000
"""Nodes that aliases may stand for, in one document: nine lines of them can stand for a billion."""
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_TEXT: Final = "tag:yaml.org,2002:str"
_TEXTS: Final = frozenset({_TEXT, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"})
"""Tags of keys that PyYAML reads as they are written."""


class _Loader(yaml.SafeLoader):
    """SafeLoader to which a time is a text, and so is every key."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  PyYAML's.
        """See PyYAML, whose constructors of scalars raise errors of Python for texts that do not fit a tag."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as e:
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.constructor.ConstructorError(
                None, None, f"{str(node.value)[:40]!r} is no {tag}", node.start_mark
            ) from e

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        """See PyYAML. Keys become texts first, as they do for kubectl, which has JSON made of them."""
        if isinstance(node, yaml.MappingNode):  # PyYAML refuses others, which `!!set` makes of any node.
            node.value = [(self._text_key(key), value) for key, value in node.value]
        made: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return made

    def _text_key(self, key: yaml.Node) -> yaml.Node:
        """Raise `ConstructorError` for what becomes no key of JSON."""
        if not isinstance(key, yaml.ScalarNode) or key.tag in _TEXTS:
            return key  # PyYAML refuses lists and mappings by itself.
        value = self.construct_object(key)
        if not isinstance(value, str | int | float):
            raise yaml.constructor.ConstructorError(None, None, f"key {value!r:.40}: a text wanted", key.start_mark)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return yaml.ScalarNode(_TEXT, text, key.start_mark, key.end_mark)


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
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise InvalidInputError(f"{line}: character {e.character:#x} is not allowed: {e.reason}") from e
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                continue
            _check_size(node)
            found = loader.construct_document(node)
            if found is not None:
                yield from _objects(found, node)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise InvalidInputError(f"{mark.line + 1 if mark else 1}: {e.problem or e.context}") from e
    except RecursionError as e:
        raise InvalidInputError(f"{loader.line + 1}: nested too deeply, limit {DEPTH_MAX} levels") from e
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """Raise `InvalidInputError` for a document that is too deep, or that aliases make too large or endless."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, level: int) -> int:
        if level > DEPTH_MAX:
            where = node.start_mark.line + 1
            raise InvalidInputError(f"{where}: nested too deeply, or in itself by an alias; limit {DEPTH_MAX} levels")
        known = sizes.get(id(node))
        if known is None:
            children: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                children = [part for pair in node.value for part in pair]
            known = sizes[id(node)] = 1 + sum(size(child, level + 1) for child in children)
        return known

    nodes = size(root, 1)
    if nodes - len(sizes) > ALIASED_MAX:
        raise InvalidInputError(
            f"{root.start_mark.line + 1}: aliases stand for {nodes - len(sizes)} nodes, limit {ALIASED_MAX}"
        )


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

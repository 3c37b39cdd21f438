"""Whether the index counts the children that its blocks have, entries and rows alike."""

from collections.abc import Iterator

from kvstrata_agent.blocks.block import TIERS_MAX
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.packed_blocks import PackedBlock
from kvstrata_api.blocks import ScopeId


def wrong_counts(index: Index) -> Iterator[str]:
    """Parents whose children are counted wrongly, and rows that would never be victims."""
    for scope in index.scopes():
        blocks = index.blocks(scope)
        wanted: dict[bytes, list[int]] = {}
        for digest, parent in blocks.links():
            entry, copy = blocks.in_use.get(digest), blocks.copy(digest)
            level = entry.level if entry is not None else copy.tier.level if copy is not None else 0
            wanted.setdefault(parent, [0] * TIERS_MAX)[level] += 1
        counted = dict(blocks.children)
        for row in rows_of(index, scope):
            assert row.digest not in counted, "a row has its own counts"
            counted[row.digest] = list(row.counts)
            if not any(row.counts[: row.kind.tier.level + 1]):
                yield f"row of {row.digest.hex()} is no victim and has no child"
        if counted != wanted:
            yield f"{scope}: {counted} counted, {wanted} there"


def rows_of(index: Index, scope: ScopeId) -> list[PackedBlock]:
    """Rows of a scope."""
    found = index.packed.where(lambda kind: kind.scope == scope)
    return [index.packed.read(int(number)) for numbers in found for number in numbers]


def wrong_books(node: Node) -> Iterator[str]:
    """The same, and what tiers say of their blocks."""
    yield from wrong_counts(node.index)
    for tier in node.tiers:
        contents = node.contents(tier)
        in_extents = sum(map(len, contents.extents.values()))
        if contents.blocks != in_extents:
            yield f"{tier.name}: {contents.blocks} blocks, {in_extents} in extents"

"""What is to be copied, by which path, and through which codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstrata_agent.codec.base import LOSSY, RAW, Shape, planes_of

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.codec.base import Codec, Decoder, Encoded
    from kvstrata_agent.codec.lossy import Drift
    from kvstrata_agent.policy.placement import CopyPath
    from kvstrata_api.models.pool import CompressionPolicy


class Move(NamedTuple):
    """One block that is to be copied. Made by `Mover.plan`."""

    entry: Entry
    source: Residence
    slot: SlotRef | None
    """Where it goes; None lets the target give a slot of the stored size."""
    path: CopyPath


class Codecs(Protocol):
    """The codecs that this build has."""

    def named(self, name: str) -> Decoder:
        """Return what reads the records of a codec. Raises `UnsupportedError` for one that this build lacks."""

    def for_policy(self, policy: CompressionPolicy, *, is_worn: bool, is_archive: bool = False) -> Codec:
        """Return the codec of `spec.policy.compression`, for blocks that may have lost something already or not."""

    def drift(self, policy: CompressionPolicy) -> Drift | None:
        """How far blocks are from the policy's calibration; None where it has none for its error."""


class Coding:
    """The pool's codecs, as its policy wants them now."""

    def __init__(self, node: Node, codecs: Codecs) -> None:
        self._node = node
        self._codecs = codecs

    @property
    def drift(self) -> Drift | None:
        """How far blocks are from the pool's calibration; None where it has none."""
        return self._codecs.drift(self._node.spec.policy.compression)

    def named(self, name: str) -> Decoder:
        """Return what reads the records of a codec. Raises `UnsupportedError` for one that this build lacks."""
        return self._codecs.named(name)

    def codec_for(self, record: Record, target: Tier) -> Codec | None:
        """Return what a block goes through on its way to a tier; None where it is stored as it is."""
        can = target.backend.capabilities
        if can.is_memory:
            return None
        policy, is_worn = self._node.spec.policy.compression, record.codec in LOSSY
        codec = self._codecs.for_policy(policy, is_worn=is_worn, is_archive=can.is_archive)
        return None if codec.name == RAW else codec

    def shape(self, entry: Entry, raw_bytes: int) -> Shape:
        """Without planes at the root of a chain: every bit of the first tokens counts, which all others attend to.

        The last tokens of a prompt are in no block until their block is full, so they never come here.
        """
        planes = planes_of(self._node.layouts.get(entry.layout_id), raw_bytes) if entry.parent else None
        return Shape(self._node.element_bytes, planes, entry.layout_id)

    def count(self, made: Encoded) -> None:
        """Count what a codec made of a block."""
        counters = self._node.counters
        if made.drifted:
            counters.add("kvstrata_codec_drifted_planes_total", made.drifted)
        for form, planes, missed, worst_error in made.settled:
            counters.add("kvstrata_codec_planes_total", planes, form=form)
            counters.add("kvstrata_codec_missed_guesses_total", missed, form=form)
            counters.observe("kvstrata_codec_error_ratio", worst_error, form=form)

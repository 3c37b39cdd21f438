"""Why is a block or a session where it is? Inputs, alternatives and choice of each decision, as plain JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvstrata_agent.cache.prefix_tree import BLOCKS_MAX, prefix_tree
from kvstrata_agent.cache.why_miss import event_row, said_of, why_miss
from kvstrata_agent.codec.base import LOSSY
from kvstrata_agent.policy.priority import class_of
from kvstrata_agent.policy.routing import MediumSpeed, NodeScore, rank
from kvstrata_api.blocks import ScopeId
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.session_log import SessionEvent
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.archive import Archiver
    from kvstrata_agent.cache.load import Reader
    from kvstrata_agent.cache.why_miss import Asked
    from kvstrata_api.trust import Access
    from kvstrata_metadata.store.records import Location

ABSENT: dict[str, Any] = {"state": "absent"}
"""Answer for unknown blocks, of forbidden ones and of other tenants' sessions alike."""


class Explainer:
    """Answers `stats` and `explain`. Changes nothing."""

    def __init__(self, node: Node, reader: Reader, archiver: Archiver) -> None:
        self._node = node
        self._reader = reader
        self._archiver = archiver

    def stats(self, owner: int, tenant: str, scopes: Iterable[ScopeId]) -> dict[str, Any]:
        """Tiers and totals. Fills are rounded to 1 %, so that a tenant cannot count the blocks of another.

        What the tenant that asks has on its own account is exact; leases and reservations are those of its connection,
        `owner`. How fast its engines compute is None while unknown; layouts are those of blocks in the scopes that it
        may read.
        """
        node = self._node
        limits = {t: node.tenants.hard_bytes(t, tenant) for t in node.tiers}
        return {
            "agent": node.agent,
            "epoch": node.epoch,
            "tiers": [self._tier(t) for t in node.tiers],
            "leases": node.leases.count(owner),
            "reservations": len(node.reservations.owned(owner)),
            "tenant": {
                "used_bytes": sum(t.tenant_bytes.get(tenant, 0) for t in node.tiers),
                "limit_bytes": sum(t.backend.capacity_bytes if n is None else n for t, n in limits.items()),
                "prefill_tokens_per_s": self._reader.engine(tenant).prefill_tokens_per_s or None,
                "layouts": sorted({layout.hex() for scope in scopes for layout in node.index.layouts(scope)}),
            },
        }

    def session(self, session: Session | None) -> dict[str, Any]:
        """State of a session; an unknown one is absent."""
        if session is None:
            return ABSENT
        returns_s = session.returns_at_s - self._node.clock() if session.returns_at_s else None
        return {
            "session": session.name,
            "state": session.state,
            "parent": session.parent,
            "priority": session.priority,
            "priority_class": class_of(session.priority).name.lower(),
            "sink_tokens": session.attention.sink_tokens,
            "window_tokens": session.attention.window_tokens,
            "anchor_tokens": session.attention.anchor_tokens,
            "turns": session.turns,
            "urgency": session.urgency_at(self._node.clock()),
            "expected_return_s": returns_s,
            "retained_s": max(0.0, session.retained_until_s - self._node.clock()),
            "blocks_not_archived": len(self._archiver.left(session)),
            "blocks": self._places(session),
            "heads_not_here": len(session.absent),
            "heads": [
                {
                    "digest": h.digest.hex(),
                    "is_kept": h in session.kept,
                    "tiers": [r.tier.name for r in h.residences],
                    "history": self._history(h.scope, h.digest),
                }
                for h in session.heads
            ],
            "log": [self._happened(e) for e in self._node.sessions.log.of(session.key)],
            "absent_heads": [
                {"digest": h.digest.hex(), "is_kept": h.is_kept, "history": self._history(ScopeId(h.scope), h.digest)}
                for h in session.absent
            ],
        }

    def _places(self, session: Session) -> dict[str, int]:
        """Blocks of a session's chains by the tier that they are read from; those of none are on their way."""
        copies = (self._node.best_copy(entry) for chain in self._archiver.chains(session) for entry in chain)
        return dict(Counter([copy.tier.name if copy is not None else "" for copy in copies]))

    def _happened(self, event: SessionEvent) -> dict[str, Any]:
        """One event, with what came of the choice to fetch or to compute what was not in memory."""
        regret = self._node.regrets.find(event.weighed) if event.weighed else None
        return {
            "what": event.what,
            "ago_s": self._node.clock() - event.at_s,
            "state": event.state,
            "blocks": dict(event.blocks),
            "lacking_blocks": event.lacking,
            "waited_s": event.waited_s,
            "choice": regret.source if regret is not None else "",
            "regret_s": regret.regret_s if regret is not None else 0.0,
        }

    def block(self, scope: ScopeId | None, digest: bytes, context: RequestContext | None = None) -> dict[str, Any]:
        """State of a block, why it may or may not leave, where it would go, and what getting it costs who asks."""
        entry = self._node.index.find(scope, digest) if scope is not None else None
        history = self._history(scope, digest) if scope is not None else []
        if entry is None:
            return ABSENT | {"history": history} if history else ABSENT
        state = "published" if entry.residences else "pending"
        return {
            "state": state,
            "idle_s": self._node.clock() - entry.used_at_s,
            "expected_reuse": self._node.returns.explain(entry),
            "copies": [self._copy(entry, r) for r in entry.residences],
            "held_by": self._holders(entry),
            "read": self._read(entry, context),
            "last_choice": self._last_choice(digest),
            "history": history,
        }

    def tree(self, access: Access, tenant: str) -> dict[str, Any]:
        """The tenant's prefixes in a scope: of a shared one, what is on its own account alone."""
        blocks = self._node.index.blocks(access.scope)
        newest = islice(reversed(blocks.in_use.values()), BLOCKS_MAX)
        own = [e for e in newest if access.kind is ScopeKind.TENANT or e.tenant == tenant]
        runs, left_out = prefix_tree(own, tenant, self._node.clock(), self._node.best_copy)
        looked_at = {"blocks": len(own), "blocks_in_all": len(blocks)} if access.kind is ScopeKind.TENANT else {}
        named = {"tiers": [t.name for t in self._node.tiers], **looked_at}
        return {**named, "runs": list(map(asdict, runs)), "runs_left_out": left_out}

    def miss(self, asked: Asked) -> dict[str, Any]:
        """Why a chain is not found as a whole; see `why_miss`."""
        return asdict(why_miss(self._node, self._reader, asked))

    def routes(
        self, context: RequestContext | None, entries: Sequence[Entry | None], others: Sequence[Sequence[Location]]
    ) -> list[NodeScore]:
        """Nodes of this pool that have a prompt, the soonest first; `others` is where other agents have its blocks."""
        node = self._node
        copies: list[dict[str, tuple[str, int]]] = []
        for entry, locations in zip(entries, others, strict=True):
            here = {c.agent.removeprefix(f"{node.pool}."): (c.tier, c.stored_bytes) for c in locations}
            best = node.best_copy(entry) if entry is not None else None
            if best is not None:
                here[node.name] = str(best.tier.spec.type), best.record.stored_bytes
            copies.append(here)
        speeds = {
            str(t.spec.type): MediumSpeed(t.probe.read_latency_microseconds / 1e6, float(t.probe.read_bytes_per_second))
            for t in reversed(node.tiers)  # The fastest of a medium counts.
            if t.backend.mappable is None and t.probe is not None
        }
        return rank(copies, speeds, self._reader.compute_s(context, node.spec.compatibility.block_tokens))

    def _history(self, scope: ScopeId, digest: bytes) -> list[dict[str, Any]]:
        """Last decisions on a block, the latest first."""
        now_s = self._node.clock()
        return [event_row(e, now_s) | {"said": said_of(e, now_s)} for e in self._node.history.of(scope, digest)]

    def _copy(self, entry: Entry, residence: Residence) -> dict[str, Any]:
        tier, slot, record = residence
        index = self._node.index
        return {
            "tier": tier.name,
            "codec": record.codec,
            "is_exact": record.codec not in LOSSY,
            "raw_bytes": record.raw_bytes,
            "stored_bytes": record.stored_bytes,
            "slot_bytes": slot.size_bytes,
            "read_in_place_on": self._device_of(residence),
            "eviction": {
                "inputs": {"children_here_or_faster": index.blockers(entry, tier.level), "is_held": entry.is_held},
                "choice": "may leave" if index.may_leave(entry) and not entry.is_held else "stays",
            },
            "placement": {
                "alternatives": [t.name for t in self._node.tiers if t.level > tier.level],
                **asdict(self._node.placement_of(entry, self._node.places_below(tier.level), may_decline=True)),
            },
        }

    @staticmethod
    def _device_of(copy: Residence) -> str:
        """Device on which engines of the tenant may copy it, `emulated` for the double; empty where there is none."""
        lending = copy.tier.backend.lending
        return lending.device_of(copy.slot.extent) if lending is not None and lending.sum_of(copy.slot) else ""

    def _read(self, entry: Entry, context: RequestContext | None) -> dict[str, Any]:
        if not entry.residences:
            return {"choice": "nothing to read"}
        cost = self._reader.cost([entry], context)
        if cost is None:
            return {"choice": "fetch", "reason": "in memory", "alternatives": []}
        return {
            "choice": cost.source,
            "reason": cost.reason,
            "alternatives": {"fetch_s": cost.fetch_s, "recompute_s": cost.recompute_s},
        }

    def _last_choice(self, digest: bytes) -> dict[str, Any]:
        """What came of the last choice to fetch, or to leave to the engine, what begins with a block."""
        known = self._node.regrets.find(digest)
        return asdict(known) | {"regret_s": known.regret_s} if known is not None else {}

    @staticmethod
    def _holders(entry: Entry) -> dict[str, int]:
        """Numbers only: names would reveal other connections."""
        holders = {"leases": entry.leases, "pins": entry.pins, "decoding_sessions": entry.guards}
        return {name: len(held) for name, held in holders.items() if held} | ({"moves": 1} if entry.move else {})

    @staticmethod
    def _tier(tier: Tier) -> dict[str, Any]:
        capacity_bytes = tier.backend.capacity_bytes
        percent = round(tier.fill_ratio * 100)
        return {
            "name": tier.name,
            "type": tier.spec.type,
            "medium": tier.backend.capabilities.medium,
            "emulated": tier.backend.capabilities.is_emulated,
            "capacity_bytes": capacity_bytes,
            "used_percent": percent,
            "used_bytes": capacity_bytes * percent // 100,
            "last_error": tier.last_error or tier.backend.last_error,
        }

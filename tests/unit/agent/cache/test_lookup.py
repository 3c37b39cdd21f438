"""Laws of what a lookup answers: states, places and names agree with a plain account of the same blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import Record
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import REMOTE_BIT, findings
from kvstrata_api.blocks import BlockKey
from kvstrata_api.tiers import Lookup
from support.agent.doubles import LAYOUT_ID, SCOPE, dict_tier, digest, dram_tier

pytestmark = pytest.mark.unit

TIERS = {"dram": dram_tier(1 << 16), "nvme": dict_tier("nvme", 1 << 20, 1, 2)}
places = st.sampled_from(["dram", "nvme", "pending", "absent", "remote dram", "remote object"])


def entry(number: int, tier: Tier | None) -> Entry:
    made = Entry(SCOPE, digest(number), b"", LAYOUT_ID, 0.0, 0.0)
    if tier is not None:
        slot = TIERS["nvme"].backend.reserve(SCOPE, 0)
        record = Record(BlockKey(SCOPE, digest(number)), b"", LAYOUT_ID, "raw", 1, 1, b"", 1)
        made.residences = (Residence(tier, slot, record),)
    return made


def state(place: str, absent: Lookup) -> Lookup:
    return {"pending": Lookup.PENDING, "absent": absent}.get(place, Lookup.HIT)


@given(st.lists(places, max_size=40), st.sampled_from([Lookup.MISS, Lookup.RETRY]))
def test_every_key_is_told_where_it_is(where: list[str], absent: Lookup) -> None:
    entries = [entry(i, TIERS.get(p)) if p in ("dram", "nvme", "pending") else None for i, p in enumerate(where)]
    remote = {i: p.removeprefix("remote ") for i, p in enumerate(where) if p.startswith("remote")}

    found = findings(entries, remote, absent)

    wanted = [state(p, absent) for p in where]
    assert list(found.states) == wanted
    hits = next((i for i, s in enumerate(wanted) if s != Lookup.HIT), len(wanted))
    named = [(found.tier_names[c & ~REMOTE_BIT], bool(c & REMOTE_BIT)) for c in found.places]
    assert named == [(p.removeprefix("remote "), p.startswith("remote")) for p in where[:hits]]
    assert len(set(found.tier_names)) == len(found.tier_names)

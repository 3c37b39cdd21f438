"""Blocks of an HBM tier are read in place: on the double, through a real agent and its socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

import torch

from kvstrata_agent.blocks.request import Caller
from kvstrata_api import wire
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError, LeaseLostError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import HostDevices, rows_of
from kvstrata_client.connectors.paged import ORDER, LoadedPages, PagedConnector, PagedKv
from kvstrata_native.devices import EMULATED, Opened
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, caller
from support.agent.lending import borrowed, hbm_of, lending_tiers, raise_all
from support.agent.process import DOMAIN, member
from support.agent.thread import AgentThread
from support.client.attached import BLOCKS, PATIENT_S, TOKENS, content, keys_of, target, until
from support.client.paged_kv import LAYOUT as PAGES_LAYOUT
from support.client.paged_kv import filled, pages_of

pytestmark = pytest.mark.unit


@contextmanager
def serving(folder: Path, *, lends: bool = True, **more: Caller) -> Iterator[AgentThread]:
    callers = FakeAuthenticator(a=caller("a"), b=caller("b"), **more)
    with AgentThread(folder / "agent.sock", lambda: lending_tiers(lends=lends), callers) as agent:
        yield agent


def attached(agent: AgentThread, token: str = "a", *, opens: bool = True, layout: Any = LAYOUT) -> Client:  # noqa: S107  A name.
    wanted = replace(target(agent.socket, token, layout=layout), devices=HostDevices() if opens else None)
    client = Client.attach(wanted, wait_s=PATIENT_S)
    assert client.is_attached, client.reason
    return client


def stored(agent: AgentThread, client: Client) -> None:
    """The prompt lies in HBM and nowhere else."""
    assert PrefixCache(client).store(TOKENS, content()).published == BLOCKS
    assert raise_all(agent) == BLOCKS


def loaded(client: Client) -> tuple[int, int, Any]:
    """Blocks loaded, those of them read in place, and the rows."""
    found = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    rows = rows_of(found)
    blocks = PrefixCache(client).load_rows(TOKENS, rows).blocks
    return blocks, rows.in_place_blocks, found.numpy()


def counted(agent: AgentThread, name: str) -> float:
    labels = {"pool": "pool", "node": "node", "tier": "hbm"}
    return agent.core.node.counters._instruments.registry.get_sample_value(name, labels) or 0.0


def test_blocks_are_copied_on_the_device_and_nothing_is_brought_to_host_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)

        blocks, in_place, found = loaded(client)

        assert blocks == in_place == BLOCKS
        assert np.array_equal(found, content())
        assert agent.core.node.tiers[1].backend.used_bytes == 0
        assert client.counters.loaded_blocks == {"hbm": BLOCKS}
        assert len(agent.core.node.leases) == 0


@pytest.mark.parametrize(("lends", "opens"), [(True, False), (False, True)])
def test_a_client_that_opens_nothing_and_a_tier_that_does_not_lend_copy_as_before(
    tmp_path: Path, *, lends: bool, opens: bool
) -> None:
    with serving(tmp_path, lends=lends) as agent, attached(agent, opens=opens) as client:
        stored(agent, client)

        blocks, in_place, found = loaded(client)

        assert (blocks, in_place) == (BLOCKS, 0)
        assert np.array_equal(found, content())


def test_a_load_to_host_memory_gets_host_memory_whatever_the_client_opens(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)

        assert np.array_equal(PrefixCache(client).load(TOKENS).data, content())


def test_a_block_that_changes_under_its_reader_is_a_miss_and_leaves_the_tier(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        third = agent.core.node.index.find(keys_of(client)[2].scope, keys_of(client)[2].digest)
        assert third is not None
        slot = third.residences[0].slot
        hbm_of(agent).memory.tensors[slot.extent][slot.offset + 77] ^= 1

        blocks, in_place, found = loaded(client)

        assert (blocks, in_place) == (2, 2)
        assert np.array_equal(found[:2], content()[:2])
        until(lambda: not third.residences)


def test_what_was_read_after_the_lease_was_over_is_void(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)

        leases = client.acquire(keys_of(client), in_place=True)
        assert all(lease.tensor is not None and not lease.view for lease in leases)
        agent.call(lambda: agent.core.node.revoke(agent.core.node.tiers[0]))

        with pytest.raises(LeaseLostError), leases:
            pass


def test_a_lease_keeps_its_block_where_it_is_and_an_extent_where_it_is_open(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        keys, hbm = keys_of(client), hbm_of(agent)
        extents = len(hbm.memory.tensors)
        with client.acquire(keys, in_place=True) as leases:
            for key in keys:
                entry = agent.core.node.index.find(key.scope, key.digest)
                assert entry is not None
                agent.call(lambda e=entry: agent.core.node.drop_block(e, "test"))  # type: ignore[misc]

            assert agent.wait(hbm.resize(0))
            assert bytes(leases[1].tensor.numpy()) == content()[1].tobytes()

        until(lambda: not hbm.memory.tensors)
        assert borrowed(agent) == (extents, extents)  # Cleared, and open in the client still.
        assert PrefixCache(client).load(TOKENS).blocks == 0  # Its answer names what has gone.
        until(lambda: borrowed(agent) == (0, 0))


def test_a_client_that_goes_gives_back_what_it_had_open(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as keeper:
        stored(agent, keeper)
        with attached(agent) as client:
            assert loaded(client)[1] == BLOCKS
            assert borrowed(agent) == (len(hbm_of(agent).memory.tensors), 0)

        until(lambda: borrowed(agent) == (0, 0))


def test_another_tenant_gets_neither_block_nor_device_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client, attached(agent, "b") as other:
        stored(agent, client)
        keys = keys_of(client)

        with other.acquire(keys, in_place=True) as leases:
            assert len(leases) == 0

        assert loaded(other)[:2] == (0, 0)
        assert borrowed(agent) == (0, 0)
        assert other._link is not None
        assert not other._link.protocol._devices._open


def test_blocks_that_tenants_share_are_copied_because_a_mapping_could_be_written(tmp_path: Path) -> None:
    with serving(tmp_path, joined=member("a", can_write=True)) as agent, attached(agent, "joined") as client:
        assert client.grants is not None
        assert client.grants.write_scope == DOMAIN
        stored(agent, client)

        blocks, in_place, found = loaded(client)

        assert (blocks, in_place) == (BLOCKS, 0)
        assert np.array_equal(found, content())
        assert borrowed(agent) == (0, 0)


def test_nobody_gets_a_device_that_it_did_not_name(tmp_path: Path) -> None:
    class Elsewhere(HostDevices):
        names = ("GPU-of-another-machine",)

    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        wanted = replace(target(agent.socket), devices=Elsewhere())
        with Client.attach(wanted, wait_s=PATIENT_S) as other:
            assert loaded(other)[:2] == (BLOCKS, 0)


class Unopenable(HostDevices):
    """As of an engine with a driver that refuses: the agent's memory is offered and does not open."""

    def open(self, grant: wire.DeviceGrant, fd: int) -> Opened:  # noqa: ARG002
        self.error = f"extent {grant.extent}: invalid argument"
        raise InvalidInputError(self.error)


def test_memory_that_does_not_open_costs_no_block_and_no_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        wanted = replace(target(agent.socket), devices=Unopenable())
        with Client.attach(wanted, wait_s=PATIENT_S) as other:
            link = other._link
            with other.acquire(keys_of(other), in_place=True) as leases:
                assert len(leases) == 0

            blocks, in_place, found = loaded(other)

            assert (blocks, in_place) == (BLOCKS, 0)
            assert np.array_equal(found, content())
            assert other.counters.corrupt_blocks == other.counters.lost_blocks == 0
            assert other._link is link
        until(lambda: len(agent.core.node.leases) == 0)


def test_a_load_in_whose_midst_memory_does_not_open_goes_on_through_host_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        wanted = replace(target(agent.socket), devices=Unopenable())
        with Client.attach(wanted, wait_s=PATIENT_S) as other:
            blocks, in_place, found = loaded(other)

            assert (blocks, in_place) == (BLOCKS, 0)
            assert np.array_equal(found, content())


def test_the_agent_says_what_it_lent_and_on_which_device(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        stored(agent, client)
        assert f'"read_in_place_on": "{EMULATED}"' in client.explain(key=keys_of(client)[0])

        loaded(client)

        assert counted(agent, "kvstrata_lent_bytes_total") == BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("page_tokens", [16, 24])
def test_pages_of_an_engine_get_blocks_of_the_device(tmp_path: Path, page_tokens: int) -> None:
    blocks = 6
    tokens, table = list(range(blocks * PAGES_LAYOUT.block_tokens + 5)), pages_of(blocks + 1, page_tokens)
    written = filled(ORDER, page_tokens)
    empty = [torch.zeros_like(t) for t in written]
    with serving(tmp_path) as agent, attached(agent, layout=PAGES_LAYOUT) as client:
        saving = PagedConnector(PrefixCache(client), PagedKv(written, PAGES_LAYOUT))
        assert saving.save(tokens, table).published == blocks
        assert raise_all(agent) == blocks

        with PagedConnector(PrefixCache(client), PagedKv(empty, PAGES_LAYOUT)).load(tokens, table) as load:
            assert isinstance(load, LoadedPages)
            assert load.in_place_blocks == blocks
            assert load.tokens == blocks * PAGES_LAYOUT.block_tokens

    expected, found = PagedKv(written, PAGES_LAYOUT), PagedKv(empty, PAGES_LAYOUT)
    for layer in range(PAGES_LAYOUT.layers):
        rows = expected.rows(table, range(blocks))
        assert torch.equal(expected.read_tokens(layer, rows), found.read_tokens(layer, rows))


class _EarlierAttach(wire.Request, frozen=True, array_like=True, tag="Attach"):
    token: str
    pool: str
    layout: Layout


class _EarlierAcquired(wire.Reply, frozen=True, array_like=True, tag="Acquired"):
    blocks: tuple[wire.Leased, ...]
    extents: tuple[wire.ExtentGrant, ...]
    epoch: int


def test_agents_and_clients_of_before_read_what_is_sent_now_and_the_other_way_round() -> None:
    attach = wire.Attach(1, "t", "pool", LAYOUT, (EMULATED,))
    read = msgspec.msgpack.decode(wire.encode(attach)[4:], type=_EarlierAttach)
    assert (read.token, read.layout) == ("t", LAYOUT)
    assert wire.decode_request(wire.encode(read)[4:]) == wire.Attach(1, "t", "pool", LAYOUT)

    acquired = wire.Acquired(1, 2, (), (), 7, devices=(wire.DeviceGrant(1, 2, EMULATED),))
    answer = msgspec.msgpack.decode(wire.encode(acquired)[4:], type=_EarlierAcquired)
    assert answer.epoch == 7
    assert wire.decode_reply(wire.encode(answer)[4:]) == wire.Acquired(1, 2, (), (), 7)

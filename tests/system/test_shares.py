"""Prefix shares from the manifest to the bytes: a real API server, operator and agent processes, three tenants."""

import json
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane import ApiError, ControlPlane
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, chain_keys, prefix_digest
from kvstrata_api.errors import ForbiddenError, RetryableError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.cli import parser
from kvstrata_client.client import Client
from kvstrata_client.verbs.results import Bytes2D
from support.kube.agent import GROUP, LAYOUT, MIB, SYSTEM, Agent, custom, until
from support.operator.process import Replica

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

Json = dict[str, Any]
Tokens = np.ndarray[Any, Any]
SHARED_BLOCKS = 6
SYSTEM_PROMPT = np.arange(SHARED_BLOCKS * 16 + 5, dtype=np.uint32)


def prompt(seed: int) -> Tokens:
    return np.concatenate([SYSTEM_PROMPT, np.arange(seed * 1000, seed * 1000 + 60, dtype=np.uint32)])


def rows(tokens: Tokens) -> Bytes2D:
    """Bytes for every whole block, which depend on all tokens up to its end."""
    seeds = [int(tokens[: end + 16].astype(np.uint64).sum()) for end in range(0, len(tokens) - 15, 16)]
    made = [np.random.default_rng(seed).integers(0, 256, LAYOUT.block_bytes, np.uint8) for seed in seeds]
    return np.array(made, np.uint8)


class Fleet:
    """One operator, one node with its agent, and what an administrator and tenant `team-a` declare."""

    def __init__(self, plane: ControlPlane, agent: Agent, folder: Path) -> None:
        self.plane = plane
        self.agent = agent
        self._folder = folder
        self.is_published = False
        path = folder / "operator.kubeconfig"
        self._kubeconfig = plane.service_account_kubeconfig(SYSTEM, names.FIELD_MANAGER_OPERATOR, path)
        self.operator: Replica | None = None
        self.start_operator()

    def start_operator(self) -> None:
        self.operator = Replica(self._kubeconfig, self._folder)

    def stop_operator(self) -> None:
        if self.operator is not None:
            self.operator.end(signal.SIGKILL)
            self.operator = None

    def declare(self) -> None:
        """A node, a pool on it, and three tenants; b accepts what a shares."""
        labels = {"shares": "yes"}
        self.plane.api.post("/api/v1/nodes", {"metadata": {"name": self.agent.node, "labels": labels}})
        compatibility = {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16}
        memory = {"pageSize": "4Ki", "persistence": "None"}
        tier = {"name": "dram", "type": "HostDRAM", "capacityPerNode": str(32 * MIB), "hostDRAM": memory}
        spec = {"nodeSelector": labels, "compatibility": compatibility, "tiers": [tier]}
        self.plane.api.post(f"{GROUP}/kvpools", custom("KVPool", self.agent.pool, spec))
        for team in ("team-a", "team-b", "team-c"):
            self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": team}})
            self.plane.api.post(f"/api/v1/namespaces/{team}/serviceaccounts", {"metadata": {"name": "engine"}})
            accepts = {"acceptSharesFrom": ["team-a"]} if team == "team-b" else {}
            identity = {"serviceAccounts": [{"namespace": team, "name": "engine"}]}
            self.plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", team, identity | accepts))
            until(partial(self.secret, "tenant", team))

    def share(self, name: str, *readers: str) -> None:
        prefix = {"digest": prefix_digest(SYSTEM_PROMPT).hex(), "tokenCount": len(SYSTEM_PROMPT)}
        to = [{"tenant": reader} for reader in readers]
        body = custom("KVPrefixShare", name, {"poolRef": self.agent.pool, "prefixes": [prefix], "to": to})
        self.plane.api.post(f"{GROUP}/namespaces/team-a/kvprefixshares", body)

    def status(self, name: str) -> Json:
        found: Json = self.plane.api.get(f"{GROUP}/namespaces/team-a/kvprefixshares/{name}").get("status") or {}
        return found

    def says(self, name: str, type_: str) -> tuple[str, str]:
        found = [c for c in self.status(name).get("conditions", []) if c["type"] == type_]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    def secret(self, kind: str, name: str) -> Json | None:
        try:
            path = f"/api/v1/namespaces/{SYSTEM}/secrets/{names.scope_secret_name(kind, name)}"
            found: Json = self.plane.api.get(path)
        except ApiError as e:
            assert e.status == 404  # noqa: PT017
            return None
        return found

    def expire_in(self, name: str, seconds: float) -> None:
        end = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = json.dumps({"spec": {"expiresAt": end}})
        self.plane.kubectl("patch", "kvps", name, "-n", "team-a", "--type=merge", "-p", body)

    def leases(self) -> float:
        lines = [line for line in self.agent.metrics().splitlines() if line.startswith("kvstrata_leases{")]
        return float(lines[0].rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def fleet(plane: ControlPlane, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("shares")
    with Agent(plane, kubeconfig, folder) as agent:
        made = Fleet(plane, agent, folder)
        try:
            made.declare()
            agent.start()
            until(agent.says("Ready", "True"))
            yield made
        finally:
            made.stop_operator()


def shares_of(client: Client) -> list[str]:
    grants = client.refresh_grants()
    assert grants is not None
    return [s.name for s in grants.shares]


def publish(fleet: Fleet) -> None:
    """Have the share `prompt`, and its blocks: unless a test before has, which may have run in another process."""
    if fleet.is_published:
        return
    fleet.share("prompt", "team-b")
    until(lambda: fleet.says("prompt", "Active") == ("True", "Granted"))
    with fleet.agent.client("team-a") as a:
        until(lambda: shares_of(a) == ["team-a.prompt"])
        first = prompt(1)
        assert PrefixCache(a).store(first, rows(first)).published == len(first) // 16
    fleet.is_published = True


def unpublish(fleet: Fleet) -> None:
    """Have no share `prompt`: the test that ends it may have run in another process."""
    if fleet.is_published:
        fleet.plane.api.delete(f"{GROUP}/namespaces/team-a/kvprefixshares/prompt")
        until(lambda: fleet.secret("share", "team-a.prompt") is None)
        fleet.is_published = False


def test_a_publishes_b_reads_and_continues_privately_and_c_sees_nothing(fleet: Fleet) -> None:
    publish(fleet)
    assert fleet.status("prompt")["consumers"] == 1
    with fleet.agent.client("team-a") as a, fleet.agent.client("team-b") as b, fleet.agent.client("team-c") as c:
        until(lambda: shares_of(a) == shares_of(b) == ["team-a.prompt"])
        assert shares_of(c) == []
        second = prompt(2)
        found = PrefixCache(b).load(second)
        assert (found.blocks, found.shared_blocks) == (SHARED_BLOCKS, SHARED_BLOCKS)
        assert (found.data == rows(second)[:SHARED_BLOCKS]).all()
        rest = rows(second)[SHARED_BLOCKS:]
        assert PrefixCache(b).store(second, rest, first_block=SHARED_BLOCKS).published == len(rest)
        assert (PrefixCache(b).load(second).data == rows(second)).all()

        assert PrefixCache(c).load(second).blocks == 0
        assert PrefixCache(a).load(second).blocks == SHARED_BLOCKS, "b's own blocks stay b's"
        share = b.grants.shares[0] if b.grants else None
        assert share is not None
        assert not share.can_write
        keys = chain_keys(share.secret, LAYOUT.layout_id(), prompt(3), 16)
        with pytest.raises(ForbiddenError):
            b.reserve(keys)
        assert c.lookup(keys).blocks == 0, "even with the share's secret"
        assert len(b.lookup(keys).places) == SHARED_BLOCKS
    until(lambda: fleet.status("prompt")["hits"] == 2 * SHARED_BLOCKS)


def test_the_command_answers_from_the_cluster_what_agents_do(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(fleet)
    monkeypatch.setenv("PATH", str(fleet.plane.kubectl_path.parent), prepend=":")
    digest = prefix_digest(SYSTEM_PROMPT).hex()
    given = parser("who-can-read").parse_args(
        ["who-can-read", digest, "-o", "json", "--kubeconfig", str(fleet.plane.kubeconfig)]
    )

    assert given.run(given) == 0
    told = json.loads(capsys.readouterr().out)["readers"]
    assert {r["tenant"]: (r["may_read"], r["can_write"]) for r in told} == {
        "team-a": (True, True),
        "team-b": (True, False),
    }
    with fleet.agent.client("team-b") as b:
        until(lambda: shares_of(b) == ["team-a.prompt"])
        assert b.grants is not None
        assert b.grants.shares[0].id in {r["scope"] for r in told}


def test_an_expired_share_ends_without_an_operator_and_its_blocks_go(fleet: Fleet) -> None:
    publish(fleet)
    with fleet.agent.client("team-b") as b:
        until(lambda: shares_of(b) == ["team-a.prompt"])
        share = b.grants.shares[0] if b.grants else None
        assert share is not None
        keys = chain_keys(share.secret, LAYOUT.layout_id(), SYSTEM_PROMPT, 16)
        assert len(b.acquire(keys, lease_s=300.0)) == SHARED_BLOCKS
        until(lambda: fleet.leases() == SHARED_BLOCKS)
        fleet.stop_operator()
        fleet.expire_in("prompt", 2)

        until(lambda: fleet.leases() == 0)  # Nothing was asked meanwhile.
        assert shares_of(b) == []
        assert b.lookup(keys).blocks == 0
        assert PrefixCache(b).load(prompt(2)).shared_blocks == 0
        assert fleet.secret("share", "team-a.prompt") is not None
    erased = '"scope erased"', '"share"'
    until(lambda: all(word in (fleet.agent.home / "agent.log").read_text() for word in erased))

    fleet.start_operator()
    until(lambda: fleet.secret("share", "team-a.prompt") is None)
    until(lambda: fleet.says("prompt", "Expired") == ("True", "Expired"))


def test_a_deleted_share_is_over_for_readers_and_its_key_is_deleted(fleet: Fleet) -> None:
    unpublish(fleet)
    fleet.share("again", "team-b")
    with fleet.agent.client("team-a") as a, fleet.agent.client("team-b") as b:
        until(lambda: shares_of(a) == shares_of(b) == ["team-a.again"])
        PrefixCache(a).store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
        assert PrefixCache(b).load(prompt(5)).blocks == SHARED_BLOCKS
        fleet.plane.api.delete(f"{GROUP}/namespaces/team-a/kvprefixshares/again")

        until(lambda: shares_of(b) == [])
        assert PrefixCache(b).load(prompt(5)).blocks == 0
        until(lambda: fleet.secret("share", "team-a.again") is None)


def test_a_share_that_its_reader_never_accepted_feeds_it_with_nothing(fleet: Fleet) -> None:
    unpublish(fleet)
    fleet.share("uninvited", "team-c")
    until(lambda: fleet.says("uninvited", "ReadersAgreed") == ("False", "NotAccepted"))
    assert fleet.says("uninvited", "Active") == ("False", "NoReader")
    with fleet.agent.client("team-a") as a, fleet.agent.client("team-c") as c:
        until(lambda: shares_of(a) == ["team-a.uninvited"])
        PrefixCache(a).store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
        assert shares_of(c) == []
        assert PrefixCache(c).load(prompt(6)).blocks == 0


def test_the_secret_of_a_member_that_left_opens_nothing_that_comes_later(fleet: Fleet) -> None:
    club = {"tenants": ["team-b", "team-c"], "sharing": "All"}
    fleet.plane.api.post(f"{GROUP}/kvtrustdomains", custom("KVTrustDomain", "club", club))
    for team in ("team-b", "team-c"):
        fleet.plane.kubectl("patch", "kvt", team, "--type=merge", "-p", '{"spec":{"trustDomain":"club"}}')
    with fleet.agent.client("team-b") as leaver, fleet.agent.client("team-c") as stays:
        until(lambda: domain_version(leaver) == domain_version(stays) == "v1")
        tokens = prompt(8)
        assert PrefixCache(stays).store(tokens, rows(tokens)).published == len(tokens) // 16
        assert PrefixCache(leaver).load(tokens).blocks == len(tokens) // 16
        assert leaver.grants is not None
        old = leaver.grants.domains[0].secret

        club["tenants"] = ["team-c"]
        body = json.dumps({"spec": club})
        fleet.plane.kubectl("patch", "kvtd", "club", "--type=merge", "-p", body)
        until(lambda: domain_version(leaver) == "")
        until(lambda: domain_version(stays) == "v2")
        assert PrefixCache(leaver).load(tokens).blocks == 0
        assert PrefixCache(stays).store(tokens, rows(tokens)).published == len(tokens) // 16
        assert PrefixCache(stays).load(tokens).shared_blocks == len(tokens) // 16

        assert stays.grants is not None
        new = stays.grants.domains[0].secret
        assert new.secret != old.secret
        renamed = [BlockKey(new.scope, k.digest) for k in chain_keys(old, LAYOUT.layout_id(), tokens, 16)]
        for keys in (chain_keys(old, LAYOUT.layout_id(), tokens, 16), renamed):
            assert leaver.lookup(keys).blocks == stays.lookup(keys).blocks == 0
    status = fleet.plane.api.get(f"{GROUP}/kvtrustdomains/club")["status"]
    assert (status["members"], status["keyVersion"]) == (["team-c"], 2)
    until(lambda: not entries(fleet.secret("domain", "club"), "v1"))
    assert entries(fleet.secret("domain", "club"), "v2")


def domain_version(client: Client) -> str:
    """Key version of the domain's scope that a client is granted; empty without one."""
    try:
        grants = client.refresh_grants()
    except RetryableError:  # The next key is being made.
        return "wait"
    assert grants is not None
    return grants.domains[0].id.rpartition("/")[2] if grants.domains else ""


def entries(secret: Json | None, version: str) -> list[str]:
    """Entries of one key version."""
    assert secret is not None
    return [entry for entry in secret["data"] if entry.split(".")[0] == version]

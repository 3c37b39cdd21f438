"""Certificates from a real API server: who gets which, renewal, and authorities that replace each other."""

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controlplane import ControlPlane
from controlplane.assets import find_tool
from controlplane.ports import free_ports
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.peers.connection import PeerTls
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_kube.certified import OwnCertificate
from kvstrata_kube.tls import Credential, answering, client_context, peer_uri
from kvstrata_metadata.store.access import Grant, RedisAccess, Role, acl_file
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.records import AgentRecord, Location
from kvstrata_metadata.store.store import Store
from kvstrata_operator.certificates import authority as certificates
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent import remote_owner
from support.operator.issuer import holder, issuing, make_pod, pod_kubeconfig

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SYSTEM = names.SYSTEM_NAMESPACE
WAIT_S = 90.0


async def until(check: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (result := check()):
        assert time.monotonic() < deadline_s, f"not true within {WAIT_S} s"
        await asyncio.sleep(0.05)
    return result


@pytest.fixture
def fresh(plane: ControlPlane) -> ControlPlane:
    """A fleet without an authority."""
    plane.kubectl("delete", "secret", names.CA_SECRET, "-n", names.CA_NAMESPACE, "--ignore-not-found")
    plane.kubectl("delete", "configmap", names.TRUST_CONFIG_MAP, "-n", SYSTEM, "--ignore-not-found")
    plane.kubectl("delete", "csr", "--all")
    return plane


def trusted(own: OwnCertificate) -> str:
    return own.credential.trust_pem if own.credential else ""


async def meets(server: OwnCertificate, client: OwnCertificate) -> str | None:
    """Shake hands; the name that the client sees, None when that fails."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await reader.readexactly(1))
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=answering(server.listening))
    try:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client.connecting(), server_hostname="")
        try:
            writer.write(b"x")
            if await reader.read(1) != b"x":
                return None
            return peer_uri(writer)
        finally:
            writer.close()
    except (OSError, ssl.SSLError):
        return None
    finally:
        listening.close()


async def test_an_agent_and_the_metadata_service_get_their_own_names_and_meet(
    fresh: ControlPlane, tmp_path: Path
) -> None:
    agent, metadata = names.agent_uri(SYSTEM, "p.node-a"), names.service_uri(SYSTEM, "metadata")
    async with (
        holder(fresh, tmp_path, agent) as one,
        holder(fresh, tmp_path, metadata, "kvstrata-metadata") as other,
    ):
        await asyncio.sleep(0.5)
        assert one.credential is None, "nobody signs yet"
        with issuing(fresh, tmp_path):
            await until(lambda: one.credential and other.credential)

            assert await meets(one, other) == agent
            assert await meets(other, one) == metadata


def requests(plane: ControlPlane) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(plane.kubectl("get", "csr", "-o", "json"))["items"]
    return found


def denials(plane: ControlPlane) -> list[str]:
    conditions = [c for r in requests(plane) for c in r.get("status", {}).get("conditions", [])]
    return [c["reason"] for c in conditions if c["type"] == "Denied"]


@pytest.mark.parametrize(
    ("account", "uri", "why"),
    [
        ("kvstrata-agent", names.service_uri(SYSTEM, "metadata"), "IdentityForbidden"),
        ("kvstrata-agent", names.agent_uri("elsewhere", "p.node-a"), "IdentityForbidden"),
        ("kvstrata-agent", names.agent_uri(SYSTEM, "node-without-pool"), "IdentityForbidden"),
        ("kvstrata-metadata", names.agent_uri(SYSTEM, "p.node-a"), "IdentityForbidden"),
        ("kvstrata-metadata", names.service_uri(SYSTEM, "redis"), "IdentityForbidden"),
    ],
)
async def test_nobody_gets_the_name_of_another(
    fresh: ControlPlane, tmp_path: Path, account: str, uri: str, why: str
) -> None:
    with issuing(fresh, tmp_path):
        async with holder(fresh, tmp_path, uri, account) as own:
            await until(lambda: denials(fresh))

            assert denials(fresh)[0] == why
            assert own.credential is None


async def test_a_pod_may_be_the_agent_of_its_own_node_alone(fresh: ControlPlane, tmp_path: Path) -> None:
    pod = make_pod(fresh, SYSTEM, "agent-b", "kvstrata-agent", "node-b")
    path = pod_kubeconfig(fresh, pod, tmp_path / "b.kubeconfig")
    rules = Issuance(SYSTEM, needs_bound_tokens=True)
    with issuing(fresh, tmp_path, rules):
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-b"), kubeconfig=path) as own:
            await until(lambda: own.credential)
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-a"), kubeconfig=path) as thief:
            await until(lambda: "OtherNode" in denials(fresh))
            assert thief.credential is None
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-c")) as loose:
            await until(lambda: "TokenUnbound" in denials(fresh))
            assert loose.credential is None


async def test_an_agent_without_a_node_waits_for_it(fresh: ControlPlane, tmp_path: Path) -> None:
    nodes: set[str] = set()
    with issuing(fresh, tmp_path, agents=lambda: nodes):
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.late")) as own:
            await until(lambda: requests(fresh))
            await asyncio.sleep(1.0)
            assert own.credential is None

            nodes.add("p.late")

            await until(lambda: own.credential)
            assert denials(fresh) == []


async def test_an_authority_of_somebody_else_is_used_and_never_replaced(fresh: ControlPlane, tmp_path: Path) -> None:
    """The layout in which cert-manager keeps a Certificate with isCA."""
    rules = Issuance(SYSTEM, makes_authority=False, settle=timedelta(seconds=2))
    first, second = (certificates.make_authority(datetime.now(UTC), timedelta(days=1)) for _ in range(2))
    with issuing(fresh, tmp_path, rules):
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-a")) as own:
            await asyncio.sleep(1.0)
            assert own.credential is None
            write_authority(fresh, first)
            await until(lambda: own.credential)
            write_authority(fresh, second)

            await until(lambda: second.certificate.pem in trusted(own))

            assert first.certificate.pem in trusted(own), "what it signed is still good"
            deadline_s = time.monotonic() + WAIT_S
            while True:  # Until it has settled the first one signs.
                async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-b")) as other:
                    await until(lambda: other.credential)
                    assert other.credential
                    assert await meets(own, other)
                    assert await meets(other, own)
                    if certificates.is_issued_by(other.credential.certificate_pem, second.certificate):
                        break
                assert time.monotonic() < deadline_s


async def test_an_agent_gets_a_certificate_while_a_new_authority_settles(fresh: ControlPlane, tmp_path: Path) -> None:
    rules = Issuance(SYSTEM, makes_authority=False, settle=timedelta(hours=1))
    first, second = (certificates.make_authority(datetime.now(UTC), timedelta(days=1)) for _ in range(2))
    write_authority(fresh, first)
    with issuing(fresh, tmp_path, rules):
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-a")) as own:
            await until(lambda: own.credential)
            write_authority(fresh, second)
            await until(lambda: second.certificate.pem in trusted(own))

            async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-b")) as late:
                await until(lambda: late.credential)
                assert late.credential
                assert certificates.is_issued_by(late.credential.certificate_pem, first.certificate)
                assert await meets(own, late)
                assert await meets(late, own)


def write_authority(plane: ControlPlane, made: certificates.Authority) -> None:
    texts = {"tls.crt": made.certificate.pem, "tls.key": made.key_pem, "ca.crt": made.certificate.pem}
    body = {"metadata": {"name": names.CA_SECRET}, "type": "kubernetes.io/tls", "stringData": texts}
    body |= {"apiVersion": "v1", "kind": "Secret"}
    options = ("--server-side", "--force-conflicts", "-n", names.CA_NAMESPACE)
    plane.kubectl("apply", *options, "-f", "-", stdin=json.dumps(body))


async def test_certificates_and_authorities_rotate_under_reads_and_none_is_dropped(
    fresh: ControlPlane, tmp_path: Path
) -> None:
    """Leaves live for seconds and authorities follow each other, while one agent reads from another all the time."""
    rules = Issuance(
        SYSTEM, leaf_life=timedelta(seconds=12), authority_life=timedelta(seconds=52), settle=timedelta(seconds=1)
    )
    seen: set[str] = set()
    authorities: set[str] = set()
    with issuing(fresh, tmp_path, rules):
        async with (
            holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.owner")) as owner,
            holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.reader")) as reader,
            serving(owner) as address,
        ):
            await until(lambda: owner.credential and reader.credential)
            ends_s, reads = time.monotonic() + 200.0, 0
            while reads <= 200 or len(seen) < 6 or len(authorities) < 3:
                assert time.monotonic() < ends_s, "certificates and authorities were hardly renewed"
                # Each read on a connection of its own, so that each shakes hands with what is held then.
                assert await read_once(reader, address), f"read {reads} was dropped"
                reads += 1
                assert owner.credential
                seen.add(owner.credential.certificate_pem)
                authorities |= {a.fingerprint for a in certificates.read_bundle(trusted(owner))}
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(own: OwnCertificate) -> AsyncIterator[str]:
    """An owner of blocks under a certificate that changes."""
    lender = remote_owner.MemoryLender(4, 4096)
    listener = PeerListener("127.0.0.1")
    record = AgentRecord("p.owner", remote_owner.EPOCH, listener.address)
    await listener.serve(record, lender, remote_owner.verify, None, tls=PeerTls(SYSTEM, own))
    try:
        yield listener.address
    finally:
        await listener.close()


async def read_once(own: OwnCertificate, address: str) -> bool:
    async def token() -> str:
        return str(remote_owner.TOKEN)

    record = AgentRecord("p.owner", remote_owner.EPOCH, address)
    metrics = Instruments(AGENT, CollectorRegistry())
    peers = RemotePeers("p.reader", lambda _a, _e: record, token, None, metrics, tls=PeerTls(SYSTEM, own))
    at = Location("p.owner", remote_owner.EPOCH, "HostDRAM", 1, 4096)
    key = BlockKey(remote_owner.SCOPE, remote_owner.digest_of(1))
    try:
        return await peers.fetch([Wanted(key, remote_owner.LAYOUT, at, memoryview(bytearray(4096)))], 10.0) != [None]
    finally:
        await peers.close()


async def test_the_chart_s_redis_gets_its_certificate_and_reads_the_next_one(
    fresh: ControlPlane, tmp_path: Path
) -> None:
    """The chart's own start script, with its folders put elsewhere, and Secrets as a kubelet would project them."""
    fresh.kubectl("delete", "secret", names.REDIS_SECRET_TLS, "-n", SYSTEM, "--ignore-not-found")
    life = timedelta(seconds=45)  # A third of it is left to the server when the next one is there.
    rules = Issuance(SYSTEM, redis_hosts=("localhost",), leaf_life=life, settle=timedelta(seconds=1))
    (port,) = free_ports(1)
    with issuing(fresh, tmp_path, rules):
        async with holder(fresh, tmp_path, names.agent_uri(SYSTEM, "p.node-a")) as own:
            first = await project(fresh, tmp_path, "")
            await until(lambda: own.credential)
            server = start_chart_redis(tmp_path, port)
            access = RedisAccess(f"rediss://localhost:{port}", "agent", "agent" * 4, is_fleet=True)
            store = open_store(replace(access, contexts=own.connecting_to_host))
            try:
                await until_answers(store)
                seen = await shown(port, own)
                await project(fresh, tmp_path, first)
                deadline_s = time.monotonic() + WAIT_S
                while await shown(port, own) == seen:
                    await store.ask([("PING",)])
                    assert time.monotonic() < deadline_s, "the old certificate is shown still"
                    await asyncio.sleep(0.1)
                assert not await is_let_in_without(port, trusted(own))
            finally:
                await store.close()
                os.killpg(server.pid, signal.SIGKILL)  # The loop that reads certificates anew as well.
                server.wait()


def rendered(*settings: str) -> list[dict[str, Any]]:
    """Objects of the chart."""
    chart = Path(__file__).resolve().parents[2] / "charts" / "kvstrata"
    command = [str(find_tool("helm")), "template", "kvstrata", str(chart), "--namespace", SYSTEM]
    done = subprocess.run([*command, *settings], text=True, capture_output=True, check=True)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_the_chart_leaves_the_authority_to_cert_manager_where_asked() -> None:
    """What cert-manager is told to make is what the operator can read, and the operator may not write it."""
    objects = rendered("--set", "certificates.certManager=true")
    (certificate,) = (o for o in objects if o["kind"] == "Certificate")
    (rights,) = (o for o in objects if o["kind"] == "Role" and o["metadata"]["namespace"] == names.CA_NAMESPACE)
    (operator,) = (o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "kvstrata-operator")

    wanted = certificate["spec"]
    assert (certificate["metadata"]["namespace"], wanted["secretName"]) == (names.CA_NAMESPACE, names.CA_SECRET)
    assert wanted["isCA"] is True
    assert wanted["privateKey"] == {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"}
    assert {verb for rule in rights["rules"] for verb in rule["verbs"]} == {"get"}
    assert "--authority=external" in operator["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [o for o in rendered() if o["apiVersion"].startswith("cert-manager.io")]


def start_chart_redis(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Run the chart's start script on its own configuration."""
    chart = Path(__file__).resolve().parents[2] / "charts" / "kvstrata"
    places = {
        "/etc/kvstrata-redis-tls": "tls",
        "/etc/kvstrata-redis": "etc",
        "/run/kvstrata-redis": "run",
        "/data": "data",
    }
    template = (chart / "templates" / "redis.yaml").read_text()
    settings = template.split("redis.conf: |\n")[1].split("---")[0].replace("tls-port 6379", f"tls-port {port}")
    settings = "\n".join(line.strip() for line in settings.splitlines() if "{{" not in line)
    script = (chart / "files" / "redis-start.sh").read_text()
    for there, here in places.items():
        (folder / here).mkdir(exist_ok=True)
        settings, script = settings.replace(there, str(folder / here)), script.replace(there, str(folder / here))
    (folder / "etc" / "redis.conf").write_text(settings + "\nbind 127.0.0.1\n")
    (folder / "etc" / "users.acl").write_text(acl_file((Grant(Role.AGENT, "agent" * 4),)))
    own = {"KVSTRATA_RELOAD_S": "0.5", "KVSTRATA_PORT": str(port), names.REDIS_MEMORY_VARIABLE: str(64 << 20)}
    environment = {**os.environ, **own}
    return subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


async def project(plane: ControlPlane, folder: Path, before: str) -> str:
    """Put the Secret's files into place once they are not `before`; the certificate."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        text = plane.kubectl("get", "secret", names.REDIS_SECRET_TLS, "-n", SYSTEM, "--ignore-not-found", "-o", "json")
        files = {k: base64.b64decode(v).decode() for k, v in (json.loads(text or "{}").get("data") or {}).items()}
        if files.get("tls.crt", before) != before:
            break
        assert time.monotonic() < deadline_s, "no certificate for Redis"
        await asyncio.sleep(0.2)
    (folder / "tls").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "tls" / name).write_text(content)
    return files["tls.crt"]


async def until_answers(store: Store) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            assert await store.ask([("PING",)])
        except DirectoryAwayError:
            assert time.monotonic() < deadline_s, "Redis never answered"
            await asyncio.sleep(0.1)
        else:
            return


async def shown(port: int, own: OwnCertificate) -> bytes:
    """The certificate that the server shows to a new connection."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=own.connecting_to_host())
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return certificate


async def is_let_in_without(port: int, trust_pem: str) -> bool:
    """Whether somebody without a certificate gets an answer."""
    context = client_context(Credential("", "", trust_pem), checks_host=True)
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        try:
            writer.write(b"PING\r\n")
            return bool(await reader.read(64))
        finally:
            writer.transport.abort()
    return False

"""Members of a fleet without Kubernetes: what they derive alike, what they show each other, and what is refused."""

import asyncio
import base64
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.standalone import keys, main
from kvstrata_agent.app.standalone.fleet import FleetMembership, RedisSource, check_address, default_node, parse_url
from kvstrata_agent.app.standalone.keys import FleetKeys, load_fleet
from kvstrata_agent.app.standalone.manifests import manifest_of
from kvstrata_agent.kube.trust import SECRET_BYTES
from kvstrata_api import names
from kvstrata_api.errors import DirectoryAwayError, InvalidInputError, UnauthenticatedError
from kvstrata_api.wrapping import Keks
from kvstrata_kube import certified
from kvstrata_kube.certified import CertificateFiles, FileCertificate
from kvstrata_kube.tls import Credential
from support.agent.peer_certificates import Fleet
from support.agent.standalone import Json, declared, pool, tenant

pytestmark = pytest.mark.unit

ONE, OTHER = FleetKeys(b"1" * 32), FleetKeys(b"2" * 32)
CERTIFIED, FOREIGN = Fleet(), Fleet()
PASSWORD = "secret-of-redis"
URI = names.agent_uri(names.SYSTEM_NAMESPACE, "p.one")


def settled(before: keys.Book, fleet: FleetKeys | None, *objects: Json) -> keys.Book:
    return keys.settle(before, manifest_of([pool(), *objects]), Keks({}), os.urandom, fleet)


def scopes(book: keys.Book) -> dict[str, tuple[str, int, str]]:
    return {name: (e.uid, e.key_version, e.data[f"v{e.key_version}"]) for name, e in book.items()}


OBJECTS = (
    tenant("a", "unix/a", trustDomain="d"),
    tenant("b", "unix/b", trustDomain="d"),
    declared("KVTrustDomain", "d", {"tenants": ["a", "b"], "sharing": "All"}),
)


def test_members_with_one_secret_have_the_same_keys_and_others_have_none_of_them() -> None:
    one, again, other, alone = (settled({}, fleet, *OBJECTS) for fleet in (ONE, ONE, OTHER, None))
    assert scopes(one) == scopes(again)
    for book in (other, alone):
        assert not set(scopes(one).values()) & set(scopes(book).values())
    assert len({secret for _, _, secret in scopes(one).values()}) == len(OBJECTS)
    assert all(len(base64.b64decode(secret)) == SECRET_BYTES for _, _, secret in scopes(one).values())
    part = settled({}, ONE, OBJECTS[1], OBJECTS[2])
    assert scopes(part)["tenant/b"] == scopes(one)["tenant/b"], "whoever else is declared"


def test_a_member_keeps_its_entries_until_it_gets_another_secret() -> None:
    first = settled({}, ONE, *OBJECTS)
    assert settled(first, ONE, *OBJECTS) == first
    joined = settled(settled({}, None, *OBJECTS), ONE, *OBJECTS)
    assert scopes(joined) == scopes(first)
    moved = settled(first, OTHER, *OBJECTS)
    assert scopes(moved) == scopes(settled({}, OTHER, *OBJECTS))
    left = settled(first, ONE, OBJECTS[0], tenant("b", "unix/b"), OBJECTS[2])
    assert scopes(left)["domain/d"][1:] != scopes(first)["domain/d"][1:], "a domain's key moves on when a member left"


@given(st.text(max_size=8), st.text(max_size=8))
def test_no_two_names_have_a_key_in_common(one: str, other: str) -> None:
    derived = [
        ONE.derive(*parts, size_bytes=32) for parts in {("a", one, other), ("a", one + other), ("b", one, other)}
    ]
    assert len(set(derived)) == len(derived)


@pytest.mark.parametrize(
    ("text", "url", "user", "password"),
    [
        ("redis://h", "redis://h:6379", "", ""),
        ("rediss://u:p%40ss@h:1/", "rediss://h:1", "u", "p@ss"),
        (" redis://:pw@[::1]:2\n", "redis://[::1]:2", "", "pw"),
    ],
)
def test_a_url_is_read(text: str, url: str, user: str, password: str) -> None:
    access = parse_url(text)
    assert (access.url, access.username, access.password) == (url, user, password)


@pytest.mark.parametrize(
    "text",
    ["", "pw", "http://:pw@h", "redis://:pw@h:x", "redis://:pw@h:99999", "redis://:pw@", "redis://:pw@h/1",
     "redis://h?pw=1", "redis://:pw@[h", "redis+cluster://:pw@h"],
)  # fmt: skip
def test_what_is_no_url_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^--connect") as refused:
        parse_url(text)
    assert "pw" not in str(refused.value)


def test_a_url_in_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:a@h")
    source = RedisSource(str(file))
    assert source.read().password == "a"
    file.write_text("redis://:b@h")
    assert source.read().password == "b"
    file.write_text("x" * 5000)
    with pytest.raises(InvalidInputError, match="5000 characters, limit 4096"):
        source.read()
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match="no text"):
        source.read()
    file.write_text("x")
    with pytest.raises(InvalidInputError, match="goes with rediss://"):
        RedisSource("redis://h", file).read()


def test_an_authority_of_redis_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ca"
    file.write_text(CERTIFIED.authority.certificate.pem)
    assert RedisSource("rediss://h", file).read().ca_pem == CERTIFIED.authority.certificate.pem
    for text, why in (("\n", "empty, PEM certificates wanted"), ("no certificate", "")):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=f"--redis-ca {file}: {why}"):
            RedisSource("rediss://h", file).read()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_of_everybody_is_nobodys(host: str) -> None:
    with pytest.raises(InvalidInputError, match="--peer-address"):
        check_address(host)
    check_address("10.0.0.1")
    check_address("node-1.example")


def test_a_host_name_is_a_node_name_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, node in {"Box_1.example": "box-1", "-": "", "ok": "ok", "x" * 70: ""}.items():
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert default_node() == node


def files_of(folder: Path, held: Credential, ca: str = "") -> CertificateFiles:
    files = CertificateFiles(folder / "cert", folder / "key", folder / "ca")
    texts = {files.certificate: held.certificate_pem, files.key: held.key_pem, files.trust: ca or held.trust_pem}
    for path, text in texts.items():
        path.touch(0o600)
        path.write_text(text)
    return files


async def test_a_member_is_known_by_its_keys_and_by_its_own_name_alone(tmp_path: Path) -> None:
    files = files_of(tmp_path, CERTIFIED.agent("p.one"))
    one = FleetMembership("p", "one", RedisSource("redis://h"), files, ONE)
    token = await one.token()
    assert (await one.verify(token, "p.one")).service_account == names.AGENT_SERVICE_ACCOUNT
    for wrong, agent in ((token, "p.two"), (OTHER.token("p.one"), "p.one"), ("", "p.one"), ("\udcff", "p.one")):
        with pytest.raises(UnauthenticatedError, match="--keys-file"):
            await one.verify(wrong, agent)
    assert await one.find("q.one") is None
    assert (await one.access()).url == "redis://h:6379"
    url = tmp_path / "url"
    url.write_text("redis://h")
    gone = FleetMembership("p", "one", RedisSource(str(url)), files, ONE)
    url.unlink()
    with pytest.raises(DirectoryAwayError, match="--connect"):
        await gone.access()


def test_the_secret_of_a_fleet_is_32_bytes_that_nobody_else_may_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(InvalidInputError, match="make it once with"):
        load_fleet(file)
    file.touch(0o600)
    file.write_text(base64.b64encode(b"k" * 32).decode() + "\n")
    assert load_fleet(file).secret == b"k" * 32
    assert "kkk" not in repr(load_fleet(file))
    for text, why in (("!", "not base64"), (base64.b64encode(b"k" * 31).decode(), "31 bytes, 32 wanted")):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=why):
            load_fleet(file)


def test_a_certificate_in_files_has_to_be_whole_current_and_of_this_agent(tmp_path: Path) -> None:
    held = CERTIFIED.agent("p.one")
    good = FileCertificate(files_of(tmp_path, held), URI)
    assert good.expires_at_s > datetime.now(UTC).timestamp()
    good.connecting()
    good.listening()
    ended = CERTIFIED.certify(URI, began=datetime.now(UTC) - timedelta(hours=3), life=timedelta(hours=1))
    wrong = {
        "names spiffe.*two; a subjectAltName of URI:": (CERTIFIED.agent("p.two"), ""),
        "ended at": (ended, ""),
        "certificate cannot be used": (replace(held, key_pem=FOREIGN.agent("p.one").key_pem), ""),
        "no certificate:": (replace(held, certificate_pem="x"), ""),
        "holds no certificate of an authority": (held, "nothing"),
    }
    for why, (credential, ca) in wrong.items():
        with pytest.raises(InvalidInputError, match=why):
            FileCertificate(files_of(tmp_path, credential, ca), URI)
    files = files_of(tmp_path, held)
    files.key.chmod(0o604)
    with pytest.raises(InvalidInputError, match="mode 0604"):
        FileCertificate(files, URI)
    files.key.unlink()
    with pytest.raises(InvalidInputError, match="key"):
        FileCertificate(files, URI)


async def test_a_new_certificate_is_used_and_a_bad_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "FILES_POLL_S", 0.01)
    held = FileCertificate(files_of(tmp_path, CERTIFIED.agent("p.one")), URI)
    first = held.connecting()
    running = asyncio.create_task(held.run())
    try:
        files_of(tmp_path, CERTIFIED.agent("p.two"))
        await asyncio.sleep(0.1)
        assert held.connecting() is first
        files_of(tmp_path, CERTIFIED.agent("p.one"))
        async with asyncio.timeout(20):
            while held.connecting() is first:  # noqa: ASYNC110  The files are read by the clock.
                await asyncio.sleep(0.01)
    finally:
        running.cancel()


def options(folder: Path, **replaced: str | None) -> list[str]:
    """A whole command line of member `one` of pool `local`, with options replaced or left out."""
    files = files_of(folder, CERTIFIED.agent("local.one"))
    secret = folder / "keys"
    secret.touch(0o600)
    secret.write_text(base64.b64encode(b"k" * 32).decode())
    given = {
        "connect": f"redis://:{PASSWORD}@h",
        "node": "one",
        "peer-address": "127.0.0.1:0",
        "keys-file": str(secret),
        "tls-cert": str(files.certificate),
        "tls-key": str(files.key),
        "tls-ca": str(files.trust),
        "state-dir": str(folder / "state"),
    }
    whole = given | {name.replace("_", "-"): value for name, value in replaced.items()}
    return [part for name, value in whole.items() if value is not None for part in (f"--{name}", value)]


def wanted(arguments: list[str]) -> main._Wanted:
    return main._wanted(main._parser().parse_args(arguments))


def test_a_whole_command_line_makes_a_member_and_none_of_it_an_agent_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = options(tmp_path)
    member = wanted(arguments).membership
    assert member is not None
    assert (member.agent, member.node, member.url) == ("local.one", "one", "redis://h:6379")
    given = main._parser().parse_args(arguments)
    config = main._config(wanted(arguments), given)
    assert (config.node, config.peer_host, config.peer_encryption) == ("one", "127.0.0.1", "control")
    assert wanted([]).membership is None
    monkeypatch.setenv("KVSTRATA_CONNECT", "redis://other:1")
    member = wanted(options(tmp_path, connect=None)).membership
    assert member is not None
    assert member.url == "redis://other:1"


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({"keys_file": None, "tls_key": None}, "--connect needs --keys-file, --tls-key; make it once with"),
        ({"connect": None}, "--peer-address, .*--node: --connect, or .KVSTRATA_CONNECT, is wanted with that"),
        ({"connect": f"http://:{PASSWORD}@h"}, "scheme 'http'"),
        ({"connect": "/none"}, "--connect /none: No such file"),
        ({"node": "One"}, "--node 'One': 1 to 63 of"),
        ({"node": "two"}, "names .*agent/local.one; a subjectAltName of URI:.*agent/local.two"),
        ({"peer_address": "0.0.0.0:1"}, "--peer-address 0.0.0.0: others reach"),
        ({"redis_ca": "/none"}, "--redis-ca /none: No such file"),
        ({"keys_file": "/none"}, "--keys-file /none: No such file"),
        ({"tls_ca": "/none"}, "certificate files: .*/none"),
    ],
)
def test_what_is_missing_or_wrong_is_said_by_name_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: dict[str, str | None], why: str
) -> None:
    monkeypatch.delenv("KVSTRATA_CONNECT", raising=False)
    with pytest.raises(InvalidInputError, match=why) as refused:
        wanted(options(tmp_path, **replaced))
    assert PASSWORD not in str(refused.value)
    assert not (tmp_path / "state").exists()


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    arguments = options(tmp_path)
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"--keys-file .*: mode 0644; nobody else may read it: 0600"):
        wanted(arguments)

"""Addresses, credentials, roles and the command line, parsed at the edge."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import __version__
from kvstrata_api.errors import InvalidInputError
from kvstrata_metadata.service.main import EXTERNAL_VARIABLES, _parser, options_of
from kvstrata_metadata.store.access import COMMANDS, Grant, RedisAccess, Role, acl_file, format_access, parse_access
from kvstrata_metadata.store.scripts import Script, loaded, sources
from kvstrata_metadata.store.servers import Address
from support.metadata.released import DIGESTS

pytestmark = pytest.mark.unit

words = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)


@given(st.sampled_from(["redis", "rediss"]), words, st.integers(1, 65535), words, words)
def test_an_access_comes_out_of_a_secret_as_it_went_in(
    scheme: str, host: str, port: int, user: str, password: str
) -> None:
    access = RedisAccess(f"{scheme}://{host}:{port}", user, password, "pem")

    assert parse_access({k: v.encode() for k, v in format_access(access).items()}) == access
    assert "password=" not in repr(access), "neither name nor value"


def test_the_fleet_s_certificates_are_told_and_a_key_of_our_own_never_is() -> None:
    access = RedisAccess("rediss://h:1", "u", "p", certificate_pem="cert", key_pem="hush", is_fleet=True)

    told = format_access(access)

    assert "hush" not in "".join(told.values()) + repr(access)
    assert parse_access(told).is_fleet


@pytest.mark.parametrize(
    "values", [{"url": "redis://h:1", "certificates": "fleet"}, {"url": "rediss://h", "certificates": "x"}]
)
def test_a_secret_that_asks_for_tls_by_half_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="certificates"):
        parse_access(values)


@pytest.mark.parametrize(
    "url", ["", "http://h:1", "redis://", "redis://u:p@h:1", "h:1", "rediss://[u:p@h", "redis://u:p@\u2100"]
)
def test_a_wrong_url_is_refused_without_telling_the_password(url: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse_access({"url": url, "password": "hush"})

    assert "hush" not in str(refused.value)
    assert "u:p" not in str(refused.value)


@pytest.mark.parametrize("key", ["url", "password", "ca.crt"])
def test_a_value_that_is_no_text_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"key {key} is not UTF-8") as refused:
        parse_access({"url": b"redis://h:1", key: b"hush\xff"})

    assert "hush" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "command", ["eval", "keys", "scan", "flushall", "flushdb", "config", "script|load", "function"]
)
def test_agents_may_not(command: str) -> None:
    assert command not in COMMANDS[Role.AGENT]


def test_the_metadata_role_adds_only_care() -> None:
    assert set(COMMANDS[Role.METADATA]) - set(COMMANDS[Role.AGENT]) == {
        "hgetall", "hlen", "smembers", "zrange", "zremrangebyscore", "unlink", "info", "script|load", "script|exists",
    }  # fmt: skip


@given(words)
def test_an_acl_file_holds_no_password(password: str) -> None:
    text = acl_file((Grant(Role.AGENT, "secret-" + password),))

    assert "secret-" not in text
    assert text.startswith("user default off")


def test_every_transition_touches_one_slot() -> None:
    for script, source in sources().items():
        assert "KEYS[2]" not in source.text, script
        assert "KEYS[1]" in source.text, script
    assert len({source.sha for source in sources().values()}) == len(Script)


def test_what_agents_of_releases_call_is_loaded() -> None:
    ours, every = {source.sha for source in sources().values()}, {source.sha for source in loaded()}
    released = {digest for digests in DIGESTS.values() for digest in digests.values()}

    assert released <= every, "put the text that a release had into store/lua/earlier, before it is changed"
    assert every - ours <= released, "no release of tests/recorded/transitions.json has it"
    called = {s: sources()[s].sha for s in next(reversed(DIGESTS.values()))}
    assert __version__ in DIGESTS, f"add to tests/recorded/transitions.json: {json.dumps({__version__: called})}"


def test_external_needs_a_url_and_embedded_a_directory() -> None:
    with pytest.raises(InvalidInputError, match="url"):
        options_of(_parser().parse_args(["--redis", "external"]), {})
    with pytest.raises(InvalidInputError, match="state-dir"):
        options_of(_parser().parse_args(["--redis", "embedded"]), {})

    options = options_of(_parser().parse_args(["--redis=external"]), {EXTERNAL_VARIABLES["url"]: "redis://h:6379"})
    assert options.external == RedisAccess("redis://h:6379")
    assert options.embedded is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sweep-s", "nan"),
        ("--sweep-s", "0"),
        ("--sweep-s", "inf"),
        ("--lease-duration-s", "nan"),
        ("--lease-duration-s", "0.5"),
        ("--redis-memory-mib", "-5"),
        ("--redis-port", "99999"),
        ("--metrics-port", "-1"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_option_and_value(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args([f"{option}={value}"])

    assert ended.value.code == 2
    assert re.search(f"argument {option}: '{value}': .* from .* to .* wanted", capsys.readouterr().err)


AGENT_COMMANDS = {
    "auth", "hello", "ping", "client|setname", "client|tracking", "cluster|slots", "evalsha", "time",
    "get", "set", "setnx", "del", "exists", "expire", "hget", "hset", "hsetnx", "hdel", "hrandfield",
    "sadd", "zadd", "zrem", "zscore", "llen", "lpop", "rpush",
}  # fmt: skip


def test_the_agents_commands_are_these_and_no_others() -> None:
    """A list of its own: whoever adds a command says so twice."""
    assert set(COMMANDS[Role.AGENT]) == AGENT_COMMANDS


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis+cluster://a:1,b:2,c", (Address("a", 1), Address("b", 2), Address("c", 6379))),
        ("rediss+cluster://[::1]:7000", (Address("::1", 7000),)),
    ],
)
def test_a_cluster_is_named_by_some_of_its_servers(url: str, servers: tuple[Address, ...]) -> None:
    access = RedisAccess(url, "u", "p", "pem")

    assert access.is_cluster
    assert access.servers == servers
    assert access.is_tls == url.startswith("rediss")
    one = access.at(servers[0])
    assert (one.servers, one.is_cluster, one.is_tls, one.password) == ((servers[0],), False, access.is_tls, "p")


@pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://u:p@a:1,b:2", "redis+cluster://a:b"])
def test_a_wrong_cluster_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_access({"url": url})

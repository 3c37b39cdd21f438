"""Laws of `kvstrata up` that need no process: what manifests, machine facts, users and tokens become."""

import base64
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.standalone import defaults, keys, manifests
from kvstrata_agent.app.standalone.authenticator import LocalAuthenticator, Tokens, parse_token, user_account
from kvstrata_agent.app.standalone.defaults import Machine, default_pool, default_tenant, read_machine
from kvstrata_agent.app.standalone.main import _prepare, _Wanted, main
from kvstrata_agent.app.standalone.manifests import Manifest, manifest_of, node_tiers, parse
from kvstrata_agent.app.standalone.world import Source, StandaloneWorld
from kvstrata_agent.serve.authorization import check_layout
from kvstrata_api.errors import ForbiddenError, InvalidInputError, UnauthenticatedError, UnsupportedError
from kvstrata_api.models.pool import Compatibility
from kvstrata_api.models.poolnode import KVPoolNodeStatus, TenantErased
from kvstrata_api.trust import Identity
from kvstrata_api.units import GIB, MIB
from kvstrata_api.validate import validate
from kvstrata_api.wrapping import Keks
from support.agent.standalone import LAYOUT, declared, pool, tenant

pytestmark = pytest.mark.unit

Json = dict[str, Any]
SHARE = {"poolRef": "one", "prefixes": [{"digest": "a" * 64, "tokenCount": 64}], "to": [{"tenant": "b"}]}
KEKS = Keks({1: bytes(range(32))})


def counting() -> Callable[[int], bytes]:
    """Bytes that never come twice."""
    numbers = itertools.count(1)
    return lambda size: next(numbers).to_bytes(size, "big")


def domain(*members: str, **spec: Any) -> Json:
    return declared("KVTrustDomain", "d", {"tenants": list(members), "sharing": "All", **spec})


def joined(name: str, **spec: Any) -> Json:
    return tenant(name, f"token/{name}", trustDomain="d", **spec)


# What is declared.


def test_a_manifest_is_what_kubectl_apply_takes_with_lists_and_other_objects() -> None:
    text = yaml.safe_dump_all(
        [
            None,
            pool(Path("/nvme")),
            {"kind": "List", "items": [tenant("a", "token/a"), declared("KVPrefixShare", "s", SHARE)]},
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "prod", "labels": {"team": "x"}}},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}},
        ]
    )
    found = manifest_of(parse(text, "f"))

    assert [t.name for t in node_tiers(found.pool)] == ["dram", "nvme"]
    assert [t.capacity_bytes for t in node_tiers(found.pool)] == [32 * MIB, 128 * MIB]
    assert [t.metadata.name for t in found.tenants] == ["a"]
    assert [s.metadata.namespace for s in found.shares] == ["default"]
    assert found.namespaces == {"prod": {"team": "x"}}
    assert found.notes == ("Deployment/vllm is passed over",)
    assert manifest_of(parse(found.written(), "f")) == manifest_of([*found.objects])


@pytest.mark.parametrize(
    ("objects", "named"),
    [
        ([], "0 KVPools declared"),
        ([pool(), declared("KVPool", "two", pool()["spec"])], "2 KVPools declared (one, two)"),
        ([pool(), tenant("a", "token/a"), tenant("a", "token/a")], "KVTenant/a: declared 2 times"),
        ([pool(), declared("KVOperation", "o", {})], "KVOperation/o: one machine takes KVPool"),
        ([declared("KVPool", "one", {"tiers": []})], "spec.tiers"),
        ([pool(), tenant("a", "token/x"), tenant("b", "token/x")], "ServiceAccount token/x: claimed by KVTenants a, b"),
        (
            [pool(), tenant("a", "token/a", quotas=[{"poolRef": "one", "tier": "cxl", "hard": "1Gi"}])],
            "KVTenant/a: spec.quotas[0].tier: pool one has no tier 'cxl', it has dram",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(objects: list[Json], named: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        manifest_of(objects)

    assert named in str(refused.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", "text"])
def test_what_is_no_manifest_is_refused_with_its_file(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"pool\.yaml"):
        parse(text, "pool.yaml")


def test_a_selector_and_a_name_of_one_account_are_a_conflict() -> None:
    selecting = declared("KVTenant", "all", {"namespaceSelector": {"matchLabels": {"team": "x"}}})
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "token", "labels": {"team": "x"}}}

    with pytest.raises(InvalidInputError, match="token/a: claimed by KVTenants a, all"):
        manifest_of([pool(), namespace, selecting, tenant("a", "token/a")])


def test_defaults_are_for_manifests_without_a_tenant() -> None:
    mine = default_tenant("unix", "alice")

    assert [t.metadata.name for t in manifest_of([pool()], defaults=[mine]).tenants] == ["alice"]
    named = manifest_of([pool(), tenant("a", "token/a")], defaults=[mine])
    assert [t.metadata.name for t in named.tenants] == ["a"]


def test_a_change_that_the_api_server_would_refuse_is_refused() -> None:
    before = manifest_of([pool()])
    changed = pool()
    changed["spec"]["compatibility"]["dtype"] = "fp16"

    with pytest.raises(InvalidInputError, match="compatibility is immutable"):
        manifest_of([changed], before=before)


def test_one_of_several_pools_is_chosen_by_name() -> None:
    two = [pool(), declared("KVPool", "two", pool()["spec"])]

    found = manifest_of(two, "two")
    assert (found.pool.metadata.name, found.notes) == ("two", ("KVPool/one is passed over: another pool was chosen",))
    with pytest.raises(InvalidInputError, match="--pool three: declared are: one, two"):
        manifest_of(two, "three")


# Default tiers.

SIZES = st.integers(0, 1 << 44)


@given(SIZES, SIZES, SIZES)
def test_default_tiers_are_valid_and_leave_most_of_the_machine(memory: int, huge: int, disk: int) -> None:
    machine = Machine(memory, huge, disk)
    compatibility = {"model": "*", "revision": "*", "dtype": "bf16", "blockTokens": 16}
    try:
        made = default_pool(machine, "local", compatibility, Path("/state"))
    except UnsupportedError:
        assert memory < 4 * defaults.MEMORY_BYTES_MIN + 4 * defaults.GRAIN_BYTES
        return
    assert validate(made) == []
    tiers = {t.name: t for t in node_tiers(manifest_of([made]).pool)}
    dram = tiers["dram"]
    assert dram.host_dram is not None
    if dram.host_dram.page_size == "2Mi":
        assert dram.capacity_bytes <= huge / 2
    else:
        assert dram.capacity_bytes <= memory / 4
    if "nvme" in tiers:
        assert GIB <= tiers["nvme"].capacity_bytes <= min(disk / 4, defaults.DISK_BYTES_MAX)
    else:
        assert disk < 5 * GIB


def test_the_machine_is_read_with_the_control_groups_limit(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mounts": "/dev/x / ext4 rw 0 0\n",
        "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "9\n",
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages": "7\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_machine(tmp_path / "state" / "not" / "yet", tmp_path)

    assert (found.memory_free_bytes, found.huge_free_bytes) == (2 * GIB, 14 * MIB)
    assert found.disk_free_bytes > 0

    (tmp_path / "proc/self/mounts").write_text(f"/dev/x / ext4 rw 0 0\ntmpfs {tmp_path.resolve()} tmpfs rw 0 0\n")
    assert read_machine(tmp_path, tmp_path).disk_free_bytes == 0


def test_what_a_tier_holds_counts_as_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(there: Path) -> SimpleNamespace:
        """A disk that nobody else writes to."""
        used = sum(file.stat().st_blocks * 512 for file in there.rglob("*") if file.is_file())
        return SimpleNamespace(f_bavail=(GIB - used) // 512, f_frsize=512)

    monkeypatch.setattr(os, "statvfs", alone)
    before = read_machine(tmp_path).disk_free_bytes
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "segment").write_bytes(bytes(64 * MIB))

    assert before in (GIB, 0), "0 of memory that stands in for a disk"
    assert read_machine(tmp_path).disk_free_bytes == before


# Keys.


def settled(before: keys.Book, *objects: Json, random: Callable[[int], bytes], keks: Keks = KEKS) -> keys.Book:
    return keys.settle(before, manifest_of([pool(), *objects]), keks, random)


def test_keys_are_made_once_and_go_with_their_owner() -> None:
    random = counting()
    first = settled({}, tenant("a", "token/a"), tenant("b", "token/b"), random=random)
    again = settled(first, tenant("a", "token/a"), tenant("b", "token/b"), random=random)
    assert again == first
    assert len({e.uid for e in first.values()} | {e.data["v1"] for e in first.values()}) == 4

    alone = settled(first, tenant("a", "token/a"), random=random)
    assert alone.keys() == {"tenant/a"}
    back = settled(alone, tenant("a", "token/a"), tenant("b", "token/b"), random=random)
    assert back["tenant/a"] == first["tenant/a"]
    assert back["tenant/b"].uid != first["tenant/b"].uid
    assert back["tenant/b"].data["v1"] != first["tenant/b"].data["v1"]


def test_a_domains_key_moves_on_when_a_member_leaves_and_never_back() -> None:
    random = counting()
    both = settled({}, domain("a", "b"), joined("a"), joined("b"), random=random)["domain/d"]
    assert (both.key_version, both.members, set(both.data)) == (1, ("a", "b"), {"v1", "v1.data"})

    before = {"domain/d": both}
    left = settled(before, domain("a", "b"), joined("a"), tenant("b", "token/b"), random=random)["domain/d"]
    assert (left.key_version, left.members) == (2, ("a",))
    assert left.data.keys() == {"v2", "v2.data"}
    assert left.data["v2"] != both.data["v1"]

    back = settled({"domain/d": left}, domain("a", "b"), joined("a"), joined("b"), random=random)["domain/d"]
    assert (back.key_version, back.members) == (2, ("a", "b"))
    raised = settled({"domain/d": back}, domain("a", "b", keyVersion=7), joined("a"), joined("b"), random=random)
    assert raised["domain/d"].key_version == 7


def test_an_erasure_moves_the_key_on_once_and_is_over_when_it_is_confirmed() -> None:
    random = counting()
    first = settled({}, tenant("a", "token/a"), random=random)
    erased = settled(first, tenant("a", "token/a", eraseRequested="1"), random=random)
    entry = erased["tenant/a"]
    assert (entry.key_version, entry.uid, entry.erased) == (2, first["tenant/a"].uid, "")
    assert entry.data.keys() == {"v2", "v2.data"}
    assert settled(erased, tenant("a", "token/a", eraseRequested="1"), random=random) == erased

    assert keys.confirm(erased, entry.uid, 1) == erased
    assert keys.confirm(erased, entry.uid, 2)["tenant/a"].erased == "1"


def test_another_list_of_prefixes_is_another_share() -> None:
    random = counting()
    owner = tenant("a", "default/a")
    other = {**SHARE, "prefixes": [{"digest": "b" * 64, "tokenCount": 64}]}
    first = settled({}, owner, declared("KVPrefixShare", "s", SHARE), random=random)
    second = settled(first, owner, declared("KVPrefixShare", "s", other), random=random)

    assert second["share/default.s"].uid != first["share/default.s"].uid


def test_data_keys_are_wrapped_again_and_lost_with_no_kek() -> None:
    random = counting()
    first = settled({}, tenant("a", "token/a"), random=random, keks=Keks())
    assert first["tenant/a"].data.keys() == {"v1"}
    second = settled(first, tenant("a", "token/a"), random=random)
    third = settled(second, tenant("a", "token/a"), random=random, keks=Keks({**KEKS.keys, 2: bytes(32)}))

    def wrapped(book: keys.Book) -> str:
        return base64.b64decode(book["tenant/a"].data["v1.data"]).decode()

    assert (wrapped(second)[:3], wrapped(third)[:3]) == ("k1:", "k2:")
    assert Keks({2: bytes(32)}).unwrap(wrapped(third)) == KEKS.unwrap(wrapped(second))
    assert settled(third, tenant("a", "token/a"), random=random, keks=Keks()) == third


def test_keys_are_read_back_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    book = settled({}, domain("a"), joined("a", eraseRequested="x"), random=counting())
    keys.save(tmp_path / "keys.json", book)

    assert keys.load(tmp_path / "keys.json") == book
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    assert keys.load(tmp_path / "none.json") == {}
    (tmp_path / "keys.json").write_bytes(b"{")
    with pytest.raises(UnsupportedError, match=r"keys\.json"):
        keys.load(tmp_path / "keys.json")


# Callers.


class Standing:
    """A world of manifests that was not entered: its stores are filled, nothing runs."""

    def __init__(self, folder: Path, *objects: Json, tokens: Tokens | None = None) -> None:
        manifest = manifest_of([pool(), *objects])
        self.world = StandaloneWorld(Source(), manifest, folder, tokens or Tokens({}), folder / "kek")
        self.declare(manifest)

    def declare(self, manifest: Manifest) -> None:
        self.world._book = keys.settle(self.world._book, manifest, KEKS, counting())
        self.world._publish(manifest)

    @property
    def authenticator(self) -> LocalAuthenticator:
        return self.world.authenticator


def named(uid: int) -> str:
    return {1000: "alice", 1001: "Bob", 1002: "uid-1000"}[uid]


@pytest.mark.parametrize(("uid", "account"), [(1000, "alice"), (1001, "uid-1001"), (1002, "uid-1002"), (9, "uid-9")])
def test_no_user_is_called_like_another(uid: int, account: str) -> None:
    assert user_account(uid, named) == account


def test_a_user_is_its_tenant_and_nobody_elses(tmp_path: Path) -> None:
    standing = Standing(tmp_path, tenant("team", "unix/alice"), tenant("other", "unix/uid-1001"))
    authenticator = LocalAuthenticator(standing.world._view, Tokens({}), lambda uid: user_account(uid, named))

    mine, other = authenticator.authenticate_user(1000), authenticator.authenticate_user(1001)
    assert (mine.grants.tenant, other.grants.tenant) == ("team", "other")
    assert {s.secret for s in mine.secrets}.isdisjoint(s.secret for s in other.secrets)
    with pytest.raises(ForbiddenError, match=r"unix user 9 \(uid-9\)"):
        authenticator.authenticate_user(9)
    for nobody in (-1, authenticator._nobody):
        with pytest.raises(UnauthenticatedError, match="present a token"):
            authenticator.authenticate_user(nobody)


async def test_tokens_stand_for_accounts_and_other_tokens_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a-token-of-some-length\n")
    tokens = Tokens(dict([parse_token(f"prod/engine={tmp_path / 't'}")]))
    tokens.take(tokens.read())
    standing = Standing(tmp_path, tenant("team", "prod/engine"), tokens=tokens)

    assert (await standing.authenticator.authenticate("a-token-of-some-length")).grants.tenant == "team"
    for wrong in ("", "short", "a-token-of-some-length\n", "another-token-of-some-length", "x" * 20_000):
        with pytest.raises(UnauthenticatedError):
            await standing.authenticator.authenticate(wrong)
    tokens.take({})
    with pytest.raises(UnauthenticatedError):
        await standing.authenticator.authenticate("a-token-of-some-length")


@pytest.mark.parametrize("text", ["a", "a=", "=f", "A=f", "a/b/c=f", "/a=f", "a/=f", "unix/root=f"])
def test_what_names_no_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--token"):
        parse_token(text)


def test_token_files_that_say_nothing_certain_are_refused(tmp_path: Path) -> None:
    for name, text in {"short": "abc", "one": "the-same-token-twice", "two": "the-same-token-twice\n"}.items():
        (tmp_path / name).write_text(text)

    def read(*files: str) -> None:
        Tokens({Identity("token", name): tmp_path / name for name in files}).read()

    with pytest.raises(InvalidInputError, match="3 characters, 16 to"):
        read("short")
    with pytest.raises(InvalidInputError, match="same token as another"):
        read("one", "two")
    with pytest.raises(InvalidInputError, match="absent"):
        read("absent")


def test_whoever_is_taken_out_of_the_manifest_is_refused_at_the_next_look(tmp_path: Path) -> None:
    standing = Standing(tmp_path, tenant("a", "token/a"), tenant("b", "token/b"))
    identity, version = Identity("token", "b"), standing.authenticator.grants_version
    assert standing.authenticator.authorize(identity).grants.tenant == "b"

    standing.declare(manifest_of([pool(), tenant("a", "token/a")]))
    assert standing.authenticator.grants_version > version
    with pytest.raises(ForbiddenError):
        standing.authenticator.authorize(identity)


def test_the_generation_moves_with_the_spec_alone(tmp_path: Path) -> None:
    standing = Standing(tmp_path, tenant("a", "token/a"))
    first = standing.world.desired.pool_node.metadata.generation
    standing.declare(manifest_of([pool(), tenant("b", "token/b")]))
    assert standing.world.desired.pool_node.metadata.generation == first
    standing.declare(manifest_of([pool(Path("/nvme")), tenant("b", "token/b")]))

    assert standing.world.desired.pool_node.metadata.generation == first + 1
    assert [t.name for t in standing.world.desired.pool_node.spec.tiers] == ["dram", "nvme"]


def test_what_cannot_be_published_leaves_what_was_good_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Standing(tmp_path, tenant("a", "token/a"))
    before = standing.world._declared_node()
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "node_tiers", lambda _: [{"name": "dram"}])
        with pytest.raises(ValueError, match="tiers"):
            standing.declare(manifest_of([pool(Path("/nvme")), tenant("b", "token/b")]))

    assert standing.world._declared_node() == before
    assert [t.metadata.name for t in standing.world._stores.tenants] == ["a"]


def full(_path: Path, _book: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_change_whose_keys_could_not_be_kept_is_taken_in_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump_all([pool(), tenant("a", "token/a"), tenant("b", "token/b")]))
    source = Source((file,))
    world = StandaloneWorld(source, source.read(), tmp_path, Tokens({}), tmp_path / "kek")
    world._keks.look()
    world._hang_up()
    await world._look()
    file.write_text(yaml.safe_dump_all([pool(), tenant("a", "token/a")]))
    with monkeypatch.context() as patched:
        patched.setattr(keys, "save", full)
        for _ in range(2):
            world._poll.fire()
            with pytest.raises(OSError, match="No space"):
                await world._look()
    assert world.authenticator.authorize(Identity("token", "b")).grants.tenant == "b"

    world._poll.fire()
    await world._look()
    with pytest.raises(ForbiddenError):
        world.authenticator.authorize(Identity("token", "b"))


def test_an_erasure_that_could_not_be_noted_is_noted_by_a_later_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = Standing(tmp_path, tenant("a", "token/a", eraseRequested="1"))
    world, entry = standing.world, standing.world._book["tenant/a"]
    status = KVPoolNodeStatus(erased=(TenantErased(uid=entry.uid, key_version=entry.key_version),))
    with monkeypatch.context() as patched:
        patched.setattr(keys, "save", full)
        world._reported(status)
    assert world._book["tenant/a"].erased == ""

    world._reported(status)
    assert world._book["tenant/a"].erased == "1"
    assert keys.load(tmp_path / "keys.json") == world._book


# A pool of any model.


@pytest.mark.parametrize(("model", "revision"), [("*", "*"), ("m", "*"), ("*", "r"), ("m", "r")])
def test_a_pool_of_any_model_takes_every_model_of_its_element_type(model: str, revision: str) -> None:
    check_layout(LAYOUT, Compatibility(model=model, revision=revision, dtype="bf16"), 2)
    with pytest.raises(InvalidInputError, match="dtype"):
        check_layout(LAYOUT, Compatibility(model=model, revision=revision, dtype="fp16"), 2)


def test_a_model_that_is_called_like_any_is_not_let_in_by_its_name() -> None:
    with pytest.raises(InvalidInputError, match=r"layout\.model: '[*]', the pool wants 'm'"):
        check_layout(
            type(LAYOUT)("*", "r", "bf16", 16, layers=1, kv_heads=1, head_dim=64, element_bytes=2),
            Compatibility(model="m", revision="*", dtype="bf16"),
            2,
        )


# The command line.


def test_what_would_be_used_can_be_printed_and_declared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(16 * GIB, 0, 100 * GIB)
    monkeypatch.setattr(defaults, "read_machine", lambda _: machine)
    assert main(["--print", "--state-dir", str(tmp_path / "state"), "--model", "m", "--pool", "p"]) == 0
    printed = capsys.readouterr().out

    found = manifest_of(parse(printed, "printed"))
    assert (found.pool.metadata.name, found.pool.spec.compatibility.model) == ("p", "m")
    assert [t.capacity_bytes for t in node_tiers(found.pool)] == [4 * GIB, 25 * GIB]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-f", "/no/such/file"], "/no/such/file"),
        (["--token", "x"], "--token 'x'"),
        (["--token", "x=/f", "--token", "x=/g"], "--token token/x: given twice"),
        (["--dtype", "bf17"], "spec.compatibility.dtype"),
        (["--socket", "/" + "s" * 120], "limit 107"),
        (["--group", "no-such-group"], "--group 'no-such-group'"),
        (["--connect", " "], "--connect: empty, a URL or the path"),
        (["--kek-file", "/none"], "--kek-file /none: No such file"),
        (["--kek-file", "/proc/version"], "--kek-file /proc/version: "),
    ],
)
def test_bad_options_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], named: str
) -> None:
    assert main([*options, "--state-dir", str(tmp_path / "state")]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_directory_that_was_there_before_keeps_its_mode(tmp_path: Path, *, has_keys: bool) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    if has_keys:
        (state / "keys.json").touch()
    manifest = manifest_of([pool()])
    _prepare(_Wanted(manifest, Source(), state, state / "run" / "agent.sock", Tokens({})), os.getegid())

    assert state.stat().st_mode & 0o777 == (0o710 if has_keys else 0o755)
    assert (state / "run").stat().st_mode & 0o7777 == 0o2750
    _prepare(_Wanted(manifest, Source(), state, state / "run" / "agent.sock", Tokens({})), None)
    assert (state / "run").stat().st_mode & 0o777 == 0o700


def test_a_state_directory_that_others_may_write_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)

    assert main(["--state-dir", str(tmp_path / "state")]) == 1
    assert "mode 0777" in capsys.readouterr().err

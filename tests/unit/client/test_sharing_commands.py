"""The commands of whoever shares prefixes: digest and who-can-read."""

import json
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import readers, shares, trust
from kvstrata_api.blocks import prefix_digest
from kvstrata_api.errors import KvStrataError
from kvstrata_api.shares import Declared
from kvstrata_api.validate import validate
from kvstrata_client.cli import parser
from support.kube.share_worlds import NOW, TENANTS, worlds

pytestmark = pytest.mark.unit

Json = dict[str, Any]


def run(*arguments: str) -> int:
    given_ = parser(arguments[0]).parse_args(arguments)
    code: int = given_.run(given_)
    return code


def fails(*arguments: str) -> str:
    with pytest.raises(KvStrataError) as failure:
        run(*arguments)
    return f"{failure.type.__name__}: {failure.value}"


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_the_digest_of_ids_is_what_clients_compare(ids: list[int]) -> None:
    given_ = parser("digest").parse_args(["digest", *map(str, ids)])
    from kvstrata_client.commands.digest import _tokens

    assert prefix_digest(_tokens(given_)) == prefix_digest(ids)


@pytest.mark.parametrize("tokens", ["0", "-1", "1025"])
def test_blocks_of_a_digest_have_as_many_tokens_as_a_pool_may_declare(tokens: str) -> None:
    assert fails("digest", "1", "--block-tokens", tokens) == f"UsageError: --block-tokens {tokens}: 1 to 1024 wanted"


def test_ids_come_from_arguments_or_a_file_and_yaml_says_how_much_is_shared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(list(range(40))))
    assert run("digest", "--tokens", str(file), "--description", "v1") == 0
    told = capsys.readouterr().out
    assert told.startswith("# 2 whole blocks of 16 tokens are shared")
    expected = {"digest": prefix_digest(range(40)).hex(), "tokenCount": 40, "description": "v1"}
    assert yaml.safe_load(told) == {"prefixes": [expected]}
    run("digest", *map(str, range(40)), "-o", "json")
    assert json.loads(capsys.readouterr().out)["prefixes"][0]["digest"] == expected["digest"]


def test_a_whole_share_is_one_that_the_api_server_takes(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        *("digest", "1", "2", "3", "--share", "team-a/prompt", "--pool", "p", "--to", "tenant:b", "--to", "domain:d"),
        *("--expires-at", "2027-01-01T00:00:00Z"),
    )
    made = yaml.safe_load(capsys.readouterr().out)
    assert validate(made) == []
    assert made["spec"]["to"] == [{"tenant": "b"}, {"domain": "d"}]
    assert "prefixes" in made["spec"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words that puts a mark before every text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<s>": 1, "you": 2, "are": 3, "helpful": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(("more", "ids"), [((), [1, 2, 3, 4]), (("--no-special-tokens",), [2, 3, 4])])
def test_text_has_the_tokens_of_its_tokenizer(
    tokenizer: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], ids: list[int]
) -> None:
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        run("digest", "--text", "you are helpful", "--tokenizer", str(path), "-o", "json", *more)
        found = json.loads(capsys.readouterr().out)["prefixes"][0]
        assert found == {"digest": prefix_digest(ids).hex(), "tokenCount": len(ids)}


def test_what_is_wrong_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("[1, -2]")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "exactly one of them" in fails("digest")
    assert "exactly one of them" in fails("digest", "1", "--text", "x")
    assert "--tokenizer is missing" in fails("digest", "--text", "x")
    assert "there is no" in fails("digest", "--text", "x", "--tokenizer", str(tmp_path / "nowhere"))
    assert "InvalidInputError" in fails("digest", "--text", "x", "--tokenizer", str(tmp_path))
    assert "whole numbers" in fails("digest", "--tokens", str(tmp_path / "bad"))
    assert "whole numbers" in fails("digest", "4294967296")
    assert "needs --pool" in fails("digest", "1", "--share", "a/s")
    assert "poolRef" in fails("digest", "1", "--share", "a/s", "--pool", "NO", "--to", "tenant:b")


@given(worlds(), st.integers(-1, 1))
def test_what_is_said_of_everything_is_what_agents_grant(world: Declared, early: int) -> None:
    expires = {"expires_at": datetime(2026 + early, 1, 1, tzinfo=UTC).isoformat()} if early else {}
    listed = [s.model_copy(update={"spec": s.spec.model_copy(update=expires)}) for s in world.shares]
    world = Declared(world.tenants, world.domains, listed, {})
    granted = {
        (t.metadata.name, str(a.scope), a.can_write)
        for t in world.tenants
        for a in trust.grants(t, world.domains, shares.accesses(t, world, "p", NOW)).access
    }

    told = [r for name in TENANTS for r in readers.of_tenant(name, world, NOW)]
    told += [r for d in world.domains for r in readers.of_domain(d.metadata.name, world)]
    told += [r for s in world.shares for r in readers.of_share(s, world, NOW)]
    assert {(r.tenant, str(r.scope), r.can_write) for r in told if not r.refusal} == granted
    (only,) = world.shares
    assert readers.of_digest(only.spec.prefixes[0].digest, world, NOW) == readers.of_share(only, world, NOW)
    assert readers.of_digest("f" * 64, world, NOW) == ()


def tenant(name: str, **spec: Any) -> Json:
    spec["serviceAccounts"] = [{"namespace": name, "name": "engine"}]
    return {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVTenant", "metadata": {"name": name}, "spec": spec}


def cluster() -> list[Json]:
    """a publishes in a domain that b is in and c would like to be in, and shares a prefix with both."""
    prefix = {"digest": "1" * 64, "tokenCount": 64}
    to = [{"tenant": "b"}, {"tenant": "c"}]
    share = {"poolRef": "p", "prefixes": [prefix], "to": to, "expiresAt": "2100-01-01T00:00:00Z"}
    domain = {"tenants": ["a", "b", "z"], "sharing": "All", "publishers": ["a"]}
    return [
        tenant("a", trustDomain="d"),
        tenant("b", trustDomain="d"),
        tenant("c", trustDomain="d"),
        {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVTrustDomain", "metadata": {"name": "d"}, "spec": domain},
        {
            "apiVersion": "kvstrata.io/v1alpha1",
            "kind": "KVPrefixShare",
            "metadata": {"name": "s", "namespace": "a"},
            "spec": share,
        },
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a", "labels": {"x": "y"}}},
    ]


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(cluster()))
    return tmp_path


Ask = Callable[..., tuple[int, dict[tuple[str, str], str]]]


@pytest.fixture
def ask(manifests: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Answers by tenant and scope: `read`, `write` or why not."""

    def asked(*arguments: str) -> tuple[int, dict[tuple[str, str], str]]:
        code = run("who-can-read", "-o", "json", "-f", str(manifests), *arguments)
        rows = json.loads(capsys.readouterr().out)["readers"]
        return code, {
            (r["tenant"], r["scope"].split("/")[0]): r["refusal"] or ("write" if r["can_write"] else "read")
            for r in rows
        }

    return asked


def test_a_share_is_answered_by_name_and_by_the_digest_that_it_lists(ask: Ask) -> None:
    expected = {("a", "share"): "write", ("b", "share"): "read", ("c", "share"): "NotAccepted"}
    assert ask("--share", "a/s") == (0, expected)
    assert ask("1" * 64) == (0, expected)
    assert ask("--share", "a/s", "--at", "2100-01-01T00:00:00Z") == (1, dict.fromkeys(expected, "Expired"))
    assert ask("2" * 64) == (1, {})


def test_a_domain_names_one_sided_wishes_of_both_sides(ask: Ask) -> None:
    assert ask("--domain", "d") == (
        0,
        {
            ("a", "domain"): "write",
            ("b", "domain"): "read",
            ("c", "domain"): "NotAdmitted",
            ("z", "domain"): "UnknownReader",
        },
    )


def test_a_tenant_is_read_by_itself_where_it_publishes_and_by_whom_it_shares_with(ask: Ask) -> None:
    code, found = ask("--tenant", "a")
    assert code == 0
    assert found["a", "tenant"] == "write"
    assert found["b", "domain"] == found["b", "share"] == "read"
    assert ask("--tenant", "b")[1] == {("b", "tenant"): "write"}, "it publishes nothing"


def test_the_table_says_until_when(manifests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("who-can-read", "--share", "a/s", "-f", str(manifests)) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["TENANT", "SCOPE", "BY", "UNTIL", "MAY"]
    assert told[1].split() == ["a", "share", "a.s", "v1", "grants", "it", "2100-01-01T00:00:00Z", "read,", "write"]
    assert told[3].endswith("no: NotAccepted")


def test_a_cluster_is_asked_through_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": cluster()}))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {answer}\n')
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run("who-can-read", "--share", "a/s", "--context", "prod") == 0
    assert "b" in capsys.readouterr().out
    assert "--context=prod get kvtenants" in (tmp_path / "asked").read_text()

    kubectl.write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
    assert "ApiServerAwayError: kubectl: forbidden" in fails("who-can-read", "--domain", "d")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "UnsupportedError: kubectl is not in PATH" in fails("who-can-read", "--domain", "d")


def test_the_example_is_what_the_command_makes_of_its_tokens_and_beta_may_read_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(__file__).resolve().parents[3] / "examples" / "03-prefix-share"
    share = yaml.safe_load((folder / "20-share.yaml").read_text())
    run("digest", "--tokens", str(folder / "system-prompt.ids"), "-o", "json")
    (made,) = json.loads(capsys.readouterr().out)["prefixes"]
    (declared,) = share["spec"]["prefixes"]
    assert made.items() <= declared.items()

    assert run("who-can-read", declared["digest"], "-f", str(folder), "-o", "json", "--at", "2026-01-01T00:00:00Z") == 0
    found = {r["tenant"]: r["may_read"] for r in json.loads(capsys.readouterr().out)["readers"]}
    assert found == {"alpha": True, "beta": True}


def test_what_nobody_declared_is_said(manifests: Path) -> None:
    for arguments in (("--tenant", "x"), ("--domain", "x"), ("--share", "x/y"), ("--share", "s")):
        assert "InvalidInputError: there is no KV" in fails("who-can-read", "-f", str(manifests), *arguments)
    assert "RFC 3339 wanted" in fails("who-can-read", "-f", str(manifests), "--domain", "d", "--at", "soon")

"""`kvstrata support-bundle`: what is in it, what is never in it, and what could not be had."""

import json
import stat
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata_api import names
from kvstrata_api.errors import ApiServerAwayError
from kvstrata_client.cli import main
from kvstrata_client.commands.bundle import REDACTED, chosen, collected, redacted, redacted_text, write
from kvstrata_client.commands.doctor import Seen
from kvstrata_client.commands.kubectl import Kubectl

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl"
DIGEST = "9f" * 32


def pod(name: str, *, pool: str = "", node: str = "") -> dict[str, Any]:
    labels = {names.LABEL_POOL: pool} if pool else {}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels, "creationTimestamp": NOW.isoformat()},
            "spec": {"nodeName": node}, "status": {}}  # fmt: skip


def test_a_log_that_is_no_text_is_taken_with_what_can_be_read_of_it() -> None:
    prints = Kubectl(("sh", "-c", r"printf 'a\377b'"))

    assert prints.text("logs") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"refused {TOKEN} of x", f"refused {REDACTED} of x"),
        ("redis://kvstrata:hunter2@redis:6379/0", f"redis://{REDACTED}@redis:6379/0"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {REDACTED}"),
        ('{"password=hunter2"}', f'{{"password={REDACTED}"}}'),
        ("node demo-node-1: 12 blocks of scope tenant/a", "node demo-node-1: 12 blocks of scope tenant/a"),
        ("http://127.0.0.1:9102/metrics at 10:20", "http://127.0.0.1:9102/metrics at 10:20"),
    ],
)
def test_text_loses_tokens_and_passwords_alone(text: str, clean: str) -> None:
    assert redacted_text(text) == clean


def test_objects_lose_values_of_variables_digests_and_copies_of_themselves() -> None:
    share = {
        "metadata": {"name": "s", "annotations": {"kubectl.kubernetes.io/last-applied-configuration": DIGEST},
                     "managedFields": [{"x": DIGEST}]},
        "spec": {"prefixes": [{"digest": DIGEST, "tokenCount": 7}]},
    }  # fmt: skip
    container = {"env": [{"name": "LICENCE", "value": "hunter2"}, {"name": "N", "valueFrom": {"fieldRef": "x"}}],
                 "args": [{"name": "kept", "value": "as it is"}]}  # fmt: skip
    clean = json.dumps(redacted([share, container]))

    assert DIGEST not in clean
    assert "hunter2" not in clean
    assert redacted(container)["args"] == container["args"]
    assert redacted(container)["env"][1] == {"name": "N", "valueFrom": {"fieldRef": "x"}}
    (prefix,) = redacted(share)["spec"]["prefixes"]
    assert prefix["tokenCount"] == 7
    assert redacted(share)["spec"]["prefixes"] == redacted(share)["spec"]["prefixes"], "the same digest stays the same"
    assert redacted({"warm": {"prefixes": [DIGEST]}})["warm"]["prefixes"][0].startswith(REDACTED)


def test_what_cannot_be_had_is_named_and_the_rest_is_there() -> None:
    def away() -> Any:
        raise ApiServerAwayError(f"kubectl: pods is forbidden: {TOKEN}")

    had = {"a.json": lambda: [1], "pods.json": away, "logs/p.previous.log": away, "logs/p.log": lambda: TOKEN}
    files = collected(iter(had.items()), NOW)

    assert list(files) == ["a.json", "logs/p.log", "missing.json"]
    assert files["logs/p.log"] == REDACTED.encode()
    assert json.loads(files["missing.json"])["missing"] == {"pods.json": f"kubectl: pods is forbidden: {REDACTED}"}


def test_the_archive_is_its_owner_s_and_replaces_nothing(tmp_path: Path) -> None:
    out = tmp_path / "case-7.tar.gz"
    write(out, {"objects/x.json": b"[]"}, NOW)

    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with tarfile.open(out) as archive:
        (entry,) = archive.getmembers()
        assert (entry.name, entry.mode, entry.size) == ("case-7/objects/x.json", 0o600, 2)
    with pytest.raises(FileExistsError):
        write(out, {}, NOW)


def test_logs_are_those_of_the_control_plane_then_of_agents_in_trouble() -> None:
    lost = {"type": "AgentConnected", "status": "False", "reason": "LeaseExpired"}
    node = {"kind": "KVPoolNode", "apiVersion": names.API_VERSION,
            "metadata": {"name": "demo.n2", "creationTimestamp": NOW.isoformat()},
            "spec": {"poolRef": "demo", "nodeName": "n2"}, "status": {"conditions": [lost]}}  # fmt: skip
    pods = [pod(f"agent-{n}", pool="demo", node=f"n{n}") for n in range(60)]
    seen = Seen(NOW, [node], [*pods, pod("kvstrata-operator-x"), pod("kvstrata-metadata-x")])
    named = chosen(seen)

    assert named[:3] == ["kvstrata-metadata-x", "kvstrata-operator-x", "agent-2"]
    assert len(named) == 40


@pytest.mark.parametrize("lines", ["0", "100001"])
def test_limits_are_named(lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["support-bundle", "--lines", lines])

    assert end.value.code == 2
    assert f"--lines {lines}: 1 to 100000 wanted" in capsys.readouterr().err

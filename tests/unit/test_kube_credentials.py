"""Laws of credentials: who we are is read once, whole or not at all, and nothing secret is shown."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata_api.errors import UnsupportedError
from kvstrata_kube import credentials
from kvstrata_kube.credentials import load_credentials

pytestmark = pytest.mark.unit

CLUSTER = {"server": "https://10.0.0.1:6443/", "certificate-authority": "ca.pem"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a pod nor a person's own configuration."""
    for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    config = {
        "current-context": "c",
        "contexts": [{"name": "other"}, {"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": CLUSTER | cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_paths_are_taken_from_where_the_kubeconfig_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-1\n")
    user = {"tokenFile": "token", "client-certificate": "me.pem", "client-key": "me.key"}
    read = await load_credentials(kubeconfig(tmp_path, user))

    assert read.server == "https://10.0.0.1:6443"
    assert read.ca_file == str(tmp_path / "ca.pem")
    assert (read.certificate_file, read.key_file) == (str(tmp_path / "me.pem"), str(tmp_path / "me.key"))
    assert read.token == "secret-1"
    assert read.verifies
    assert "secret-1" not in repr(read)


async def test_a_token_that_is_replaced_in_its_file_is_taken_in(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    read = await load_credentials(kubeconfig(tmp_path, {"tokenFile": "token"}))
    (tmp_path / "token").write_text("new\n")

    assert read.token == "old"
    assert read.with_fresh_token().token == "new"
    assert read.with_fresh_token().server == read.server


async def test_a_token_that_is_written_down_needs_no_file(tmp_path: Path) -> None:
    read = await load_credentials(kubeconfig(tmp_path, {"token": "t"}, **{"insecure-skip-tls-verify": True}))

    assert read.with_fresh_token() is read
    assert not read.verifies


def test_content_goes_before_names_and_only_we_may_read_it(tmp_path: Path) -> None:
    coded = base64.b64encode(b"pem").decode()
    path = kubeconfig(tmp_path, {"token": "t"}, **{"certificate-authority-data": coded})
    read = asyncio.run(load_credentials(path))

    assert read.ca_file is not None
    kept = Path(read.ca_file)
    assert kept.read_bytes() == b"pem"
    assert kept.stat().st_mode & 0o077 == 0


async def test_a_pod_uses_its_own_token_and_a_named_file_goes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of the pod")
    monkeypatch.setattr(credentials, "POD", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    pod = await load_credentials(None)

    assert (pod.server, pod.token, pod.token_file) == ("https://[fd00::1]:443", "of the pod", tmp_path / "token")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, {"token": "named"})))
    assert (await load_credentials(None)).token == "named"


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"token": "t", "as": "admin"}, {}, "as cannot be used"),
        ({"token": "t"}, {"proxy-url": "http://p"}, "proxy-url cannot be used"),
        ({"token": "t"}, {"tls-server-name": "x"}, "tls-server-name cannot be used"),
        ({"tokenFile": "missing"}, {}, "missing"),
        ({"token": "t"}, {"certificate-authority-data": "%"}, "Error"),
    ],
)
async def test_what_cannot_be_kept_whole_is_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        await load_credentials(kubeconfig(tmp_path, user, **cluster))


@pytest.mark.parametrize("text", ["", "[]", "{}", "current-context: c", "\t", "contexts: [{}]\ncurrent-context: c"])
async def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)

    with pytest.raises(UnsupportedError, match="give --kubeconfig or run in a pod"):
        await load_credentials(path)
    with pytest.raises(UnsupportedError):
        await load_credentials(tmp_path / "absent")
    with pytest.raises(UnsupportedError):
        await load_credentials(None)

"""Where the API server is and who we are: from a kubeconfig or the pod.

Certificates and tokens are read here. Whatever needs a program or a cloud's protocol (`exec`, `auth-provider`), or
several files joined, is left to `plugins`, which is loaded for that alone.
"""

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import yaml

from kvstrata_api.errors import UnsupportedError

POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where every pod finds its token and the cluster's authority (k8s, automounted ServiceAccount)."""

_UNKNOWN: Final = ("proxy-url", "tls-server-name", "as", "as-uid", "as-groups", "as-user-extra")
"""Settings of a cluster or user that are not supported; to leave them out would act under another identity."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """One identity at one API server."""

    server: str
    ca_file: str | None
    certificate_file: str | None
    key_file: str | None
    token: str | None = field(repr=False)
    """Bearer token without its scheme."""
    verifies: bool
    """False only where the kubeconfig says insecure-skip-tls-verify."""
    token_file: Path | None = None
    """Where `token` came from; somebody else puts a new one there before it runs out."""

    def ssl_context(self) -> ssl.SSLContext:
        """Trust what these credentials trust, and show their certificate where there is one.

        Raises `OSError` when a file is missing or holds no certificate.
        """
        context = ssl.create_default_context(cafile=self.ca_file)
        if not self.verifies:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file:
            context.load_cert_chain(self.certificate_file, self.key_file)
        return context

    def with_fresh_token(self) -> Self:
        """Read the token's file again; the same credentials when there is none. Raises `OSError`."""
        return self if self.token_file is None else replace(self, token=_read(self.token_file))


async def load_credentials(kubeconfig: Path | None) -> Credentials:
    """Read `kubeconfig`, else `$KUBECONFIG`, else the pod's own token, else `~/.kube/config`.

    Sends nothing. Called again to take in what was rotated. Raises `UnsupportedError` when none can be used.
    """
    named = str(kubeconfig or os.environ.get("KUBECONFIG") or "")
    try:
        if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
            return _of_pod()
        path = named or str(Path.home() / ".kube" / "config")
        return (None if os.pathsep in path else _of_kubeconfig(Path(path))) or await _of_plugin(path)
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as e:
        why = f"{type(e).__name__} {e}"
        raise UnsupportedError(f"no Kubernetes credentials: {why}; give --kubeconfig or run in a pod") from e


def _of_pod() -> Credentials:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    token_file = POD / "token"
    return Credentials(server, str(POD / "ca.crt"), None, None, _read(token_file), verifies=True, token_file=token_file)


def _of_kubeconfig(path: Path) -> Credentials | None:
    """Read the current context; None when it names a program to ask."""
    config = yaml.safe_load(path.read_text())
    context = _named(config, "contexts", config["current-context"])["context"]
    cluster = _named(config, "clusters", context["cluster"])["cluster"]
    user = _named(config, "users", context["user"]).get("user") or {}
    if unknown := [name for name in _UNKNOWN if cluster.get(name) or user.get(name)]:
        raise ValueError(f"{path}: {', '.join(unknown)} cannot be used")
    if "exec" in user or "auth-provider" in user:
        return None
    beside = path.parent
    token_file = beside / str(user["tokenFile"]) if user.get("tokenFile") else None
    given = str(user["token"]) if user.get("token") else None
    return Credentials(
        server=str(cluster["server"]).rstrip("/"),
        ca_file=_file(cluster, "certificate-authority", beside),
        certificate_file=_file(user, "client-certificate", beside),
        key_file=_file(user, "client-key", beside),
        token=_read(token_file) if token_file else given,
        verifies=not cluster.get("insecure-skip-tls-verify", False),
        token_file=token_file,
    )


async def _of_plugin(path: str) -> Credentials:
    """Let the Kubernetes library run the credential plugin."""
    from kvstrata_kube import plugins

    answer = await plugins.ask(path)
    bearer = answer.api_key.get("BearerToken")
    return Credentials(
        server=answer.host.rstrip("/"),
        ca_file=answer.ssl_ca_cert,
        certificate_file=answer.cert_file,
        key_file=answer.key_file,
        token=bearer.split(" ", 1)[-1].strip() if bearer else None,
        verifies=answer.verify_ssl,
    )


def _named(config: Mapping[str, Any], section: str, name: str) -> Mapping[str, Any]:
    for entry in config.get(section) or ():
        if entry["name"] == name:
            found: Mapping[str, Any] = entry
            return found
    raise LookupError(f"{section} has no {name!r}")


def _read(token_file: Path) -> str:
    return token_file.read_text().strip()


def _file(section: Mapping[str, Any], name: str, beside: Path) -> str | None:
    """Path of a file that is named, or whose content is given as `<name>-data`; data goes before names (kubectl)."""
    inline = section.get(f"{name}-data")
    if inline:
        return _kept(base64.b64decode(inline, validate=True))
    return str(beside / section[name]) if section.get(name) else None


@cache
def _kept(content: bytes) -> str:
    """Path under which OpenSSL, which wants files, can read content that never reaches a disk."""
    handle = os.memfd_create("kvstrata-credential")  # Stays open: it goes with the process, however that ends.
    os.fchmod(handle, 0o600)  # Made with 0777, and others may reach it through /proc.
    os.write(handle, content)
    return f"/proc/self/fd/{handle}"

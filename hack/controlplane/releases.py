"""Downloads programs that their projects release, by pinned checksum, where the network allows.

One archive is known: what controller-tools releases for tests of controllers (envtest). It holds kube-apiserver, etcd
and kubectl, which take four minutes to build on two cores. Where it cannot be had, in a closed network say, that is
noticed within seconds, and everything is built. Standard library only.
"""

import hashlib
import io
import os
import platform
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane.errors import BuildError
from controlplane.pins import Tool, parse_version, pinned_version

OFFLINE: Final = "KVSTRATA_NO_DOWNLOADS"
"""Environment variable: any value but an empty one has everything built."""
_URL: Final = "https://github.com/kubernetes-sigs/controller-tools/releases/download/{name}/{name}-{system}.tar.gz"
_CONNECT_S: Final = 5.0
"""An address that does not answer within this is taken for one that cannot be reached."""
_BYTES_MAX: Final = 200 << 20

NAME: Final = "envtest-v1.34.1"
TOOLS: Final = frozenset({"kube-apiserver", "etcd", "kubectl"})
SHA512: Final = {
    "linux-amd64": (
        "c5e7c237ae18a8c65d0df1214b864ecd19aa9ff4f1383dbd477c202546d778c0"
        "f74efe15750ec38f57d8de26ba17cd62f404446cdd3c975399a5d4589de35cdd"
    ),
    "linux-arm64": (
        "bf13d2456183e66d084e28e1c9eed6a408fb77a06d8d1fd0461a7d9bc0c90b63"
        "d29ea67870b28f80d1f992acb026007d6f43987753c859c81d6a78bc1ca2c903"
    ),
}
"""Of the archive, by system as its URL names it. Source: envtest-releases.yaml of controller-tools at 434758187ddd."""

Read = Callable[[str], bytes]
"""Reads a URL. Raises `OSError`."""


def read_url(url: str) -> bytes:
    """Read a URL. Raises `OSError` when it cannot be reached, or is larger than any archive."""
    with urllib.request.urlopen(url, timeout=_CONNECT_S) as answer:  # noqa: S310  Ours, and https.
        content: bytes = answer.read(_BYTES_MAX + 1)
    if len(content) > _BYTES_MAX:
        raise OSError(f"{url}: more than {_BYTES_MAX} B")
    return content


def download(tool: Tool, output: Path, read: Read = read_url, *, system: str = "") -> bool:
    """Put a released `tool` at `output`; False when there is none for this system, or it cannot be had.

    Raises `BuildError` when what was read is not what is pinned: somebody stands between here and the release.
    """
    system, version = system or _system(), parse_version(NAME)
    assert version is not None
    if os.environ.get(OFFLINE) or tool.name not in TOOLS or system not in SHA512:
        return False
    # etcd has versions of its own; the archive has the one that its release of Kubernetes was tested with.
    if tool.requirement == "k8s.io/kubernetes" and not version.has_minor_of(pinned_version(tool)):
        return False
    try:
        content = read(_URL.format(name=NAME, system=system))
    except OSError:
        return False
    found = hashlib.sha512(content).hexdigest()
    if found != SHA512[system]:
        raise BuildError(f"{NAME} for {system} has SHA-512 {found[:16]}..., {SHA512[system][:16]}... is pinned")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = next(m for m in tar.getmembers() if m.isfile() and Path(m.name).name == tool.name)
        file = tar.extractfile(member)
        assert file is not None, "a regular file"
        output.write_bytes(file.read())
    return True


def _system() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}-{machine}"

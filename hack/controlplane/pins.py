"""Which tools exist, which Go module pins each, and how the cache folder of a module is named.

Pure but for reading the pinned `go.mod` and `go.sum` files beside this one.
"""

import hashlib
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

MODULES = Path(__file__).parent / "modules"
"""Folder of the pinned Go modules, one sub-folder each."""

BUILD_FLAGS = ("-trimpath", "-buildvcs=false")
"""Flags of every `go build`: no path of this machine and no state of this repository in the binary."""

STRIP_FLAGS = ("-s", "-w")
"""Linker flags of every build: no symbol table and no DWARF, a third smaller."""

_KUBERNETES_STAMPS = (
    "k8s.io/component-base/version.gitVersion=v{major}.{minor}.{patch}",
    "k8s.io/component-base/version.gitMajor={major}",
    "k8s.io/component-base/version.gitMinor={minor}",
    "k8s.io/component-base/version.gitTreeState=clean",
)
_DIGEST_HEX = 16  # 64 bits: a folder name, not a proof; the proof is the checksum of each binary.


@dataclass(frozen=True, slots=True)
class Version:
    """A release number."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"v{self.major}.{self.minor}.{self.patch}"

    def has_minor_of(self, other: "Version") -> bool:
        """Whether both are releases of one minor, and so interchangeable here."""
        return (self.major, self.minor) == (other.major, other.minor)


@dataclass(frozen=True, slots=True)
class Tool:
    """One binary and the pinned module that it is built from."""

    name: str
    """File name of the binary."""
    module: str
    """Sub-folder of `modules/` that holds go.mod and go.sum."""
    package: str
    """Import path of the main package."""
    requirement: str
    """Required module whose version is the version of the tool."""
    version_args: tuple[str, ...]
    """Arguments that make the binary print its version."""
    stamps: tuple[str, ...] = ()
    """Linker `-X` assignments, with {major}, {minor} and {patch} to fill in."""


def _kubernetes(name: str, *version_args: str) -> Tool:
    """One command of the Kubernetes module."""
    return Tool(
        name=name,
        module="kubernetes",
        package=f"k8s.io/kubernetes/cmd/{name}",
        requirement="k8s.io/kubernetes",
        version_args=version_args or ("--version",),
        stamps=_KUBERNETES_STAMPS,
    )


_ALL = (
    Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3", ("--version",)),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubectl", "version", "--client"),
    Tool("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", "sigs.k8s.io/kwok", ("--version",)),
    Tool(
        "helm",
        "helm",
        "helm.sh/helm/v4/cmd/helm",
        "helm.sh/helm/v4",
        ("version", "--short"),
        ("helm.sh/helm/v4/internal/version.version=v{major}.{minor}.{patch}",),
    ),
    _kubernetes("kubelet"),
    # Modules of their own: another tool would rename the folder of those above, and have all of them built again.
    replace(_kubernetes("kube-proxy"), module="kube-proxy"),
    Tool("coredns", "coredns", "kvstrata.dev/hack/controlplane/coredns", "github.com/coredns/coredns", ("-version",)),
    Tool(
        "helm-unittest",
        "helm-unittest",
        "github.com/helm-unittest/helm-unittest/cmd/helm-unittest",
        "github.com/helm-unittest/helm-unittest",
        ("--help",),  # It prints no version, so that only a build of the pin counts.
    ),
    Tool(
        "versitygw",
        "versitygw",
        "github.com/versity/versitygw/cmd/versitygw",
        "github.com/versity/versitygw",
        ("--version",),
        ("main.Version=v{major}.{minor}.{patch}",),
    ),
)
TOOLS = {tool.name: tool for tool in _ALL}
"""Every tool by name, in the order in which a full build makes them."""

_ON_REQUEST = ("kubelet", "kube-proxy", "coredns", "helm-unittest", "versitygw")
DEFAULT_TOOLS = tuple(name for name in TOOLS if name not in _ON_REQUEST)
"""What `build` makes unless told otherwise; real nodes need the first three, the suites of chart and S3 the others."""


def parse_version(text: str) -> Version | None:
    """Return the first `X.Y.Z` in `text`, or None."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    return Version(*(int(part) for part in found.groups())) if found else None


def required_version(go_mod: str, module: str) -> Version:
    """Return the version at which `go_mod` requires `module`.

    Raises `ValueError` when it does not.
    """
    found = re.search(rf"^(?:require\s+|\s+){re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    version = parse_version(found.group(1)) if found else None
    if version is None:
        raise ValueError(f"go.mod requires no version of {module}")
    return version


def pinned_version(tool: Tool, modules: Path = MODULES) -> Version:
    """Return the version of `tool` that its module pins."""
    return required_version((modules / tool.module / "go.mod").read_text(), tool.requirement)


def linker_flags(tool: Tool, version: Version) -> str:
    """Return the value of `-ldflags`: stripped, and stamped with the version."""
    fields = {"major": version.major, "minor": version.minor, "patch": version.patch}
    stamps = (part for stamp in tool.stamps for part in ("-X", stamp.format(**fields)))
    return " ".join((*STRIP_FLAGS, *stamps))


def digest(go_mod: bytes, go_sum: bytes, recipe: str) -> str:
    """Name one set of pins and the way it is built; equal inputs give equal binaries up to the Go release."""
    hashed = hashlib.sha256()
    for part in (go_mod, go_sum, recipe.encode()):
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()[:_DIGEST_HEX]


def cache_folder_name(module: str, modules: Path = MODULES) -> str:
    """Return `<module>-<digest>`; the digest moves with the pins, the build flags and the platform."""
    stamps = (f"{t.name}={t.package} {t.stamps}" for t in TOOLS.values() if t.module == module)
    recipe = "\n".join((*BUILD_FLAGS, *STRIP_FLAGS, platform.system(), platform.machine(), *stamps))
    folder = modules / module
    if (main := folder / "main.go").exists():  # A command of our own, made of a pinned module's packages.
        recipe += main.read_text()
    sums = (folder / "go.mod").read_bytes(), (folder / "go.sum").read_bytes()
    return f"{module}-{digest(*sums, recipe)}"

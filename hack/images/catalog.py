"""Which images there are, and what is in them. Pure: constants and names."""

from dataclasses import dataclass
from typing import Final

USER_ID: Final = 65532
"""User and group of every process; the chart's `podSecurityContext` names the same."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of processor that images are made for, by the names that others have for it."""

    name: str
    """Of OCI and Debian."""
    wheel: str
    """Of wheels, and of `uname -m`."""
    libraries: str
    """Folder of its libraries in an image."""
    loader: str


AMD64: Final = Machine("amd64", "x86_64", "usr/lib/x86_64-linux-gnu", "ld-linux-x86-64.so.2")
ARM64: Final = Machine("arm64", "aarch64", "usr/lib/aarch64-linux-gnu", "ld-linux-aarch64.so.1")
MACHINES: Final = {machine.name: machine for machine in (AMD64, ARM64)}
PYTHON: Final = "python3.11"
SITE: Final = f"usr/local/lib/{PYTHON}/dist-packages"
"""Where Debian's Python looks for what is no Debian package."""

PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "system": (
        "base-files", "ca-certificates", "gcc-12-base", "libc6", "libcrypt1", "libgcc-s1", "liblzma5", "libssl3",
        "libstdc++6", "zlib1g",
    ),
    "python": (
        "libbz2-1.0", "libexpat1", "libffi8", "libpython3.11-minimal", "libpython3.11-stdlib", "libuuid1",
        "python3.11-minimal",
    ),
    "redis": (
        "libatomic1", "libcap2", "libgcrypt20", "libgpg-error0", "libhiredis0.14", "libjemalloc2", "liblua5.1-0",
        "liblz4-1", "liblzf1", "libsystemd0", "libzstd1", "lua-bitop", "lua-cjson", "redis-server", "redis-tools",
    ),
    "shell": (
        "coreutils", "dash", "diffutils", "grep", "libacl1", "libattr1", "libgmp10", "libpcre2-8-0", "libselinux1",
    ),
    # What kernels of wheels are compiled with, and what runs them for another machine; no image has these.
    "headers": ("libpython3.11-dev",),
    "emulator": ("qemu-user-static",),
}  # fmt: skip
"""Debian packages of each group; a group is one layer. Nobody installs them, so what maintainers' scripts need (dpkg,
debconf, perl) is not there; that every library is there is checked in every build."""

SUITES: Final = ("bookworm", "bookworm-updates", "bookworm-security")


@dataclass(frozen=True, slots=True)
class Image:
    """One image."""

    name: str
    """Name of its archive, and its key in digests.json."""
    repository: str
    packages: tuple[str, ...]
    """Groups of Debian packages, bottom first."""
    requirements: tuple[str, ...]
    """Files of `requirements/` whose wheels it holds; none for an image without Python."""
    entrypoint: tuple[str, ...]
    bytes_max: int
    """Bound on its unpacked size."""
    tag: str = ""
    """Tag that is no version of kvstrata; empty: that of kvstrata."""
    tag_suffix: str = ""
    absent_libraries: tuple[str, ...] = ()
    """Libraries that parts of its wheels ask for which nothing here uses."""


def _ours(name: str, *more: str, requirements: tuple[str, ...] = (), mib_max: int = 280) -> Image:
    """Return an image of one of our processes."""
    return Image(
        name,
        f"kvstrata/{name}",
        ("system", "python", *more),
        (name, *requirements),
        (f"/usr/local/bin/kvstrata-{name}",),
        mib_max << 20,
    )


_CUDA: Final = ("libcudart.so.12",)
"""What UCX's modules for CUDA want, which it loads where they can be."""
_CUDA_PLUGINS: Final = (
    "libfabric.so.1", "libibverbs.so.1", "libmlx5.so.1", "libmpi.so.40", "liboshmem.so.40", "libpmix.so.2",
    "librdmacm.so.1", "libucp.so.0", "libucs.so.0",
)  # fmt: skip
"""What plugins of NVSHMEM and cuFile want for networks between GPUs; they are loaded when somebody asks for one."""
_FORTRAN: Final = ("libquadmath.so.0",)
"""For a libgfortran that torch brings along and none of its libraries asks for."""
_AGENT: Final = ("/usr/local/bin/kvstrata-agent",)
IMAGES: Final = {
    image.name: image
    for image in (
        _ours("operator"),
        _ours("metadata", "redis"),  # It can run Redis as its child: `redis.mode: Process`.
        Image(
            "agent-cpu",
            "kvstrata/agent",
            ("system", "python"),
            ("agent", "nixl"),
            _AGENT,
            bytes_max=700 * 1000 * 1000,
            absent_libraries=_CUDA,
        ),
        Image(
            "agent-cuda",
            "kvstrata/agent",
            ("system", "python"),
            ("agent-cuda", "nixl"),
            _AGENT,
            bytes_max=8 << 30,
            tag_suffix="-cuda",
            absent_libraries=(*_CUDA, *_CUDA_PLUGINS, *_FORTRAN),
        ),
        Image(
            "redis", "kvstrata/redis", ("system", "redis", "shell"), (), ("/usr/bin/redis-server",), 80 << 20, "7.0.15"
        ),
    )
}
"""Every image by name."""

DEFAULT: Final = tuple(name for name in IMAGES if name != "agent-cuda")
"""What is built unless told otherwise: torch and the CUDA libraries are 5 GB."""


def tag_of(image: Image, version: str) -> str:
    """Tag of an image for this version of kvstrata."""
    return (image.tag or version) + image.tag_suffix

"""A container of an image, made by hand: its layers unpacked, a read-only root, user 65532, no capabilities.

Needs root for the mounts; they live in a namespace of the process and end with it. The network is that of this machine.
"""

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import zstandard

USER = 65532
_SCRIPT = r"""
# This shell stays process 1: what changes its user is not killed with its parent any more, but with process 1.
mount --make-rprivate /
mount --rbind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=755 tmpfs "$1/dev"
for device in null zero urandom random; do touch "$1/dev/$device"; mount --bind /dev/$device "$1/dev/$device"; done
mkdir -m 1777 "$1/dev/shm"
mount --bind /sys "$1/sys"
mount -o remount,bind,ro "$1/sys"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
root=$1; shift
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift
setpriv --no-new-privs \
  --inh-caps=-all --bounding-set=-all,+sys_chroot,+setuid,+setgid -- \
  chroot --userspec=65532:65532 --groups= "$root" "$@"
exit $?
"""


def read_image(archive: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Configuration of an image, and its layers as tars, bottom first; every digest is checked on the way."""
    with tarfile.open(archive) as tar:
        blobs = {Path(m.name).name: m for m in tar if m.name.startswith("blobs/")}

        def blob(digest: str) -> bytes:
            file = tar.extractfile(blobs[digest.removeprefix("sha256:")])
            assert file is not None
            return file.read()

        index_file = tar.extractfile("index.json")
        assert index_file is not None
        manifest = json.loads(blob(json.load(index_file)["manifests"][0]["digest"]))
        config = json.loads(blob(manifest["config"]["digest"]))
        unpacked = zstandard.ZstdDecompressor()
        layers = [unpacked.stream_reader(blob(layer["digest"])).read() for layer in manifest["layers"]]
    return config, layers


class Container:
    """An unpacked image."""

    def __init__(self, archive: Path, root: Path, mounts: Mapping[str, Path] | None = None) -> None:
        """Unpack below `root`; `mounts` has folders by their path in the container; its user owns them."""
        self._root, self._mounts = root, mounts or {}
        image, layers = read_image(archive)
        self.config = image["config"]
        root.mkdir(parents=True)
        root.chmod(0o755)
        for layer in layers:
            with tarfile.open(fileobj=BytesIO(layer)) as tar:
                tar.extractall(root, filter="tar")
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # As every kubelet writes one.
        for inside, folder in self._mounts.items():
            (root / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for path in (folder, *folder.rglob("*")):
                os.chown(path, USER, USER)

    def command(self, *arguments: str | Path, entrypoint: Sequence[str] | None = None) -> list[str]:
        """Command that runs the image's entry point, or another one, with `arguments`."""
        program = self.config["Entrypoint"] if entrypoint is None else entrypoint
        mounts = [word for inside, folder in self._mounts.items() for word in (str(folder), inside)]
        namespaces = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--")
        script = ("sh", "-ec", _SCRIPT, "sh", str(self._root), *mounts, "--")
        return [*namespaces, *script, *program, *map(str, arguments)]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of the image and `more`; the tools that make the container are found by this machine's PATH."""
        own = dict(variable.split("=", 1) for variable in self.config["Env"]) | dict(more or {})
        return own | {"PATH": f"{own['PATH']}:{os.environ['PATH']}"}

    def run(self, *arguments: str, entrypoint: Sequence[str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run to the end."""
        command = self.command(*arguments, entrypoint=entrypoint)
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=240, check=False)

    @contextmanager
    def running(
        self,
        log: Path,
        *arguments: str | Path,
        entrypoint: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Iterator[subprocess.Popen[bytes]]":
        """Run until the block ends; what it says goes to `log`."""
        command = self.command(*arguments, entrypoint=entrypoint)
        with log.open("ab") as file:
            process = subprocess.Popen(command, env=self.environment(environment), stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.kill()  # Everything in its namespace of processes ends with it.
            process.wait()

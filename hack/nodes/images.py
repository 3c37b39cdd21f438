"""The image that holds a pod's namespaces: one static program in an OCI archive. Other images come as archives."""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Final

from nodes.configs import PAUSE_IMAGE
from nodes.errors import UnavailableError

_SOURCE: Final = Path(__file__).with_name("pause.c")
_MEDIA: Final = "application/vnd.oci.image"


def pause_archive(folder: Path) -> Path:
    """Compile and pack the pause image; return the archive. Raises `UnavailableError` without a C compiler."""
    program = folder / "pause"
    try:
        subprocess.run(["cc", "-static", "-Os", "-s", "-o", program, _SOURCE], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        raise UnavailableError(f"the pause image is compiled: `cc -static` failed: {e}") from e
    layer = _tar({"pause": program.read_bytes()})
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _blob("config.v1+json", config),
            "layers": [_blob("layer.v1.tar", layer)],
        }
    )
    named = _blob("manifest.v1+json", manifest) | {"annotations": {"io.containerd.image.name": PAUSE_IMAGE}}
    blobs = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (layer, config, manifest)}
    index = _json({"schemaVersion": 2, "manifests": [named]})
    archive = folder / "pause.tar"
    archive.write_bytes(_tar({"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index, **blobs}))
    return archive


def image_names(archive: Path) -> dict[str, str]:
    """Names and digests of the images of an OCI archive."""
    with tarfile.open(archive) as packed:
        index = packed.extractfile("index.json")
        assert index is not None, "a plain file"
        manifests = json.load(index)["manifests"]
    return {one["annotations"]["io.containerd.image.name"]: one["digest"] for one in manifests}


def _blob(kind: str, content: bytes) -> dict[str, Any]:
    """Describe a blob (OCI image specification, descriptor.md)."""
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _tar(files: dict[str, bytes]) -> bytes:
    """Return an archive of executable files without times or owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()

"""OCI images: manifests, and one as a tar of the OCI image layout, which `ctr images import` and `skopeo` take."""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from images.layers import MEDIA_TYPE, Layer

CREATED: Final = "1970-01-01T00:00:00Z"
"""When every image was made: a time of day would be the only thing that differs between two builds."""
INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
LAYOUT: Final = b'{"imageLayoutVersion":"1.0.0"}'
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image for one kind of machine, and what it is made of."""

    entry: Json
    """Media type, digest, size and platform: what an index says of it."""
    blobs: Mapping[str, bytes]
    """Manifest and configuration, by the hexadecimal digits of their SHA-256."""
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return str(self.entry["digest"])


def manifest(config: Json, layers: Sequence[Layer], architecture: str) -> Manifest:
    """Describe an image; `config` is what a container of it starts with."""
    blobs: dict[str, bytes] = {}
    described = blob(blobs, text(_configuration(config, layers, architecture)), CONFIG)
    parts = [{"mediaType": MEDIA_TYPE, "digest": layer.digest, "size": layer.size_bytes} for layer in layers]
    labels = config["Labels"]
    said = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": parts, "annotations": labels}
    entry = blob(blobs, text(said), MANIFEST)
    return Manifest(entry | {"platform": {"architecture": architecture, "os": "linux"}}, blobs, tuple(layers))


def write(archive: Path, reference: str, image: Manifest) -> None:
    """Write an image to `archive`; `reference` is its full name with host and tag."""
    # containerd takes the whole name from its own annotation, other tools the tag from the standard one.
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    top = {"index.json": text(index([image.entry | {"annotations": names}])), "oci-layout": LAYOUT}
    _write_tar(archive, top, image.blobs, image.layers)


def index(entries: Sequence[Json]) -> Json:
    """Return the index of these."""
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(entries)}


def _configuration(config: Json, layers: Sequence[Layer], architecture: str) -> Json:
    return {
        "architecture": architecture,
        "os": "linux",
        "created": CREATED,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": CREATED, "created_by": f"kvstrata images: {layer.name}"} for layer in layers],
    }


def blob(blobs: dict[str, bytes], content: bytes, media_type: str) -> Json:
    """Put `content` into `blobs` by its digest; returns its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def text(value: Json) -> bytes:
    """Return the JSON of `value`, the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _write_tar(archive: Path, top: Mapping[str, bytes], blobs: Mapping[str, bytes], layers: Sequence[Layer]) -> None:
    files = {layer.digest.removeprefix("sha256:"): layer.blob for layer in layers}
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(top.items(), reverse=True):  # `oci-layout` first: readers of streams look for it.
            _add(tar, name, content)
        for digest in sorted((*blobs, *files)):
            _add(tar, f"blobs/sha256/{digest}", blobs[digest] if digest in blobs else files[digest])


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    if isinstance(content, bytes):
        member.size = len(content)
        tar.addfile(member, BytesIO(content))
        return
    member.size = content.stat().st_size
    with content.open("rb") as file:
        tar.addfile(member, file)

"""A folder in the OCI image layout for one repository: images for several machines, artefacts, signatures.

`oras cp --from-oci-layout FOLDER:TAG HOST/REPOSITORY:TAG` and `skopeo copy oci:FOLDER:TAG docker://...` take it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from images import oci
from release.signing import DSSE, SIGNATURE, SIMPLE_SIGNING, Key, of_image

_HELM_CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
_HELM_CONTENT: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_TAG: Final = "org.opencontainers.image.ref.name"


class Layout:
    """One repository. `close` writes the index; nothing may be added after it."""

    def __init__(self, folder: Path, repository: str) -> None:
        """Make `folder` anew; `repository` is the name that signatures have, without a host."""
        shutil.rmtree(folder, ignore_errors=True)
        self._blobs = folder / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._folder, self._repository = folder, repository
        self._entries: list[oci.Json] = []

    def add_images(self, tag: str, images: Sequence[oci.Manifest], annotations: Mapping[str, str]) -> str:
        """Add the same image for several machines; returns the digest of their index."""
        for image in images:
            for digest, content in image.blobs.items():
                self._put(digest, content)
            for layer in image.layers:
                self._link(layer.digest.removeprefix("sha256:"), layer.blob)
        index = oci.index([image.entry for image in images]) | {"annotations": dict(annotations)}
        return self._tag(tag, oci.text(index), oci.INDEX)

    def add_chart(self, tag: str, chart: Mapping[str, Any], package: bytes, annotations: Mapping[str, str]) -> str:
        """Add a Helm chart, `chart` being its Chart.yaml; returns the digest of its manifest."""
        return self._manifest(tag, oci.text(dict(chart)), _HELM_CONFIG, [(package, _HELM_CONTENT, {})], annotations)

    def sign(self, digest: str, key: Key) -> None:
        """Add cosign's signature of what has `digest`."""
        payload = of_image(self._repository, digest)
        layers = [(payload, SIMPLE_SIGNING, {SIGNATURE: key.sign(payload)})]
        self._manifest(_beside(digest, "sig"), _configuration(payload), oci.CONFIG, layers, {})

    def attest(self, digest: str, envelopes: Sequence[tuple[str, bytes]]) -> None:
        """Add signed statements about what has `digest`: types of predicates and envelopes."""
        layers = [(envelope, DSSE, {SIGNATURE: "", "predicateType": kind}) for kind, envelope in envelopes]
        configuration = _configuration(*(envelope for _, envelope in envelopes))
        self._manifest(_beside(digest, "att"), configuration, oci.CONFIG, layers, {})

    def close(self) -> tuple[str, ...]:
        """Write the index of all that was added; returns the tags."""
        (self._folder / "index.json").write_bytes(oci.text(oci.index(self._entries)))
        (self._folder / "oci-layout").write_bytes(oci.LAYOUT)
        return tuple(entry["annotations"][_TAG] for entry in self._entries)

    def _manifest(
        self,
        tag: str,
        configuration: bytes,
        kind: str,
        layers: Sequence[tuple[bytes, str, Mapping[str, str]]],
        annotations: Mapping[str, str],
    ) -> str:
        described = []
        for content, media_type, noted in layers:
            entry = self._store(content, media_type)
            described.append(entry | {"annotations": dict(noted)} if noted else entry)
        manifest: oci.Json = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "config": self._store(configuration, kind),
            "layers": described,
        }
        return self._tag(
            tag, oci.text(manifest | ({"annotations": dict(annotations)} if annotations else {})), oci.MANIFEST
        )

    def _tag(self, tag: str, content: bytes, media_type: str) -> str:
        entry = self._store(content, media_type)
        self._entries.append(entry | {"annotations": {_TAG: tag}})
        return str(entry["digest"])

    def _store(self, content: bytes, media_type: str) -> oci.Json:
        blobs: dict[str, bytes] = {}
        entry = oci.blob(blobs, content, media_type)
        for digest, stored in blobs.items():
            self._put(digest, stored)
        return entry

    def _put(self, digest: str, content: bytes) -> None:
        (self._blobs / digest).write_bytes(content)

    def _link(self, digest: str, path: Path) -> None:
        """Several repositories have the same layers: on one file system they are there once."""
        target = self._blobs / digest
        if target.exists():
            return
        try:
            os.link(path, target)
        except OSError:  # Another file system.
            shutil.copyfile(path, target)


def _beside(digest: str, what: str) -> str:
    """Tag under which cosign looks for what belongs to a digest."""
    return f"{digest.replace(':', '-')}.{what}"


def _configuration(*payloads: bytes) -> bytes:
    """Configuration of an image of nothing, as cosign gives signatures one."""
    diff_ids = [f"sha256:{hashlib.sha256(payload).hexdigest()}" for payload in payloads]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    said = {"architecture": "", "config": {}, "created": oci.CREATED, "history": [], "os": "", "rootfs": rootfs}
    return json.dumps(said, separators=(",", ":")).encode()

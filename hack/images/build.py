"""Builds images: observe the pins, make each layer once, write every image that is of these layers."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from images import bill, closure, contents, debian, oci, wheels
from images.catalog import IMAGES, USER_ID, Image, tag_of
from images.debian import Pin
from images.layers import Layer, pack
from images.wheels import Wheel

HOST: Final = "docker.io"
"""What kubelet and containerd put before the name of an image that names no host."""
_PATH: Final = "/usr/local/bin:/usr/bin"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A finished image; what `digests.json` says of it."""

    reference: str
    """Name and tag as the chart writes them."""
    repository: str
    tag: str
    digest: str
    """Of the manifest: what a Pod names."""
    archive: str
    archive_bytes: int
    unpacked_bytes: int
    bytes_max: int
    layers: tuple[str, ...]
    """Digests, bottom first."""
    bill: str


class Builder:
    """Makes layers below a folder that the caller removes; a layer that two images have is made once."""

    def __init__(self, work: Path, out: Path, say: Say, sources: Sequence[str] | None = None) -> None:
        """Work in `work`, leave archives in `out`; `sources` are lines of apt for versions the mirror lacks."""
        self._work, self._out, self._say, self._sources = work, out, say, sources
        self._pins = debian.read_pins()
        self._layers: dict[str, Layer] = {}
        self._wheels: dict[tuple[str, ...], list[Wheel]] = {}
        (work / "wheel").mkdir(parents=True)
        self._product = wheels.of_this_tree(work / "wheel")

    def build(self, image: Image, host: str) -> Built:
        """Make one image; `ImageError` when it lacks a library, grew beyond its bound or could not be made."""
        layers = [*self._debian_layers(image), *self._python_layers(image)]
        closure.check(image.name, layers, image.absent_libraries)
        tag = tag_of(image, self._product.version)
        archive = self._out / f"{image.name}.tar"
        digest = oci.write(archive, f"{host}/{image.repository}:{tag}", self._config(image, tag), layers)
        listed = self._out / f"{image.name}.cdx.json"
        listed.write_text(bill.write(image.repository, tag, digest, self._debs(image), self._all_wheels(image)))
        return Built(
            f"{image.repository}:{tag}",
            image.repository,
            tag,
            digest,
            archive.name,
            archive.stat().st_size,
            sum(layer.unpacked_bytes for layer in layers),
            image.bytes_max,
            tuple(layer.digest for layer in layers),
            listed.name,
        )

    def _config(self, image: Image, tag: str) -> oci.Json:
        labels = {
            "org.opencontainers.image.title": f"kvstrata {image.name}",
            "org.opencontainers.image.version": tag,
            "org.opencontainers.image.licenses": "Apache-2.0" if image.requirements else "BSD-3-Clause",
        }
        environment = [f"PATH={_PATH}", "LANG=C.UTF-8", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"]
        return {
            "User": f"{USER_ID}:{USER_ID}",
            "Entrypoint": list(image.entrypoint),
            "Env": environment + ["PYTHONUNBUFFERED=1"] * bool(image.requirements),
            "WorkingDir": "/",
            "Labels": labels,
        }

    def _debs(self, image: Image) -> list[Pin]:
        return [pin for group in image.packages for pin in self._pins[group]]

    def _debian_layers(self, image: Image) -> list[Layer]:
        return [self._layer(group, partial(self._unpack, group)) for group in image.packages]

    def _unpack(self, group: str, root: Path) -> None:
        contents.debian(root, group, debian.fetch(self._pins[group], self._sources))
        if group == "python":
            contents.standard_library(root, [self._layers["system"].root, root])

    def _python_layers(self, image: Image) -> list[Layer]:
        if not image.requirements:
            return []
        python = [self._layers[group].root for group in ("system", "python")]
        found = self._required(image)
        name = "wheels of " + ", ".join(image.requirements)
        return [
            self._layer(name, lambda root: contents.wheels(root, found, python)),
            self._layer("kvstrata", lambda root: contents.product(root, self._product, python)),
        ]

    def _required(self, image: Image) -> list[Wheel]:
        if image.requirements not in self._wheels:
            self._wheels[image.requirements] = wheels.of_requirements(image.requirements)
        return self._wheels[image.requirements]

    def _all_wheels(self, image: Image) -> list[Wheel]:
        return [*self._required(image), self._product] if image.requirements else []

    def _layer(self, name: str, fill: Callable[[Path], None]) -> Layer:
        if name not in self._layers:
            root = self._work / "roots" / str(len(self._layers))
            root.mkdir(parents=True)
            fill(root)
            self._layers[name] = pack(name, root, self._work / f"{len(self._layers)}.tar.zst")
            self._say(f"layer {name}: {self._layers[name].unpacked_bytes / 1e6:.0f} MB")
        return self._layers[name]


def build(names: Iterable[str], builder: Builder, out: Path, host: str = HOST) -> dict[str, Built]:
    """Make the named images, then `digests.json` and the chart's `values.json` for all that lie in `out`."""
    built = {name: builder.build(IMAGES[name], host) for name in names}
    there = _earlier(out) | built
    _write(out / "digests.json", {name: asdict(there[name]) for name in sorted(there)})
    _write(out / "values.json", chart_values(there))
    return built


def _earlier(out: Path) -> dict[str, Built]:
    """What earlier builds have left."""
    listed = out / "digests.json"
    said = json.loads(listed.read_text()) if listed.exists() else {}
    found = {name: Built(**{**image, "layers": tuple(image["layers"])}) for name, image in said.items()}
    return {name: image for name, image in found.items() if (out / image.archive).exists()}


def chart_values(built: dict[str, Built]) -> oci.Json:
    """Values that make the chart run these images, by digest."""
    parts = {"operator": "operator", "metadata": "metadata", "agent-cpu": "agent", "redis": "redis"}
    return {
        part: {"image": {"repository": built[name].repository, "tag": built[name].tag, "digest": built[name].digest}}
        for name, part in parts.items()
        if name in built
    }


def _write(path: Path, value: oci.Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

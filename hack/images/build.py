"""Builds images: observe the pins, make each layer once, write every image that is of these layers."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from images import bill, closure, contents, debian, oci, wheels
from images.catalog import AMD64, IMAGES, USER_ID, Image, Machine, tag_of
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


@dataclass(frozen=True, slots=True)
class Made:
    """One image for one kind of machine, before it is written anywhere."""

    image: Image
    tag: str
    manifest: oci.Manifest
    bill: str
    """CycloneDX bill of materials, as JSON."""

    @property
    def unpacked_bytes(self) -> int:
        """Of all files in it."""
        return sum(layer.unpacked_bytes for layer in self.manifest.layers)


class Builder:
    """Makes layers below a folder that the caller removes; a layer that two images have is made once."""

    def __init__(
        self,
        work: Path,
        out: Path,
        say: Say,
        sources: Sequence[str] | None = None,
        products: Mapping[str, Wheel] | None = None,
    ) -> None:
        """Work in `work`, leave archives in `out`; `sources` are lines of apt for versions the mirror lacks.

        `products` are our wheels by the name of the machine; without them this tree's is built, for this machine.
        """
        self._work, self._out, self._say, self._sources = work, out, say, sources
        self._layers: dict[tuple[Machine, str], Layer] = {}
        self._wheels: dict[tuple[Machine, tuple[str, ...]], list[Wheel]] = {}
        (work / "wheel").mkdir(parents=True)
        self._products = products or {AMD64.name: wheels.of_this_tree(work / "wheel")}

    def build(self, image: Image, host: str) -> Built:
        """Make one image for x86-64 and write it as an archive, with its bill of materials; `ImageError`."""
        made = self.make(image)
        archive = self._out / f"{image.name}.tar"
        oci.write(archive, f"{host}/{image.repository}:{made.tag}", made.manifest)
        listed = self._out / f"{image.name}.cdx.json"
        listed.write_text(made.bill)
        return Built(
            f"{image.repository}:{made.tag}",
            image.repository,
            made.tag,
            made.manifest.digest,
            archive.name,
            archive.stat().st_size,
            made.unpacked_bytes,
            image.bytes_max,
            tuple(layer.digest for layer in made.manifest.layers),
            listed.name,
        )

    def make(self, image: Image, machine: Machine = AMD64) -> Made:
        """Make the layers of one image for `machine`; `ImageError` when it lacks a library or could not be made."""
        layers = [*self._debian_layers(image, machine), *self._python_layers(image, machine)]
        closure.check(image.name, layers, image.absent_libraries)
        tag = tag_of(image, self._products[machine.name].version)
        manifest = oci.manifest(self._config(image, tag), layers, machine.name)
        found = [*self._required(image, machine), self._products[machine.name]] if image.requirements else []
        debs = [pin for group in image.packages for pin in debian.read_pins(machine)[group]]
        listed = bill.write(f"{image.repository}:{tag}", manifest.digest, machine, debs, found)
        return Made(image, tag, manifest, listed)

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

    def _debian_layers(self, image: Image, machine: Machine) -> list[Layer]:
        return [self._debian_layer(group, machine) for group in image.packages]

    def _debian_layer(self, group: str, machine: Machine) -> Layer:
        return self._layer(machine, group, partial(self._unpack, group, machine))

    def _unpack(self, group: str, machine: Machine, root: Path) -> None:
        contents.debian(root, group, debian.fetch(debian.read_pins(machine)[group], self._sources, machine))
        if group == "python":
            # The interpreter for x86-64 compiles for all; its own standard library before that layer is finished.
            python = [self._debian_layer("system", AMD64).root, root] if machine == AMD64 else self._interpreter()
            contents.standard_library(root, python)

    def _interpreter(self) -> list[Path]:
        return [self._debian_layer(group, AMD64).root for group in ("system", "python")]

    def _python_layers(self, image: Image, machine: Machine) -> list[Layer]:
        if not image.requirements:
            return []
        python, found = self._interpreter(), self._required(image, machine)
        name = "wheels of " + ", ".join(image.requirements)
        product = self._products[machine.name]
        return [
            self._layer(machine, name, lambda root: contents.wheels(root, found, python)),
            self._layer(machine, "kvstrata", lambda root: contents.product(root, product, python)),
        ]

    def _required(self, image: Image, machine: Machine) -> list[Wheel]:
        key = (machine, image.requirements)
        if key not in self._wheels:
            self._wheels[key] = wheels.of_requirements(image.requirements, machine)
        return self._wheels[key]

    def _layer(self, machine: Machine, name: str, fill: Callable[[Path], None]) -> Layer:
        key = (machine, name)
        if key not in self._layers:
            root = Path(tempfile.mkdtemp(prefix="root-", dir=self._work))
            fill(root)
            self._layers[key] = pack(name, root, root.with_suffix(".tar.zst"))
            self._say(f"layer {name} for {machine.name}: {self._layers[key].unpacked_bytes / 1e6:.0f} MB")
        return self._layers[key]


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

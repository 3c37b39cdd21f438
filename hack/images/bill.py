"""CycloneDX bill of materials of one image: its Debian packages and wheels with their hashes, and what these pack."""

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from zipfile import ZipFile

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

import page_build
from images.catalog import Machine
from images.debian import Pin
from images.wheels import Wheel

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def write(name: str, digest: str, machine: Machine, pins: Iterable[Pin], found: Iterable[Wheel]) -> str:
    """JSON of the bill of the image `name`, `REPOSITORY:TAG`; the same image gives the same bytes."""
    repository, _, tag = name.partition(":")
    where = {"tag": tag, "arch": machine.name}
    image = _component(PackageURL("oci", None, repository.rpartition("/")[2], digest, where), digest[7:])
    image.type = ComponentType.CONTAINER
    wheels = tuple(found)
    parts = [
        *(_of_debian(pin, machine) for pin in pins),
        *map(_of_wheel, wheels),
        *(part for wheel in wheels for part in _packed(wheel)),
    ]
    serial = uuid.uuid5(uuid.NAMESPACE_OID, f"{repository}@{digest}")
    bom = Bom(components=parts, serial_number=serial, metadata=BomMetaData(component=image, timestamp=_EPOCH))
    bom.register_dependency(image, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _of_debian(pin: Pin, machine: Machine) -> Component:
    upstream = {"arch": machine.name, "distro": "debian-12"} | (
        {"upstream": pin.source} if pin.source != pin.name else {}
    )
    return _component(PackageURL("deb", "debian", pin.name, pin.version, upstream), pin.sha256)


def _of_wheel(wheel: Wheel) -> Component:
    return _component(PackageURL("pypi", None, wheel.name, wheel.version), wheel.sha256)


def _packed(wheel: Wheel) -> Iterator[Component]:
    """The chart library of our page, where our wheel has it."""
    with ZipFile(wheel.path) as archive:
        for name in page_build.FILES.values():
            packed = f"kvstrata_ui/page/vendor/{name}"
            if name.endswith(".js") and packed in archive.namelist():
                purl = PackageURL("npm", None, page_build.NAME, page_build.VERSION)
                yield _component(purl, hashlib.sha256(archive.read(packed)).hexdigest())


def _component(purl: PackageURL, sha256: str) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
    return Component(name=purl.name, version=purl.version, purl=purl, bom_ref=str(purl), hashes=hashes)

"""`python -m release`: makes everything of a release in build/release/VERSION, and publishes nothing.

Wheels for x86-64 and aarch64, a source distribution, images for both in OCI layouts, the chart as a file and as an
artefact, bills of materials, provenance, and signatures where a key is given. Made from the commit that is checked out;
two builds of one commit have the same bytes.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from checks import sbom
from controlplane.cache import sha256_of
from images import wheels
from images.build import Builder, Made
from images.catalog import DEFAULT, IMAGES, MACHINES
from images.errors import ImageError
from release import files
from release.errors import ReleaseError
from release.layout import Layout
from release.signing import KEY, Key
from release.statements import BILL, BY_HAND, PROVENANCE, SOURCE, Build, provenance, statement

PARTS: Final = ("wheels", "sdist", "images", "chart")
_PRODUCT: Final = ("agent", "agent-cuda", "cli", "client", "metadata", "nixl", "operator")
"""Requirement files of what users install."""
_CHART_NAMES: Final = {"kvstrata/redis": "redis"}
"""Repositories of images that the chart's values name otherwise: theirs is the one that everybody has."""


class Release:
    """One release while it is made: what it is from, where it goes, and what is there by now."""

    def __init__(self, given: argparse.Namespace, parts: Sequence[str], key: Key | None, work: Path) -> None:
        """Export the commit below `work`, which the caller removes; `ReleaseError` when that cannot be released."""
        self._parts, self._key, self._work = parts, key, work
        commit, self._epoch_s = files.commit(may_differ=given.trial)
        self._tree = work / "tree"
        files.export(commit, self._tree)
        self.version = files.version_of(self._tree, is_trial=given.trial)
        self.out = given.out or files.ROOT / "build" / "release" / self.version
        make_anew(self.out, is_ours=given.out is None)
        pins = [*files.PINS, *(f"requirements/{name}.txt" for name in ("agent", "metadata", "nixl", "operator"))]
        self._build = Build(
            self.version,
            commit,
            self._epoch_s,
            tuple(parts),
            {path: sha256_of(self._tree / path) for path in pins},
            given.builder_id,
        )
        self._wheels: dict[str, wheels.Wheel] = {}
        self._images: dict[str, str] = {}

    def make(self) -> None:
        """Make all parts, then what is said of them; `ReleaseError`, `ImageError`."""
        for machine in MACHINES if {"wheels", "images"} & set(self._parts) else ():
            self._wheel(machine)
        if "sdist" in self._parts:
            _say("source distribution")
            files.source_distribution(self._tree, self.out, self._epoch_s)
        named = self._make_images() if "images" in self._parts else {}
        if "chart" in self._parts:
            self._chart(named)
        self._say_what_it_is()

    def _wheel(self, machine: str) -> None:
        _say(f"wheel for {machine}")
        where = self.out if "wheels" in self._parts else self._work
        self._wheels[machine] = wheels.described(files.wheel(self._tree, where, MACHINES[machine], self._epoch_s))

    def _make_images(self) -> dict[str, dict[str, str]]:
        """Make all images in one layout for each repository; returns what the chart's values say of them."""
        # On the file system of the result: layers are linked there, not copied.
        with tempfile.TemporaryDirectory(dir=self.out, prefix=".layers-") as work:
            builder = Builder(Path(work, "build"), self.out, _say, products=self._wheels)
            named: dict[str, dict[str, str]] = {}
            for image in (IMAGES[name] for name in DEFAULT):
                made = [builder.make(image, machine) for machine in MACHINES.values()]
                digest = self._lay_out(made)
                name = _CHART_NAMES.get(image.repository, image.repository)
                named[name] = {"repository": image.repository, "tag": made[0].tag, "digest": digest}
                _say(f"image {image.repository}:{made[0].tag} {digest}")
            return named

    def _lay_out(self, made: Sequence[Made]) -> str:
        image, tag = made[0].image, made[0].tag
        layout = Layout(self.out / "oci" / image.repository.rpartition("/")[2], image.repository)
        digest = layout.add_images(
            tag, [one.manifest for one in made], self._annotations(f"kvstrata {image.name}", tag)
        )
        bills = self.out / "sbom"
        bills.mkdir(exist_ok=True)
        for one, machine in zip(made, MACHINES, strict=True):
            (bills / f"image-{image.name}-{machine}.cdx.json").write_text(one.bill)
        self._sign(layout, image.repository, digest, [one.bill for one in made])
        self._images[f"{image.repository}:{tag}"] = digest
        return digest

    def _chart(self, named: dict[str, dict[str, str]]) -> None:
        _say("chart" if named else "chart, without digests of images: they are not made in this run")
        package = files.chart(self._tree, self.out, named, self._epoch_s)
        layout = Layout(self.out / "oci" / "charts" / "kvstrata", "kvstrata/charts/kvstrata")
        noted = self._annotations("kvstrata", self.version)
        digest = layout.add_chart(self.version, files.chart_metadata(self._tree), package.read_bytes(), noted)
        self._sign(layout, "kvstrata/charts/kvstrata", digest, ())
        self._images[f"kvstrata/charts/kvstrata:{self.version}"] = digest

    def _sign(self, layout: Layout, repository: str, digest: str, bills: Sequence[str]) -> None:
        if self._key is not None:
            layout.sign(digest, self._key)
            subject = {repository: digest.removeprefix("sha256:")}
            said = [(PROVENANCE, statement(subject, PROVENANCE, provenance(self._build)))]
            said += [(BILL, statement(subject, BILL, sbom.parsed(listed))) for listed in bills]
            layout.attest(digest, [(kind, self._key.envelope(one)) for kind, one in said])
        layout.close()

    def _annotations(self, title: str, version: str) -> dict[str, str]:
        return {
            "org.opencontainers.image.title": title,
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.source": SOURCE,
            "org.opencontainers.image.revision": self._build.commit,
            "org.opencontainers.image.licenses": "Apache-2.0",
        }

    def _say_what_it_is(self) -> None:
        """Write notes, bills, provenance and checksums, and sign them."""
        (self.out / "NOTES.md").write_text(files.notes(self._tree, self.version))
        if "wheels" in self._parts:
            sbom.write(self.out / "sbom", _PRODUCT)
        made = {str(path.relative_to(self.out)): sha256_of(path) for path in self._files()}
        about = made | {name: digest.removeprefix("sha256:") for name, digest in self._images.items()}
        said = statement(about, PROVENANCE, provenance(self._build))
        (self.out / "provenance.json").write_bytes(said)
        (self.out / "IMAGES").write_text("".join(f"{name}@{digest}\n" for name, digest in sorted(self._images.items())))
        if self._key is not None:
            (self.out / "provenance.dsse.json").write_bytes(self._key.envelope(said))
        sums = {str(path.relative_to(self.out)): sha256_of(path) for path in self._files()}
        (self.out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        if self._key is None:
            _say(f"NOT SIGNED: no --key and no ${KEY}")
            return
        for path in (*self.out.glob("kvstrata-*"), self.out / "SHA256SUMS"):
            path.with_name(f"{path.name}.sig").write_text(self._key.sign(path.read_bytes()))
        (self.out / "cosign.pub").write_bytes(self._key.public)

    def _files(self) -> list[Path]:
        """Files of the release but for the layouts, whose blobs are named by their digests."""
        found = (path for path in self.out.rglob("*") if path.is_file())
        return sorted(path for path in found if path.relative_to(self.out).parts[0] != "oci")


def make_anew(out: Path, *, is_ours: bool) -> None:
    """Make an empty folder; `ReleaseError` where somebody else's files would go, `is_ours` saying that they are not."""
    if not is_ours and out.exists() and any(out.iterdir()) and not (out / "SHA256SUMS").exists():
        raise ReleaseError(f"{out} has something else than a release in it")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _say(line: str) -> None:
    print(f"[release] {time.monotonic() - _BEGAN_S:5.0f} s  {line}", file=sys.stderr, flush=True)


_BEGAN_S: Final = time.monotonic()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of %(default)s, by commas")
    parser.add_argument("--out", type=Path, help="default: build/release/VERSION; it is made anew")
    parser.add_argument(
        "--key", type=Path, help=f"ECDSA key on P-256 in PEM that signs (default: ${KEY}); RELEASING.md"
    )
    parser.add_argument("--builder-id", default=BY_HAND, metavar="URI", help="who builds, for the provenance")
    parser.add_argument("--trial", action="store_true", help="go on where the tree differs from its commit")
    return parser


def main() -> int:
    """Make a release; 0 when all of it is there, 1 when something could not be made, 2 for wrong usage."""
    parser = _parser()
    given = parser.parse_args()
    parts = [part for part in PARTS if part in given.only.split(",")]
    if unknown := sorted(set(given.only.split(",")) - set(PARTS)):
        parser.error(f"--only: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    key = given.key or (Path(os.environ[KEY]) if os.environ.get(KEY) else None)
    try:
        signing = Key.read(key) if key else None
        with tempfile.TemporaryDirectory(prefix="kvstrata-release-") as work:
            making = Release(given, parts, signing, Path(work))
            making.make()
    except (ReleaseError, ImageError) as e:
        _say(str(e))
        return 1
    _say(f"kvstrata {making.version} is in {making.out}; nothing was published (RELEASING.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A release's parts that need no build: values with digests, statements, signatures, layouts."""

import base64
import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from images import oci
from release import files, signing, statements
from release.__main__ import PARTS, make_anew
from release.__main__ import main as release_main
from release.errors import ReleaseError
from release.layout import Layout
from release.signing import Key

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
VALUES = (ROOT / "charts/kvstrata/values.yaml").read_text()
DIGEST = "sha256:" + "1" * 64
IMAGES = {
    name: {"repository": name if name != "redis" else "kvstrata/redis", "tag": "9.9.9", "digest": DIGEST}
    for name in ("kvstrata/operator", "kvstrata/metadata", "kvstrata/agent", "redis")
}
BUILD = statements.Build("9.9.9", "c" * 40, 1_000_000_000, PARTS, {"requirements/agent.txt": "a" * 64})


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return key_at(tmp_path / "key.pem")


def key_at(path: Path) -> Key:
    private = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Key.read(path)


def verified(key: Key, message: bytes, signature: str, at: Path) -> bool:
    """What openssl, which did not sign, says of a signature."""
    (at / "message").write_bytes(message)
    (at / "signature").write_bytes(base64.b64decode(signature))
    (at / "public.pem").write_bytes(key.public)
    command = ("openssl", "dgst", "-sha256", "-verify", "public.pem", "-signature", "signature", "message")
    return subprocess.run(command, cwd=at, capture_output=True, check=False).returncode == 0


def test_every_image_of_ours_in_the_chart_s_values_gets_its_digest_and_nothing_else_changes() -> None:
    before, after = yaml.safe_load(VALUES), yaml.safe_load(files.with_digests(VALUES, IMAGES))

    named = {part: after[part]["image"] for part in ("operator", "metadata", "agent", "redis", "nodePreparation")}
    assert {image["digest"] for image in named.values()} == {DIGEST}
    assert named["redis"]["repository"] == "kvstrata/redis"
    assert named["nodePreparation"]["repository"] == "kvstrata/agent"
    for part in named:
        after[part]["image"] = before[part]["image"]
    assert after == before
    comments = [
        [line for line in text.splitlines() if "#" in line] for text in (VALUES, files.with_digests(VALUES, IMAGES))
    ]
    assert comments[0] == comments[1]


def test_values_of_the_chart_that_lack_an_image_are_refused() -> None:
    with pytest.raises(ReleaseError, match="no image kvstrata/other"):
        files.with_digests(VALUES, IMAGES | {"kvstrata/other": IMAGES["redis"]})


def test_every_file_with_a_version_has_the_same_and_the_changelog_a_heading_for_it() -> None:
    version = files.version_of(ROOT, is_trial=True)

    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
    assert "### " in files.notes(ROOT, version)


@pytest.mark.parametrize(
    ("changelog", "refused"),
    [
        ("## Unreleased\n\n## 9.9.9\n- x\n", None),
        ("## Unreleased\n- y\n- z\n\n## 9.9.9\n- x\n", "2 entries under Unreleased: they go to 9.9.9"),
        ("## Unreleased\n- y\n\n## 9.9.90\n- x\n", "no heading for 9.9.9"),
    ],
)
def test_a_version_is_released_with_its_own_notes_alone(tmp_path: Path, changelog: str, refused: str | None) -> None:
    tree(tmp_path, changelog)

    if refused is None:
        assert files.version_of(tmp_path) == "9.9.9"
        assert files.notes(tmp_path, "9.9.9") == "- x\n"
    else:
        with pytest.raises(ReleaseError, match=refused):
            files.version_of(tmp_path)


def test_versions_that_differ_are_named(tmp_path: Path) -> None:
    tree(tmp_path, "## 9.9.9\n- x\n")
    (tmp_path / "crds/kvstrata_api/__init__.py").write_text('__version__ = "9.9.8"\n')

    with pytest.raises(ReleaseError, match=r"crds/kvstrata_api/__init__.py 9.9.8"):
        files.version_of(tmp_path)


def tree(at: Path, changelog: str) -> None:
    for folder in ("charts/kvstrata", "crds/kvstrata_api"):
        (at / folder).mkdir(parents=True)
    (at / "CHANGELOG.md").write_text(changelog)
    (at / "pyproject.toml").write_text('version = "9.9.9"\n')
    (at / "crds/kvstrata_api/__init__.py").write_text('__version__ = "9.9.9"\n')
    (at / "charts/kvstrata/Chart.yaml").write_text('version: 9.9.9\nappVersion: "9.9.9"\n')


def test_a_signature_is_the_same_each_time_and_openssl_takes_it_for_these_bytes_alone(key: Key, tmp_path: Path) -> None:
    signature = key.sign(b"kvstrata")

    assert signature == key.sign(b"kvstrata")
    assert verified(key, b"kvstrata", signature, tmp_path)
    assert not verified(key, b"kvstrate", signature, tmp_path)
    assert not verified(key_at(tmp_path / "other.pem"), b"kvstrata", signature, tmp_path)


def test_a_key_that_cosign_would_not_take_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    with pytest.raises(ReleaseError, match="an ECDSA key on P-256 is wanted"):
        Key.read(path)
    with pytest.raises(ReleaseError, match="No such file"):
        Key.read(tmp_path / "none.pem")


def test_an_envelope_has_a_statement_about_every_subject_and_openssl_takes_its_signature(
    key: Key, tmp_path: Path
) -> None:
    predicate = statements.provenance(BUILD)
    said = statements.statement({"b.whl": "b" * 64, "a.whl": "a" * 64}, statements.PROVENANCE, predicate)
    envelope = json.loads(key.envelope(said))
    inside = base64.b64decode(envelope["payload"])

    assert inside == said
    statement: dict[str, Any] = json.loads(inside)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0] == {"name": "a.whl", "digest": {"sha256": "a" * 64}}
    assert [entry["name"] for entry in statement["subject"]] == ["a.whl", "b.whl"]
    sources = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert sources[0]["digest"] == {"gitCommit": BUILD.commit}
    kind = envelope["payloadType"]
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(inside), inside)  # The specification's own words.
    assert verified(key, signed, envelope["signatures"][0]["sig"], tmp_path)
    assert not verified(key, inside, envelope["signatures"][0]["sig"], tmp_path)


def test_a_statement_about_nothing_is_refused() -> None:
    with pytest.raises(ReleaseError, match="about nothing"):
        statements.statement({}, statements.PROVENANCE, {})


def manifests() -> list[oci.Manifest]:
    config = {"Labels": {"org.opencontainers.image.version": "9.9.9"}}
    return [oci.manifest(config, [], architecture) for architecture in ("amd64", "arm64")]


def stored(folder: Path, digest: str) -> Any:
    content = (folder / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
    assert "sha256:" + hashlib.sha256(content).hexdigest() == digest
    return json.loads(content)


def test_a_layout_has_one_index_for_all_machines_and_signatures_where_cosign_looks(key: Key, tmp_path: Path) -> None:
    folder = tmp_path / "operator"
    layout = Layout(folder, "kvstrata/operator")
    digest = layout.add_images("9.9.9", manifests(), {"a": "b"})
    layout.sign(digest, key)
    layout.attest(digest, [(statements.PROVENANCE, b"{}")])
    tags = layout.close()

    beside = digest.replace(":", "-")
    assert tags == ("9.9.9", f"{beside}.sig", f"{beside}.att")
    named = stored_index(folder)
    machines = stored(folder, named["9.9.9"])["manifests"]
    assert [entry["platform"]["architecture"] for entry in machines] == ["amd64", "arm64"]
    configurations = [stored(folder, entry["digest"])["config"]["digest"] for entry in machines]
    assert [stored(folder, digest)["architecture"] for digest in configurations] == ["amd64", "arm64"]
    (layer,) = stored(folder, named[f"{beside}.sig"])["layers"]
    payload = stored(folder, layer["digest"])
    assert payload["critical"]["image"] == {"docker-manifest-digest": digest}
    message = (folder / "blobs/sha256" / layer["digest"].removeprefix("sha256:")).read_bytes()
    assert verified(key, message, layer["annotations"][signing.SIGNATURE], tmp_path)
    (attested,) = stored(folder, named[f"{beside}.att"])["layers"]
    assert attested["mediaType"] == "application/vnd.dsse.envelope.v1+json"


def stored_index(folder: Path) -> dict[str, str]:
    assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    entries = json.loads((folder / "index.json").read_text())["manifests"]
    return {entry["annotations"]["org.opencontainers.image.ref.name"]: entry["digest"] for entry in entries}


def test_a_layout_of_the_same_is_the_same(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        layout = Layout(tmp_path / name, "kvstrata/operator")
        layout.add_images("9.9.9", manifests(), {})
        layout.close()
        made.append((tmp_path / name / "index.json").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("only", ["wheel", "wheels,", "images,charts"])
def test_a_part_that_there_is_none_of_is_wrong_usage(
    only: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["release", "--only", only])

    with pytest.raises(SystemExit, match="2"):
        release_main()
    assert "there are wheels, sdist, images, chart" in capsys.readouterr().err


def test_a_folder_with_somebody_s_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ReleaseError, match="something else than a release"):
        make_anew(tmp_path, is_ours=False)
    assert (tmp_path / "thesis.tex").exists()

    (tmp_path / "SHA256SUMS").write_text("")
    make_anew(tmp_path, is_ours=False)
    assert list(tmp_path.iterdir()) == []

"""Command that collects what somebody who helps needs to see: support-bundle.

It reads no Secret. What could be one elsewhere is taken out by `redacted` and `redacted_text` before it is written.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstrata_api import __version__, names
from kvstrata_api.errors import KvStrataError
from kvstrata_api.units import format_rounded
from kvstrata_client.commands import agent, doctor, fleet, kubectl, output, status
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.output import UsageError, table

Json = dict[str, Any]

REDACTED: Final = "REDACTED"
PODS_MAX: Final = 40
"""Pods whose logs are taken: those of the operator and the metadata service, then agents with findings, then others."""
LINES_MAX: Final = 100_000
_OBJECTS: Final = (*doctor.PARTS, "daemonsets.apps", "statefulsets.apps", "events")
_DROPPED: Final = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
_DIGESTS: Final = ("digest", "prefixes")
"""Fields with digests of prefixes: whoever guesses a prompt could check the guess."""
_IDS: Final = ("machineID", "systemUUID", "bootID")
_TOKENS: Final = re.compile(
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # A JSON web token.
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"  # User and password of a URL.
    r"|(?i:(?<=bearer )|(?<=password=)|(?<=token=)|(?<=secret=))[^\s\"',;]+"
)


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.description = (
        "Writes one archive: our objects, pods, events and logs of the release, what status and doctor say, and, with "
        "--metadata and --pool, the fleet and the node's agent. It reads no Secret, and takes tokens, passwords, "
        "values of environment variables and digests of prefixes out. Look into it before you send it to somebody. "
        "What cannot be had is named in it. Exit status: 0 when the archive is written, 1 otherwise, 2 for wrong usage."
    )
    found.epilog = "example: kvstrata support-bundle --out bundle.tar.gz"
    kubectl.add_release_options(found)
    found.add_argument("--out", type=Path, metavar="FILE", help="default: kvstrata-bundle-TIME.tar.gz here")
    found.add_argument("--lines", type=int, default=2_000, help="of each container's log; default: %(default)s")
    found.add_argument("--metadata", default="", metavar="HOST:PORT", help="a metadata service, for the fleet")
    agent.target_options(found)
    output.add_option(found, names="files of the archive")
    found.set_defaults(run=_bundle, missing=None)  # Of the agent only where one is named.


def _bundle(given: argparse.Namespace) -> int:
    """Write the archive, and print what is in it."""
    if not 1 <= given.lines <= LINES_MAX:
        raise UsageError(f"--lines {given.lines}: 1 to {LINES_MAX} wanted")
    now = datetime.now(UTC)
    out = given.out or Path(f"kvstrata-bundle-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    cluster = Kubectl.of(given, "it asks the cluster")
    files = collected(_pieces(cluster, given), now)
    try:
        write(out, files, now)
    except OSError as e:
        raise UsageError(f"--out {out}: {e}") from e
    sizes = {name: len(content) for name, content in files.items()}
    lines = [*table(("FILE", "SIZE"), [(name, format_rounded(size)) for name, size in sizes.items()]), "", f"{out}"]
    output.show(given.output, {"archive": str(out), "files": sizes}, lines, sizes)
    return 0


def _pieces(cluster: Kubectl, given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name of each file, and what makes its content: JSON's types, or text."""
    seen: list[doctor.Seen] = []

    def overview() -> Json:
        seen.append(doctor.observe(cluster, given.namespace))
        return status.overview(seen[0])

    def findings() -> list[Json]:
        return [asdict(one) for one in doctor.findings(seen[0])] if seen else []

    yield "version.json", lambda: {"kvstrata": __version__, "kubectl": cluster.json("version", "--output=json")}
    yield "status.json", overview
    yield "findings.json", findings
    for plural in doctor.OURS:
        yield f"objects/{plural}.json", partial(_items, cluster, plural, "--all-namespaces")
    for plural in _OBJECTS:
        yield f"objects/{plural}.json", partial(_items, cluster, plural, f"--namespace={given.namespace}")
    yield "objects/nodes.json", lambda: [_node(node) for node in cluster.get("nodes")["items"]]
    for pod in chosen(seen[0]) if seen else ():
        words = ("logs", pod, f"--namespace={given.namespace}", "--all-containers", "--prefix", f"--tail={given.lines}")
        yield f"logs/{pod}.log", partial(cluster.text, *words)
        yield f"logs/{pod}.previous.log", partial(cluster.text, *words, "--previous")
    if given.metadata:
        yield "fleet.json", partial(fleet.read, given.metadata)
    if given.pool or given.socket:
        yield "agent.json", partial(_stats, given)


def _items(cluster: Kubectl, *words: str) -> list[Json]:
    found: list[Json] = cluster.get(*words)["items"]
    return found


def collected(pieces: Iterator[tuple[str, Callable[[], Any]]], now: datetime) -> dict[str, bytes]:
    """Content of every file; `missing.json` names those that could not be had, and why."""
    files: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    for name, make in pieces:
        try:
            made = make()
        except KvStrataError as e:
            if not name.endswith(".previous.log"):  # A container that never ended has none.
                missing[name] = redacted_text(str(e))
            continue
        text = made if isinstance(made, str) else json.dumps(redacted(made), indent=1)
        files[name] = redacted_text(text).encode()
    files["missing.json"] = json.dumps({"at": now.isoformat(), "missing": missing}, indent=1).encode()
    return files


def write(out: Path, files: Mapping[str, bytes], now: datetime) -> None:
    """Write a tar.gz that its owner alone may read. Raises `OSError`; never replaces a file."""
    folder = out.name.removesuffix(".tar.gz").removesuffix(".tgz")
    with (
        open(out, "xb", opener=_private) as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=int(now.timestamp())) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(now.timestamp())
            archive.addfile(entry, io.BytesIO(content))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def chosen(seen: doctor.Seen) -> list[str]:
    """Pods whose logs are taken, the most telling first. Pure."""
    found = [part for part in seen.parts or () if part["kind"] == "Pod"]
    troubled = {finding.subject.partition(" ")[2] for finding in doctor.findings(seen)}

    def rank(pod: Mapping[str, Any]) -> tuple[bool, bool, str]:
        labels = pod["metadata"].get("labels") or {}
        node = f"{labels.get(names.LABEL_POOL, '')}.{(pod.get('spec') or {}).get('nodeName', '')}"
        name = pod["metadata"]["name"]
        return names.LABEL_POOL in labels, not {name, node} & troubled, name

    return [pod["metadata"]["name"] for pod in sorted(found, key=rank)[:PODS_MAX]]


def redacted(value: Any, inside: str = "") -> Any:
    """JSON without what could be a secret or lead to one. Pure."""
    if isinstance(value, Mapping):
        is_variable = "name" in value and "value" in value and inside == "env"
        return {
            key: REDACTED if is_variable and key == "value" else redacted(one, key)
            for key, one in value.items()
            if key not in _DROPPED
        }
    if isinstance(value, list):
        return [redacted(one, inside) for one in value]
    if isinstance(value, str) and inside in _DIGESTS:
        return f"{REDACTED} {hashlib.sha256(value.encode()).hexdigest()[:8]}"  # The same one stays the same.
    return value


def redacted_text(text: str) -> str:
    """Text without tokens, and without passwords of URLs and options. Pure."""
    return _TOKENS.sub(REDACTED, text)


def _node(node: Mapping[str, Any]) -> Json:
    """What matters of a Node; addresses and names of images are nobody's business."""
    stated = node["status"]
    return {
        "name": node["metadata"]["name"],
        "labels": sorted(key for key in node["metadata"].get("labels") or {}),
        "taints": node["spec"].get("taints") or [],
        "allocatable": stated.get("allocatable") or {},
        "nodeInfo": {key: value for key, value in (stated.get("nodeInfo") or {}).items() if key not in _IDS},
        "conditions": stated.get("conditions") or [],
    }


def _stats(given: argparse.Namespace) -> Json:
    with agent.attach(given) as client:
        found: Json = json.loads(client.stats())
    return found

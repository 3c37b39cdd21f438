"""Manifests that a command is given; and who-can-read, which answers from them or a cluster who may read what."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstrata_api import readers
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.manifest_text import Placed, read
from kvstrata_api.models.base import ApiModel
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.readers import Reader
from kvstrata_api.shares import Declared
from kvstrata_api.validate import parse_as
from kvstrata_client.commands import kubectl, output
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.output import table

Json = Mapping[str, Any]
M = TypeVar("M", bound=ApiModel)

STDIN: Final = Path("/dev/stdin")
_SUFFIXES: Final = (".yaml", ".yml", ".json")

_RESOURCES: Final = "kvtenants.kvstrata.io,kvtrustdomains.kvstrata.io,kvprefixshares.kvstrata.io,namespaces"


def objects(sources: Sequence[str]) -> Iterator[tuple[str, Placed]]:
    """Every object of every source. Raises `InvalidInputError` with file and line for what is no manifest."""
    for path in files(sources):
        yield from ((shown(path), placed) for placed in objects_of(path))


def named(sources: Sequence[str], *kinds: str) -> Iterator[Json]:
    """Every object of these kinds. Raises `InvalidInputError` with file and line for one that has no name."""
    for file, placed in objects(sources):
        if placed.obj.get("kind") not in kinds:
            continue
        metadata = placed.obj.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str) or not name:
            line, kind = placed.line("metadata.name"), placed.obj["kind"]
            raise InvalidInputError(f"{file}:{line}: {kind}: metadata.name is {name!r:.40}, a name is wanted")
        yield placed.obj


def files(sources: Sequence[str]) -> Iterator[Path]:
    """Files that are named, with those of named directories; `-` is standard input."""
    for source in sources:
        path = STDIN if source == "-" else Path(source)
        if path.is_dir():
            yield from sorted(found for found in path.rglob("*") if found.suffix in _SUFFIXES)
        else:
            yield path


def objects_of(path: Path) -> Iterator[Placed]:
    """Every object of one file. Raises `InvalidInputError` with its name, and the line of what is no manifest."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInputError(f"{shown(path)}: {getattr(e, 'strerror', None) or e}") from e
    try:
        yield from read(text)
    except InvalidInputError as e:
        raise InvalidInputError(f"{shown(path)}:{e}") from e


def shown(path: Path) -> str:
    """What a file is called."""
    return "<stdin>" if path == STDIN else str(path)


def who_can_read_options(found: argparse.ArgumentParser) -> None:
    """Options of `who-can-read`."""
    found.epilog = "example: kvstrata who-can-read --tenant team-a"
    found.description = "Answers from what is declared, as agents do; it asks no agent and sees no blocks."
    what = found.add_mutually_exclusive_group(required=True)
    what.add_argument("digest", nargs="?", help="digest of a shared prefix, as in a KVPrefixShare")
    what.add_argument("--tenant", help="whatever this tenant stores")
    what.add_argument("--domain", help="what members of this domain share")
    what.add_argument("--share", metavar="NAMESPACE/NAME", help="one KVPrefixShare")
    found.add_argument("-f", "--filename", action="append", metavar="FILE", help="manifests instead of a cluster")
    kubectl.add_options(found)
    found.add_argument("--at", help="time to answer for, RFC 3339; default: now")
    output.add_option(found, names="tenants that may read it")
    found.set_defaults(run=_who_can_read)


def _who_can_read(given: argparse.Namespace) -> int:
    """Print the answer; 1 when nobody may read it."""
    declared = declared_in(_manifests(given) if given.filename else _cluster(given))
    found = answer(given, declared)
    rows = [{**asdict(r), "may_read": not r.refusal} for r in found]
    names = sorted({r.tenant for r in found if not r.refusal})
    output.show(given.output, {"readers": rows}, _lines(found), names)
    return 0 if names else 1


def answer(given: argparse.Namespace, declared: Declared) -> tuple[Reader, ...]:
    """Ask for whatever was named."""
    now = _moment(given.at)
    if given.tenant:
        return readers.of_tenant(given.tenant, declared, now)
    if given.domain:
        return readers.of_domain(given.domain, declared)
    if given.digest:
        return readers.of_digest(given.digest.lower(), declared, now)
    namespace, _, name = given.share.partition("/")
    for share in declared.shares:
        if (share.metadata.namespace, share.metadata.name) == (namespace, name):
            return readers.of_share(share, declared, now)
    raise InvalidInputError(f"there is no KVPrefixShare {given.share!r}; NAMESPACE/NAME wanted")


def declared_in(found: Iterable[Json]) -> Declared:
    """Sort objects by kind. Raises `InvalidInputError` for one of ours that cannot be read."""
    by_kind: dict[str, list[Json]] = {}
    for obj in _flat(found):
        by_kind.setdefault(str(obj.get("kind")), []).append(obj)
    labels = {o["metadata"]["name"]: o["metadata"].get("labels") or {} for o in by_kind.get("Namespace", ())}
    return Declared(
        _parsed(KVTenant, by_kind), _parsed(KVTrustDomain, by_kind), _parsed(KVPrefixShare, by_kind), labels
    )


def _parsed(model: type[M], by_kind: Mapping[str, Sequence[Json]]) -> tuple[M, ...]:
    return tuple(parse_as(model, obj) for obj in by_kind.get(model.__name__, ()))


def _flat(found: Iterable[Json]) -> Iterator[Json]:
    """Objects, and what lists among them hold."""
    for obj in found:
        if isinstance(obj.get("items"), list):
            yield from _flat(obj["items"])
        else:
            yield obj


def _manifests(given: argparse.Namespace) -> Iterator[Json]:
    return named(given.filename, "Namespace", "KVTenant", "KVTrustDomain", "KVPrefixShare")


def _cluster(given: argparse.Namespace) -> list[Json]:
    """Ask the API server; raises what `Kubectl` raises."""
    return [Kubectl.of(given, "give manifests with -f instead").get(_RESOURCES, "--all-namespaces")]


def _moment(text: str | None) -> datetime:
    """Read a time, now when there is none. Raises `InvalidInputError`."""
    if text is None:
        return datetime.now(UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as e:
        raise InvalidInputError(f"--at {text}: RFC 3339 wanted, such as 2026-01-31T12:00:00Z") from e
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _lines(found: Sequence[Reader]) -> Iterator[str]:
    """Those who may first."""
    if not found:
        yield "nobody: no KVPrefixShare lists it"
        return
    ranked = sorted(found, key=lambda r: bool(r.refusal))
    rows = [(r.tenant, _short(r.scope), r.by, r.until or "-", _may(r)) for r in ranked]
    yield from table(("TENANT", "SCOPE", "BY", "UNTIL", "MAY"), rows)


def _may(reader: Reader) -> str:
    """The answer in words."""
    if reader.refusal:
        return f"no: {reader.refusal}"
    return "read, write" if reader.can_write else "read"


def _short(scope: str) -> str:
    """Kind, name and key version: uids mean nothing to people."""
    kind, name, _, version = scope.split("/")
    return f"{kind} {name} {version}"

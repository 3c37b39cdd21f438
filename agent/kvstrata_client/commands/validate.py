"""`kvstrata validate`: what the API server would refuse of manifests, and what no node could carry out."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final, cast

from kvstrata_api.directories import collide, directories_of
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.manifest_text import Placed
from kvstrata_api.models.pool import KVPool
from kvstrata_api.names import GROUP
from kvstrata_api.suggestions import suggestion
from kvstrata_api.units import format_quantity
from kvstrata_api.validate import every_problem, parse
from kvstrata_api.validate_structure import Problem
from kvstrata_client.commands import install, kubectl, manifests, output
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.output import UsageError

Json = Mapping[str, Any]

EXIT_INVALID: Final = 1
_ERROR, _WARNING = "error", "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that somebody should know, and where it stands."""

    file: str
    line: int
    severity: str
    """`error` is refused by the API server, `warning` is not."""
    object: str
    """Kind and name; empty for what is no manifest."""
    field: str
    message: str
    value: str = ""
    suggestion: str = ""

    def __str__(self) -> str:
        """`file:line: kind/name: field: message`."""
        shown = f"Invalid value: {self.value}: " if self.value else ""
        word = "warning: " if self.severity == _WARNING else ""
        said = f"{word}{shown}{self.message}{f'; {self.suggestion}' if self.suggestion else ''}"
        return ": ".join(part for part in (f"{self.file}:{self.line}", self.object, self.field, said) if part)


def options(found: argparse.ArgumentParser) -> None:
    """Options of `validate`."""
    found.epilog = "example: kvstrata validate -f manifests/ --nodes nodes.json"
    found.description = (
        "Checks every object of ours by schema and rules, with the verdict of the API server. Exit status 0 when all "
        "are good, 1 when one is not or there is none, 2 for a file that cannot be read. With --nodes or --context "
        "sizes and selectors of pools are held against nodes, which warns only."
    )
    found.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        metavar="FILE",
        help="file, directory, or - for standard input",
    )
    found.add_argument("--nodes", metavar="FILE", help="what `kubectl get nodes -o json` or `-o yaml` printed")
    kubectl.add_options(found)
    output.add_option(found)
    found.set_defaults(run=_validate)


def _validate(given: argparse.Namespace) -> int:
    """Print every finding."""
    nodes = _nodes(given)
    checked, found = 0, list[Finding]()
    for path in manifests.files(given.filename):
        file = manifests.shown(path)
        if path != manifests.STDIN and not path.is_file():
            raise UsageError(f"{file}: {'no such file or directory' if not path.exists() else 'no file'}")
        try:
            for placed in manifests.objects_of(path):
                if str(placed.obj.get("apiVersion", "")).startswith(f"{GROUP}/"):
                    checked += 1
                    found += of_object(file, placed, nodes)
        except InvalidInputError as e:
            found.append(_unreadable(file, str(e)))
    errors = [one for one in found if one.severity == _ERROR]
    broken = len({(one.file, one.object) for one in errors})
    total = f"{checked} objects of {GROUP} checked, {broken} with problems"
    answer = {"checked": checked, "invalid": broken, "findings": [asdict(one) for one in found]}
    output.show(given.output, answer, [*map(str, found), total])
    return EXIT_INVALID if errors or not checked else 0


def of_object(file: str, placed: Placed, nodes: Sequence[Json] | None) -> list[Finding]:
    """What is wrong with one object, by line; with `nodes`, also what they cannot carry out."""
    obj = placed.obj
    metadata = obj.get("metadata")
    name = f"{obj.get('kind')}/{metadata.get('name') if isinstance(metadata, Mapping) else None}"
    problems = every_problem(obj)
    found = [
        Finding(file, placed.line(one.field), _ERROR, name, one.field, one.message, one.value, _meant(placed, one))
        for one in problems
    ]
    found += [
        Finding(file, line, _WARNING, name, path, "given twice; the last one counts")
        for path, line in placed.repeated()
    ]
    if obj.get("kind") == "KVPool" and not problems:
        warnings = _of_pool(obj, nodes)
        found += [Finding(file, placed.line(field), _WARNING, name, field, said) for field, said in warnings]
    return sorted(found, key=lambda one: one.line)


def _meant(placed: Placed, problem: Problem) -> str:
    return suggestion(str(placed.obj.get("kind")), problem, placed.text(problem.field))


def _of_pool(pool: Json, nodes: Sequence[Json] | None) -> Iterator[tuple[str, str]]:
    """What somebody should know of a good pool: field and words."""
    if not pool["spec"].get("nodeSelector"):
        yield "spec.nodeSelector", "not given: every node of the cluster gets an agent, and gives its memory to it"
    parsed = cast("KVPool", parse("KVPool", pool))
    yield from _crossed(parsed)
    yield from _beginnings(parsed)
    for one in install.of_pool(nodes, dict(pool)) if nodes is not None else ():
        field = "spec.nodeSelector" if "label" in one.mend else "spec.tiers"
        field = "spec.tolerations" if "taint" in one.what else field
        yield field, f"{one.what}; {one.mend}"


def _crossed(pool: KVPool) -> Iterator[tuple[str, str]]:
    """Tiers of one pool of which only one comes up: their directories are the same, or one lies in the other."""
    named = [(number, one) for number, tier in enumerate(pool.spec.tiers) for one in directories_of(tier)]
    for (first, outer), (second, inner) in combinations(named, 2):
        if first != second and collide(outer, inner):
            where = f"{outer.path!r} of spec.tiers[{first}].{outer.field}"
            what = f"{inner.path!r} is or holds {where}, or lies in it: each tier needs a directory of its own"
            yield f"spec.tiers[{second}].{inner.field}", what


def _beginnings(pool: KVPool) -> Iterator[tuple[str, str]]:
    """Tiers that scale by themselves and begin at another size than they say."""
    for number, tier in enumerate(pool.spec.tiers):
        if tier.autoscale is None or tier.capacity_per_node is None:
            continue
        least, most = tier.autoscale.min_per_node, tier.autoscale.max_per_node
        begins = max(least, min(most, tier.capacity_per_node))
        if begins != tier.capacity_per_node:
            said, bounds = (
                format_quantity(tier.capacity_per_node),
                f"{format_quantity(least)} to {format_quantity(most)}",
            )
            what = f"{said} is outside of {bounds} of autoscale: the tier begins at {format_quantity(begins)}"
            yield f"spec.tiers[{number}].capacityPerNode", what


def _nodes(given: argparse.Namespace) -> list[Json] | None:
    """Nodes of a file or a cluster; None where neither is named. Raises what reading them raises."""
    if given.nodes:
        nodes = list(manifests.named([given.nodes], "Node"))
        if not nodes:
            raise UsageError(f"--nodes {given.nodes}: holds no Node; give what `kubectl get nodes -o yaml` prints")
        return nodes
    if given.context or given.kubeconfig:
        listed: list[Json] = Kubectl.of(given, "give nodes with --nodes instead").get("nodes")["items"]
        return listed
    return None


def _unreadable(file: str, error: str) -> Finding:
    """What is no manifest: `file:line: words` as a finding."""
    line, _, said = error.removeprefix(f"{file}:").partition(": ")
    return Finding(file, int(line), _ERROR, "", "", said) if line.isdigit() else Finding(file, 1, _ERROR, "", "", error)

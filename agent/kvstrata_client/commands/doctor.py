"""Command that names what is wrong with a release that runs, worst first: doctor.

Observe (kubectl, the node's agent), decide (`findings`, pure), print. It changes nothing.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvstrata_api import names, reasons
from kvstrata_api.errors import (
    AgentAwayError,
    ApiServerAwayError,
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    UnauthenticatedError,
    UnsupportedError,
)
from kvstrata_api.models.pool import Compatibility
from kvstrata_api.reasons import Weight
from kvstrata_api.validate import parse_as
from kvstrata_client.commands import agent, kubectl, output
from kvstrata_client.commands.kubectl import Kubectl

Json = Mapping[str, Any]

OURS: Final = tuple(
    f"{plural}.{names.GROUP}"
    for plural in (
        "kvpools",
        "kvpoolnodes",
        "kvtenants",
        "kvtrustdomains",
        "kvprefixshares",
        "kvoperations",
        "kvmodelcaches",
    )
)
PARTS: Final = ("deployments.apps", "pods", "leases.coordination.k8s.io")

PASSING_S: Final = 600.0
"""What should pass has lasted for too long then: `spec.progressDeadlineSeconds` of a Deployment is as much."""
YOUNG_S: Final = 60.0
"""An object or a pod may be as old without a word of anybody: images are pulled, agents start."""
LEASE_LATE_S: Final = 10.0
"""How far a Lease may be over before its agent counts as silent: clocks of machines differ."""

_STARTS: Final = "ContainerCreating"
"""What a container waits for while its pod is young."""

_ENDED: Final = ("Complete", "Cancelled")
"""Conditions by which an operation is over and well."""

_PROCESSES: Final = {
    "kvstrata-operator": (Weight.BROKEN, "nothing that is declared is acted upon"),
    "kvstrata-metadata": (Weight.WARNING, "dead agents stay in the directory, and erasures wait"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a cluster says."""

    now: datetime
    objects: Sequence[Json] = ()
    """Those of our kinds."""
    parts: Sequence[Json] | None = ()
    """Deployments, pods and Leases of the release's namespace; None where the user may not look."""
    namespace: str = names.SYSTEM_NAMESPACE
    namespaces: Sequence[Json] | None = ()
    """All of the cluster's; None where the user may not list them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    weight: Weight
    """`broken` or `warning`."""
    subject: str
    """Kind and name, with the namespace where the kind has one."""
    reason: str
    message: str
    mend: str
    """Command or step that mends it."""


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.description = (
        "Reads our objects, the release's pods and agents' Leases with kubectl, and changes nothing. With --pool (and "
        "--socket, where it is elsewhere) it also attaches to the node's agent as an engine would; without kubectl it "
        "does that alone. Exit status: 0 when nothing is wrong, 1 with findings, 2 for wrong usage. docs/conditions.md "
        "has every reason."
    )
    found.epilog = "example: kvstrata doctor -o json"
    kubectl.add_release_options(found)
    output.add_option(found, names="what something is wrong with")
    agent.target_options(found)
    found.set_defaults(run=_doctor, missing=None)  # Of the agent only where one is named.


def _doctor(given: argparse.Namespace) -> int:
    """Print every finding; 1 when there is one, 2 when the agent is to be asked and options are missing."""
    seen: Seen | None = None
    try:
        seen = observe(Kubectl.of(given, "it asks the cluster"), given.namespace)
    except UnsupportedError:
        if not (given.socket or given.pool):
            raise
    found = list(findings(seen)) if seen is not None else []
    if given.socket or given.pool:
        try:
            found = ordered([*found, *_of_agent(given, seen.objects if seen is not None else ())])
        except InvalidInputError as e:
            sys.stderr.write(f"kvstrata doctor: {e}\n")
            return 2
    subjects = dict.fromkeys(one.subject for one in found)
    output.show(given.output, {"findings": [asdict(one) for one in found]}, _lines(found), subjects)
    return int(bool(found))


def observe(asked: Kubectl, namespace: str) -> Seen:
    """Ask the cluster. Raises `ApiServerAwayError` when it does not answer, or has none of our kinds."""
    objects = asked.get(",".join(OURS), "--all-namespaces")["items"]
    parts = _if_allowed(asked, ",".join(PARTS), f"--namespace={namespace}")
    return Seen(datetime.now(UTC), objects, parts, namespace, _if_allowed(asked, "namespaces"))


def _if_allowed(asked: Kubectl, *what: str) -> Sequence[Json] | None:
    try:
        found: Sequence[Json] = asked.get(*what)["items"]
    except ApiServerAwayError:
        return None
    return found


def findings(seen: Seen) -> tuple[Finding, ...]:
    """What is wrong, the worst first. Pure."""
    every = [*_processes(seen), *_pods(seen)]
    leases = {one["metadata"]["name"]: one for one in seen.parts or () if one["kind"] == "Lease"}
    for subject in seen.objects:
        if _is_over(subject):
            continue
        by_reason = {one.reason: one for one in _conditions(seen, subject)}
        every.extend(by_reason.values())
        if subject["kind"] == "KVPoolNode":
            every.extend(_tiers(seen, subject, by_reason))
            every.extend(_silence(seen, subject, leases, by_reason))
        every.extend(_unjudged(seen, subject))
    return tuple(ordered(every))


def ordered(found: Iterable[Finding]) -> list[Finding]:
    """What is broken before what works otherwise than was asked for; then by kind and name."""
    return sorted(found, key=lambda one: (one.weight is not Weight.BROKEN, one.subject, one.reason))


def _processes(seen: Seen) -> Iterator[Finding]:
    """The operator and the metadata service."""
    if seen.parts is None:
        look = f"kubectl auth can-i list pods -n {seen.namespace}"
        message = "you may not list its pods, Deployments and Leases, so they were not looked at"
        yield Finding(Weight.WARNING, f"Namespace {seen.namespace}", "NotSeen", message, look)
        return
    there = {one["metadata"]["name"]: one for one in seen.parts if one["kind"] == "Deployment"}
    for name, (weight, effect) in _PROCESSES.items():
        found = there.get(name)
        if found is None and name in led(seen):
            continue
        if found is None:
            message, mend = f"it is not there: {effect}", f"helm status kvstrata -n {seen.namespace}"
            yield Finding(weight, f"Deployment {name}", "NotInstalled", message, mend)
        elif not (found.get("status") or {}).get("availableReplicas"):
            message = f"no replica is available: {effect}"
            mend = f"kubectl -n {seen.namespace} describe deployment {name}"
            yield Finding(weight, f"Deployment {name}", "NotAvailable", message, mend)


def led(seen: Seen) -> set[str]:
    """Operator and metadata service, where a leader holds the Lease: they may run outside of the chart."""
    leases = {one["metadata"]["name"]: one for one in seen.parts or () if one["kind"] == "Lease"}
    return {name for name in _PROCESSES if name in leases and _overdue_s(seen, leases[name]) <= LEASE_LATE_S}


def _overdue_s(seen: Seen, lease: Json) -> float:
    """Seconds since a Lease ran out; negative while it holds."""
    spec = lease.get("spec") or {}
    return _age_s(seen, spec.get("renewTime") or "") - float(spec.get("leaseDurationSeconds") or 0)


def _pods(seen: Seen) -> Iterator[Finding]:
    """Pods that wait: what the scheduler, or the kubelet, says of them."""
    for pod in seen.parts or ():
        if pod["kind"] != "Pod" or pod["metadata"].get("deletionTimestamp"):
            continue
        name, age_s = pod["metadata"]["name"], _age_s(seen, pod["metadata"]["creationTimestamp"])
        reason, message = _wait(pod)
        if reason and (age_s >= YOUNG_S or reason != _STARTS):
            mend = f"kubectl -n {seen.namespace} describe pod {name}"
            is_agent = names.LABEL_POOL in (pod["metadata"].get("labels") or {})
            weight = Weight.BROKEN if is_agent else Weight.WARNING
            yield Finding(weight, f"Pod {name}", reason, message or "its node gives no reason", mend)


def _wait(pod: Json) -> tuple[str, str]:
    """Reason and message of what a pod waits for; empty for one that runs."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None and waiting["reason"] != "PodInitializing":  # Containers before it say why.
            ended = (container.get("lastState") or {}).get("terminated") or {}
            own = str(ended.get("message", "")).strip().rpartition("\n")[2]
            return waiting["reason"], own or waiting.get("message", "")
    return "", ""


def _conditions(seen: Seen, subject: Json) -> Iterator[Finding]:
    """Conditions that are bad news by the catalogue, and those that should have passed."""
    kind = subject["kind"]
    for condition in _stated(subject):
        type_, status, reason = condition["type"], condition["status"], condition["reason"]
        known = reasons.find(kind, type_, status, reason)
        message, weight, mend = condition.get("message", ""), Weight.WARNING, ""
        if known is None:
            if status != ("True" if type_ in reasons.TRUE_IS_BAD else "False"):
                continue
            mend = f"kubectl get {kind.lower()} NAME -o yaml: another version of kvstrata knows this reason"
        elif known.weight is Weight.PASSING:
            lasted_s = _age_s(seen, condition.get("lastTransitionTime", ""))
            if lasted_s < PASSING_S:
                continue
            message = f"for {lasted_s / 60:.0f} min: {message or known.help}"
            mend = known.mend or "kubectl -n SYSTEM logs deployment/kvstrata-operator --tail=100"
        elif known.weight in (Weight.WARNING, Weight.BROKEN):
            message, weight, mend = message or known.help, known.weight, known.mend
        else:
            continue
        yield Finding(weight, _subject(subject), reason, message, _filled(mend, seen, subject))


def _tiers(seen: Seen, node: Json, by_reason: Mapping[str, Finding]) -> Iterator[Finding]:
    for tier in (node.get("status") or {}).get("tiers") or ():
        reason = f"Tier{tier.get('phase', '')}"
        if reason not in ("TierDegraded", "TierFailed") or reason in by_reason:
            continue
        known = reasons.find("KVPoolNode", "TierReady", "False", "TierFailed")
        assert known is not None, "the catalogue has it: a test"
        message = f"tier {tier['name']} is {tier['phase']}: {tier.get('lastError') or 'no reason given'}"
        weight = Weight.BROKEN if reason == "TierFailed" else Weight.WARNING
        yield Finding(weight, _subject(node), reason, message, _filled(known.mend, seen, node))


def _silence(seen: Seen, node: Json, leases: Mapping[str, Json], by_reason: Mapping[str, Finding]) -> Iterator[Finding]:
    """An agent that nobody has called silent yet, for the operator is away too."""
    is_told = "LeaseExpired" in by_reason or seen.parts is None
    if is_told or not any(c["type"] == "AgentConnected" for c in _stated(node)):
        return
    lease = leases.get(names.agent_lease_name(node["spec"]["poolRef"], node["spec"]["nodeName"])) or {}
    if _overdue_s(seen, lease) <= LEASE_LATE_S:
        return
    spec = lease.get("spec") or {}
    silent_s = _age_s(seen, spec.get("renewTime") or "")
    known = reasons.find("KVPoolNode", "AgentConnected", "False", "LeaseExpired")
    assert known is not None, "the catalogue has it: a test"
    message = f"its Lease was renewed {silent_s:.0f} s ago" if spec.get("renewTime") else "it has no Lease"
    yield Finding(known.weight, _subject(node), known.reason, message, _filled(known.mend, seen, node))


def _unjudged(seen: Seen, subject: Json) -> Iterator[Finding]:
    """Nobody has said anything of an object."""
    metadata = subject["metadata"]
    if _stated(subject) or _age_s(seen, metadata["creationTimestamp"]) < YOUNG_S or metadata.get("deletionTimestamp"):
        return
    who, mend = "the operator", "kubectl -n SYSTEM logs deployment/kvstrata-operator --tail=100"
    if subject["kind"] == "KVPoolNode":
        who, mend = "an agent", "kubectl -n SYSTEM describe pods -l kvstrata.io/pool=POOL"
    message = f"{who} has not reported on it"
    yield Finding(Weight.BROKEN, _subject(subject), "NoReport", message, _filled(mend, seen, subject))


def _of_agent(given: argparse.Namespace, objects: Sequence[Json]) -> list[Finding]:
    """Attach as an engine does; `--model` and `--revision` may come from the pool's own declaration."""
    pool = next((o for o in objects if o["kind"] == "KVPool" and o["metadata"]["name"] == given.pool), None)
    if pool is not None and given.layout is None and not given.model:
        ours = parse_as(Compatibility, pool["spec"].get("compatibility", {}))
        given.model, given.revision, given.dtype = ours.model, ours.revision, ours.dtype
        given.block_tokens = ours.block_tokens
    try:
        agent.attach(given).close()
    except KvStrataError as e:
        return [refusal(given.socket or names.socket_path(given.pool), e)]
    return []


def refusal(socket: str, error: KvStrataError) -> Finding:
    """What keeps an engine away from its agent. Raises `error` where it is wrong usage."""
    match error:
        case AgentAwayError():
            reason, mend = "AgentAway", f"ls -l {Path(socket).parent}, and look whether its pod runs on this node"
        case UnauthenticatedError():
            reason, mend = "TokenRefused", f"mount a token for audience {names.AUDIENCE} (docs/engines.md)"
        case ForbiddenError():
            reason, mend = (
                "NoTenant",
                "kubectl get kvtenants: one has to claim the engine's ServiceAccount or namespace",
            )
        case InvalidInputError() if str(error).startswith("--"):
            raise error
        case InvalidInputError():
            reason, mend = "LayoutRefused", "start the engine as spec.compatibility of the pool says, or another pool"
        case _:
            reason, mend = "Refused", "kubectl get kvpoolnodes, and the agent's log"
    return Finding(Weight.BROKEN, f"Agent {socket}", reason, str(error), mend)


def _is_over(subject: Json) -> bool:
    """True of an operation that has ended well."""
    return subject["kind"] == "KVOperation" and any(
        c["type"] in _ENDED and c["status"] == "True" for c in _stated(subject)
    )


def _stated(subject: Json) -> Sequence[Json]:
    return (subject.get("status") or {}).get("conditions") or ()


def _subject(subject: Json) -> str:
    metadata = subject["metadata"]
    place = f"{metadata['namespace']}/" if metadata.get("namespace") else ""
    return f"{subject['kind']} {place}{metadata['name']}"


def _filled(mend: str, seen: Seen, subject: Json) -> str:
    """Put names into a command of the catalogue."""
    metadata, spec = subject["metadata"], subject.get("spec") or {}
    selector = spec.get("nodeSelector") or {}
    known = {
        "NAME": metadata["name"],
        "NAMESPACE": metadata.get("namespace"),
        "POOL": metadata["name"] if subject["kind"] == "KVPool" else spec.get("poolRef"),
        "NODE": spec.get("nodeName"),
        "LABELS": " ".join(f"{key}={value}" for key, value in sorted(selector.items())),
        "SYSTEM": seen.namespace,
    }
    return re.sub(r"\b(?:NAME|NAMESPACE|POOL|NODE|LABELS|SYSTEM)\b", lambda m: known[m[0]] or m[0], mend)


def _age_s(seen: Seen, since: str) -> float:
    """Seconds since an RFC 3339 time; endless for none."""
    return (seen.now - datetime.fromisoformat(since)).total_seconds() if since else float("inf")


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    """One paragraph each: messages are sentences, and would make columns of hundreds of characters."""
    for one in found:
        yield f"{one.weight.upper():8}{one.subject}: {one.reason}"
        yield f"        {one.message}"
        yield f"        mend: {one.mend}"
    yield f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing is wrong"

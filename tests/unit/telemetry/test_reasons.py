"""The catalogue of conditions is what the code writes, and the code writes no other."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.policy.pathology import Pathology
from kvstrata_agent.policy.removal import Removal
from kvstrata_agent.weights.plan import Fault
from kvstrata_api.reasons import REASONS, Reason, Weight, find, stated
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_api.shares import Refusal
from kvstrata_node import dax_verdict, pages_verdict
from kvstrata_operator.decide.operations.operations import End
from kvstrata_operator.decide.pools.placement import Exclusion
from kvstrata_operator.decide.pools.pool_facts import _BROKEN_PHASES

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("operator/kvstrata_operator", "agent/kvstrata_agent/kube", "agent/kvstrata_node")
MAKERS = {"true": "True", "false": "False", "unknown": "Unknown", "_true": "True", "_false": "False"}
"""What makes a condition of a type and a reason, and its status."""
PAIRS = {"_Wrong", "tuple[str, str] | None", "tuple[End | None, str]"}
"""Annotations of functions that return a reason: with its message first, with the end of an operation last."""
FOR_MESSAGES = {"_unreadiness"}
"""A function whose reasons no condition has: only its messages are used."""
ENUMS: dict[type, str] = {
    pages_verdict.Reason: "HugepagesReserved",
    dax_verdict.Reason: "DevicePresent",
    DirectoryState: "MetadataAvailable",
    Pathology: "CacheEffective",
    Fault: "ModelsStaged",
    Refusal: "ReadersAgreed",
    Exclusion: "Provisioned",
}
"""Enumerations of reasons, and the type of condition that has them."""
Found = tuple[str, str, str]
"""Type, status and reason; the first two are empty where the code says them elsewhere."""


def trees() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text())


def constants() -> dict[str, str]:
    """Strings that modules give names to."""
    named: dict[str, str] = {}
    for tree in trees():
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                named[ast.unparse(node.target)] = str(node.value.value)
    return named


CONSTANTS = constants()


def words(node: ast.expr, around: ast.AST) -> set[str]:
    """Every string that an expression may be; none where it is passed on from elsewhere."""
    match node:
        case ast.Constant(value=str(word)):
            return {word}
        case ast.IfExp(body=body, orelse=orelse):
            return words(body, around) | words(orelse, around)
        case ast.JoinedStr():
            return {ast.unparse(node)}
        case ast.Name(id=name) if name in CONSTANTS:
            return {CONSTANTS[name]}
        case ast.Name(id=name):
            given = [a for a in ast.walk(around) if isinstance(a, ast.Assign)]
            return {w for a in given if ast.unparse(a.targets[0]) == name for w in words(a.value, around)}
    return set()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def of_call(call: ast.Call, around: ast.AST) -> Iterator[Found]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name == "Fault":
        yield from (("", "", reason) for reason in words(call.args[0], around))
    elif name == "Progress" and len(call.args) == 3:
        yield from (("", "", reason) for reason in words(call.args[2], around))
    elif name == "agreed":
        yield from ((type_, "True", "Agreed") for type_ in words(call.args[1], around))
    elif name in MAKERS and len(call.args) >= 2:
        for reason in words(call.args[1], around):
            yield from ((type_, MAKERS[name], reason) for type_ in words(call.args[0], around) or {""})


def of_pairs(function: ast.FunctionDef) -> Iterator[Found]:
    annotated = ast.unparse(function.returns) if function.returns is not None else ""
    if annotated not in PAIRS or function.name in FOR_MESSAGES:
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
            element = node.elts[1] if "End" in annotated else node.elts[0]
            yield from (("", "", reason) for reason in words(element, function))


def of_enums() -> Iterator[Found]:
    for enum, type_ in ENUMS.items():
        yield from ((type_, "", str(member.value)) for member in enum)  # type: ignore[attr-defined]
    yield from (("Draining", "False", one.value) for one in Removal if one is not Removal.NONE)
    yield from (("Ready", "False", one.value) for one in Removal if one is not Removal.NONE)
    yield from (("Progressing", "False", one.value) for one in End)


def spelled(found: Iterable[Found]) -> Iterator[Found]:
    """Put the phases in of a reason that is made of one."""
    for type_, status, reason in found:
        if "{broken.phase}" in reason:
            yield from ((type_, status, f"Tier{phase}") for phase in _BROKEN_PHASES)
        elif reason:
            yield type_, status, reason


def written() -> set[Found]:
    calls = (
        one
        for tree in trees()
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for one in of_call(node, function)
    )
    pairs = (one for tree in trees() for function in functions(tree) for one in of_pairs(function))
    return {*spelled(calls), *spelled(pairs), *of_enums()}


def test_the_catalogue_has_every_reason_that_the_code_writes_and_no_other() -> None:
    assert {reason.reason for reason in REASONS} == {reason for _, _, reason in written()}


def test_types_and_statuses_are_those_of_the_code() -> None:
    known = {(type_, status, reason.reason) for reason in REASONS for type_, status in stated(reason)}

    for type_, status, reason in written():
        there = {one for one in known if one[2] == reason and (not type_ or one[0] == type_)}
        assert any(one[1] == status for one in there) if status else there, (type_, status, reason)
    said = {type_ for type_, _, _ in written() if type_}
    assert {type_ for type_, _, _ in known} == said | {end.value for end in End}


def test_nothing_is_said_twice_and_kinds_are_ours() -> None:
    places = [(r.kind, t, s, r.reason) for r in REASONS for t, s in stated(r)]

    assert len(places) == len(set(places))
    assert {reason.kind for reason in REASONS} == BY_NAME.keys()
    assert find("KVPool", "Degraded", "True", "DirectoryAway") is find(
        "KVPool", "MetadataAvailable", "False", "DirectoryAway"
    )
    assert find("KVPool", "Ready", "True", "DirectoryAway") is None


@pytest.mark.parametrize("reason", REASONS, ids=lambda r: f"{r.kind}-{r.types[0]}-{r.reason}")
def test_each_says_what_it_means_and_bad_news_what_to_do(reason: Reason) -> None:
    assert reason.help.endswith(".")
    assert "|" not in reason.help + reason.mend
    assert not reason.mend.endswith(".")
    if reason.weight is Weight.GOOD:
        assert not reason.mend
    elif reason.weight is not Weight.PASSING:
        assert reason.mend

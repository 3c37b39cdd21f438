"""Rules of KVOperation. Pure."""

from typing import Final

from kvstrata_api.rules.rule import AnyRule, Json, Rule, Transition, exactly_when, only_when

BLOCK_OF_TYPE: Final = {"Drain": "drain", "Flush": "flush", "Erase": "erase", "Warm": "warm", "Migrate": "migrate"}
"""The block that each type takes."""
_FIXED: Final = ("type", "poolRef", *BLOCK_OF_TYPE.values(), "timeoutSeconds", "ttlSecondsAfterFinished")


OPTIONAL_BLOCKS: Final = ("Flush",)
"""Types whose block has a default for every field, and may be left out."""


def _block_matches(type_: str, field: str) -> Rule:
    made = only_when if type_ in OPTIONAL_BLOCKS else exactly_when
    return made(field, f"self.type == '{type_}'", f"type is {type_}", lambda spec: bool(spec["type"] == type_), "spec")


def _stays(field: str) -> Transition:
    def holds(new: Json, old: Json) -> bool:
        return bool(new.get(field) == old.get(field))

    # Not by optionals: their estimated cost has no bound.
    both = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    return Transition("spec", both, f"{field} is immutable: make another KVOperation", holds, field)


def names_some(path: str) -> Rule:
    """Make the rule that a choice of nodes names any."""
    return Rule(
        path,
        "(has(self.names) && self.names.size() > 0) || (has(self.matchLabels) && self.matchLabels.size() > 0)",
        "names or matchLabels must not be empty: an empty choice would mean no node, or every one",
        lambda nodes: bool(nodes.get("names") or nodes.get("matchLabels")),
        "names",
    )


OPERATION: Final[list[AnyRule]] = [
    *(_block_matches(type_, field) for type_, field in BLOCK_OF_TYPE.items()),
    exactly_when(
        "poolRef", "self.type != 'Erase'", "type is not Erase", lambda spec: bool(spec["type"] != "Erase"), "spec"
    ),
    names_some("spec.drain.nodes"),
    names_some("spec.flush.nodes"),
    names_some("spec.warm.nodes"),
    names_some("spec.migrate.nodes"),
    Rule(
        "spec",
        "!has(self.migrate) || !has(self.poolRef) || self.migrate.to != self.poolRef",
        "migrate.to must not be poolRef: blocks go to another pool",
        lambda spec: "migrate" not in spec or spec["migrate"].get("to") != spec.get("poolRef"),
        "migrate.to",
    ),
    Rule(
        "spec.warm",
        "(has(self.prefixes) && self.prefixes.size() > 0) || (has(self.archivedSessions) && self.archivedSessions)",
        "prefixes must not be empty unless archivedSessions is true: nothing would be meant",
        lambda warm: bool(warm.get("prefixes") or warm.get("archivedSessions")),
        "prefixes",
    ),
    *(_stays(field) for field in _FIXED),
    Transition(
        "spec",
        "!oldSelf.?cancel.orValue(false) || self.?cancel.orValue(false)",
        "cancel must not be taken back: its orders are withdrawn already",
        lambda new, old: not old.get("cancel", False) or bool(new.get("cancel", False)),
        "cancel",
    ),
]

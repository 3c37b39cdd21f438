"""Rules of KVModelCache. Pure."""

from typing import Final

from kvstrata_api.rules.operation import names_some
from kvstrata_api.rules.rule import AnyRule, Rule

MODEL_CACHE: Final[list[AnyRule]] = [
    names_some("spec.nodes"),
    Rule(
        "spec.source",
        "!has(self.secretRef) || !self.url.startsWith('file:')",
        "secretRef may be set only when url is of an object store: a folder has no settings",
        lambda source: "secretRef" not in source or not source["url"].startswith("file:"),
        "secretRef",
    ),
    Rule(
        "spec.source",
        "!self.url.startsWith('file:') || self.url.startsWith('file:///')",
        "url must be file:/// and an absolute path: a folder lies on no other host",
        lambda source: not source["url"].startswith("file:") or source["url"].startswith("file:///"),
        "url",
    ),
]

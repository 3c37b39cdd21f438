"""Rules of KVTenant, KVTrustDomain and KVPrefixShare. Pure."""

from typing import Final

from kvstrata_api.names import KEY_VERSION
from kvstrata_api.rules.rule import AnyRule, Json, Rule, Transition, size_bytes, unique


def _is_guarantee_within(quota: Json) -> bool:
    if "hard" not in quota or "guaranteed" not in quota:
        return True
    return size_bytes(quota["guaranteed"]) <= size_bytes(quota["hard"])


def _is_idle_within_max(retention: Json) -> bool:
    if "idleSeconds" not in retention or "maxSeconds" not in retention:
        return True
    return bool(retention["idleSeconds"] <= retention["maxSeconds"])


TENANT: Final[list[AnyRule]] = [
    Rule(
        "spec",
        "has(self.namespaceSelector) || (has(self.serviceAccounts) && self.serviceAccounts.size() > 0)",
        "serviceAccounts must not be empty when namespaceSelector is not set: a tenant needs an identity",
        lambda spec: "namespaceSelector" in spec or bool(spec.get("serviceAccounts")),
        "serviceAccounts",
    ),
    Rule(
        "spec.namespaceSelector",
        "has(self.matchLabels) && self.matchLabels.size() > 0",
        "matchLabels must name at least one label: an empty selector would claim every namespace",
        lambda selector: bool(selector.get("matchLabels")),
        "matchLabels",
    ),
    unique("spec", "quotas", ("poolRef", "tier"), "pairs of poolRef and tier"),
    Rule(
        "spec.quotas[]",
        "has(self.hard) || has(self.guaranteed)",
        "hard or guaranteed must be set: a quota without either bounds nothing",
        lambda quota: "hard" in quota or "guaranteed" in quota,
        "hard",
    ),
    Rule(
        "spec.quotas[]",
        "!has(self.hard) || !has(self.guaranteed) || "
        "quantity(string(self.guaranteed)).compareTo(quantity(string(self.hard))) <= 0",
        "guaranteed must not be above hard",
        _is_guarantee_within,
        "guaranteed",
    ),
    Rule(
        "spec.retention",
        "!has(self.idleSeconds) || !has(self.maxSeconds) || self.idleSeconds <= self.maxSeconds",
        "idleSeconds must not be above maxSeconds",
        _is_idle_within_max,
        "idleSeconds",
    ),
]

TRUST_DOMAIN: Final[list[AnyRule]] = [
    Rule(
        "spec",
        "!has(self.publishers) || self.publishers.all(p, has(self.tenants) && p in self.tenants)",
        "publishers must be among tenants",
        lambda spec: set(spec.get("publishers", ())) <= set(spec.get("tenants", ())),
        "publishers",
    ),
    Transition(
        "spec",
        f"self.?keyVersion.orValue({KEY_VERSION}) >= oldSelf.?keyVersion.orValue({KEY_VERSION})",
        "keyVersion must not go down: readers that were cut off would read again",
        lambda new, old: bool(new.get("keyVersion", KEY_VERSION) >= old.get("keyVersion", KEY_VERSION)),
        "keyVersion",
    ),
]

PREFIX_SHARE: Final[list[AnyRule]] = [
    Transition(
        "spec",
        "self.poolRef == oldSelf.poolRef",
        "poolRef is immutable",
        lambda new, old: bool(new["poolRef"] == old["poolRef"]),
        "poolRef",
    ),
    Transition(
        "spec",
        "self.prefixes == oldSelf.prefixes",
        "prefixes are immutable: readers hold the key of these; make another KVPrefixShare for others",
        lambda new, old: bool(new["prefixes"] == old["prefixes"]),
        "prefixes",
    ),
    Rule(
        "spec",
        "self.to.all(a, self.to.exists_one(b, a == b))",
        "to must name each reader once",
        lambda spec: all(spec["to"].count(target) == 1 for target in spec["to"]),
        "to",
    ),
    Rule(
        "spec.to[]",
        "has(self.tenant) != has(self.domain)",
        "tenant and domain: exactly one of them must be set",
        lambda target: ("tenant" in target) != ("domain" in target),
        "tenant",
    ),
]

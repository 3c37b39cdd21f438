"""Laws of the evaluator of NetworkPolicies that the chart's are tested by."""

from typing import Any

import pytest

from support.kube.network_flows import Pod, is_allowed

pytestmark = pytest.mark.unit

A = Pod("ns", {"app": "a"}, namespace_labels={"name": "ns"})
B = Pod("ns", {"app": "b"}, {"web": 80}, namespace_labels={"name": "ns"})
FAR = Pod("far", {"app": "a"}, namespace_labels={"name": "far"})
OUTSIDE = Pod(address="192.0.2.7")


def policy(selector: dict[str, Any], types: list[str], **rules: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns"}, "spec": {"podSelector": selector, "policyTypes": types, **rules}}


def to_b(**rule: Any) -> list[dict[str, Any]]:
    return [policy({"matchLabels": {"app": "b"}}, ["Ingress"], ingress=[rule])]


def test_without_a_policy_everything_passes() -> None:
    assert is_allowed([], A, B, 80)


def test_a_policy_without_rules_lets_nothing_through_in_its_direction() -> None:
    deny = [policy({}, ["Ingress"])]

    assert not is_allowed(deny, A, B, 80)
    assert is_allowed(deny, A, FAR, 80)
    assert not is_allowed([policy({}, ["Egress"])], A, FAR, 80)


def test_rules_add_up_and_both_ends_must_agree() -> None:
    deny = policy({}, ["Ingress", "Egress"])
    opened = to_b(**{"from": [{"podSelector": {"matchLabels": {"app": "a"}}}]})

    assert not is_allowed([deny, *opened], A, B, 80)
    leave = policy({"matchLabels": {"app": "a"}}, ["Egress"], egress=[{}])
    assert is_allowed([deny, *opened, leave], A, B, 80)


def test_a_pod_selector_alone_means_the_policy_s_own_namespace() -> None:
    rules = to_b(**{"from": [{"podSelector": {"matchLabels": {"app": "a"}}}]})

    assert is_allowed(rules, A, B, 80)
    assert not is_allowed(rules, FAR, B, 80)
    anywhere = to_b(**{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "a"}}}]})
    assert is_allowed(anywhere, FAR, B, 80)


def test_ports_are_compared_by_name_number_range_and_protocol() -> None:
    assert is_allowed(to_b(ports=[{"port": "web"}]), A, B, 80)
    assert not is_allowed(to_b(ports=[{"port": "web"}]), A, B, 81)
    assert not is_allowed(to_b(ports=[{"port": "other"}]), A, B, 80)
    assert is_allowed(to_b(ports=[{"port": 70, "endPort": 90}]), A, B, 80)
    assert not is_allowed(to_b(ports=[{"port": 80, "protocol": "UDP"}]), A, B, 80)


def test_addresses_are_compared_with_blocks_and_their_exceptions() -> None:
    block = {"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.8/32"]}}

    assert is_allowed(to_b(**{"from": [block]}), OUTSIDE, B, 80)
    assert not is_allowed(to_b(**{"from": [block]}), Pod(address="192.0.2.8"), B, 80)
    assert not is_allowed(to_b(**{"from": [{"namespaceSelector": {}}]}), OUTSIDE, B, 80)


@pytest.mark.parametrize(
    ("operator", "values", "is_selected"),
    [("Exists", None, True), ("DoesNotExist", None, False), ("In", ["a"], True), ("NotIn", ["a"], False)],
)
def test_expressions_select_as_kubernetes_does(operator: str, values: list[str] | None, is_selected: bool) -> None:  # noqa: FBT001
    rule = {"key": "app", "operator": operator, "values": values}
    rules = to_b(**{"from": [{"podSelector": {"matchExpressions": [rule]}}]})

    assert is_allowed(rules, A, B, 80) == is_selected

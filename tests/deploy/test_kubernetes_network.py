"""The network's rules on Kubernetes: who may call whom, and nobody else anybody."""

from __future__ import annotations

import pytest
from tests.deploy.kustomize_files import SECRETS, Described, of_base

# Each call of one role to another, with the port: `Channels`, the bus and the index have no others.
CALLS = {
    ("router", "nats", 4222),
    ("router", "redis", 6379),
    ("router", "prefill", 9000),
    ("router", "decode", 9000),
    ("router", "host-cache", 9000),
    ("prefill", "nats", 4222),
    ("prefill", "decode", 9000),
    ("prefill", "host-cache", 9000),
    ("decode", "nats", 4222),
    ("decode", "prefill", 9000),
    ("decode", "decode", 9000),
    ("decode", "host-cache", 9000),
    ("host-cache", "nats", 4222),
    ("host-cache", "redis", 6379),
    ("host-cache", "host-cache", 9000),
}


def rules() -> dict[str, Described]:
    return {
        each["metadata"]["name"]: each["spec"]
        for each in of_base()
        if each["kind"] == "NetworkPolicy"
    }


def peers(rule: Described, side: str) -> list[tuple[str, int]]:
    """Roles and ports of a rule's entries: `from` of what comes in, `to` of what goes out."""
    return [
        (role, port["port"])
        for entry in rule.get("ingress" if side == "from" else "egress", [])
        for peer in entry.get(side, [])
        for role in peer["podSelector"]["matchExpressions"][0]["values"]
        for port in entry["ports"]
    ]


def test_nobody_may_call_what_no_rule_names() -> None:
    named = rules()
    assert named["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    open_to_all = {
        name
        for name, rule in named.items()
        if any("from" not in e for e in rule.get("ingress", []))
    }
    assert open_to_all == {"router"}, "its doors, for clients"
    assert not any("to" not in e for rule in named.values() for e in rule.get("egress", []))


@pytest.mark.parametrize("role", SECRETS)
def test_a_call_is_allowed_at_both_of_its_ends_or_at_none(role: str) -> None:
    rule = rules()[role]
    assert rule["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": role}
    called = {(to, port) for caller, to, port in CALLS if caller == role}
    assert set(peers(rule, "to")) == called
    callers = {(caller, port) for caller, to, port in CALLS if to == role}
    assert set(peers(rule, "from")) == callers
    assert ("Egress" in rule["policyTypes"]) == bool(called)


def test_those_who_call_by_name_may_ask_for_names_and_nothing_else_outside() -> None:
    (entry,) = rules()["names"]["egress"]
    assert {port["port"] for port in entry["ports"]} == {53}
    (asking,) = rules()["names"]["podSelector"]["matchExpressions"]
    assert set(asking["values"]) == {caller for caller, _, _ in CALLS}
    outside = {name for name, rule in rules().items() if _leaves(rule)}
    assert outside == {"names"}


def _leaves(rule: Described) -> bool:
    return any("podSelector" not in to for e in rule.get("egress", []) for to in e.get("to", []))

"""The chart's values at the door: what the schema takes and refuses. Wants no Helm."""

from __future__ import annotations

import json
import tomllib
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]
from tests.deploy.chart import CHART, default_values, schema
from tests.deploy.compose_file import ROOT
from tests.deploy.kustomize_files import HPA, KEDA, described

from tools import chart_settings

GOOD: dict[str, dict[str, Any]] = {
    "a model of one's own": {
        "model": {
            "path": "/weights/granite",
            "volume": {"persistentVolumeClaim": {"claimName": "weights"}},
        }
    },
    "cards": {"prefill": {"gpus": 1}, "decode": {"gpus": 2, "ranks": 2}},
    "certificates": {"tls": {"enabled": True}},
    "certificates, and a NATS of one's own": {
        "tls": {"enabled": True},
        "nats": {"url": "tls://nats.infra:4222"},
    },
    "tenants": {"router": {"apiKeysSecret": "tenants", "service": {"type": "LoadBalancer"}}},
    "an object store": {
        "hostCache": {
            "objectStore": {
                "url": "s3://units/blue/",
                "query": "region=eu-central-1",
                "secret": "bucket",
            }
        },
        "network": {"egress": [{"ports": [{"port": 443}]}]},
    },
    "servers of one's own": {
        "nats": {"url": "nats://nats.infra:4222"},
        "redis": {"url": "redis://redis.infra:6379/0"},
    },
    "KEDA": {"autoscale": {"by": "keda", "prefill": {"max": 20, "target": 0.5}}},
    "an HPA": {"autoscale": {"by": "hpa"}},
    "settings": {
        "prefill": {"settings": {"chunk_tokens": 1000000, "prefix_cache": False}},
        "router": {"settings": {"max_queued": 2048, "cors_origin": "*"}},
    },
    "places": {
        "decode": {
            "pod": {"nodeSelector": {"disk": "fast"}, "tolerations": [{"operator": "Exists"}]},
            "resources": {"limits": {"memory": "64Gi"}},
        },
        "image": {"repository": "r.example/ferryman", "tag": "2", "pullPolicy": "Always"},
    },
    "a monitor": {"monitor": {"enabled": True}},
    "no rules": {"network": {"policies": False}},
}
BAD: dict[str, dict[str, Any]] = {
    "router": {"router": {"replicas": "2"}},
    "prefil": {"prefil": {"replicas": 2}},
    "memoryBytes": {"prefill": {"memoryBytes": "512 MB"}},
    "gpus": {"decode": {"gpus": -1}},
    "drainSeconds": {"decode": {"drainSeconds": 0}},
    "chunk_token": {"prefill": {"settings": {"chunk_token": 256}}},
    "api_keys": {"router": {"settings": {"api_keys": "secret"}}},
    "path": {"model": {"path": "granite"}},
    "pageSize": {"model": {"pageSize": 24}},
    "by": {"autoscale": {"by": "queue"}},
    "url": {"nats": {"url": "nats.infra:4222"}},
    "objectStore": {"hostCache": {"objectStore": {"url": "https://bucket"}}},
    "hostNetwork": {"decode": {"pod": {"hostNetwork": True}}},
    "egress": {"network": {"egress": [{"from": []}]}},
}


def laid_over(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """As Helm does before it looks: maps are merged, all else is replaced."""
    merged = deepcopy(defaults)
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = laid_over(value, merged[name])
        else:
            merged[name] = value
    return merged


@pytest.mark.parametrize("values", [{}, *GOOD.values()], ids=["defaults", *GOOD])
def test_values_that_make_a_cluster_are_taken(values: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(laid_over(values, default_values()), schema())


@pytest.mark.parametrize("named", BAD)
def test_a_value_that_makes_none_is_refused_by_its_name(named: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(laid_over(BAD[named], default_values()), schema())
    assert named in f"{caught.value.message} {list(caught.value.absolute_path)}"


def test_the_settings_of_a_role_are_those_that_it_has() -> None:
    text = chart_settings.SCHEMA.read_text()
    assert chart_settings.written(text) == text, "run `python tools/chart_settings.py`"


def test_a_stale_setting_is_noticed_and_a_role_needs_its_place() -> None:
    text = chart_settings.SCHEMA.read_text()
    stale = text.replace('"chunk_tokens"', '"chunk_token"')
    assert stale != text
    assert chart_settings.written(stale) == text
    with pytest.raises(ValueError, match="decodeSettings"):
        chart_settings.written(text.replace("decodeSettings", "decoding"))


def test_every_value_is_shown_with_its_default() -> None:
    """So that `helm show values` shows all there is."""

    def names(properties: dict[str, Any], values: dict[str, Any], at: str) -> None:
        assert set(properties) - {"global"} == set(values), at
        for name, value in values.items():
            if below := properties[name].get("properties"):
                names(below, value, f"{at}.{name}")

    names(schema()["properties"], default_values(), "values")


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_scalers_look_at_one_figure_within_the_same_bounds(role: str) -> None:
    (keda,), (hpa,) = described(KEDA / f"{role}.yaml"), described(HPA / f"{role}.yaml")
    (trigger,), (metric,) = keda["spec"]["triggers"], hpa["spec"]["metrics"]
    rules = yaml.safe_load((CHART / "scaling/prometheus-adapter.yaml").read_text())
    served = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules["rules"]["external"]}
    asked = metric["external"]["metric"]["name"]
    assert served[asked].replace("{<<.LabelMatchers>>}", "") == trigger["metadata"]["query"]
    target = metric["external"]["target"]
    assert (target["type"], target["value"]) == (
        trigger["metricType"],
        trigger["metadata"]["threshold"],
    )
    assert keda["spec"]["scaleTargetRef"] == hpa["spec"]["scaleTargetRef"]
    bounds = default_values()["autoscale"][role]
    assert bounds == {
        "min": keda["spec"]["minReplicaCount"],
        "max": keda["spec"]["maxReplicaCount"],
        "target": json.loads(target["value"]),
    }
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (
        bounds["min"],
        bounds["max"],
    )

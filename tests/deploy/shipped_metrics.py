"""The metrics that shipped dashboards, alerts and scalers ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from tests.deploy.compose_file import ROOT

OBSERVE = ROOT / "deploy" / "observe"
DASHBOARD = OBSERVE / "grafana" / "dashboards" / "ferryman.json"
SCALERS = ROOT / "deploy" / "helm" / "ferryman" / "scaling"
METRIC = re.compile(r"\bferryman_\w+")


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> list[str]:
    """Every expression that is shipped."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    scaled = [path.read_text() for path in SCALERS.rglob("*.yaml")]
    queried = [text for each in scaled for text in re.findall(r"(?:query: |metric: )(.*)", each)]
    adapted = yaml.safe_load((SCALERS / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    return [
        *shown,
        *(rule["expr"] for rule in alerts()),
        *queried,
        *(rule["metricsQuery"].replace("<<.LabelMatchers>>", "") for rule in adapted),
    ]


def asked_for() -> set[str]:
    """The names of all metrics in them; patterns of names are left out."""
    return {name for query in queries() for name in METRIC.findall(query) if name[-1] != "_"}


def exported(text: str) -> set[str]:
    """The names in a page of metrics, those of histograms' parts too."""
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    return names | {f"{name}{part}" for name in names for part in ("_bucket", "_sum", "_count")}


def paths(folder: Path = OBSERVE) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]

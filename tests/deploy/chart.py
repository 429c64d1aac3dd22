"""The Helm chart as values, and as Helm renders it where Helm is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from tests.deploy.compose_file import ROOT
from tests.deploy.kustomize_files import CLOUD_NODE, LOADER, WORKLOADS, Described

CHART = ROOT / "deploy" / "helm" / "ferryman"
needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="NOT TRIED: the chart as Helm renders it; no helm-python-sdk is here",
)
Values = Mapping[str, Any]
Kinds = dict[tuple[str, str], Described]


class Refused(Exception):
    """Helm does not render the chart with these values, and says why."""


@dataclass(frozen=True, slots=True)
class HelmProcess:
    """A process that answers for Helm."""

    process: subprocess.Popen[str]

    def call(self, call: str, values: Values, chart: Path = CHART) -> Any:
        """Raises Refused."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = json.dumps({"chart": str(chart), "call": call, "values": dict(values)})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "Helm's process has ended; its stderr says why"
        told = json.loads(answer)
        if "error" in told:
            raise Refused(told["error"])
        return told["result"]

    def objects(self, values: Values, chart: Path = CHART) -> list[Described]:
        """The objects that an installation has. Raises Refused."""
        files = self.call("render", values, chart)
        text = [text for name, text in files.items() if name.endswith(".yaml")]
        return [each for one in text for each in yaml.load_all(one, LOADER) if each]


@contextmanager
def helm_process() -> Iterator[HelmProcess]:
    """Helm, until the end of the block."""
    command = [sys.executable, "-m", "tests.deploy.helm_process"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield HelmProcess(process)


def default_values() -> dict[str, Any]:
    """Those that the chart has."""
    given: dict[str, Any] = yaml.load((CHART / "values.yaml").read_text(), LOADER)
    return given


def schema() -> dict[str, Any]:
    """Of the values."""
    read: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return read


def without_marks(objects: list[Described]) -> Kinds:
    """Objects by kind and name, without what Helm or kustomize says of itself: Helm's labels, the
    namespace and its object, and the order of variables."""
    kept = {}
    for each in objects:
        if each["kind"] == "Namespace":
            continue
        about = each["metadata"]
        labels = {"app.kubernetes.io/part-of": about["labels"]["app.kubernetes.io/part-of"]}
        meta = {**about, "labels": labels}
        meta.pop("namespace", None)
        kept[each["kind"], about["name"]] = {**each, "metadata": meta}
    return kept


def pod(objects: list[Described], name: str) -> Described:
    (found,) = (
        each for each in objects if each["kind"] in WORKLOADS and each["metadata"]["name"] == name
    )
    spec: Described = found["spec"]["template"]["spec"]
    return spec


def variables(objects: list[Described], name: str) -> dict[str, str]:
    container = pod(objects, name)["containers"][0]
    return {
        each["name"]: each.get("value", CLOUD_NODE).replace("$(FERRYMAN_NODE)", CLOUD_NODE)
        for each in container["env"]
        if each["name"].startswith("FERRYMAN_")
    }


def in_one_order(objects: Kinds) -> Kinds:
    """With variables by their names; their order says nothing but for `$(…)`, which is tested."""
    for each in objects.values():
        if each["kind"] in WORKLOADS:
            for container in each["spec"]["template"]["spec"]["containers"]:
                container.get("env", []).sort(key=lambda variable: variable["name"])
    return objects

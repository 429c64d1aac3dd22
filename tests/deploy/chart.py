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
from tests.deploy.kustomize_files import LOADER, Described

CHART = ROOT / "deploy" / "helm" / "ferryman"
needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="NOT TRIED: the chart as Helm renders it; no helm-python-sdk is here",
)
Values = Mapping[str, Any]


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


def without_marks(objects: list[Described]) -> dict[tuple[str, str], Described]:
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

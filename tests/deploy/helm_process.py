"""Helm's own code (the Go library in the wheel helm-python-sdk), a line of JSON a call.

It runs in a process of its own: Go's runtime brings threads and signal handlers, and other tests
fork. Started by `tests.deploy.chart`.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

NAMES = {"name": "ferryman", "namespace": "ferryman"}


def answer(helm: Any, chart: str, call: str, values: dict[str, Any]) -> Any:
    """The result of a call: files by their names, or the complaints of the linter."""
    if call == "lint":
        return helm.lint(chart, values, strict=True)["messages"]
    with helm.Chart.load(chart) as loaded:
        if call == "package":
            return loaded.save(values["into"])
        return loaded.render(values, **NAMES)


def main() -> None:
    """Answers lines of `{"chart": PATH, "call": …, "values": …}` until there are no more."""
    helm = importlib.import_module("helm_python")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = {"result": answer(helm, asked["chart"], asked["call"], asked["values"])}
        except helm.HelmError as error:
            told = {"error": str(error)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

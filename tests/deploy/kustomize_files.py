"""The objects of deploy as values; built by `kubectl kustomize` where there is one."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from tests.deploy.compose_file import ROOT

DEPLOY = ROOT / "deploy" / "kustomize"
OBJECTS = ROOT / "deploy" / "helm" / "ferryman" / "objects"
MONITOR = ROOT / "deploy" / "helm" / "ferryman" / "monitor"
KEDA = ROOT / "deploy" / "helm" / "ferryman" / "scaling" / "keda"
HPA = ROOT / "deploy" / "helm" / "ferryman" / "scaling" / "hpa"
VERSION = "1.32"
# A pod sees the credentials of its role; the key seals the state that routers and host-caches keep.
SECRETS = {
    "host-cache": {"cluster-key", "hostcache-credentials"},
    "prefill": {"prefill-credentials"},
    "decode": {"decode-credentials"},
    "router": {"cluster-key", "router-credentials"},
    "nats": {"nats-users"},
    "redis": {"redis-users"},
}
CLOUD_NODE = "ip-10-0-123-45.eu-central-1.compute.internal"
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl builds overlays; none is here")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Described = dict[str, Any]


def described(path: Path) -> list[Described]:
    return [each for each in yaml.load_all(path.read_text(), LOADER) if each]


@cache
def of_base() -> list[Described]:
    named = described(OBJECTS / "kustomization.yaml")[0]["resources"]
    return [each for name in named for each in described(OBJECTS / name)]


def workload(name: str) -> Described:
    """The pod template's spec of a workload, with its own name."""
    (found,) = (
        each for each in of_base() if each["kind"] in WORKLOADS and each["metadata"]["name"] == name
    )
    spec: Described = found["spec"]["template"]["spec"]
    return spec


def environment(name: str) -> dict[str, str]:
    """Variables of the main container; those of the downward API have a name in their place, as a
    cloud gives nodes."""
    return {
        each["name"]: each.get("value", CLOUD_NODE).replace("$(", "").replace(")", "")
        for each in workload(name)["containers"][0]["env"]
        if each["name"].startswith("FERRYMAN_")
    }


@cache
def built(folder: Path) -> list[Described]:
    assert KUBECTL is not None
    made = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [each for each in yaml.load_all(made.stdout, LOADER) if each]

"""The objects for Kubernetes against its published schemas and the settings that they name.

Built by `kubectl kustomize` where there is one; the files themselves are looked at everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
from tests.deploy.compose_file import SETTINGS, role_of
from tests.deploy.kustomize_files import (
    DEPLOY,
    HPA,
    KEDA,
    MONITOR,
    SECRETS,
    VERSION,
    Described,
    built,
    described,
    environment,
    needs_kubectl,
    of_base,
    workload,
)

from ferryman.settings.names import names_of
from ferryman.settings.sources import Sources, read_settings
from ferryman_cli.app import run

MONITORS_SECRET = "metrics-token"
# The kubelet makes folders as root, so root gives them away; nothing else runs as root, and nothing
# else has a capability.
ROOT_CONTAINERS = {("host-cache", "arena-folder")}


@pytest.mark.parametrize(
    "resource", of_base(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}"
)
def test_every_object_is_as_kubernetes_publishes_its_kind(resource: Described) -> None:
    kubernetes_validate.validate(resource, VERSION, strict=True)


def test_a_field_that_is_not_known_would_be_seen() -> None:
    (service, *_) = (each for each in of_base() if each["kind"] == "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**service, "spec": {**service["spec"], "port": 1}}, VERSION, strict=True
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_of_a_pod_is_one_of_its_settings(name: str, tmp_path: Path) -> None:
    given = {
        key: str(tmp_path) if value == "/models/demo" else value
        for key, value in environment(name).items()
    }
    read_settings(SETTINGS[name], role_of(name), Sources.of(given))
    names = {key.removeprefix("FERRYMAN_").lower() for key in given}
    assert names <= names_of(role_of(name))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pod_may_drain_before_it_is_killed(name: str) -> None:
    drain = float(environment(name).get("FERRYMAN_DRAIN_SECONDS", "30"))
    stop = workload(name)["containers"][0].get("lifecycle", {}).get("preStop")
    pause = float(stop["exec"]["command"][-1]) if stop else 0.0
    assert workload(name)["terminationGracePeriodSeconds"] > drain + pause


@pytest.mark.parametrize("name", SECRETS)
def test_a_pod_sees_its_own_secrets_alone(name: str) -> None:
    volumes = workload(name)["volumes"]
    assert {each["secret"]["secretName"] for each in volumes if "secret" in each} == SECRETS[name]
    assert not workload(name)["automountServiceAccountToken"]
    assert workload(name)["enableServiceLinks"] is False, "it would make FERRYMAN_… variables"


@pytest.mark.parametrize("name", SECRETS)
def test_every_container_is_confined(name: str) -> None:
    for container in [*workload(name)["containers"], *workload(name).get("initContainers", [])]:
        context = container["securityContext"]
        is_root = (name, container["name"]) in ROOT_CONTAINERS
        capabilities = {"add": ["CHOWN"]} if is_root else {}
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"], **capabilities}
        assert "memory" in container["resources"]["limits"]
        both = {**workload(name)["securityContext"], **context}
        assert both["seccompProfile"] == {"type": "RuntimeDefault"}
        assert both["runAsUser"] == (0 if is_root else 10001)
        assert both.get("runAsNonRoot", False) is not is_root


def test_what_runs_as_root_runs_once_and_sees_two_folders() -> None:
    ((name, _),) = ROOT_CONTAINERS
    (container,) = workload(name)["initContainers"]
    assert container["command"][0] == "chown"
    assert not container.get("env"), "it reads nothing"
    mounts = {each["name"] for each in container["volumeMounts"]}
    folders = {each["name"] for each in workload(name)["volumes"] if "hostPath" in each}
    assert mounts == folders, "no secret among them"


@pytest.mark.parametrize("name", SETTINGS)
def test_probes_and_services_find_the_ports_that_are_listened_on(name: str) -> None:
    container, given = workload(name)["containers"][0], environment(name)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    listened = {int(value) for key, value in given.items() if key.endswith("PORT")}
    assert set(ports.values()) == listened
    probes = [container[probe] for probe in container if probe.endswith("Probe")]
    assert {"startupProbe", "livenessProbe"} <= set(container)
    assert all(probe["httpGet"]["port"] in ports for probe in probes)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_maps_its_node_s_arena(name: str) -> None:
    def arena(each: str) -> tuple[str, str]:
        (volume,) = (v for v in workload(each)["volumes"] if v["name"] == "arena")
        mounts = workload(each)["containers"][0]["volumeMounts"]
        (mount,) = (m for m in mounts if m["name"] == "arena")
        return volume["hostPath"]["path"], mount["mountPath"]

    assert arena(name) == arena("host-cache")
    assert arena(name)[1] == environment("host-cache")["FERRYMAN_ARENA_FOLDER"]
    (service,) = (each for each in of_base() if each["kind"] == "Service" and _is_local(each))
    (port,) = service["spec"]["ports"]
    named = f"{service['metadata']['name']}:{port['port']}"
    assert environment(name)["FERRYMAN_HOSTCACHE_ADDRESS"] == named


def _is_local(service: Described) -> bool:
    return bool(service["spec"].get("internalTrafficPolicy") == "Local")


@pytest.mark.parametrize("name", SECRETS)
def test_a_role_has_an_identity_of_its_own(name: str) -> None:
    accounts = {
        each["metadata"]["name"]: each for each in of_base() if each["kind"] == "ServiceAccount"
    }
    assert workload(name)["serviceAccountName"] == name
    assert set(accounts) == set(SECRETS)
    assert not accounts[name]["automountServiceAccountToken"]


def test_the_secrets_are_those_that_pods_mount(tmp_path: Path) -> None:
    (secrets,) = described(DEPLOY / "secrets" / "kustomization.yaml")
    made = {each["name"]: each["files"] for each in secrets["secretGenerator"]}
    assert set.union(*SECRETS.values()) | {"observer-urls", MONITORS_SECRET} == set(made)
    folder = tmp_path / "made"
    line = ["container-credentials", str(folder), "--key", str(folder / "cluster.key")]
    assert run([*line, "--nats-url", "nats://n:4222", "--redis-url", "redis://r:6379/0"]) == 0
    assert all((tmp_path / file).is_file() for files in made.values() for file in files)


@needs_kubectl
@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_kustomize_builds_it_and_it_is_still_valid(folder: str) -> None:
    resources = built(DEPLOY / folder)
    assert len(resources) == len(of_base())
    for each in resources:
        kubernetes_validate.validate(each, VERSION, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "ferryman"


def test_prometheus_is_told_of_every_pod_and_shows_each_its_token() -> None:
    monitors = described(MONITOR / "pods.yaml")
    (secrets,) = described(DEPLOY / "secrets" / "kustomization.yaml")
    made = {each["name"]: each["files"] for each in secrets["secretGenerator"]}
    scraped: dict[str, str] = {}
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        shown = endpoint["authorization"]["credentials"]
        assert made[shown["name"]] == [f"made/metrics/{shown['key']}"]
        (which,) = monitor["spec"]["selector"]["matchExpressions"]
        scraped |= dict.fromkeys(which["values"], endpoint["port"])
    assert set(scraped) == set(SETTINGS)
    for name, port in scraped.items():
        assert port in {each["name"] for each in workload(name)["containers"][0]["ports"]}


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_scaler_asks_for_a_workload_and_compares_the_most_loaded_one(name: str) -> None:
    (scaled,), (hpa,) = described(KEDA / f"{name}.yaml"), described(HPA / f"{name}.yaml")
    kubernetes_validate.validate(hpa, VERSION, strict=True)
    assert workload(scaled["spec"]["scaleTargetRef"]["name"])
    (trigger,) = scaled["spec"]["triggers"]
    per_worker = trigger["metadata"]["query"].startswith("max(")
    assert (trigger.get("metricType") == "Value") == per_worker, "a sum is shared by all"
    assert re.findall(r"ferryman_\w+", trigger["metadata"]["query"])

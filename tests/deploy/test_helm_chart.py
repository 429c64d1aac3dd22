"""The chart as Helm renders it: the objects that kustomize builds, and those that values change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from tests.deploy.chart import (
    HelmProcess,
    Refused,
    helm_process,
    in_one_order,
    needs_helm,
    pod,
    variables,
    without_marks,
)
from tests.deploy.compose_file import SETTINGS, role_of
from tests.deploy.kustomize_files import (
    CLOUD_NODE,
    DEPLOY,
    HPA,
    KEDA,
    MONITOR,
    VERSION,
    built,
    described,
    needs_kubectl,
)
from tests.deploy.test_chart_values import BAD, GOOD

from ferryman.settings.sources import Sources, read_settings

pytestmark = needs_helm
OTHERS_KINDS = ("ScaledObject", "PodMonitor")  # Kubernetes publishes no schema of them


@pytest.fixture(scope="module")
def helm() -> Iterator[HelmProcess]:
    with helm_process() as started:
        yield started


@needs_kubectl
@pytest.mark.parametrize(
    ("folder", "values"),
    [("base", {}), ("overlays/gpu", {"prefill": {"gpus": 1}, "decode": {"gpus": 1}})],
    ids=["base", "gpu"],
)
def test_helm_and_kustomize_make_the_same_objects(
    folder: str, values: dict[str, Any], helm: HelmProcess
) -> None:
    by_helm = in_one_order(without_marks(helm.objects(values)))
    by_kustomize = in_one_order(without_marks(built(DEPLOY / folder)))
    assert set(by_helm) == set(by_kustomize)
    for name, each in by_kustomize.items():
        assert by_helm[name] == each, name


@pytest.mark.parametrize("described_as", GOOD)
def test_changed_values_make_objects_that_kubernetes_takes_and_services_start_with(
    described_as: str, helm: HelmProcess, tmp_path: Path
) -> None:
    objects, by_default = helm.objects(GOOD[described_as]), helm.objects({})
    for each in objects:
        if each["kind"] not in OTHERS_KINDS and each not in by_default:
            kubernetes_validate.validate(each, VERSION, strict=True)
    for name in SETTINGS:
        given = variables(objects, name)
        given = {
            **given,
            **({"FERRYMAN_MODEL": str(tmp_path)} if "FERRYMAN_MODEL" in given else {}),
        }
        read_settings(SETTINGS[name], role_of(name), Sources.of(given))
        mounts = {m["name"] for m in pod(objects, name)["containers"][0]["volumeMounts"]}
        volumes = [volume["name"] for volume in pod(objects, name)["volumes"]]
        assert mounts == set(volumes)
        assert len(volumes) == len(mounts)


@pytest.mark.parametrize("named", BAD)
def test_helm_refuses_what_the_schema_does(named: str, helm: HelmProcess) -> None:
    with pytest.raises(Refused) as caught:
        helm.objects(BAD[named])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": {"path": "/weights/granite"}}, r"give model\.volume"),
        ({"model": {"volume": {"emptyDir": {}}}}, r"model\.volume is mounted at /weights"),
        ({"decode": {"ranks": 2, "gpus": 1}}, "decode.ranks is 2 and decode.gpus 1"),
        ({"autoscale": {"by": "hpa", "prefill": {"min": 9}}}, r"autoscale\.prefill\.min is 9"),
    ],
    ids=["no volume", "no path to it", "a rank without a card", "more than the most"],
)
def test_values_that_do_not_go_together_are_refused(
    values: dict[str, Any], reason: str, helm: HelmProcess
) -> None:
    with pytest.raises(Refused, match=reason):
        helm.objects(values)


def test_a_worker_on_a_card_takes_the_steps_that_it_is_told(helm: HelmProcess) -> None:
    told = {"gpus": 1, "settings": {"chunk_tokens": 4096}}
    objects = helm.objects({"prefill": told, "decode": {"gpus": 1}})
    assert variables(objects, "prefill")["FERRYMAN_CHUNK_TOKENS"] == "4096"
    assert variables(objects, "decode")["FERRYMAN_CHUNK_TOKENS"] == "2048"


def test_ranks_on_cards_have_a_shared_memory_of_their_own(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["cards"])
    (container,) = pod(objects, "decode")["containers"]
    assert variables(objects, "decode")["FERRYMAN_TP_SIZE"] == "2"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "shm" not in {each["name"] for each in pod(objects, "prefill")["volumes"]}


def test_helm_finds_nothing_to_say_of_the_chart(helm: HelmProcess) -> None:
    messages = helm.call("lint", {})
    assert [each for each in messages if each["severity"] > 1] == []


def test_a_package_has_all_that_the_folder_has(helm: HelmProcess, tmp_path: Path) -> None:
    package = Path(helm.call("package", {"into": str(tmp_path)}))
    assert helm.objects({}, package) == helm.objects({})


def test_a_model_of_one_s_own_is_mounted_where_it_is_read(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["a model of one's own"])
    for name in ("router", "prefill", "decode"):
        (volume,) = (v for v in pod(objects, name)["volumes"] if v["name"] == "weights")
        mounts = pod(objects, name)["containers"][0]["volumeMounts"]
        (mount,) = (m for m in mounts if m["name"] == "weights")
        assert volume["persistentVolumeClaim"] == {"claimName": "weights"}
        assert mount["readOnly"]
        assert variables(objects, name)["FERRYMAN_MODEL"].startswith(f"{mount['mountPath']}/")


def test_a_node_keeps_its_objects_below_its_own_name(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["an object store"])
    folder = variables(objects, "host-cache")["FERRYMAN_STORAGE_DIR"]
    assert folder == f"s3://units/blue/{CLOUD_NODE}?region=eu-central-1"
    (container,) = pod(objects, "host-cache")["containers"]
    names = [each["name"] for each in container["env"]]
    assert names.index("FERRYMAN_NODE") < names.index("FERRYMAN_STORAGE_DIR"), "it is made of it"
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    rules = {each["metadata"]["name"]: each for each in objects if each["kind"] == "NetworkPolicy"}
    assert {"ports": [{"port": 443}]} in rules["names"]["spec"]["egress"]


def test_with_certificates_every_service_has_its_own_and_probes_speak_https(
    helm: HelmProcess,
) -> None:
    objects = helm.objects(GOOD["certificates"])
    for name in SETTINGS:
        (volume,) = (v for v in pod(objects, name)["volumes"] if v["name"] == "tls")
        assert volume["secret"]["secretName"] == f"{role_of(name)}-tls"
        assert variables(objects, name)["FERRYMAN_TLS_DIR"] == "/etc/ferryman/tls"
        given = variables(objects, name)
        assert given["FERRYMAN_NATS_URL"] == "tls://nats:4222"
        assert given.get("FERRYMAN_REDIS_URL", "rediss://redis:6379/0") == "rediss://redis:6379/0"
    (router,) = pod(objects, "router")["containers"]
    probes = [router[probe] for probe in router if probe.endswith("Probe")]
    assert {probe["httpGet"]["scheme"] for probe in probes} == {"HTTPS"}


def test_with_certificates_nats_and_redis_speak_tls_alone(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["certificates"])
    for name, said in (("nats", ["--tls"]), ("redis", ["--port", "0", "--tls-port", "6379"])):
        (container,) = pod(objects, name)["containers"]
        assert " ".join(said) in " ".join(container["args"])
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        files = [each for each in container["args"] if each.startswith("/etc/ferryman/tls/")]
        assert "/etc/ferryman/tls" in mounted
        assert {Path(file).name for file in files} == {"ca.crt", f"{name}.crt", f"{name}.key"}
        (volume,) = (v for v in pod(objects, name)["volumes"] if v["name"] == "tls")
        assert volume["secret"]["secretName"] == f"{name}-tls"
    (redis,) = pod(objects, "redis")["containers"]
    probes = [redis[probe]["exec"]["command"][-1] for probe in ("livenessProbe", "readinessProbe")]
    assert all(probe.startswith("redis-cli --tls ") for probe in probes)


def test_what_is_elsewhere_is_not_started(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["certificates, and a NATS of one's own"])
    assert not [each for each in objects if each["metadata"]["name"] == "nats"]
    for name in SETTINGS:
        assert variables(objects, name)["FERRYMAN_NATS_URL"] == "tls://nats.infra:4222"


@pytest.mark.parametrize(("by", "folder"), [("keda", KEDA), ("hpa", HPA)])
def test_scalers_are_those_of_kustomize_and_helm_leaves_the_number_to_them(
    by: str, folder: Path, helm: HelmProcess
) -> None:
    objects = helm.objects({"autoscale": {"by": by}})
    for name in ("prefill", "decode"):
        (expected,) = described(folder / f"{name}.yaml")
        (scaler,) = (
            each
            for each in objects
            if each["kind"] == expected["kind"] and each["metadata"]["name"] == name
        )
        assert scaler["spec"] == expected["spec"]
        (stateful,) = (
            each
            for each in objects
            if each["kind"] == "StatefulSet" and each["metadata"]["name"] == name
        )
        assert "replicas" not in stateful["spec"]


def test_a_monitor_is_that_of_kustomize(helm: HelmProcess) -> None:
    objects = helm.objects(GOOD["a monitor"])
    made = [each["spec"] for each in objects if each["kind"] == "PodMonitor"]
    assert made == [each["spec"] for each in described(MONITOR / "pods.yaml")]
    assert not [each for each in helm.objects({}) if each["kind"] == "PodMonitor"]


def test_a_monitor_asks_a_door_with_a_certificate_for_its_name(helm: HelmProcess) -> None:
    objects = helm.objects({**GOOD["a monitor"], **GOOD["certificates"]})
    made = {each["metadata"]["name"]: each for each in objects if each["kind"] == "PodMonitor"}
    (door,) = made["router"]["spec"]["podMetricsEndpoints"]
    assert (door["scheme"], door["tlsConfig"]["serverName"]) == ("https", "router.ferryman")
    (inner,) = made["workers"]["spec"]["podMetricsEndpoints"]
    assert "scheme" not in inner, "their numbers stay HTTP"


def test_the_notes_name_every_secret_that_pods_mount(helm: HelmProcess) -> None:
    values = GOOD["certificates"]
    notes = next(t for n, t in helm.call("render", values).items() if n.endswith("NOTES.txt"))
    objects = helm.objects(values)
    mounted = {
        volume["secret"]["secretName"]
        for name in (*SETTINGS, "nats", "redis")
        for volume in pod(objects, name)["volumes"]
        if "secret" in volume
    }
    assert all(f"generic {secret} " in notes for secret in mounted)
    assert "https://localhost:8000" in notes
    assert "{{" not in notes

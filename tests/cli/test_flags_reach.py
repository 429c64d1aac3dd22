"""Each option of `ferryman up` reaches the processes that it is for, and no other.

An option that is left out of a plan changes nothing, and no error tells of it. So each is given
another value than it has, and the environments of all processes are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest
from tests.certificates import make_certificates

from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves
from ferryman.settings.names import SERVICES
from ferryman_launcher import process_plan
from ferryman_launcher.options import parameter_of, up_options, up_sources
from ferryman_launcher.state_folder import StateFolder

APART, BOTH = {"worker": "apart"}, {"worker": "both"}
WORKERS = {"prefill", "decode", "both"}
ROUTER, HOST = {"router"}, {"hostcache"}
ALL = WORKERS | ROUTER | HOST

REACHED: Mapping[str, tuple[str, set[str]]] = {
    "--model": ("MODEL", WORKERS | ROUTER),
    "--dtype": ("bfloat16", WORKERS),
    "--quantize": ("int8", WORKERS),
    "--kv-dtype": ("fp8", WORKERS),
    "--exactness": ("bits", WORKERS),
    "--page-size": ("32", WORKERS),
    "--chunk-tokens": ("513", WORKERS),
    "--max-running": ("33", WORKERS),
    "--max-waiting": ("257", WORKERS),
    "--memory-bytes": ("1073741825", WORKERS),
    "--recurrent-slots": ("1", WORKERS),
    "--device": ("cuda:1", WORKERS),
    "--replay-steps": ("false", WORKERS),
    "--threads": ("7", WORKERS),
    "--prefix-cache": ("false", WORKERS),
    "--overlap": ("false", WORKERS),
    "--snapshot-grid": ("64", WORKERS),
    "--draft": ("ngram", WORKERS),
    "--draft-tokens": ("5", WORKERS),
    "--lora": ("kites=LORA", WORKERS | ROUTER),
    "--served-name": ("other", ROUTER),
    "--tool-parser": ("other", ROUTER),
    "--reasoning-parser": ("other", ROUTER),
    "--prefill": ("2", {"prefill"}),
    "--decode": ("2", {"decode"}),
    "--workers": ("2", {"both"}),
    "--prefill-tp": ("2", {"prefill"}),
    "--decode-tp": ("2", {"decode"}),
    "--worker-tp": ("2", {"both"}),
    "--routers": ("2", ROUTER),
    "--host": ("0.0.0.0", ROUTER),
    "--http-port": ("8003", ROUTER),
    "--grpc-port": ("8004", ROUTER),
    "--cors-origin": ("*", ROUTER),
    "--strict-fields": ("true", ROUTER),
    "--verbatim-prompts": ("true", ROUTER),
    "--web-page": ("false", ROUTER),
    "--state-signers": (64 * "a", ROUTER),
    "--default-max-tokens": ("1", ROUTER),
    "--nats-url": ("nats://n:1", ALL),
    "--redis-url": ("redis://r:2/0", ROUTER | HOST),
    "--cluster": ("other", ALL),
    "--planes": ("grpc", WORKERS),
    "--audit-share": ("0.5", {"decode", "both"}),
    "--insecure": ("true", ALL),
    "--tls-dir": ("TLS", ALL),
    "--write-policy": ("write_back", WORKERS | HOST),
    "--prefetch-policy": ("best_effort", WORKERS | HOST),
    "--prefetch-threshold": ("65", WORKERS | HOST),
    "--host-memory": ("3M", HOST),
    "--storage-dir": ("other", HOST),
    "--storage-bytes": ("3M", HOST),
    "--nodes": ("2", HOST),
    "--drain-seconds": ("31", ALL),
    "--log-level": ("DEBUG", ALL),
    "--otlp-endpoint": ("http://c:4318", ALL),
    "--broker-traces": ("true", ALL),
}
"""By flag: another value than it has, and the roles of the processes that it is for."""

UNREACHED = {
    "--worker": "it says which processes there are; below",
    "--tp-size": "each role has one of its own",
    "--revision": "the model's folder is chosen by it, before there is a plan",
    "--memory": "memory_bytes is derived from it and from the machine",
    "--start-seconds": "the launcher waits",
    "--state-dir": "it is where the plan's files are; a plan has paths of the folder it is given",
}
"""By flag: why no process is told of it."""

OF_THE_LAUNCHER = {
    "model": "the cluster has one",
    "router.lora": "the cluster has one list",
    "draft": "the cluster has one, with its folder in full",
    "cluster_key_file": "the cluster has one",
    "credentials_file": "the launcher writes it",
    "tls_dir": "the cluster has one",
    "parent_pid": "that is the launcher",
    "nats_url": "the cluster has one",
    "redis_url": "the cluster has one",
    "http_port": "one port would belong to several processes",
    "grpc_port": "one port would belong to several processes",
    "hostcache.host": "workers must find it",
    "hostcache.port": "workers must find it",
    "hostcache_address": "the launcher puts it there",
    "host_memory": "each node has an equal share of the cluster's",
    "storage_bytes": "each node has an equal share of the cluster's",
    "node": "the launcher names them",
}
"""Settings of services that a plan fixes, whatever a role is given."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of plans that differ by their options alone."""

    def ports(number: int) -> list[int]:
        free = count(9000)
        return [next(free) for _ in range(number)]

    monkeypatch.setattr(process_plan, "free_ports", ports)
    make_certificates(tmp_path / "tls")
    for name, file in (("model", "config.json"), ("lora", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    return tmp_path


def spelled(value: str, folder: Path) -> str:
    """The value with the folders that it names."""
    for name in ("MODEL", "LORA", "TLS"):
        value = value.replace(name, str(folder / name.lower()))
    return value


def told(
    folder: Path, flags: Mapping[str, str], given: Mapping[str, str] | None = None
) -> dict[str, list[Mapping[str, str]]]:
    """The environments of the processes of each role."""
    plan = process_plan.plan_processes(
        up_options(up_sources(flags, given or {})), StateFolder(folder / "state")
    )
    roles: dict[str, list[Mapping[str, str]]] = {}
    for job in plan.services:
        roles.setdefault(job.role, []).append(job.environment)
    return roles


def changed(
    before: Mapping[str, list[Mapping[str, str]]], after: Mapping[str, list[Mapping[str, str]]]
) -> set[str]:
    return {role for role in {*before, *after} if before.get(role) != after.get(role)}


def test_each_option_has_its_line_here() -> None:
    flags = {leaf.flag for leaf in leaves(UpOptions)}
    assert flags == REACHED.keys() | UNREACHED.keys()
    assert not REACHED.keys() & UNREACHED.keys()


@pytest.mark.parametrize("flag", REACHED)
def test_an_option_reaches_the_processes_that_it_is_for_and_no_other(
    flag: str, folder: Path
) -> None:
    value, roles = REACHED[flag]
    value = spelled(value, folder)
    for workers, others in ((APART, {"both"}), (BOTH, {"prefill", "decode"})):
        if expected := roles - others:
            if not roles & WORKERS or roles & WORKERS - others:
                after = told(folder, {**workers, parameter_of(flag): value})
                assert changed(told(folder, workers), after) == expected


@pytest.mark.parametrize("flag", sorted(UNREACHED.keys() - {"--worker", "--tp-size"}))
def test_no_process_is_told_of_the_others(flag: str, folder: Path) -> None:
    value = {"--start-seconds": "121", "--memory": "1G"}.get(flag, "other")
    after = told(folder, {parameter_of(flag): value})
    assert changed(told(folder, {}), after) == set()


def test_the_kind_of_workers_says_which_there_are(folder: Path) -> None:
    assert told(folder, APART).keys() == {"hostcache", "prefill", "decode", "router"}
    assert told(folder, BOTH).keys() == {"hostcache", "both", "router"}


@pytest.mark.parametrize("role", SERVICES)
def test_a_setting_of_a_service_reaches_its_role_and_no_other(role: str, folder: Path) -> None:
    """By its variable for that role; those that no flag has as well."""
    workers = BOTH if role == "both" else APART
    before = told(folder, workers)
    for leaf in leaves(SERVICES[role]):
        name = leaf.name
        value = spelled(SETTINGS.get(name) or another(leaf.default), folder)
        variable = f"FERRYMAN_{role}_{name}".upper()
        after = told(folder, workers, {variable: value})
        is_fixed = name in OF_THE_LAUNCHER or f"{role}.{name}" in OF_THE_LAUNCHER
        assert changed(before, after) == (set() if is_fixed else {role}), name
        said = up_options(up_sources(workers, {variable: value})).unheeded
        assert [line.startswith(f"{variable} changes nothing: ") for line in said] == [
            True
        ] * is_fixed, name


@pytest.mark.parametrize(
    ("given", "value", "line"),
    [
        ("DECODE_DRAFT", "ngram", "give it for the cluster: --draft, or FERRYMAN_DRAFT"),
        ("PREFILL_MODEL", "MODEL", "give it for the cluster: --model, or FERRYMAN_MODEL"),
        ("HOSTCACHE_NODE", "node", "the launcher sets it for each process"),
        ("BOTH_MAX_RUNNING", "7", "no process of this cluster is a both"),
    ],
)
def test_a_value_that_counts_for_nobody_is_named_with_what_counts(
    given: str, value: str, line: str, folder: Path
) -> None:
    sources = up_sources(APART, {f"FERRYMAN_{given}": spelled(value, folder)})
    assert up_options(sources).unheeded == (f"FERRYMAN_{given} changes nothing: {line}",)


def test_the_routers_name_for_the_model_is_the_cluster_s() -> None:
    given = {"FERRYMAN_ROUTER_SERVED_NAME": "kites", "FERRYMAN_SERVED_NAME": "other"}
    assert up_options(up_sources(APART, given)).served_name == "kites"
    assert up_options(up_sources({"served_name": "flag"}, given)).served_name == "flag"


SETTINGS = {
    parameter_of(flag): value for flag, (value, roles) in REACHED.items() if roles & WORKERS
} | {
    "num_threads": "7",
    "snapshot_share": "0.25",
    "storage_dir": "/elsewhere",
    "prefetch_share": "0.25",
    "nixl_error_handling": "none",
}


def another(value: object) -> str:
    """Another value of a setting's kind, as text."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return str(value + 1)
    return "other"

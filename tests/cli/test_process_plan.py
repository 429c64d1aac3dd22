"""The processes of a cluster, and the settings that they are given."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_certificates

from ferryman.errors import ConfigError
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import read_credentials
from ferryman.security.key_file import read_key_file
from ferryman.settings.cluster import DoorOptions, TierOptions, UpOptions, usable_cores
from ferryman.settings.declaration import size_of, size_text
from ferryman.settings.engine import EngineOptions
from ferryman.settings.hostcache import HostCacheServiceSettings as HostCacheSettings
from ferryman.settings.router import RouterSettings
from ferryman.settings.sources import Sources, read_settings
from ferryman.settings.workers import BothSettings, DecodeSettings, PrefillSettings
from ferryman_launcher.options import demo_model, up_options, up_sources
from ferryman_launcher.process_plan import ProcessPlan, names, plan_processes
from ferryman_launcher.state_folder import StateFolder

KINDS: dict[str, Any] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "both": BothSettings,
    "hostcache": HostCacheSettings,
}

HTTP_PORT, GRPC_PORT = "FERRYMAN_ROUTER_HTTP_PORT", "FERRYMAN_ROUTER_GRPC_PORT"
DEMO = EngineOptions(model=demo_model())


@pytest.fixture
def choices() -> UpOptions:
    return UpOptions(
        served_name="demo",
        engine=EngineOptions(
            model=demo_model(),
            dtype="bfloat16",
            quantize="int8",
            memory_bytes=1 << 27,
            num_threads=3,
            snapshot_grid=256,
            draft="ngram",
            draft_tokens=7,
        ),
        doors=DoorOptions(http_port=0, grpc_port=0),
        num_prefill=2,
        prefill_tp=2,
        cluster="blue",
    )


def made(choices: UpOptions, folder: Path) -> ProcessPlan:
    return plan_processes(choices, StateFolder(folder))


def test_a_cluster_has_its_servers_and_services(choices: UpOptions, tmp_path: Path) -> None:
    found = made(choices, tmp_path)
    assert [job.name for job in found.servers] == ["nats", "redis"]
    services = [job.name for job in found.services]
    assert services == ["hostcache", "prefill-1", "prefill-2", "decode", "router"]
    ranks = {job.name: job.drain_rank for job in (*found.services, *found.servers)}
    assert ranks["router"] < ranks["prefill-1"] == ranks["decode"]
    assert ranks["decode"] < ranks["hostcache"] < ranks["nats"] == ranks["redis"]


@pytest.mark.parametrize(
    ("first", "ports"),
    [
        pytest.param((8000, 8001), [(8000, 8001), (8002, 8003), (8004, 8005)], id="side by side"),
        pytest.param((80, 9000), [(80, 9000), (82, 9002), (84, 9004)], id="far from each other"),
        pytest.param((0, 7001), [(0, 7001), (0, 7003), (0, 7005)], id="free ones"),
    ],
)
def test_each_router_has_ports_of_its_own(
    choices: UpOptions, tmp_path: Path, first: tuple[int, int], ports: list[tuple[int, int]]
) -> None:
    doors = DoorOptions(num_routers=3, http_port=first[0], grpc_port=first[1])
    found = made(choices.model_copy(update={"doors": doors}), tmp_path)
    routers = [job for job in found.services if job.role == "router"]
    assert [job.name for job in routers] == ["router-1", "router-2", "router-3"]
    told = [(job.environment[HTTP_PORT], job.environment[GRPC_PORT]) for job in routers]
    assert told == [(str(http), str(grpc)) for http, grpc in ports]
    alike = [{**job.environment, HTTP_PORT: "", GRPC_PORT: ""} for job in routers]
    assert alike[0] == alike[1] == alike[2], "nothing else tells them apart"


def test_servers_of_others_are_not_started(choices: UpOptions, tmp_path: Path) -> None:
    theirs = UpOptions(engine=DEMO, nats_url="nats://n:1", redis_url="redis://r:2/0")
    found = made(theirs, tmp_path)
    assert found.servers == ()
    assert (found.nats_url, found.redis_url) == ("nats://n:1", "redis://r:2/0")


@pytest.mark.parametrize("name", ["hostcache", "prefill-2", "decode", "router"])
def test_every_service_understands_its_settings(
    choices: UpOptions, tmp_path: Path, name: str
) -> None:
    found = made(choices, tmp_path)
    (job,) = (job for job in found.services if job.name == name)
    role = name.partition("-")[0]
    assert job.argv == (sys.executable, "-m", f"ferryman_{role}")
    settings: Any = read_settings(KINDS[role], role, Sources.of(job.environment))
    assert settings.bus.url == found.nats_url
    assert settings.bus.cluster == "blue"
    assert settings.life.parent_pid == os.getpid()
    if isinstance(settings, PrefillSettings | DecodeSettings):
        assert settings.worker.dtype == "bfloat16"
        assert settings.worker.quantize == "int8"
        assert settings.worker.num_threads == 3
        assert settings.worker.snapshot_grid == 256
        assert (settings.worker.draft, settings.worker.draft_tokens) == ("ngram", 7)
        assert settings.worker.tp_size == (2 if role == "prefill" else 1)


def test_the_plan_s_credentials_are_those_of_its_locks(choices: UpOptions, tmp_path: Path) -> None:
    plan = made(choices, tmp_path)
    assert plan.credentials is plan.locks.credentials


def test_every_process_is_given_the_credentials_of_its_role_alone(
    choices: UpOptions, tmp_path: Path
) -> None:
    found = made(choices, tmp_path)
    key = read_key_file(StateFolder(tmp_path).key_path)
    for job in found.services:
        own = Path(job.environment[f"FERRYMAN_{job.role.upper()}_CREDENTIALS_FILE"])
        assert read_credentials(own) == credentials_of(key, ClusterRole(job.role))
        assert own.parent.stat().st_mode & 0o777 == 0o700


def test_servers_of_our_own_are_locked_and_observers_have_urls(
    choices: UpOptions, tmp_path: Path
) -> None:
    found = made(choices, tmp_path)
    words = {job.name: " ".join(job.argv) for job in found.servers}
    assert f"-c {tmp_path}/credentials/nats.conf" in words["nats"]
    assert f"--aclfile {tmp_path}/credentials/redis.acl" in words["redis"]
    observer = credentials_of(read_key_file(StateFolder(tmp_path).key_path), ClusterRole.OBSERVER)
    for name, login, plain in (
        ("nats.url", observer.nats, found.nats_url),
        ("redis.url", observer.redis, found.redis_url),
    ):
        url = (tmp_path / name).read_text().strip()
        assert url.replace(f"{login.user}:{login.password}@", "") == plain
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert login.password not in repr(found), "no password is in a command or a variable"


def test_an_insecure_cluster_is_open_whatever_the_environment_says(
    choices: UpOptions, tmp_path: Path
) -> None:
    given = {"FERRYMAN_CREDENTIALS_FILE": "elsewhere.json"}
    found = made(up_options(up_sources({"insecure": True}, given)), tmp_path)
    assert not any("nats.conf" in word or "aclfile" in word for word in str(found.servers).split())
    files = [
        job.environment[f"FERRYMAN_{job.role.upper()}_CREDENTIALS_FILE"] for job in found.services
    ]
    assert set(files) == {""}
    assert (tmp_path / "nats.url").read_text().strip() == found.nats_url


def test_certificates_are_for_every_service_and_our_own_broker(
    choices: UpOptions, tmp_path: Path
) -> None:
    tls = make_certificates(tmp_path / "tls")
    found = made(choices.model_copy(update={"tls_dir": str(tls)}), tmp_path)
    folders = {job.environment[f"FERRYMAN_{job.role.upper()}_TLS_DIR"] for job in found.services}
    assert folders == {str(tls)}
    assert found.nats_url.startswith("tls://")
    assert (tmp_path / "nats.url").read_text().startswith("tls://observer:")
    assert str(tls / "nats.crt") in (tmp_path / "credentials" / "nats.conf").read_text()


def test_with_certificates_our_own_redis_has_no_port(choices: UpOptions, tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls")
    found = made(choices.model_copy(update={"tls_dir": str(tls)}), tmp_path / "a@b")
    (argv,) = (job.argv for job in found.servers if job.name == "redis")
    assert argv[argv.index("--port") + 1] == "0"
    assert argv[argv.index("--unixsocket") + 1] == f"{tmp_path}/a@b/redis/redis.sock"
    assert found.redis_url == f"unix://{tmp_path}/a%40b/redis/redis.sock"
    assert (tmp_path / "a@b" / "redis.url").read_text().startswith("unix://observer:")


def test_with_certificates_a_redis_of_others_is_reached_by_tls(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls")
    theirs = UpOptions(engine=DEMO, tls_dir=str(tls), redis_url="rediss://r:2/0")
    jobs = {job.role: job.environment for job in made(theirs, tmp_path).services}
    assert jobs["router"]["FERRYMAN_ROUTER_REDIS_URL"] == "rediss://default@r:2/0"
    with pytest.raises(ConfigError, match="rediss://"):
        made(theirs.model_copy(update={"redis_url": "redis://r:2/0"}), tmp_path)


def test_a_state_folder_too_deep_for_a_socket_is_told(choices: UpOptions, tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls")
    with pytest.raises(ConfigError, match="choose a shorter --state-dir"):
        made(choices.model_copy(update={"tls_dir": str(tls)}), tmp_path / ("deep" * 25))


class FullDisk:
    """A disk below `folder` that is full from the operation `num_allowed` on: no file or folder is
    made there, and no file is written."""

    def __init__(self, folder: Path, num_allowed: int, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._left = str(folder), num_allowed
        self.is_met = False
        for module, name in ((os, "mkdir"), (os, "open"), (io, "open"), (os, "link")):
            patch.setattr(module, name, partial(self._on_path, getattr(module, name)))
        patch.setattr(os, "fsync", partial(self._operate, os.fsync))

    def _on_path(self, operation: Callable[..., Any], path: Any, *more: Any, **named: Any) -> Any:
        is_read = more[:1] in ((os.O_RDONLY | os.O_CLOEXEC,), ("r",))
        if str(path).startswith(self._folder) and not is_read:
            return self._operate(operation, path, *more, **named)
        return operation(path, *more, **named)

    def _operate(self, operation: Callable[..., Any], *more: Any, **named: Any) -> Any:
        self.is_met = self.is_met or not self._left
        if self.is_met:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= 1
        return operation(*more, **named)


def first_start(choices: UpOptions, folder: Path) -> str:
    """The reason for which nothing starts; empty if it does."""
    try:
        state = StateFolder(folder)
        with state.locked():
            plan_processes(choices, state)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_disk_that_is_full_at_any_step_of_the_first_start_is_told_with_a_remedy(
    choices: UpOptions, tmp_path: Path
) -> None:
    for num_allowed in range(200):
        folder = tmp_path / str(num_allowed)
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(folder, num_allowed, patch)
            refusal = first_start(choices, folder)
        assert ("No space left on device; make room" in refusal) == disk.is_met, refusal
        left = [path.name for path in folder.rglob("cluster.key.*")] if folder.exists() else []
        assert not left, "a part of a key"
        if not disk.is_met:
            break
    assert num_allowed > 20, "each write had its turn"
    assert not disk.is_met


def test_certificates_that_cannot_be_used_start_nothing(choices: UpOptions, tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls")
    with_tls = choices.model_copy(update={"tls_dir": str(tls)})
    with pytest.raises(ConfigError, match="drop --insecure"):
        made(with_tls.model_copy(update={"insecure": True}), tmp_path)
    (tls / "prefill.key").unlink()
    with pytest.raises(ConfigError, match=r"prefill\.key: No such file"):
        made(with_tls, tmp_path)


def test_a_redis_of_others_is_used_as_its_default_user(tmp_path: Path) -> None:
    theirs = UpOptions(engine=DEMO, nats_url="nats://n:1", redis_url="redis://r:2/0")
    jobs = {job.role: job.environment for job in made(theirs, tmp_path).services}
    assert jobs["router"]["FERRYMAN_ROUTER_REDIS_URL"] == "redis://default@r:2/0"
    named = theirs.model_copy(update={"redis_url": "redis://me:word@r:2/0"})
    jobs = {job.role: job.environment for job in made(named, tmp_path).services}
    assert jobs["hostcache"]["FERRYMAN_HOSTCACHE_REDIS_URL"] == "redis://me:word@r:2/0"
    assert (tmp_path / "redis.url").read_text().strip() == "redis://me:word@r:2/0"


def test_ranks_share_the_cores_among_all_of_them(choices: UpOptions) -> None:
    several = choices.model_copy(update={"engine": DEMO, "num_decode": 1, "decode_tp": 4})
    cores = len(os.sched_getaffinity(0))
    assert several.threads == max(1, cores // (2 * 2 + 1 * 4))


def test_workers_are_told_where_the_host_cache_will_be(choices: UpOptions, tmp_path: Path) -> None:
    jobs = {job.name: job for job in made(choices, tmp_path).services}
    port = jobs["hostcache"].environment["FERRYMAN_HOSTCACHE_PORT"]
    address = jobs["decode"].environment["FERRYMAN_DECODE_HOSTCACHE_ADDRESS"]
    assert address == f"127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["nats", "redis", "hostcache", "prefill-1", "decode", "router"])
def test_a_process_is_told_what_is_its_own_role_s_and_nobody_else_s(
    tmp_path: Path, name: str
) -> None:
    levels = {"ROUTER": "ERROR", "PREFILL": "INFO", "DECODE": "DEBUG", "HOSTCACHE": "WARNING"}
    given = {f"FERRYMAN_{role}_LOG_LEVEL": level for role, level in levels.items()}
    given |= {"FERRYMAN_API_KEYS": "secret", "FERRYMAN_STATE_DIR": "x", "PATH": "/bin"}
    found = made(up_options(up_sources({"prefill": "2"}, given)), tmp_path)
    (job,) = (job for job in (*found.servers, *found.services) if job.name == name)
    role = name.partition("-")[0].upper()
    environment = job.environment_from(given)
    assert environment["PATH"] == "/bin"
    ours = {each for each in environment if each.startswith("FERRYMAN_")}
    assert all(each.startswith(f"FERRYMAN_{role}_") for each in ours)
    assert environment.get(f"FERRYMAN_{role}_LOG_LEVEL") == levels.get(role)
    assert ("secret" in environment.values()) == (name == "router")


def test_a_service_is_told_what_a_cluster_has_no_word_for(tmp_path: Path) -> None:
    given = {
        "FERRYMAN_MAX_QUEUED": "7",
        "FERRYMAN_DECODE_MAX_RUNNING": "5",
        "FERRYMAN_MAX_RUNNING": "9",
    }
    jobs = {job.name: job for job in made(up_options(up_sources({}, given)), tmp_path).services}
    assert jobs["router"].environment["FERRYMAN_ROUTER_MAX_QUEUED"] == "7"
    assert jobs["decode"].environment["FERRYMAN_DECODE_MAX_RUNNING"] == "5"
    assert jobs["prefill"].environment["FERRYMAN_PREFILL_MAX_RUNNING"] == "9"


def environments(
    folder: Path, flags: Mapping[str, object], given: Mapping[str, str]
) -> dict[str, Mapping[str, str]]:
    plan = made(up_options(up_sources(flags, given)), folder)
    return {job.name: job.environment for job in plan.services}


def test_workers_that_decode_are_told_their_audit(tmp_path: Path) -> None:
    told = environments(tmp_path / "apart", {"audit_share": 0.01}, {})
    assert read_settings(DecodeSettings, "decode", Sources.of(told["decode"])).audit_share == 0.01
    assert "FERRYMAN_AUDIT_SHARE" not in told["prefill"]
    both = environments(tmp_path / "both", {"worker": "both", "audit_share": 0.01}, {})["both"]
    assert read_settings(BothSettings, "both", Sources.of(both)).audit_share == 0.01


@pytest.mark.parametrize(
    ("flags", "variables", "planes"),
    [
        ({}, {}, "auto"),
        ({"insecure": True}, {}, "auto"),
        ({"planes": "nixl-unlocked"}, {"FERRYMAN_PLANES": "grpc"}, "nixl-unlocked"),
        ({}, {"FERRYMAN_PLANES": "nixl-unlocked-or-grpc"}, "nixl-unlocked-or-grpc"),
    ],
)
def test_workers_open_nixl_s_ports_only_when_told_so_by_its_name(
    flags: Mapping[str, object], variables: Mapping[str, str], planes: str, tmp_path: Path
) -> None:
    told = environments(tmp_path, flags, variables)
    for role, kind in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        assert read_settings(kind, role, Sources.of(told[role])).planes == planes


@pytest.mark.parametrize(
    ("flags", "variables", "spelled"),
    [
        ({"planes": "nixl"}, {}, "--planes nixl"),
        ({}, {"FERRYMAN_PLANES": "nixl"}, "FERRYMAN_PLANES='nixl'"),
        ({}, {"FERRYMAN_DECODE_PLANES": "nixl"}, "FERRYMAN_DECODE_PLANES='nixl'"),
    ],
)
def test_a_cluster_is_refused_nixl_by_its_old_name(
    flags: Mapping[str, object], variables: Mapping[str, str], spelled: str
) -> None:
    with pytest.raises(ConfigError, match="write nixl-unlocked or nixl-unlocked-or-grpc") as caught:
        up_options(up_sources(flags, variables))
    assert str(caught.value).startswith(spelled)


@pytest.mark.parametrize(("flags", "given"), [({"host": "::"}, {}), ({}, {"FERRYMAN_HOST": "::"})])
def test_the_address_of_the_router_s_doors_is_not_that_of_workers(
    tmp_path: Path, flags: Mapping[str, object], given: Mapping[str, str]
) -> None:
    found = environments(tmp_path, flags, given)
    assert found["router"]["FERRYMAN_ROUTER_HOST"] == "::"
    assert not any("::" in found[name].values() for name in ("prefill", "decode", "hostcache"))


def test_a_worker_s_own_address_is_said_for_its_role(tmp_path: Path) -> None:
    found = environments(tmp_path, {}, {"FERRYMAN_DECODE_HOST": "::", "FERRYMAN_OBSERVE_PORT": "9"})
    assert found["decode"]["FERRYMAN_DECODE_HOST"] == "::"
    assert not any("9" in each.values() for each in found.values()), "one port for several"


def test_no_threads_at_all_means_a_share_of_the_cores(tmp_path: Path) -> None:
    share = environments(tmp_path, {}, {})["decode"]["FERRYMAN_DECODE_NUM_THREADS"]
    assert int(share) > 0
    for flags, given in (({"threads": "0"}, {}), ({}, {"FERRYMAN_DECODE_NUM_THREADS": "0"})):
        found = environments(tmp_path, flags, given)["decode"]
        assert (found["FERRYMAN_DECODE_NUM_THREADS"], found["OMP_NUM_THREADS"]) == (share, share)


@pytest.mark.parametrize(
    ("extra", "given", "policy"),
    [
        pytest.param(0, {}, None, id="a thread for each core"),
        pytest.param(1, {}, "PASSIVE", id="more threads than cores"),
        pytest.param(1, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", id="the caller knows better"),
    ],
)
def test_idle_threads_sleep_where_there_are_more_than_cores(
    tmp_path: Path, extra: int, given: Mapping[str, str], policy: str | None
) -> None:
    threads = {"FERRYMAN_DECODE_NUM_THREADS": str(usable_cores() + extra)}
    options = up_options(up_sources({}, threads))
    alone = options.model_copy(update={"num_prefill": 0})
    for job in made(alone, tmp_path).services:
        assert job.environment_from(given).get("OMP_WAIT_POLICY") == policy


def test_the_threads_of_all_ranks_are_counted() -> None:
    told = {"FERRYMAN_NUM_THREADS": "7", "FERRYMAN_DECODE_NUM_THREADS": "5"}
    flags = {"prefill": "2", "prefill_tp": "3", "decode": "4"}
    assert up_options(up_sources(flags, told)).all_threads == 2 * 3 * 7 + 4 * 5


def test_an_empty_flag_is_none(tmp_path: Path) -> None:
    assert up_options(up_sources({"model": "", "host_memory": ""}, {})) == up_options(
        up_sources({}, {})
    )


def test_storage_of_host_caches_alone_is_theirs(tmp_path: Path) -> None:
    name = "FERRYMAN_HOSTCACHE_STORAGE"
    given = {f"{name}_DIR": str(tmp_path), f"{name}_BYTES": "1M"}
    found = environments(tmp_path, {}, given)
    assert found["hostcache"].items() >= given.items()


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        pytest.param({"storage_bytes": "0"}, {}, id="by a flag"),
        pytest.param({}, {"FERRYMAN_STORAGE_BYTES": "0"}, id="by a variable"),
    ],
)
def test_a_host_cache_without_storage_starts(
    tmp_path: Path, flags: Mapping[str, str], given: Mapping[str, str]
) -> None:
    found = environments(tmp_path, flags, given)["hostcache"]
    assert read_settings(HostCacheSettings, "hostcache", Sources.of(found)).storage.folder == ""


def test_only_routers_and_host_caches_are_told_where_the_key_is(
    choices: UpOptions, tmp_path: Path
) -> None:
    found = made(choices, tmp_path)
    key_file = str(tmp_path / "cluster.key")
    told = {job.name for job in found.services if key_file in job.environment.values()}
    assert told == {"router", "hostcache"}
    key = read_key_file(Path(key_file))
    made(choices, tmp_path)
    assert read_key_file(Path(key_file)) == key, "for as long as the state folder is there"


def test_nodes_share_what_there_is(choices: UpOptions, tmp_path: Path) -> None:
    tiers = TierOptions(host_bytes=64 << 20, storage_bytes=32 << 20, num_nodes=2)
    jobs = {
        job.name: job
        for job in made(choices.model_copy(update={"tiers": tiers}), tmp_path).services
    }
    said = {name: jobs[name].environment for name in jobs}
    for number in (1, 2):
        cache = said[f"hostcache-{number}"]
        assert cache["FERRYMAN_HOSTCACHE_NODE"] == f"node-{number}"
        assert cache["FERRYMAN_HOSTCACHE_HOST_MEMORY"] == str(32 << 20)
        assert cache["FERRYMAN_HOSTCACHE_STORAGE_BYTES"] == str(16 << 20)
        folder = cache["FERRYMAN_HOSTCACHE_STORAGE_DIR"]
        assert folder == str(tmp_path / "storage" / f"node-{number}")
        port = cache["FERRYMAN_HOSTCACHE_PORT"]
        address = said[f"prefill-{number}"]["FERRYMAN_PREFILL_HOSTCACHE_ADDRESS"]
        assert address == f"127.0.0.1:{port}"
    assert "FERRYMAN_DECODE_HOSTCACHE_ADDRESS" in said["decode"]


@pytest.mark.parametrize(
    ("tiers", "folder", "num_bytes"),
    [
        pytest.param(TierOptions(), "/s/storage", 1 << 30, id="nothing said"),
        pytest.param(TierOptions(storage_bytes=0), "", 0, id="no storage"),
        pytest.param(TierOptions(storage_bytes=5 << 20), "/s/storage", 5 << 20, id="a size"),
        pytest.param(TierOptions(storage_dir="/d"), "/d", 1 << 30, id="a folder"),
        pytest.param(TierOptions(storage_dir="s3://b/p"), "s3://b/p", 1 << 30, id="a bucket"),
        pytest.param(
            TierOptions(storage_dir="s3://b/p?region=r", num_nodes=2),
            "s3://b/p/local?region=r",
            1 << 29,
            id="a bucket of two nodes",
        ),
    ],
)
def test_the_storage_tier_is_in_the_state_folder_unless_said_otherwise(
    tiers: TierOptions, folder: str, num_bytes: int
) -> None:
    assert tiers.storage_folder(Path("/s"), "local") == folder
    assert tiers.node_storage_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("", 0), ("7", 7), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("4 KB", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert size_of("--host-memory", text) == num_bytes


@pytest.mark.parametrize("num_bytes", [7, 4096, 512 << 20, 3 << 29, 5 << 40])
def test_sizes_are_written_as_they_are_read(num_bytes: int) -> None:
    assert size_of("", size_text(num_bytes)) == num_bytes


def test_the_cores_are_shared_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert UpOptions(engine=DEMO).threads == 4
    assert UpOptions(engine=DEMO, num_decode=30).threads == 1


def test_one_of_a_role_needs_no_number() -> None:
    assert names("decode", 1) == ["decode"]
    assert names("decode", 2) == ["decode-1", "decode-2"]


def test_workers_that_do_both_stand_in_for_the_two_roles(
    choices: UpOptions, tmp_path: Path
) -> None:
    both = choices.model_copy(
        update={"worker": "both", "num_both": 2, "num_prefill": 1, "prefill_tp": 1}
    )
    found = made(both, tmp_path)
    assert [job.name for job in found.services] == ["hostcache", "both-1", "both-2", "router"]
    worker = found.services[1]
    assert worker.argv[-1] == "ferryman_both"
    settings = read_settings(BothSettings, "both", Sources.of(worker.environment))
    assert settings.engine.takes_turns
    assert settings.engine.decodes
    assert settings.engine.num_threads == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"worker": "both", "prefill": 2}, "--worker both has no --prefill"),
        ({"worker": "both", "decode_tp": 2}, "--worker both has no --decode-tp"),
        ({"workers": 2}, "--worker apart has no --workers"),
        ({"worker": "all"}, "it should be one of apart, both"),
    ],
)
def test_a_count_of_workers_that_a_cluster_does_not_have_is_refused(
    flags: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        up_options(up_sources(flags, {}))

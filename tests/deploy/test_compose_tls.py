"""compose.tls.yaml: every container shows and asks for certificates, made before any of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from tests.deploy.compose_file import CHOICE, ROOT, ROUTERS, SETTINGS, compose, mounts, role_of

from ferryman.runtime.credential_folders import AUTHORITY, READERS
from ferryman.runtime.embedded import nats_command, started
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import read_credentials
from ferryman.security.tls_folder import DOOR, NATS, TlsFolder
from ferryman.settings.names import names_of
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman_cli.app import run
from ferryman_cli.commands.keys import GIVEN_KEY

TLS, FOLDER = "compose.tls.yaml", "/etc/ferryman"
OVER = compose(TLS)["services"]
FAILSAFE_SECONDS = 120


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that the maker's command writes."""
    monkeypatch.delenv(GIVEN_KEY, raising=False)
    (tmp_path / "key").mkdir()
    words = [CHOICE.sub(r"\2", word) for word in OVER["credentials"]["command"]]
    words = [word.replace(FOLDER, str(tmp_path)) for word in words]
    words = ["--secret=/dev/null" if word.startswith("--secret") else word for word in words]
    assert run(words[1:]) == 0
    return tmp_path


def test_the_maker_is_told_the_same_and_of_tls_besides() -> None:
    plain, told = (compose(name)["services"]["credentials"] for name in ("compose.yaml", TLS))
    as_plain = [word.replace("tls://", "nats://") for word in told["command"]]
    as_plain = [word.replace("rediss://", "redis://") for word in as_plain]
    assert [word for word in as_plain if "--tls-host" not in word] == plain["command"]
    assert told["volumes"] == [f"{AUTHORITY}:{FOLDER}/{AUTHORITY}"]
    assert AUTHORITY in compose(TLS)["volumes"]
    assert AUTHORITY in (ROOT / "Dockerfile").read_text(), "so that it belongs to its user"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_shows_the_certificate_that_it_sees(service: str, made: Path) -> None:
    given, role = OVER[service]["environment"], role_of(service)
    assert given["FERRYMAN_TLS_DIR"] == f"{FOLDER}/{role}"
    assert (given["FERRYMAN_TLS_DIR"], False) in mounts(service).values()
    names = {name.removeprefix("FERRYMAN_").lower() for name in given}
    assert names <= names_of(role)
    for name in (role, DOOR) if service == "router" else (role,):
        assert TlsFolder(made / role, name)()


def test_the_routers_behind_one_name_show_a_certificate_for_it() -> None:
    assert OVER[ROUTERS] == OVER["router"]
    assert f"--tls-host={ROUTERS}" in OVER["credentials"]["command"]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_reaches_all_servers_by_tls(service: str) -> None:
    plain = compose()["services"][service]["environment"]
    given = OVER[service]["environment"]
    for name, scheme in (("FERRYMAN_NATS_URL", "tls"), ("FERRYMAN_REDIS_URL", "rediss")):
        if name in plain:
            assert given[name] == f"{scheme}://{plain[name].partition('://')[2]}"


def test_a_reader_sees_no_key_of_another_and_nobody_the_authority_s(made: Path) -> None:
    keys = {reader: {path.name for path in (made / reader).glob("*.key")} for reader in READERS}
    expected = {reader: {f"{reader}.key"} for reader in READERS}
    expected |= {"router": {"router.key", "door.key"}, "metrics": set()}
    assert keys == expected
    assert all((made / reader / "ca.crt").is_file() for reader in READERS)
    files = [path for path in made.rglob("*.key") if path.parent.name in READERS]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    mounted = {name for service in (*SETTINGS, "nats", "redis") for name in mounts(service)}
    assert AUTHORITY not in mounted


def test_a_second_start_renews_certificates_under_the_authority_that_is_kept(
    made: Path, tmp_path: Path
) -> None:
    before = {name: (made / "decode" / name).read_bytes() for name in ("ca.crt", "decode.crt")}
    words = ["container-credentials", str(tmp_path), f"--key={tmp_path}/key/cluster.key"]
    urls = ["--nats-url=tls://n:1", "--redis-url=rediss://r:2/0", "--tls-host=nats"]
    assert run([*words, *urls]) == 0
    assert (made / "decode" / "ca.crt").read_bytes() == before["ca.crt"]
    assert (made / "decode" / "decode.crt").read_bytes() != before["decode.crt"]


async def test_a_broker_with_the_made_files_is_believed(made: Path, tmp_path: Path) -> None:
    make = lambda place: nats_command(place, config=made / NATS / "nats.conf", scheme="tls")  # noqa: E731
    login = read_credentials(made / "decode" / "decode.json").nats
    authorities = (made / ClusterRole.DECODE / "ca.crt").read_bytes
    with started(make, tmp_path / "broker") as server:
        options = NatsOptions(server.url, "decode-1", login, authorities=authorities)
        async with asyncio.timeout(FAILSAFE_SECONDS), nats_bus(options) as bus:
            await bus.connected()


def test_redis_takes_tls_alone_and_is_otherwise_the_same(made: Path) -> None:
    plain, command = compose()["services"]["redis"]["command"], OVER["redis"]["command"]
    begin, end = command.index("--port"), command.index("--save")
    options = dict(zip(command[begin:end:2], command[begin + 1 : end : 2], strict=True))
    assert command[:begin] + command[end:] == plain
    assert (options.pop("--port"), options.pop("--tls-port")) == ("0", "6379")
    assert options.pop("--tls-auth-clients") == "no"
    for path in options.values():
        assert Path(path.replace(FOLDER, str(made))).is_file()


def test_prometheus_asks_the_router_by_tls_and_all_else_as_before(made: Path) -> None:
    (place,) = OVER["prometheus"]["volumes"]
    source, target, _ = place.split(":")
    assert (
        f"./deploy/observe/prometheus.yml:{target}:ro"
        in (compose()["services"]["prometheus"]["volumes"])
    )
    told, plain = (
        yaml.safe_load((ROOT / path).read_text())
        for path in (source, "deploy/observe/prometheus.yml")
    )
    router = told["scrape_configs"][0]
    assert router.pop("scheme") == "https"
    trust = router.pop("tls_config")
    assert f"--tls-host={trust['server_name']}" in OVER["credentials"]["command"]
    assert Path(trust["ca_file"].replace(FOLDER, str(made))).is_file()
    assert told == plain

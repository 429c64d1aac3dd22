"""compose.yaml is locked by default: who makes secrets, who may read which, who waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.compose_file import (
    CHOICE,
    ROOT,
    SERVERS,
    SETTINGS,
    compose,
    environment,
    mounts,
    role_of,
)

from ferryman.runtime.credential_folders import MONITOR, READERS
from ferryman.security.credentials import ClusterRole
from ferryman_cli.app import run
from ferryman_cli.commands.keys import GIVEN_KEY

MAKER, FOLDER = "credentials", "/etc/ferryman"
WITH_KEY = {"router", "host-cache"}
COMMAND = [CHOICE.sub(r"\2", word) for word in compose()["services"][MAKER]["command"]]


def secrets_of(service: str) -> dict[str, bool]:
    """The folders with secrets that a service sees, and whether it can write there."""
    return {
        path.removeprefix(f"{FOLDER}/"): writable
        for path, writable in mounts(service).values()
        if path.startswith(FOLDER)
    }


def test_the_maker_writes_every_folder_and_each_is_a_volume_of_its_own() -> None:
    assert secrets_of(MAKER) == dict.fromkeys(["key", *READERS], True)
    named = set(mounts(MAKER))
    assert len(named) == len(READERS) + 1
    assert named <= set(compose()["volumes"])


def test_a_service_sees_its_own_secrets_and_cannot_change_them() -> None:
    expected = {
        service: {role_of(service): False} | ({"key": False} if service in WITH_KEY else {})
        for service in (*SERVERS, *SETTINGS)
    }
    # People read the observer's URLs and token out of the router, which could make them from the
    # key anyway.
    expected["router"] |= {"observer": False, "metrics": False}
    assert {service: secrets_of(service) for service in expected} == expected


def test_a_volume_has_one_path_everywhere() -> None:
    made = mounts(MAKER)
    for service in (*SERVERS, *SETTINGS):
        for name, (path, _) in mounts(service).items():
            assert name not in made or made[name][0] == path


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_reads_the_credentials_of_its_role(service: str) -> None:
    role = ClusterRole(role_of(service))
    given = environment(service)
    assert given["FERRYMAN_CREDENTIALS_FILE"] == f"{FOLDER}/{role}/{role}.json"
    key = given.get("FERRYMAN_CLUSTER_KEY_FILE")
    assert (key == f"{FOLDER}/key/cluster.key") is (service in WITH_KEY)


@pytest.mark.parametrize("service", [*SERVERS, *SETTINGS])
def test_all_wait_until_the_secrets_are_made(service: str) -> None:
    waits = compose()["services"][service]["depends_on"]
    services = compose()["services"]
    direct = MAKER in waits
    assert direct or all(MAKER in services[before]["depends_on"] for before in waits)
    assert waits.get(MAKER, {}).get("condition", "") in ("", "service_completed_successfully")


def test_servers_start_with_the_files_that_lock_them() -> None:
    services = compose()["services"]
    nats, redis = services["nats"]["command"], services["redis"]["command"]
    assert nats[nats.index("-c") + 1] == f"{FOLDER}/nats/nats.conf"
    assert redis[redis.index("--aclfile") + 1] == f"{FOLDER}/redis/redis.acl"


def test_servers_are_asked_for_their_health_as_strangers_may() -> None:
    services = compose()["services"]
    nats, redis = (services[each]["healthcheck"]["test"] for each in SERVERS)
    assert f"http://{MONITOR}/healthz" in nats
    assert not {"-m", "--http_port"} & set(services["nats"]["command"]), "subjects for everybody"
    assert "grep -q -e PONG -e NOAUTH" in redis[-1]


def test_the_maker_runs_once_and_without_a_network() -> None:
    described = compose()["services"][MAKER]
    assert described["restart"] == "no"
    assert described["network_mode"] == "none"


def test_the_maker_s_command_makes_those_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GIVEN_KEY, raising=False)
    (tmp_path / "key").mkdir()
    words = [word.replace(FOLDER, str(tmp_path)) for word in COMMAND]
    words = ["--secret=/dev/null" if word.startswith("--secret") else word for word in words]
    assert words[0] == "ferryman"
    assert run(words[1:]) == 0
    for service in SETTINGS:
        path = environment(service)["FERRYMAN_CREDENTIALS_FILE"]
        assert Path(path.replace(FOLDER, str(tmp_path))).is_file()
    assert (tmp_path / "nats" / "nats.conf").is_file()
    assert (tmp_path / "redis" / "redis.acl").is_file()
    url = (tmp_path / "observer" / "nats.url").read_text()
    assert url.endswith("@127.0.0.1:4222\n"), "where the port is published"


def test_the_key_may_come_from_a_variable_or_from_a_secret() -> None:
    described = compose()["services"][MAKER]
    assert described["environment"] == {GIVEN_KEY: "${FERRYMAN_CLUSTER_KEY:-}"}
    (secret,) = described["secrets"]
    assert f"--secret=/run/secrets/{secret}" in COMMAND
    assert compose()["secrets"][secret] == {"file": "${CLUSTER_KEY_FILE:-/dev/null}"}


def test_the_image_has_the_folders_so_that_new_volumes_belong_to_its_user() -> None:
    line = (ROOT / "Dockerfile").read_text().partition("for reader in ")[2].partition(";")[0]
    assert set(line.split()) == {"key", "authority", *READERS}

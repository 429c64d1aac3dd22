"""Files that are laid over compose.yaml: for cards, and without locks."""

from __future__ import annotations

import pytest
from tests.deploy.compose_file import ROUTERS, SERVERS, SETTINGS, WORKERS, compose, mounts, role_of

from ferryman.security.credentials import ClusterRole
from ferryman.settings.names import names_of

CARDS, INSECURE, BOTH = "compose.gpu.yaml", "compose.insecure.yaml", "compose.both.yaml"


@pytest.mark.parametrize("service", WORKERS)
def test_the_file_for_cards_reserves_one_and_says_so_to_the_worker(service: str) -> None:
    over = compose(CARDS)
    assert set(over["services"]) == set(WORKERS)
    (device,) = over["services"][service]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    told = over["services"][service]["environment"]
    ours = {name for name in told if name.startswith("FERRYMAN_")}
    assert ours == {"FERRYMAN_DEVICE", "FERRYMAN_CHUNK_TOKENS"}
    assert {name.removeprefix("FERRYMAN_").lower() for name in ours} <= names_of(role_of(service))
    folder, writable = mounts(service)["compiled"]
    assert told["TRITON_CACHE_DIR"].startswith(f"{folder}/")
    assert writable


def test_without_locks_nothing_changes_but_the_locks() -> None:
    over = compose(INSECURE)["services"]
    assert set(over) == {*SERVERS, *SETTINGS, ROUTERS}
    for service in (*SETTINGS, ROUTERS):
        assert over[service] == {"environment": {"FERRYMAN_CREDENTIALS_FILE": ""}}
    locked = compose()["services"]
    redis = locked["redis"]["command"]
    at = redis.index("--aclfile")
    assert over["redis"] == {"command": [*redis[:at], *redis[at + 2 :]]}
    config, path, *more = locked["nats"]["command"]
    assert (config, path) == ("-c", "/etc/ferryman/nats/nats.conf")
    assert over["nats"] == {"command": [*more, "-m", "8222"]}


@pytest.mark.parametrize("service", WORKERS)
def test_workers_that_do_both_show_credentials_of_their_own(service: str) -> None:
    over = compose(BOTH)["services"][service]
    assert over["command"][-1].endswith(" exec python -m ferryman_both")
    told = over["environment"]["FERRYMAN_CREDENTIALS_FILE"]
    path, _ = mounts("credentials")["both-credentials"]
    assert told == f"{path}/{ClusterRole.BOTH}.json"
    assert over["volumes"] == [f"both-credentials:{path}:ro"]

"""The secrets of a cluster of containers: one folder a reader, from a key that is made or given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.errors import ConfigError
from ferryman.runtime.credential_folders import write_server_access
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import read_credentials
from ferryman.security.key_file import read_key_file
from ferryman_cli.app import run
from ferryman_cli.commands.keys import GIVEN_KEY, given_key

OBSERVER = credentials_of(KEY, ClusterRole.OBSERVER)


def write(folder: Path, *more: str) -> int:
    servers = ("--nats-url=nats://127.0.0.1:4222", "--redis-url=redis://redis:6379/0")
    key = f"--key={folder / 'key' / 'cluster.key'}"
    (folder / "key").mkdir(exist_ok=True)
    return run(["container-credentials", str(folder), key, *servers, *more])


def secret_with(tmp_path: Path, key: ClusterKey) -> str:
    path = tmp_path / "secret"
    path.write_text(key.text + "\n")
    return f"--secret={path}"


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mounts"
    made.mkdir()
    return made


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GIVEN_KEY, raising=False)


def test_each_reader_has_a_private_folder_with_nothing_of_the_others(folder: Path) -> None:
    assert write(folder) == 0
    readers = {*(role.value for role in ClusterRole), "nats", "redis", "metrics", "key"}
    assert {path.name for path in folder.iterdir()} == readers
    key = read_key_file(folder / "key" / "cluster.key")
    for role in ClusterRole:
        place = folder / role.value
        assert read_credentials(place / f"{role}.json") == credentials_of(key, role)
        assert place.stat().st_mode & 0o777 == 0o700
        others = [each for each in ClusterRole if each is not role]
        text = "".join(contents(place).values())
        assert not any(credentials_of(key, each).grpc_token in text for each in others)
        assert key.text not in text
    assert {*contents(folder / "prefill")} == {"prefill.json"}


def test_every_file_is_its_owner_s_alone(folder: Path) -> None:
    assert write(folder) == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 12
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_the_servers_are_locked_as_elsewhere_and_tell_their_health_inside_alone(
    folder: Path, tmp_path: Path
) -> None:
    assert write(folder, secret_with(tmp_path, KEY)) == 0
    access = write_server_access(tmp_path, KEY, "local")
    config = json.loads((folder / "nats" / "nats.conf").read_text())
    assert config.pop("http") == "127.0.0.1:8222"
    assert config == json.loads(access.nats_config.read_text())
    assert (folder / "redis" / "redis.acl").read_text() == access.redis_acl.read_text()


def test_people_get_urls_with_an_observer_s_login(folder: Path, tmp_path: Path) -> None:
    assert write(folder, secret_with(tmp_path, KEY)) == 0
    nats, redis = OBSERVER.nats.password, OBSERVER.redis.password
    place = folder / "observer"
    assert (place / "nats.url").read_text() == f"nats://observer:{nats}@127.0.0.1:4222\n"
    assert (place / "redis.url").read_text() == f"redis://observer:{redis}@redis:6379/0\n"


def test_a_second_start_keeps_the_key_and_writes_the_same(folder: Path) -> None:
    assert write(folder) == 0
    made = contents(folder)
    assert write(folder) == 0
    assert contents(folder) == made


def test_a_key_in_the_environment_is_taken_and_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIVEN_KEY, KEY.text)
    assert write(folder) == 0
    monkeypatch.delenv(GIVEN_KEY)
    assert write(folder, "--secret=/dev/null") == 0
    assert read_key_file(folder / "key" / "cluster.key") == KEY


def test_another_key_than_the_kept_one_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(folder, secret_with(tmp_path, KEY)) == 0
    made = contents(folder)
    assert write(folder, secret_with(tmp_path, STRANGERS_KEY)) == 2
    assert contents(folder) == made
    said = "".join(capsys.readouterr())
    assert "is not the one that was given" in said
    assert KEY.text not in said
    assert STRANGERS_KEY.text not in said


def test_a_key_given_twice_or_malformed_is_refused_without_being_repeated(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(KEY.text)
    with pytest.raises(ConfigError, match="give it once"):
        given_key({GIVEN_KEY: KEY.text}, secret)
    with pytest.raises(ConfigError, match=f"{GIVEN_KEY}: a cluster key is 64") as told:
        given_key({GIVEN_KEY: "no-key"}, None)
    assert "no-key" not in str(told.value)
    with pytest.raises(ConfigError, match=r"--secret .*No such file"):
        given_key({}, tmp_path / "missing")


def test_an_empty_secret_is_none(tmp_path: Path) -> None:
    assert given_key({GIVEN_KEY: ""}, Path("/dev/null")) is None


def test_a_folder_that_is_not_there_is_made_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets" / "made"
    servers = ("--nats-url=nats://127.0.0.1:4222", "--redis-url=redis://redis:6379/0")
    line = ["container-credentials", str(folder), f"--key={folder / 'cluster.key'}", *servers]
    assert run(line) == 0
    assert (folder / "cluster.key").is_file()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_told_of_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").write_text("a file in its place")
    key = tmp_path / "made" / "cluster.key"
    servers = ("--nats-url=nats://127.0.0.1:4222", "--redis-url=redis://redis:6379/0")
    line = ["container-credentials", str(tmp_path / "made"), f"--key={key}", *servers]
    assert run(line) == 2
    assert str(key) in capsys.readouterr().err

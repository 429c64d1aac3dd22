"""All planes bring the same bytes: between processes, and between network namespaces over TCP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest

from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman_bench.transport.planes import plane_rates

ALWAYS = {"memcpy", "grpc", "memory"}
NAMES = ALWAYS | ({"raw_nixl", "nixl", "nixl_verified"} if has_nixl() else set())
LINK_SECONDS = 30.0
MEASURE = """
import json, sys
from ferryman_bench.transport.planes import plane_rates
opens, host, *inside = sys.argv[1:]
options = {"opens_nixl": opens == "True", "inside": inside, "host": host}
print(json.dumps(sorted(plane_rates(5 << 20, repeats=1, **options).rates)))
"""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a cable between two network namespaces."""

    namespace: str
    device: str
    address: str

    @property
    def command(self) -> tuple[str, ...]:
        """Runs what follows it there, with no other device to choose.

        UCX knows one machine, not its namespaces: it would take their loopbacks for one.
        """
        tcp = ("env", "UCX_TLS=tcp", f"UCX_NET_DEVICES={self.device}")
        return ("ip", "netns", "exec", self.namespace, *tcp)

    @property
    def is_up(self) -> bool:
        found = ip("-n", self.namespace, "-o", "link", "show", self.device)
        return "state UP" in found


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def cable() -> Iterator[tuple[End, End]]:
    """Two new network namespaces and a cable between them that carries."""
    stem = f"ferryman-{uuid4().hex[:8]}"
    ends = End(f"{stem}-1", "end1", "10.211.0.1"), End(f"{stem}-2", "end2", "10.211.0.2")
    made = []
    try:
        try:
            for end in ends:
                ip("netns", "add", end.namespace)
                made.append(end.namespace)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        _plug(*ends)
        yield ends
    finally:
        for namespace in made:
            ip("netns", "del", namespace)


def _plug(one: End, other: End) -> None:
    peer = ("type", "veth", "peer", "name", other.device, "netns", other.namespace)
    ip("link", "add", "name", one.device, "netns", one.namespace, *peer)
    for end in (one, other):
        ip("-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.device)
        ip("-n", end.namespace, "link", "set", end.device, "up")
        ip("-n", end.namespace, "link", "set", "lo", "up")
    limit = time.monotonic() + LINK_SECONDS
    while not (one.is_up and other.is_up):  # the kernel notices a carrier when it has time
        assert time.monotonic() < limit, "a cable carries at some point"


def test_between_processes_every_plane_brings_the_bytes_that_were_sent() -> None:
    found = plane_rates(5 << 20, repeats=1, opens_nixl=has_nixl())
    assert set(found.rates) == NAMES


def test_unless_it_was_asked_for_nixl_is_not_measured() -> None:
    """Its ports have no lock on a bench either."""
    assert set(plane_rates(1 << 20, repeats=1).rates) == ALWAYS


def test_between_network_namespaces_units_travel_over_tcp(cable: tuple[End, End]) -> None:
    """The writer has a process of its own: UCX reads a process's routes once, for good."""
    here, there = cable
    measure = (sys.executable, "-c", MEASURE, str(has_nixl()), there.address, *there.command)
    done = subprocess.run(
        [*here.command, *measure], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == NAMES

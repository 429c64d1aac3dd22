"""The kernel's list of the sockets at which a process can be reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman.errors import Unavailable
from ferryman.wire.handoff.host_network import ListeningSocket, UcxDevice, listening_sockets
from ferryman.wire.handoff.nixl_library import (
    TRANSPORTS,
    WITH_KEYS,
    NixlLibrary,
    NixlOptions,
    has_nixl,
)

AGENT_WITHOUT_TCP = """
import json, os
import numpy as np
from pathlib import Path
from ferryman.wire.handoff.host_network import UcxDevice
from ferryman.wire.handoff.nixl_agent import nixl_agent
from ferryman.wire.handoff.nixl_library import MemoryRegion, NixlOptions
memory = np.zeros(1 << 16, np.uint8)
region = MemoryRegion(int(memory.ctypes.data), memory.nbytes)
with nixl_agent("alone", [region], NixlOptions(UcxDevice("lo"), "none")) as agent:
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    rows = [line.split() for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
    names = [row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in links]
    print(json.dumps([list(map(str, agent.unlocked_ports)), names]))
"""


AGENT_WITH_KEYS = """
import json, os
import numpy as np
from ferryman.errors import Unavailable
from ferryman.wire.handoff.host_network import UcxDevice, listening_sockets
from ferryman.wire.handoff.nixl_agent import nixl_agent
from ferryman.wire.handoff.nixl_library import MemoryRegion, NixlOptions
memory, said = np.zeros(1 << 16, np.uint8), ""
region = MemoryRegion(int(memory.ctypes.data), memory.nbytes)
before = listening_sockets(os.getpid())
try:
    with nixl_agent("alone", [region], NixlOptions(UcxDevice(""), has_keys_only=True)):
        opened = listening_sockets(os.getpid())
except Unavailable as error:
    said, opened = str(error), listening_sockets(os.getpid())
print(json.dumps([said, list(map(str, opened - before))]))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_others_reach_is_seen_with_its_address(
    host: str, kind: socket.SocketKind
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind) as opened:
        try:
            opened.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        if kind is socket.SOCK_STREAM:
            opened.listen()
        port = opened.getsockname()[1]
        (seen,) = (each for each in listening_sockets(os.getpid()) if each.port == port)
        protocol = "tcp" if kind is socket.SOCK_STREAM else "udp"
        assert str(seen) == f"{protocol}://{f'[{host}]' if ':' in host else host}:{port}"
    assert seen not in listening_sockets(os.getpid()), "it is closed"


def test_connections_and_the_sockets_of_others_are_not_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = listening_sockets(os.getpid())
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert listening_sockets(os.getpid()) == before
        command = [sys.executable, "-c", "input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            assert not listening_sockets(other.pid)
            assert isinstance(next(iter(before)), ListeningSocket)
            other.communicate(b"\n")


def test_an_agent_with_keys_only_that_opened_a_port_all_the_same_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TRANSPORTS, "tcp")
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))

        def listens(*_: object) -> bytes:
            opened.listen()
            return b"metadata"

        library = NixlLibrary("alone")
        monkeypatch.setattr(library, "_opened", listens)
        keys_only = NixlOptions(UcxDevice("lo"), has_keys_only=True)
        with pytest.raises(Unavailable, match=f":{opened.getsockname()[1]}, which asks for no key"):
            library.open([], keys_only)
        assert os.environ[TRANSPORTS] == WITH_KEYS
        assert library.open([], NixlOptions(UcxDevice("lo"))) == b"metadata", "it was chosen"


@pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
def test_nixl_with_keys_only_opens_no_socket_and_works_with_rdma_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGENT_WITH_KEYS],
        env={**os.environ, TRANSPORTS: "tcp"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    error, ports = json.loads(done.stdout.splitlines()[-1])
    assert ports == []
    assert bool(error) != Path("/sys/class/infiniband").is_dir(), "it needs such a card"


@pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
def test_nixl_without_tcp_has_no_port_yet_sockets_that_every_user_may_send_to() -> None:
    """Abstract names have no owner and no mode, so `auto` does not take NIXL that way either."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT_WITHOUT_TCP],
        env={**os.environ, "UCX_TLS": "shm,self"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ports, names = json.loads(done.stdout.splitlines()[-1])
    assert ports == []
    assert names
    assert all(name.startswith("@") for name in names)

"""The TCP and UDP sockets at which a process can be reached, according to the kernel.

A library that opens a port need not report it. The difference between two looks shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

# A TCP socket that listens, and a UDP socket without a peer: it receives from everyone.
OPEN_STATES = {"tcp": "0A", "udp": "07"}
SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


class ListeningSocket(NamedTuple):
    """One socket; `protocol` is tcp or udp."""

    protocol: str
    address: IPv4Address | IPv6Address
    port: int

    def __str__(self) -> str:
        is_v6 = isinstance(self.address, IPv6Address)
        host = f"[{self.address}]" if is_v6 else str(self.address)
        return f"{self.protocol}://{host}:{self.port}"


def listening_sockets(pid: int) -> frozenset[ListeningSocket]:
    """The sockets of a process, in its network namespace. Raises OSError if it is gone, or is
    another user's."""
    inodes = _socket_inodes(pid)
    return frozenset(
        socket for inode, socket in _open_sockets(pid) if inode in inodes and socket.port
    )


def _open_sockets(pid: int) -> Iterator[tuple[str, ListeningSocket]]:
    """All of the namespace, each with its inode."""
    for protocol, state in OPEN_STATES.items():
        for version in ("", "6"):
            with suppress(FileNotFoundError):  # a kernel without IPv6 has no such table
                table = Path(f"/proc/{pid}/net/{protocol}{version}").read_text()
                for line in table.splitlines()[1:]:
                    words = line.split()
                    if words[3] == state:
                        host, _, port = words[1].partition(":")
                        yield words[9], ListeningSocket(protocol, _address(host), int(port, 16))


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if match := SOCKET_LINK.fullmatch(str(descriptor.readlink())):
                inodes.add(match[1])
    return inodes


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel writes words of four bytes in the order of this machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address

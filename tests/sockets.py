"""The sockets on which a process listens, according to the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTENS = "0A"
SOCKET = re.compile(r"socket:\[(\d+)\]")


def listening_addresses(pid: int) -> dict[int, IPv4Address | IPv6Address]:
    """By port: the TCP sockets on which a process listens."""
    return {port: address for address, port in _listeners(pid)}


def addresses_of(pid: int) -> set[str]:
    """The IP addresses at which a process listens for TCP."""
    return {str(address) for address, _ in _listeners(pid)}


def _listeners(pid: int) -> Iterator[tuple[IPv4Address | IPv6Address, int]]:
    mine = _socket_inodes(pid)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in mine:
                host, _, port = words[1].partition(":")
                yield _address(host), int(port, 16)


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if match := SOCKET.fullmatch(str(each.readlink())):
                found.add(match[1])
    return found


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel writes words of four bytes in the order of this machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    found = ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found

"""The sockets on which a process listens, according to the kernel."""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTENS = "0A"
SOCKET = re.compile(r"socket:\[(\d+)\]")


def listening_addresses(pid: int) -> dict[int, IPv4Address | IPv6Address]:
    """By port: the TCP sockets on which a process listens."""
    mine = socket_inodes(pid)
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in mine:
                host, _, port = words[1].partition(":")
                found[int(port, 16)] = _address(host)
    return found


def socket_inodes(pid: int) -> set[str]:
    """The numbers of all sockets that a process has open."""
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

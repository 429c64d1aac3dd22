"""Processes that other processes have started."""

from __future__ import annotations

import sys
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from tests.sockets import socket_inodes

TCP_LISTEN = "0A"


def ranks_of(pid: int) -> list[int]:
    """The ranks beside the first that a process has started and not yet seen the end of."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"ferryman.engine.tensor_parallel.rank" in line:
                found.append(int(child))
    return found


def addresses_of(pid: int) -> set[str]:
    """The IP addresses at which a process listens for TCP."""
    opened, found = socket_inodes(pid), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == TCP_LISTEN and inode in opened:
                found.add(_address_of(local.partition(":")[0]))
    return found


def _address_of(digits: str) -> str:
    """Words of the machine's byte order, as the kernel writes them."""
    words = (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    address = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)

"""The network of this machine: the one device for UCX, and the sockets that a process has opened.

UCX by default takes every device and listens on each of them. It is given the device of the address
at which other workers reach us; UCX_NET_DEVICES, if an operator sets it, decides instead. A library
that opens a port need not report it: the difference between two looks at the kernel's tables of TCP
and UDP sockets shows it.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from ferryman.wire.plane_values import GrpcOnly

Address = IPv4Address | IPv6Address

CHOSEN_BY_OPERATOR = "UCX_NET_DEVICES"
LOOPBACK = "lo"
SYSFS = Path("/sys/class/net")

_SIOCGIFCONF = 0x8912
_MAX_INTERFACES = 256
_IFREQ = struct.Struct("16s 2x 2x 4s 16x")  # name; family, port and address; the rest of the union
# A TCP socket that listens, and a UDP socket without a peer: it receives from everyone.
OPEN_STATES = {"tcp": "0A", "udp": "07"}
SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class UcxDevice:
    """UCX's name of the device that it is bound to; "" leaves the choice to UCX_NET_DEVICES."""

    name: str


def ucx_device(host: str, environment: Mapping[str, str]) -> UcxDevice | GrpcOnly:
    """The device of the interface that has the address of `host`: its RDMA device if it has one.

    Blocks while a name is looked up. GrpcOnly if no interface of this machine has that address:
    behind a NAT or a load balancer, or if a name cannot be resolved.
    """
    if environment.get(CHOSEN_BY_OPERATOR):
        return UcxDevice("")
    for address in _addresses_of(host):
        if interface := interface_of(address):
            return UcxDevice(_rdma_device(interface) or interface)
    return GrpcOnly("ADVERTISE is no address of this machine")


def interface_of(address: Address) -> str:
    """The name of the interface with this address; empty if none has it."""
    if address.is_loopback:
        return LOOPBACK
    return {**_ipv4_interfaces(), **_ipv6_interfaces()}.get(address, "")


def _addresses_of(host: str) -> list[Address]:
    with suppress(OSError):
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    return []


def _ipv4_interfaces() -> dict[Address, str]:
    """Addresses of all interfaces that are up, further addresses of one included."""
    room = ctypes.create_string_buffer(_MAX_INTERFACES * _IFREQ.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        wanted = struct.pack("iP", len(room), ctypes.addressof(room))
        length, _ = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, wanted))
    entries = _IFREQ.iter_unpack(room.raw[:length])
    # An alias has a name of its own, such as eth0:1; the device is eth0.
    names = ((IPv4Address(raw), name.rstrip(b"\0").decode()) for name, raw in entries)
    return {address: name.partition(":")[0] for address, name in names}


def _ipv6_interfaces() -> dict[Address, str]:
    with suppress(OSError):
        rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return {IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
    return {}


def _rdma_device(interface: str) -> str:
    """`mlx5_0:1` for an interface that is a port of such a card; else empty. Not tested on one
    yet."""
    with suppress(OSError, ValueError):
        cards = sorted((SYSFS / interface / "device" / "infiniband").iterdir())
        port = int((SYSFS / interface / "dev_port").read_text()) + 1
        return f"{cards[0].name}:{port}" if cards else ""
    return ""


class ListeningSocket(NamedTuple):
    """One socket; `protocol` is tcp or udp."""

    protocol: str
    address: Address
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


def _address(text: str) -> Address:
    """The kernel writes words of four bytes in the order of this machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address

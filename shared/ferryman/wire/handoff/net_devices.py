"""Chooses the one network device for UCX: that of the address at which other workers reach us.

UCX by default takes every device and listens on each of them. UCX_NET_DEVICES, if an operator sets
it, decides instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from ferryman.wire.plane_values import GrpcOnly

Address = IPv4Address | IPv6Address

CHOSEN_BY_OPERATOR = "UCX_NET_DEVICES"
LOOPBACK = "lo"
SYSFS = Path("/sys/class/net")

_SIOCGIFCONF = 0x8912
_MAX_INTERFACES = 256
_IFREQ = struct.Struct("16s 2x 2x 4s 16x")  # name; family, port and address; the rest of the union


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

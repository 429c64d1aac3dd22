"""The sockets on which a process listens, according to the kernel."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from ferryman.wire.handoff.host_network import listening_sockets


def listening_addresses(pid: int) -> dict[int, IPv4Address | IPv6Address]:
    """By port: the sockets at which a process can be reached."""
    return {socket.port: socket.address for socket in listening_sockets(pid)}


def addresses_of(pid: int) -> set[str]:
    """The IP addresses at which a process can be reached."""
    return {str(socket.address) for socket in listening_sockets(pid)}

"""UCX is bound to the device of the advertised address, or to what the operator chose."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pytest
from tests.sockets import listening_addresses

from ferryman.cache.manifest import Kind
from ferryman.engine.memory.slabs import ShardedSlab, SlabAddress
from ferryman.errors import ConfigError
from ferryman.settings.workers import NixlSettings
from ferryman.wire.handoff import host_network
from ferryman.wire.handoff.host_network import UcxDevice, interface_of, ucx_device
from ferryman.wire.handoff.nixl_agent import nixl_agent
from ferryman.wire.handoff.nixl_library import MemoryRegion, NixlOptions, has_nixl
from ferryman.wire.plane_values import GrpcOnly
from ferryman.worker.planes import NixlSide, PlaneSide, plane_side

needs_nixl = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
ELSEWHERE = "203.0.113.77"  # kept free for documents (RFC 5737)
PLACES = {Kind.FULL: ShardedSlab((SlabAddress(4096, 1 << 20, 4096),))}


@pytest.fixture
def own_address() -> str:
    """The local address of this machine's connections to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))  # sends nothing
        except OSError as error:
            pytest.skip(f"no network here: {error}")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost"])
def test_a_loopback_address_is_the_loopback_device(host: str) -> None:
    assert ucx_device(host, {}) == UcxDevice("lo")


def test_the_device_is_that_of_the_interface_with_the_address(own_address: str) -> None:
    device = ucx_device(own_address, {})
    assert isinstance(device, UcxDevice)
    assert device.name in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_of(ip_address(own_address)) == device.name


def test_addresses_of_the_sixth_version_are_found_too() -> None:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    found = {ip_address(bytes.fromhex(row[0])): row[5] for row in rows}
    assert {address: interface_of(address) for address in found} == found


@pytest.mark.parametrize("host", [ELSEWHERE, "2001:db8::77", "no-such-host.invalid", ""])
def test_an_address_of_no_interface_has_no_device(host: str) -> None:
    assert isinstance(ucx_device(host, {}), GrpcOnly)


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
def test_what_the_operator_chose_is_left_to_him(host: str) -> None:
    assert ucx_device(host, {"UCX_NET_DEVICES": "mlx5_0:1"}) == UcxDevice("")
    assert "engine_config" not in NixlOptions(UcxDevice("")).parameters


def test_an_interface_of_an_rdma_card_is_that_card_s_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_address: str
) -> None:
    """The files of such a card, in a folder: there is none here."""
    name = interface_of(ip_address(own_address))
    (tmp_path / name / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    (tmp_path / name / "dev_port").write_text("1\n")
    monkeypatch.setattr(host_network, "SYSFS", tmp_path)
    assert ucx_device(own_address, {}) == UcxDevice("mlx5_3:2")


def side_of(choice: str, advertise: str, **environment: str) -> PlaneSide:
    hosts = ("127.0.0.1", advertise)
    return plane_side(choice, PLACES, hosts, NixlSettings(), environment)  # type: ignore[arg-type]


@needs_nixl
def test_without_a_device_a_worker_speaks_grpc_and_says_why() -> None:
    side = side_of("nixl-unlocked-or-grpc", ELSEWHERE)
    assert side == GrpcOnly("ADVERTISE is no address of this machine")
    with pytest.raises(ConfigError, match="set UCX_NET_DEVICES"):
        side_of("nixl-unlocked", ELSEWHERE)


@needs_nixl
def test_a_worker_s_agents_are_bound_to_its_device() -> None:
    side = side_of("nixl-unlocked-or-grpc", "127.0.0.1")
    assert isinstance(side, NixlSide)
    assert side.options.parameters["engine_config"] == "NET_DEVICES=lo"
    side = side_of("nixl-unlocked", ELSEWHERE, UCX_NET_DEVICES="eth7")
    assert isinstance(side, NixlSide)
    assert "engine_config" not in side.options.parameters


@needs_nixl
@pytest.mark.parametrize("which", ["loopback", "own"])
def test_an_agent_listens_on_the_address_that_was_chosen_alone(
    which: str, own_address: str
) -> None:
    """By itself UCX listens on every device."""
    chosen = "127.0.0.1" if which == "loopback" else own_address
    device = ucx_device(chosen, {})
    assert isinstance(device, UcxDevice)
    memory = np.zeros(1 << 16, np.uint8)
    before = set(listening_addresses(os.getpid()))
    with nixl_agent("alone", [MemoryRegion(int(memory.ctypes.data), 1 << 16)], NixlOptions(device)):
        after = listening_addresses(os.getpid())
    new = {str(address) for port, address in after.items() if port not in before}
    assert new == {chosen}

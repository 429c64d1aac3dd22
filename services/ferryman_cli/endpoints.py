"""The endpoints of a cluster, for every command but `up`: from flags, or from the state folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ferryman.errors import ConfigError
from ferryman_launcher.state_folder import DEFAULT, observer_nats_url, running_cluster

StateDir = Annotated[
    Path,
    typer.Option(
        envvar="FERRYMAN_STATE_DIR",
        help="Folder of a cluster started by `ferryman up`; by default in the current folder.",
    ),
]
GrpcAddress = Annotated[
    str,
    typer.Option(
        "--grpc",
        "--url",
        metavar="HOST:PORT",
        help="The router's gRPC door; those of several with commas between.",
    ),
]
NatsUrl = Annotated[str, typer.Option("--nats", metavar="URL", help="The cluster's broker.")]
ClusterName = Annotated[str, typer.Option("--cluster", help="The cluster's name in NATS subjects.")]
RouterCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="FILE",
        help="A router's credentials; by default those in the state folder.",
    ),
]
CaFile = Annotated[
    str,
    typer.Option("--ca", metavar="FILE", help="Authorities of a cluster with TLS, such as ca.crt."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show all there is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="FERRYMAN_API_KEY",
        show_envvar=True,
        help="Of the tenant whose request it is, where the router wants keys.",
    ),
]
RequestId = Annotated[
    str,
    typer.Argument(metavar="ID", help="A request id, or what its caller named it (x-request-id)."),
]

if TYPE_CHECKING:
    from ferryman.security.tls import DoorTls

STATE_DIR = DEFAULT


def grpc_address(flag: str, state_dir: Path) -> str:
    """host:port of the router, or of several with commas between. Raises ConfigError when none is
    given and no cluster runs there."""
    if not flag:
        return running_cluster(state_dir).grpc
    return ",".join(map(_router_address, flag.split(",")))


def _router_address(flag: str) -> str:
    address = flag.strip().removeprefix("grpc://").removesuffix("/")
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        raise ConfigError(f"--grpc {flag}: it should be HOST:PORT of a router's gRPC door")
    return address


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """A broker's URL, the cluster's name in its subjects, and (with TLS) a file of authorities."""

    url: str
    cluster: str = "local"
    ca: str = ""


def broker_place(url: str, name: str, ca: str, state_dir: Path) -> BrokerPlace:
    """The broker's URL has an observer's login where there is one."""
    if url:
        return BrokerPlace(url, name or "local", ca)
    cluster = running_cluster(state_dir)
    url = observer_nats_url(state_dir, cluster)
    return BrokerPlace(url, name or cluster.name, ca or cluster.ca)


@dataclass(frozen=True, slots=True)
class DoorPlace:
    """The gRPC door of the router, or of several, as `grpc_address` has it, and (with TLS) a file
    of authorities."""

    address: str
    ca: str = ""

    def tls(self) -> DoorTls | None:
        """For the client; None without TLS. Raises ConfigError."""
        if not self.ca:
            return None
        # gRPC takes a moment to import, which `--help` should not.
        from ferryman.security.tls import DoorTls

        return DoorTls.of_file(self.ca)


def door_place(flag: str, ca: str, state_dir: Path) -> DoorPlace:
    """The address as `grpc_address` has it, and errors, too."""
    address = grpc_address(flag, state_dir)
    return DoorPlace(address, ca or ("" if flag else running_cluster(state_dir).ca))

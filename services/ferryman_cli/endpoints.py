"""The endpoints of a cluster, for every command but `up`: from flags, or from the state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    str, typer.Option("--grpc", "--url", metavar="HOST:PORT", help="The router's gRPC door.")
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

STATE_DIR = DEFAULT


def grpc_address(given: str, state_dir: Path) -> str:
    """host:port of the router. Raises ConfigError when none is given and no cluster runs there."""
    if not given:
        return running_cluster(state_dir).grpc
    address = given.removeprefix("grpc://").removesuffix("/")
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        raise ConfigError(f"--grpc {given}: it should be HOST:PORT of the router's gRPC door")
    return address


def nats_and_name(url: str, name: str, state_dir: Path) -> tuple[str, str]:
    """The broker's URL, with an observer's login where there is one, and the cluster's name."""
    if url:
        return url, name or "local"
    cluster = running_cluster(state_dir)
    return observer_nats_url(state_dir, cluster), name or cluster.name

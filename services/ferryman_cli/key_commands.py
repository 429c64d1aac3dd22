"""Commands for the secrets of clusters that `ferryman up` does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman.runtime.server_access import write_server_access
from ferryman.security.credentials_file import private_folder, write_all_credentials
from ferryman.security.key_file import make_key_file, read_key_file
from ferryman.wire.nats.subjects import check_name
from ferryman_cli.endpoints import ClusterName


def key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the cluster key shall be.")],
) -> None:
    """Make a random cluster key, unless the file is there; check it if it is.

    Routers and host-caches are given its path; `ferryman up` does all this by itself.
    """
    make_key_file(path)
    read_key_file(path)


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files shall be.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name or address that clients use; several times."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long certificates are valid.")] = 365,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="A new authority; the earlier one stays trusted.")
    ] = False,
) -> None:
    """Make a development authority and a certificate for each role, for TLS_DIR and --tls-dir.

    Again in the same folder it replaces all certificates, which running processes notice. A service
    needs ca.crt and the two files of its role, the router those of `door`, too; ca.key stays here.
    """
    # `--help` should not wait for this import.
    from ferryman.security.certificates import certificate_specs, write_certificates
    from ferryman.security.tls_folder import utc_now

    specs = certificate_specs(host or ())
    private_folder(folder)
    write_certificates(folder, specs, days, utc_now(), new_ca=new_ca)


def credentials(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files shall be.")],
    key_file: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="The cluster key, made if it is missing.")
    ],
    cluster: ClusterName = "local",
) -> None:
    """Write the credentials of every role, and what locks NATS and Redis, from the cluster key.

    A service is given the path of its role's file alone, nats-server that of nats.conf, Redis that
    of redis.acl; `ferryman up` does all this by itself.
    """
    check_name(cluster, "cluster")
    make_key_file(key_file)
    private_folder(folder)
    made = read_key_file(key_file)
    write_all_credentials(folder, made)
    write_server_access(folder, made, cluster)

"""Commands for the secrets of clusters that `ferryman up` does not start, and of containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.security.cluster_key import ClusterKey, cluster_key_from_text
from ferryman.security.credentials_file import private_folder, write_all_credentials
from ferryman.security.key_file import make_key_file, read_key_file, take_key
from ferryman.wire.nats.subjects import check_name
from ferryman_cli.endpoints import ClusterName

GIVEN_KEY = "FERRYMAN_CLUSTER_KEY"


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
    from ferryman.runtime.credential_folders import write_server_access

    check_name(cluster, "cluster")
    make_key_file(key_file)
    private_folder(folder)
    made = read_key_file(key_file)
    write_all_credentials(folder, made)
    write_server_access(folder, made, cluster)


def container_credentials(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders shall be.")],
    key_file: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="Keeps the cluster key; made if missing.")
    ],
    nats_url: Annotated[
        str, typer.Option("--nats-url", metavar="URL", help="NATS, as people reach it.")
    ],
    redis_url: Annotated[
        str, typer.Option("--redis-url", metavar="URL", help="Redis, as people reach it.")
    ],
    secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A secret with the key to take, unless it is empty."),
    ] = None,
    tls_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With certificates, for this host; several times."),
    ] = None,
    cluster: ClusterName = "local",
) -> None:
    """Write each role's credentials into a folder of its own, to be mounted alone.

    The key is the one in the variable FERRYMAN_CLUSTER_KEY or in --secret, else the one that is
    kept, else a new one. An authority for certificates stays in the folder `authority`.
    compose.yaml and compose.tls.yaml do all this by themselves.
    """
    from ferryman.runtime.credential_folders import (
        ServerUrls,
        write_certificate_folders,
        write_credential_folders,
    )
    from ferryman.security.tls_folder import utc_now

    check_name(cluster, "cluster")
    cluster_key = given_key(os.environ, secret)
    with suppress(OSError):  # writing the key gives a better error
        key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cluster_key is None:
        make_key_file(key_file)
    else:
        take_key(key_file, cluster_key)
    certificate = write_certificate_folders(folder, tls_host, utc_now()) if tls_host else None
    servers = ServerUrls(nats_url, redis_url, cluster)
    write_credential_folders(folder, read_key_file(key_file), servers, certificate)


def given_key(environ: Mapping[str, str], secret: Path | None) -> ClusterKey | None:
    """The key in the environment or in a secret's file; None when both are empty or missing.

    Raises ConfigError, which repeats nothing of it, when either is no key, or both are given.
    """
    texts = {GIVEN_KEY: environ.get(GIVEN_KEY, "")}
    if secret is not None:
        texts[f"--secret {secret}"] = _text_of(secret)
    keys = {place: text for place, text in texts.items() if text.strip()}
    if len(keys) > 1:
        raise ConfigError(f"a cluster key is given by {' and by '.join(keys)}: give it once")
    for place, text in keys.items():
        try:
            return cluster_key_from_text(text)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    return None


def _text_of(secret: Path) -> str:
    # It may be a device without content, which stands for no secret.
    try:
        with secret.open("rb") as file:
            return file.read(4096).decode("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"--secret {secret}: {error.strerror}") from None

"""The command that makes secrets for a cluster of containers, before any of them starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.runtime.credential_folders import ServerUrls, write_credential_folders
from ferryman.security.cluster_key import ClusterKey, cluster_key_from_text
from ferryman.security.key_file import make_key_file, read_key_file, take_key
from ferryman.wire.nats.permissions import CertificateFiles
from ferryman.wire.nats.subjects import check_name
from ferryman_cli.endpoints import ClusterName

GIVEN_KEY = "FERRYMAN_CLUSTER_KEY"


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
    check_name(cluster, "cluster")
    cluster_key = given_key(os.environ, secret)
    with suppress(OSError):  # writing the key gives a better error
        key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cluster_key is None:
        make_key_file(key_file)
    else:
        take_key(key_file, cluster_key)
    certificate = _certificate(folder, tls_host) if tls_host else None
    servers = ServerUrls(nats_url, redis_url, cluster)
    write_credential_folders(folder, read_key_file(key_file), servers, certificate)


def _certificate(folder: Path, hosts: Sequence[str]) -> CertificateFiles:
    # `--help` should not wait for these imports.
    from ferryman.runtime.certificate_folders import write_certificate_folders
    from ferryman.security.tls_folder import utc_now

    return write_certificate_folders(folder, hosts, utc_now())


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

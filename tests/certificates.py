"""Folders of certificates for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio

from ferryman.security.certificates import certificate_specs, write_certificates
from ferryman.security.tls import SERVICE_NAME, Options


def make_certificates(
    folder: Path, *, now: datetime | None = None, days: int = 30, new_ca: bool = False
) -> Path:
    """All certificates of a cluster, with an authority of this folder's own."""
    folder.mkdir(exist_ok=True)
    specs = certificate_specs(())
    write_certificates(folder, specs, days, now or datetime.now(UTC), new_ca=new_ca)
    return folder


class Uncertified:
    """A way to a service that believes it as another service does, and shows no certificate."""

    def __init__(self, authorities: bytes) -> None:
        self._authorities = authorities

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        expected = (*options, ("grpc.ssl_target_name_override", SERVICE_NAME))
        credentials = grpc.ssl_channel_credentials(self._authorities)
        return grpc.aio.secure_channel(address, credentials, options=expected)


def forget_older_authorities(folder: Path) -> None:
    """From now on the newest authority alone is trusted."""
    path, end = folder / "ca.crt", "-----END CERTIFICATE-----\n"
    path.write_text(path.read_text().split(end)[0] + end)

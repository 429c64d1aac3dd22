"""Certificates for containers, in the folder of each reader's credentials.

<folder>/authority          ca.crt and ca.key with all that they signed: for the maker alone
<folder>/READER/ca.crt      the authorities that are trusted, for every reader
<folder>/ROLE/ROLE.crt|key  the certificate of a role; the router has that of its doors, too
<folder>/nats, redis        each with its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.runtime.credential_folders import METRICS, NATS, READERS, REDIS
from ferryman.security.certificates import certificate_specs, write_certificates
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import private_folder, write_private_text
from ferryman.security.tls_folder import AUTHORITIES, DOOR
from ferryman.wire.nats.permissions import CertificateFiles

AUTHORITY = "authority"
DAYS = 365
_SHOWN: Mapping[str, tuple[str, ...]] = {
    **{role.value: (role.value,) for role in ClusterRole},
    ClusterRole.ROUTER.value: (ClusterRole.ROUTER.value, DOOR),
    NATS: (NATS,),
    REDIS: (REDIS,),
    METRICS: (),
}


def write_certificate_folders(
    folder: Path, hosts: Sequence[str], now: datetime
) -> CertificateFiles:
    """Makes all certificates anew for these names and addresses, valid for DAYS from `now`, under
    the authority that is kept, and returns the paths of those of NATS. Raises ConfigError."""
    authority = private_folder(folder / AUTHORITY)
    write_certificates(authority, certificate_specs(hosts), DAYS, now, new_ca=False)
    for reader in READERS:
        place = private_folder(folder / reader)
        _copy(AUTHORITIES, authority, place)
        for name in _SHOWN[reader]:
            # Processes that run take a certificate when its key is there.
            _copy(f"{name}.key", authority, place)
            _copy(f"{name}.crt", authority, place)
    return CertificateFiles(folder / NATS / f"{NATS}.crt", folder / NATS / f"{NATS}.key")


def _copy(name: str, source: Path, target: Path) -> None:
    try:
        text = (source / name).read_text()
    except OSError as error:
        raise ConfigError(f"{source / name}: {error.strerror}") from None
    write_private_text(target / name, text)

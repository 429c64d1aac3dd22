"""Makes a development authority, and from it a certificate for each role and server of a cluster.

Services have `service.ferryman` as their name and their role as the common name; the door of the
router, NATS and Redis have the names of hosts. Keys are on the curve P-256, and private to their
owner. Files are replaced one by one: readers take a certificate when its key is there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ferryman.errors import ConfigError
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import write_private_text
from ferryman.security.key_file import read_private_text
from ferryman.security.tls import SERVICE_NAME
from ferryman.security.tls_folder import AUTHORITIES, DOOR, MAX_FILE_BYTES, NATS

AUTHORITY_KEY = "ca.key"
SERVERS = (DOOR, NATS, "redis")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3650
READABLE = 0o644
# Clocks of machines differ a little.
EARLIER = timedelta(minutes=5)

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH

AnyName = x509.DNSName | x509.IPAddress


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate that signs others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class CertificateSpec:
    """The content of one certificate: its common name, its other names, and its uses."""

    name: str
    hosts: tuple[str, ...]
    uses: tuple[x509.ObjectIdentifier, ...]


def certificate_specs(hosts: Sequence[str]) -> tuple[CertificateSpec, ...]:
    """One for each role and server. Servers have `hosts` and the names of this machine. Services
    have neither: with them a worker could pretend to be a router, NATS or Redis.

    Raises ConfigError for a host that is neither a name nor an address.
    """
    for host in hosts:
        _name_of(host)
    reached = tuple(dict.fromkeys((*LOCAL_HOSTS, *hosts)))
    services = [role.value for role in ClusterRole if role is not ClusterRole.OBSERVER]
    return (
        *(CertificateSpec(service, (SERVICE_NAME,), (_SERVER, _CLIENT)) for service in services),
        CertificateSpec(ClusterRole.OBSERVER.value, (), (_CLIENT,)),
        *(CertificateSpec(server, reached, (_SERVER,)) for server in SERVERS),
    )


def write_certificates(
    folder: Path, specs: Sequence[CertificateSpec], days: int, now: datetime, *, new_ca: bool
) -> None:
    """Makes or replaces all certificates in an existing folder, valid for `days` from `now`.

    The authority in the folder signs them, or a new one if there is none or `new_ca` asks for
    it; then earlier ones stay trusted until they expire. Raises ConfigError when the folder cannot
    be used.
    """
    trusted = _trusted(folder / AUTHORITIES, now)
    authority = _authority(folder, trusted, now, is_new=new_ca or not trusted)
    if authority.certificate not in trusted:
        # Trusted first, then used: a reader between the two refuses no process.
        trusted = [authority.certificate, *trusted]
        write_private_text(folder / AUTHORITIES, "".join(map(_pem, trusted)), READABLE)
        write_private_text(folder / AUTHORITY_KEY, _key_pem(authority.key))
    end = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    for spec in specs:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(spec, key, authority, now, end)
        write_private_text(folder / f"{spec.name}.key", _key_pem(key))
        write_private_text(folder / f"{spec.name}.crt", _pem(certificate), READABLE)


def _trusted(path: Path, now: datetime) -> list[x509.Certificate]:
    """The authorities in a file that have not expired, the newest first."""
    if not path.exists():
        return []
    try:
        authorities = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"authorities {path}: they cannot be read") from None
    return [authority for authority in authorities if authority.not_valid_after_utc > now]


def _authority(
    folder: Path, trusted: Sequence[x509.Certificate], now: datetime, *, is_new: bool
) -> Authority:
    if is_new:
        return _new_authority(now)
    path = folder / AUTHORITY_KEY
    hint = "make certificates where it is, or a new authority by --new-ca"
    text = read_private_text("the authority's key", path, MAX_FILE_BYTES, hint)
    try:
        key = serialization.load_pem_private_key(text.encode(), None)
    except (ValueError, TypeError):
        raise ConfigError(f"the authority's key {path}: it is no private key in PEM") from None
    for certificate in trusted:
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == (
            key.public_key()
        ):
            return Authority(certificate, key)
    raise ConfigError(f"the authority's key {path}: it is not the key of one in {AUTHORITIES}")


def _new_authority(now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _subject(f"Ferryman {mark.digest.hex()[:8]}")
    uses = _key_usage(signs=False)
    certificate = (
        _builder(name, name, key, now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(uses, critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _signed(
    spec: CertificateSpec,
    key: ec.EllipticCurvePrivateKey,
    authority: Authority,
    now: datetime,
    end: datetime,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_subject(spec.name), authority.certificate.subject, key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(spec.uses), critical=False)
        .add_extension(issuer, critical=False)
    )
    if spec.hosts:
        names = x509.SubjectAlternativeName([_name_of(host) for host in spec.hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(end)
        .add_extension(mark, critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """The usage for a process, which signs handshakes, or for an authority, which signs
    certificates."""
    return x509.KeyUsage(
        digital_signature=signs,
        key_cert_sign=not signs,
        crl_sign=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name_of(host: str) -> AnyName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _HOST.fullmatch(host) is None:
            raise ConfigError(f"--host {host}: it is neither a name nor an address") from None
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return text.decode()

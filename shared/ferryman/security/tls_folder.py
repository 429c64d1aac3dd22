"""The folder of certificates: read at start, and again whenever its files have changed.

<folder>/ca.crt               the authorities that are trusted, in PEM
<folder>/NAME.crt, NAME.key   the certificate of a role, or of a server, and its private key

`ferryman certs` writes such a folder. A process needs ca.crt and the two files of its own name.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ferryman.errors import ConfigError
from ferryman.security.tls import TlsMaterial

log = logging.getLogger(__name__)

AUTHORITIES = "ca.crt"
DOOR = "door"  # of the router, for clients
NATS = "nats"
MAX_FILE_BYTES = 256 << 10
# A group may read a key, as in secrets of Kubernetes; others may not, and only the owner writes.
REFUSED_MODE = stat.S_IWGRP | stat.S_IRWXO
# Time enough for people to notice; `ferryman certs` makes them for a year.
EARLY_WARNING = timedelta(days=7)
# Files can become good without a change: by chmod, by a clock that is set right, by a disk that
# answers again.
RETRY = timedelta(minutes=1)
HINT = "`ferryman certs` makes new ones"

Stamp = tuple[tuple[int, int, int], ...]


def utc_now() -> datetime:
    """Certificates are valid by wall time."""
    return datetime.now(UTC)


class TlsFolder:
    """The certificate of `name` in a folder; calling it gives the newest one.

    Files that change are read again when they are next asked for. Those that cannot be used, such
    as a certificate without its key, change nothing: an error in the log names them, the earlier
    ones stay in use, and after RETRY they are read once more. A warning is logged, once, in a
    certificate's last days. Raises ConfigError when the first ones cannot be used.
    """

    def __init__(self, folder: Path, name: str, now: Callable[[], datetime] = utc_now) -> None:
        self.authorities = folder / AUTHORITIES
        self.certificate, self.key = folder / f"{name}.crt", folder / f"{name}.key"
        self._now, self._lock = now, threading.Lock()
        self._stamp = self._looked()
        self._material, self._end = self._read()
        self._is_told = False
        self._failed: datetime | None = None

    def __call__(self) -> TlsMaterial:
        with self._lock:
            stamp = self._looked()
            if stamp != self._stamp or self._is_due():
                self._stamp = stamp
                self._renew()
            if not self._is_told and self._end - self._now() < EARLY_WARNING:
                self._is_told = True
                end = _day(self._end)
                log.warning("certificate %s: it expires on %s; %s", self.certificate, end, HINT)
            return self._material

    def _renew(self) -> None:
        try:
            self._material, self._end = self._read()
        except ConfigError as error:
            self._failed = self._now()
            log.error("the earlier certificate stays in use: %s", error)
        else:
            self._failed, self._is_told = None, False
            log.info("certificate %s read again", self.certificate)

    def _is_due(self) -> bool:
        """Whether files that could not be used are to be read again; the clock may go back."""
        return self._failed is not None and abs(self._now() - self._failed) >= RETRY

    def _looked(self) -> Stamp:
        return tuple(_stamp(path) for path in (self.authorities, self.certificate, self.key))

    def _read(self) -> tuple[TlsMaterial, datetime]:
        """The material, and the end of the certificate's time."""
        authorities = _text("authorities", self.authorities)
        certificate = _text("certificate", self.certificate)
        key = _text("key", self.key, REFUSED_MODE)
        _certificates("authorities", self.authorities, authorities)
        leaf = _certificates("certificate", self.certificate, certificate)[0]
        check_validity(leaf, self.certificate, self._now())
        try:
            public = load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError):
            raise ConfigError(f"key {self.key}: it is no private key in PEM") from None
        if public != leaf.public_key():
            raise ConfigError(f"key {self.key}: it is not the key of {self.certificate}")
        return TlsMaterial(certificate, key, authorities), leaf.not_valid_after_utc


def check_validity(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    """Raises ConfigError, with the file and the day, outside the time of a certificate."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end <= now:
        raise ConfigError(f"certificate {path}: it expired on {_day(end)}; {HINT}")
    if now < begin:
        raise ConfigError(f"certificate {path}: it is not valid before {_day(begin)}")


def _day(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _certificates(what: str, path: Path, text: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        raise ConfigError(f"{what} {path}: it holds no certificate in PEM") from None


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with the file; zeros for one that is not there."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ino, status.st_size


def _text(what: str, path: Path, refused_mode: int = 0) -> bytes:
    """Raises ConfigError, also for a file whose mode has bits of `refused_mode`."""
    try:
        with path.open("rb") as file:
            # Of the open file, because its name may mean another one by now.
            if os.fstat(file.fileno()).st_mode & refused_mode:
                raise ConfigError(f"{what} {path}: others may read or change it; chmod 600 {path}")
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        more = f"; {HINT}" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{what} {path}: {error.strerror}{more}") from None


def _uncounted() -> None:
    """For servers without metrics."""


def server_context(
    source: Callable[[], TlsMaterial], refused: Callable[[], None] = _uncounted
) -> ssl.SSLContext:
    """For a server of this process that asks its clients for no certificate. Each handshake uses
    the newest certificate. `refused` is called for each that fails, by
    whichever end; a client that hangs up without a word is not noticed."""
    made: dict[TlsMaterial, ssl.SSLContext] = {}

    def newest() -> ssl.SSLContext:
        material = source()
        if material not in made:
            made.clear()
            made[material] = _context_of(material)
        return made[material]

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = newest()

    first = newest()
    first.sslobject_class = _noting(refused)
    first.sni_callback = choose  # it is called for clients that name no server, too
    return first


def _noting(refused: Callable[[], None]) -> type[ssl.SSLObject]:
    """Neither uvicorn nor the event loop reports a handshake that fails."""

    class NotedHandshake(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # it goes on when more bytes have come
            except ssl.SSLError:
                refused()
                raise

    return NotedHandshake


def _context_of(material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # It reads files only, and those may have changed since they were checked: so, from memory.
    memory = os.memfd_create("certificate")
    try:
        os.write(memory, material.certificate + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context

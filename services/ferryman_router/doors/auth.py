"""The callers: their API keys, and what else the headers of a call say of them.

Keys come from a setting, and from a file:

    [shop]                           the tenant's name, as events show it
    keys = ["sha256:5e88…"]          SHA-256 of its keys in hex, or the keys themselves
    requests_per_minute = 60         0 or nothing: no limit
    tokens_per_minute = 100_000      of prompts and answers
    max_in_flight = 8
    share = 2.0                      of the queue, against others' 1.0
    expires = 2027-01-31T00:00:00Z

No key is kept: a caller's is known by its SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from ferryman.errors import ConfigError, InvalidRequest, Unauthenticated
from ferryman.ids import check_correlation_id, make_request_id
from ferryman.runtime.traces import TraceContext, new_trace, parse_traceparent
from ferryman.security.cluster_key import ClusterKey, Purpose
from ferryman.security.key_file import read_private_text
from ferryman.settings.declaration import Name, reason_of, suggestion
from ferryman_router.routing.generate_request import PUBLIC, Caller, Tenant
from ferryman_router.routing.quotas import Quotas, TenantLimits

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 20
NAME_BYTES = 4
NEVER = datetime.max.replace(tzinfo=UTC)
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")

_Limit = Annotated[int, Field(ge=0)]


def _check_key(written: str) -> str:
    """A key or a digest as the file has it. Raises ValueError for one that no caller could send,
    and for a digest that was cut: taken as a key, it would let in every reader of the file."""
    if written.lower().startswith("sha256:") and not _DIGEST.fullmatch(written):
        raise ValueError("behind sha256: come 64 hex digits")
    if not (written.isascii() and written.isprintable()) or " " in written:
        raise ValueError("a key has no spaces and only characters of ASCII: it is sent in a header")
    return written


_Key = Annotated[str, Field(min_length=8), AfterValidator(_check_key)]


class _TenantTable(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    keys: Annotated[list[_Key], Field(min_length=1)]
    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    max_in_flight: _Limit = 0
    share: Annotated[float, Field(gt=0, le=1000)] = 1.0
    expires: AwareDatetime = NEVER

    def limits(self) -> TenantLimits:
        return TenantLimits(
            self.requests_per_minute, self.tokens_per_minute, self.max_in_flight, self.share
        )


_FILE = TypeAdapter(dict[Name, _TenantTable])


@dataclass(frozen=True, slots=True)
class KnownKey:
    """The tenant that a key belongs to, and until when."""

    tenant: Tenant
    expires: datetime = NEVER


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys by their SHA-256, and the limits of tenants by name."""

    known: Mapping[bytes, KnownKey] = field(repr=False)
    limits: Mapping[str, TenantLimits]


class ApiKeys:
    """The keys that count now. Without a key or a file to read them from, every caller is the
    public."""

    def __init__(
        self, keys: Iterable[str], path: Path | None, cluster_key: ClusterKey, quotas: Quotas
    ) -> None:
        """Raises ConfigError like `reload`."""
        self._keys, self._path, self._cluster_key = tuple(keys), path, cluster_key
        self._quotas = quotas
        self._ring = self._read()
        quotas.limits = self._ring.limits

    def tenant_of(self, api_key: str) -> Tenant:
        """The tenant who showed this key, or an empty one. Raises Unauthenticated."""
        if not self._keys and self._path is None:
            return PUBLIC
        entry = self._ring.known.get(_digest(api_key))
        if entry is None:
            message = "an API key is needed: Authorization: Bearer <key>, or x-api-key: <key>"
            raise Unauthenticated(message)
        if entry.expires <= datetime.now(UTC):
            raise Unauthenticated(f"this API key expired at {entry.expires.isoformat()}")
        return entry.tenant

    def reload(self) -> None:
        """Reads the file again. One that cannot be used changes nothing, and is logged."""
        try:
            self._ring = self._read()
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        self._quotas.limits = self._ring.limits
        log.info("API keys read again: %d tenants with limits", len(self._ring.limits))

    def _read(self) -> KeyRing:
        entries = {_digest(key): KnownKey(self._tenant_of_key(key)) for key in self._keys}
        tables = read_key_tables(self._path) if self._path else {}
        for name, table in tables.items():
            # By the name, so that a new key finds the cache of the old one. The empty part keeps it
            # apart from an API key that reads like a name.
            salt = self._cluster_key.subkey(Purpose.TENANT_SALT).tag(b"", name.encode())
            tenant = Tenant(name, salt)
            for digest in _digests(table.keys):
                if digest in entries:
                    raise ConfigError(f"API keys {self._path}: a key of {name} is there twice")
                entries[digest] = KnownKey(tenant, table.expires)
        return KeyRing(entries, {name: table.limits() for name, table in tables.items()})

    def _tenant_of_key(self, api_key: str) -> Tenant:
        """The same in all routers of the cluster. Without the cluster key no guess at an API key
        can be tried against a name in an event, or a page key in the index."""
        key = api_key.encode()
        name = self._cluster_key.subkey(Purpose.TENANT_NAME).tag(key)[:NAME_BYTES]
        salt = self._cluster_key.subkey(Purpose.TENANT_SALT).tag(key)
        return Tenant(f"tenant-{name.hex()}", salt)


def read_key_tables(path: Path) -> Mapping[str, _TenantTable]:
    """The tenants of a file. Raises ConfigError that names tenant and field, never a key."""
    text = read_private_text("API keys", path, MAX_FILE_BYTES)
    try:
        tables = _FILE.validate_python(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"API keys {path}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(f"API keys {path}: {place}: {_reason(first)}") from None
    if not tables:
        raise ConfigError(f"API keys {path}: it names no tenant, so nobody could call")
    return tables


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        field = str(error["loc"][-1])
        return f"there is no such field{suggestion(field, _TenantTable.model_fields)}"
    return reason_of(error)


def _digests(keys: Iterable[str]) -> Iterator[bytes]:
    for key in keys:
        written = _DIGEST.fullmatch(key)
        yield bytes.fromhex(written[1]) if written else _digest(key)


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode(errors="replace")).digest()


# The headers of a call.

MAX_DEADLINE_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Reads headers (lower-case names)."""

    api_keys: ApiKeys
    deadline_seconds: float
    samples: Callable[[], bool] = lambda: False
    """Whether a trace that begins here is recorded."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated, or InvalidRequest naming the header."""
        parent = parse_traceparent(headers.get("traceparent", ""))
        return Caller(
            make_request_id(),
            self._tenant(headers),
            self._deadline(headers),
            own_span(parent, self.samples).traceparent,
            correlation_id(headers),
            parent_span=parent.span_id if parent else "",
        )

    def _tenant(self, headers: Mapping[str, str]) -> Tenant:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        return self.api_keys.tenant_of(key.strip())

    def _deadline(self, headers: Mapping[str, str]) -> float:
        text = headers.get("x-ferryman-deadline-ms")
        if text is None:
            return self.deadline_seconds
        if not text.isascii() or not text.isdecimal() or not 0 < int(text[:12]) <= MAX_DEADLINE_MS:
            message = f"x-ferryman-deadline-ms must be a whole number from 1 to {MAX_DEADLINE_MS}"
            raise InvalidRequest(message, "x-ferryman-deadline-ms")
        return int(text) / 1000


def correlation_id(headers: Mapping[str, str]) -> str:
    """`x-request-id`, or nothing. Raises InvalidRequest when it is too long or unprintable."""
    name = headers.get("x-request-id", "")
    if not name:
        return ""
    try:
        # HTTP libraries give the bytes of a header as Latin-1; most clients mean UTF-8.
        name = name.encode("latin-1").decode("utf-8")
    except UnicodeError:
        pass
    try:
        return check_correlation_id(name)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "x-request-id") from error


def own_span(parent: TraceContext | None, samples: Callable[[], bool]) -> TraceContext:
    """A span of ours in the caller's trace, or in a new one when the caller has none."""
    if parent is not None:
        return parent.child(secrets.randbits)
    return new_trace(secrets.randbits, is_sampled=samples())

"""The headers of a call: they say who calls, under which id, for how long, in which trace."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.cluster_key import ClusterKey, Purpose
from ferryman.errors import InvalidRequest, Unauthenticated
from ferryman.ids import check_correlation_id, make_request_id
from ferryman.runtime.traces import new_trace, parse_traceparent
from ferryman_router.generate_request import PUBLIC, Caller, Tenant

MAX_DEADLINE_MS = 24 * 3600 * 1000
NAME_BYTES = 4


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Reads headers (lower-case names). Without `api_keys` every caller is the public."""

    api_keys: frozenset[str]
    deadline_seconds: float
    cluster_key: ClusterKey

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated, or InvalidRequest naming the header."""
        return Caller(
            make_request_id(),
            self._tenant(headers),
            self._deadline(headers),
            _own_traceparent(headers.get("traceparent", "")),
            correlation_id(headers),
        )

    def _tenant(self, headers: Mapping[str, str]) -> Tenant:
        if not self.api_keys:
            return PUBLIC
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        key = key.strip()
        known = [hmac.compare_digest(key.encode(), one.encode()) for one in self.api_keys]
        if not any(known):
            message = "an API key is needed: Authorization: Bearer <key>, or x-api-key: <key>"
            raise Unauthenticated(message)
        return self._tenant_of(key.encode())

    def _tenant_of(self, api_key: bytes) -> Tenant:
        """The same in all routers of the cluster. Without the cluster key no guess at an API key
        can be tried against a name in an event, or a page key in the index."""
        name = self.cluster_key.subkey(Purpose.TENANT_NAME).tag(api_key)[:NAME_BYTES]
        salt = self.cluster_key.subkey(Purpose.TENANT_SALT).tag(api_key)
        return Tenant(f"tenant-{name.hex()}", salt)

    def _deadline(self, headers: Mapping[str, str]) -> float:
        given = headers.get("x-ferryman-deadline-ms")
        if given is None:
            return self.deadline_seconds
        if (
            not given.isascii()
            or not given.isdecimal()
            or not 0 < int(given[:12]) <= MAX_DEADLINE_MS
        ):
            message = f"x-ferryman-deadline-ms must be a whole number from 1 to {MAX_DEADLINE_MS}"
            raise InvalidRequest(message, "x-ferryman-deadline-ms")
        return int(given) / 1000


def correlation_id(headers: Mapping[str, str]) -> str:
    """`x-request-id`, or nothing. Raises InvalidRequest when it is too long or unprintable."""
    given = headers.get("x-request-id", "")
    if not given:
        return ""
    try:
        # HTTP libraries give the bytes of a header as Latin-1; most clients mean UTF-8.
        given = given.encode("latin-1").decode("utf-8")
    except UnicodeError:
        pass
    try:
        return check_correlation_id(given)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "x-request-id") from error


def _own_traceparent(header: str) -> str:
    """A span of ours in the caller's trace, or in a new one when the header names none."""
    given = parse_traceparent(header)
    made = given.child(secrets.randbits) if given else new_trace(secrets.randbits)
    return made.traceparent

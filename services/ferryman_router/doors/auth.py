"""The headers of a call: the tenant, the id, the deadline and the trace."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.errors import InvalidRequest
from ferryman.ids import check_correlation_id, make_request_id
from ferryman.runtime.traces import new_trace, parse_traceparent
from ferryman_router.doors.api_keys import ApiKeys
from ferryman_router.routing.generate_request import Caller, Tenant

MAX_DEADLINE_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Reads headers (lower-case names)."""

    api_keys: ApiKeys
    deadline_seconds: float

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


def _own_traceparent(header: str) -> str:
    """A span of ours in the caller's trace, or in a new one when the header names none."""
    parent = parse_traceparent(header)
    made = parent.child(secrets.randbits) if parent else new_trace(secrets.randbits)
    return made.traceparent

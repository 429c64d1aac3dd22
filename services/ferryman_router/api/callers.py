"""What the headers of a call say: who calls, under which id, for how long, in which trace."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.errors import InvalidRequest
from ferryman.ids import check_request_id, make_request_id
from ferryman.runtime.traces import new_trace, parse_traceparent
from ferryman_router.asked import PUBLIC, Caller, Tenant, Unauthenticated

MAX_DEADLINE_MS = 24 * 3600 * 1000
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Callers:
    """Reads headers (lower-case names). Without `api_keys` everybody is the public."""

    api_keys: frozenset[str]
    deadline_seconds: float

    def of(self, headers: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated, or InvalidRequest naming the header."""
        return Caller(
            self._request_id(headers),
            self._tenant(headers.get("authorization", "")),
            self._deadline(headers),
            _own_traceparent(headers.get("traceparent", "")),
        )

    def _request_id(self, headers: Mapping[str, str]) -> str:
        given = headers.get("x-request-id")
        if given is None:
            return make_request_id()
        try:
            return check_request_id(given)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "x-request-id") from error

    def _tenant(self, authorization: str) -> Tenant:
        if not self.api_keys:
            return PUBLIC
        scheme, _, key = authorization.partition(" ")
        known = [hmac.compare_digest(key.strip().encode(), one.encode()) for one in self.api_keys]
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthenticated("an API key is needed: Authorization: Bearer <key>")
        salt = hashlib.blake2b(key.strip().encode(), digest_size=SALT_BYTES).digest()
        return Tenant(f"tenant-{salt.hex()[:8]}", salt)

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


def _own_traceparent(header: str) -> str:
    """A span of ours in the caller's trace, or in a new one when the header names none."""
    given = parse_traceparent(header)
    made = given.child(secrets.randbits) if given else new_trace(secrets.randbits)
    return made.traceparent

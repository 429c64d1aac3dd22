"""Calls from pages of other origins: off unless the operator names the origins.

A browser asks before such a call (a preflight), and shows a page only what the answer allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response

ANY_ORIGIN = "*"
# A browser may remember its preflight for so long.
MAX_AGE_SECONDS = 600
_METHODS = "GET, POST, OPTIONS"
_HEADERS = (
    "authorization, content-type, x-api-key, x-request-id, x-ferryman-deadline-ms, traceparent,"
    " anthropic-version, anthropic-beta"
)
_SHOWN = "x-request-id, request-id, retry-after, x-ferryman-ignored"


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    """The origins whose pages may call; empty: none, `*`: all. Keys come in headers, never in
    cookies, so no page can call with another user's."""

    origins: frozenset[str] = frozenset()

    def preflight(self, method: str, headers: Mapping[str, str]) -> Response | None:
        """The answer to a browser's question before a call; None for any other request. Headers
        have lower-case names."""
        is_question = method == "OPTIONS" and "access-control-request-method" in headers
        if not is_question or not self.origins:
            return None
        response = Response(status_code=204)
        if self._allowed(headers):
            response.headers["access-control-allow-methods"] = _METHODS
            response.headers["access-control-allow-headers"] = _HEADERS
            response.headers["access-control-max-age"] = str(MAX_AGE_SECONDS)
        return response

    def mark(self, response: Response, headers: Mapping[str, str]) -> None:
        """Lets the page that called read the response, if its origin is one of ours."""
        if self.origins and ANY_ORIGIN not in self.origins:
            response.headers.add_vary_header("origin")
        if allowed := self._allowed(headers):
            response.headers["access-control-allow-origin"] = allowed
            response.headers["access-control-expose-headers"] = _SHOWN

    def _allowed(self, headers: Mapping[str, str]) -> str:
        """The origins to name to a browser, empty for none."""
        origin = headers.get("origin", "")
        if ANY_ORIGIN in self.origins:
            return ANY_ORIGIN if origin else ""
        return origin if origin in self.origins else ""


NO_ORIGINS = CorsPolicy()

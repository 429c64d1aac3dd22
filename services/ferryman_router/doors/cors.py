"""Calls from pages of other origins: off unless the operator names the origins.

A browser asks before such a call (a preflight), and shows a page only what the answer allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response

ANY_ORIGIN = "*"
# A browser may remember its preflight for so long.
MAX_AGE_SECONDS = 600
_METHODS = "GET, HEAD, POST, OPTIONS"
# Browsers list what they are about to send: clients have many headers of their own. These are
# for those that ask without a list.
_HEADERS = "authorization, content-type, x-api-key"
_ASKED_HEADERS = "access-control-request-headers"
_LIST_OF_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")
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
            response.headers["access-control-allow-headers"] = _allowed_headers(headers)
            response.headers["access-control-max-age"] = str(MAX_AGE_SECONDS)
            response.headers.add_vary_header(_ASKED_HEADERS)
        return response

    def mark(self, response: Response, headers: Mapping[str, str]) -> None:
        """Lets the page that called read the response, if its origin is one of ours."""
        if self.origins and ANY_ORIGIN not in self.origins:
            response.headers.add_vary_header("origin")
        if allowed := self._allowed(headers):
            response.headers["access-control-allow-origin"] = allowed
            response.headers["access-control-expose-headers"] = _SHOWN

    def is_stranger(self, headers: Mapping[str, str]) -> bool:
        """Whether a page sends this that may not call: browsers say so by its origin."""
        return "origin" in headers and not self._allowed(headers)

    def _allowed(self, headers: Mapping[str, str]) -> str:
        """The origins to name to a browser, empty for none."""
        origin = headers.get("origin", "")
        if ANY_ORIGIN in self.origins:
            return ANY_ORIGIN if origin else ""
        return origin if origin in self.origins else ""


def _allowed_headers(headers: Mapping[str, str]) -> str:
    """The headers that a page of a named origin may send: those that its browser asks for. None of
    them gives a page more than any other client has, and none is a cookie."""
    asked = headers.get(_ASKED_HEADERS, "")
    return asked if _LIST_OF_NAMES.fullmatch(asked) else _HEADERS


NO_ORIGINS = CorsPolicy()

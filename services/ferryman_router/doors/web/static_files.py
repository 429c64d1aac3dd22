"""The files of the web page: read once from the package, with the headers that lock it in.

The page loads from nowhere else and runs no code of its HTML (`default-src 'self'`), no other page
may frame it, and nothing in it is secret: its data asks for the viewer's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import PurePosixPath

from starlette.responses import Response

FOLDER = "static"
SHELL = "index.html"
PREFIX = "/ferryman/web/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
LOCKED_IN: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file; `tag` is a hash of its bytes, by which a browser that has it asks."""

    body: bytes = field(repr=False)
    media_type: str
    tag: str

    def response(self, if_none_match: str = "") -> Response:
        """The file, or that the browser has it: a newer router may have another one."""
        headers = {**LOCKED_IN, "cache-control": "no-cache", "etag": self.tag}
        if self.tag in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.media_type})


def static_files() -> Mapping[str, StaticFile]:
    """All files by their path; the shell is at `/`."""
    files = {}
    for entry in resources.files("ferryman_router.doors.web").joinpath(FOLDER).iterdir():
        suffix = PurePosixPath(entry.name).suffix
        if suffix in MEDIA_TYPES:
            body = entry.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            path = "/" if entry.name == SHELL else f"{PREFIX}{entry.name}"
            files[path] = StaticFile(body, MEDIA_TYPES[suffix], tag)
    return files

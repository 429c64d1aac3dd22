"""A local stand-in of the hub's HTTP API, as far as the real client asks for models.

Paths and headers are those of the hub: `/api/models/<id>/revision/<name>`, `/api/models/<id>/tree/
<commit>`, `/<id>/resolve/<commit>/<file>`, errors named in X-Error-Code. It can break a connection
in the middle of a file, answer with a status for some time, and keep a list of what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Repository:
    """The files of a model at its one commit; a token is needed if one is named."""

    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    token: str = ""
    is_gated: bool = False


@dataclass
class HubStandIn:
    """Its models, the requests that it had, and the faults that are left."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    """Files whose next answer ends after so many bytes."""
    sends_ranges: bool = True
    """Whether it heeds the header Range."""
    status: int = 0
    """Answers everything with this status, if it is not 0."""
    url: str = ""

    def got(self, name: str) -> list[str]:
        """The ranges of the downloads of a file; empty for a whole one."""
        return [span for method, path, span in self.asked if (method, path) == ("GET", name)]


def repository_of(folder: Path) -> Repository:
    """All files of a folder."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return Repository(files)


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """A hub without models, for the length of a block."""
    hub = HubStandIn()

    class Handler(_Handler):
        stand_in = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_client_at(hub: HubStandIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client in this process asks `hub`, keeps files under `cache`, and has no token."""
    # The check of `up` has a process of its own, which reads them anew.
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.0"  # each connection ends with its answer
    timeout = 20

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Tests ask `asked` instead."""

    def _answer(self) -> None:
        hub, path = self.stand_in, unquote(urlsplit(self.path).path)
        found = re.fullmatch(
            r"/(?:api/models/)?([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?", path
        )
        name = (found[4] or found[2]) if found else path
        hub.asked.append((self.command, name, self.headers.get("Range", "")))
        if hub.status:
            self._send(hub.status, b"out of order")
        elif found is None or found[1] not in hub.repositories:
            self._fail(401, "RepoNotFound", "Repository Not Found")
        else:
            self._repository(hub.repositories[found[1]], found[2], found[3], found[4] or "")

    def _repository(self, repository: Repository, act: str, revision: str, name: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.token and token != repository.token:
            code = "GatedRepo" if repository.is_gated else "RepoNotFound"
            # Anybody may see that a gated model is there, and nobody its files.
            if act == "resolve" or not repository.is_gated:
                self._fail(401, code, f"Access to model is restricted: {code}")
                return
        if revision not in repository.revisions:
            self._fail(404, "RevisionNotFound", "Invalid rev id")
        elif act == "revision":
            siblings = [{"rfilename": each} for each in sorted(repository.files)]
            self._send_json({"id": "x/y", "sha": COMMIT, "siblings": siblings})
        elif act == "tree":
            self._send_json([_entry(*each) for each in sorted(repository.files.items())])
        elif name not in repository.files:
            self._fail(404, "EntryNotFound", "Entry not found")
        else:
            self._file(name, repository.files[name])

    def _file(self, name: str, content: bytes) -> None:
        wanted = self.headers.get("Range", "") if self.stand_in.sends_ranges else ""
        span = _RANGE.fullmatch(wanted)
        start = int(span[1]) if span else 0
        end = min(len(content), int(span[2]) + 1 if span and span[2] else len(content))
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        most = self.stand_in.breaks.pop(name, None)
        self.wfile.write(content[start : end if most is None else start + most])
        if most is not None:
            self.close_connection = True

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}

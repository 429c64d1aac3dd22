"""A real S3 server for the storage tier's tests, in a thread of this process, and its faults."""

from __future__ import annotations

import io
import logging
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import pytest

BUCKET = "ferryman"
FIRST_BYTES = 65536  # so few that the rest of megabytes is still with the client
WAIT_SECONDS = 120.0

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


@dataclass
class ObjectFaults:
    """The faults of one prefix; its owner's object has none.

    `refusals` are status and error code by HTTP method. `capacity_bytes` bounds the objects put. A
    request waits until `is_quick` is set. A put of which FIRST_BYTES are read waits until
    `is_flowing` is set, and sets `is_under_way` before. `num_met` counts the requests that met a
    fault, by method, and as `cut` the puts whose client went away; it sets `was_cut` then.
    """

    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    capacity_bytes: int = 1 << 40
    is_quick: Event = field(default_factory=Event)
    is_flowing: Event = field(default_factory=Event)
    is_under_way: Event = field(default_factory=Event)
    was_cut: Event = field(default_factory=Event)
    num_met: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_quick.set()
        self.is_flowing.set()

    def refusal(self, environ: Environ, names: str) -> tuple[int, str] | None:
        """The status and code that refuse this request for the objects in `names`, if any."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        method = "DELETE" if environ.get("QUERY_STRING") == "delete" else method
        if not self.is_quick.is_set():
            self.num_met[method] += 1
            self.is_quick.wait(WAIT_SECONDS)
        refusal = self.refusals.get(method)
        if method == "PUT" and not refusal:
            refusal = self._taken(environ, path)
        self.num_met[method] += refusal is not None
        if method == "DELETE" and not refusal:
            self.sizes = {at: n for at, n in self.sizes.items() if at.split("/")[-1] not in names}
        return refusal

    def _taken(self, environ: Environ, path: str) -> tuple[int, str] | None:
        """Reads an object's body; refuses it when it is cut off, or finds no room."""
        length, incoming = int(environ["CONTENT_LENGTH"]), environ["wsgi.input"]
        body = incoming.read(min(length, FIRST_BYTES))
        if not self.is_flowing.is_set():
            self.num_met["PUT"] += 1
            self.is_under_way.set()
            self.is_flowing.wait(WAIT_SECONDS)
        body += _rest(incoming, length - len(body))
        if len(body) < length:
            self.num_met["cut"] += 1
            self.was_cut.set()
            return 400, "IncompleteBody"
        others = sum(size for name, size in self.sizes.items() if name != path)
        if others + length > self.capacity_bytes:
            return 507, "XMinioStorageFull"
        self.sizes[path] = length
        environ["wsgi.input"] = io.BytesIO(body)
        return None


def _rest(incoming: Any, num_bytes: int) -> bytes:
    """The rest of a body, or what its client sent of it."""
    try:
        return bytes(incoming.read(num_bytes))
    except OSError:
        return b""


@dataclass
class S3Server:
    """The server's URL; `faults` by prefix."""

    url: str
    faults: dict[str, ObjectFaults]


class FaultyObjects:
    """The server's application, behind the faults of the prefixes."""

    def __init__(self, app: App, faults: dict[str, ObjectFaults]) -> None:
        self._app, self._faults = app, faults

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = self._refusal(environ)
        if refusal is None:
            return self._app(environ, start_response)
        status, code = refusal
        start_response(f"{status} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()]

    def _refusal(self, environ: Environ) -> tuple[int, str] | None:
        names = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        if environ["REQUEST_METHOD"] == "POST" and environ["QUERY_STRING"] == "delete":
            names = _names_to_delete(environ)
        for prefix, faults in list(self._faults.items()):
            if prefix in names and "owner.lock" not in names:
                return faults.refusal(environ, names)
        return None


def _names_to_delete(environ: Environ) -> str:
    """The body of a request that deletes several objects, which clients send for one, too."""
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    environ["wsgi.input"] = io.BytesIO(body)
    return str(body.decode())


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """It has one empty bucket."""
    moto = pytest.importorskip("moto.server", reason="needs moto, of the extra `dev`")
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request otherwise
    faults: dict[str, ObjectFaults] = {}
    app = FaultyObjects(moto.DomainDispatcherApplication(moto.create_backend_app), faults)
    handler = moto.MotoRequestHandler
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        host, port = server.server_address[:2]
        url = f"http://{host!s}:{port}"
        made = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=WAIT_SECONDS).close()
        yield S3Server(url, faults)
    finally:
        server.shutdown()
        thread.join(WAIT_SECONDS)

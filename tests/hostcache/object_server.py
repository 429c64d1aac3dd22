"""A real S3 server for the storage tier's tests, in a thread of this process."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "ferryman"


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL; it has one empty bucket."""
    moto = pytest.importorskip("moto.server", reason="needs moto, of the extra `dev`")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request otherwise
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        made = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=120).close()
        yield url
    finally:
        server.stop()

"""The errors that an operator reads when a bucket cannot be used: the reason and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from tests.hostcache.object_server import BUCKET, S3Server

from ferryman.errors import ConfigError
from ferryman.runtime.embedded import free_port
from ferryman_hostcache.storage.object_address import ENDPOINT_VARIABLES, open_object_store


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and a region in the environment, and no endpoint."""
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@contextmanager
def refusing(status: int) -> Iterator[str]:
    """The URL of a server that refuses everything."""

    class RefusedPut(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(status)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), RefusedPut)
    serving = Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "says"), [(403, "refuses these credentials"), (401, "does not know these cred")]
)
def test_refused_credentials_are_named(status: int, says: str) -> None:
    with refusing(status) as url, pytest.raises(ConfigError, match=says):
        open_object_store(f"s3://bucket/prefix?endpoint={url}")


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server) -> None:
    with pytest.raises(ConfigError, match="no such bucket: make it first"):
        open_object_store(f"s3://absent/prefix?endpoint={s3.url}")


def test_a_store_that_is_not_there_is_told_from_one_that_refuses() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=r"cannot be reached: see its endpoint \("):
        open_object_store(f"s3://bucket/prefix?endpoint={nobody}")


def test_without_credentials_the_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        open_object_store("s3://bucket/prefix")


@pytest.mark.parametrize("name", ENDPOINT_VARIABLES)
def test_an_endpoint_of_the_environment_may_be_plain_http(
    name: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the URL may: the operator has chosen it."""
    monkeypatch.setenv(name, s3.url)
    with closing(open_object_store(f"s3://{BUCKET}/by-{name.lower()}")) as blobs:
        assert blobs.scan() == {}

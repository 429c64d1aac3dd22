"""One broker and one index for all tests of the wire; fewer examples, for each takes a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.servers import nats_server, redis_server

settings.register_profile("wire", deadline=None, max_examples=60)
settings.load_profile("wire")


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url

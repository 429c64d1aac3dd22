"""The real nats-server and the real Redis for tests: one line each, ready when the block begins.

with nats_server() as url: ...
with redis_server() as url: ...
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferryman.runtime.embedded import EmbeddedServer, nats_command, redis_command, started


@contextmanager
def running_nats() -> Iterator[EmbeddedServer]:
    """A broker with JetStream, with its process, to be killed or stopped."""
    with tempfile.TemporaryDirectory() as directory:
        with started(nats_command, Path(directory)) as server:
            yield server


@contextmanager
def running_redis() -> Iterator[EmbeddedServer]:
    """An empty Redis with its process, to be killed or stopped."""
    with tempfile.TemporaryDirectory() as directory:
        with started(redis_command, Path(directory)) as server:
            yield server


@contextmanager
def nats_server() -> Iterator[str]:
    """The URL of a broker with JetStream."""
    with running_nats() as server:
        yield server.url


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of an empty Redis."""
    with running_redis() as server:
        yield server.url

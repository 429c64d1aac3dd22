"""The real nats-server and the real Redis for tests: one line each, ready when the block begins.

with nats_server() as url: ...
with redis_server() as url: ...
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.cluster_keys import KEY

from ferryman.runtime.credential_folders import write_server_access
from ferryman.runtime.embedded import EmbeddedServer, nats_command, redis_command, started
from ferryman.security.credentials import Login
from ferryman.wire.nats.permissions import ACCOUNT

TESTS = Login("tests", "of-tests")


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
def locked_nats_server() -> Iterator[str]:
    """The URL of a broker with the users and permissions of `ferryman up`, and TESTS, who may do
    all. The cluster key is `cluster_keys.KEY`."""
    with tempfile.TemporaryDirectory() as directory:
        config = write_server_access(Path(directory), KEY, "local").nats_config
        said = json.loads(config.read_text())
        everything = {"publish": ">", "subscribe": ">"}
        said["accounts"][ACCOUNT]["users"].append(
            {"user": TESTS.user, "password": TESTS.password, "permissions": everything}
        )
        config.write_text(json.dumps(said))
        with started(partial(nats_command, config=config), Path(directory) / "nats") as server:
            yield server.url


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of an empty Redis."""
    with running_redis() as server:
        yield server.url

"""A cluster as people start it, `ferryman up` with the demo model, for the tests of a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness.cluster import up


@pytest.fixture(scope="package")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """OpenAI's `base_url` of a running cluster, one for all clients."""
    with up(tmp_path_factory.mktemp("up")) as cluster:
        yield f"{cluster.doors[0]}/v1"

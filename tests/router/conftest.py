"""One broker and one model folder for all tests of the router; a cluster for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.harness.router import RouterCluster, cluster, left_behind, model_folder
from tests.router.tool_folders import tool_folder
from tests.servers import nats_server
from tests.text.folders import write_folder

from ferryman.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _routers_hold_nothing_at_the_end() -> Iterator[None]:
    with left_behind():
        yield


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats_server() as url:
        yield url


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with a chat template that shows tools."""
    return tool_folder(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens may be parts of characters."""
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("bytes"), "byte_level"))


@pytest.fixture
async def one_pair(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with cluster(nats_url, folder) as made:
        yield made


@pytest.fixture
async def two_pairs(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with cluster(nats_url, folder, num_prefills=2, num_decodes=2) as made:
        yield made

"""One cluster for all tests of this folder, which run in the order in which they stand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.compose.composed_cluster import ComposedCluster, composed_cluster, copy_tree
from tests.compose.container_engine import ContainerEngine, NoEngineError, container_engine
from tests.compose.images import fill_wheels, prepare_images
from tests.deploy.compose_file import ROOT

ASKED, WHEELS = "--containers", "wheels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(ASKED, action="store_true", help="Run the tests that need a container engine.")


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContainerEngine]:
    if not request.config.getoption(ASKED, default=False):
        pytest.skip("builds an image, which takes minutes: `make compose-test` runs it")
    try:
        with container_engine() as found:
            prepare_images(found, tmp_path_factory.mktemp("images"))
            yield found
    except NoEngineError as error:
        pytest.skip(f"NOT TRIED, no containers here: {error}")


@pytest.fixture(scope="session")
def tree(engine: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy like a clean clone, with the wheels that are here.

    An engine of our own gives builds no network, so it needs them.
    """
    copy = copy_tree(tmp_path_factory.mktemp("tree"))
    if (ROOT / WHEELS).is_dir():
        shutil.copytree(ROOT / WHEELS, copy / WHEELS)
    elif engine.private:
        fill_wheels(engine, copy)
    return copy


@pytest.fixture(scope="session")
def cluster(engine: ContainerEngine, tree: Path) -> Iterator[ComposedCluster]:
    offline = {"PIP_NO_INDEX": "1"} if (tree / WHEELS).is_dir() else {}
    # In float64 answers are those of one process, whatever is batched with what.
    with composed_cluster(engine, tree, DTYPE="float64", **offline) as cluster:
        yield cluster

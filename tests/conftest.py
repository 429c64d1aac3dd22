"""Settings that must be made before any test module is imported, and the shares of a test run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

# One thread a process: the workers of a test run share the cores, and threads that wait for each
# other by spinning would take them from the other worker. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from tests.harness.forked_ranks import start_rank

from ferryman.engine.tensor_parallel import group
from ferryman.runtime import embedded
from ferryman.settings.engine import EngineOptions

# Nothing that a test module imports is garbage: no collection until all are here.
gc.disable()

TOGETHER = {"tests/clients"}
LONGEST = {"tests/tools/bits/test_equal_bits.py"}
"""Files that take a process minutes: those that run them last would leave the others idle."""

# Properties are about what is true, not how fast: a busy machine fails no test.
settings.register_profile("no_clock", deadline=None)
settings.load_profile("no_clock")
embedded.START_SECONDS = 120.0

if device := os.environ.get("FERRYMAN_TEST_DEVICE"):
    # Engines that tests build run there, and so do those of services that tests start.
    os.environ["FERRYMAN_DEVICE"] = device
    EngineOptions.model_fields["device"].default = device
    EngineOptions.model_rebuild(force=True)

if not torch.cuda.is_available():
    # Triton builds its own library for the interpreter or for a GPU when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "start_rank", start_rank)
        yield


@pytest.fixture(autouse=True)
def _threads_are_given_back() -> Iterator[None]:
    """A test that leaves torch another number of threads slows all later ones of its process."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"{after} threads of torch, {before} before the test"


@pytest.fixture
def threads_set_back() -> Iterator[None]:
    """Sets torch's number of threads back after a test that needs another."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """A full collection walks over all that was imported: a second in which no thread runs.

    Tests make and drop many objects: with Python's own thresholds collections took 5.3 of 117
    seconds of 1,445 tests, with these 2.0.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each file to one process, and a folder whose tests share a cluster too."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class FileOrFolderScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = str(PurePath(file).parent)
            return folder if folder in TOGETHER else file

    return FileOrFolderScheduling(config, log)

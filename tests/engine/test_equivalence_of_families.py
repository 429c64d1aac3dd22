"""Every family, however the state of its prompt arrives, answers as in a cold run, in float64.

A tiny model of each family and of the native one, with as many kinds of state as it has. In CI each
runs in one cell, not all in the same; with FERRYMAN_TEST_ALL_CELLS set, in all of them; with
FERRYMAN_TEST_RANKS set, on two ranks. Families of layers that others have are `slow`.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.host_fed import (
    PAGE_SIZE,
    Cell,
    HostFed,
    PutsAway,
    assert_same,
    engine,
    engine_of,
)
from tests.model.comparison import marks_of
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.telling import ALL_FAMILIES, save_telling

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.shards import over_ranks
from ferryman.errors import ConfigError
from ferryman.llm import Completion
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
PAGE_END = 64
"""The last of the prompt at which it can be resumed."""

JUNCTION = 32
"""The last page end that a prompt of its first 40 tokens shares with it."""

SIBLINGS = [PROMPT, *([*PROMPT[:-1], tail] for tail in (9, 10, 11))]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
SCARCE_PAGES = 14
"""Four siblings share four pages and need 16 at their ends."""

NUM_RANKS = 2 if "FERRYMAN_TEST_RANKS" in os.environ else 1
CELLS = [
    Cell(chunk, overlap, tp_size=NUM_RANKS) for chunk in (16, 48, 1024) for overlap in (False, True)
]


@dataclass(frozen=True)
class ServedByFamily:
    """A model of a family, the manifest by which its pools are sized, and what it answers cold."""

    folder: Path
    manifest: StateManifest
    cold: list[Completion]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ServedByFamily:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_telling(folder, request.param, PAGE_SIZE, PAGE_END, num_ranks=NUM_RANKS)
    whole, of_rank = (
        state_manifest(load_config(folder), "float64", PAGE_SIZE, "", n) for n in (1, NUM_RANKS)
    )
    manifest = over_ranks(whole, of_rank, NUM_RANKS)
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        return ServedByFamily(folder, manifest, llm.generate(SIBLINGS, GREEDY))


def cells_of(family: str) -> list[Cell]:
    if "FERRYMAN_TEST_ALL_CELLS" in os.environ:
        return CELLS
    return [CELLS[ALL_FAMILIES.index(family) % len(CELLS)]]


every_cell = pytest.mark.parametrize(
    ("served", "cell"),
    [
        pytest.param(
            family,
            cell,
            id=f"{family}, chunks of {cell.chunk_tokens}, overlap {cell.overlap}",
            marks=marks_of(family),
        )
        for family in ALL_FAMILIES
        for cell in cells_of(family)
    ],
    indirect=["served"],
)


@every_cell
def test_hits_forks_and_loads_answer_as_the_cold_run(served: ServedByFamily, cell: Cell) -> None:
    cold = served.cold[0]
    with engine(served.folder, cell) as llm:
        check(llm, cold, cached={"device": 0})
        check(llm, cold, cached={"device": PAGE_END})
        forked = llm.generate([[*PROMPT[:66], 5], PROMPT, *SIBLINGS[1:], PROMPT[:17]], GREEDY)
        assert [one.cached_tokens["device"] for one in forked[:5]] == [PAGE_END] * 5
        for found, right in zip(forked[1:5], served.cold, strict=True):
            assert_same(found, right)
        llm.write_through(PROMPT)
        llm.forget()
        check(llm, cold, cached={"device": 0, "host": PAGE_END})
        for kind in served.manifest.kinds:
            assert llm.forget(kind) > 0
            check(llm, cold, cached={"device": PAGE_END if has_path(served, kind) else 0})
        llm.forget()
        for tail in (5, 6):  # the second leaves the first one's path, and a resume point there
            llm.generate([[*PROMPT[:40], *[tail] * 30]], ONE_TOKEN)
        check(llm, cold, cached={"device": JUNCTION})
        llm.check_integrity()
        assert all(set(ledger.by_role) <= {"tree"} for ledger in llm.ledgers().values())


def has_path(served: ServedByFamily, lost: Kind) -> bool:
    """Whether the device still knows the prompt's pages without a kind: by those of all positions,
    or in a model that has none by any other kind."""
    return lost is not Kind.FULL and set(served.manifest.kinds) != {lost}


def check(llm: HostFed, cold: Completion, cached: dict[str, int]) -> None:
    found = llm.generate([PROMPT], GREEDY)[0]
    assert_same(found, cold)
    assert cached.items() <= found.cached_tokens.items()


@every_cell
def test_retraction_answers_as_the_cold_run(served: ServedByFamily, cell: Cell) -> None:
    """Retracted requests resume from the device in the first run, from the host in the second.

    Requests of a model without full pages do not grow, so none of them is ever retracted: a window
    is taken whole at admission.
    """
    grows = Kind.FULL in served.manifest.kinds
    scarce = Cell(
        cell.chunk_tokens,
        cell.overlap,
        memory_bytes=scarce_bytes(served.manifest, cell),
        max_running=4,
        recurrent_slots=12,
        tp_size=cell.tp_size,
    )
    with engine(served.folder, scarce) as llm:
        found = llm.generate(SIBLINGS, GREEDY)
        assert (llm.counts.retractions > 0) is grows, "the pools were meant to run out"
        llm.check_integrity()
    with engine_of(PutsAway, served.folder, scarce) as llm:
        found += llm.generate(SIBLINGS, GREEDY)
        forgotten = any(plan.loads for plan in llm.resumed)
        assert forgotten is grows, "the device was to have forgotten them"
        llm.check_integrity()
    for one, other in zip(found, served.cold * 2, strict=True):
        assert_same(one, other)


def scarce_bytes(manifest: StateManifest, cell: Cell) -> int:
    """The most memory, in steps of a page, that gives at most SCARCE_PAGES full pages.

    Without pages of that kind: the least that is enough for the slots of the first kind.
    """
    tracking = tracking_slots(prefix_cache=True, overlap=cell.overlap)
    concurrency = Concurrency(max_running=4, max_prealloc=0, tracking=tracking)

    def is_scarce(memory: int) -> bool:
        try:
            plan = plan_capacity(manifest, memory, concurrency, cell.chunk_tokens, 12)
        except ConfigError:
            return True
        return Kind.FULL in plan.slots and plan.slots[Kind.FULL] <= SCARCE_PAGES

    kind = next(kind for kind in Kind if kind in manifest.kinds)
    roomy, step = 64 << 20, manifest.layout(kind).slot_bytes
    scarce = bisect_left(range(roomy // step), True, key=lambda n: is_scarce(roomy - step * n))
    return roomy - step * (scarce if kind is Kind.FULL else scarce - 1)

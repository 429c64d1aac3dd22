"""Windows in the whole engine: junctions, hits at every position, and pools with nothing to spare.

Families with windows arrive in all ways in `test_ways_to_arrive`, `test_equivalence_of_families`.
Here pages behind the window are given away as fast as they can be, to others that write at once.
FERRYMAN_WINDOW_ROUNDS raises the number of rounds on tiny pools.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, HostFed, assert_same, engine
from tests.variants import save_variant

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.manifest import state_manifest
from ferryman.schedule.request import SamplingParams

ROUNDS = int(os.environ.get("FERRYMAN_WINDOW_ROUNDS", "1"))
VARIANTS = ["gpt_oss", "gemma3", "native"]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    """A tiny model with windows."""

    folder: Path
    manifest: StateManifest


@pytest.fixture(scope="module", params=VARIANTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = save_variant(tmp_path_factory.mktemp(request.param), request.param)
    return Served(folder, state_manifest(load_config(folder), "float64", PAGE_SIZE, ""))


def tokens(stem: int, length: int) -> list[int]:
    return [(5 * i * i + 11 * i + 17 * stem) % 120 + 3 for i in range(length)]


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
def test_a_junction_keeps_its_window_for_those_who_come_by_later(
    served: Served, overlap: bool
) -> None:
    """At page 2 the first request gave its window back: all pages are there, and no point."""
    stem, last = tokens(1, 40), [*tokens(1, 33), 6, 6]
    with engine(served.folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([last], ONE_TOKEN)[0]
    with engine(served.folder, Cell(32, overlap)) as llm:
        llm.generate([[*stem, *[4] * 60]], ONE_TOKEN)
        second = llm.generate([[*stem, *[9] * 30]], ONE_TOKEN)[0]
        has_snapshots = Kind.RECURRENT in served.manifest.kinds
        reason = "no_snapshot" if has_snapshots else "window_evicted"
        assert second.cached_tokens["device"] == 0
        assert second.uncached_reasons[reason] == 2
        found = llm.generate([last], ONE_TOKEN)[0]
        assert found.cached_tokens["device"] == 32, "the junction left a point"
        assert_same(found, cold)


def test_at_every_prefix_length_a_hit_equals_what_is_recomputed(served: Served) -> None:
    """From the device, from the host, and the window alone from the host."""
    prefixes = [tokens(2, n) for n in range(1, 3 * (served.manifest.window_len + PAGE_SIZE))]
    with engine(served.folder, Cell(1024, overlap=True, prefix_cache=False)) as llm:
        expected = llm.generate(prefixes, ONE_TOKEN)
    cell = Cell(1024, overlap=True, recurrent_slots=60, snapshot_grid=PAGE_SIZE)
    with engine(served.folder, cell) as llm:
        llm.generate(prefixes[-1:], ONE_TOKEN)
        llm.write_through(prefixes[-1])
        for found, right in zip(llm.generate(prefixes, ONE_TOKEN), expected, strict=True):
            assert found.cached_tokens["device"] == (len(found.prompt_token_ids) - 1) // 16 * 16
            assert_same(found, right)
        for prefix, right in zip(prefixes, expected, strict=True):
            position = (len(prefix) - 1) // PAGE_SIZE * PAGE_SIZE
            llm.forget(Kind.WINDOW)
            ((found, plan),) = llm.arrive([prefix], ONE_TOKEN)
            window = resume_set(served.manifest, position).window
            assert {unit.kind for unit in plan.loads} <= {Kind.WINDOW}
            assert [unit.page_index for unit in plan.loads] == list(range(*window))
            assert_same(found, right)
        for prefix, right in list(zip(prefixes, expected, strict=True))[::3]:
            llm.forget()
            found = llm.generate([prefix], ONE_TOKEN)[0]
            position = (len(prefix) - 1) // PAGE_SIZE * PAGE_SIZE
            assert found.cached_tokens == {"device": 0, "host": position, "storage": 0}
            assert_same(found, right)
        llm.check_integrity()


def least_cell(served: Served, chunk_tokens: int, overlap: bool, *, prefix_cache: bool) -> Cell:
    """The least memory with which four requests can run, and pages for what they need at most."""
    tracking = tracking_slots(prefix_cache=prefix_cache, overlap=overlap)
    concurrency = Concurrency(max_running=4, max_prealloc=0, tracking=tracking)
    memory = next(
        memory
        for memory in _rising(served.manifest)
        if _full_pages(served.manifest, memory, concurrency, chunk_tokens) >= 16
    )
    return Cell(chunk_tokens, overlap, prefix_cache, memory, 4, concurrency.recurrent_slots)


def _rising(manifest: StateManifest) -> Iterator[int]:
    return count(0, manifest.layout(Kind.FULL).slot_bytes)


def _full_pages(
    manifest: StateManifest, memory: int, concurrency: Concurrency, chunk_tokens: int
) -> int:
    slots = concurrency.recurrent_slots
    try:
        return plan_capacity(manifest, memory, concurrency, chunk_tokens, slots).slots[Kind.FULL]
    except ConfigError:
        return 0


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize(
    ("chunk_tokens", "overlap", "prefix_cache"),
    [(16, True, True), (48, False, True), (64, True, False)],
    ids=["short chunks, overlap", "one at a time", "overlap, no cache"],
)
def test_pools_with_nothing_to_spare_answer_as_roomy_ones(
    served: Served, chunk_tokens: int, overlap: bool, prefix_cache: bool, seed: int
) -> None:
    rng = random.Random(f"{seed} {chunk_tokens}")
    prompts = [_prompt(rng) for _ in range(12)]
    sampling = [_sampling(rng) for _ in prompts]
    with engine(served.folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        expected = llm.generate(prompts, sampling)
    cell = least_cell(served, chunk_tokens, overlap, prefix_cache=prefix_cache)
    with engine(served.folder, cell) as llm:
        for _ in range(2):  # the second time some of it is known
            for found, right in zip(llm.generate(prompts, sampling), expected, strict=True):
                assert_same(found, right)
            llm.check_integrity()
        assert_tight(llm, served)


def assert_tight(llm: HostFed, served: Served) -> None:
    """Longer sequences passed through the window pool than it has slots for."""
    ledger = llm.ledgers()["window"]
    pages = sum(len(range(0, 120, PAGE_SIZE)) for _ in range(4))
    assert ledger.total < pages, "four whole sequences would fit: nothing was at stake"


def _prompt(rng: random.Random) -> list[int]:
    """Some begin alike."""
    stem = tokens(rng.choice([3, 4]), rng.choice([0, 20, 50, 90]))
    return [*stem, *(rng.randrange(3, 120) for _ in range(rng.randint(1, 60)))]


def _sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 8, 40]), temperature=0.0, logprobs=5, ignore_eos=True
    )

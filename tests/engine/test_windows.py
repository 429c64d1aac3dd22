"""Windows in the whole engine: junctions, hits at every position, and pools with nothing to spare.

Families with windows arrive in all ways in `test_ways_to_arrive`, `test_equivalence_of_families`.
Here pages behind the window are given away as fast as they can be, to others that write at once.
FERRYMAN_TEST_WINDOW_ROUNDS raises the number of rounds on tiny pools, and of random models on them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, HostFed, assert_same, engine, engine_of
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.tiny_models import save_random
from tests.variants import save_variant

from ferryman.cache.capacity import Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import Ledger
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.schedule.request import SamplingParams

ROUNDS = int(os.environ.get("FERRYMAN_TEST_WINDOW_ROUNDS", "1"))
VARIANTS = os.environ.get("FERRYMAN_TEST_WINDOW_VARIANTS", "gpt_oss native").split()
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)


@dataclass(frozen=True)
class ServedByWindows:
    """A tiny model with windows."""

    folder: Path
    manifest: StateManifest


@pytest.fixture(scope="module", params=VARIANTS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ServedByWindows:
    folder = save_variant(tmp_path_factory.mktemp(request.param), request.param)
    return ServedByWindows(folder, state_manifest(load_config(folder), "float64", PAGE_SIZE, ""))


def tokens(stem: int, length: int) -> list[int]:
    return [(5 * i * i + 11 * i + 17 * stem) % 120 + 3 for i in range(length)]


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
def test_a_junction_keeps_its_window_for_those_who_come_by_later(
    served: ServedByWindows, overlap: bool
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


def test_at_every_prefix_length_a_hit_equals_what_is_recomputed(served: ServedByWindows) -> None:
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


def least_cell(manifest: StateManifest, cell: Cell, max_len: int) -> Cell:
    """The cell with the least memory for its requests, one of which can reach `max_len`."""
    tracking = tracking_slots(prefix_cache=cell.prefix_cache, overlap=cell.overlap)
    concurrency = Concurrency(cell.max_running, 0, tracking)
    memory = next(
        memory
        for memory in count(0, manifest.layouts[0].slot_bytes)
        if _longest(manifest, memory, concurrency, cell.chunk_tokens) >= max_len
    )
    return replace(cell, memory_bytes=memory, recurrent_slots=concurrency.recurrent_slots)


def _longest(
    manifest: StateManifest, memory: int, concurrency: Concurrency, chunk_tokens: int
) -> int:
    slots = concurrency.recurrent_slots
    try:
        return plan_capacity(manifest, memory, concurrency, chunk_tokens, slots).max_tokens(
            manifest
        )
    except ConfigError:
        return 0


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(16, True, max_running=4), id="short chunks, overlap"),
        pytest.param(Cell(48, False, False, max_running=4), id="one at a time, no cache"),
    ],
)
def test_pools_with_nothing_to_spare_answer_as_roomy_ones(
    served: ServedByWindows, cell: Cell, seed: int
) -> None:
    cell = least_cell(served.manifest, cell, 256)
    rng = random.Random(f"{seed} {cell.chunk_tokens}")
    ledger = assert_exact(served.folder, cell, PAGE_SIZE, rng)
    pages = cell.max_running * len(range(0, 120, PAGE_SIZE))
    assert ledger.total < pages, "four whole sequences would fit: nothing was at stake"


@pytest.mark.parametrize("seed", range(3 * ROUNDS))
def test_any_window_in_any_page_is_enough_for_itself(seed: int, tmp_path: Path) -> None:
    """Windows of 1 to 70 in pages of 4 to 64, chunks of 1 to 5 steps of the grid, random models."""
    rng = random.Random(f"any window {seed}")
    page_size = rng.choice([4, 8, 16, 32, 64])
    folder = random_model(rng, tmp_path)
    manifest = state_manifest(load_config(folder), "float64", page_size, "")
    chunk_tokens = rng.choice([1, 2, 3, 5]) * manifest.scan_chunk
    grid = rng.choice([0, 1, 3]) * page_size
    running = rng.choice([1, 2, 4])
    cell = Cell(chunk_tokens, seed % 2 == 0, max_running=running, snapshot_grid=grid)
    assert_exact(folder, least_cell(manifest, cell, 192), page_size, rng)


def test_a_window_of_one_position_lives_in_a_pool_of_one_slot(tmp_path: Path) -> None:
    """Pages as long as a chunk, one request at a time, no full layer: less cannot be."""
    config = random_config("gpt_oss", 0)
    config.update({"layer_types": ["sliding_attention"] * config.num_hidden_layers})
    config.update({"sliding_window": 1})
    save_random(tmp_path, config, 0)
    manifest = state_manifest(load_config(tmp_path), "float64", PAGE_SIZE, "")
    cell = least_cell(manifest, Cell(PAGE_SIZE, overlap=True, max_running=1), 192)
    assert assert_exact(tmp_path, cell, PAGE_SIZE, random.Random(1)).total == 1


def random_model(rng: random.Random, folder: Path) -> Path:
    """A tiny model of a published family that has windows."""
    while True:
        config = random_config(rng.choice(["gpt_oss", "gemma3", "qwen3"]), rng.randrange(10**6))
        save_random(folder, config, 0)
        if any(shape.kind is Kind.WINDOW for (shape,) in load_config(folder).states):
            return folder


def assert_exact(folder: Path, cell: Cell, page_size: int, rng: random.Random) -> Ledger:
    """Prompts at once, and again when some of it is known; the ledger of the window pool."""
    prompts = [_prompt(rng) for _ in range(12)]
    sampling = [_sampling(rng) for _ in prompts]
    cold = Cell(1024, overlap=False, prefix_cache=False, memory_bytes=256 << 20)
    with engine_of(HostFed, folder, cold, page_size) as llm:
        expected = llm.generate(prompts, sampling)
    with engine_of(HostFed, folder, cell, page_size) as llm:
        for _ in range(2):
            for found, right in zip(llm.generate(prompts, sampling), expected, strict=True):
                assert_same(found, right)
            llm.check_integrity()
        return llm.ledgers()["window"]


def _prompt(rng: random.Random) -> list[int]:
    """Some begin alike."""
    stem = [token % VOCAB_SIZE for token in tokens(rng.choice([3, 4]), rng.choice([0, 20, 50, 90]))]
    return [*stem, *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60)))]


def _sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 8, 40]), temperature=0.0, logprobs=5, ignore_eos=True
    )

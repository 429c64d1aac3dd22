"""The storage tier over a real folder: what was stored is read back byte for byte, or is a miss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.hostcache.stored import opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.units import Tier
from ferryman.tiers.storage_values import NOTHING_STORED
from ferryman.tiers.values import UnitForgotten, UnitStored
from ferryman_hostcache.storage.reading import RUN_BYTES

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
SHAPES = [
    pytest.param(HYBRID, id="hybrid"),
    pytest.param(manifest_of(Kind.FULL), id="full only"),
    pytest.param(manifest_of(Kind.RECURRENT), id="recurrent only"),
]
PROMPT = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[1, 3])


def large(slot_bytes: int) -> StateManifest:
    """Pages of a size that disks like."""
    spec = SectionSpec("key", 0, (slot_bytes // 8,), "float64", 0)
    return StateManifest("large", 4, 4, 0, (lay_out(Kind.FULL, [spec]),))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.extent"))


@pytest.mark.parametrize("manifest", SHAPES)
async def test_what_is_stored_is_read_back_in_this_life_and_the_next(
    manifest: StateManifest, tmp_path: Path
) -> None:
    prompt = prompt_with(manifest, chain(1, 2, 3, 4), snapshots=[1, 3])
    async with opened(tmp_path) as storage:
        storage.attach(manifest)
        stored = await storage.store(prompt.keys, prompt.offers())
        assert (stored.num_stored, stored.is_truncated) == (len(prompt.units), False)
        assert storage.lookup(prompt.keys).usable_pages == 4
        assert await read_all(storage, prompt) == prompt.units
        assert await storage.store(prompt.keys, prompt.offers()) == NOTHING_STORED
    async with opened(tmp_path) as storage:
        assert storage.lookup(prompt.keys).usable_pages == 0, "nobody has attached"
        storage.attach(manifest)
        found = {e for e in storage.drain_effects() if isinstance(e, UnitStored)}
        assert {(e.kind, prompt.keys.index(e.key)) for e in found} == set(prompt.units)
        assert {e.tier for e in found} == {Tier.STORAGE}
        assert found == set(storage.holdings())
        assert await read_all(storage, prompt) == prompt.units


async def test_a_longer_prompt_stores_only_what_is_new(tmp_path: Path) -> None:
    longer = prompt_with(HYBRID, chain(1, 2, 3, 4, 5, 6), snapshots=[1, 3, 5])
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        stored = await storage.store(longer.keys, longer.offers())
        assert stored.num_asked == stored.num_stored == len(longer.units) - len(PROMPT.units)
        assert len(list_of(tmp_path)) == 2
        assert await read_all(storage, longer) == longer.units


def list_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.extent"))


async def test_a_file_goes_with_its_last_unit(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        assert storage.drop(Kind.RECURRENT, PROMPT.keys[3]) == 1
        left = await read_all(storage, PROMPT)
        assert left == {n: d for n, d in PROMPT.units.items() if n != (Kind.RECURRENT, 3)}
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == left, "what was dropped came back"
        storage.drain_effects()
        assert storage.drop(Kind.FULL, PROMPT.keys[0]) == len(left)
        effects = storage.drain_effects()
        assert len([e for e in effects if isinstance(e, UnitForgotten)]) == len(left)
        assert all(isinstance(e, UnitForgotten) and e.tier is Tier.STORAGE for e in effects)
    assert list_of(tmp_path) == []


async def test_row_36_all_files_together_stay_within_the_capacity(tmp_path: Path) -> None:
    capacity = 1 << 20
    async with opened(tmp_path, capacity_bytes=capacity) as storage:
        storage.attach(HYBRID)
        for first in range(40):
            prompt = prompt_with(HYBRID, chain(first, 2, 3, 4, 5), snapshots=[1, 2, 3, 4])
            stored = await storage.store(prompt.keys, prompt.offers())
            assert not stored.is_truncated
            assert await read_all(storage, prompt) == prompt.units
            assert storage.statistics().used_bytes <= capacity
        counts = storage.statistics()
        assert sum(each.num_evicted for each in counts.kinds.values()) > 0
    assert counts.used_bytes == bytes_on_disk(tmp_path) <= capacity


async def test_a_group_that_does_not_fit_is_stored_up_to_a_resume_point(tmp_path: Path) -> None:
    prompt = prompt_with(HYBRID, chain(*range(300)), snapshots=[19, 99, 299])
    async with opened(tmp_path, capacity_bytes=1 << 20) as storage:
        storage.attach(HYBRID)
        stored = await storage.store(prompt.keys, prompt.offers())
        assert stored.is_truncated
        assert storage.lookup(prompt.keys).usable_pages == 100
        assert storage.statistics().num_truncated == 1


async def test_what_other_models_left_goes_when_room_is_needed(tmp_path: Path) -> None:
    other = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, fingerprint="other")
    async with opened(tmp_path, capacity_bytes=1 << 20) as storage:
        storage.attach(other)
        await storage.store(PROMPT.keys, PROMPT.offers())
    async with opened(tmp_path, capacity_bytes=1 << 20) as storage:
        storage.attach(HYBRID)
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.statistics().foreign_bytes == bytes_on_disk(tmp_path)
        (left,) = list_of(tmp_path)
        big = prompt_with(HYBRID, chain(*range(120)), snapshots=[119])
        assert not (await storage.store(big.keys, big.offers())).is_truncated
        assert storage.statistics().foreign_bytes == 0
    assert left not in list_of(tmp_path)


async def test_files_that_there_is_no_time_for_are_left_out_and_go_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    ticks = iter(range(0, 10**6, 60))
    async with opened(tmp_path, clock=lambda: float(next(ticks)), scan_seconds=50) as storage:
        storage.attach(HYBRID)
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.statistics().foreign_bytes == bytes_on_disk(tmp_path)
        assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored == len(PROMPT.units)


async def test_what_is_not_whole_is_removed_at_start_and_counted(tmp_path: Path) -> None:
    (tmp_path / "0000000000000007.writing").write_bytes(b"half of it")
    (tmp_path / "0000000000000008.extent").write_bytes(b"something else")
    (tmp_path / "zz.extent").write_bytes(b"")
    (tmp_path / "ffffffffffffffff.extent").write_bytes(b"")
    (tmp_path / "a note of the operator's").write_text("keep")
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        assert storage.statistics().num_removed_at_start == 4
    assert sorted(os.listdir(tmp_path)) == [
        "a note of the operator's",
        "manifest.json",
        "owner.lock",
    ]


async def test_row_16_large_units_come_back_in_runs_that_are_counted(
    tmp_path: Path,
) -> None:
    manifest = large(3 << 20)
    prompt = prompt_with(manifest, chain(1, 2, 3, 4, 5))
    async with opened(tmp_path, max_reads=2) as storage:
        storage.attach(manifest)
        await storage.store(prompt.keys, prompt.offers())
        assert 5 * (3 << 20) > RUN_BYTES
        assert await read_all(storage, prompt) == prompt.units
        counts = storage.statistics()
        assert (counts.read_bytes, counts.num_in_flight) == (5 * (3 << 20), 0)
        assert counts.read_seconds > 0 < counts.written_seconds


async def test_hits_and_misses_are_counted_by_kind(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        asked = [(Kind.FULL, 0), (Kind.FULL, 3), (Kind.RECURRENT, 0), (Kind.FULL, 9)]
        assert len(storage.lease("reader", PROMPT.keys, asked)) == 2
        assert storage.statistics().num_leases == 1
        kinds = storage.statistics().kinds
        assert (kinds[Kind.FULL].num_hits, kinds[Kind.FULL].num_misses) == (2, 1)
        assert (kinds[Kind.RECURRENT].num_hits, kinds[Kind.RECURRENT].num_misses) == (0, 1)
        storage.release("reader")
        assert storage.statistics().num_leases == 0


async def test_without_a_folder_nothing_is_ever_here(tmp_path: Path) -> None:
    async with opened(Path("")) as storage:
        storage.attach(HYBRID)
        assert await storage.store(PROMPT.keys, PROMPT.offers()) == NOTHING_STORED
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert await read_all(storage, PROMPT) == {}
        assert storage.renew(["a lease"]) == ("a lease",)
        assert (storage.drain_effects(), list(storage.holdings())) == ((), [])


@pytest.mark.parametrize("left", ["", "{", "[]", '{"fingerprint": 1}', "\udcff"])
async def test_a_spoilt_memory_of_the_model_is_no_memory(left: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    (tmp_path / "manifest.json").write_bytes(left.encode(errors="surrogateescape"))
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == PROMPT.units
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == PROMPT.units

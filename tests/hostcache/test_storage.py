"""The storage tier, in a real folder and in memory: what was stored is read back byte for byte, or
it is a miss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cluster_keys import STRANGERS_STORED
from tests.hostcache.stored import (
    Place,
    bytes_at,
    extents_at,
    opened,
    prompt_with,
    read_all,
)
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError
from ferryman.tiers.storage_values import NOTHING_STORED, UnitCorrupt
from ferryman.tiers.values import UnitForgotten, UnitStored
from ferryman_hostcache.storage.extent_reader import RUN_BYTES
from ferryman_hostcache.storage.file_blob_store import FileBlobStore

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


@pytest.mark.parametrize("manifest", SHAPES)
async def test_what_is_stored_is_read_back_in_this_life_and_the_next(
    manifest: StateManifest, place: Place
) -> None:
    prompt = prompt_with(manifest, chain(1, 2, 3, 4), snapshots=[1, 3])
    async with opened(place) as storage:
        storage.attach(manifest)
        stored = await storage.store(prompt.keys, prompt.offers())
        assert (stored.num_stored, stored.is_truncated) == (len(prompt.units), False)
        assert storage.lookup(prompt.keys).usable_pages == 4
        assert await read_all(storage, prompt) == prompt.units
        assert await storage.store(prompt.keys, prompt.offers()) == NOTHING_STORED
    async with opened(place) as storage:
        assert storage.lookup(prompt.keys).usable_pages == 0, "nobody has attached"
        storage.attach(manifest)
        found = {e for e in storage.drain_effects() if isinstance(e, UnitStored)}
        assert {(e.kind, prompt.keys.index(e.key)) for e in found} == set(prompt.units)
        assert {e.tier for e in found} == {Tier.STORAGE}
        assert found == set(storage.holdings())
        assert await read_all(storage, prompt) == prompt.units


async def test_a_longer_prompt_stores_only_what_is_new(place: Place) -> None:
    longer = prompt_with(HYBRID, chain(1, 2, 3, 4, 5, 6), snapshots=[1, 3, 5])
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        stored = await storage.store(longer.keys, longer.offers())
        assert stored.num_asked == stored.num_stored == len(longer.units) - len(PROMPT.units)
        assert len(extents_at(place)) == 2
        assert await read_all(storage, longer) == longer.units


async def test_a_file_goes_with_its_last_unit(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        assert storage.drop(Kind.RECURRENT, PROMPT.keys[3]) == 1
        left = await read_all(storage, PROMPT)
        assert left == {n: d for n, d in PROMPT.units.items() if n != (Kind.RECURRENT, 3)}
    async with opened(place) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == left, "what was dropped came back"
        effects = storage.drain_effects()
        assert not [e for e in effects if isinstance(e, UnitCorrupt)], "it came back as zeros"
        assert storage.drop(Kind.FULL, PROMPT.keys[0]) == len(left)
        effects = storage.drain_effects()
        assert len([e for e in effects if isinstance(e, UnitForgotten)]) == len(left)
        assert all(isinstance(e, UnitForgotten) and e.tier is Tier.STORAGE for e in effects)
    assert extents_at(place) == []


async def test_row_36_all_files_together_stay_within_the_capacity(place: Place) -> None:
    capacity = 1 << 20
    async with opened(place, capacity_bytes=capacity) as storage:
        storage.attach(HYBRID)
        for first in range(40):
            prompt = prompt_with(HYBRID, chain(first, 2, 3, 4, 5), snapshots=[1, 2, 3, 4])
            stored = await storage.store(prompt.keys, prompt.offers())
            assert not stored.is_truncated
            assert await read_all(storage, prompt) == prompt.units
            assert storage.statistics().used_bytes <= capacity
        counts = storage.statistics()
        assert sum(each.num_evicted for each in counts.kinds.values()) > 0
    assert counts.used_bytes <= capacity
    assert counts.used_bytes == bytes_at(place)


async def test_a_group_that_does_not_fit_is_stored_up_to_a_resume_point(place: Place) -> None:
    prompt = prompt_with(HYBRID, chain(*range(300)), snapshots=[19, 99, 299])
    async with opened(place, capacity_bytes=1 << 20) as storage:
        storage.attach(HYBRID)
        stored = await storage.store(prompt.keys, prompt.offers())
        assert stored.is_truncated
        assert storage.lookup(prompt.keys).usable_pages == 100
        assert storage.statistics().num_truncated == 1


async def test_what_other_models_left_goes_when_room_is_needed(place: Place) -> None:
    other = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, fingerprint="other")
    async with opened(place, capacity_bytes=1 << 20) as storage:
        storage.attach(other)
        await storage.store(PROMPT.keys, PROMPT.offers())
    async with opened(place, capacity_bytes=1 << 20) as storage:
        storage.attach(HYBRID)
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.statistics().foreign_bytes == bytes_at(place)
        (left,) = extents_at(place)
        big = prompt_with(HYBRID, chain(*range(120)), snapshots=[119])
        assert not (await storage.store(big.keys, big.offers())).is_truncated
        assert storage.statistics().foreign_bytes == 0
    assert left not in extents_at(place)


async def test_what_another_cluster_left_is_a_miss_and_goes_when_room_is_needed(
    place: Place,
) -> None:
    async with opened(place, key=STRANGERS_STORED) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    async with opened(place, capacity_bytes=1 << 20) as storage:
        storage.attach(HYBRID)
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.drain_effects() == (), "a miss is no error"
        assert storage.statistics().foreign_bytes == bytes_at(place) > 0
        assert storage.statistics().num_removed_at_start == 0
        assert await read_all(storage, PROMPT) == {}
        big = prompt_with(HYBRID, chain(*range(120)), snapshots=[119])
        assert not (await storage.store(big.keys, big.offers())).is_truncated
        assert storage.statistics().foreign_bytes == 0


async def test_a_cluster_finds_its_own_again_after_another_had_the_folder(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    async with opened(place, key=STRANGERS_STORED) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == {}
        await storage.store(PROMPT.keys, PROMPT.offers())
    async with opened(place) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == PROMPT.units


def modes_in(folder: Path) -> dict[str, int]:
    return {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775])
async def test_a_folder_is_its_owner_s_alone(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)  # noqa: ASYNC240
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    assert tmp_path.stat().st_mode & 0o777 == 0o700  # noqa: ASYNC240
    assert modes_in(tmp_path) == dict.fromkeys((".extent", ".json", ".lock"), 0o600)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    FileBlobStore(tmp_path / "new").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """The folder may be /tmp, or a mistake: it is refused, and its mode stays unchanged."""
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="others may write to it"):
        FileBlobStore(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


async def test_files_that_there_is_no_time_for_are_left_out_and_go_first(place: Place) -> None:
    async with opened(place) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
    ticks = iter(range(0, 10**6, 60))
    async with opened(place, clock=lambda: float(next(ticks)), scan_seconds=50) as storage:
        storage.attach(HYBRID)
        assert storage.lookup(PROMPT.keys).usable_pages == 0
        assert storage.statistics().foreign_bytes == bytes_at(place)
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
    place: Place,
) -> None:
    manifest = large(3 << 20)
    prompt = prompt_with(manifest, chain(1, 2, 3, 4, 5))
    async with opened(place, max_reads=2) as storage:
        storage.attach(manifest)
        await storage.store(prompt.keys, prompt.offers())
        assert 5 * (3 << 20) > RUN_BYTES
        assert await read_all(storage, prompt) == prompt.units
        counts = storage.statistics()
        assert (counts.read_bytes, counts.num_in_flight) == (5 * (3 << 20), 0)
        assert counts.read_seconds > 0 < counts.written_seconds


async def test_hits_and_misses_are_counted_by_kind(place: Place) -> None:
    async with opened(place) as storage:
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

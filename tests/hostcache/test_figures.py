"""Bytes and seconds of the lower tiers, by a clock that the test moves: exact figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.doubles.memory_blob_store import BlobMedium
from tests.hostcache.stored import opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.prefetch import PrefetchSource
from ferryman.tiers.prefetch_values import OWN_STORAGE, Traffic
from ferryman.tiers.values import ReservedUnit
from ferryman.wire.grpc.rpc import CallTags
from ferryman_hostcache.prefetch_io import PrefetchIO
from ferryman_hostcache.prefetch_stats import KEPT, PrefetchStats
from ferryman_hostcache.storage.threads import ReaderThreads

MANIFEST = manifest_of(Kind.FULL)
FULL_BYTES = MANIFEST.layout(Kind.FULL).slot_bytes
PROMPT = prompt_with(MANIFEST, chain(1, 2, 3))
DIGEST = bytes(16)
BLOCK_BYTES = 4096


class QuarterSeconds:
    """A clock that is 0.25 s further at each look."""

    def __init__(self) -> None:
        self._num_looks = 0

    def __call__(self) -> float:
        self._num_looks += 1
        return self._num_looks / 4


async def test_storage_counts_the_bytes_and_seconds_of_its_reads_and_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units begin at multiples of a block, and a run is read from its first to its last byte."""
    readers = list[ReaderThreads]()
    begin = ReaderThreads.__init__

    def remembered(threads: ReaderThreads, num_threads: int, clock: Any) -> None:
        begin(threads, num_threads, QuarterSeconds())
        readers.append(threads)

    monkeypatch.setattr(ReaderThreads, "__init__", remembered)
    medium = BlobMedium()
    async with opened(medium, clock=QuarterSeconds()) as storage:
        storage.attach(MANIFEST)
        stored = await storage.store(PROMPT.keys, PROMPT.offers())
        written = storage.statistics()
        assert await read_all(storage, PROMPT) == PROMPT.units
        read = storage.statistics()
    assert (written.read_bytes, written.read_seconds) == (0, 0.0)
    # One look before the write, one for the commit, one behind it.
    assert (written.written_bytes, written.written_seconds) == (stored.num_bytes, 0.5)
    assert written.written_bytes >= 3 * FULL_BYTES
    # Two looks for one read.
    assert (read.read_bytes, read.read_seconds) == (2 * BLOCK_BYTES + FULL_BYTES, 0.25)
    assert (read.written_bytes, read.written_seconds) == (stored.num_bytes, 0.5)


class StorageOfUnits:
    """Storage that brings the units of pages 0 and 1, and never more."""

    def lease(self, _lease: str, _keys: object, names: list[tuple[Kind, int]]) -> list[Any]:
        return [SimpleNamespace(kind=kind, page_index=page, digest=DIGEST) for kind, page in names]

    async def read(self, reads: list[Any]) -> list[Any]:
        return [read.unit for read in reads if read.unit.page_index < 2]

    def renew(self, _leases: object) -> None:
        """Nothing ends here."""

    def release(self, _lease: str) -> None:
        """Nothing ends here."""


class PeerOfUnits:
    """Another node that sends page 2."""

    async def fetch(self, _node: object, _order: object, to: PrefetchIO, *, tags: object) -> None:
        to.on_unit((Kind.FULL, 2), DIGEST)


class IndexOfNothing:
    async def digests(self, *_: object) -> dict[object, object]:
        return {}


async def test_a_prefetch_adds_up_units_bytes_and_seconds_by_the_tier_they_came_from() -> None:
    arena = bytearray(3 * FULL_BYTES)
    host = SimpleNamespace(
        arena=SimpleNamespace(view=lambda offset, size: memoryview(arena)[offset : offset + size]),
        store=SimpleNamespace(manifest=MANIFEST),
        flush_storage_effects=lambda _tags: None,
    )
    tiers = SimpleNamespace(
        storage=StorageOfUnits(), peers=PeerOfUnits(), index=IndexOfNothing(), folders=None
    )
    io = PrefetchIO(
        cast(Any, host), cast(Any, tiers), CallTags("r", 1), "lease", clock=QuarterSeconds()
    )
    io._nodes["peer"] = cast(Any, SimpleNamespace(node_id="peer"))
    room = [ReservedUnit(Kind.FULL, page, page * FULL_BYTES, FULL_BYTES) for page in range(3)]
    pages = {Kind.FULL: range(3)}
    sources = [PrefetchSource(Tier.STORAGE, "", pages), PrefetchSource(Tier.PEER, "peer", pages)]
    await io.fetch(PROMPT.keys, room, sources)
    assert io.traffic == {
        Tier.STORAGE: Traffic(2, 2 * FULL_BYTES, 0.25),
        Tier.PEER: Traffic(1, FULL_BYTES, 0.25),
    }
    assert io.num_failed == 1
    assert io.origins[Kind.FULL, 0] == OWN_STORAGE


def test_totals_of_prefetches_and_the_cost_of_a_byte_are_sums_of_their_traffic() -> None:
    stats = PrefetchStats()
    for moved in (Traffic(2, 200, 0.5), Traffic(1, 600, 1.5)):
        result = SimpleNamespace(before_pages=0, asked_pages=4, brought_pages=2, is_truncated=True)
        progress = SimpleNamespace(
            result=lambda result=result: result, grant=SimpleNamespace(lacking={Kind.FULL: 2})
        )
        io = SimpleNamespace(
            num_failed=1,
            num_corrupt=2,
            num_mismatched=3,
            num_forged=4,
            origins={(Kind.FULL, page): OWN_STORAGE for page in range(moved.num_units)},
            traffic={Tier.STORAGE: moved},
        )
        stats.add(cast(Any, progress), cast(Any, io))
    assert stats.traffic == {Tier.STORAGE: Traffic(3, 800, 2.0)}
    assert stats.brought_units == {(Tier.STORAGE, Kind.FULL): 3}
    assert stats.lacking_units == {Kind.FULL: 4}
    counts = stats.counts(num_running=5, bytes_under_way=6)
    assert (counts.num_running, counts.bytes_under_way, counts.num_truncated) == (5, 6, 2)
    assert (counts.num_failed_reads, counts.num_corrupt) == (2, 4)
    assert (counts.num_mismatched, counts.num_forged) == (6, 8)
    assert (counts.num_complete, counts.num_fruitless) == (0, 0)
    expected = (KEPT * 0.5 + 1.5) / (KEPT * 200 + 600)
    assert stats.seconds_per_byte(Tier.STORAGE) == pytest.approx(expected)
    assert stats.seconds_per_byte(Tier.PEER) == 0.0

"""Damaged blobs: a read gives the bytes that were stored, or it is a miss that is reported.

10,000 by hand: `python -m tests.hostcache.test_storage_corruption 10000` in the repository.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Container
from pathlib import Path

import pytest
from tests.hostcache.corruptions import CORRUPTIONS, Corruption, Scene
from tests.hostcache.stored import (
    Bucket,
    Place,
    StoredChain,
    content_at,
    opened,
    prompt_with,
    read_all,
)
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.tiers.storage_values import StorageFailed, UnitCorrupt
from ferryman.tiers.values import StoredUnit, UnitForgotten, UnitName
from ferryman_hostcache.storage.extent import extent_name
from ferryman_hostcache.storage.factory import StorageTier

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
SALTS = (b"", b"another tenant")


class Spoiler:
    """Three prompts in a tier; spoils one unit at a time, asks for it, and stores it again."""

    def __init__(self, place: Place, storage: StorageTier, rng: random.Random) -> None:
        self.place, self.storage, self.rng = place, storage, rng
        self.prompts = [
            prompt_with(HYBRID, chain(first, 2, 3, 4, salt=salt), snapshots=[1, 2, 3])
            for first, salt in ((1, SALTS[0]), (2, SALTS[0]), (1, SALTS[1]))
        ]

    async def try_once(self, corrupt: Corruption) -> None:
        prompt, stranger = self.rng.sample(self.prompts, 2)
        scene = await self.scene(prompt, stranger)
        before = scene.file(scene.unit)
        corrupt(scene)
        left = content_at(self.place, extent_name(scene.unit.generation))
        assert left != before, "nothing was spoilt"
        self.storage.drain_effects()
        found = await read_all(self.storage, prompt)
        self.check_missed(scene.unit, found)
        for name, data in found.items():
            assert data == prompt.units[name], "other bytes than were stored"

    async def scene(self, prompt: StoredChain, stranger: StoredChain) -> Scene:
        """The prompt is stored twice, so that its file has an older generation."""
        older = (await self.stored_anew(prompt))[0]
        kept = content_at(self.place, extent_name(older.generation))
        assert kept is not None
        units = await self.stored_anew(prompt)
        unit = self.rng.choice(units)
        others = await self.stored_anew(stranger)
        return Scene(
            rng=self.rng,
            manifest=HYBRID,
            place=self.place,
            unit=unit,
            neighbour=self.another(unit, units),
            stranger=self.another(unit, others),
            older=bytes(kept),
        )

    async def stored_anew(self, prompt: StoredChain) -> tuple[StoredUnit, ...]:
        """In an extent of its own."""
        self.storage.drop(Kind.FULL, prompt.keys[0])
        stored = await self.storage.store(prompt.keys, prompt.offers())
        assert stored.num_stored == len(prompt.units)
        units = self.storage.lease("look", prompt.keys, prompt.units)
        self.storage.release("look")
        return units

    def another(self, unit: StoredUnit, units: tuple[StoredUnit, ...]) -> StoredUnit:
        return self.rng.choice([u for u in units if u.kind is unit.kind and u.key != unit.key])

    def check_missed(self, unit: StoredUnit, found: Container[UnitName]) -> None:
        assert (unit.kind, unit.page_index) not in found, "a spoilt unit was brought"
        effects = self.storage.drain_effects()
        assert any(isinstance(effect, (UnitCorrupt, StorageFailed)) for effect in effects)
        gone = [(e.kind, e.key) for e in effects if isinstance(e, UnitForgotten)]
        assert (unit.kind, unit.key) in gone, "the index goes on naming it"


async def spoil(place: Place, names: list[str], seed: int) -> Counter[str]:
    done: Counter[str] = Counter()
    async with opened(place) as storage:
        storage.attach(HYBRID)
        spoiler = Spoiler(place, storage, random.Random(seed))
        for name in names:
            await spoiler.try_once(CORRUPTIONS[name])
            done[name] += 1
    return done


@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_a_spoilt_unit_is_a_miss(name: str, place: Place) -> None:
    times = 2 if isinstance(place, Bucket) else 10
    assert (await spoil(place, [name] * times, seed=3))[name] == times


@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_what_was_spoilt_between_two_lives_is_a_miss(name: str, place: Place) -> None:
    rng = random.Random(name)
    async with opened(place) as storage:
        storage.attach(HYBRID)
        spoiler = Spoiler(place, storage, rng)
        prompt, stranger = spoiler.prompts[:2]
        scene = await spoiler.scene(prompt, stranger)
    before = scene.file(scene.unit)
    CORRUPTIONS[name](scene)
    left = content_at(place, extent_name(scene.unit.generation))
    assert left != before, "nothing was spoilt"
    async with opened(place) as storage:
        storage.attach(HYBRID)
        found = await read_all(storage, prompt)
        assert (scene.unit.kind, scene.unit.page_index) not in found
        assert all(data == prompt.units[name] for name, data in found.items())


async def _by_hand(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = random.Random(times).choices(list(CORRUPTIONS), k=times)
        for name, count in sorted((await spoil(Path(folder), names, seed=times)).items()):
            print(f"{count:6d} {name}")  # noqa: T201
    print(f"{times:6d} all detected")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_by_hand(int(sys.argv[1])))

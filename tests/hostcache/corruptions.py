"""Ways in which a file of the storage tier may come to hold something else than was written."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from tests.hostcache.stored import bytes_of
from tests.tiers.state_shapes import manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.tiers.extents import ENTRY_BYTES, lay_out_extent
from ferryman.tiers.storage_values import ExtentPlan, StorageUnit
from ferryman_hostcache.storage.extent import entry_offset, header_from_bytes, header_to_bytes

SEALED_BYTES = 80


@dataclass(frozen=True)
class Scene:
    """The unit to be spoilt in its file, its neighbours, and some other unit of the same kind."""

    rng: random.Random
    manifest: StateManifest
    folder: Path
    unit: StorageUnit
    neighbour: StorageUnit
    stranger: StorageUnit
    older: bytes

    def path(self, unit: StorageUnit) -> Path:
        return self.folder / f"{unit.generation:016x}.extent"

    def file(self, unit: StorageUnit) -> bytearray:
        return bytearray(self.path(unit).read_bytes())

    def save(self, data: bytes | bytearray) -> None:
        self.path(self.unit).write_bytes(data)


def payload(unit: StorageUnit) -> slice:
    return slice(unit.offset, unit.offset + unit.num_bytes)


def entry(unit: StorageUnit) -> slice:
    return slice(entry_offset(unit.index), entry_offset(unit.index) + ENTRY_BYTES)


def flip_a_bit_of_the_bytes(scene: Scene) -> None:
    data = scene.file(scene.unit)
    where = scene.unit.offset + scene.rng.randrange(scene.unit.num_bytes)
    data[where] ^= 1 << scene.rng.randrange(8)
    scene.save(data)


def flip_a_bit_of_the_entry(scene: Scene) -> None:
    data = scene.file(scene.unit)
    where = entry_offset(scene.unit.index) + scene.rng.randrange(SEALED_BYTES)
    data[where] ^= 1 << scene.rng.randrange(8)
    scene.save(data)


def cut_the_file_short(scene: Scene) -> None:
    end = scene.unit.offset + scene.unit.num_bytes
    scene.save(scene.file(scene.unit)[: scene.rng.randrange(end)])


def lose_a_block(scene: Scene) -> None:
    """A torn write: a run of zeros where there were bytes."""
    data = scene.file(scene.unit)
    start = scene.unit.offset + scene.rng.randrange(scene.unit.num_bytes)
    end = min(scene.unit.offset + scene.unit.num_bytes, start + 512)
    data[start:end] = bytes(end - start)
    scene.save(data)


def swap_the_bytes_with_a_neighbour(scene: Scene) -> None:
    data = scene.file(scene.unit)
    mine, theirs = payload(scene.unit), payload(scene.neighbour)
    data[mine], data[theirs] = data[theirs], data[mine]
    scene.save(data)


def swap_the_entry_with_a_neighbour(scene: Scene) -> None:
    data = scene.file(scene.unit)
    mine, theirs = entry(scene.unit), entry(scene.neighbour)
    data[mine], data[theirs] = data[theirs], data[mine]
    scene.save(data)


def take_the_bytes_of_another_key(scene: Scene) -> None:
    data = scene.file(scene.unit)
    data[payload(scene.unit)] = scene.file(scene.stranger)[payload(scene.stranger)]
    scene.save(data)


def take_entry_and_bytes_of_another_key(scene: Scene) -> None:
    data, other = scene.file(scene.unit), scene.file(scene.stranger)
    data[payload(scene.unit)] = other[payload(scene.stranger)]
    data[entry(scene.unit)] = other[entry(scene.stranger)]
    scene.save(data)


def take_the_whole_file_of_another_key(scene: Scene) -> None:
    scene.save(scene.file(scene.stranger))


def put_an_older_generation_back(scene: Scene) -> None:
    scene.save(scene.older)


def become_another_models(scene: Scene) -> None:
    """The very same extent, stored by a model whose state has the same shape: only seals differ."""
    other = manifest_of(*scene.manifest.kinds, fingerprint="another model")
    data, generation = scene.file(scene.unit), scene.unit.generation
    found = header_from_bytes(bytes(data), generation=generation, file_bytes=len(data))
    plan = ExtentPlan(generation, found.keys, found.units, len(data), len(found.units))
    data[: found.header_bytes] = header_to_bytes(plan, other.digest)
    scene.save(data)


def become_another_tenants(scene: Scene) -> None:
    """The same tokens under another salt: only the key differs."""
    scene.save(forged(scene.unit, scene.rng.randbytes(16), scene.manifest))


def forged(unit: StorageUnit, key: PageKey, manifest: StateManifest) -> bytes:
    """A well-formed extent with another key where `unit` should be."""
    data = bytes_of(manifest, unit.kind, key)
    other = replace(unit, key=key, digest=xxhash.xxh3_128_digest(data))
    num_keys, num_units = unit.page_index + 1, unit.index + 1
    layout = lay_out_extent(num_keys, [unit.num_bytes] * num_units)
    units = tuple(replace(other, index=i, offset=layout.offsets[i]) for i in range(num_units))
    plan = ExtentPlan(unit.generation, (key,) * num_keys, units, layout.file_bytes, num_units)
    file = bytearray(header_to_bytes(plan, manifest.digest).ljust(plan.file_bytes, b"\x00"))
    for each in units:
        file[payload(each)] = data
    return bytes(file)


def be_marked_dead(scene: Scene) -> None:
    data = scene.file(scene.unit)
    data[entry_offset(scene.unit.index) + SEALED_BYTES] = scene.rng.randrange(256) & 0xFE
    scene.save(data)


def vanish(scene: Scene) -> None:
    scene.path(scene.unit).unlink()


Corruption = Callable[[Scene], None]

CORRUPTIONS: Mapping[str, Corruption] = {
    each.__name__: each
    for each in (
        flip_a_bit_of_the_bytes,
        flip_a_bit_of_the_entry,
        cut_the_file_short,
        lose_a_block,
        swap_the_bytes_with_a_neighbour,
        swap_the_entry_with_a_neighbour,
        take_the_bytes_of_another_key,
        take_entry_and_bytes_of_another_key,
        take_the_whole_file_of_another_key,
        put_an_older_generation_back,
        become_another_models,
        become_another_tenants,
        be_marked_dead,
        vanish,
    )
}

"""Ways in which a blob of the storage tier may come to hold something else than was written."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import xxhash
from tests.cluster_keys import STORED, STRANGERS_STORED
from tests.hostcache.stored import Place, bytes_of, content_at, remove_at, spoil_at
from tests.tiers.state_shapes import manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.security.cluster_key import MacKey
from ferryman.tiers.extents import ENTRY_BYTES, lay_out_extent
from ferryman.tiers.storage_values import ExtentPlan
from ferryman.tiers.values import StoredUnit
from ferryman_hostcache.storage.extent import (
    ExtentSeals,
    entry_offset,
    extent_name,
    header_from_bytes,
    header_to_bytes,
    key_id_of,
)

SEALED_BYTES = 80


@dataclass(frozen=True)
class Scene:
    """The unit to be spoilt in its file, its neighbours, and some other unit of the same kind."""

    rng: random.Random
    manifest: StateManifest
    place: Place
    unit: StoredUnit
    neighbour: StoredUnit
    stranger: StoredUnit
    older: bytes

    def file(self, unit: StoredUnit) -> bytearray:
        content = content_at(self.place, extent_name(unit.generation))
        assert content is not None
        return content

    def save(self, data: bytes | bytearray) -> None:
        spoil_at(self.place, extent_name(self.unit.generation), data)


def payload(unit: StoredUnit) -> slice:
    return slice(unit.offset, unit.offset + unit.num_bytes)


def entry(unit: StoredUnit) -> slice:
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
    _seal_anew(scene, ExtentSeals(STORED, other.digest))


def become_another_clusters(scene: Scene) -> None:
    """The very same extent, as a cluster with another key has stored it."""
    _seal_anew(scene, ExtentSeals(STRANGERS_STORED, scene.manifest.digest))


def be_forged_by_a_stranger(scene: Scene) -> None:
    """The right chain over a stranger's own bytes, with digests and seals that fit each other: all
    that can be made of what is published, the name of our key included."""
    stranger = _Impostor(MacKey(bytes.fromhex(scene.manifest.digest)), scene.manifest.digest)
    _seal_anew(scene, stranger, scene.rng.randbytes)


class _Impostor(ExtentSeals):
    """Seals with a key of its own under the name of ours."""

    @property
    def key_id(self) -> bytes:
        return key_id_of(STORED)


def _seal_anew(
    scene: Scene, seals: ExtentSeals, rewrite: Callable[[int], bytes] | None = None
) -> None:
    """The whole extent under other seals; over other bytes, where `rewrite` makes them."""
    data, generation = scene.file(scene.unit), scene.unit.generation
    found = header_from_bytes(bytes(data), STORED, generation=generation, file_bytes=len(data))
    units = []
    for unit in found.units:
        if rewrite:
            data[payload(unit)] = rewrite(unit.num_bytes)
        units.append(replace(unit, digest=xxhash.xxh3_128_digest(data[payload(unit)])))
    plan = ExtentPlan(generation, found.keys, tuple(units), len(data), len(units))
    data[: found.header_bytes] = header_to_bytes(plan, seals)
    scene.save(data)


def become_another_tenants(scene: Scene) -> None:
    """The same tokens under another salt: only the key differs."""
    scene.save(forged(scene.unit, scene.rng.randbytes(16), scene.manifest))


def forged(unit: StoredUnit, key: PageKey, manifest: StateManifest) -> bytes:
    """A well-formed extent with another key where `unit` should be."""
    data = bytes_of(manifest, unit.kind, key)
    other = replace(unit, key=key, digest=xxhash.xxh3_128_digest(data))
    num_keys, num_units = unit.page_index + 1, unit.index + 1
    layout = lay_out_extent(num_keys, [unit.num_bytes] * num_units)
    units = tuple(replace(other, index=i, offset=layout.offsets[i]) for i in range(num_units))
    plan = ExtentPlan(unit.generation, (key,) * num_keys, units, layout.file_bytes, num_units)
    file = bytearray(
        header_to_bytes(plan, ExtentSeals(STORED, manifest.digest)).ljust(plan.file_bytes, b"\x00")
    )
    for each in units:
        file[payload(each)] = data
    return bytes(file)


def be_marked_dead(scene: Scene) -> None:
    data = scene.file(scene.unit)
    data[entry_offset(scene.unit.index) + SEALED_BYTES] = scene.rng.randrange(256) & 0xFE
    scene.save(data)


def vanish(scene: Scene) -> None:
    remove_at(scene.place, extent_name(scene.unit.generation))


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
        become_another_clusters,
        be_forged_by_a_stranger,
        be_marked_dead,
        vanish,
    )
}

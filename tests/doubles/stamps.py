"""Stamps: the content of slots without a model, which makes a wrong state visible at once.

    prefix hash   h(0) = 0, h(p + 1) = mix(h(p), token p)            64 bits
    page slot     [page_size] of u64: offset p mod P holds h(p + 1), for the token at position p
    recurrent     [2] of u64: h(p) and p                             all zero: a cleared slot, p = 0

Slots are real bytes, poisoned when fresh and stale when reused, as device memory is. Hand-offs and
copies through the host carry the stamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.keys import TokenIds
from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.engine.memory.slabs import ShardedSlab, SlabAddress

Hashes = NDArray[np.uint64]

POISON = 0xFF
_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15


def fake_manifest(
    page_size: int = 16,
    *,
    kinds: Iterable[Kind] = (Kind.FULL, Kind.RECURRENT),
    window_len: int = 0,
    fingerprint: str = "fake",
) -> StateManifest:
    """A manifest with slots of exactly the size of their stamps."""
    shapes = {kind: (2,) if kind is Kind.RECURRENT else (page_size,) for kind in kinds}
    layouts = tuple(
        lay_out(kind, [SectionSpec("stamps", 0, shape, "float64", shard_axis=0)])
        for kind, shape in shapes.items()
    )
    return StateManifest(fingerprint, page_size, page_size, window_len, layouts)


def mix(prefix: int, token_id: int) -> int:
    """The hash of a prefix with one more token. Never 0, which is the empty prefix."""
    mixed = ((prefix ^ (token_id + 1)) * _ODD) & _MASK
    mixed ^= mixed >> 32
    return (mixed * _ODD) & _MASK or 1


def extended(prefix: int, token_ids: TokenIds | Sequence[int]) -> list[int]:
    """The hashes after each of `token_ids`, which follow a prefix with the hash `prefix`."""
    hashes = []
    for token_id in np.asarray(token_ids).tolist():
        prefix = mix(prefix, token_id)
        hashes.append(prefix)
    return hashes


def next_token(prefix: int, vocab_size: int) -> int:
    """The token that the fake model generates after a prefix."""
    return (prefix >> 16) % vocab_size


def fake_tokens(token_ids: TokenIds | Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that a fake engine generates after `token_ids`, for tests to compare."""
    prefix = extended(0, token_ids)[-1]
    generated: list[int] = []
    for _ in range(count):
        generated.append(next_token(prefix, vocab_size))
        prefix = mix(prefix, generated[-1])
    return generated


class StampSlabs:
    """Slots of every kind of a manifest in host memory, and their stamps as numbers."""

    def __init__(self, manifest: StateManifest, num_slots: Mapping[Kind, int]) -> None:
        self._bytes = {}
        self._stamps: dict[Kind, Hashes] = {}
        for kind in manifest.kinds:
            shape = (num_slots[kind], manifest.layout(kind).slot_bytes)
            self._bytes[kind] = np.full(shape, POISON, np.uint8)
            self._stamps[kind] = self._bytes[kind].view("<u8")

    def bytes_of(self, kind: Kind, slot: int) -> memoryview:
        slab = self._bytes[kind]
        if not 0 <= slot < len(slab):
            raise IndexError(f"the {kind} slab has no slot {slot} of {len(slab)}")
        content: memoryview = slab[slot].data
        return content

    @property
    def places(self) -> Mapping[Kind, ShardedSlab]:
        return {
            kind: ShardedSlab((SlabAddress(int(slab.ctypes.data), slab.nbytes, slab.shape[1]),))
            for kind, slab in self._bytes.items()
        }

    def stamps(self, kind: Kind) -> Hashes:
        """[num_slots, stamps], in place."""
        return self._stamps[kind]

    def copy(self, kind: Kind, src: int, dst: int) -> None:
        self.bytes_of(kind, dst)[:] = self.bytes_of(kind, src)

    def clear(self, kind: Kind, slot: int) -> None:
        self._bytes[kind][slot] = 0

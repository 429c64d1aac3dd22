"""The engine's part of an audit: the comparison of two resume sets, bit by bit.

Two slots of one kind are compared byte by byte. A page counts as far as its positions are computed,
and no byte between sections counts. A row that stands for several positions counts in the page of
the last of them, once all are computed: nobody writes it before. A recurrent slot counts as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ferryman.cache.manifest import DTYPE_BYTES, Kind, KindLayout, Section, StateManifest
from ferryman.engine.memory.transfer import Transfer
from ferryman.schedule.events import AuditPair, HeldUnit

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class UnitDifference:
    """The first unit that differs, and the first of its sections that does. The digests are of all
    bytes that count: as they were served, and as they were computed again. `num_units` differ."""

    unit: HeldUnit
    section: Section
    served: bytes
    cold: bytes
    num_units: int = 1


def first_difference(
    manifest: StateManifest, transfer: Transfer, pairs: Iterable[AuditPair]
) -> UnitDifference | None:
    """The first unit whose bytes are not those computed again; None if all are equal."""
    differences = [
        difference for pair in pairs if (difference := _difference(manifest, transfer, pair))
    ]
    return replace(differences[0], num_units=len(differences)) if differences else None


def _difference(
    manifest: StateManifest, transfer: Transfer, pair: AuditPair
) -> UnitDifference | None:
    unit, layout = pair.unit, manifest.layout(pair.unit.kind)
    served = np.frombuffer(transfer.read(unit.kind, unit.handle.slot), np.uint8)
    cold = np.frombuffer(transfer.read(unit.kind, pair.cold.slot), np.uint8)
    if np.array_equal(served, cold):
        return None
    computed = _computed(unit, manifest.page_size)
    for section in layout.sections:
        counted = _counted(section, served, computed)
        if not np.array_equal(counted, _counted(section, cold, computed)):
            digests = [_digest(layout, content, computed) for content in (served, cold)]
            return UnitDifference(unit, section, digests[0], digests[1])
    return None


def _computed(unit: HeldUnit, page_size: int) -> range | None:
    """The computed positions of a page; None for a recurrent state."""
    if unit.kind is Kind.RECURRENT:
        return None
    first = unit.index * page_size
    return range(first, first + unit.num_tokens)


def _counted(section: Section, content: Bytes, computed: range | None) -> Bytes:
    """The bytes of a section that count: of a page whose positions `computed` are, all without."""
    part = content[section.offset : section.offset + section.num_bytes]
    if computed is None:
        return part
    rows = section.rows_within(computed)
    shaped = part.reshape(*section.shape, DTYPE_BYTES[section.dtype])
    # Where ranks share the heads, those come before the positions.
    is_by_head = section.shard_axis == 0 and len(section.shape) > 1
    return shaped[:, :rows] if is_by_head else shaped[:rows]


def _digest(layout: KindLayout, content: Bytes, computed: range | None) -> bytes:
    digest = xxhash.xxh3_128()
    for section in layout.sections:
        digest.update(np.ascontiguousarray(_counted(section, content, computed)).data)
    return digest.digest()

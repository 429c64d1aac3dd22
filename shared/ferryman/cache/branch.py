"""What goes into a prefix tree, and what the tree answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle


@dataclass(frozen=True, slots=True)
class Branch:
    """What a request offers to the tree.

    `keys` name all pages from the root on. `units[kind]` maps the index of a page to the slot that
    holds it; a recurrent slot stands at the page that ends at its position. Full units run without
    a hole from the first page that is not the tree's own to the last.
    """

    keys: Sequence[PageKey]
    units: Mapping[Kind, Mapping[int, SlotHandle]]


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of a branch: slots the tree keeps, and (page, own, canonical) for duplicates.

    `dropped` are snapshots that the tree no longer holds, because their path has too many.
    """

    adopted: tuple[SlotHandle, ...]
    duplicates: tuple[tuple[int, SlotHandle, SlotHandle], ...]
    dropped: tuple[SlotHandle, ...] = ()


class CacheChange(NamedTuple):
    """Units of one kind that came into the tree together, or left it."""

    kind: Kind
    keys: tuple[PageKey, ...]
    is_stored: bool

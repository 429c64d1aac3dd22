"""Units: one slot's bytes outside the device, named by (page key, kind)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind


class Tier(StrEnum):
    """The place where a unit was kept: in a node's memory, on its disk, or at another node."""

    HOST = "host"
    STORAGE = "storage"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class HostUnit:
    """One slot's bytes in the host arena, leased by the reader until the step has run.

    `page_index` is absolute; a recurrent unit has the index of the page that ends at its position.
    `offset` and `num_bytes` locate it in the arena; `digest` is the xxh3-128 of its bytes. `origin`
    is the tier from which it was brought for this reader; usage reports it.
    """

    kind: Kind
    page_index: int
    key: PageKey
    offset: int
    num_bytes: int
    digest: bytes
    origin: Tier = Tier.HOST

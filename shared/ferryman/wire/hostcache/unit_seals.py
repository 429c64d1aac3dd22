"""The tags of units that a host-cache sends, under the cluster's key: a reader knows by them that
the bytes are those of this model, kind and page, as a process of its cluster keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import Unavailable
from ferryman.security.cluster_key import ClusterKey, Purpose


class NotOfThisCluster(Unavailable):
    """The answering process does not have the cluster's key."""


@dataclass(frozen=True, slots=True)
class NamedUnit:
    """A unit to send: its model, its place in a chain, and its digest."""

    manifest_digest: str
    kind: Kind
    key: PageKey
    num_bytes: int
    digest: bytes


class UnitSeals:
    """Makes tags for other processes, and checks theirs."""

    def __init__(self, key: ClusterKey) -> None:
        self._units = key.subkey(Purpose.PEER_UNIT)

    def seal_of(self, unit: NamedUnit) -> bytes:
        return self._units.tag(*_identity(unit))

    def check_unit(self, unit: NamedUnit, seal: bytes) -> None:
        """Raises NotOfThisCluster unless a process of this cluster sealed the unit."""
        if not self._units.verifies(seal, *_identity(unit)):
            raise NotOfThisCluster(f"a {unit.kind} unit that nobody of this cluster has sealed")


def _identity(unit: NamedUnit) -> tuple[bytes, ...]:
    words = f"{unit.manifest_digest} {unit.kind.value} {unit.num_bytes}"
    return words.encode(), unit.key, unit.digest

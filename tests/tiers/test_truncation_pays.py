"""Host memory for 40 % of the working set: truncated prefetches against all or nothing.

Conversations that share nothing come back in turns, and some of them at once. Both policies see
the same requests in the same order, over the same storage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.tiers.all_or_nothing import AllOrNothing
from tests.tiers.state_shapes import chain
from tests.tiers.test_store import store_with

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.tiers.extents import ExtentTable
from ferryman.tiers.prefetch import (
    PrefetchPlanner,
    PrefetchSource,
    RoomPolicyOf,
    Truncate,
)
from ferryman.tiers.prefetch_values import PrefetchRequest
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import StorageLimits
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import AcquireRequest, UnitName, WorkerLife

HOST = WorkerLife("node-0", 1)
READER = WorkerLife("prefill-a", 1)
LENGTHS = [12 + 4 * (5 * i % 7) for i in range(20)]  # pages of each conversation: 12 to 36
SNAPSHOT_EVERY = 4
SHARE_OF_HOST = 0.4
AT_ONCE = 12
DIGEST = b"d" * 16


@dataclass
class Score:
    num_wanted: int = 0
    num_hit: int = 0
    num_truncated: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit / self.num_wanted


def names_of(keys: tuple[PageKey, ...]) -> list[UnitName]:
    snapshots = range(SNAPSHOT_EVERY - 1, len(keys), SNAPSHOT_EVERY)
    full = [(Kind.FULL, page) for page in range(len(keys))]
    return [*full, *((Kind.RECURRENT, page) for page in snapshots)]


def filled_storage(host: HostStore, chains: list[tuple[PageKey, ...]]) -> StorageStore:
    storage = StorageStore(host.manifest, StorageLimits(1 << 30), ExtentTable())
    for keys in chains:
        plan = storage.plan(keys, dict.fromkeys(names_of(keys), DIGEST), 0.0)
        assert plan is not None
        assert storage.commit(plan.generation, 0.0) == len(names_of(keys))
    return storage


def run(policy: RoomPolicyOf, seed: int) -> Score:
    """Requests in waves: those of a wave hold what they were leased until the wave is over."""
    rng, score = random.Random(seed), Score()
    chains = [chain(*[100 * i + page for page in range(n)]) for i, n in enumerate(LENGTHS, 1)]
    full = int(SHARE_OF_HOST * sum(LENGTHS))
    host = store_with(full=full, recurrent=full // SNAPSHOT_EVERY)
    storage = filled_storage(host, chains)
    prefetcher = PrefetchPlanner(HOST, policy, 1.0)
    for wave in range(15):
        held = []
        for i, keys in enumerate(rng.sample(chains, AT_ONCE)):
            name, now = f"{wave}-{i}", float(wave)
            prefetch(host, storage, prefetcher, keys, name, score)
            grant = host.acquire(AcquireRequest(name, READER, keys, 0, 0, len(keys)), now)
            score.num_wanted += len(keys)
            score.num_hit += grant.usable_pages
            held += [name] if grant.units else []
        for name in held:
            host.release(name)
        host.check_integrity()
    return score


def prefetch(
    host: HostStore,
    storage: StorageStore,
    prefetcher: PrefetchPlanner,
    keys: tuple[PageKey, ...],
    name: str,
    score: Score,
) -> None:
    source = PrefetchSource(Tier.STORAGE, "", storage.lookup(keys).pages)
    ask = PrefetchRequest(keys, 0, len(keys), 1)
    lease = f"p{name}"
    now = float(name.split("-")[0])
    grant = prefetcher.reserve(host, ask, [source], lease_id=lease, bytes_under_way=0, now=now)
    score.num_truncated += grant.before < grant.granted < grant.asked
    if grant.room:
        host.commit_arrived(lease, dict.fromkeys(grant.names, DIGEST), now)
        host.release(lease)


def test_truncated_prefetches_raise_the_hit_rate_over_all_or_nothing() -> None:
    for seed in range(3):
        truncating, all_or_nothing = run(Truncate, seed), run(AllOrNothing, seed)
        assert truncating.num_truncated > 0
        assert all_or_nothing.num_truncated == 0
        assert truncating.hit_rate > all_or_nothing.hit_rate

"""Random schedules over scarce pools: partly host-only prefixes, tombstones, retractions."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.defects.hosts import STEMS, host_of
from tests.defects.watch import MANIFESTS, PAGE, WatchedWorker, is_all_cached
from tests.schedule.cluster import request

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView
from ferryman.cache.slots import TREE
from ferryman.cache.window_budget import most_window_pages
from ferryman.schedule.events import Retracted, SequenceAdmitted

CHUNK = 8
WITH_WINDOWS = ("all kinds", "attention")


def some_of(view: HostView, rng: Random) -> HostView:
    """Whole kinds, and single units of the others, are not on the host."""
    keep = {kind: rng.choice([0.0, 0.6, 1.0, 1.0]) for kind in Kind}
    return HostView({name: u for name, u in view.units.items() if rng.random() < keep[name[0]]})


def bury(worker: WatchedWorker, rng: Random) -> None:
    """Evicts unused units of one kind from the device; their tree nodes stay."""
    kind = rng.choice(worker.manifest.kinds)
    allocator = worker.scheduler.allocator
    dropped = allocator.tree.evict(kind, rng.randint(1, 6), allocator._is_only_tree)
    allocator.pools.release(dropped, TREE)


class DefectSchedule:
    """One random schedule. `counts` says what happened on the way, so that a test can insist."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        name = self.rng.choice(WITH_WINDOWS)
        manifest, self.host = MANIFESTS[name], host_of(name)
        windows = most_window_pages(manifest, PAGE).most + self.rng.randint(0, 4)
        sizes = {Kind.FULL: self.rng.randint(12, 24), Kind.WINDOW: windows, Kind.RECURRENT: 12}
        self.worker = WatchedWorker(
            manifest,
            {kind: sizes[kind] for kind in manifest.kinds},
            overlap=self.rng.random() < 0.5,
            chunk_tokens=CHUNK,
            snapshot_grid=self.rng.choice([0, 4, 8]),
        )
        self.worker.engine.host_tier.attach(memoryview(bytes(self.host.arena)))
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Fails at the first step at which something is not as it must be."""
        for _ in range(self.rng.randint(4, 25)):
            self.rng.choice([self._arrive, self._advance, self._advance, self._bury])()
            self._offer_host_to_the_retracted()
        self.worker.drain()
        for request_id in self.worker.requests:
            assert self.worker.tokens[request_id] == self.worker.expected(request_id)
        assert is_all_cached(self.worker)
        self._count()
        return self.counts

    def _view(self, keys: tuple[PageKey, ...]) -> HostView:
        return some_of(self.host.view(keys, self.rng.choice(["no", "host", "host"])), self.rng)

    def _arrive(self) -> None:
        tail = [self.rng.randint(0, 2) for _ in range(self.rng.randint(0, 9))]
        prompt = [*self.rng.choice(STEMS), *tail]
        name = f"r{len(self.worker.requests)}"
        asked = request(self.worker.manifest, name, prompt, self.rng.randint(1, 9))
        self.worker.submit(asked, host=self._view(asked.keys))

    def _advance(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            for _ in range(self.rng.randint(1, 2)):
                self.worker.plan()
            self.worker.run_oldest()

    def _bury(self) -> None:
        bury(self.worker, self.rng)

    def _offer_host_to_the_retracted(self) -> None:
        for event in self.worker.seen(Retracted):
            keys = self.worker.requests[event.request_id].keys
            offered = self.worker.scheduler.offer_host(event.request_id, self._view(keys))
            self.counts["offered"] += offered

    def _count(self) -> None:
        for event in self.worker.seen(SequenceAdmitted):
            kinds = {unit.kind for unit in event.plan.loads}
            self.counts["admitted"] += 1
            self.counts["resumed"] += event.is_resumed
            self.counts["loaded windows"] += Kind.WINDOW in kinds
            self.counts["loaded one kind"] += len(kinds) == 1
            self.counts["reused and loaded"] += bool(kinds) and event.plan.anchor_pages > 0
            self.counts["declined"] += any(s.reason == "no_room" for s in event.plan.uncached)
        self.counts["retracted"] += len(self.worker.seen(Retracted))


def play_many(first: int, count: int) -> Counter[str]:
    """Schedules `first`.. of `count`, and all that happened in them."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        total += DefectSchedule(seed).run()
    return total

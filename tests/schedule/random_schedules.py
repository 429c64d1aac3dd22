"""Random schedules over tiny pools: a prefill and a decode worker, checked after every step.

Prompts arrive for both, are chunked, loaded, handed over, retracted, cancelled and aborted in any
order, while pools have a few slots. A new kind of event is a method of `RandomSchedule` and its
name in `EVENTS`; `Makeup` has the random options of a worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from tests.defects.hosts import STEMS, host_for
from tests.defects.watch import PAGE, WatchedWorker, books, is_all_cached
from tests.doubles.stamps import fake_manifest
from tests.schedule.cluster import request
from tests.schedule.random_drafts import RandomDrafts

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import ClearState, HostView, Reason, ResumeCosts, resume_set
from ferryman.cache.slots import TREE
from ferryman.cache.window_budget import most_window_pages
from ferryman.engine.memory.loads import LoadedUnits
from ferryman.errors import InvalidRequest, OutOfSlots
from ferryman.schedule.drafting import NO_DRAFTS, Drafting
from ferryman.schedule.events import (
    Finished,
    LoadCorrupt,
    Retracted,
    SequenceAdmitted,
    SequenceHeld,
)
from ferryman.schedule.limits import IN_TURNS, PREFILL_FIRST, StepOrder
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.sequence import Goal

FULL, WINDOW, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT
MODELS = {
    "full": (FULL,),
    "recurrent": (RECURRENT,),
    "window": (WINDOW,),
    "full and recurrent": (FULL, RECURRENT),
    "full and window": (FULL, WINDOW),
    "window and recurrent": (WINDOW, RECURRENT),
    "all kinds": (FULL, WINDOW, RECURRENT),
}
WINDOW_LENS = (1, 2, 4, 5, 6, 9, 12)
EVENTS = {
    "arrive": 5,
    "reserve": 4,
    "advance": 12,
    "hand_over": 4,
    "give_up": 1,
    "cancel": 1,
    "bury": 2,
    "offer_host": 2,
    "let_go": 2,
    "flush": 0.3,
    "measure": 0.5,
}


@lru_cache
def model(name: str, window_len: int) -> StateManifest:
    kinds = MODELS[name]
    return fake_manifest(PAGE, kinds=kinds, window_len=window_len if WINDOW in kinds else 0)


def _least_windows(manifest: StateManifest, num_drafts: int) -> int:
    """With fewer the longest prompts cannot run, and with these nothing is kept of them."""
    if not manifest.window_len:
        return 0
    return most_window_pages(manifest, manifest.scan_chunk, num_drafts=num_drafts).most


@dataclass(frozen=True)
class Makeup:
    """The random options of a worker."""

    sizes: dict[Kind, int]
    overlap: bool
    prefix_cache: bool
    max_running: int
    chunk_tokens: int
    snapshot_grid: int
    drafting: Drafting
    order: StepOrder

    @classmethod
    def drawn(cls, rng: Random, manifest: StateManifest) -> Makeup:
        sizes = {FULL: rng.randint(5, 16), RECURRENT: rng.randint(2, 6)}
        drafts = rng.choice([0, 0, 0, rng.randint(1, min(5, sizes[RECURRENT] - 1))])
        spare = rng.choice([-1, 0, 0, 0, 1, 2, 3, 6])
        sizes[WINDOW] = max(1, _least_windows(manifest, drafts) + spare)
        return cls(
            {kind: sizes[kind] for kind in manifest.kinds},
            overlap=rng.random() < 0.6,
            prefix_cache=rng.random() < 0.8,
            max_running=rng.randint(1, 4),
            chunk_tokens=rng.choice([4, 6, 8, 8, 13, 64]),
            snapshot_grid=rng.choice([0, 0, 4, 8]),
            drafting=RandomDrafts(drafts, seed=rng.randrange(99)) if drafts else NO_DRAFTS,
            order=rng.choice([PREFILL_FIRST, IN_TURNS]),
        )

    def worker(self, manifest: StateManifest) -> WatchedWorker:
        return WatchedWorker(
            manifest,
            self.sizes,
            overlap=self.overlap,
            prefix_cache=self.prefix_cache,
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            snapshot_grid=self.snapshot_grid,
            drafting=self.drafting,
            order=self.order,
        )


class RandomSchedule:
    """One random schedule. `counts` says what happened on the way, so that a test can insist."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.manifest = model(rng.choice(sorted(MODELS)), rng.choice(WINDOW_LENS))
        self.host = host_for(self.manifest)
        self.prefill = Makeup.drawn(rng, self.manifest).worker(self.manifest)
        self.decode = Makeup.drawn(rng, self.manifest).worker(self.manifest)
        self.workers = (self.prefill, self.decode)
        for worker in self.workers:
            worker.engine.host_tier.attach(memoryview(bytes(self.host.arena)))
        if rng.random() < 0.4:
            self.decode.scheduler.retraction.pin_retracted()
        self.counts: Counter[str] = Counter()
        self.unanswered: set[tuple[WatchedWorker, str]] = set()
        self._under_way: list[str] = []
        self._loaded: dict[str, LoadedUnits] = {}

    def run(self) -> Counter[str]:
        """Fails at the first step at which something is not as it must be."""
        names, weights = list(EVENTS), list(EVENTS.values())
        for _ in range(self.rng.randint(10, 60)):
            getattr(self, self.rng.choices(names, weights)[0])()
        self.finish()
        self._count()
        return self.counts

    def finish(self) -> None:
        """Runs until both workers are idle; checks that all slots come back, each freed once."""
        is_idle = False
        for _ in range(3000):
            self.let_go()  # a step that was not planned may have retracted a request
            self.hand_over()
            was_idle, is_idle = (
                is_idle,
                not any([self.step(worker, 2) for worker in self.workers] + [self._under_way]),
            )
            if was_idle and is_idle:
                break
        for worker in self.workers:
            assert not worker.scheduler.has_work, "a worker stands still"
            for name in worker.requests:
                if (worker, name) not in self.unanswered:
                    assert worker.tokens[name] == worker.expected(name), name
            assert is_all_cached(worker)
            worker.scheduler.flush()
            assert books(worker) == {}
            for pool in worker.pools.values():
                assert pool.num_free == pool.num_slots
                assert set(pool.freed.values()) <= {0, 1}
                assert sum(pool.freed.values()) == sum(pool._generations)

    # Events.

    def arrive(self) -> None:
        """A prompt that is decoded where it is computed."""
        worker = self.rng.choice(self.workers)
        asked = self._asked()
        try:
            worker.submit(asked, host=self._view(asked.keys))
        except InvalidRequest:
            self.counts["refused at the door"] += 1
        worker.collect()

    def reserve(self) -> None:
        """A prompt that is handed over: decode promises slots, then prefill queues it."""
        asked = self._asked()
        try:
            self.decode.scheduler.check(asked)
            reservations = self.decode.scheduler.reservations
            view = self._view(asked.keys)
            if self.rng.random() < 0.5:
                view = self.host.view(asked.keys, self.rng.choice(("host", "corrupt")))
            reservations.reserve(asked.request_id, asked, self.decode.now, view)
        except InvalidRequest:
            self.counts["refused at the door"] += 1
            return
        except OutOfSlots:
            waits = bool(self.decode.scheduler.sequences.waiting)
            assert waits or not self._is_idle(self.decode), "an idle worker always has room"
            self.counts["no room to reserve"] += 1
            return
        self.decode.collect()
        try:
            self.prefill.submit(asked, Goal.HAND_OFF, self._view(asked.keys))
        except InvalidRequest:
            self.decode.scheduler.reservations.free(asked.request_id)
            self.counts["refused at the door"] += 1
            return
        self._under_way.append(asked.request_id)
        self.unanswered.add((self.prefill, asked.request_id))
        if self.rng.random() < 0.5:  # as early as may be; else just before it is handed over
            self._load(asked.request_id)

    def advance(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.step(self.rng.choice(self.workers), self.rng.randint(0, 2))

    def step(self, worker: WatchedWorker, num_plans: int) -> bool:
        """Whether anything happened: what can be planned is planned, the oldest step runs."""
        planned = [worker.plan() for _ in range(num_plans)]
        if num_plans and not any(planned):
            assert not (self._is_idle(worker) and worker.scheduler.sequences.waiting), "deadlock"
        return worker.run_oldest() or any(planned)

    def hand_over(self) -> None:
        """Hands held sequences over to decode, or ends them at the last moment."""
        for event in self.prefill.seen(SequenceHeld):
            if event.request_id in self._under_way:
                self._under_way.remove(event.request_id)
                self._move(event)
                self.prefill.scheduler.release_held(event.request_id, self.prefill.now)
        self.prefill.collect()

    def give_up(self) -> None:
        """An attempt ends on both sides, however far it came."""
        if self._under_way:
            request_id = self._under_way.pop(self.rng.randrange(len(self._under_way)))
            self.prefill.scheduler.cancel(request_id, self.prefill.now)
            self.prefill.collect()
            assert self.decode.scheduler.reservations.free(request_id)
            self.counts["given up"] += 1

    def cancel(self) -> None:
        worker = self.rng.choice(self.workers)
        known = [name for name in worker.requests if name not in self._under_way]
        if known and worker.scheduler.cancel(request_id := self.rng.choice(known), worker.now):
            self.unanswered.add((worker, request_id))
            self.counts["cancelled"] += 1
        worker.collect()

    def bury(self) -> None:
        """Evicts unused units of one kind from the device; their tree nodes stay."""
        allocator = self.rng.choice(self.workers).scheduler.allocator
        kind = self.rng.choice(self.manifest.kinds)
        dropped = allocator.tree.evict(kind, self.rng.randint(1, 4), allocator._is_only_tree)
        allocator.pools.release(dropped, TREE)
        self.counts["buried"] += len(dropped)

    def offer_host(self) -> None:
        for worker in self.workers:
            for event in worker.seen(Retracted):
                view = self._view(event.request.keys)
                self.counts["offered"] += worker.scheduler.offer_host(event.request_id, view)

    def let_go(self) -> None:
        """Copies of what retracted requests left have ended."""
        for event in self.decode.seen(Retracted):
            self.decode.scheduler.retraction.release_retracted(event.request_id)

    def flush(self) -> None:
        self.rng.choice(self.workers).scheduler.flush()

    def measure(self) -> None:
        costs = ResumeCosts(1.0, self.rng.choice([0.0, 0.05, 1.0]))
        self.rng.choice(self.workers).scheduler.set_costs(costs)

    # Parts of events.

    def _asked(self) -> Request:
        """A new prompt on one of a few stems, or the next turn of what was answered."""
        turns = [
            [*asked.token_ids.tolist(), *worker.tokens[name]]
            for worker in self.workers
            for name, asked in worker.requests.items()
        ]
        stems = turns if turns and self.rng.random() < 0.4 else [*STEMS, [3]]
        tail = [self.rng.randint(0, 2) for _ in range(self.rng.choice([0, 1, 3, 5, 9]))]
        prompt = [*self.rng.choice(stems), *tail][:48]
        self.counts["asked"] += 1
        name = f"r{self.counts['asked']}"
        return request(self.manifest, name, prompt, self.rng.randint(1, 12))

    def _view(self, keys: tuple[PageKey, ...]) -> HostView:
        """The host's units: whole kinds may be missing, and single units of the others."""
        how = self.rng.choice(["no", "no", "host", "host", "host", "corrupt"])
        keep = {kind: self.rng.choice([0.0, 0.6, 1.0, 1.0]) for kind in Kind}
        units = self.host.view(keys, how).units
        return HostView({n: u for n, u in units.items() if self.rng.random() < keep[n[0]]})

    def _is_idle(self, worker: WatchedWorker) -> bool:
        """Whether no request of the worker can make room by going on."""
        scheduler = worker.scheduler
        sequences = scheduler.sequences
        return not (
            sequences.by_id
            or sequences.reserved
            or scheduler.num_in_flight
            or scheduler.retraction.is_keeping
        )

    def _move(self, held: SequenceHeld) -> None:
        """Copies the units that decode reserved, by absolute index; or frees the reservation."""
        name, asked = held.request_id, self.prefill.requests[held.request_id]
        reservations = self.decode.scheduler.reservations
        loaded = self._loaded.pop(name, None) or self._load(name)
        if loaded.corrupt or self.rng.random() < 0.2:
            self.counts["corrupt at decode"] += bool(loaded.corrupt)
            reservations.free(name)
            self.counts["given up"] += 1
            return
        needs = resume_set(self.manifest, asked.prompt_len)
        spans = {FULL: needs.full, WINDOW: needs.window}
        spans[RECURRENT] = needs.full._replace(first=asked.prompt_len, end=asked.prompt_len + 1)
        for kind in self.manifest.kinds:
            theirs = dict(self.prefill.scheduler.units_at(name, kind, *spans[kind]))
            for index, handle in reservations.units_at(name, kind, *spans[kind]):
                source = self.prefill.engine.transfer.read(kind, theirs[index].slot)
                self.decode.engine.transfer.write(kind, handle.slot, 0, bytes(source))
                self.counts[f"moved {kind}"] += 1
        self.decode.requests[name] = asked
        self.decode.scheduler.adopt(name, held.first, self.decode.now)
        self.decode.collect()
        self.counts["handed over"] += 1

    def _load(self, name: str) -> LoadedUnits:
        """Runs the loads of a reservation."""
        loads = self.decode.scheduler.reservations.loads_of(name)
        for kind in {load.unit.kind for load in loads}:
            self.counts[f"loaded at decode {kind}"] += 1
        self._loaded[name] = self.decode.engine.host_tier.load(loads).result()
        return self._loaded[name]

    def _count(self) -> None:
        for worker in self.workers:
            for event in worker.seen(SequenceAdmitted):
                self._count_plan(worker, event)
            self.counts["retracted"] += len(worker.seen(Retracted))
            drafts = worker.scheduler.statistics().drafts
            self.counts["drafts accepted"] += drafts.accepted
            self.counts["drafts rejected"] += drafts.drafted - drafts.accepted
            self.counts["corrupt"] += len(worker.seen(LoadCorrupt))
            reasons = [event.reason for event in worker.seen(Finished)]
            self.counts["answered"] += sum(r is not FinishReason.CANCELLED for r in reasons)

    def _count_plan(self, worker: WatchedWorker, event: SequenceAdmitted) -> None:
        plan = event.plan
        self.counts["admitted"] += 1
        self.counts["resumed"] += event.is_resumed
        self.counts["hit"] += 0 < plan.position < plan.prompt_len
        self.counts["copied"] += not isinstance(plan.initialiser, ClearState) and not plan.loads
        self.counts["windows reused"] += bool(plan.window_pages)
        for kind in {unit.kind for unit in plan.loads}:
            self.counts[f"loaded {kind}"] += 1
        self.counts["shorter chunks"] += (
            plan.chunk_len < worker.scheduler.limits.chunk_tokens and plan.chunk_len > 0
        )
        reasons = {span.reason for span in plan.uncached}
        self.counts["declined"] += Reason.NO_ROOM in reasons
        self.counts["window lost"] += Reason.WINDOW_EVICTED in reasons


def play_many(first: int, count: int) -> Counter[str]:
    """Schedules `first`.. of `count`, and all that happened in them."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            total += RandomSchedule(seed).run()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    return total

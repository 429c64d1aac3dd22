"""Random schedules over tiny pools: a prefill and a decode worker, checked after every step.

Prompts arrive for both, are chunked, loaded, handed over, retracted, cancelled and aborted in any
order, while pools have a few slots. A new event is a method of `RandomSchedule` and its name in
`EVENTS`; a new option of workers is one more draw of `tiny_worker` (`schedule_kind.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from tests.harness.schedule.counts import counts_of
from tests.harness.schedule.hosts import STEMS, host_for
from tests.harness.schedule.schedule_kind import ScheduleKind
from tests.harness.schedule.watch import WatchedWorker, books, is_all_cached
from tests.harness.schedule.worker import request

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView, ResumeCosts, resume_set
from ferryman.cache.slots import TREE
from ferryman.engine.memory.loads import LoadedUnits
from ferryman.errors import InvalidRequest, OutOfSlots
from ferryman.schedule.events import (
    Retracted,
    SequenceHeld,
)
from ferryman.schedule.request import Pin, Request
from ferryman.schedule.sequence import Goal

FULL, WINDOW, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT


class RandomSchedule:
    """One random schedule. `counts` says what happened on the way, so that a test can insist."""

    def __init__(self, kind: ScheduleKind, seed: int) -> None:
        self.events, self.rng = kind.events, Random(seed)
        rng = self.rng
        self.manifest = kind.draw_model(rng)
        self.host = host_for(self.manifest)
        self.prefill = kind.draw_worker(rng, self.manifest)
        self.decode = kind.draw_worker(rng, self.manifest)
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
        names, weights = list(self.events), list(self.events.values())
        for _ in range(self.rng.randint(10, 60)):
            getattr(self, self.rng.choices(names, weights)[0])()
        self.finish()
        for worker in self.workers:
            self.counts += counts_of(worker)
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
        asked = request(self.manifest, name, prompt, self.rng.randint(1, 12))
        marks = sorted(self.rng.sample(range(len(prompt) + 2), self.rng.randint(0, 2)))
        pins = tuple(Pin(mark, self.rng.choice((1, 30, 3600))) for mark in marks[:1])
        return replace(asked, fork_points=tuple(marks), pins=pins)

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


def play_many(kind: ScheduleKind, first: int, count: int) -> Counter[str]:
    """Schedules `first`.. of `count`, and all that happened in them."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            total += RandomSchedule(kind, seed).run()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    return total

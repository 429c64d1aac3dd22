"""What the router believes of the workers: who is there, how loaded, holding which prefixes.

Pure. Beats and cache events come in as values, `now` as an argument; what should be done about
them goes out as effects. Beliefs are hints: a worker that is asked may still refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferryman.wire.beats import Beat, ServedState
from ferryman_router.holdings import CacheChange, Holdings, Snapshot

SERVING = ("prefill", "decode")
HOSTCACHE = "hostcache"


@dataclass(frozen=True, slots=True)
class WorkerName:
    """One life of one worker."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A life of a worker that was not known before."""

    beat: Beat


@dataclass(frozen=True, slots=True)
class Lost:
    """This life is over, or must be taken for over."""

    name: WorkerName
    role: str
    cause: str


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Cache events are missing: ask this worker for all it holds."""

    name: WorkerName


Effect = Joined | Lost | AskSnapshot


@dataclass(slots=True)
class Worker:
    """A worker as last heard of, and what its last beat cannot know: sent less settled since then.

    Below zero when more was settled than sent: the beat had counted it.
    """

    beat: Beat
    last_heard: float
    holdings: Holdings
    requests_since: int = 0
    tokens_since: int = 0
    is_suspect: bool = False
    avoid_until: float = 0.0

    @property
    def name(self) -> WorkerName:
        return WorkerName(self.beat.worker_id, self.beat.epoch)

    @property
    def num_requests(self) -> int:
        """Running, queued and on their way."""
        return max(0, self.beat.num_running + self.beat.num_queued + self.requests_since)

    @property
    def num_queued(self) -> int:
        """Queued and on their way."""
        return max(0, self.beat.num_queued + self.requests_since)

    @property
    def queue_tokens(self) -> int:
        """Prefill work that waits, runs or is on its way."""
        return max(0, self.beat.queue_tokens + self.tokens_since)


class Fleet:
    """All workers. `beat_timeout` is how long one may be silent."""

    def __init__(self, beat_timeout: float) -> None:
        self._beat_timeout = beat_timeout
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.beat.worker_id))

    def get(self, name: WorkerName) -> Worker | None:
        """The worker, while that very life of it is believed to go on."""
        worker = self._workers.get(name.worker_id)
        return worker if worker is not None and worker.name == name else None

    def usable(self, role: str, now: float) -> tuple[Worker, ...]:
        """Those a new request may be sent to, in a stable order."""
        return tuple(
            worker
            for worker in self
            if worker.beat.role == role
            and worker.beat.is_ready
            and not worker.is_suspect
            and worker.avoid_until <= now
        )

    def host_caches(self) -> dict[str, Beat]:
        """The last beat of each node's host-cache: of two lives, of the one heard of last."""
        caches = (worker for worker in self if worker.beat.role == HOSTCACHE and worker.beat.node)
        return {one.beat.node: one.beat for one in sorted(caches, key=lambda one: one.last_heard)}

    def state(self) -> ServedState | None:
        """The state that is served, by the first worker that keeps any."""
        return next((w.beat.state for w in self if w.beat.role in SERVING), None)

    def page_size(self) -> int:
        """Of the state that is served; 1 while nobody is known."""
        state = self.state()
        return state.page_size if state is not None else 1

    # What is heard.

    def hear_beat(self, beat: Beat, now: float) -> tuple[Effect, ...]:
        """A beat: an old acquaintance, a new one, or a new life behind a known name."""
        known = self._workers.get(beat.worker_id)
        if known is not None and known.beat.epoch == beat.epoch:
            known.beat, known.last_heard = beat, now
            known.requests_since = known.tokens_since = 0
            known.is_suspect = False
            return ()
        effects = self._lose(beat.worker_id, "restarted") if known is not None else ()
        holdings = Holdings(beat.state.kinds, beat.state.window_len, beat.state.page_size)
        self._workers[beat.worker_id] = Worker(beat, now, holdings)
        asks = (AskSnapshot(WorkerName(beat.worker_id, beat.epoch)),) * (beat.role in SERVING)
        return (*effects, *self._replaced_at(beat), Joined(beat), *asks)

    def hear_change(self, name: WorkerName, change: CacheChange) -> tuple[Effect, ...]:
        """A cache event; one of an unknown life waits for that life's first beat and snapshot."""
        worker = self.get(name)
        if worker is None or worker.holdings.apply(change):
            return ()
        return (AskSnapshot(name),)

    def hear_snapshot(self, name: WorkerName, snapshot: Snapshot) -> tuple[Effect, ...]:
        worker = self.get(name)
        if worker is None or worker.holdings.replace(snapshot):
            return ()
        return (AskSnapshot(name),)

    # What time and calls tell.

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Workers that have been silent too long are lost."""
        silent = [w for w in self if now - w.last_heard > self._beat_timeout]
        return tuple(e for w in silent for e in self._lose(w.beat.worker_id, "silent"))

    def forgive_silence(self, now: float) -> None:
        """The broker was away: nobody could be heard, so nobody's silence counts."""
        for worker in self._workers.values():
            worker.last_heard = now

    def lose(self, name: WorkerName, cause: str) -> tuple[Effect, ...]:
        """This life is known to be over, by other means than silence."""
        return self._lose(name.worker_id, cause) if self.get(name) is not None else ()

    def suspect(self, name: WorkerName) -> None:
        """A call failed: nothing new goes there until the next beat."""
        if worker := self.get(name):
            worker.is_suspect = True

    def avoid(self, name: WorkerName, until: float) -> None:
        """It said that it is full: nothing new goes there for a while."""
        if worker := self.get(name):
            worker.avoid_until = until

    def sent(self, name: WorkerName, num_tokens: int) -> None:
        """Counts what its last beat cannot know of yet."""
        if worker := self.get(name):
            worker.requests_since += 1
            worker.tokens_since += num_tokens

    def settled(self, name: WorkerName, num_tokens: int) -> None:
        """What was sent is done with, whether a beat has counted it since or not."""
        if worker := self.get(name):
            worker.requests_since -= 1
            worker.tokens_since -= num_tokens

    def _lose(self, worker_id: str, cause: str) -> tuple[Effect, ...]:
        worker = self._workers.pop(worker_id)
        return (Lost(worker.name, worker.beat.role, cause),)

    def _replaced_at(self, beat: Beat) -> tuple[Effect, ...]:
        """Another worker that answered at this address cannot be alive any more."""
        gone = [
            worker.beat.worker_id
            for worker in self
            if worker.beat.address == beat.address and worker.beat.worker_id != beat.worker_id
        ]
        return tuple(effect for worker_id in gone for effect in self._lose(worker_id, "replaced"))

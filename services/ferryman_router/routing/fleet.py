"""The router's beliefs about the workers: which are there, how loaded, holding which prefixes.

Pure. Beats and cache events come in as values, `now` as an argument; what should be done about
them goes out as effects. Beliefs are hints: a worker that is asked may still refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ferryman.cache.manifest import Exactness
from ferryman.wire.codec.caches import CacheEvent, CacheSnapshot
from ferryman.wire.nats.heartbeat import BOTH, DECODE, HOSTCACHE, PREFILL, Heartbeat, ServedState
from ferryman_router.routing.prefix_sources import WorkerCacheIndex
from ferryman_router.routing.worker_starts import SERVING, WorkerStarts

UNREACHABLE = "unreachable"
# After a pause of this process longer than this there are beats that it has not read yet.
MAX_DEAF_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WorkerName:
    """One life of one worker."""

    worker_id: str
    epoch: int

    @property
    def role(self) -> str:
        return self.worker_id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A life of a worker that was not known before."""

    beat: Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """This life is over, or must be treated as over."""

    name: WorkerName
    role: str
    cause: str


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Cache events are missing: ask this worker for all it holds."""

    name: WorkerName


@dataclass(frozen=True, slots=True)
class WorkerUnproven:
    """It beats, but was unreachable before, or another worker has its address: ask at the address
    which worker answers, then `welcome` it."""

    beat: Heartbeat


Effect = WorkerJoined | WorkerLeft | AskSnapshot | WorkerUnproven


@dataclass(slots=True)
class FleetWorker:
    """A worker at its last beat, this router's claims on it, and what that beat cannot know.

    `claims` are this router's own: by attempt, the prompt tokens still to be computed. They are
    exact, but know nothing of other routers; beats know of all, but are up to a second old, so
    `requests_since` and `tokens_since` count what came and went since the last one. They are
    below zero when more went than came: the beat had counted it.
    """

    beat: Heartbeat
    last_heard: float
    cache_index: WorkerCacheIndex
    claims: dict[str, int] = field(default_factory=dict)
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
        reported = self.beat.num_running + self.beat.num_queued + self.requests_since
        return max(len(self.claims), reported)

    @property
    def claimed_tokens(self) -> int:
        """Prefill work that this router has sent and that is not reported as done."""
        return sum(self.claims.values())

    @property
    def queue_tokens(self) -> int:
        """Prefill work that waits, runs or is on its way."""
        return max(self.claimed_tokens, self.beat.queue_tokens + self.tokens_since)


def keeps_state(beat: Heartbeat) -> bool:
    """Whether requests run there, in one role or another."""
    return any(beat.serves(role) for role in SERVING)


def is_pair(prefill: Heartbeat, decode: Heartbeat) -> bool:
    """Whether one can hand over to the other. A worker that does both decodes what it prefills."""
    is_one = prefill.worker_id == decode.worker_id
    return prefill.state == decode.state and is_one == (BOTH in (prefill.role, decode.role))


class Fleet:
    """All workers, and the `starts` of those to come. `beat_timeout` is how long one may be
    silent."""

    def __init__(self, beat_timeout: float) -> None:
        self._beat_timeout = beat_timeout
        self.starts = WorkerStarts(beat_timeout)
        self._workers: dict[str, FleetWorker] = {}
        self._looked_at: float | None = None
        self._unproven: dict[WorkerName, float] = {}

    def __iter__(self) -> Iterator[FleetWorker]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.beat.worker_id))

    def get(self, name: WorkerName) -> FleetWorker | None:
        """The worker, while this life of it is believed to be alive."""
        worker = self._workers.get(name.worker_id)
        return worker if worker is not None and worker.name == name else None

    def usable(self, role: str, now: float) -> tuple[FleetWorker, ...]:
        """The workers that a new request may be sent to, in a stable order. Those in quarantine are
        among them only while there is no other."""
        usable = tuple(
            worker
            for worker in self
            if worker.beat.serves(role)
            and worker.beat.is_ready
            and not worker.is_suspect
            and worker.avoid_until <= now
        )
        return tuple(worker for worker in usable if not worker.beat.is_quarantined) or usable

    def is_served(self, role: str) -> bool:
        """Whether some worker takes requests; one that is merely full for the moment does. One that
        can hand over to no worker there is, nor take over from any, does not."""
        of_role, others = self._ready(role), self._ready(PREFILL if role == DECODE else DECODE)
        if not others:
            return bool(of_role)
        return any(is_pair(beat, other) for beat in of_role for other in others)

    def discord(self) -> str:
        """The reason why no ready worker can hand over to another, although there are some of both
        roles; empty if one can."""
        prefills, decodes = self._ready(PREFILL), self._ready(DECODE)
        if not prefills or not decodes or self.is_served(DECODE):
            return ""
        prefill, decode = prefills[0], decodes[0]
        what = f"{prefill.worker_id} and {decode.worker_id} keep unlike state"
        if not prefill.state.is_unlike(decode.state):
            return f"{what}: of another model, page size or layout"
        arithmetics = f"{prefill.state.arithmetic} and {decode.state.arithmetic}"
        return f"{what}, computed in {arithmetics}: one arithmetic, or exactness=values, joins them"

    def _ready(self, role: str) -> list[Heartbeat]:
        workers = (worker for worker in self if worker.beat.serves(role))
        return [worker.beat for worker in workers if worker.beat.is_ready and not worker.is_suspect]

    def host_caches(self) -> dict[str, Heartbeat]:
        """The last beat of each node's host-cache: of two lives, of the one that beat last."""
        caches = (worker for worker in self if worker.beat.role == HOSTCACHE and worker.beat.node)
        return {
            worker.beat.node: worker.beat
            for worker in sorted(caches, key=lambda worker: worker.last_heard)
        }

    def state(self) -> ServedState | None:
        """The state that is served, by the first worker that keeps any."""
        return next((w.beat.state for w in self if keeps_state(w.beat)), None)

    def promise(self) -> tuple[Exactness, tuple[str, ...]]:
        """The exactness that all workers hold, and their arithmetics by name; `values` while none
        is known."""
        states = [worker.beat.state for worker in self if keeps_state(worker.beat)]
        arithmetics = tuple(sorted({state.arithmetic for state in states}))
        return Exactness.least(state.exactness for state in states), arithmetics

    def page_size(self) -> int:
        """The page size of the served state; 1 while no worker is known."""
        state = self.state()
        return state.page_size if state is not None else 1

    # News from workers.

    def on_heartbeat(self, beat: Heartbeat, now: float) -> tuple[Effect, ...]:
        """A beat of a known worker, of a new one, or of a new life under a known id."""
        worker = self._workers.get(beat.worker_id)
        if worker is not None and worker.beat.epoch == beat.epoch:
            worker.beat, worker.last_heard = beat, now
            worker.requests_since = worker.tokens_since = 0
            worker.is_suspect = False
            return ()
        name = WorkerName(beat.worker_id, beat.epoch)
        self.starts.on_heartbeat(beat)
        # A beat proves its sender's id and not its address: a holder of one worker's login could
        # drive out another one by naming its address, and so could a late beat.
        if name in self._unproven or self._others_at(beat):
            self._unproven[name] = now
            return (WorkerUnproven(beat),)
        return self._join(beat, now)

    def welcome(self, beat: Heartbeat, now: float) -> tuple[Effect, ...]:
        """A life that had to be proven is the one that answers at its address."""
        is_awaited = WorkerName(beat.worker_id, beat.epoch) in self._unproven
        return self._join(beat, now) if is_awaited else ()

    def _join(self, beat: Heartbeat, now: float) -> tuple[Effect, ...]:
        previous = self._workers.get(beat.worker_id)
        for name in [name for name in self._unproven if name.worker_id == beat.worker_id]:
            del self._unproven[name]
        effects = self._lose(beat.worker_id, "restarted") if previous is not None else ()
        cache_index = WorkerCacheIndex(beat.state.resume_shape)
        self._workers[beat.worker_id] = FleetWorker(beat, now, cache_index)
        asks = (AskSnapshot(WorkerName(beat.worker_id, beat.epoch)),) * keeps_state(beat)
        return (*effects, *self._replaced_at(beat), WorkerJoined(beat), *asks)

    def on_cache_event(self, event: CacheEvent) -> tuple[Effect, ...]:
        """A change; one of an unknown life waits for that life's first beat and snapshot."""
        worker = self.get(name := WorkerName(event.worker_id, event.epoch))
        if worker is None or worker.cache_index.apply(event):
            return ()
        return (AskSnapshot(name),)

    def on_cache_snapshot(self, name: WorkerName, snapshot: CacheSnapshot) -> tuple[Effect, ...]:
        worker = self.get(name)
        if worker is None or worker.cache_index.replace(snapshot):
            return ()
        return (AskSnapshot(name),)

    # News from time and from calls.

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Workers that have been silent too long are lost.

        This is called often. If it was not, this process stood still and read no beats.
        """
        looked_at, self._looked_at = self._looked_at, now
        if looked_at is not None and now - looked_at > MAX_DEAF_SECONDS:
            self.reset_timeouts(now)
        for name, heard in tuple(self._unproven.items()):
            if now - heard > self._beat_timeout:
                del self._unproven[name]
        self.starts.expire(now)
        silent = [w for w in self if now - w.last_heard > self._beat_timeout]
        return tuple(e for w in silent for e in self._lose(w.beat.worker_id, "silent"))

    def seconds_to_silence(self, now: float) -> float:
        """The time until a worker will have been silent too long, if it does not beat."""
        heard = (worker.last_heard for worker in self)
        return min(heard, default=now) + self._beat_timeout - now

    def reset_timeouts(self, now: float) -> None:
        """No beat could arrive, so no silence counts: the broker or this process was away."""
        for worker in self._workers.values():
            worker.last_heard = now
        self.starts.reset_timeouts(now)

    def lose(self, name: WorkerName, cause: str) -> tuple[Effect, ...]:
        """This life is known to be over, by other means than silence.

        If no connection reaches it but it still beats, it counts again only once it was reached:
        otherwise requests would be sent to it, and lost, once a second.
        """
        if (worker := self.get(name)) is None:
            return ()
        if cause == UNREACHABLE:
            self._unproven[name] = worker.last_heard
        return self._lose(name.worker_id, cause)

    def suspect(self, name: WorkerName) -> None:
        """A call failed: nothing new goes there until the next beat."""
        if worker := self.get(name):
            worker.is_suspect = True

    def trust(self, name: WorkerName) -> None:
        """It answers after all."""
        if worker := self.get(name):
            worker.is_suspect = False

    def avoid(self, name: WorkerName, until: float) -> None:
        """It reported that it is full: nothing new goes there for a while."""
        if worker := self.get(name):
            worker.avoid_until = until

    def claim(self, name: WorkerName, attempt: str, num_tokens: int) -> None:
        """An attempt goes there; so many tokens of its prompt are to be computed."""
        if worker := self.get(name):
            worker.claims[attempt] = num_tokens
            worker.requests_since += 1
            worker.tokens_since += num_tokens

    def computed(self, name: WorkerName, attempt: str, num_left: int) -> None:
        """The worker reported how much of a claim is left to compute."""
        worker = self.get(name)
        if worker is not None and (claimed := worker.claims.get(attempt)) is not None:
            num_left = min(claimed, num_left)
            worker.claims[attempt] = num_left
            worker.tokens_since -= claimed - num_left

    def release(self, name: WorkerName, attempt: str) -> None:
        """An attempt is over, whether or not a beat has counted it; a second call changes
        nothing.

        After an end there may be room again, so an earlier report of a full worker no longer
        counts.
        """
        worker = self.get(name)
        if worker is not None and (num_left := worker.claims.pop(attempt, None)) is not None:
            worker.requests_since -= 1
            worker.tokens_since -= num_left
            worker.avoid_until = 0.0

    def _lose(self, worker_id: str, cause: str) -> tuple[Effect, ...]:
        worker = self._workers.pop(worker_id)
        return (WorkerLeft(worker.name, worker.beat.role, cause),)

    def _replaced_at(self, beat: Heartbeat) -> tuple[Effect, ...]:
        """Another worker that answered at this address cannot be alive any more."""
        gone = self._others_at(beat)
        return tuple(effect for worker_id in gone for effect in self._lose(worker_id, "replaced"))

    def _others_at(self, beat: Heartbeat) -> list[str]:
        return [
            worker.beat.worker_id
            for worker in self
            if worker.beat.address == beat.address and worker.beat.worker_id != beat.worker_id
        ]

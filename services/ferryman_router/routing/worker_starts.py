"""The starts of workers that are not ready yet, and how long requests wait for one. Pure.

A role without a worker is waited for as long as a start of it advances. A start that stands still
is waited for no longer, nor is one that begins after several have failed: a worker that dies while
it starts, again and again, advances each time, and never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import NoWorker
from ferryman.wire.nats.heartbeat import DECODE, PREFILL, Heartbeat, StartBeat

SERVING = (PREFILL, DECODE)
# Starts of a role that may fail, without one that ends well, before later ones are not waited for.
MAX_FAILED_STARTS = 3
# The expected length of a start while none of its role has ended.
FIRST_START_SECONDS = 30.0
# The longest wait that a refused caller is asked for, and the least.
MAX_RETRY_SECONDS, MIN_RETRY_SECONDS = 600.0, 1.0
# One loop may take long to compile on a busy machine, and one step its graphs.
STANDSTILL_SECONDS = 120.0
# An idle router looks once a second. After a longer pause it stood still, and heard of no worker.
MAX_UNSEEN_SECONDS = 3.0


@dataclass(slots=True)
class _Start:
    """A start at its last beat, and when its progress last changed."""

    beat: StartBeat
    last_heard: float
    advanced: float
    is_trusted: bool

    def is_advancing(self, now: float) -> bool:
        return self.is_trusted and now - self.advanced <= STANDSTILL_SECONDS

    def seconds(self, now: float) -> float:
        return self.beat.seconds + now - self.last_heard


class WorkerStarts:
    """The starts under way, and how long the last one of each role took."""

    def __init__(self, beat_timeout: float) -> None:
        self._beat_timeout = beat_timeout
        self._starts: dict[tuple[str, int], _Start] = {}
        self._seconds: dict[str, float] = {}
        self._failed: dict[str, set[tuple[str, int]]] = {}

    def on_start_beat(self, beat: StartBeat, now: float) -> None:
        """A start goes on, or a new one begins."""
        name = (beat.worker_id, beat.epoch)
        start, failed = self._starts.get(name), self._failed.get(beat.role, set())
        if start is None:
            failed.discard(name)  # it was only silent
            is_trusted = len(failed) < MAX_FAILED_STARTS
            self._starts[name] = _Start(beat, now, now, is_trusted)
            return
        if start.beat.progress != beat.progress:
            start.advanced = now
        start.beat, start.last_heard = beat, now

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """A worker serves that was not known before, so its start has ended well."""
        self._starts.pop((beat.worker_id, beat.epoch), None)
        self._failed.pop(beat.role, None)
        if beat.start_seconds > 0:
            roles = (role for role in SERVING if beat.serves(role))
            self._seconds.update(dict.fromkeys(roles, beat.start_seconds))

    def expire(self, now: float) -> None:
        """Starts that have been silent too long have failed."""
        for name, start in tuple(self._starts.items()):
            if now - start.last_heard > self._beat_timeout:
                del self._starts[name]
                failed = self._failed.setdefault(start.beat.role, set())
                if len(failed) < MAX_FAILED_STARTS:
                    failed.add(name)

    def reset_timeouts(self, now: float) -> None:
        """No beat could arrive, so neither silence nor standstill counts."""
        for start in self._starts.values():
            start.last_heard = start.advanced = now

    def latest(self, role: str, now: float) -> tuple[StartBeat, float] | None:
        """The start that will be ready first, as far as can be known: the oldest that advances,
        else the oldest. With its seconds until now."""
        starts = [start for start in self._starts.values() if start.beat.serves(role)]
        if not starts:
            return None
        first = max(starts, key=lambda start: (start.is_advancing(now), start.seconds(now)))
        return first.beat, first.seconds(now)

    def is_advancing(self, role: str, now: float) -> bool:
        """Whether a start of the role is worth waiting for."""
        return any(
            start.beat.serves(role) and start.is_advancing(now) for start in self._starts.values()
        )

    def last_seconds(self, role: str) -> float | None:
        """The length of the role's last start; None while none has ended."""
        return self._seconds.get(role)

    def usual_seconds(self, role: str) -> float:
        """The expected length of a start of the role."""
        return self._seconds.get(role, FIRST_START_SECONDS)

    def remaining_seconds(self, role: str, now: float) -> float:
        """The expected time until the role has a worker."""
        latest = self.latest(role, now)
        left = self.usual_seconds(role) - (latest[1] if latest is not None else 0.0)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, left))


class RolePatience:
    """Counts from when a role became empty, or from when a start of it last advanced.

    It does not count from a request's arrival, so every request gets the error in time: one that
    waits for its first worker, and one whose worker died in mid-stream and whose tries begin
    again. Nor does it count a time in which this process stood still, and could hear of no worker.

    `seconds` are for a new process to begin its start; the start may take as long again as the last
    one of its role, and longer while it advances. `is_served` says whether a role has a worker now,
    and `discord` why workers of both roles cannot work together, if so.
    """

    def __init__(
        self,
        starts: WorkerStarts,
        is_served: Callable[[str], bool],
        seconds: float,
        discord: Callable[[], str],
    ) -> None:
        self._starts, self._is_served, self._seconds = starts, is_served, seconds
        self._discord = discord
        self._waits_since: dict[str, float] = {}
        self._served: set[str] = set()
        self._looked_at: float | None = None

    def look(self, now: float) -> None:
        """Called whenever workers may have come or gone, and now and then."""
        self._pass_over_standstill(now)
        for role in SERVING:
            if self._is_served(role):
                self._waits_since.pop(role, None)
                self._served.add(role)
            elif self._starts.is_advancing(role, now):
                self._waits_since[role] = now
            else:
                self._waits_since.setdefault(role, now)

    def _pass_over_standstill(self, now: float) -> None:
        looked_at, self._looked_at = self._looked_at, now
        if looked_at is not None and now - looked_at > MAX_UNSEEN_SECONDS:
            for role in self._waits_since:
                self._waits_since[role] += now - looked_at

    @property
    def lacks_workers(self) -> bool:
        """Whether some role has no worker, as of the last look."""
        return bool(self._waits_since)

    @property
    def is_first_start(self) -> bool:
        """Whether some role has never had a worker."""
        return len(self._served) < len(SERVING)

    def seconds_for(self, role: str) -> float:
        """The wait for a role without any progress."""
        return self._seconds + self._starts.usual_seconds(role)

    def remaining_seconds(self, now: float) -> float:
        """The expected time until every role has a worker; 0 if each has one."""
        lacking = (self._starts.remaining_seconds(role, now) for role in self._waits_since)
        return max(lacking, default=0.0)

    def refusal(self, now: float) -> NoWorker | None:
        """The refusal of all that wait, once the wait for a role was too long."""
        for role, since in self._waits_since.items():
            if now - since >= self.seconds_for(role):
                return self._no_worker(role, now)
        return None

    def refusal_at_deadline(self, now: float) -> NoWorker | None:
        """The refusal of a request whose time is over while a role has no worker."""
        if not self._waits_since:
            return None
        remaining = self._starts.remaining_seconds
        role = max(self._waits_since, key=lambda role: remaining(role, now))
        return self._no_worker(role, now)

    def under_way(self, now: float) -> tuple[str, ...]:
        """The start that is waited for, of each role without a worker."""
        return tuple(self._doing(role, now) for role in self._waits_since)

    def _no_worker(self, role: str, now: float) -> NoWorker:
        if discord := self._discord():
            return NoWorker(discord, self._starts.remaining_seconds(role, now))
        state = "the cluster is starting" if self.is_first_start else f"no {role} worker is ready"
        message = f"{state}: {self._doing(role, now)}; {self._usually(role)}"
        return NoWorker(message, self._starts.remaining_seconds(role, now))

    def _doing(self, role: str, now: float) -> str:
        latest = self._starts.latest(role, now)
        if latest is None:
            waited = now - self._waits_since[role]
            return f"no {role} worker has reported a start for {waited:.0f} s"
        beat, seconds = latest
        text = f"{beat.worker_id} is {beat.doing}, {seconds:.0f} s after it began"
        is_stuck = not self._starts.is_advancing(role, now)
        return f"{text}, and does not get on" if is_stuck else text

    def _usually(self, role: str) -> str:
        last = self._starts.last_seconds(role)
        if last is not None:
            return f"the last start of a {role} worker took {last:.0f} s"
        return f"a start may take {self._starts.usual_seconds(role):.0f} s or more"

"""The wait of requests for a role without a worker, and the errors of refused ones. Pure."""

from __future__ import annotations

from ferryman.errors import NoWorker
from ferryman_router.routing.fleet import SERVING, Fleet


class RolePatience:
    """Counts from when a role became empty, or from when a start of it last advanced.

    It does not count from a request's arrival, so every request gets the error in time: one that
    waits for its first worker, and one whose worker died in mid-stream and whose tries begin
    again. `seconds` are for a new process to begin its start; the start may take as long again as
    the last one of its role, and longer while it advances.
    """

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet, self._starts, self._seconds = fleet, fleet.starts, seconds
        self._waits_since: dict[str, float] = {}
        self._served: set[str] = set()

    def look(self, now: float) -> None:
        """Called whenever workers may have come or gone, and now and then."""
        for role in SERVING:
            if self._fleet.is_served(role):
                self._waits_since.pop(role, None)
                self._served.add(role)
            elif self._starts.is_advancing(role, now):
                self._waits_since[role] = now
            else:
                self._waits_since.setdefault(role, now)

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

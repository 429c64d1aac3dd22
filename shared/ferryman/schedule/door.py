"""The door: what these pools can never hold is refused at once, so that no line waits behind it."""

from __future__ import annotations

from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, Reason
from ferryman.cache.slots import Demand
from ferryman.errors import InvalidRequest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request import Request
from ferryman.schedule.sequence import Goal, Waiting


class Door:
    """Pools of `sizes`, all of them empty, must hold a request to its last token."""

    def __init__(self, limits: SchedulerLimits, sizes: Demand, planner: Planner) -> None:
        self._limits = limits
        self._sizes = sizes
        self._planner = planner

    def check(self, request: Request, goal: Goal) -> None:
        """Raises InvalidRequest for what can never run here, whatever else ends or is evicted."""
        self._limits.check(request)
        waiting = Waiting(0, request, goal, EMPTY_HOST, was_retracted=False)
        bare = self._planner.plan_cold(
            request.prompt_len, Reason.NO_ROOM, num_decoded=waiting.num_decoded
        )
        for kind, count in bare.demand.items():
            if count > self._sizes[kind]:
                raise InvalidRequest(
                    f"prompt of {request.prompt_len} tokens needs {count} {kind} slots at once, "
                    f"there are {self._sizes[kind]}",
                    "prompt",
                )

"""Admission: who of those that wait comes in next, and by which plan."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.cache.planner import Planner
from ferryman.cache.resume import Reason, ResumePlan
from ferryman.cache.slots import Holder, Role
from ferryman.schedule.events import Admitted, Event
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.residence import Residence
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Running, Waiting


class Admission:
    """Lets in the head of the line, and nobody before it. Whoever measures sets the `planner`."""

    def __init__(
        self,
        residence: Residence,
        roster: Roster,
        limits: SchedulerLimits,
        planner: Planner,
        events: list[Event],
    ) -> None:
        self.planner = planner
        self._residence = residence
        self._roster = roster
        self._limits = limits
        self._events = events

    def prompts(self, now: float) -> Iterator[Running]:
        """Prompts under way in their order, then as many of the waiting as can be admitted."""
        yield from list(self._roster.prefilling)
        while admitted := self._try_admit_next(now):
            yield admitted

    def _try_admit_next(self, now: float) -> Running | None:
        roster = self._roster
        waiting = roster.line.head
        if waiting is None or roster.num_active >= self._limits.concurrency.max_running:
            return None
        holder = Holder(Role.REQUEST, waiting.request.request_id)
        for plan in self._resume_plans(waiting):
            headroom = len(roster.decoding)
            sequence = self._residence.try_admit(waiting, plan, holder, headroom, now)
            if sequence is not None:
                roster.admit(sequence)
                self._events.append(Admitted(sequence.request_id, plan, waiting.was_retracted))
                return sequence
        return None

    def _resume_plans(self, waiting: Waiting) -> Iterator[ResumePlan]:
        """The best plan, then smaller ones; a bare one when nobody is here who will make room."""
        prompt_len, decoded = waiting.request.prompt_len, waiting.num_decoded
        if not self._limits.prefix_cache:
            yield self.planner.plan_cold(prompt_len, Reason.CACHE_OFF, num_decoded=decoded)
            return
        keys, tree = waiting.request.keys, self._residence.tree
        yield from self.planner.plans(keys, prompt_len, tree, waiting.host, num_decoded=decoded)
        if not self._roster.by_id and not self._roster.reserved:
            yield self.planner.plan_cold(prompt_len, Reason.NO_ROOM, num_decoded=decoded)

"""Which workers serve a request's next attempt, and when there is no further one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ferryman.errors import Exhausted, FerrymanError, Unavailable
from ferryman.handoff.request import RequestState
from ferryman.runtime.logs import Tail
from ferryman.wire.index import Holding, ResumeShape
from ferryman_router.asked import Asked
from ferryman_router.budget import Tries
from ferryman_router.chains import Chains
from ferryman_router.fleet import WorkerName
from ferryman_router.policy import Asking, Explanation
from ferryman_router.queue import Ticket
from ferryman_router.surroundings import Surroundings
from ferryman_router.verdict import RetriesExhausted, Spoiled, Suspect, WorkerGone

log = logging.getLogger(__name__)

MAX_AVOID_SECONDS = 1.0


class Placing:
    """Of one request. `chains` are the keys of the prompt, and of what was generated when its
    latest attempt was placed."""

    def __init__(self, asked: Asked, around: Surroundings) -> None:
        self._asked, self._around = asked, around
        self._tries = Tries()
        self._excluded: dict[WorkerName, float] = {}
        self.chains = Chains(asked.token_ids, asked.tenant.salt)

    async def place(self, generated: Sequence[int], *, attempt: int, is_retry: bool) -> Explanation:
        """Waits for a pair of workers. Raises QueueFull, or Unavailable when nobody is ready."""
        asked, self.chains = self._asked, self.chains_with(generated)
        ticket = Ticket(asked.request_id, asked.tenant.name, asked.arrived, asked.deadline)
        holdings = await self._holdings()
        asking = Asking(self.chains, len(self.chains.token_ids), holdings, self._still_excluded)
        return await self._around.dispatcher.place(
            ticket, asking, attempt=attempt, is_retry=is_retry
        )

    def chains_with(self, generated: Sequence[int]) -> Chains:
        """Of the prompt, and of what was generated so far."""
        behind = np.array(generated, dtype="<u4")
        return self.chains.extended(np.concatenate([self._asked.token_ids, behind]))

    async def _holdings(self) -> Mapping[str, Holding]:
        """What the nodes hold of this prompt; asked once, for the state in use."""
        for worker in self._around.fleet.usable("prefill", self._around.clock()):
            state = worker.beat.state
            reusable = (len(self.chains.token_ids) - 1) // state.page_size
            chain = self.chains.of(state)[:reusable]
            if not worker.beat.node or not chain:
                continue
            shape = ResumeShape(state.page_size, state.window_len, frozenset(state.kinds))
            return await self._around.index.usable_pages(chain, shape)
        return {}

    def _still_excluded(self) -> frozenset[WorkerName]:
        found = ((self._around.fleet.get(name), heard) for name, heard in self._excluded.items())
        return frozenset(w.name for w, heard in found if w is not None and w.last_heard == heard)

    # How attempts went.

    def turned_away(self, worker: WorkerName, error: Exhausted) -> None:
        """No room there for a while."""
        wait = min(MAX_AVOID_SECONDS, error.retry_after_seconds)
        self._around.fleet.avoid(worker, self._around.clock() + wait)
        self._around.metrics.retries.labels("no_room").inc()

    def spoiled(
        self, explanation: Explanation, spoiled: Spoiled, *, had_begun: bool, stage: RequestState
    ) -> None:
        """Another pair shall try. Raises when nobody shall."""
        self._exclude(explanation, spoiled.error)
        retries = self._around.metrics.retries
        if isinstance(spoiled.error, Unavailable) and not had_begun:
            retries.labels("not_reached").inc()
            return  # nothing was done: another worker, or the same one after its next beat
        self._tries.failed(by_death=spoiled.is_death and had_begun)
        tail = Tail(
            id=self._asked.request_id,
            attempt=explanation.attempt,
            state=stage,
            reason=spoiled.error.reason,
            message=spoiled.error,
        )
        log.warning("attempt lost %s", tail)
        self._check_retry(spoiled.error)
        retries.labels(spoiled.error.reason).inc()

    def _exclude(self, explanation: Explanation, error: FerrymanError) -> None:
        """This pair failed: not again for this request, until it has been heard of since."""
        fleet, chosen = self._around.fleet, explanation.chosen
        for name in (chosen.prefill, chosen.decode):
            if (worker := fleet.get(name)) is not None:
                self._excluded[name] = worker.last_heard
        if isinstance(error, Unavailable) and not isinstance(error, WorkerGone):
            fleet.suspect(chosen.decode)  # a prefill worker that is gone would not say so

    def _check_retry(self, error: FerrymanError) -> None:
        around, tries = self._around, self._tries
        if tries.is_suspect:
            raise Suspect(f"two workers died while they ran this request: {error}")
        in_flight = around.num_in_flight()
        if not tries.may_go_on or not around.budget.try_take(self._asked.request_id, in_flight):
            raise RetriesExhausted(f"the last of {tries.num_failed} failures: {error}")

"""The call to an attempt's prefill worker, followed beside the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ferryman.errors import FerrymanError, Unavailable
from ferryman.wire.values import PrefillOrder, PrefillProgress
from ferryman_router.attempt import Attempt
from ferryman_router.surroundings import Surroundings
from ferryman_router.verdict import WorkerGone, judge


class PrefillCall:
    """Progress goes to `heard`; a failure before the hand-off is the attempt's verdict."""

    def __init__(
        self,
        attempt: Attempt,
        order: PrefillOrder,
        around: Surroundings,
        heard: Callable[[PrefillProgress], None],
    ) -> None:
        self._attempt, self._around, self._heard = attempt, around, heard
        self._task = asyncio.ensure_future(self._follow(order))
        self._task.add_done_callback(attempt.follower_ended)

    def leave(self) -> None:
        """The attempt is over."""
        self._task.cancel()

    async def _follow(self, order: PrefillOrder) -> None:
        """Until the hand-off; a failure counts unless decode has been heard of already."""
        attempt, fleet = self._attempt, self._around.fleet
        try:
            async for progress in self._around.workers.prefill(attempt.prefill, order):
                self._heard(progress)
            error: FerrymanError = Unavailable("prefill ended without a hand-off")
        except FerrymanError as caught:
            error = caught
            if isinstance(error, WorkerGone):
                fleet.suspect(attempt.prefill)
        finally:
            fleet.settled(attempt.prefill, attempt.num_prefill_tokens)
        if not attempt.is_handed_off:
            attempt.settle(judge(error))

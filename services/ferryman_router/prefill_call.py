"""The call to an attempt's prefill worker, followed beside the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ferryman.errors import FerrymanError, Unavailable
from ferryman.wire.values import PrefillOrder, PrefillProgress
from ferryman_router.attempt import Attempt
from ferryman_router.surroundings import Surroundings
from ferryman_router.verdict import Hopeless, Spoiled, TurnedAway, WorkerGone, judge

# A hand-off whose tokens have come already has this long to be told as one.
FAREWELL_SECONDS = 5.0


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
        """The attempt is over. Cancelling a hand-off that decode has taken would only have prefill
        call it cancelled: its end is near, and is waited for a little."""
        is_lost = self._attempt.is_settled_as((Spoiled, TurnedAway, Hopeless))
        if self._attempt.is_handed_off and not is_lost and not self._task.done():
            self._around.outlive(self._farewell())
        else:
            self._task.cancel()

    async def _farewell(self) -> None:
        try:
            await asyncio.wait({self._task}, timeout=FAREWELL_SECONDS)
        finally:
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

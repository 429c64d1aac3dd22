"""A writer's answer to a decode worker that gives up a reservation.

A prefill worker writes prompts that it computes; a decode worker that drains writes the requests
that leave it. Decode asks both by the same call, `PrefillService.StopWriting`.
"""

from __future__ import annotations

from collections.abc import Callable

from ferryman.errors import WrongEpoch
from ferryman.wire.values import StopAnswer, StopOrder
from ferryman.worker.send_leases import SendLeases

# How long a call that asks for a stop waits; then decode asks again.
STOP_SECONDS = 1.0


class StopOrders:
    """Stops the sends of one worker in the life `epoch`.

    `refuse` is called with each order: before the answer to Reserve has come, an attempt does not
    know its reservation's id.
    """

    def __init__(
        self, epoch: int, send_leases: SendLeases, refuse: Callable[[StopOrder], None]
    ) -> None:
        self._epoch = epoch
        self._send_leases, self._refuse = send_leases, refuse

    async def obey(self, order: StopOrder) -> StopAnswer:
        """Whether nothing more will be written. Raises WrongEpoch for another life."""
        if order.worker_epoch != self._epoch:
            raise WrongEpoch(f"this is epoch {self._epoch}, not {order.worker_epoch}")
        self._refuse(order)
        status = await self._send_leases.stop_and_report(order.reservation_id, STOP_SECONDS)
        return StopAnswer(status.is_stopped, status.has_failed_writes, self._epoch)

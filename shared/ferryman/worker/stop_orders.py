"""A writer's answer to a decode worker that gives up a reservation.

A prefill worker writes prompts that it computes; a decode worker that drains writes the requests
that leave it. Decode asks both by the same call, `PrefillService.StopWriting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import WrongEpoch
from ferryman.worker.send_leases import SendLeases, WriterStatus

# How long a call that asks for a stop waits; then decode asks again.
STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Nothing is to be written into the reservation any more. `epoch` is the writer's life."""

    request_id: str
    attempt: int
    reservation_id: str
    epoch: int


class StopOrders:
    """Stops the sends of one worker in the life `epoch`.

    `refuse` is called with each order: before the answer to Reserve has come, an attempt does not
    know its reservation's id.
    """

    def __init__(
        self, epoch: int, send_leases: SendLeases, refuse: Callable[[StopOrder], None]
    ) -> None:
        self.epoch = epoch
        self._send_leases, self._refuse = send_leases, refuse

    async def obey(self, order: StopOrder) -> WriterStatus:
        """Says whether nothing more will be written. Raises WrongEpoch for another life."""
        if order.epoch != self.epoch:
            raise WrongEpoch(f"this is epoch {self.epoch}, not {order.epoch}")
        self._refuse(order)
        return await self._send_leases.stop_and_report(order.reservation_id, STOP_SECONDS)

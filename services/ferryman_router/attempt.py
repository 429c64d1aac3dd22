"""One try: a prefill worker, a decode worker, and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ferryman_router.fleet import WorkerName
from ferryman_router.verdict import Verdict


@dataclass(slots=True)
class Attempt:
    """`is_handed_off` once decode has been heard of: from then on prefill may go."""

    number: int
    prefill: WorkerName
    decode: WorkerName
    verdict: asyncio.Future[Verdict]
    is_handed_off: bool = False

    def settle(self, verdict: Verdict) -> None:
        """The first verdict counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    def is_settled_as(self, kinds: tuple[type, ...]) -> bool:
        over = self.verdict.done() and not self.verdict.cancelled()
        return over and isinstance(self.verdict.result(), kinds)

    def needs(self, name: WorkerName) -> bool:
        """Whether the attempt is lost without that worker."""
        if self.verdict.done():
            return False
        return name == self.decode or (name == self.prefill and not self.is_handed_off)

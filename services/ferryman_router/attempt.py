"""One try: a prefill worker, a decode worker, and how it ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ferryman.errors import FerrymanError
from ferryman.wire.values import Usage
from ferryman_router.fleet import WorkerName
from ferryman_router.verdict import Hopeless, Verdict

log = logging.getLogger(__name__)

FIRST_PATIENCE_SECONDS = 1.0
MAX_PATIENCE_SECONDS = 16.0


@dataclass(slots=True)
class Attempt:
    """`is_taken` once prefill has let it in, `has_begun` once it is at work, `is_handed_off` once
    decode has been heard of: from then on the prefill worker may go. `planned` is what prefill
    has said of the prompt so far.
    """

    number: int
    prefill: WorkerName
    decode: WorkerName
    num_prefill_tokens: int
    verdict: asyncio.Future[Verdict]
    is_taken: bool = False
    has_begun: bool = False
    is_handed_off: bool = False
    last_news: float = 0.0
    patience: float = FIRST_PATIENCE_SECONDS
    planned: Usage | None = None

    @property
    def refused_by(self) -> WorkerName:
        """Who has no room for it, when it is turned away: decode is asked by prefill."""
        return self.decode if self.is_taken else self.prefill

    def heard(self, now: float) -> None:
        """Tokens came: decode is at work, and the stream carries them."""
        self.has_begun = self.is_handed_off = True
        self.last_news, self.patience = now, FIRST_PATIENCE_SECONDS

    def is_stalled(self, now: float) -> bool:
        """Whether it is time to ask for tokens; each time in vain, the next is further off."""
        if not self.is_handed_off or now - self.last_news < self.patience:
            return False
        self.last_news, self.patience = now, min(MAX_PATIENCE_SECONDS, 2 * self.patience)
        return True

    def settle(self, verdict: Verdict) -> None:
        """The first verdict counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    def follower_ended(self, follower: asyncio.Task[None]) -> None:
        """What follows prefill fails by a bug only; then nobody waits for it in vain."""
        if not follower.cancelled() and (bug := follower.exception()) is not None:
            log.error("following prefill failed attempt=%d", self.number, exc_info=bug)
            self.settle(Hopeless(FerrymanError("internal error")))

    def is_settled_as(self, kinds: tuple[type, ...]) -> bool:
        over = self.verdict.done() and not self.verdict.cancelled()
        return over and isinstance(self.verdict.result(), kinds)

    def needs(self, name: WorkerName) -> bool:
        """Whether the attempt is lost without that worker."""
        if self.verdict.done():
            return False
        return name == self.decode or (name == self.prefill and not self.is_handed_off)

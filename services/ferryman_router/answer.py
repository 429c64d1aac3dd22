"""One request's answer as its tokens come: each once and in order, timed, and written.

Workers may send a token twice, early, or of an attempt that is over; the ledger says what counts,
and only that reaches the transcript.
"""

from __future__ import annotations

from collections.abc import Callable

from ferryman.handoff.offsets import Acceptance, Accepted, Diverged, Dropped, Lacking, TokenLedger
from ferryman.schedule.request import FinishReason
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.values import RequestTokens, Usage
from ferryman_router.asked import Asked
from ferryman_router.metrics import RouterMetrics
from ferryman_router.pace import Pace
from ferryman_router.transcript import Transcript
from ferryman_router.writer import Writer


class Answer:
    """Over all attempts. `transcript` is what clients read, `pace` how quickly it came."""

    def __init__(
        self,
        asked: Asked,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.transcript, self.pace = Transcript(), Pace(asked.arrived)
        self._ledger = TokenLedger(0)
        self._writer = Writer(tokenizer, asked, self.transcript)
        self._metrics, self._clock = metrics, clock

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that were generated so far."""
        return self._ledger.token_ids

    @property
    def next_offset(self) -> int:
        return self._ledger.next_offset

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._writer.has_stopped

    def begin_attempt(self, attempt: int) -> None:
        """From now on only this attempt's tokens count."""
        self._ledger.begin_attempt(attempt)

    def take(self, tokens: RequestTokens) -> Acceptance:
        """Writes what is new; counts the frame when nothing of it can be taken."""
        refused = self._metrics.refused_tokens
        taken = self._ledger.accept(tokens.frame)
        match taken:
            case Accepted(offset, token_ids):
                self._write(offset, token_ids, tokens)
            case Dropped(is_stale=True):
                refused.labels("stale").inc()
            case Lacking():
                refused.labels("early").inc()
            case Diverged():
                refused.labels("diverged").inc()
        return taken

    def _write(self, offset: int, token_ids: tuple[int, ...], tokens: RequestTokens) -> None:
        is_first = self.pace.first_seconds is None
        gap = self.pace.tokens(len(token_ids), self._clock())
        if is_first:
            self._metrics.first_token.observe(gap)
        else:
            self._metrics.gap.observe(gap, len(token_ids))
        logprobs = tokens.logprobs[-len(token_ids) :] if tokens.logprobs else ()
        self._writer.write(offset, token_ids, logprobs)

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        """Ends the transcript."""
        self._writer.finish(reason, usage)

"""One request's answer as its tokens come: each once and in order, timed, and written.

Workers may send a token twice, early, or of an attempt that is over; the ledger decides what
counts, and only that reaches the output log.

    prefill's stream   ──scores──► whole, or none ───────────────────────► output log
    decode's stream    ──tokens──► held until the scores are ──► ledger ──► output log

The two streams are of two workers, so tokens may overtake the log probabilities of the prompt. No
token of the answer counts before these are whole. So a prefill worker that dies between two pieces
of them loses the attempt as one that dies in mid-prompt does, and a client never sees a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.manifest import Exactness
from ferryman.errors import CorruptState, FerrymanError, InvalidRequest, Suspect
from ferryman.handoff.offsets import (
    EMPTY_HASH,
    Acceptance,
    Accepted,
    Diverged,
    Dropped,
    Lacking,
    TokenFrame,
    TokenLedger,
    extend_hash,
)
from ferryman.schedule.prompt_scores import PromptScores, ScoreBook
from ferryman.schedule.request import FinishReason
from ferryman.text.stops import Released, StopStrings
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.values import RequestTokens, Usage
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.routing.forecast import LatencyTracker
from ferryman_router.routing.generate_request import TokenizedRequest


@dataclass(frozen=True, slots=True)
class OutputFailed:
    """The answer ends here. `stage` is how far the request had come."""

    error: FerrymanError
    stage: str
    offset: int

    @property
    def is_retryable(self) -> bool:
        codes = ("RESOURCE_EXHAUSTED", "ABORTED", "UNAVAILABLE", "DATA_LOSS")
        return self.error.code in codes and not isinstance(self.error, Suspect)


End = GenerateFinished | OutputFailed


class OutputLog:
    """All chunks of an answer, and its end when it has one. `scores` of the prompt, in pieces, are
    whole before there is a chunk. `num_visits` counts all listeners there ever were."""

    __slots__ = ("_listeners", "chunks", "end", "num_visits", "scores")

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.scores: tuple[PromptScores, ...] = ()
        self.end: End | None = None
        self.num_visits = 0
        self._listeners: list[asyncio.Event] = []

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def num_tokens(self) -> int:
        if not self.chunks:
            return 0
        last = self.chunks[-1]
        return last.offset + len(last.token_ids)

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        for listener in self._listeners:
            listener.set()

    def close(self, end: End) -> None:
        """The first end counts; later ones are ignored."""
        if self.end is None:
            self.end = end
        for listener in self._listeners:
            listener.set()

    def listen(self, changed: asyncio.Event) -> None:
        self.num_visits += 1
        self._listeners.append(changed)

    def leave(self, changed: asyncio.Event) -> None:
        self._listeners.remove(changed)

    def chunk_index(self, offset: int) -> int:
        """The chunk that begins at `offset`; InvalidRequest when none does or will."""
        if offset == self.num_tokens:
            return len(self.chunks)
        for index, chunk in enumerate(self.chunks):
            if chunk.offset == offset:
                return index
        raise InvalidRequest(
            f"no chunk of this request ended at offset {offset}", "resume_from_offset"
        )


class ResponseStream:
    """The answer over all attempts. `output_log` is what clients read, `pace` how quickly it came.
    It `has_stopped` once a stop string has ended it: tokens after one are not part of it.

    Of a prompt that is not to be scored the scores are whole from the beginning."""

    def __init__(
        self,
        asked: TokenizedRequest,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.output_log, self.pace = OutputLog(), LatencyTracker(asked.arrived)
        self.has_stopped, self._matched_stop = False, ""
        self._ledger = TokenLedger(0)
        is_scored = asked.params.prompt_logprobs is not None
        # The first token of a prompt has no score.
        self._scores = ScoreBook(asked.prompt_len if is_scored else 1)
        self._held: list[RequestTokens] = []
        context = asked.token_ids[-8:].tolist()
        self._detokenizer = tokenizer.detokenizer(context, asked.request.text.shown)
        self._stops = StopStrings(asked.params.stop)
        self._includes_stop = asked.request.text.includes_stop
        self._min_tokens = asked.params.rules.min_tokens
        self._metrics, self._clock = metrics, clock
        if held := asked.past.token_ids:
            self._ledger.accept(TokenFrame(0, 0, held, extend_hash(EMPTY_HASH, held)))
            self._write(0, held, ())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far."""
        return self._ledger.token_ids

    @property
    def next_offset(self) -> int:
        return self._ledger.next_offset

    def begin_attempt(self, attempt: int) -> None:
        """Counts only this attempt's tokens from now on. Drops scores that are not whole, and the
        tokens that the last attempt drew after them."""
        self._ledger.begin_attempt(attempt)
        self._held.clear()
        self._scores.begin_attempt()

    def hold(self, tokens: RequestTokens) -> bool:
        """Whether these tokens came too early, and are kept until the scores are whole."""
        if self._scores.is_whole:
            return False
        self._held.append(tokens)
        return True

    def score(self, piece: PromptScores) -> tuple[RequestTokens, ...]:
        """Takes a piece of the scores; the tokens that it was the last to hold up. A piece that
        comes again, or after whole scores, changes nothing. Raises CorruptState for one that does
        not follow."""
        self._scores.add(piece)
        if not self._scores.is_whole:
            return ()
        self.output_log.scores = self._scores.parts()
        released = tuple(self._held)
        self._held.clear()
        return released

    def check_scored(self) -> None:
        """Raises CorruptState unless the scores are whole: no piece comes after a hand-off."""
        if not self._scores.is_whole:
            raise CorruptState(f"scores from token {self._scores.end} on are lacking")

    def take(self, tokens: RequestTokens) -> Acceptance:
        """Writes what is new; counts the frame when nothing of it can be taken."""
        taken = self._ledger.accept(tokens.frame)
        match taken:
            case Accepted(offset, token_ids):
                self._measure(len(token_ids))
                logprobs = tokens.logprobs[-len(token_ids) :] if tokens.logprobs else ()
                self._write(offset, token_ids, logprobs)
            case Dropped(is_stale=True):
                self._metrics.refused_tokens.labels("stale").inc()
            case Lacking():
                self._metrics.refused_tokens.labels("early").inc()
            case Diverged():
                self._metrics.refused_tokens.labels("diverged").inc()
        return taken

    def _write(
        self, offset: int, token_ids: tuple[int, ...], logprobs: Sequence[Mapping[int, float]]
    ) -> None:
        # With stop strings one token at a time: the answer ends after the one that completes a
        # stop, wherever the worker has cut its frames. With log probabilities too: a token of a
        # thought and one of the text behind it have different places in an answer.
        size = 1 if self._stops.is_watching or logprobs else len(token_ids)
        for at in range(0, len(token_ids), size):
            if self.has_stopped:
                break  # whatever comes after a stop was under way already
            some = token_ids[at : at + size]
            new = self._detokenizer.feed(some)
            # No stop string ends an answer below its minimum length.
            is_early = offset + at < self._min_tokens and self._stops.is_watching
            released = Released(new) if is_early else self._stops.feed(new)
            self.has_stopped = released.stop is not None
            self._matched_stop = released.stop or ""
            chunk = TokenChunk(
                offset + at, some, self._shown(released), tuple(logprobs[at : at + size])
            )
            self.output_log.add(chunk)

    def _shown(self, released: Released) -> str:
        return released.text + (released.stop or "" if self._includes_stop else "")

    def _measure(self, num_tokens: int) -> None:
        is_first = self.pace.first_seconds is None
        gap = self.pace.tokens(num_tokens, self._clock())
        if is_first:
            self._metrics.first_token.observe(gap)
        else:
            self._metrics.gap.observe(gap, num_tokens)

    def finish(self, reason: FinishReason, usage: Usage, exactness: Exactness) -> FinishReason:
        """Ends the answer with what was held back, unless a stop string has cut it off.

        Returns the reason that the output log shows: what was held back may end in a stop string.
        """
        text = ""
        if not self.has_stopped:
            last = self._stops.feed(self._detokenizer.flush())
            if last.stop is not None:
                text, reason = self._shown(last), FinishReason.STOP
                self._matched_stop = last.stop
            else:
                text = last.text + self._stops.flush()
        self.output_log.close(GenerateFinished(reason, usage, text, self._matched_stop, exactness))
        return reason

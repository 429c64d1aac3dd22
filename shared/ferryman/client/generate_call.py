"""One answer, over as many connections as necessary."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.client.retries import (
    ConnectionBroken,
    Deadline,
    Failures,
    NotResumable,
    typed_client_errors,
)
from ferryman.client.routers import RouterDoor, RouterDoors
from ferryman.errors import CorruptState, FerrymanError, NotFound, RequestIdInUse, Stopping
from ferryman.ids import make_request_id
from ferryman.schedule.prompt_scores import PromptScores, ScoreBook, joined
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.inference import event_from_wire
from ferryman.wire.codec.request import sampling_to_wire
from ferryman.wire.codec.scalars import token_ids_to_bytes
from ferryman.wire.public import (
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    TokenChunk,
)
from ferryman.wire.v1 import inference_pb2


class ReceivedTokens:
    """The tokens and the text that the caller has received, and the stream's place in the answer.

    A broken stream continues at its place. If the router no longer knows the request, the client
    sends it again: the same seed draws the same tokens. Tokens that the caller already has are
    compared and then dropped.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_chars = 0
        self._chars_reached = 0
        self.reached = 0

    @property
    def is_empty(self) -> bool:
        return not self._token_ids

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the caller has."""
        return len(self._token_ids)

    @property
    def held(self) -> TokenIds:
        """The tokens up to the stream's place: a router that does not know them needs them."""
        return as_token_ids(self._token_ids[: self.reached])

    def restart(self) -> None:
        """Notes that the next chunk is the first of the answer."""
        self.reached, self._chars_reached = 0, 0

    def accept(self, chunk: TokenChunk) -> TokenChunk | None:
        """The new part of a chunk, if any. Raises CorruptState for a gap, and NotResumable if a
        repeated answer differs."""
        if chunk.offset != self.reached:
            raise CorruptState(f"tokens came at offset {chunk.offset} instead of {self.reached}")
        known = tuple(self._token_ids[self.reached : self.reached + len(chunk.token_ids)])
        if chunk.token_ids[: len(known)] != known:
            raise self._different_answer()
        self.reached += len(chunk.token_ids)
        new, text = chunk.token_ids[len(known) :], self._new_text(chunk.text)
        if not new and not text:
            return None
        self._token_ids += new
        return replace(
            chunk,
            offset=chunk.offset + len(known),
            token_ids=new,
            text=text,
            logprobs=chunk.logprobs[len(known) :],
        )

    def finish(self, end: GenerateFinished) -> GenerateFinished:
        """The end, without text that the caller has. Raises NotResumable if it came too early."""
        if self.reached < len(self._token_ids):
            raise self._different_answer()
        return replace(end, text=self._new_text(end.text))

    def _new_text(self, text: str) -> str:
        new = text[max(0, self._num_chars - self._chars_reached) :]
        self._chars_reached += len(text)
        self._num_chars = max(self._num_chars, self._chars_reached)
        return new

    def _different_answer(self) -> NotResumable:
        why = "no router knows the request, and the answer begun anew is not the same; ask again"
        return NotResumable(self.num_tokens, why)


OpenStream = Callable[[RouterDoor, inference_pb2.GenerateRequest, float], Any]


@dataclass(frozen=True, slots=True)
class GenerateOrder:
    """The arguments of one call. With an empty `request_id` the client chooses an id."""

    prompt: inference_pb2.Prompt
    sampling: SamplingParams
    model: str
    request_id: str
    deadline: Deadline


class GenerateCall:
    """Streams one answer, reopens a broken stream, and yields every token once."""

    def __init__(
        self,
        order: GenerateOrder,
        doors: RouterDoors,
        open_stream: OpenStream,
        failures: Failures,
    ) -> None:
        self._order, self._doors = order, doors
        self._open, self._failures = open_stream, failures
        self._request_id = order.request_id or make_request_id()
        self._num_sent = 0
        self._received = ReceivedTokens()
        self._sampling = order.sampling
        self._started: GenerateStarted | None = None  # held back until the first token
        self._scores = ScoreBook(1)  # of a prompt that is not to be scored, nothing is lacking
        self._has_started = False

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Yields started, the prompt's scores, token chunks, finished; or raises the error that
        ends the answer."""
        while True:
            try:
                async with aclosing(self._one_stream()) as stream:
                    async for event in stream:
                        yield event
                        if isinstance(event, GenerateFinished):
                            return
                raise ConnectionBroken("the stream ended before the answer did")
            except FerrymanError as error:
                await self._prepare_retry(error)

    async def _one_stream(self) -> AsyncGenerator[GenerateEvent, None]:
        request = self._request()
        self._num_sent += 1
        has_answered = False
        async with self._doors.asked() as door:
            call = self._open(door, request, self._order.deadline.seconds_left())
            try:
                with typed_client_errors():
                    async for message in call:
                        has_answered = True
                        for event in self._new_in(event_from_wire(message)):
                            yield event
            except FerrymanError as error:
                self._doors.failed(door, error, has_answered=has_answered)
                raise
            finally:
                call.cancel()

    def _request(self) -> inference_pb2.GenerateRequest:
        """The request as it is sent next: with what a router must know that never saw it."""
        order, started = self._order, self._started
        return inference_pb2.GenerateRequest(
            request_id=self._request_id,
            model=order.model,
            prompt=order.prompt,
            sampling=sampling_to_wire(self._sampling),
            resume_from_offset=self._received.reached,
            num_sent_before=self._num_sent,
            held_token_ids=token_ids_to_bytes(self._received.held),
            started_request_id=started.request_id if started and self._received.reached else "",
        )

    def _new_in(self, event: GenerateEvent) -> Iterator[GenerateEvent]:
        match event:
            case GenerateStarted():
                self._started = event
                # A repeated request must draw the same tokens.
                self._sampling = replace(self._sampling, seed=event.seed)
                self._expect_scores(event.prompt_tokens)
            case PromptScores():
                self._scores.add(event)
            case TokenChunk():
                if new := self._received.accept(event):
                    yield from self._on_progress()
                    yield new
            case GenerateFinished():
                yield from self._on_progress()
                yield self._received.finish(event)

    def _expect_scores(self, prompt_tokens: int) -> None:
        """Another stream repeats them from the first on, unless they were whole."""
        if self._sampling.prompt_logprobs is not None and self._received.is_empty:
            self._scores = ScoreBook(prompt_tokens)

    def _on_progress(self) -> Iterator[GenerateEvent]:
        if not self._scores.is_whole:
            raise CorruptState("tokens came before the prompt's log probabilities were whole")
        self._failures.reset()
        if not self._has_started:
            self._has_started = True
            if self._started is not None:
                yield self._started
            if parts := self._scores.parts():
                yield joined(parts)

    async def _prepare_retry(self, error: FerrymanError) -> None:
        """Prepares the next stream, or raises the error."""
        if isinstance(error, NotFound) and self._received.reached:
            self._received.restart()
            error = ConnectionBroken(str(error))
        elif isinstance(error, RequestIdInUse) and self._received.is_empty and self._num_sent == 1:
            return  # said to be sent before, it is given an id of its own
        elif isinstance(error, Stopping):
            self._received.restart()  # the router's successor does not know this answer
        elif not isinstance(error, ConnectionBroken):
            self._check_refusal(error)
        try:
            await self._failures.wait(error)
        except (ConnectionBroken, Stopping) as last:
            if self._received.is_empty:
                raise
            raise NotResumable(self._received.num_tokens, f"no router answers: {last}") from last

    def _check_refusal(self, error: FerrymanError) -> None:
        """Raises a failure that comes after the first token: it is final. An earlier one may be
        retried, but under a new id if the caller gave none: the old id keeps its failure."""
        if not self._received.is_empty:
            raise error
        if not self._order.request_id:
            self._request_id, self._num_sent = make_request_id(), 0

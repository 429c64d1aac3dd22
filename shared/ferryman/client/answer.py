"""One answer, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ferryman.client.calls import Deadline, Failures, told_apart
from ferryman.client.received import Received
from ferryman.client.retries import ConnectionBroken
from ferryman.errors import FerrymanError, NotFound
from ferryman.ids import make_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.inference import event_from_wire
from ferryman.wire.codec.request import sampling_to_wire
from ferryman.wire.public import (
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    TokenChunk,
)
from ferryman.wire.v1 import inference_pb2

OpenStream = Callable[[inference_pb2.GenerateRequest, float], Any]


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. An empty `request_id` leaves the choice of one to us."""

    prompt: inference_pb2.Prompt
    sampling: SamplingParams
    model: str
    request_id: str
    deadline: Deadline


class Answer:
    """Asks, asks again where the stream broke, and gives every token once."""

    def __init__(self, order: Order, open_stream: OpenStream, failures: Failures) -> None:
        self._order, self._open, self._failures = order, open_stream, failures
        self._request_id = order.request_id or make_request_id()
        self._received = Received()
        self._started: list[GenerateStarted] = []  # none or one: held back until a token comes
        self._has_begun = False

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Started, token chunks, finished; or the error that ends it."""
        while True:
            try:
                async with aclosing(self._one_stream()) as stream:
                    async for event in stream:
                        yield event
                        if isinstance(event, GenerateFinished):
                            return
                raise ConnectionBroken("the stream ended before the answer did")
            except FerrymanError as error:
                await self._bear(error)

    async def _one_stream(self) -> AsyncGenerator[GenerateEvent, None]:
        order = self._order
        request = inference_pb2.GenerateRequest(
            request_id=self._request_id,
            model=order.model,
            prompt=order.prompt,
            sampling=sampling_to_wire(order.sampling),
            resume_from_offset=self._received.reached,
        )
        call = self._open(request, order.deadline.seconds_left())
        try:
            with told_apart():
                async for message in call:
                    for event in self._new_in(event_from_wire(message)):
                        yield event
        finally:
            call.cancel()

    def _new_in(self, event: GenerateEvent) -> Iterator[GenerateEvent]:
        match event:
            case GenerateStarted():
                self._started = [event]
            case TokenChunk():
                if new := self._received.take(event):
                    yield from self._begun()
                    yield new
            case GenerateFinished():
                yield from self._begun()
                yield self._received.finish(event)

    def _begun(self) -> Iterator[GenerateEvent]:
        self._failures.forget()
        if not self._has_begun:
            self._has_begun = True
            yield from self._started

    async def _bear(self, error: FerrymanError) -> None:
        """Prepares the next stream, or raises the error."""
        if isinstance(error, NotFound) and self._received.reached:
            self._received.begin_anew()
            error = ConnectionBroken(str(error))
        elif not isinstance(error, ConnectionBroken):
            self._check_refusal(error)
        await self._failures.wait(error)

    def _check_refusal(self, error: FerrymanError) -> None:
        """A failure in mid-stream is the router's last word. One before the first token may be
        different next time, but not under the same id, to which it belongs."""
        if not self._received.is_empty:
            raise error
        if not self._order.request_id:
            self._request_id = make_request_id()

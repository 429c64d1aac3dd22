"""Answers on their way out: a stream of frames, or one body; both end when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ferryman.errors import Cancelled
from ferryman.wire.public import GenerateFinished
from ferryman_router.api.forms import DONE, Form
from ferryman_router.api.problems import broken_frame
from ferryman_router.api.shown import usage_object
from ferryman_router.desk import Desk
from ferryman_router.journey import Journey
from ferryman_router.transcript import Broken


@dataclass(frozen=True, slots=True)
class Answering:
    """The journeys that answer one call, one per choice, and how their answer looks."""

    desk: Desk
    journeys: Sequence[Journey]
    form: Form
    answer_id: str
    page_size: int

    def cancel(self, cause: str) -> None:
        for journey in self.journeys:
            self.desk.cancel(journey, cause)

    @property
    def broken(self) -> Broken | None:
        """The first failure, if any: one choice that fails, fails the call."""
        for journey in self.journeys:
            if isinstance(journey.transcript.end, Broken):
                return journey.transcript.end
        return None

    @property
    def finished(self) -> list[GenerateFinished]:
        ends = [journey.transcript.end for journey in self.journeys]
        return [end for end in ends if isinstance(end, GenerateFinished)]

    @property
    def is_over(self) -> bool:
        return all(journey.transcript.end is not None for journey in self.journeys)

    @property
    def has_begun(self) -> bool:
        return any(journey.transcript.chunks for journey in self.journeys)

    def usage(self) -> dict[str, object]:
        usages = [end.usage for end in self.finished]
        return usage_object(self.answer_id, usages, self.page_size)

    def body(self) -> bytes:
        choices = [
            self.form.choice(index, journey.transcript.chunks, end)
            for index, (journey, end) in enumerate(zip(self.journeys, self.finished, strict=True))
        ]
        return self.form.whole(choices, self.usage())


class Watch:
    """Wakes when a transcript has something new, or the client has gone."""

    def __init__(self, answering: Answering, gone: asyncio.Task[None]) -> None:
        self._answering, self._gone = answering, gone
        self._changed = asyncio.Event()
        gone.add_done_callback(lambda _: self._changed.set())
        for journey in answering.journeys:
            journey.transcript.listen(self._changed)

    async def news(self) -> None:
        """Waits for news; raises Cancelled when nobody listens any more."""
        await self._changed.wait()
        self._changed.clear()
        if self._gone.done():
            raise Cancelled("the client went away")

    def close(self) -> None:
        for journey in self._answering.journeys:
            journey.transcript.leave(self._changed)


@asynccontextmanager
async def watching(answering: Answering, receive: Receive) -> AsyncIterator[Watch]:
    """A block that does not end well ends the journeys too: none goes on for nobody."""
    gone = asyncio.ensure_future(_disconnected(receive))
    watch = Watch(answering, gone)
    try:
        yield watch
    except BaseException:
        answering.cancel("client_gone")
        raise
    finally:
        watch.close()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FrameStream(Response):
    """Server-sent events. The status is sent with the first frame, so a request that is refused
    before its first token still has a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, headers: dict[str, str], usage: bool) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        self._answering, self._includes_usage = answering, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with watching(self._answering, receive) as watch:
                await self._send_frames(watch, send)
        except Cancelled:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, watch: Watch, send: Send) -> None:
        answering, form = self._answering, self._answering.form
        reached = [0] * len(answering.journeys)
        is_open = [True] * len(answering.journeys)
        frames = [form.first(index) for index in range(len(reached))]
        while True:
            for index, journey in enumerate(answering.journeys):
                transcript = journey.transcript
                chunks, at = transcript.chunks, reached[index]
                if at < len(chunks):
                    frames += [form.tokens(index, chunk) for chunk in chunks[at:]]
                    reached[index] = len(chunks)
                if is_open[index] and isinstance(transcript.end, GenerateFinished):
                    is_open[index] = False
                    frames.append(form.last(index, transcript.end))
            is_over = not any(is_open) or answering.broken is not None
            if is_over:
                frames.append(self._end())
            if body := b"".join(frames):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if is_over:
                return
            frames = []
            await watch.news()

    def _end(self) -> bytes:
        if (broken := self._answering.broken) is not None:
            self._answering.cancel("another choice failed")
            return broken_frame(broken)
        usage = self._answering.form.usage(self._answering.usage()) if self._includes_usage else b""
        return usage + DONE

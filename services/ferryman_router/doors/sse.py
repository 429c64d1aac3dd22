"""Answers on their way out: a stream of frames, or one body; both end when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ferryman.cache.manifest import Exactness
from ferryman.errors import Cancelled
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.answers.logprobs import best_answers
from ferryman_router.answers.openai_responses import so_far, usage_object
from ferryman_router.answers.response_format import AnsweredChoice, ResponseFormat, ScoredPrompt
from ferryman_router.bodies.parsed_request import AnswerOptions
from ferryman_router.bodies.place import IgnoredField
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed

T = TypeVar("T")

# Token chunks that are made into frames before other streams have their turn.
MAX_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    """The requests that answer one call, one per choice, and how their answer looks.
    `num_candidates` of them, one after the other, have one prompt. The usage names the fields of
    the body that were `ignored`."""

    frontend: Frontend
    requests: Sequence[RequestRunner]
    form: ResponseFormat
    request_id: str
    options: AnswerOptions
    ignored: Sequence[IgnoredField] = ()

    def cancel(self, cause: str) -> None:
        for runner in self.requests:
            self.frontend.cancel(runner, cause)

    @property
    def broken(self) -> OutputFailed | None:
        """The first failure, if any: one choice that fails, fails the call."""
        for runner in self.requests:
            if isinstance(runner.output_log.end, OutputFailed):
                return runner.output_log.end
        return None

    @property
    def finished(self) -> list[GenerateFinished]:
        ends = [runner.output_log.end for runner in self.requests]
        return [end for end in ends if isinstance(end, GenerateFinished)]

    @property
    def is_over(self) -> bool:
        return all(runner.output_log.end is not None for runner in self.requests)

    @property
    def has_begun(self) -> bool:
        return any(runner.output_log.chunks for runner in self.requests)

    def usage(self) -> dict[str, object]:
        """A prompt counts once, however many answers it has."""
        usages = [
            end.usage if index % self.options.num_candidates == 0 else end.usage.of_output
            for index, end in enumerate(self.finished)
        ]
        # Known now: a request may have come before the first worker.
        page_size = self.frontend.ctx.fleet.page_size()
        exactness = Exactness.least(end.exactness for end in self.finished)
        ignored = [field.shown for field in self.ignored]
        parting = self.requests[0].asked.parting
        return usage_object(self.request_id, usages, exactness, page_size, ignored, parting)

    def scored_prompt(self, index: int) -> ScoredPrompt | None:
        """The prompt of a request, if it is scored: the first of those that share it has asked."""
        first = self.requests[index - index % self.options.num_candidates]
        if first.asked.params.prompt_logprobs is None:
            return None
        return ScoredPrompt(first.asked.token_ids, first.output_log.scores)

    def answered(self, index: int, end: GenerateFinished) -> AnsweredChoice:
        """All of a request's answer that is shown."""
        prompt = self.scored_prompt(index)
        if not self.options.has_output:
            return AnsweredChoice([], replace(end, text="", matched_stop=""), prompt)
        return AnsweredChoice(self.requests[index].output_log.chunks, end, prompt)

    @property
    def num_bytes(self) -> int:
        """About how large `body` is."""
        num_tokens = sum(runner.output_log.num_tokens for runner in self.requests)
        prompts = filter(None, map(self.scored_prompt, range(len(self.requests))))
        of_prompts = sum(prompt.num_bytes for prompt in prompts)
        return num_tokens * self.form.bytes_per_token + of_prompts

    def body(self) -> bytes:
        answers = [
            self.answered(index, end)
            for index, (_, end) in enumerate(zip(self.requests, self.finished, strict=True))
        ]
        if self.options.is_ranked:
            num_each, num_shown = self.options.num_candidates, self.options.num_samples
            prompts = [answers[at : at + num_each] for at in range(0, len(answers), num_each)]
            answers = [answer for prompt in prompts for answer in best_answers(prompt, num_shown)]
        return self.form.whole(answers, self.usage())


class ChangeWaiter:
    """Wakes when an output log has something new, or the client has gone."""

    def __init__(self, answering: ResponseGroup, gone: asyncio.Task[None]) -> None:
        self._answering, self._gone = answering, gone
        self._changed = asyncio.Event()
        gone.add_done_callback(lambda _: self._changed.set())
        for runner in answering.requests:
            runner.output_log.listen(self._changed)

    async def wait(self) -> None:
        """Waits for news; raises Cancelled when the client has gone."""
        await self._changed.wait()
        self._changed.clear()
        if self._gone.done():
            raise Cancelled("the client went away")

    def close(self) -> None:
        for runner in self._answering.requests:
            runner.output_log.leave(self._changed)


@asynccontextmanager
async def watching(answering: ResponseGroup, receive: Receive) -> AsyncIterator[ChangeWaiter]:
    """A block that does not end well ends the requests too: none goes on without a reader."""
    gone = asyncio.ensure_future(_disconnected(receive))
    watch = ChangeWaiter(answering, gone)
    try:
        yield watch
    except BaseException:
        answering.cancel("client_gone")
        raise
    finally:
        watch.close()
        gone.cancel()


async def status_known(answering: ResponseGroup, receive: Receive, *, until_over: bool) -> None:
    """Waits for the first token or the end, whichever decides the status."""
    if answering.is_over or (answering.has_begun and not until_over):
        return
    async with watching(answering, receive) as watch:
        while not answering.is_over and answering.broken is None:
            if answering.has_begun and not until_over:
                break
            await watch.wait()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises Cancelled, and ends it, when the client leaves before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client went away")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FrameStream(Response):
    """Server-sent events. The status is sent with the first frame, so a request that is refused
    before its first token still has a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, answering: ResponseGroup, headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"})
        self._answering, self._options = answering, answering.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with watching(self._answering, receive) as watch:
                await self._send_frames(watch, send)
        except Cancelled:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, watch: ChangeWaiter, send: Send) -> None:
        answering, form = self._answering, self._answering.form
        reached = [0] * len(answering.requests)
        is_open = [True] * len(answering.requests)
        frames = [self._with_usage(index, form.first(index)) for index in range(len(reached))]
        at_once = max(1, MAX_CHUNKS // len(reached))
        while True:
            is_behind = False
            for index, runner in enumerate(answering.requests):
                output_log = runner.output_log
                chunks, at = output_log.chunks, reached[index]
                if at < len(chunks):
                    if at == 0:
                        frames.append(self._with_usage(index, await self._scored(index)))
                    reached[index] = min(len(chunks), at + at_once)
                    frames += [self._frame(index, chunk) for chunk in chunks[at : reached[index]]]
                if reached[index] < len(chunks):
                    is_behind = True
                elif is_open[index] and isinstance(output_log.end, GenerateFinished):
                    is_open[index] = False
                    answer = answering.answered(index, output_log.end)
                    last = form.last(index, answer)
                    frames.append(self._with_usage(index, last, output_log.num_tokens))
            is_over = not is_behind and (not any(is_open) or answering.broken is not None)
            if is_over:
                frames.append(self._end())
            if body := b"".join(frames):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if is_over:
                return
            frames = []
            # A client that reads again after a pause has much to receive; others have their turn
            # in between.
            await (asyncio.sleep(0) if is_behind else watch.wait())

    async def _scored(self, index: int) -> bytes:
        """Encodes the scores of a prompt off the event loop: they may have megabytes."""
        if (prompt := self._answering.scored_prompt(index)) is None:
            return b""
        return await asyncio.to_thread(self._answering.form.scored, index, prompt)

    def _frame(self, index: int, chunk: TokenChunk) -> bytes:
        if not self._options.has_output:
            return b""
        num_tokens = chunk.offset + len(chunk.token_ids)
        return self._with_usage(index, self._answering.form.tokens(index, chunk), num_tokens)

    def _with_usage(self, index: int, frames: bytes, num_tokens: int = 0) -> bytes:
        if not frames or not self._options.includes_usage_always:
            return frames
        counts = so_far(self._answering.requests[index].asked.prompt_len, num_tokens)
        return frames.replace(b"}\n\n", b',"usage":' + counts + b"}\n\n")

    def _end(self) -> bytes:
        if (broken := self._answering.broken) is not None:
            self._answering.cancel("another choice failed")
            return self._answering.form.failure(broken)
        return self._answering.form.end(self._answering.usage())

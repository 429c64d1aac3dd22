"""Where requests are taken in, whichever door they come through: checked, tokenized, sent off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest, QueueFull, Unavailable
from ferryman.runtime.background import Background
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt
from ferryman_router.asked import Ask, Asked, Sampling
from ferryman_router.journey import Journey
from ferryman_router.journeys import Journeys
from ferryman_router.policy import longest_request
from ferryman_router.surroundings import Surroundings
from ferryman_router.transcript import Transcript

QUICK_CHARS = 2000


@dataclass(frozen=True, slots=True)
class DeskLimits:
    """`max_in_flight` counts requests under way, `linger_seconds` is the patience with readers
    that may come back."""

    max_in_flight: int = 4096
    linger_seconds: float = 0.75


class Desk:
    """Opens journeys and ends them when nobody listens any more."""

    def __init__(
        self, around: Surroundings, journeys: Journeys, background: Background, limits: DeskLimits
    ) -> None:
        self._around, self._journeys = around, journeys
        self._background, self._limits = background, limits
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_draining = False

    @property
    def around(self) -> Surroundings:
        return self._around

    @property
    def journeys(self) -> Journeys:
        return self._journeys

    async def open(self, ask: Ask) -> Journey:
        """Starts a request; raises InvalidRequest, QueueFull or Unavailable before it begins."""
        self._check_room()
        asked = await self.check(ask)
        self._check_room()  # others came while this one was tokenized
        journey = Journey(asked, self._around)
        self._journeys.add(journey)
        self._tasks[asked.request_id] = self._background.start(self._run(journey))
        return journey

    def _check_room(self) -> None:
        if self.is_draining:
            raise Unavailable("this router is draining")
        if len(self._journeys) >= self._limits.max_in_flight:
            seconds = self._around.dispatcher.retry_seconds()
            raise QueueFull(f"{len(self._journeys)} requests are under way", seconds)

    async def check(self, ask: Ask) -> Asked:
        """The ask with its token ids; raises InvalidRequest, naming what to change."""
        arrived, model = self._around.clock(), self._around.model
        model.check_name(ask.model)
        token_ids = await self.tokenize(ask.prompt)
        params = self._params(ask.sampling, len(token_ids))
        stop = model.stop_token_ids(params.stop_token_ids, ignore_eos=params.ignore_eos)
        return Asked(ask.caller, token_ids, params, stop, arrived)

    async def tokenize(self, prompt: Prompt) -> TokenIds:
        """Short prompts at once, long ones in a thread: the loop has other streams to serve."""
        if _num_chars(prompt) <= QUICK_CHARS:
            return self._around.model.token_ids(prompt)
        return await asyncio.to_thread(self._around.model.token_ids, prompt)

    def cancel(self, journey: Journey, cause: str) -> None:
        """Ends a request whose client is gone; one that has ended absorbs this."""
        task = self._tasks.get(journey.asked.request_id)
        if task is not None and journey.transcript.end is None:
            journey.because(cause)
            task.cancel()

    @contextmanager
    def listening(self, journey: Journey, changed: asyncio.Event) -> Iterator[Transcript]:
        """A reader that may come back: when the last one leaves, the request lingers a little."""
        journey.transcript.listen(changed)
        try:
            yield journey.transcript
        finally:
            journey.transcript.leave(changed)
            if journey.transcript.end is None and not journey.transcript.num_listeners:
                self._background.outlive(self._linger(journey))

    async def drained(self) -> None:
        """Refuses new requests and waits until those under way have ended."""
        self.is_draining = True
        while tasks := tuple(self._tasks.values()):
            await asyncio.wait(tasks)

    async def _run(self, journey: Journey) -> None:
        try:
            await journey.run()
        finally:
            self._tasks.pop(journey.asked.request_id, None)
            self._journeys.end(journey, self._around.clock())
            self._around.dispatcher.serve()

    async def _linger(self, journey: Journey) -> None:
        await asyncio.sleep(self._limits.linger_seconds)
        if not journey.transcript.num_listeners:
            self.cancel(journey, "client_gone")

    def _params(self, sampling: Sampling, prompt_len: int) -> SamplingParams:
        """Checks that prompt and output fit the model, and some pair of workers."""
        params, model = sampling.params, self._around.model
        limit = min(model.max_len, longest_request(self._around.fleet) or model.max_len)
        room = limit - prompt_len
        if room < 1:
            message = f"the prompt has {prompt_len} tokens; at most {limit - 1} can be served"
            raise InvalidRequest(message, "prompt")
        if sampling.is_open_ended:
            return replace(params, max_tokens=room)
        if params.max_tokens > room:
            message = (
                f"prompt and max_tokens ask for {prompt_len} + {params.max_tokens} tokens;"
                f" at most {limit} can be served"
            )
            raise InvalidRequest(message, "max_tokens")
        return params


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(turns):
            return sum(len(turn.content) for turn in turns)
    return 0

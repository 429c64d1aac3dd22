"""Takes in the requests of all doors: checks, tokenizes and starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ferryman.errors import ContextLengthExceeded, InvalidRequest, QueueFull, Stopping
from ferryman.grammar.compiler import BackgroundCompiler
from ferryman.runtime.background import Background
from ferryman.schedule.prompt_scores import check_num_entries
from ferryman.schedule.request import SamplingParams
from ferryman.settings.router import LimitSettings
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.place import BodyRules
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.body_intake import LARGE_BYTES, Intake
from ferryman_router.intake.reader import (
    body_message,
    body_of,
    parse_body,
    prompt_message,
    tokens_of,
)
from ferryman_router.request.context import RouterContext
from ferryman_router.request.request_log import check_goes_on
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.response import OutputLog
from ferryman_router.routing.generate_request import (
    GenerateRequest,
    RequestedSampling,
    TokenizedRequest,
    kept_tokens,
)
from ferryman_router.routing.recent_prompts import RecentPrompts
from ferryman_router.routing.routing_policy import longest_request

TURN_BYTES = 32  # what a turn of a chat takes besides its words


class Frontend:
    """Opens requests and ends them when their last reader has gone."""

    def __init__(
        self,
        ctx: RouterContext,
        requests: RequestTable,
        background: Background,
        intake: Intake,
        limits: LimitSettings,
        grammars: BackgroundCompiler,
    ) -> None:
        self.ctx, self.requests, self.intake = ctx, requests, intake
        self._background, self._limits, self._grammars = background, limits, grammars
        self.recent = RecentPrompts(limits.compared_prompts, ctx.model.tokenizer.spelt)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_draining = False

    async def read_body(
        self, api: Api, parts: Sequence[bytes], *, within: float, rules: BodyRules
    ) -> ParsedRequest:
        """The request in a body, in so many seconds. The prompts of a large one are token ids
        already."""
        num_bytes = sum(map(len, parts))
        if num_bytes > LARGE_BYTES:
            self.check_room()
            message = body_message(api, parts, self.max_prompt_len, rules)
            return body_of(await self.intake.ask(message, within=within))
        parse = partial(parse_body, self.ctx.model, api, b"".join(parts), rules)
        return await self.intake.run(num_bytes, parse, within=within)

    async def open(self, ask: GenerateRequest) -> RequestRunner:
        """Starts a request; raises InvalidRequest, NotFound (it cannot be taken over), QueueFull,
        RateLimited or Stopping before it begins."""
        self.check_room()
        asked = await self.check(ask)
        self.check_room()  # others came while this one was tokenized
        check_goes_on(asked, self.ctx.model.vocab)
        asked = replace(asked, parting=self.recent.nearest(asked))
        runner = RequestRunner(asked, self.ctx)
        self.requests.check_free(asked.request_id)
        self.ctx.quotas.admit(asked.tenant.name, asked.prompt_len, self.ctx.clock())
        self.recent.add(asked)
        self.requests.add(runner)
        self._tasks[asked.request_id] = self._background.start(self._run(runner))
        return runner

    def check_room(self) -> None:
        """Raises QueueFull or Stopping, before the cost of reading a request is spent for
        nothing."""
        if self.is_draining:
            raise Stopping("this router is ending; ask again when there is another one")
        if len(self.requests) >= self._limits.max_in_flight:
            seconds = self.ctx.dispatcher.retry_seconds()
            raise QueueFull(f"{len(self.requests)} requests are under way", seconds)

    async def check(self, ask: GenerateRequest) -> TokenizedRequest:
        """The ask with its token ids; raises InvalidRequest, naming what to change."""
        model = self.ctx.model
        name = model.check_name(ask.model)
        left = ask.arrived + ask.caller.deadline_seconds - self.ctx.clock()
        kept = kept_tokens(ask.options.truncate, ask.sampling, self.max_prompt_len)
        prompt = await self.tokenize(ask.prompt, kept, within=left)
        params = model.with_bad_words(
            self._params(ask.sampling, len(prompt.token_ids)), ask.sampling.bad_words
        )
        left = ask.arrived + ask.caller.deadline_seconds - self.ctx.clock()
        # The workers compile it again. Here a caller gets the error before anything is placed.
        await self._grammars.checked(params.grammar, within=left)
        stop = model.stop_token_ids(params.stop_token_ids, ignore_eos=params.ignore_eos)
        # The text is not kept for as long as the request lives: token ids are a prompt too.
        request = replace(ask, model=name, prompt=prompt)
        adapter = model.adapters.get(name, "")
        return TokenizedRequest(request, prompt, params, stop, adapter)

    async def tokenize(self, prompt: Prompt, kept: int = 0, *, within: float) -> LocatedPrompt:
        """Token ids of a prompt that fits, or of the end that is `kept`, in so many seconds; raises
        as `check` does."""
        num_bytes, max_tokens = _size(prompt), self.max_prompt_len
        if num_bytes > LARGE_BYTES and not isinstance(prompt, TokenPrompt):
            message = prompt_message(prompt, max_tokens, kept)
            (tokenized,) = tokens_of(await self.intake.ask(message, within=within))
            return tokenized
        encode = partial(self.ctx.model.tokenized, prompt, max_tokens, kept)
        return await self.intake.run(num_bytes, encode, within=within)

    def cancel(self, runner: RequestRunner, cause: str) -> None:
        """Ends a request whose client is gone; one that has ended absorbs this."""
        task = self._tasks.get(runner.asked.request_id)
        if task is not None and runner.output_log.end is None:
            runner.set_cancel_cause(cause)
            task.cancel()

    @contextmanager
    def listening(self, runner: RequestRunner, changed: asyncio.Event) -> Iterator[OutputLog]:
        """A reader that may come back: when the last one leaves, the request lingers a little."""
        runner.output_log.listen(changed)
        try:
            yield runner.output_log
        finally:
            runner.output_log.leave(changed)
            if runner.output_log.end is None and not runner.output_log.num_listeners:
                self._background.start(self._linger(runner, runner.output_log.num_visits))

    async def drained(self) -> None:
        """Refuses new requests and waits until those under way have ended."""
        self.is_draining = True
        while tasks := tuple(self._tasks.values()):
            await asyncio.wait(tasks)

    async def end_all(self, error: Stopping) -> None:
        """Ends with an error what could not finish in time: its readers still get the error."""
        self.is_draining = True
        for runner in self.requests:
            runner.stopped_by(error)
        for task in self._tasks.values():
            task.cancel()
        await self.drained()

    async def _run(self, runner: RequestRunner) -> None:
        try:
            await runner.run()
        finally:
            self._tasks.pop(runner.asked.request_id, None)
            now, num_tokens = self.ctx.clock(), runner.output_log.num_tokens
            self.ctx.quotas.ended(runner.asked.tenant.name, num_tokens, now)
            self.requests.end(runner, now, self.ctx.fleet.page_size())
            self.ctx.dispatcher.serve()

    async def _linger(self, runner: RequestRunner, num_visits: int) -> None:
        await asyncio.sleep(self._limits.linger_seconds)
        # With a later visit, the patience is counted from the end of that one.
        if not runner.output_log.num_listeners and runner.output_log.num_visits == num_visits:
            self.cancel(runner, "client_gone")

    def _params(self, sampling: RequestedSampling, prompt_len: int) -> SamplingParams:
        """Checks that prompt and output fit the model, and some pair of workers."""
        # Clients know an overflow by the words that OpenAI has for it; Anthropic's read the
        # numbers in `tokens > maximum` and in `exceed context limit`.
        params, limit = sampling.params, self._max_len()
        if params.prompt_logprobs is not None:
            check_num_entries(params.prompt_logprobs, prompt_len)
        room = limit - prompt_len
        if room < 1:
            message = (
                f"prompt is too long: {prompt_len} tokens > {limit - 1} maximum;"
                f" this model's maximum context length is {limit} tokens, with the answer"
            )
            raise ContextLengthExceeded(message, "prompt")
        if sampling.is_open_ended:
            params = replace(params, max_tokens=self._open_end(params.rules.min_tokens, room))
        if params.rules.min_tokens > params.max_tokens:
            message = f"min_tokens is more than the {params.max_tokens} tokens there may be"
            raise InvalidRequest(message, "min_tokens")
        if params.max_tokens > room:
            message = (
                f"this model's maximum context length is {limit} tokens; input length and"
                f" `max_tokens` exceed context limit: {prompt_len} + {params.max_tokens} > {limit},"
                " decrease input length or `max_tokens` and try again"
            )
            raise ContextLengthExceeded(message, "max_tokens")
        return params

    def _open_end(self, min_tokens: int, room: int) -> int:
        """The most tokens of an answer whose caller named no limit."""
        usual = self._limits.default_max_tokens or room
        return min(room, max(usual, min_tokens))

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt, with room for one token of output."""
        return self._max_len() - 1

    def _max_len(self) -> int:
        """Tokens of the longest request, prompt and output, that is served now."""
        max_len = self.ctx.model.max_len
        return min(max_len, longest_request(self.ctx.fleet) or max_len)


def _size(prompt: Prompt) -> int:
    """About how much there is to read."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(turns, _, variables):
            words = sum(len(turn.role) + len(turn.content) + len(turn.more) for turn in turns)
            return TURN_BYTES * len(turns) + words + len(variables)
    return 0

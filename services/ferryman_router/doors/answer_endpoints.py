"""The endpoints that generate: chats, completions, responses and messages.

A call is answered by one request for each answer to each of its prompts. Answers to one prompt
share its state. So the first one of each prompt goes ahead, with the number of siblings it will
have. They are opened when its first token has come: the prompt's pages are in the caches then, and
the worker that decodes the first one has kept the prompt's end for them.

Nothing waits for a sibling at a worker. Here they wait for the first one alone, which begins or
ends by the deadline that they all have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferryman.cache.manifest import Kind
from ferryman.errors import ContextLengthExceeded, FerrymanError, RequestIdInUse
from ferryman.runtime.access import MetricsGuard
from ferryman.text.tokenizer import NO_TOKENS
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman_router.answers.answer_formats import answer_format
from ferryman_router.answers.answer_grammar import with_calls
from ferryman_router.bodies.parsed_request import AnswerOptions, ParsedRequest
from ferryman_router.bodies.place import AS_USUAL, BodyRules, IgnoredField
from ferryman_router.bodies.tool_fields import check_offered
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.auth import Authenticator
from ferryman_router.doors.cors import NO_ORIGINS, CorsPolicy
from ferryman_router.doors.request_body import body_parts
from ferryman_router.doors.sse import FrameStream, ResponseGroup, status_known, while_connected
from ferryman_router.intake.body_intake import BodyMemory
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed
from ferryman_router.routing.generate_request import (
    Caller,
    GenerateRequest,
    PromptOptions,
    PromptSharing,
    TextOptions,
)
from ferryman_router.served_model import ServedModel

MAX_BODY_BYTES = 8 << 20
MAX_IGNORED_CHARS = 1024  # of a header; proxies take a few KiB of all headers together


# By endpoint: its own name of the field that is too long.
_OWN_NAMES: Mapping[Api, Mapping[str, str]] = {
    Api.COMPLETION: {},
    Api.CHAT: {"prompt": "messages"},
    Api.RESPONSES: {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"},
    Api.MESSAGES: {"prompt": "messages"},
}


@dataclass(frozen=True, slots=True)
class HttpDeps:
    """The endpoints' parts. `readiness` gives the answer of `/ready`, and whether it is a
    yes."""

    frontend: Frontend
    callers: Authenticator
    readiness: Callable[[], tuple[bool, Mapping[str, Any]]]
    memory: BodyMemory
    syntax: OutputSyntax
    readers: MetricsGuard
    max_body_bytes: int = MAX_BODY_BYTES
    cors: CorsPolicy = NO_ORIGINS
    rules: BodyRules = AS_USUAL
    wall_clock: Callable[[], float] = time.time

    async def body_parts(
        self, request: Request, grow: Callable[[int], None], within: float
    ) -> list[bytes]:
        """The body of a call; raises as `request_body.body_parts` does."""
        return await body_parts(
            request,
            self.cors,
            self.frontend.intake,
            max_bytes=self.max_body_bytes,
            grow=grow,
            within=within,
        )


async def answer(deps: HttpDeps, api: Api, request: Request) -> Response:
    """Reads, checks, starts, and answers when there is something to send."""
    try:
        return await _answer(deps, api, request)
    except ContextLengthExceeded as error:
        error.param = _OWN_NAMES[api].get(error.param, error.param)
        raise


async def _answer(deps: HttpDeps, api: Api, request: Request) -> Response:
    frontend, caller = deps.frontend, deps.callers.authenticate(headers_of(request))
    with ExitStack() as reading:
        grow = reading.enter_context(deps.memory.holding())
        within = caller.deadline_seconds
        parts = await deps.body_parts(request, grow, within)
        arrived = frontend.ctx.clock()
        reads = frontend.read_body(api, parts, within=within, rules=deps.rules)
        body = await while_connected(request.receive, reads)
        body = await _offered(deps, body, within=within)
        first = _first_request(deps, body, caller, arrived)
        begins = partial(_begun, deps, body, request, tokenized=reading.close)
        try:
            group = await begins(replace(first, caller=frontend.requests.named(caller)))
        except RequestIdInUse:
            # Another router has a request of that name. No byte of the answer has been sent yet.
            group = await begins(first)
    headers = {"x-request-id": request.headers.get("x-request-id") or group.request_id}
    headers |= ignored_headers(frontend, body.ignored)
    if api is Api.MESSAGES:
        headers["request-id"] = headers["x-request-id"]
    if body.is_stream:
        return FrameStream(group, headers)
    # Off the event loop: with log probabilities an answer has megabytes.
    whole = await frontend.intake.run(group.num_bytes, group.body, within=caller.deadline_seconds)
    return Response(whole, 200, headers, "application/json")


def ignored_headers(frontend: Frontend, ignored: Sequence[IgnoredField]) -> dict[str, str]:
    """The header that names the fields without effect, none if there are none. Counts them."""
    for field in ignored:
        frontend.ctx.metrics.count_ignored(field.label)
    names = ", ".join(field.plain for field in ignored)
    return {"x-ferryman-ignored": names[:MAX_IGNORED_CHARS]} if names else {}


def headers_of(request: Request) -> dict[str, str]:
    """The headers of a call; the last one of a name counts."""
    return {name.lower(): value for name, value in request.headers.items()}


def _first_request(
    deps: HttpDeps, body: ParsedRequest, caller: Caller, arrived: float
) -> GenerateRequest:
    """The request for the first answer to the first prompt of a body."""
    text, answer = _text_options(deps, body), body.answer
    options = PromptOptions(answer.truncate, answer.cache_salt, answer.priority)
    prompt, sampling = body.prompts[0], body.sampling
    names = tuple(field.plain for field in body.ignored)
    is_chat = body.api is not Api.COMPLETION
    return GenerateRequest(
        caller,
        body.model,
        prompt,
        sampling,
        arrived,
        text,
        options,
        ignored=names,
        is_chat=is_chat,
    )


async def _offered(deps: HttpDeps, body: ParsedRequest, *, within: float) -> ParsedRequest:
    """The body as this model can answer it. Raises InvalidRequest for tools that it cannot."""
    tokenizer, grammar = deps.frontend.ctx.model.tokenizer, body.sampling.params.grammar
    template = tokenizer.chat_template.tool_source if tokenizer.chat_template else ""
    check_offered(body.answer.tools, deps.syntax, template)
    # A large schema is checked once more as a part of another grammar.
    num_bytes = 0 if grammar is None else len(grammar.text)
    work = partial(with_calls, body, deps.syntax, tokenizer)
    return await deps.frontend.intake.run(num_bytes, work, within=within)


def _text_options(deps: HttpDeps, body: ParsedRequest) -> TextOptions:
    """The control tokens that are shown, or that a parser needs to see."""
    tokenizer, answer = deps.frontend.ctx.model.tokenizer, body.answer
    if answer.shows_special:
        return TextOptions(tokenizer.control_tokens, answer.includes_stop)
    tokens = NO_TOKENS if body.api is Api.COMPLETION else deps.syntax.special(answer.tools.use)
    return TextOptions(tokens, answer.includes_stop)


async def _begun(
    deps: HttpDeps,
    body: ParsedRequest,
    request: Request,
    first: GenerateRequest,
    tokenized: Callable[[], None],
) -> ResponseGroup:
    """The requests of a body, named after the `first`, when the status of the answer is known.
    Calls `tokenized` once its text is not needed any more. Raises the error of a request that
    failed before anything could be sent."""
    frontend, caller = deps.frontend, first.caller
    requests = await while_connected(request.receive, _open(frontend, body, first))
    tokenized()
    echoes: Sequence[str] = ()
    runners = body.answer.shown(requests)
    if body.answer.echoes:
        texts = partial(_prompt_texts, runners, frontend.ctx.model, body.answer)
        num_bytes = 4 * sum(runner.asked.prompt_len for runner in runners)
        echoes = await frontend.intake.run(num_bytes, texts, within=caller.deadline_seconds)
    form = answer_format(
        body,
        runners,
        frontend.ctx.model,
        deps.syntax,
        request_id=caller.request_id,
        created=int(deps.wall_clock()),
        echoes=echoes,
        compare=frontend.recent.with_named,
        page_size=frontend.ctx.fleet.page_size,
    )
    group = ResponseGroup(frontend, requests, form, caller.request_id, body.answer, body.ignored)
    # Before the first token of a stream, or the end of a whole answer, a failure has a status.
    await status_known(group, request.receive, until_over=not body.is_stream)
    if group.broken is not None and not (body.is_stream and group.has_begun):
        group.cancel("another choice failed")
        raise group.broken.error
    return group


def _prompt_texts(
    requests: Sequence[RequestRunner], model: ServedModel, answer: AnswerOptions
) -> list[str]:
    """The prompts as their tokens spell them."""
    skips = not answer.shows_special
    ids = [runner.asked.token_ids.tolist() for runner in requests]
    return [model.tokenizer.decode(token_ids, skip_special_tokens=skips) for token_ids in ids]


# One request for each answer to each prompt.


async def _open(
    frontend: Frontend, body: ParsedRequest, first: GenerateRequest
) -> list[RequestRunner]:
    """All requests, prompt by prompt. When one is refused, or the client leaves, none goes on."""
    num_each = body.answer.num_candidates
    firsts = range(0, len(body.prompts) * num_each, num_each)
    opened: dict[int, RequestRunner] = {}

    async def open_one(index: int, sharing: PromptSharing) -> None:
        await asyncio.sleep(0)  # each is quick, or elsewhere; many together are neither
        request = _request(frontend, body, first, index)
        opened[index] = await frontend.open(replace(request, sharing=sharing))

    try:
        for index in firsts:
            await open_one(index, PromptSharing(num_siblings=num_each - 1))
        if num_each > 1:
            for index in firsts:
                sharing = await _shared_by(frontend, opened[index])
                for sibling in range(index + 1, index + num_each):
                    await open_one(sibling, sharing)
    except (FerrymanError, asyncio.CancelledError):
        for runner in opened.values():
            frontend.cancel(runner, "another choice failed")
        raise
    return [opened[index] for index in sorted(opened)]


def _request(
    frontend: Frontend, body: ParsedRequest, first: GenerateRequest, index: int
) -> GenerateRequest:
    """The request for one of a body's answers; `first` is that for the first one."""
    num_each = body.answer.num_candidates
    prompt, sample = divmod(index, num_each)
    caller = first.caller
    if len(body.prompts) * num_each > 1:
        caller = frontend.requests.numbered(caller, index)
    sampling = body.sampling.sample(sample)
    return replace(first, caller=caller, prompt=body.prompts[prompt], sampling=sampling)


async def _shared_by(frontend: Frontend, first: RequestRunner) -> PromptSharing:
    """The state that later answers to a prompt share with the first one, once there is some."""
    if _has_state_to_share(frontend, first):
        await _until_begun(first)
    return PromptSharing(decode=first.decode_worker)


def _has_state_to_share(frontend: Frontend, first: RequestRunner) -> bool:
    """Whether it is worth a wait: a page of the prompt, a recurrent state, or its scores, which
    the later answers show too."""
    if first.asked.params.prompt_logprobs is not None:
        return True
    state = frontend.ctx.fleet.state()
    if state is None or Kind.RECURRENT in state.kinds:
        return True
    return first.asked.prompt_len >= state.page_size


async def _until_begun(runner: RequestRunner) -> None:
    """Waits for its first token. Raises the error of a request that fails before."""
    log, changed = runner.output_log, asyncio.Event()
    log.listen(changed)
    try:
        while not log.chunks and log.end is None:
            await changed.wait()
            changed.clear()
    finally:
        log.leave(changed)
    if isinstance(log.end, OutputFailed) and not log.chunks:
        raise log.end.error

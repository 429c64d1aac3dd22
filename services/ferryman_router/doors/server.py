"""The HTTP door: endpoints of OpenAI and Anthropic, and those by which the router is watched."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from ferryman.errors import (
    Cancelled,
    FerrymanError,
    InvalidRequest,
    NotFound,
    RequestIdInUse,
    TooLarge,
)
from ferryman.runtime.access import MetricsGuard
from ferryman.runtime.metrics import CONTENT_TYPE
from ferryman.text.tokenizer import NO_TOKENS
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman_router.answers.answer_formats import answer_format, answer_id
from ferryman_router.answers.errors import (
    ErrorBody,
    anthropic_error,
    openai_error,
    problem_response,
)
from ferryman_router.answers.response_format import as_json
from ferryman_router.bodies.body_kinds import BODY_KINDS
from ferryman_router.bodies.json_body import parse_object
from ferryman_router.bodies.parsed_request import AnswerOptions, ParsedRequest
from ferryman_router.bodies.tool_fields import check_offered
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.auth import Authenticator, correlation_id
from ferryman_router.doors.choices import open_choices
from ferryman_router.doors.cors import NO_ORIGINS, CorsPolicy
from ferryman_router.doors.openapi import document
from ferryman_router.doors.sse import FrameStream, ResponseGroup, watching, while_connected
from ferryman_router.doors.text_endpoints import counted, detokenized, tokenized
from ferryman_router.intake.body_intake import LARGE_BYTES, BodyMemory
from ferryman_router.intake.frontend import Frontend
from ferryman_router.intake.reader import body_message, body_of
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.routing.generate_request import (
    Caller,
    GenerateRequest,
    PromptOptions,
    PromptSharing,
    TextOptions,
)
from ferryman_router.served_model import ServedModel

MAX_BODY_BYTES = 8 << 20
ONE_MODEL = "/v1/models/"
MESSAGES = "/v1/messages"

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpDeps:
    """The endpoints' parts. `readiness` gives the answer of `/ready`, and whether it is a yes."""

    frontend: Frontend
    callers: Authenticator
    readiness: Callable[[], tuple[bool, Mapping[str, Any]]]
    memory: BodyMemory
    syntax: OutputSyntax
    readers: MetricsGuard
    max_body_bytes: int = MAX_BODY_BYTES
    cors: CorsPolicy = NO_ORIGINS
    wall_clock: Callable[[], float] = time.time


class HttpApp:
    """The ASGI application. No layer stands between a response and the server: errors become
    responses here, and each response is counted once, when its status is known."""

    def __init__(self, deps: HttpDeps) -> None:
        self._deps = deps
        self._endpoints: Mapping[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", partial(_answer, deps, Api.CHAT)),
            "/v1/completions": ("POST", partial(_answer, deps, Api.COMPLETION)),
            "/v1/responses": ("POST", partial(_answer, deps, Api.RESPONSES)),
            MESSAGES: ("POST", partial(_answer, deps, Api.MESSAGES)),
            f"{MESSAGES}/count_tokens": ("POST", partial(self._text, counted)),
            "/tokenize": ("POST", partial(self._text, tokenized)),
            "/detokenize": ("POST", partial(self._text, detokenized)),
            "/v1/models": ("GET", self._models),
            "/version": ("GET", self._version),
            "/ping": ("GET", self._health),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
        }
        methods = {path: method for path, (method, _) in self._endpoints.items()}
        methods[f"{ONE_MODEL}{{id}}"] = "GET"
        self._document = as_json(document(methods, version("ferryman")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, bug = Request(scope, receive), None
        refusal = partial(problem_response, form=_error_form(scope["path"]))
        try:
            response = await self._respond(request)
        except FerrymanError as error:
            response = refusal(error, headers=_named(request))
        except ClientDisconnect:  # while it sent its body: ordinary, and never read
            response = refusal(Cancelled("the client went away"))
        except Exception as error:
            response, bug = refusal(FerrymanError("internal")), error
        self._deps.cors.mark(response, request.headers)
        self._deps.frontend.ctx.metrics.responses.labels("http", str(response.status_code)).inc()
        await response(scope, receive, send)
        if bug is not None:
            raise bug  # the server logs the traceback

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]  # decoded, and without the query
        if (answer := self._deps.cors.preflight(request.method, request.headers)) is not None:
            return answer
        endpoint: Endpoint
        if path.startswith(ONE_MODEL):
            method, endpoint = "GET", self._model
        elif path in self._endpoints:
            method, endpoint = self._endpoints[path]
        elif path.rstrip("/") in self._endpoints:
            return RedirectResponse(request.url.replace(path=path.rstrip("/")))
        else:
            return problem_response(NotFound(f"{request.method} {path}: Not Found"))
        if method != request.method:
            wrong = InvalidRequest(f"{request.method} {path}: Method Not Allowed")
            return problem_response(wrong, 405, {"allow": method}, form=_error_form(path))
        return await endpoint(request)

    async def _models(self, request: Request) -> Response:
        self._deps.callers.authenticate(_headers(request))
        names = self._deps.frontend.ctx.model.names
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        self._deps.callers.authenticate(_headers(request))
        asked = request.scope["path"].removeprefix(ONE_MODEL)
        return JSONResponse(self._card(self._deps.frontend.ctx.model.check_name(asked)))

    def _card(self, name: str) -> dict[str, Any]:
        model = self._deps.frontend.ctx.model
        return {
            "id": name,
            "object": "model",
            "created": model.created_unix_seconds,
            "owned_by": "ferryman",
            "root": name,
            "parent": None if name == model.model_id else model.model_id,
            "max_model_len": model.max_len,
        }

    async def _text(
        self,
        answer: Callable[[Frontend, dict[str, Any], float], Awaitable[dict[str, Any]]],
        request: Request,
    ) -> Response:
        frontend = self._deps.frontend
        within = self._deps.callers.authenticate(_headers(request)).deadline_seconds
        with self._deps.memory.holding() as grow:
            parts = await _read_body(request, self._deps.max_body_bytes, grow)
            raw = b"".join(parts)
            parse = partial(parse_object, raw)
            body = await frontend.intake.run(len(raw), parse, within=within)
            return JSONResponse(await answer(frontend, body, within))

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("ferryman")})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        is_ready, report = self._deps.readiness()
        body = dict(report)
        if not self._deps.readers.may_read(request.headers.getlist("authorization")):
            body = {"status": report["status"]}
        return JSONResponse(body, 200 if is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        self._deps.readers.check("/metrics", request.headers.getlist("authorization"))
        text = self._deps.frontend.ctx.metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _error_form(path: str) -> ErrorBody:
    """The form that clients of an endpoint know."""
    return anthropic_error if path.startswith(MESSAGES) else openai_error


async def _answer(deps: HttpDeps, api: Api, request: Request) -> Response:
    """Reads, checks, starts, and answers when there is something to send."""
    frontend, caller = deps.frontend, deps.callers.authenticate(_headers(request))
    with ExitStack() as reading:
        grow = reading.enter_context(deps.memory.holding())
        parts = await _read_body(request, deps.max_body_bytes, grow)
        arrived = frontend.ctx.clock()
        reads = _read(frontend, api, parts, caller.deadline_seconds)
        body = await while_connected(request.receive, reads)
        first = _first_request(deps, body, caller, arrived)
        begins = partial(_begun, deps, body, request, tokenized=reading.close)
        try:
            group = await begins(replace(first, caller=frontend.requests.named(caller)))
        except RequestIdInUse:
            # Another router has a request of that name. No byte of the answer has been sent yet.
            group = await begins(first)
    headers = {"x-request-id": request.headers.get("x-request-id") or group.answer_id}
    if api is Api.MESSAGES:
        headers["request-id"] = headers["x-request-id"]
    if body.is_stream:
        return FrameStream(group, headers)
    # Off the event loop: with log probabilities an answer has megabytes.
    whole = await frontend.intake.run(group.num_bytes, group.body, within=caller.deadline_seconds)
    return Response(whole, 200, headers, "application/json")


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
        named=answer_id(body.api, caller.request_id),
        created=int(deps.wall_clock()),
        echoes=echoes,
    )
    group = ResponseGroup(frontend, requests, form, caller.request_id, body.answer)
    # Before the first token of a stream, or the end of a whole answer, a failure has a status.
    await _wait(group, request, until_over=not body.is_stream)
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


async def _read_body(request: Request, max_bytes: int, grow: Callable[[int], None]) -> list[bytes]:
    """The whole body in parts; raises TooLarge as soon as that is known, also if a smaller length
    was announced.

    They are not joined here: copying megabytes, for many callers in turn, holds up the loop.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise TooLarge(f"the body has {announced} bytes; at most {max_bytes} are taken")
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes")
        grow(len(part))
        parts.append(part)
    return parts


def _first_request(
    deps: HttpDeps, body: ParsedRequest, caller: Caller, arrived: float
) -> GenerateRequest:
    """The request for the first answer to the first prompt of a body."""
    text, answer = _text_options(deps, body), body.answer
    options = PromptOptions(answer.truncate, answer.cache_salt, answer.priority)
    prompt, sampling = body.prompts[0], body.sampling
    return GenerateRequest(caller, body.model, prompt, sampling, arrived, text, options)


async def _open(
    frontend: Frontend, body: ParsedRequest, first: GenerateRequest
) -> list[RequestRunner]:
    """One request for each answer to each prompt of a body."""
    num_prompts, num_each = len(body.prompts), body.answer.num_candidates

    def ask(prompt: int, sample: int, sharing: PromptSharing) -> GenerateRequest:
        caller, index = first.caller, prompt * num_each + sample
        if num_prompts * num_each > 1:
            caller = frontend.requests.numbered(caller, index)
        return replace(
            first,
            caller=caller,
            prompt=body.prompts[prompt],
            sampling=body.sampling.sample(sample),
            sharing=sharing,
        )

    return await open_choices(frontend, ask, num_prompts, num_each)


def _text_options(deps: HttpDeps, body: ParsedRequest) -> TextOptions:
    """The control tokens that are shown, or that a parser needs to see."""
    tokenizer, answer = deps.frontend.ctx.model.tokenizer, body.answer
    template = tokenizer.chat_template.tool_source if tokenizer.chat_template else ""
    check_offered(answer.tools, deps.syntax, template)
    if answer.shows_special:
        return TextOptions(tokenizer.control_tokens, answer.includes_stop)
    tokens = NO_TOKENS if body.api is Api.COMPLETION else deps.syntax.special(answer.tools.use)
    return TextOptions(tokens, answer.includes_stop)


async def _read(
    frontend: Frontend, api: Api, parts: Sequence[bytes], within: float
) -> ParsedRequest:
    """The request in a body. The prompts of a large one are token ids already."""
    num_bytes = sum(map(len, parts))
    if num_bytes > LARGE_BYTES:
        frontend.check_room()
        message = body_message(api, parts, frontend.max_prompt_len)
        return body_of(await frontend.intake.ask(message, within=within))
    read, raw = BODY_KINDS[api], b"".join(parts)
    filled = frontend.ctx.model.with_defaults
    return await frontend.intake.run(
        num_bytes, lambda: read(filled(parse_object(raw))), within=within
    )


async def _wait(answering: ResponseGroup, request: Request, *, until_over: bool) -> None:
    """Waits for the first token or the end, whichever decides the status."""
    if answering.is_over or (answering.has_begun and not until_over):
        return
    async with watching(answering, request.receive) as watch:
        while not answering.is_over and answering.broken is None:
            if answering.has_begun and not until_over:
                break
            await watch.wait()


def _headers(request: Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _named(request: Request) -> dict[str, str]:
    """The caller's name of the request comes back with a refusal too, if it is a name."""
    try:
        is_named = correlation_id(_headers(request))
    except InvalidRequest:
        return {}
    return {"x-request-id": request.headers["x-request-id"]} if is_named else {}

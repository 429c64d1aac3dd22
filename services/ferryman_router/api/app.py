"""The HTTP door: OpenAI's endpoints, and those by which the router itself is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferryman.errors import FerrymanError, InvalidRequest, NotFound, TooLarge
from ferryman.runtime.metrics import CONTENT_TYPE
from ferryman_router.api.answers import Answering, FrameStream, watching
from ferryman_router.api.bodies import Body, chat_body, completion_body
from ferryman_router.api.callers import Callers
from ferryman_router.api.fields import parse_object
from ferryman_router.api.forms import ChatForm, CompletionForm, Form, Heading
from ferryman_router.api.problems import problem_body, problem_headers
from ferryman_router.asked import Ask, Caller
from ferryman_router.desk import Desk
from ferryman_router.journey import Journey

MAX_BODY_BYTES = 8 << 20
MakeForm = Callable[[Heading], Form]


@dataclass(frozen=True, slots=True)
class Door:
    """What the endpoints need. `readiness` gives what `/ready` says, and whether it is a yes."""

    desk: Desk
    callers: Callers
    readiness: Callable[[], tuple[bool, Mapping[str, Any]]]
    max_body_bytes: int = MAX_BODY_BYTES
    wall_clock: Callable[[], float] = time.time


def make_app(door: Door) -> ASGIApp:
    """The ASGI application. It keeps no state of its own."""
    app = FastAPI(title="Ferryman", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(FerrymanError, _refused)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _failed)
    _add_openai(app, door)
    _add_watching(app, door)
    return _counted(app, door.desk.around.metrics.responses)


def _counted(app: ASGIApp, responses: Counter) -> ASGIApp:
    """Counts responses by status, at the outside, where nothing is missed."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                responses.labels("http", str(message["status"])).inc()
            await send(message)

        await app(scope, receive, send_counted)

    return counted


def _add_openai(app: FastAPI, door: Door) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(door, request, chat_body, ChatForm, "chatcmpl")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _answer(door, request, completion_body, CompletionForm, "cmpl")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        door.callers.of(_headers(request))
        return JSONResponse({"object": "list", "data": [_card(door)]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        door.callers.of(_headers(request))
        door.desk.around.model.check_name(model)
        return JSONResponse(_card(door))


def _add_watching(app: FastAPI, door: Door) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready, said = door.readiness()
        return JSONResponse(dict(said), 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(door.desk.around.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _answer(
    door: Door,
    request: Request,
    read: Callable[[dict[str, Any]], Body],
    make_form: MakeForm,
    prefix: str,
) -> Response:
    """Reads, checks, starts, and answers when there is something to say."""
    caller = door.callers.of(_headers(request))
    body = read(parse_object(await _read_body(request, door.max_body_bytes)))
    journeys = await _open(door.desk, caller, body)
    model = door.desk.around.model
    heading = Heading(
        f"{prefix}-{caller.request_id}",
        model.model_id,
        int(door.wall_clock()),
        body.num_logprobs,
        model.tokenizer,
    )
    page_size = door.desk.around.fleet.page_size()
    form = make_form(heading)
    answering = Answering(door.desk, journeys, form, caller.request_id, page_size)
    headers = {"x-request-id": caller.request_id}
    await _wait(answering, request, until_over=not body.is_stream)
    if answering.broken is not None and not (body.is_stream and answering.has_begun):
        answering.cancel("another choice failed")
        raise answering.broken.error
    if body.is_stream:
        return FrameStream(answering, headers, body.includes_usage)
    return Response(answering.body(), 200, headers, "application/json")


async def _open(desk: Desk, caller: Caller, body: Body) -> list[Journey]:
    """One journey per prompt; when one is refused none goes on."""
    journeys: list[Journey] = []
    try:
        for index, prompt in enumerate(body.prompts):
            suffix = f"-{index}" if len(body.prompts) > 1 else ""
            own = replace(caller, request_id=(caller.request_id[: 64 - len(suffix)] + suffix))
            _check_unused(desk, own.request_id)
            journeys.append(await desk.open(Ask(own, body.model, prompt, body.sampling)))
    except FerrymanError:
        for journey in journeys:
            desk.cancel(journey, "another choice failed")
        raise
    return journeys


def _check_unused(desk: Desk, request_id: str) -> None:
    """HTTP cannot resume: a second request of one id would mix two lives in log and workers."""
    if desk.journeys.find(request_id) is not None:
        raise InvalidRequest(
            f"request id {request_id} was used a moment ago; send another, or none",
            "x-request-id",
        )


async def _wait(answering: Answering, request: Request, *, until_over: bool) -> None:
    """Until the first token or the end, whichever decides the status."""
    if answering.is_over or (answering.has_begun and not until_over):
        return
    async with watching(answering, request.receive) as watch:
        while not answering.is_over and answering.broken is None:
            if answering.has_begun and not until_over:
                break
            await watch.news()


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; TooLarge as soon as it is known to be, whatever was announced."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise TooLarge(f"the body has {announced} bytes; at most {max_bytes} are taken")
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def _card(door: Door) -> dict[str, Any]:
    model = door.desk.around.model
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created_unix_seconds,
        "owned_by": "ferryman",
        "max_model_len": model.max_len,
    }


def _headers(request: Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, FerrymanError)
    return Response(
        problem_body(error), error.http_status, problem_headers(error), "application/json"
    )


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NotFound if error.status_code == 404 else InvalidRequest
    said = kind(f"{request.method} {request.url.path}: {error.detail}")
    return Response(
        problem_body(said), error.status_code, dict(error.headers or {}), "application/json"
    )


async def _failed(request: Request, error: Exception) -> Response:
    """A bug: the traceback goes to the log, by the server itself."""
    return Response(problem_body(FerrymanError("internal")), 500, {}, "application/json")

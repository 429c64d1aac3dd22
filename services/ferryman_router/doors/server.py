"""The HTTP door: its paths, the endpoints by which the router is watched, and those that only turn
texts into tokens, or back.

`/tokenize` and `/detokenize` are as vLLM has them, `/v1/messages/count_tokens` is Anthropic's: a
prompt's token ids, their number, and the text of ids. The endpoints that generate are in
`answer_endpoints`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
)
from ferryman.runtime.metrics import CONTENT_TYPE
from ferryman.wire.public import Prompt
from ferryman_router.answers.errors import (
    ErrorBody,
    anthropic_error,
    openai_error,
    problem_response,
)
from ferryman_router.answers.logprobs import TokenNames
from ferryman_router.answers.response_format import as_json
from ferryman_router.bodies.anthropic_requests import counted_prompt
from ferryman_router.bodies.field_readers import token_ids_of
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.json_body import parse_object
from ferryman_router.bodies.openai_requests import chat_prompt, text_prompt, tool_fields
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.answer_endpoints import (
    HttpDeps,
    answer,
    headers_of,
    ignored_headers,
    read_parts,
)
from ferryman_router.doors.auth import correlation_id
from ferryman_router.doors.openapi import document
from ferryman_router.intake.frontend import Frontend

ONE_MODEL = "/v1/models/"
MESSAGES = "/v1/messages"

Endpoint = Callable[[Request], Awaitable[Response]]
# Takes a body and its place, answers within so many seconds.
TextReply = Callable[[Frontend, dict[str, Any], BodyPlace, float], Awaitable[dict[str, Any]]]


class HttpApp:
    """The ASGI application. No layer stands between a response and the server: errors become
    responses here, and each response is counted once, when its status is known."""

    def __init__(self, deps: HttpDeps) -> None:
        self._deps = deps
        self._endpoints: Mapping[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", partial(answer, deps, Api.CHAT)),
            "/v1/completions": ("POST", partial(answer, deps, Api.COMPLETION)),
            "/v1/responses": ("POST", partial(answer, deps, Api.RESPONSES)),
            MESSAGES: ("POST", partial(answer, deps, Api.MESSAGES)),
            f"{MESSAGES}/count_tokens": ("POST", partial(self._text, _counted)),
            "/tokenize": ("POST", partial(self._text, _tokenized)),
            "/detokenize": ("POST", partial(self._text, _detokenized)),
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
        if (preflight := self._deps.cors.preflight(request.method, request.headers)) is not None:
            return preflight
        if (request.method, path) == ("HEAD", "/"):
            return Response()  # Claude Code asks so whether there is a server
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
        self._deps.callers.authenticate(headers_of(request))
        names = self._deps.frontend.ctx.model.names
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        self._deps.callers.authenticate(headers_of(request))
        asked = request.scope["path"].removeprefix(ONE_MODEL)
        return JSONResponse(self._card(self._deps.frontend.ctx.model.check_name(asked)))

    def _card(self, name: str) -> dict[str, Any]:
        model = self._deps.frontend.ctx.model
        exactness, arithmetics = self._deps.frontend.ctx.fleet.promise()
        return {
            "id": name,
            "object": "model",
            "created": model.created_unix_seconds,
            "owned_by": "ferryman",
            "root": name,
            "parent": None if name == model.model_id else model.model_id,
            "max_model_len": model.max_len,
            "ferryman": {"exactness": exactness.value, "arithmetics": arithmetics},
        }

    async def _text(
        self,
        reply: TextReply,
        request: Request,
    ) -> Response:
        frontend = self._deps.frontend
        within = self._deps.callers.authenticate(headers_of(request)).deadline_seconds
        with self._deps.memory.holding() as grow:
            parts = await read_parts(request, self._deps.max_body_bytes, grow)
            raw = b"".join(parts)
            parse = partial(parse_object, raw)
            body = await frontend.intake.run(len(raw), parse, within=within)
            place = BodyPlace.of_body(is_strict=self._deps.is_strict)
            answered = await reply(frontend, body, place, within)
            headers = ignored_headers(frontend, place.ignored.listed)
            return JSONResponse(answered, headers=headers)

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


def _named(request: Request) -> dict[str, str]:
    """The caller's name of the request comes back with a refusal too, if it is a name."""
    try:
        is_named = correlation_id(headers_of(request))
    except InvalidRequest:
        return {}
    return {"x-request-id": request.headers["x-request-id"]} if is_named else {}


# Tokens and their texts.


async def _tokenized(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """`prompt` or `messages` as the model would get them. Raises InvalidRequest."""
    is_chat, model = raw.get("messages") is not None, frontend.ctx.model
    values = BODIES[Api.TOKENIZE_CHAT if is_chat else Api.TOKENIZE_TEXT].read(raw, body)
    model.check_name(values["model"])
    if is_chat:
        prompt: Prompt = chat_prompt(values, body, tool_fields(values, body))
    else:
        prompt = text_prompt(values["prompt"], values)
    token_ids = (await frontend.tokenize(prompt, within=within)).token_ids
    response = {
        "count": len(token_ids),
        "max_model_len": model.max_len,
        "tokens": token_ids.tolist(),
        "token_strs": None,
    }
    if values["return_token_strs"]:
        names = TokenNames(model.tokenizer)
        response["token_strs"] = [names.text(token_id) for token_id in token_ids.tolist()]
    return response


async def _detokenized(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """The text of `tokens`, control tokens by their names. Raises InvalidRequest."""
    values, model = BODIES[Api.DETOKENIZE].read(raw, body), frontend.ctx.model
    model.check_name(values["model"])
    ids = token_ids_of(values["tokens"], "tokens")
    if len(ids) and int(ids.max()) >= model.vocab:
        raise InvalidRequest(f"a token id is out of range: there are {model.vocab}", "tokens")

    def decode() -> str:
        return model.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    return {"prompt": await frontend.intake.run(4 * len(ids), decode, within=within)}


async def _counted(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """Anthropic's count of the tokens of a conversation. Raises InvalidRequest."""
    values = BODIES[Api.COUNT].read(raw, body)
    prompt = counted_prompt(values, body)
    frontend.ctx.model.check_name(values["model"])
    tokenized = await frontend.tokenize(prompt, within=within)
    return {"input_tokens": len(tokenized.token_ids)}

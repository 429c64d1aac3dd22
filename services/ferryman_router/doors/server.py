"""The HTTP door: its paths, and the endpoints by which the router is watched.

Those that generate are in `answer_endpoints`, those that turn texts into tokens, or back, in
`text_endpoints`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ferryman.errors import (
    Cancelled,
    FerrymanError,
    InvalidRequest,
    NotFound,
    UnsupportedMedia,
)
from ferryman.runtime.metrics import CONTENT_TYPE
from ferryman.runtime.version import package_version
from ferryman.settings.declaration import suggestion
from ferryman_router.answers.errors import (
    ErrorBody,
    anthropic_error,
    openai_error,
    problem_response,
)
from ferryman_router.answers.response_format import as_json
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.answer_endpoints import HttpDeps, answer, headers_of
from ferryman_router.doors.auth import correlation_id
from ferryman_router.doors.openapi import document
from ferryman_router.doors.request_body import ACCEPTED
from ferryman_router.doors.text_endpoints import (
    counted,
    counted_items,
    detokenized,
    text_answer,
    tokenized,
)
from ferryman_router.doors.web.endpoints import ONE_REQUEST, WebPage
from ferryman_router.request.vllm_metrics import VllmMetrics

ONE_MODEL = "/v1/models/"
MESSAGES = "/v1/messages"

Endpoint = Callable[[Request], Awaitable[Response]]
_SLASHES = re.compile("//+")
MAX_SHOWN_CHARS = 200  # of a path that is not known


class HttpApp:
    """The ASGI application. No layer stands between a response and the server: errors become
    responses here, and each response is counted once, when its status is known."""

    def __init__(self, deps: HttpDeps, page: WebPage | None = None) -> None:
        self._deps = deps
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", partial(answer, deps, Api.CHAT)),
            "/v1/completions": ("POST", partial(answer, deps, Api.COMPLETION)),
            "/v1/responses": ("POST", partial(answer, deps, Api.RESPONSES)),
            "/v1/responses/input_tokens": ("POST", partial(text_answer, deps, counted_items)),
            MESSAGES: ("POST", partial(answer, deps, Api.MESSAGES)),
            f"{MESSAGES}/count_tokens": ("POST", partial(text_answer, deps, counted)),
            "/tokenize": ("POST", partial(text_answer, deps, tokenized)),
            "/detokenize": ("POST", partial(text_answer, deps, detokenized)),
            "/v1/models": ("GET", self._models),
            "/version": ("GET", self._version),
            "/ping": ("GET", self._health),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
        }
        self._beginnings: dict[str, tuple[str, Endpoint]] = {ONE_MODEL: ("GET", self._model)}
        methods = {path: method for path, (method, _) in self._endpoints.items()}
        methods[f"{ONE_MODEL}{{id}}"] = "GET"
        self._document = as_json(document(methods, package_version()))
        # The page's endpoints may change with it, so the document does not have them.
        if page is not None:
            self._endpoints |= {path: ("GET", ask) for path, ask in page.endpoints.items()}
            self._beginnings[ONE_REQUEST] = "GET", page.one_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = _plain_path(scope["path"])
        request, bug = Request(scope, receive), None
        refusal = partial(problem_response, form=_error_form(scope["path"]))
        try:
            response = await self._respond(request)
        except FerrymanError as error:
            response = refusal(error, headers=_headers_of_refusal(request, error))
        except ClientDisconnect:  # while it sent its body: ordinary, and never read
            response = refusal(Cancelled("the client went away"))
        except Exception as error:
            response, bug = refusal(FerrymanError("internal")), error
        if response.status_code >= 400 and "expect" in request.headers:
            # The client waits for a word before it sends its body, and may send none after this.
            response.headers["connection"] = "close"
        self._deps.cors.mark(response, request.headers)
        self._deps.frontend.ctx.metrics.responses.labels("http", str(response.status_code)).inc()
        await response(scope, receive, send)
        if bug is not None:
            raise bug  # the server logs the traceback

    async def _respond(self, request: Request) -> Response:
        path, asked = request.scope["path"], request.method
        if (preflight := self._deps.cors.preflight(asked, request.headers)) is not None:
            return preflight
        if (asked, path) == ("HEAD", "/"):
            return Response()  # Claude Code asks so whether there is a server
        method, endpoint = self._endpoint(asked, path)
        # The server sends no body in answer to HEAD.
        if asked != method and (asked, method) != ("HEAD", "GET"):
            wrong = InvalidRequest(f"{asked} {path}: Method Not Allowed")
            allowed = "GET, HEAD" if method == "GET" else method
            return problem_response(wrong, 405, {"allow": allowed}, form=_error_form(path))
        return await endpoint(request)

    def _endpoint(self, asked: str, path: str) -> tuple[str, Endpoint]:
        """The method and the function of a path. Raises NotFound."""
        if path in self._endpoints:
            return self._endpoints[path]
        for beginning, endpoint in self._beginnings.items():
            if path.startswith(beginning):
                return endpoint
        start = path[:MAX_SHOWN_CHARS]
        raise NotFound(f"{asked} {start}: Not Found{suggestion(start, self._endpoints)}")

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

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version()})

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
        frontend = self._deps.frontend
        text = frontend.ctx.metrics.render()
        match request.query_params.get("names"):
            case None:
                pass
            case "vllm":
                text += VllmMetrics(frontend.ctx, frontend.requests.__len__).render()
            case other:
                raise InvalidRequest(f"no names {other[:MAX_SHOWN_CHARS]!r} here: vllm", "names")
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _error_form(path: str) -> ErrorBody:
    """The form that clients of an endpoint know."""
    return anthropic_error if path.startswith(MESSAGES) else openai_error


def _plain_path(path: str) -> str:
    """A path as the endpoints have it: base URLs are written with a slash at the end, and without.
    It is decoded, and has no query."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def _headers_of_refusal(request: Request, error: FerrymanError) -> dict[str, str]:
    """The caller's name of the request comes back, if it is a name; and what may be sent instead of
    a body that is not read."""
    headers = dict(ACCEPTED) if isinstance(error, UnsupportedMedia) else {}
    try:
        is_named = correlation_id(headers_of(request))
    except InvalidRequest:
        return headers
    return headers | ({"x-request-id": request.headers["x-request-id"]} if is_named else {})

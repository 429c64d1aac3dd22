"""The endpoints of the web page: its files, which are public, and its data, which asks for a key.

    GET /                          the page
    GET /ferryman/web/NAME         its files
    GET /ferryman/live             server-sent events (`web/live_stream.py`)
    GET /ferryman/requests/ID      one request in full (`web/request_view.py`)

They are the page's own and may change with it, so `/openapi.json` does not have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ferryman.errors import DeadlineExceeded
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import check_correlation_id
from ferryman.runtime.access import MetricsGuard
from ferryman.text.located_prompt import NamedPlace
from ferryman_router.doors.answer_endpoints import headers_of
from ferryman_router.doors.auth import Authenticator
from ferryman_router.doors.web.live_stream import LiveData, LiveStream, LiveStreams, Readiness
from ferryman_router.doors.web.request_view import request_object
from ferryman_router.doors.web.static_files import LOCKED_IN, StaticFile, static_files
from ferryman_router.doors.web.viewer import Viewer, observer_of, tenant_viewer
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_log import RequestLog, decoded
from ferryman_router.request.request_runner import RequestRunner

LIVE = "/ferryman/live"
ONE_REQUEST = "/ferryman/requests/"
MAX_READERS = 4  # of the lifecycle log at once; each reads up to 4 MiB
LOG_SECONDS = 10.0

Endpoint = Callable[[Request], Awaitable[Response]]


class WebPage:
    """The page's parts: `endpoints` by path, and one whose path has a request's id at its end."""

    def __init__(
        self,
        frontend: Frontend,
        callers: Authenticator,
        readers: MetricsGuard,
        readiness: Readiness,
        log: RequestLog,
    ) -> None:
        self._frontend, self._callers, self._readers = frontend, callers, readers
        self._log, self._log_readers = log, asyncio.Semaphore(MAX_READERS)
        self._data, self._streams = LiveData(frontend, readiness), LiveStreams()
        files = {path: partial(_file, file) for path, file in static_files().items()}
        self.endpoints: Mapping[str, Endpoint] = {**files, LIVE: self.live}

    @property
    def num_streams(self) -> int:
        """Live streams that are open."""
        return len(self._streams)

    def _viewer(self, request: Request) -> Viewer:
        """Raises Unauthenticated for a caller that the API would not serve either."""
        observer = observer_of(self._readers, request)
        if observer is not None:
            return observer
        tenant = self._callers.authenticate(headers_of(request)).tenant
        return tenant_viewer(self._readers, request, tenant)

    async def live(self, request: Request) -> Response:
        """Raises QueueFull when too many streams are open."""
        viewer = self._viewer(request)
        if request.method == "HEAD":
            return Response(media_type=LiveStream.media_type)
        self._streams.check_room(viewer)
        return LiveStream(self._data, self._streams, viewer)

    async def one_request(self, request: Request) -> Response:
        """Raises NotFound for a request that the log does not have, or that is another tenant's."""
        viewer = self._viewer(request)
        name = check_correlation_id(request.scope["path"].removeprefix(ONE_REQUEST))
        try:
            async with asyncio.timeout(LOG_SECONDS), self._log_readers:
                if viewer.tenant is None:
                    recorded = await self._log.of_any_tenant(name)
                else:
                    recorded = await self._log.of(viewer.tenant, name)
        except TimeoutError:
            raise DeadlineExceeded("the lifecycle log does not answer") from None
        events, runner = decoded(recorded), self._runner(viewer, name)
        body = request_object(
            events,
            runner,
            self._places(runner, events),
            page_size=self._frontend.ctx.fleet.page_size(),
            shows_words=viewer.tenant is not None,
        )
        headers = {**LOCKED_IN, "cache-control": "no-store"}
        return JSONResponse({"id": events[0].request_id, **body}, headers=headers)

    def _runner(self, viewer: Viewer, name: str) -> RequestRunner | None:
        """The request, if it is under way or ended lately."""
        requests = self._frontend.requests
        if viewer.tenant is None:
            return requests.find(name)
        return requests.find_for(viewer.tenant, name)

    def _places(
        self, runner: RequestRunner | None, events: Sequence[LifecycleEntry]
    ) -> Sequence[NamedPlace]:
        """The named parts of its prompt; none when the prompt is kept no more."""
        if runner is not None:
            return runner.asked.located.places
        tenants = (event.facts["tenant"] for event in events if "tenant" in event.facts)
        request_id = events[0].request_id
        return self._frontend.recent.places(str(next(tenants, "")), request_id)


async def _file(file: StaticFile, request: Request) -> Response:
    return file.response(request.headers.get("if-none-match", ""))

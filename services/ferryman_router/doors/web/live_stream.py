"""The live data of the web page: server-sent events, at most one look a second, changes alone.

    event: hello     whose requests these are, and what is served
    event: state     the status, and for those who may see it the fleet
    event: rows      requests that are new or have changed

A page that shows an idle cluster gets a comment each quarter of a minute. Streams are few, and each
ends after ten minutes: the page opens the next one with its key, so a key that is withdrawn sees
nothing more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ferryman.errors import QueueFull
from ferryman_router.doors.web.fleet_view import fleet_view
from ferryman_router.doors.web.request_view import row_object
from ferryman_router.doors.web.viewer import Viewer
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_rows import RequestRow, row_of

LOOK_SECONDS = 1.0
STREAM_SECONDS = 600.0
SEND_SECONDS = 20.0  # for a reader to take what was sent
LOOKS_PER_COMMENT = 15
MAX_ROWS = 100
MAX_STREAMS = 64
MAX_STREAMS_OF_VIEWER = 8
RETRY_SECONDS = 30.0

Readiness = Callable[[], tuple[bool, Mapping[str, Any]]]


@dataclass(slots=True)
class SentState:
    """The latest state that a stream has sent, and its rows by their keys."""

    state: dict[str, Any] = field(default_factory=dict)
    rows: dict[tuple[str, str], RequestRow] = field(default_factory=dict)


class LiveData:
    """Looks at the router for a viewer, and says what has changed."""

    def __init__(
        self,
        frontend: Frontend,
        readiness: Readiness,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._frontend, self._readiness = frontend, readiness
        # Taken once: the beginning of a request must not change from look to look.
        self._offset = wall_clock() - frontend.ctx.clock()

    @property
    def is_ending(self) -> bool:
        """Whether the router takes no more requests."""
        return self._frontend.is_draining

    def hello(self, viewer: Viewer) -> bytes:
        """The first event."""
        ctx = self._frontend.ctx
        return frame(
            "hello",
            {
                "tenant": viewer.tenant_name,
                "sees_fleet": viewer.sees_fleet,
                "model": ctx.model.model_id,
                "router": ctx.router_id,
                "max_rows": MAX_ROWS,
            },
        )

    def changes(self, viewer: Viewer, sent: SentState) -> list[bytes]:
        """The events since the last look, which `sent` remembers; none if nothing has changed."""
        frames = []
        if (state := self._state(viewer)) != sent.state:
            sent.state = state
            frames.append(frame("state", state))
        rows = self._rows(viewer.tenant_name, sent.rows)
        changed = [row for key, row in rows.items() if sent.rows.get(key) != row]
        # Rows that ended out of sight are sent once more, and forgotten.
        sent.rows = dict(islice(rows.items(), MAX_ROWS))
        if changed:
            frames.append(frame("rows", [self._object(viewer, row) for row in reversed(changed)]))
        return frames

    def _state(self, viewer: Viewer) -> dict[str, Any]:
        ctx, requests = self._frontend.ctx, self._frontend.requests
        exactness, arithmetics = ctx.fleet.promise()
        _, report = self._readiness()
        state = {
            "status": report["status"],
            "exactness": exactness.value,
            "arithmetics": list(arithmetics),
            "page_size": ctx.fleet.page_size(),
        }
        if viewer.sees_fleet:
            state["broker"] = report["broker"]
            state["fleet"] = fleet_view(ctx.fleet, ctx.dispatcher, len(requests), ctx.clock())
        return state

    def _rows(
        self, tenant: str | None, sent: Mapping[tuple[str, str], RequestRow]
    ) -> dict[tuple[str, str], RequestRow]:
        """The newest rows, those under way first; after them sent ones that have ended since."""
        requests, page_size = self._frontend.requests, self._frontend.ctx.fleet.page_size()
        running = (
            row_of(runner, page_size)
            for runner in reversed(requests.under_way.values())
            if tenant in (None, runner.asked.tenant.name)
        )
        ended = requests.ended_rows
        listed = islice(chain(running, ended.latest_first(tenant)), MAX_ROWS)
        rows = {row.key: row for row in listed}
        for key, before in sent.items():
            if key not in rows and not before.end:
                if (row := ended.get(*key)) is not None:
                    rows[key] = row
        return rows

    def _object(self, viewer: Viewer, row: RequestRow) -> dict[str, Any]:
        begun = round((row.arrived + self._offset) * 1000)
        return row_object(row, begun_unix_ms=begun, shows_tenant=viewer.tenant is None)


class LiveStreams:
    """Counts the streams that are open, in all and of each viewer."""

    def __init__(
        self, max_streams: int = MAX_STREAMS, max_of_viewer: int = MAX_STREAMS_OF_VIEWER
    ) -> None:
        self._max_streams, self._max_of_viewer = max_streams, max_of_viewer
        self._of_viewer: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return self._of_viewer.total()

    def check_room(self, viewer: Viewer) -> None:
        """Raises QueueFull when too many are open."""
        if self._of_viewer[viewer.tenant_name] >= self._max_of_viewer:
            message = f"{self._max_of_viewer} live streams of this key are open: close a page"
            raise QueueFull(message, RETRY_SECONDS)
        if len(self) >= self._max_streams:
            message = f"{self._max_streams} live streams are open at this router"
            raise QueueFull(message, RETRY_SECONDS)

    @contextmanager
    def open(self, viewer: Viewer) -> Iterator[None]:
        """Counts one more while the block runs."""
        self._of_viewer[viewer.tenant_name] += 1
        try:
            yield
        finally:
            self._of_viewer[viewer.tenant_name] -= 1
            if not self._of_viewer[viewer.tenant_name]:
                del self._of_viewer[viewer.tenant_name]


class LiveStream(Response):
    """The stream of one viewer, until it leaves, its time is over, or the router ends."""

    media_type = "text/event-stream"

    def __init__(
        self, data: LiveData, streams: LiveStreams, viewer: Viewer, seconds: float = STREAM_SECONDS
    ) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        self._data, self._streams, self._viewer = data, streams, viewer
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            with self._streams.open(self._viewer):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._look_again(send, gone)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # the reader takes nothing more
        finally:
            gone.cancel()

    async def _look_again(self, send: Send, gone: asyncio.Future[None]) -> None:
        sent, frames, num_quiet = SentState(), [self._data.hello(self._viewer)], 0
        for _ in range(max(1, round(self._seconds / LOOK_SECONDS))):
            frames += self._data.changes(self._viewer, sent)
            num_quiet = 0 if frames else num_quiet + 1
            if num_quiet == LOOKS_PER_COMMENT:
                frames, num_quiet = [b": \n\n"], 0
            if frames:
                async with asyncio.timeout(SEND_SECONDS):
                    body = b"".join(frames)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            frames = []
            await asyncio.wait({gone}, timeout=LOOK_SECONDS)
            if gone.done() or self._data.is_ending:
                return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def frame(event: str, data: object) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n".encode()

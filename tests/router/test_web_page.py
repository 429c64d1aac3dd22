"""The page at `/`: its files are public and locked in, its data asks for a key."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster_keys import KEY, token_of
from tests.harness.router import Pause, RouterCluster, cluster
from tests.harness.router.faults import FaultStage

from ferryman.runtime.access import MetricsAccess, MetricsGuard
from ferryman.runtime.http_server import listening
from ferryman.runtime.metrics import Metrics
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.settings.groups import ListenSettings
from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman_router.doors.answer_endpoints import HttpDeps
from ferryman_router.doors.auth import Authenticator
from ferryman_router.doors.server import HttpApp
from ferryman_router.doors.web.endpoints import WebPage
from ferryman_router.doors.web.live_stream import (
    MAX_ROWS,
    MAX_STREAMS_OF_VIEWER,
    LiveData,
    SentState,
)
from ferryman_router.doors.web.static_files import static_files
from ferryman_router.doors.web.viewer import Viewer
from ferryman_router.intake.body_intake import BodyMemory
from ferryman_router.request.request_log import RequestLog
from ferryman_router.request.request_rows import RequestRow
from ferryman_router.routing.generate_request import PUBLIC

LIVE, ONE = "/ferryman/live", "/ferryman/requests/"
SHOP, LAB = "sk-shop-secret", "sk-lab-secret"
OBSERVER = {"authorization": f"Bearer {token_of(ClusterRole.OBSERVER)}"}
Event = tuple[str, Any]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def live(
    client: httpx.AsyncClient, headers: Mapping[str, str] | None = None
) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a stream, until the block ends."""
    async with client.stream("GET", LIVE, headers=dict(headers or {})) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[Event]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def first_of(events: AsyncIterator[Event], name: str) -> Any:
    async with asyncio.timeout(120):
        async for event, data in events:
            if event == name:
                return data
    raise AssertionError(f"the stream ended without {name}")


async def row_in(events: AsyncIterator[Event], request_id: str, end: str) -> dict[str, Any]:
    """The row of a request once it has this end."""
    async with asyncio.timeout(120):
        async for event, rows in events:
            for row in rows if event == "rows" else ():
                if (row["id"], row["end"]) == (request_id, end):
                    return dict(row)
    raise AssertionError("the stream ended before")


@asynccontextmanager
async def locked_door(made: RouterCluster) -> AsyncIterator[httpx.AsyncClient]:
    """Another door of the same router, as one of a locked cluster has it."""
    components = made.router.components
    frontend, metrics = components.frontend, Metrics("router")
    guard = MetricsGuard(MetricsAccess(credentials_of(KEY, ClusterRole.ROUTER)), metrics)
    callers = Authenticator(made.router.api_keys, 300.0)
    log = RequestLog(frontend.requests, made.bus, made.subjects, metrics.counter("x", "x", []))
    report = {"status": "ready", "broker": True}
    page = WebPage(frontend, callers, guard, lambda: (True, report), log)
    syntax = OutputSyntax.chosen("none", "none", "")
    deps = HttpDeps(frontend, callers, lambda: (True, report), BodyMemory(), syntax, guard)
    async with listening(HttpApp(deps, page), ListenSettings()) as port:
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            yield client


# The files.


async def test_the_page_is_public_and_locked_in(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, api_keys=SHOP) as made:
        for path, file in static_files().items():
            got = await made.http.get(path)
            assert (got.status_code, got.content) == (200, file.body)
            assert "default-src 'self'" in got.headers["content-security-policy"]
            assert "unsafe" not in got.headers["content-security-policy"]
            assert got.headers["x-content-type-options"] == "nosniff"
            again = await made.http.get(path, headers={"if-none-match": got.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await made.http.head("/")).status_code == 200
        assert (await made.http.post("/")).status_code == 405
        assert (await made.http.get("/ferryman/web/..%2f__init__.py")).status_code == 404


def test_the_files_load_nothing_from_elsewhere_and_run_nothing_in_html() -> None:
    files = static_files()
    texts = {path: file.body.decode() for path, file in files.items()}
    shell = texts["/"]
    for link in re.findall(r'(?:src|href)="([^"#]+)"', shell):
        assert link in files, f"the page asks for {link}"
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", shell)
    for path, text in texts.items():
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, f"{path} names {urls}"
        assert "innerHTML" not in text
        assert "eval(" not in text
        for module in re.findall(r'^import .* from "([^"]+)"', text, re.MULTILINE):
            assert f"/ferryman/web/{module.removeprefix('./')}" in files, f"{path}: {module}"


async def test_one_setting_takes_all_of_it_away(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, web_page=False) as made:
        for path in ("/", LIVE, f"{ONE}x", "/ferryman/web/app.js"):
            assert (await made.http.get(path)).status_code == 404
        assert (await made.http.head("/")).status_code == 200, "Claude Code asks so"


async def test_the_document_of_the_api_has_none_of_the_page_s_endpoints(
    one_pair: RouterCluster,
) -> None:
    paths = (await one_pair.http.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/ferryman")]


# Its data.


async def test_data_asks_for_the_key_that_the_api_asks_for(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, api_keys=SHOP) as made:
        for path in (LIVE, f"{ONE}x", f"{LIVE}?key={SHOP}"):
            refused = await made.http.get(path)
            assert (refused.status_code, SHOP in refused.text) == (401, False)
            assert (await made.http.get(path, headers=bearer("guess"))).status_code == 401
        assert (await made.http.get(f"{ONE}x", headers=bearer(SHOP))).status_code == 404
        async with live(made.http, {"x-api-key": SHOP}) as events:
            hello = await first_of(events, "hello")
        assert hello["tenant"].startswith("tenant-")


async def test_an_open_cluster_shows_its_fleet_and_a_request_from_first_to_last(
    one_pair: RouterCluster,
) -> None:
    async with live(one_pair.http) as events:
        hello = await first_of(events, "hello")
        assert (hello["tenant"], hello["sees_fleet"]) == ("public", True)
        state = await first_of(events, "state")
        workers = {worker["id"]: worker for worker in state["fleet"]["workers"]}
        prefill, decode = one_pair.prefills[0], one_pair.decodes[0]
        assert set(workers) == {prefill.worker_id, decode.worker_id}
        assert workers[decode.worker_id]["state"] == "ready"
        held = prefill.suffers(Pause(FaultStage.PREFILL))
        asking = asyncio.create_task(
            one_pair.http.post(
                "/v1/completions",
                json={"prompt": "the ferry carries state across the river", "max_tokens": 3},
                headers={"x-request-id": "page-1"},
            )
        )
        await held.reached(1)
        waiting = await row_in(events, "page-1", "")
        assert (waiting["prefill"], waiting["answer_tokens"]) == (prefill.worker_id, 0)
        held.release()
        assert (await asking).status_code == 200
        row = await row_in(events, "page-1", "length")
    tokens = row["prompt_tokens"]
    assert (row["answer_tokens"], row["stage"]) == (3, "finished")
    assert sum(row["cached"].values()) + sum(row["computed"].values()) == tokens
    assert "tenant" not in row


async def test_a_page_that_is_opened_later_shows_what_ended_before(
    one_pair: RouterCluster,
) -> None:
    assert (await one_pair.complete(max_tokens=1)).status_code == 200
    await one_pair.until_free()
    async with live(one_pair.http) as events:
        (row,) = await first_of(events, "rows")
    assert row["end"] == "length"


async def test_a_request_in_full_has_its_events_and_its_route(two_pairs: RouterCluster) -> None:
    asked = {"prompt": "the ferry", "max_tokens": 2}
    headers = {"x-request-id": "full-1"}
    assert (await two_pairs.http.post("/v1/completions", json=asked, headers=headers)).is_success
    await two_pairs.life_of("full-1")
    got = await two_pairs.http.get(f"{ONE}full-1")
    body = got.json()
    assert [event["name"] for event in body["events"]] == ["received", "routed", "finished"]
    assert (body["is_over"], body["id"], got.headers["cache-control"]) == (
        True, "full-1", "no-store"
    )  # fmt: skip
    (route,) = body["routes"]
    assert len(route["others"]) == 3, "two by two workers are four pairs"
    assert {"chain"} & set(body["events"][0]["facts"]) == set()
    assert "the ferry" not in got.text


async def test_a_prompt_s_owner_sees_the_words_at_which_it_parts_and_the_observer_does_not(
    one_pair: RouterCluster,
) -> None:
    for name, word in (("one", "xyzzy"), ("two", "plugh")):
        messages = [{"role": "user", "content": f"the ferry carries {word}"}]
        asked = {"messages": messages, "max_tokens": 1}
        headers = {"x-request-id": name}
        got = await one_pair.http.post("/v1/chat/completions", json=asked, headers=headers)
        assert got.is_success
        await one_pair.life_of(name)
    shown = (await one_pair.http.get(f"{ONE}two")).json()
    assert (shown["parting"]["from"], shown["parting"]["place"]) == ("one", "user[0]")
    assert "user[0]" in [place["name"] for place in shown["places"]]
    assert shown["parting"]["ours"]
    async with locked_door(one_pair) as door:
        theirs = (await door.get(f"{ONE}two", headers=OBSERVER)).json()
    assert theirs["parting"]["at"] == shown["parting"]["at"]
    assert not {"before", "ours", "theirs"} & set(theirs["parting"])


async def test_no_tenant_sees_another_s_requests_and_the_observer_sees_all(
    nats_url: str, folder: Path
) -> None:
    async with cluster(nats_url, folder, api_keys=f"{SHOP},{LAB}") as made:
        ids = {}
        for key in (SHOP, LAB):
            body = {"prompt": "the ferry", "max_tokens": 1}
            got = await made.http.post("/v1/completions", json=body, headers=bearer(key))
            ids[key] = got.json()["usage"]["ferryman"]["request_id"]
            await made.life_of(ids[key])
        async with locked_door(made) as door:
            for mine, theirs in ((SHOP, LAB), (LAB, SHOP)):
                async with live(door, bearer(mine)) as events:
                    state = await first_of(events, "state")
                    rows = await first_of(events, "rows")
                assert "fleet" not in state
                assert [row["id"] for row in rows] == [ids[mine]]
                assert (await door.get(ONE + ids[mine], headers=bearer(mine))).is_success
                refused = await door.get(ONE + ids[theirs], headers=bearer(mine))
                unknown = await door.get(f"{ONE}never-was", headers=bearer(mine))
                assert (refused.status_code, unknown.status_code) == (404, 404)
                said = refused.text.replace(ids[theirs], "")
                assert said == unknown.text.replace("never-was", "")
            async with live(door, OBSERVER) as events:
                assert (await first_of(events, "state"))["fleet"]["workers"]
                rows = await first_of(events, "rows")
            assert {row["id"] for row in rows} == set(ids.values())
            assert len({row["tenant"] for row in rows}) == 2
            assert (await door.get(ONE + ids[LAB], headers=OBSERVER)).is_success
            both = {**OBSERVER, "x-api-key": SHOP}
            async with live(door, both) as events:
                assert (await first_of(events, "hello"))["tenant"] is None


@pytest.mark.parametrize("role", [ClusterRole.ROUTER, ClusterRole.PREFILL])
async def test_the_token_of_another_role_is_no_observer_s(
    nats_url: str, folder: Path, role: ClusterRole
) -> None:
    async with cluster(nats_url, folder, api_keys=SHOP) as made, locked_door(made) as door:
        assert (await door.get(LIVE, headers=bearer(token_of(role)))).status_code == 401


# Its cost.


async def test_streams_of_a_key_are_few_and_give_their_place_back(one_pair: RouterCluster) -> None:
    async with locked_door(one_pair) as door:
        page = door.stream
        opened = [page("GET", LIVE) for _ in range(MAX_STREAMS_OF_VIEWER)]
        for stream in opened:
            assert (await stream.__aenter__()).status_code == 200
        refused = await door.get(LIVE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert "close a page" in refused.json()["error"]["message"]
        async with live(door, OBSERVER) as events:
            await first_of(events, "hello")  # another viewer has places of its own
        for stream in opened:
            await stream.__aexit__(None, None, None)

        async def is_taken() -> bool:
            return (await door.head(LIVE)).is_success and await _opens(door)

        async with asyncio.timeout(120):
            while not await is_taken():
                pass


async def _opens(door: httpx.AsyncClient) -> bool:
    async with door.stream("GET", LIVE) as response:
        return response.status_code == 200


async def test_a_router_that_ends_ends_its_streams(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder) as made:
        async with live(made.http) as events:
            await first_of(events, "hello")
            await made.router.components.frontend.drained()
            async with asyncio.timeout(120):
                assert [name async for name, _ in events if name == "never"] == []


async def test_what_has_not_changed_is_not_sent_again(one_pair: RouterCluster) -> None:
    frontend = one_pair.router.components.frontend
    assert (await one_pair.complete(max_tokens=1)).status_code == 200
    await one_pair.until_free()
    data = LiveData(frontend, lambda: (True, {"status": "ready", "broker": True}))
    viewer, sent = Viewer(PUBLIC, sees_fleet=True), SentState()
    assert [frame.partition(b"\n")[0] for frame in data.changes(viewer, sent)] == [
        b"event: state",
        b"event: rows",
    ]
    assert data.changes(viewer, sent) == []


async def test_a_stream_holds_few_rows_however_many_requests_there_were(
    one_pair: RouterCluster,
) -> None:
    frontend = one_pair.router.components.frontend
    for number in range(3 * MAX_ROWS):
        row = RequestRow(
            f"r{number}", "", f"t{number}", 0.0, "finished", 1, 9, 3, "", "", {}, {}, "stop", 1.0
        )
        frontend.requests.ended_rows.add(row)
    data = LiveData(frontend, lambda: (True, {"status": "ready", "broker": True}))
    sent = SentState()
    *_, rows = data.changes(Viewer(None, sees_fleet=False), sent)
    names = [row["id"] for row in json.loads(rows.partition(b"data: ")[2])]
    assert names == [f"r{number}" for number in range(2 * MAX_ROWS, 3 * MAX_ROWS)]
    assert len(sent.rows) == MAX_ROWS

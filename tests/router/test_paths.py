"""Paths and methods as clients write them, and what a refusal says of others."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from tests.harness.router import FaultStage, Pause, RouterCluster
from tests.router.raw_http import GENERATES, GETS, POSTS, head, raw_client

JSON = "content-type: application/json"


async def test_head_is_answered_where_get_is_without_a_body(one_pair: RouterCluster) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        for path in (*GETS, "/openapi.json"):
            await client.send(head(path, method="GET"))
            got = await client.answer()
            await client.send(head(path, method="HEAD"))
            asked = await client.answer(has_body=False)  # the connection goes on: none was sent
            assert asked.status == got.status == 200
            assert asked.headers["content-type"] == got.headers["content-type"]
            if path != "/metrics":
                assert asked.headers["content-length"] == got.headers["content-length"]


async def test_a_method_that_is_not_there_is_told_what_is(one_pair: RouterCluster) -> None:
    for path in POSTS:
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            wrong = await one_pair.http.request(method, path)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    for path in GETS:
        wrong = await one_pair.http.post(path, json={})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")


async def test_slashes_too_many_are_no_other_place(one_pair: RouterCluster) -> None:
    async with raw_client(one_pair.router.http_port) as client:
        for path in POSTS:
            body = json.dumps(POSTS[path]).encode()
            for target in (
                f"{path}/",
                f"/{path}",
                f"{path}//?a=b",
                f"http://else.example:80{path}",
            ):
                await client.send(head(target, JSON, num_bytes=len(body)), body)
                answer = await client.answer()
                assert answer.status == 200, (target, answer.body)


async def test_slashes_too_many_are_no_other_place_for_questions(one_pair: RouterCluster) -> None:
    for path in GETS:
        for target in (f"{path}/", f"/{path}", path.replace("/", "//")):
            url = f"http://127.0.0.1:{one_pair.router.http_port}{target}"
            assert (await one_pair.http.get(url)).status_code == 200, target


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/elsewhere", ""),
    ],
)
async def test_a_path_that_is_not_there_is_told_which_may_be_meant(
    one_pair: RouterCluster, path: str, near: str
) -> None:
    error = (await one_pair.post(path)).json()["error"]
    assert (error["code"], error["message"].partition("did you mean ")[2]) == (
        "not_found",
        f"{near}?" if near else "",
    )


async def test_a_router_that_ends_says_when_to_come_back(one_pair: RouterCluster) -> None:
    one_pair.router.components.frontend.is_draining = True
    for path, more in itertools.product(GENERATES, ({}, {"stream": True})):
        refused = await one_pair.post(path, **POSTS[path], **more)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "ending" in refused.json()["error"]["message"]


async def test_an_answer_that_a_router_cannot_end_says_when_to_come_back(
    one_pair: RouterCluster,
) -> None:
    gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    calls = [asyncio.create_task(one_pair.post(path, **POSTS[path])) for path in GENERATES]
    await gate.reached(len(calls))
    await one_pair.router.break_off()
    for call in calls:
        response = await call
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "stopping"
    gate.release()

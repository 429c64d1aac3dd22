"""Nothing but JSON is read, and no page that nobody allowed can have anything computed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tests.harness.router import RouterCluster, cluster
from tests.router.raw_http import POSTS

MEDIA_TYPES = {
    "application/json": 200,
    "application/json; charset=utf-8": 200,
    "Application/JSON;charset=ISO-8859-1": 200,
    "application/vnd.api+json": 200,
    "application/problem+json; charset=utf-8": 200,
    "text/plain": 415,
    "text/plain;application/json": 415,
    "application/x-www-form-urlencoded": 415,
    "multipart/form-data; boundary=x": 415,
    "application/jsonl": 415,
    "text/json": 415,
}


async def test_a_body_that_is_not_said_to_be_json_is_not_read(one_pair: RouterCluster) -> None:
    for path, (media_type, status) in itertools.product(POSTS, MEDIA_TYPES.items()):
        body, headers = json.dumps(POSTS[path]).encode(), {"content-type": media_type}
        response = await one_pair.http.post(path, content=body, headers=headers)
        assert response.status_code == status, (media_type, response.text)
        if status == 415:
            error = response.json()["error"]
            assert (error["param"], error["type"]) == ("content-type", "invalid_request_error")
            assert response.headers["accept"] == "application/json"


PAGE = "https://page.example"


SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None)
"""A page may send any of these without asking first; the last one is a body without a type."""


@pytest.mark.parametrize(
    ("named", "stranger"),
    [("", PAGE), (PAGE, "https://other.example"), (PAGE, "null")],
    ids=["no page is named", "another page", "a page in a frame"],
)
async def test_no_page_that_nobody_allowed_gets_an_answer_without_asking(
    nats_url: str, folder: Path, named: str, stranger: str
) -> None:
    async with cluster(nats_url, folder, cors_origin=named) as made:
        for path, media_type in itertools.product(POSTS, SIMPLE):
            body = json.dumps(POSTS[path]).encode()
            headers = {"origin": stranger} | ({"content-type": media_type} if media_type else {})
            response = await made.http.post(path, content=body, headers=headers)
            assert response.status_code == 415, (path, media_type)
        assert made.prefills[0].orders == [], "strangers cost no prefill"
        for path in POSTS:
            body = json.dumps(POSTS[path]).encode()
            assert (await made.http.post(path, content=body)).status_code == 200, "no page"
            if named:
                headers = {"origin": named}
                allowed = await made.http.post(path, content=body, headers=headers)
                assert allowed.status_code == 200

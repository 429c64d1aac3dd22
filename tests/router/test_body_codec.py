"""Bodies that clients compress: what is read, within which bound, and what is refused by name."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.router import RouterCluster
from tests.router.raw_http import POSTS

from ferryman.errors import InvalidRequest, TooLarge, UnsupportedMedia
from ferryman_router.doors.body_codec import coding_of, decoded


def _raw_deflate(plain: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(plain) + coder.flush()


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": _raw_deflate,
    "identity": bytes,
}
BOMB_BYTES = 16 << 20


async def test_a_compressed_body_means_what_it_says(one_pair: RouterCluster) -> None:
    for coding, write in WRITERS.items():
        for path, body in POSTS.items():
            coded = write(json.dumps(body).encode())
            headers = {"content-encoding": coding, "content-type": "application/json"}
            response = await one_pair.http.post(path, content=coded, headers=headers)
            assert response.status_code == 200, (coding, path, response.text)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_bomb_is_too_large_for_every_endpoint(one_pair: RouterCluster, coding: str) -> None:
    bomb = WRITERS[coding](json.dumps({"user": "a" * BOMB_BYTES}).encode())
    assert len(bomb) < BOMB_BYTES // 500
    for path, body in POSTS.items():
        headers = {"content-encoding": coding, "content-type": "application/json"}
        response = await one_pair.http.post(path, content=bomb, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
        assert (await one_pair.post(path, **body)).status_code == 200


OTHERS = ("br", "zstd", "compress", "gzip, gzip", "gzip, br", "*")


async def test_other_codings_are_refused_by_name(one_pair: RouterCluster) -> None:
    for coding, (path, body) in itertools.product(OTHERS, POSTS.items()):
        headers = {"content-encoding": coding}
        response = await one_pair.http.post(path, json=body, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (415, "content-encoding")
        assert coding in error["message"]
        assert response.headers["accept-encoding"] == "gzip, deflate"


WHOLE = gzip.compress(b'{"prompt": "hi"}')
BROKEN = {
    "without its end": (WHOLE[:-4], "breaks off"),
    "half": (WHOLE[:12], "breaks off"),
    "plain": (b'{"prompt": "hi"}', "is not gzip"),
    "with more behind": (WHOLE + b"more", "is not gzip"),
    "of another sum": (WHOLE[:-8] + bytes(8), "is not gzip"),
    "nothing": (b"", "JSON"),
}


async def test_what_is_not_in_its_coding_says_so(one_pair: RouterCluster) -> None:
    for name, (coded, word) in BROKEN.items():
        headers = {"content-encoding": "gzip"}
        response = await one_pair.http.post("/v1/completions", content=coded, headers=headers)
        assert response.status_code == 400, name
        assert word in response.json()["error"]["message"], name


@given(plain=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 4000), max_size=5))
def test_the_cuts_of_a_body_do_not_matter(plain: bytes, cuts: list[int]) -> None:
    for coding, write in WRITERS.items():
        if coding == "identity":
            continue
        coded = write(plain)
        ends = sorted({min(cut, len(coded)) for cut in cuts} | {len(coded)})
        parts = [coded[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert b"".join(decoded(parts, coding_of(coding), 3000)) == plain


def test_members_of_gzip_follow_each_other_within_one_bound() -> None:
    coded = gzip.compress(b"a" * 100) + gzip.compress(b"b" * 100)
    assert b"".join(decoded([coded], "gzip", 200)) == b"a" * 100 + b"b" * 100
    with pytest.raises(TooLarge):
        decoded([coded], "gzip", 199)


def test_a_bound_is_the_last_byte_that_is_taken() -> None:
    assert sum(map(len, decoded([gzip.compress(b"a" * 4096)], "gzip", 4096))) == 4096
    with pytest.raises(TooLarge):
        decoded([gzip.compress(b"a" * 4097)], "gzip", 4096)


def test_bytes_behind_deflate_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="follow the end"):
        decoded([zlib.compress(b"{}"), b"{}"], "deflate", 100)


def test_an_unknown_coding_is_named_and_not_in_full() -> None:
    with pytest.raises(UnsupportedMedia, match=r"content-encoding x{40} is not"):
        coding_of("x" * 1000)

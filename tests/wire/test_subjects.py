"""Subjects are spelled in one place, come back from their spelling, and admit no odd names."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire import strategies as draw

from ferryman.errors import InvalidRequest
from ferryman.wire.nats.subjects import (
    BeatSubject,
    CacheSubject,
    ControlSubject,
    LifeSubject,
    Subjects,
)

LOCAL = Subjects("local")
names = st.from_regex(r"\A[a-z0-9][a-z0-9_-]{0,20}\Z")


@given(names, names, draw.request_ids, names)
def test_a_life_subject_comes_back(role: str, worker: str, request_id: str, event: str) -> None:
    subject = LOCAL.life(role, worker, request_id, event)
    assert LOCAL.parse(subject) == LifeSubject(role, worker, request_id, event)


@given(names, names, names, draw.epochs)
def test_the_other_subjects_come_back(role: str, worker: str, verb: str, epoch: int) -> None:
    assert LOCAL.parse(LOCAL.beat(role, worker)) == BeatSubject(role, worker)
    assert LOCAL.parse(LOCAL.cache(worker, epoch)) == CacheSubject(worker, epoch)
    assert LOCAL.parse(LOCAL.control(worker, verb)) == ControlSubject(worker, verb)


@given(st.text(string.printable, max_size=30))
def test_any_other_text_is_refused_and_nothing_else_happens(text: str) -> None:
    for subject in (text, f"{LOCAL.root}.{text}", f"{LOCAL.root}.life.{text}"):
        try:
            parsed = LOCAL.parse(subject)
        except InvalidRequest:
            continue
        assert isinstance(parsed, LifeSubject | BeatSubject | CacheSubject | ControlSubject)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "Upper", "-x", "ü", "x" * 65, "a\n"])
def test_a_name_that_is_no_plain_token_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Subjects(name)
    with pytest.raises(InvalidRequest):
        LOCAL.control("decode-00000000", name)


def test_another_cluster_is_another_tree() -> None:
    with pytest.raises(InvalidRequest, match="no subject of cluster local"):
        LOCAL.parse(Subjects("other").beat("decode", "decode-00000001"))


def test_worker_ids_and_the_documented_spelling() -> None:
    worker_id = "decode-00000000000000ff"
    assert LOCAL.life("decode", worker_id, "Req_1", "verified") == (
        "ferryman.v1.local.life.decode.decode-00000000000000ff.Req_1.verified"
    )
    assert LOCAL.beat("decode", worker_id) == f"ferryman.v1.local.worker.decode.{worker_id}.beat"
    assert LOCAL.all_life_of("Req_1") == "ferryman.v1.local.life.*.*.Req_1.*"
    assert LOCAL.all_hops_of("Req_1") == "ferryman.v1.local.hops.*.*.Req_1"
    assert LOCAL.hops("decode", "d-1", "Req_1") == "ferryman.v1.local.hops.decode.d-1.Req_1"

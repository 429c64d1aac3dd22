"""Tenants on one worker: none learns from a plan or from its usage what another had computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.schedule import MANIFESTS, ScheduledWorker, request

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.schedule.events import SequenceAdmitted
from ferryman.schedule.request import Request

ROOM = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 60}
SALTS = {"one": b"1" * 16, "two": b"2" * 16}
# Few tokens, so that prompts often begin alike.
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def asked_by(tenant: str, manifest: StateManifest, name: str, prompt: Sequence[int]) -> Request:
    ids = as_token_ids(prompt)
    keys = page_keys(root_key(manifest, SALTS[tenant]), ids, manifest.page_size)
    return replace(request(manifest, name, prompt), keys=keys)


def worker_of(manifest: StateManifest) -> ScheduledWorker:
    return ScheduledWorker(manifest, ROOM)


def admitted(worker: ScheduledWorker, asked: Request) -> SequenceAdmitted:
    """How a request alone on the worker was let in, after it has ended."""
    worker.submit(asked)
    worker.drain()
    (found,) = (
        event for event in worker.seen(SequenceAdmitted) if event.request_id == asked.request_id
    )
    return found


@pytest.mark.parametrize("name", sorted(MANIFESTS))
@given(before=st.lists(PROMPTS, max_size=4), prompt=PROMPTS, repeats=st.booleans())
@settings(max_examples=30)
def test_a_plan_is_that_of_a_worker_which_knows_no_other_tenant(
    name: str, before: list[list[int]], prompt: list[int], repeats: bool
) -> None:
    """The prompt itself may be among those that the other tenant had computed."""
    manifest = MANIFESTS[name]
    shared, alone = worker_of(manifest), worker_of(manifest)
    for number, other in enumerate([*before, prompt] if repeats else before):
        admitted(shared, asked_by("one", manifest, f"other-{number}", other))
    mine = asked_by("two", manifest, "mine", prompt)
    assert admitted(shared, mine) == admitted(alone, mine)
    again = replace(mine, request_id="again")
    assert admitted(shared, again) == admitted(alone, again), "its own cache is as ever"


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_the_same_tenant_does_find_its_prompt(name: str) -> None:
    """So the property above could fail."""
    manifest, worker = MANIFESTS[name], worker_of(MANIFESTS[name])
    first = admitted(worker, asked_by("one", manifest, "first", [1] * 24))
    second = admitted(worker, asked_by("one", manifest, "second", [1] * 24))
    assert first.plan.position == 0
    assert second.plan.position > 0
    other = admitted(worker, asked_by("two", manifest, "other", [1] * 24))
    assert other.plan == first.plan


@given(prompt=PROMPTS, first=st.binary(max_size=32), second=st.binary(max_size=32))
def test_two_salts_share_no_page_key(prompt: list[int], first: bytes, second: bytes) -> None:
    manifest = MANIFESTS[min(MANIFESTS)]
    chains = [
        set(page_keys(root_key(manifest, salt), as_token_ids(prompt), manifest.page_size))
        for salt in (first, second)
    ]
    assert first == second or not chains[0] & chains[1]

"""Calls, checks and bounds where the parts of a decode worker meet: each was once left out by a
draw of planted defects, and no test noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.decode.test_aborts import word_on
from tests.decode.test_held_tokens import PREFILL_ORDER
from tests.decode.test_token_streams import TOKENS
from tests.harness.pair import pair_of_workers, request
from tests.waiting import until
from tests.worker.test_reuse import HYBRID, MIXED

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, QueueFull
from ferryman.handoff.usage import NONE_CACHED
from ferryman.handoff.values import PageRange
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import RequestFailed
from ferryman_decode import departures
from ferryman_decode.decode_request import DecodeRequest
from ferryman_decode.requests import LINGER_SECONDS, Requests
from ferryman_decode.token_streams import RouterStreams

PROMPT = [3] * 21


def test_tokens_are_sent_again_with_their_own_log_probabilities() -> None:
    decoding = DecodeRequest(PREFILL_ORDER, held=NONE_CACHED)
    logprobs = [{token: -float(token)} for token in (5, 6, 7)]
    for token, own in zip((5, 6, 7), logprobs, strict=True):
        decoding.drawn(Sampled(token, own))
    for offset in range(4):
        sent = decoding.tokens_from(decoding.base + offset)
        assert sent.frame.token_ids == (5, 6, 7)[offset:]
        assert list(sent.logprobs) == logprobs[offset:]


async def test_frames_are_numbered_and_the_reason_for_the_end_comes_behind_them() -> None:
    streams = RouterStreams(7)
    stream = streams.open("router-1")
    for _ in range(3):
        streams.gather("router-1", TOKENS)
        streams.flush()
    stream.close(QueueFull("too far behind"))
    assert [(await stream.next_frame()).sequence for _ in range(3)] == [1, 2, 3]
    with pytest.raises(QueueFull, match="too far behind"):
        await stream.next_frame()


async def test_a_request_is_forgotten_whole_a_while_after_its_end() -> None:
    async with pair_of_workers() as pair:
        requests = pair.decode.service.requests
        await pair.run_prefill(pair.order(request("r1", PROMPT, max_tokens=4)))
        await pair.read_tokens("r1")
        await until(lambda: bool(requests._ended))
        now = pair.decode.parts.clock()
        requests.expire(now)
        assert requests._by_name
        requests.expire(now + LINGER_SECONDS + 1)
        kept = (requests._by_name, requests._attempts, requests._deadlines, requests._ended)
        assert not any(kept)


async def test_a_worker_is_busy_from_a_reservation_to_the_end_of_its_request() -> None:
    async with pair_of_workers() as pair:
        requests = pair.decode.service.requests
        assert not await requests.becomes_busy(0.001)
        promise = await pair.reserve(pair.wish(request("r1", PROMPT, max_tokens=4)))
        assert await requests.becomes_busy(0.001)
        await pair.abort(word_on(promise))
        requests.expire(pair.decode.parts.clock() + 1e6)
        assert not await requests.becomes_busy(0.001)


def test_the_schedule_s_failure_ends_a_preempted_request_s_lease_too() -> None:
    heard: list[Any] = []
    preempted = SimpleNamespace(on_event=lambda event, tags: heard.append(event))
    requests = cast(Any, SimpleNamespace(_by_name={}, _preempted=preempted))
    failed = RequestFailed("r1", CorruptState("a page"))
    Requests._fail(requests, failed)
    assert heard == [failed]


def test_a_resumed_request_is_said_to_be_with_its_position_and_slowest_tier() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    planned: list[Any] = []
    requests = SimpleNamespace(
        _parts=SimpleNamespace(cache_metrics=SimpleNamespace(planned=planned.append)),
        _say=lambda request, name, **facts: said.append((name, facts)),
    )
    Requests._resumed(cast(Any, requests), cast(Any, None), MIXED)
    facts = {"position": 20, "prompt_len": 30, "tier": "peer", "load_bytes": 500}
    assert said == [("resumed", facts)]
    assert planned == [MIXED]


@pytest.mark.parametrize(("more", "side"), [(0, "large"), (1, "small")])
def test_a_state_of_just_the_bound_is_worth_a_connection(
    more: int, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = SimpleNamespace(is_required=False)
    slot_bytes = HYBRID.layout(Kind.FULL).slot_bytes
    monkeypatch.setattr(departures, "NixlSide", SimpleNamespace)
    monkeypatch.setattr(departures, "offered_ranges", lambda *_: [PageRange(Kind.FULL, 1, 4)])
    monkeypatch.setattr(departures, "MIN_NIXL_BYTES", 3 * slot_bytes + more)
    parts = SimpleNamespace(planes=planes, engine=SimpleNamespace(manifest=HYBRID))
    leaving = SimpleNamespace(_parts=parts, _side="large", _small_side="small")
    chosen: Any = departures.Departures._side_for(cast(Any, leaving), PREFILL_ORDER)
    assert chosen == side

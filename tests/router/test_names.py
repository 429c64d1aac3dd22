"""A request has an id of its own and a name that its caller gave it; both are its tenant's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc.aio
import pytest
from tests.harness.router import SENTENCE, GiveUp, RouterCluster, cluster, collect, frames, in_use
from tests.router.recorded_calls import recorded_call

from ferryman.errors import RequestIdInUse
from ferryman.ids import is_request_id
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.status import typed
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.values import StreamFinished, Usage

TEXT = "/v1/completions"
BODY = {"prompt": SENTENCE, "max_tokens": 2}
NAMES = ["two words", "über/€ {1}", "_", "x" * 128, "id-1"]


@pytest.fixture
async def tenants(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with cluster(nats_url, folder, api_keys="one, two", num_prefills=2) as made:
        yield made


def _key(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}"),) if tenant else ()


async def _complete(made: RouterCluster, name: str, tenant: str = "") -> tuple[str, str]:
    """The header that came back, and the id of the request."""
    headers: Any = {**dict(_key(tenant)), "x-request-id": name.encode()}
    answer = await made.http.post(TEXT, json=BODY, headers=headers)
    assert answer.status_code == 200, answer.text
    returned = answer.headers["x-request-id"].encode(answer.headers.encoding).decode()
    return returned, answer.json()["usage"]["ferryman"]["request_id"]


async def _explain(made: RouterCluster, name: str, tenant: str = "") -> Any:
    return await made.stub.Explain(pb.ExplainRequest(request_id=name), metadata=_key(tenant))


async def _trace(made: RouterCluster, name: str, tenant: str = "") -> list[str]:
    """The ids of the requests whose events come back."""
    call = made.stub.Trace(pb.TraceRequest(request_id=name), metadata=_key(tenant))
    return [event.json for event in (await call).events]


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("name", NAMES)
async def test_any_printable_name_comes_back_and_finds_its_request(
    one_pair: RouterCluster, name: str
) -> None:
    for _ in range(2):  # what was used before does no harm
        returned, request_id = await _complete(one_pair, name)
        assert returned == name
        assert is_request_id(request_id)
        await one_pair.life_of(request_id)
        by_name, by_id = await _trace(one_pair, name), await _trace(one_pair, request_id)
        assert by_name, "its end was logged"
        assert by_name == by_id[: len(by_name)], "a worker's last word may come in between"
        assert all(f'"request_id":"{request_id}"' in event for event in by_name)
        assert (await _explain(one_pair, name)).routes == (
            await _explain(one_pair, request_id)
        ).routes


async def test_a_refusal_returns_the_name(one_pair: RouterCluster) -> None:
    refused = await one_pair.http.post(TEXT, json={}, headers={"x-request-id": "a b"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "a b")


async def test_several_prompts_have_ids_of_their_own(one_pair: RouterCluster) -> None:
    headers = {"x-request-id": "many"}
    body = {**BODY, "prompt": [SENTENCE, SENTENCE]}
    await _complete(one_pair, "many-1")  # taken, though not by this call
    for _ in range(2):
        answer = await one_pair.http.post(TEXT, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    ids = [order.context.request_id for order in one_pair.prefills[0].orders]
    assert len(set(ids)) == len(ids) == 5


async def test_the_command_line_finds_a_request_by_its_name(
    one_pair: RouterCluster, nats_url: str
) -> None:
    ids = [(await _complete(one_pair, "seen by a proxy"))[1] for _ in range(2)]
    await one_pair.life_of(ids[1])
    events = await recorded_call(nats_url, one_pair.subjects.cluster, "seen by a proxy")
    assert {event.request_id for event in events} == {ids[1]}, "the latest"


async def test_an_id_that_was_sent_to_some_router_before_stays_that_routers(
    one_pair: RouterCluster, nats_url: str
) -> None:
    """Workers and readers of the log would take both requests for one."""
    ids = []
    for num_before in (1, 2):  # another router had it first
        one_pair.router.components.frontend.requests.forget(time.monotonic() + 3600)
        ids.append(await _begun_by(one_pair, "sent-again", num_before))
    assert len({"sent-again", *ids}) == 3
    assert await _begun_by(one_pair, "sent-once", 0) == "sent-once"
    for name in ("sent-again", ids[1]):
        events = await recorded_call(nats_url, one_pair.subjects.cluster, name)
        assert list(dict.fromkeys(event.request_id for event in events)) == ids, "one call"


async def _begun_by(made: RouterCluster, name: str, num_before: int) -> str:
    """The id of a request that was sent so often before; its life is in the log."""
    request = pb.GenerateRequest(
        request_id=name, prompt=pb.Prompt(text=SENTENCE), num_sent_before=num_before
    )
    request.sampling.max_tokens = 2
    started, *_ = await collect(made.stub.Generate(request))
    await made.life_of(started.started.request_id)
    request_id: str = started.started.request_id
    return request_id


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        pytest.param({}, {"elsewhere"}, id="whole"),
        pytest.param({"stream": True}, {"elsewhere"}, id="stream"),
        pytest.param({"n": 2}, {"elsewhere-0", "elsewhere-1"}, id="two answers"),
        pytest.param({"prompt": [SENTENCE] * 2}, {"elsewhere-1"}, id="one of two prompts"),
    ],
)
async def test_a_name_that_is_an_id_at_another_router_is_answered_under_another_id(
    one_pair: RouterCluster, more: dict[str, Any], ids: set[str]
) -> None:
    (prefill,), (decode,) = one_pair.prefills, one_pair.decodes
    other = prefill.suffers(in_use(*(f"{one}.1" for one in ids)))
    headers = {"x-request-id": "elsewhere"}
    answer = await one_pair.http.post(TEXT, json={**BODY, **more}, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "elsewhere")
    assert other.happened, "its name was tried"
    if "stream" in more:
        text = "".join(each["choices"][0]["text"] for each in frames(answer.text)[:-1])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == one_pair.expected(2)
    for refused in ids & {order.context.request_id for order in prefill.orders}:
        assert await one_pair.life_of(refused) == ["received", "routed", "failed"], "tried once"
        assert refused not in {request_id for request_id, *_ in decode.aborted}


async def test_an_id_of_another_router_is_a_typed_error_and_free_when_sent_again(
    one_pair: RouterCluster,
) -> None:
    one_pair.prefills[0].suffers(in_use("elsewhere.1"))
    request = pb.GenerateRequest(request_id="elsewhere", prompt=pb.Prompt(text=SENTENCE))
    request.sampling.max_tokens = 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(one_pair.stub.Generate(request))
    assert type(typed(caught.value)) is RequestIdInUse
    assert await _begun_by(one_pair, "elsewhere", 1) != "elsewhere"


async def test_an_answer_that_has_begun_keeps_its_id_and_is_tried_again(
    one_pair: RouterCluster,
) -> None:
    """Its worker gave it up, and at the next one its id is that of another router's request."""
    (prefill,), (decode,) = one_pair.prefills, one_pair.decodes
    unasked = StreamFinished(FinishReason.CANCELLED, Usage(0))
    given_up = decode.suffers(GiveUp(unasked, offset=4, times=1))
    other = prefill.suffers(in_use("begun.2"))
    body, headers = {**BODY, "max_tokens": 12}, {"x-request-id": "begun"}
    answer = await one_pair.http.post(TEXT, json=body, headers=headers)
    assert (given_up.happened, other.happened) == (1, 1)
    assert answer.json()["choices"][0]["text"] == one_pair.expected(12)
    assert [order.context.attempt for order in prefill.orders] == [1, 2, 3]


async def test_a_request_that_another_router_began_is_not_taken_for_one_of_its_name_here(
    one_pair: RouterCluster,
) -> None:
    """Its caller is sent on to begin it anew, and hears nothing of the other one."""
    await _begun_by(one_pair, "of-two-callers", 0)
    again = pb.GenerateRequest(
        request_id="of-two-callers",
        prompt=pb.Prompt(text="another text"),
        num_sent_before=1,
        resume_from_offset=1,
    )
    again.sampling.max_tokens = 2
    refusal = await _refusal(collect(one_pair.stub.Generate(again)))
    assert refusal == (grpc.StatusCode.NOT_FOUND, ANY)
    again.resume_from_offset, again.num_sent_before = 0, 2
    started, *_ = await collect(one_pair.stub.Generate(again))
    assert started.started.request_id != "of-two-callers"


async def test_another_tenants_requests_are_not_there(tenants: RouterCluster) -> None:
    name, request_id = await _complete(tenants, "shared-1", "one")
    assert request_id != name, "nobody can see in an id whether it was used before"
    await tenants.life_of(request_id)
    for ask in (_explain, _trace):
        assert await ask(tenants, name, "one")
        for theirs in (name, request_id):
            unknown = await _refusal(ask(tenants, "never-was", "two"))
            refusal = await _refusal(ask(tenants, theirs, "two"))
            assert refusal[0] is grpc.StatusCode.NOT_FOUND
            assert refusal[1].replace(theirs, "never-was") == unknown[1]
    _, own = await _complete(tenants, "shared-1", "two")
    await tenants.life_of(own)
    assert all(own in event for event in await _trace(tenants, name, "two"))
    assert all(request_id in event for event in await _trace(tenants, name, "one"))


def _generate(made: RouterCluster, tenant: str, offset: int = 0, text: str = SENTENCE) -> Any:
    request = pb.GenerateRequest(
        request_id="mine",
        prompt=pb.Prompt(text=text),
        sampling=types_pb2.SamplingParams(max_tokens=4),
        resume_from_offset=offset,
    )
    return collect(made.stub.Generate(request, metadata=_key(tenant)))


async def test_streams_are_resumed_by_their_own_tenant_alone(tenants: RouterCluster) -> None:
    started, *events = await _generate(tenants, "one")
    assert (await _generate(tenants, "one", offset=2)) == [started, *events[2:]]
    assert (await _refusal(_generate(tenants, "two", offset=2)))[0] is grpc.StatusCode.NOT_FOUND
    other = await _generate(tenants, "two", text="another text")
    assert len(other) == len(events) + 1, "the other's id is as free as any"
    assert (await _generate(tenants, "one", offset=2)) == [started, *events[2:]]
    assert (await _refusal(_generate(tenants, "one", text="another text")))[0] is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_a_route_is_explained_as_long_as_the_log_remembers(tenants: RouterCluster) -> None:
    name, request_id = await _complete(tenants, "gone by", "one")
    await tenants.life_of(request_id)
    (before,) = (await _explain(tenants, name, "one")).routes
    requests = tenants.router.components.frontend.requests
    requests.forget(time.monotonic() + 3600)
    assert requests.find(request_id) is None
    (after,) = (await _explain(tenants, name, "one")).routes
    assert len(before.others) == len(after.others) == 1
    for now, then in ((after.chosen, before.chosen), (after.others[0], before.others[0])):
        for field, value in then.ListFields():
            assert getattr(now, field.name) == pytest.approx(value, abs=1e-6), field.name
    for asked in (name, request_id):
        assert (await _refusal(_explain(tenants, asked, "two")))[0] is grpc.StatusCode.NOT_FOUND

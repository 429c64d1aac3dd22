"""More requests than there is room for: who waits, where, for whom, and who is to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import FaultStage, Pause, RouterCluster, cluster, collect
from tests.waiting import until

from ferryman.settings.router import LimitSettings
from ferryman.wire.grpc.status import REASON, RETRY_AFTER
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman_router.request.placement import RequestPlacement
from ferryman_router.routing.routing_policy import RoutingRequest

CROWD, ROWS = 300, 4


@pytest.fixture
async def crowded(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    """Four rows at decode, and two tenants; a busy machine is no lost worker."""
    patient = LimitSettings(beat_timeout_seconds=60.0, no_worker_seconds=60.0)
    async with cluster(nats_url, folder, api_keys="heavy, light", limits=patient) as made:
        made.decodes[0].max_running = ROWS
        made.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
        await until(lambda: any(one.beat.max_running == ROWS for one in made.fleet))
        yield made


def gate_of(made: RouterCluster) -> Pause:
    """That of its decode worker's tokens."""
    (gate,) = made.decodes[0].faults
    assert isinstance(gate, Pause)
    return gate


def _ask(made: RouterCluster, tenant: str, request_id: str, seconds: float = 120) -> Any:
    sampling = types_pb2.SamplingParams(max_tokens=4)
    prompt = pb.Prompt(text="the ferry carries state")
    request = pb.GenerateRequest(request_id=request_id, prompt=prompt, sampling=sampling)
    metadata = (("authorization", f"Bearer {tenant}"),)
    return made.stub.Generate(request, metadata=metadata, timeout=seconds)


def _orders(made: RouterCluster) -> list[str]:
    """The callers' names of the requests, in the order in which they were begun."""
    found = [made.request(order.context.request_id) for order in made.prefills[0].orders]
    return [one.asked.caller.correlation_id for one in found]


async def test_a_light_tenant_waits_for_one_request_of_a_heavy_one(crowded: RouterCluster) -> None:
    heavy = [asyncio.ensure_future(collect(_ask(crowded, "heavy", f"h-{i}"))) for i in range(CROWD)]
    await until(lambda: len(crowded.router.components.dispatcher) == CROWD - ROWS)
    assert len(_orders(crowded)) <= ROWS, "what cannot be begun stays where others can pass it"
    light = asyncio.ensure_future(collect(_ask(crowded, "light", "light")))
    await until(lambda: len(crowded.router.components.dispatcher) == CROWD - ROWS + 1)
    gate = gate_of(crowded)
    gate.release()
    await light
    assert _orders(crowded).index("light") <= ROWS + 1
    await asyncio.gather(*heavy)
    assert len(_orders(crowded)) == CROWD + 1


async def test_what_would_come_too_late_is_refused_with_a_time_to_come_back(
    crowded: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()
    look_up = RequestPlacement._routing_request

    async def noting(self: RequestPlacement, generated: Sequence[int]) -> RoutingRequest:
        looked_up.append(self._asked.caller.correlation_id)
        return await look_up(self, generated)

    monkeypatch.setattr(RequestPlacement, "_routing_request", noting)
    gate = gate_of(crowded)
    gate.release()
    await asyncio.gather(*(collect(_ask(crowded, "heavy", f"w-{i}")) for i in range(20)))
    gate.pause_again()  # its pace is known, and now it stands still
    waiting = [asyncio.ensure_future(collect(_ask(crowded, "heavy", f"s-{i}"))) for i in range(6)]
    await until(lambda: len(crowded.router.components.dispatcher) == 6 - ROWS)
    status, number = grpc.StatusCode.DEADLINE_EXCEEDED, 0
    async with asyncio.timeout(120):
        # Sooner or later it has stood still for longer than half of the time that is given.
        while status is grpc.StatusCode.DEADLINE_EXCEEDED:
            number += 1
            try:
                await collect(_ask(crowded, "light", f"late-{number}", seconds=0.2))
            except grpc.aio.AioRpcError as error:
                status, trailers = error.code(), dict(error.trailing_metadata() or ())
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers[REASON] == "Overloaded"
    assert f"late-{number}" not in looked_up, "nobody was asked what is cached of its prompt"
    assert int(str(trailers[RETRY_AFTER])) >= 1000
    headers = {"authorization": "Bearer light", "x-ferryman-deadline-ms": "200"}
    body = {"prompt": "the ferry", "max_tokens": 2}
    for is_stream in (False, True):
        sent = body | {"stream": is_stream}
        async with asyncio.timeout(120):
            refused = await crowded.http.post("/v1/completions", json=sent, headers=headers)
            while refused.status_code == 504:
                refused = await crowded.http.post("/v1/completions", json=sent, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    assert {name[0] for name in _orders(crowded)} == {"w", "s"}, "nothing was computed for them"
    gate.release()
    await asyncio.gather(*waiting)
    await until(lambda: len(crowded.router.components.dispatcher) == 0)
    again = await crowded.http.post("/v1/completions", json=body, headers=headers | _PATIENT)
    assert again.status_code == 200, "the overload is over"


_PATIENT = {"x-ferryman-deadline-ms": "20000"}


async def test_whoever_leaves_while_it_is_placed_takes_no_room_with_it(
    crowded: RouterCluster,
) -> None:
    gate = gate_of(crowded)
    for i in range(10):
        calls = [_ask(crowded, "heavy", f"{i}{n}") for n in "abcdef"]
        asked = [asyncio.ensure_future(collect(call)) for call in calls]
        await until(lambda: len(crowded.router.components.dispatcher) == 2)
        for call in calls:
            call.cancel()
        assert await asyncio.gather(*asked, return_exceptions=True)
        await crowded.until_free()
    await until(lambda: not any(worker.claims for worker in crowded.fleet))
    gate.release()
    await collect(_ask(crowded, "light", "last"))

"""A router that ends, stands still, or is started again: a real process, and workers behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tests.cluster_keys import key_file_in
from tests.harness.router import (
    SENTENCE,
    STATE,
    FakeDecode,
    FakePrefill,
    FaultStage,
    Pause,
    frames,
    living,
)
from tests.router.recorded_calls import recorded_call

from ferryman.client import Client, NotResumable, SamplingParams, TokenChunk
from ferryman.handoff.lifecycle import check, is_over
from ferryman.ids import make_epoch
from ferryman.runtime.embedded import free_ports
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.nats.bus import Bus
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.v1 import inference_pb2
from ferryman.wire.v1.inference_pb2_grpc import InferenceServiceStub

STILL_SECONDS = 6.0
MANY = SamplingParams(max_tokens=40)


@dataclass
class Restartable:
    """A router process on ports of its own, and the fake workers that it finds by the broker."""

    environment: dict[str, str]
    http_port: int
    grpc_port: int
    prefill: FakePrefill
    decode: FakeDecode
    script: tuple[int, ...]
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def cluster(self) -> str:
        return self.environment["FERRYMAN_CLUSTER"]

    @property
    def process(self) -> asyncio.subprocess.Process:
        return self.processes[-1]

    async def start(self) -> None:
        """The next process on the same ports; waits until it knows the workers."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ferryman_router",
            env={**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline())["event"] == "ready"
        async with httpx.AsyncClient(base_url=self.http) as http, asyncio.timeout(120):
            # Another process; it has no event to wait for.
            while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def token_ids(self, num_tokens: int) -> list[int]:
        return [self.script[index % len(self.script)] for index in range(num_tokens)]

    async def end(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@asynccontextmanager
async def restartable(nats_url: str, folder: Path) -> AsyncIterator[Restartable]:
    """Nothing is started yet but the workers."""
    subjects, (http, grpc) = Subjects(f"r{make_epoch() % 10**9}"), free_ports(2)
    environment = {
        "FERRYMAN_MODEL": str(folder),
        "FERRYMAN_CLUSTER_KEY_FILE": str(key_file_in(folder)),
        "FERRYMAN_HTTP_PORT": str(http),
        "FERRYMAN_GRPC_PORT": str(grpc),
        "FERRYMAN_NATS_URL": nats_url,
        "FERRYMAN_CLUSTER": subjects.cluster,
        "FERRYMAN_DRAIN_SECONDS": "0.5",
    }
    script = tuple(Tokenizer.load(folder).encode(SENTENCE).tolist())
    async with AsyncExitStack() as stack:
        bus: Bus = await stack.enter_async_context(nats_bus(NatsOptions(nats_url)))
        prefill, decode = FakePrefill(script), FakeDecode(script)
        prefill.seconds_per_token = 1e-6
        for worker in (prefill, decode):
            await stack.enter_async_context(living(worker, bus, subjects))
        made = Restartable(environment, http, grpc, prefill, decode, script)
        stack.push_async_callback(made.end)
        yield made


@pytest.fixture
async def router(nats_url: str, folder: Path) -> AsyncIterator[Restartable]:
    async with restartable(nats_url, folder) as made:
        await made.start()
        yield made


@dataclass
class Reading:
    """One answer by the SDK: what came so far, and an event for its first token."""

    token_ids: list[int] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(
        self, client: Client, prompt: str = SENTENCE, *, request_id: str = ""
    ) -> list[int]:
        async for event in client.generate(
            prompt, MANY, request_id=request_id, deadline_seconds=120.0
        ):
            if isinstance(event, TokenChunk):
                assert event.offset == len(self.token_ids), "each token once and in order"
                self.token_ids += event.token_ids
                self.has_begun.set()
        return self.token_ids


async def sse(router: Restartable, first: asyncio.Event) -> list[Any]:
    """All frames of a stream by HTTP; `first` is set when one has come."""
    body = {"prompt": SENTENCE, "max_tokens": 40, "stream": True}
    text = ""
    async with (
        httpx.AsyncClient(base_url=router.http, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for part in response.aiter_text():
            text += part
            first.set()
    return frames(text)


async def test_streams_that_outlast_the_drain_end_with_an_error(router: Restartable) -> None:
    router.decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    first = asyncio.Event()
    by_http = asyncio.create_task(sse(router, first))
    async with channel(router.grpc) as way:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(text=SENTENCE), sampling={"max_tokens": 40}
        )
        call = InferenceServiceStub(way).Generate(request)
        kinds = [(await call.read()).WhichOneof("event") for _ in range(2)]
        await first.wait()
        router.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert kinds[0] == "started"
    trailers = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert trailers["ferryman-reason"] == "Stopping"
    assert trailers["ferryman-offset"] == "1"
    assert trailers["ferryman-retryable"] == "true"
    assert trailers["ferryman-stage"] in ("committed", "decoding")
    error = (await by_http)[-1]["error"]
    assert (error["reason"], error["offset"], error["retryable"]) == ("Stopping", 1, True)
    assert await router.process.wait() == 1, "not everything could be drained"


async def test_calls_of_the_sdk_survive_a_router_that_stands_still(router: Restartable) -> None:
    """Some wait for their first token, some are in mid-stream, some come while it stands."""
    gate = router.decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    begun, late = [Reading() for _ in range(8)], [Reading() for _ in range(4)]
    async with Client(router.grpc) as client:
        reading = [asyncio.create_task(one.read(client)) for one in begun]
        await asyncio.gather(*(one.has_begun.wait() for one in begun))
        router.process.send_signal(signal.SIGSTOP)
        reading += [asyncio.create_task(one.read(client)) for one in late]
        await asyncio.wait(reading, timeout=STILL_SECONDS)  # the fault itself takes so long
        assert not any(task.done() for task in reading)
        gate.release()
        router.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*reading)
    assert answers == [router.token_ids(40)] * len(answers)


async def test_calls_of_the_sdk_survive_a_router_that_is_started_again(
    router: Restartable,
) -> None:
    """The tokens that were delivered are compared with those of the next router."""
    gate = router.decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    waiting = router.prefill.suffers(Pause(FaultStage.COMMIT))
    begun, silent = [Reading() for _ in range(4)], [Reading() for _ in range(4)]
    async with Client(router.grpc) as client:
        waiting.release()
        reading = [asyncio.create_task(one.read(client)) for one in begun]
        await asyncio.gather(*(one.has_begun.wait() for one in begun))
        waiting.pause_again()
        reading += [asyncio.create_task(one.read(client)) for one in silent]
        await waiting.reached(len(silent))
        router.process.send_signal(signal.SIGTERM)
        await router.process.wait()
        assert not any(one.has_begun.is_set() for one in silent)
        gate.release()
        waiting.release()
        await router.start()
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*reading)
    assert answers == [router.token_ids(40)] * len(answers)


async def test_a_call_that_outlives_its_router_is_one_request_of_two_routers(
    router: Restartable, nats_url: str
) -> None:
    gate, one = router.decode.suffers(Pause(FaultStage.NEXT_TOKEN)), Reading()
    async with Client(router.grpc) as client:
        reading = asyncio.create_task(one.read(client, request_id="outlives"))
        await one.has_begun.wait()
        router.process.kill()
        await router.process.wait()
        gate.release()
        await router.start()
        async with asyncio.timeout(120):
            assert await reading == router.token_ids(40)
    events = await recorded_call(nats_url, router.cluster, "outlives")
    assert {event.request_id for event in events} == {"outlives"}
    first, second = dict.fromkeys(event.publisher for event in events)
    said = {each: [e.name for e in events if e.publisher == each] for each in (first, second)}
    assert said == {first: ["received", "routed"], second: ["taken_over", "routed", "finished"]}
    assert [event.attempt for event in events] == [1, 1, 1, 2, 2]
    (taken,) = (event for event in events if event.name == "taken_over")
    assert (taken.facts["from"], taken.facts["offset"]) == (first[1], 1)
    assert is_over(events)
    # Only events that real workers would have sent are lacking.
    assert {found.rule for found in check(events)} <= {"missing_cause"}


async def test_an_answer_that_another_model_gives_differently_ends_with_what_was_delivered(
    router: Restartable,
) -> None:
    """Another model takes no request over: the answer is begun anew, and compared."""
    gate = router.decode.suffers(Pause(FaultStage.NEXT_TOKEN))
    one = Reading()
    async with Client(router.grpc) as client:
        reading = asyncio.create_task(one.read(client))
        await one.has_begun.wait()
        router.process.kill()
        await router.process.wait()
        other = tuple(reversed(router.script))
        router.decode.script = router.prefill.script = other
        router.decode.state = router.prefill.state = replace(STATE, digest="e" * 32)
        assert other[0] != router.script[0]
        gate.release()
        await router.start()
        with pytest.raises(NotResumable) as caught:
            async with asyncio.timeout(120):
                await reading
    assert caught.value.num_tokens == len(one.token_ids) == 1

"""Large bodies are read elsewhere and few at a time; small ones wait for none of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import cluster, collect

from ferryman.errors import Cancelled, DeadlineExceeded, QueueFull
from ferryman.schedule.request import FinishReason
from ferryman.wire.public import NOT_PARTED, GenerateFinished, TokenChunk
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.values import Usage
from ferryman_router import service
from ferryman_router.answers.response_format import AnsweredChoice
from ferryman_router.bodies.parsed_request import AnswerOptions
from ferryman_router.doors.sse import MAX_CHUNKS, FrameStream, ResponseGroup, while_connected
from ferryman_router.intake.body_intake import (
    LARGE_BYTES,
    QUICK_BYTES,
    BodyMemory,
    Intake,
    ReaderProcess,
)
from ferryman_router.request.response import OutputLog
from ferryman_router.routing.fleet import Fleet

LARGE, MIDDLE = LARGE_BYTES + 1, QUICK_BYTES + 1


@pytest.fixture
async def intake() -> AsyncIterator[Intake]:
    made = Intake(ReaderProcess(()), num_large=2)
    try:
        yield made
    finally:
        made.close()


class Gate:
    """Work that waits in its thread until it may end."""

    def __init__(self) -> None:
        self.num_inside = self.most_inside = 0
        self._lock, self.opened = threading.Lock(), threading.Event()

    def work(self) -> int:
        with self._lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        assert self.opened.wait(60)
        with self._lock:
            self.num_inside -= 1
        return threading.get_ident()


async def test_only_quick_work_is_done_on_the_loop(intake: Intake) -> None:
    here = threading.get_ident()
    assert await intake.run(QUICK_BYTES, threading.get_ident, within=60) == here
    assert await intake.run(MIDDLE, threading.get_ident, within=60) != here
    assert await intake.run(LARGE, threading.get_ident, within=60) != here


async def test_few_large_bodies_are_read_at_once_and_smaller_ones_pass_them(
    intake: Intake,
) -> None:
    gate = Gate()
    async with asyncio.TaskGroup() as group:
        large = [group.create_task(intake.run(LARGE, gate.work, within=60)) for _ in range(6)]
        await intake.run(MIDDLE, lambda: None, within=60)  # while all of those wait
        assert not any(one.done() for one in large)
        gate.opened.set()
    assert 1 <= gate.most_inside <= intake.num_large


async def test_who_waits_too_long_hears_of_the_deadline(intake: Intake) -> None:
    gate = Gate()
    holding = [asyncio.ensure_future(intake.run(LARGE, gate.work, within=60)) for _ in range(2)]
    await asyncio.sleep(0)  # both are handed to their threads
    began: list[int] = []
    with pytest.raises(DeadlineExceeded):
        await intake.run(LARGE, lambda: began.append(1), within=0.01)
    gate.opened.set()
    await asyncio.gather(*holding)
    await intake.run(LARGE, lambda: None, within=60)
    assert not began, "nobody waits for it, so it is not begun"


def test_bodies_that_wait_are_bounded_together_and_give_their_room_back() -> None:
    memory = BodyMemory(max_bytes=100)
    with memory.holding() as grow_first, memory.holding() as grow_second:
        grow_first(60)
        with pytest.raises(QueueFull):
            grow_second(41)
        grow_second(40)
    assert memory.num_bytes == 0


async def test_work_ends_when_its_client_leaves() -> None:
    left, ended = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            left.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(Cancelled):
        await while_connected(receive, work())
    assert ended.is_set()


class OneJourney:
    """As much of a journey as an answer looks at."""

    def __init__(self, num_chunks: int, end: GenerateFinished) -> None:
        self.asked: Any = SimpleNamespace(
            params=SimpleNamespace(prompt_logprobs=None), parting=NOT_PARTED
        )
        self.output_log = OutputLog()
        for offset in range(num_chunks):
            self.output_log.add(TokenChunk(offset, (1,), "x"))
        self.output_log.close(end)


class PlainForm:
    """A byte for each chunk."""

    def first(self, index: int) -> bytes:
        return b"<"

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        return chunk.text.encode()

    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        return b">"

    def end(self, usage: object) -> bytes:
        return b"[DONE]"


async def test_who_reads_again_after_a_pause_hears_all_and_lets_others_have_their_turn() -> None:
    num_chunks = 5 * MAX_CHUNKS
    end = GenerateFinished(FinishReason.STOP, Usage(1))
    requests: Any = [OneJourney(num_chunks, end), OneJourney(num_chunks, end)]
    form: Any = PlainForm()
    frontend: Any = SimpleNamespace(ctx=SimpleNamespace(fleet=Fleet(5.0)))
    stream = FrameStream(ResponseGroup(frontend, requests, form, "id", AnswerOptions()), {})
    sent: list[bytes] = []
    turns: list[int] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        while True:
            turns.append(len(sent))
            await asyncio.sleep(0)

    run: Callable[..., Any] = stream
    await run({}, receive, send)
    whole = b"".join(sent)
    assert whole == b"<<" + whole[2:]
    assert (whole.count(b"x"), whole.count(b">"), whole.count(b"[DONE]")) == (2 * num_chunks, 2, 1)
    assert max(map(len, sent)) < 2 * MAX_CHUNKS
    assert len(set(turns)) > 4, "others ran between the frames"


async def test_both_doors_bound_what_they_hold_and_let_it_go(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = BodyMemory(max_bytes=200)
    monkeypatch.setattr(service, "BodyMemory", lambda: memory)
    async with cluster(nats_url, folder) as made:
        for _ in range(5):  # together they would be too much
            assert (await made.complete("the ferry", max_tokens=2)).status_code == 200
        refused = await made.complete("a" * 200, max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        prompt = pb.Prompt(text="a" * 200)
        for call in (
            collect(made.stub.Generate(pb.GenerateRequest(prompt=prompt))),
            made.stub.Tokenize(pb.TokenizeRequest(prompt=prompt)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await made.complete("the ferry", max_tokens=2)).status_code == 200
    assert memory.num_bytes == 0

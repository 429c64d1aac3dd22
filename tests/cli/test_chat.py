"""A conversation in the terminal, and `explain`, with a router that has no workers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console
from tests.client.fake_router import RECEIVED, FakeRouter, serving

from ferryman.client import Client, LifecycleEvent, SamplingParams
from ferryman.errors import CorruptState, Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import encode_event
from ferryman.wire.grpc.rpc import Context
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman_cli.app import run
from ferryman_cli.chat import Chat, Conversation

ANSWER = " word0 word1 word2 word3 word4."


@contextmanager
def chatting(router: FakeRouter, *lines: str) -> Iterator[str]:
    """The terminal's text after these lines and the end of the input."""
    typed, shown = iter(lines), io.StringIO()

    def read_line() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    with asyncio.Runner() as runner:
        server = serving(router)
        address = runner.run(_entered(server))
        client = runner.run(_opened(address))
        try:
            console = Console(file=shown, width=200)
            Chat(client, console, SamplingParams(max_tokens=9)).run(runner, read_line)
            yield shown.getvalue()
        finally:
            runner.run(client.close())
            runner.run(_left(server))


async def _entered(server: object) -> str:
    return await server.__aenter__()  # type: ignore[attr-defined,no-any-return]


async def _left(server: object) -> None:
    await server.__aexit__(None, None, None)  # type: ignore[attr-defined]


async def _opened(address: str) -> Client:
    return Client(address)


def contents(router: FakeRouter) -> list[list[str]]:
    """The contents of the turns of each request."""
    return [[m.content for m in request.prompt.chat.messages] for request in router.requests]


def test_every_turn_carries_the_conversation() -> None:
    router = FakeRouter()
    with chatting(router, "hi", "", "again") as shown:
        assert shown.count(ANSWER) == 2
        assert "64 prompt tokens, 48 of them cached (32 on the device, 16 from the host)" in shown
    assert contents(router) == [["hi"], ["hi", ANSWER, "again"]]


def test_reset_forgets_and_quit_ends() -> None:
    router = FakeRouter()
    with chatting(router, "hi", "/reset", "anew", "/quit", "never") as shown:
        assert "forgotten" in shown
    assert contents(router) == [["hi"], ["anew"]]


def test_an_unknown_command_shows_the_known_ones() -> None:
    router = FakeRouter()
    with chatting(router, "/what") as shown:
        assert "/reset" in shown
    assert router.requests == []


def test_a_failed_answer_is_shown_and_its_question_taken_back() -> None:
    router = FakeRouter()

    async def before(_: int) -> None:
        if len(router.requests) == 1:
            raise CorruptState("bad page")

    router.before = before
    with chatting(router, "hi", "again") as shown:
        assert "CorruptState: bad page" in shown
    assert contents(router) == [["hi"], ["again"]]


def test_what_was_said_before_an_interruption_stays() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.pieces += ["well", ", "]
    conversation.answered()
    assert [turn.content for turn in conversation.turns] == ["hi", "well, "]


async def test_a_route_is_explained_with_its_runner_up(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeRouter()) as address:
        assert await asyncio.to_thread(run, ["explain", "some-id", "-v", "--grpc", address]) == 0
    said = capsys.readouterr().out
    assert said.startswith("some-id went to prefill-00000001 and decode-00000001\n")
    assert "ms quicker than the next, prefill-00000002" in said
    assert "some-id, attempt 1" in said
    lines = {line[:16].strip(): line[16:].split() for line in said.splitlines()}
    assert lines["prefill worker"] == ["prefill-00000001", "prefill-00000002"]
    assert lines["load"] == ["1.00", "0.00"]
    assert (lines["usable tokens"], lines["host"], lines["peer"]) == (
        ["64", "0"],
        ["32", "0"],
        ["16", "0"],
    )
    assert lines["data plane"] == ["nixl", "grpc"]


def brought(attempt: int, **facts: object) -> LifecycleEvent:
    """A host-cache's event about units that it stored."""
    said = LifecycleEntry(
        "hostcache", "hostcache-00000001", 1, "some-id", attempt, 1, "stored", facts, 5, 1.0
    )
    return LifecycleEvent(said.role, said.worker_id, said.name, encode_event(said).decode(), 1)


BROUGHT = (
    brought(1, units=7, origin="peer"),
    brought(2, units=89, origin="storage", folder="node-2"),
    brought(2, units=3, reserved_units=3),  # written back by a worker
)


async def test_places_that_state_came_from_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeRouter(events=(RECEIVED, *BROUGHT))) as address:
        line = ["explain", "some-id", "--grpc", address]
        assert await asyncio.to_thread(run, line) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert await asyncio.to_thread(run, [*line, "--json"]) == 0
    assert said.endswith(
        "attempt 1: hostcache-00000001 brought 7 units from peer"
        " attempt 2: hostcache-00000001 brought 89 units from node-2's folder of the bucket"
    )
    fetched = json.loads(capsys.readouterr().out)["fetched"]
    assert [(one["units"], one["origin"], one["folder"]) for one in fetched] == [
        (7, "peer", ""),
        (89, "storage", "node-2"),
    ]


async def test_without_the_log_a_route_is_explained_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class RouterWithoutLog(FakeRouter):
        async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceResponse:
            raise Unavailable("the broker is away")

    async with serving(RouterWithoutLog()) as address:
        assert await asyncio.to_thread(run, ["explain", "some-id", "--grpc", address]) == 0
    assert "64 tokens of its prompt" in capsys.readouterr().out

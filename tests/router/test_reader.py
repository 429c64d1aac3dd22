"""Another process reads large bodies, and says what this one would have said; it may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import pytest
from tests.harness.router import RouterCluster, cluster, collect

from ferryman.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    Stopping,
    Unavailable,
)
from ferryman.text.marked_turn import MarkedChat, TextBreakpoint, ToolBreakpoint, marked
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.public import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman_router.bodies.json_body import parse_object
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors import text_endpoints
from ferryman_router.intake.body_intake import LARGE_BYTES, Intake, ReaderProcess
from ferryman_router.intake.reader import (
    BODY_KINDS,
    MAX_HEAD_BYTES,
    NICENESS,
    ReaderMessage,
    body_message,
    body_of,
    failure_message,
    prompt_message,
    prompt_of,
    tokens_of,
)
from ferryman_router.served_model import ServedModel

MAX_TOKENS = 599
PADDING = b" " * LARGE_BYTES  # makes any body a large one, and changes nothing about it
COMPLETION = {
    "prompt": ["the ferry </s>", [1, 2, 3], "héllo"],
    "temperature": 0.1 + 0.2,
    "top_p": 1,
    "seed": -(2**63),
    "stop": ["é\n", "x"],
    "stop_token_ids": [5, 6],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": 2,
    "max_tokens": 3,
    "ignore_eos": True,
    "n": 2,
    "cache_salt": "é",
    "priority": -3,
    "include_stop_str_in_output": True,
}
CHAT = {"messages": [{"role": "user", "content": "the <|user|> ferry"}], "model": "tiny"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
DIES = "import os, socket; socket.socket(fileno=0).recv(1); os.kill(os.getpid(), 9)"
HANGS = "import socket; s = socket.socket(fileno=0)\nwhile s.recv(1 << 20): pass"
SPEAKS_NONSENSE = "import socket; socket.socket(fileno=0).send(b'\\xff' * 12)"


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[ReaderProcess]:
    with closing(ReaderProcess.for_model(folder, "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return ServedModel.load(folder, "tiny", 0)


def _python(script: str, **more: Any) -> ReaderProcess:
    return ReaderProcess((sys.executable, "-c", script), **more)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("completion", COMPLETION),
        ("completion", {"prompt": "the ferry", "ferryman": {"parse_special": True}}),
        ("chat", CHAT),
        ("chat", {**CHAT, "max_tokens": 7, "temprature": 1}),
        ("chat", {**CHAT, "tools": TOOLS, "parallel_tool_calls": False}),
        ("response", {"input": "the ferry", "instructions": "é", "metadata": {"a": "ß"}}),
    ],
    ids=[
        "all fields",
        "control tokens",
        "chat without a limit",
        "chat with a limit",
        "tools",
        "response",
    ],
)
def test_a_body_is_what_it_would_be_here(
    reader: ReaderProcess, model: ServedModel, kind: str, values: dict[str, Any]
) -> None:
    raw = json.dumps({"seed": 7, **values}).encode()
    body = BodyPlace.of_body()
    here: ParsedRequest = BODY_KINDS[Api(kind)](parse_object(raw), body)
    here = replace(here, ignored=body.ignored.listed)
    asked = body_message(Api(kind), (raw[:5], raw[5:]), MAX_TOKENS)
    there = body_of(reader.ask(asked))
    for prompt, read in zip(here.prompts, there.prompts, strict=True):
        assert _values(model.tokenized(read, MAX_TOKENS)) == _values(
            model.tokenized(prompt, MAX_TOKENS)
        )
    told = ("api", "model", "sampling", "is_stream", "answer", "echo", "ignored")
    assert [getattr(there, name) for name in told] == [getattr(here, name) for name in told]


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("the ferry carries </s>" * 5000),
        TextPrompt("the ferry carries </s>" * 5000, parse_special=True),
        ChatPrompt((ChatTurn("user", "héllo <|user|>"), ChatTurn("assistant", ""))),
        ChatPrompt((ChatTurn("user", "hi", '{"name": "Zoë"}'),), False, '{"tools": ["</s>"]}'),
        ChatPrompt((ChatTurn("system", "the ferry"), ChatTurn("user", "hi"))),
        TextPrompt("half a character: \ud800"),
        TextPrompt(""),
    ],
    ids=["text", "control tokens", "chat", "tools", "system", "half a character", "nothing"],
)
@pytest.mark.parametrize("max_tokens", [10, 10**6], ids=["short", "long"])
def test_a_prompt_becomes_what_it_would_here(
    reader: ReaderProcess, model: ServedModel, prompt: TextPrompt | ChatPrompt, max_tokens: int
) -> None:
    def read_there() -> Any:
        return tokens_of(reader.ask(prompt_message(prompt, max_tokens)))[0]

    there = _outcome(read_there)
    assert there == _outcome(lambda: model.tokenized(prompt, max_tokens))


def test_the_places_that_a_caller_marked_are_kept_there_too(
    reader: ReaderProcess, model: ServedModel
) -> None:
    """A body is small, and its prompt large, where JSON writes a character in six."""
    turns = (ChatTurn("system", "the ferry waits"), ChatTurn("user", "é"))
    marks = [TextBreakpoint(3, 300), TextBreakpoint(9, 3600)]
    prompt = MarkedChat((marked(turns[0], marks), turns[1]))
    (there,) = tokens_of(reader.ask(prompt_message(prompt, MAX_TOKENS)))
    here = model.tokenized(prompt, MAX_TOKENS)
    assert len(here.breakpoints) == 2
    assert there.breakpoints == here.breakpoints
    shown = MarkedChat(turns, variables=json.dumps({"tools": TOOLS}))
    tools = replace(shown, tool_breakpoints=(ToolBreakpoint(0, 300),))
    assert prompt_of(prompt_message(tools, MAX_TOKENS)) == tools
    assert prompt_of(prompt_message(prompt, MAX_TOKENS)) == prompt


def _values(prompt: TokenPrompt) -> tuple[list[int], tuple[int, ...]]:
    return prompt.token_ids.tolist(), prompt.fork_points


def _outcome(read: Callable[[], TokenPrompt]) -> object:
    try:
        return _values(read())
    except InvalidRequest as error:
        return type(error), str(error), error.param


REFUSED = [
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": [1, 399999]}',
    b'{"prompt": ""}',
    b'{"prompt": "' + b"the ferry " * 2000 + b'"}',
    b'{"prompt": "\\ud800"}',
    b'["a"]',
    b'{"prompt": NaN}',
    b'\xff{"prompt": "a"}',
]


@pytest.mark.parametrize("body", REFUSED, ids=range(len(REFUSED)))
async def test_a_large_body_is_refused_as_a_small_one(one_pair: RouterCluster, body: bytes) -> None:
    small = await one_pair.http.post("/v1/completions", content=body)
    large = await one_pair.http.post("/v1/completions", content=body + PADDING)
    assert small.status_code >= 400
    assert (large.status_code, large.json()) == (small.status_code, small.json())


async def test_large_bodies_are_answered_and_not_read_here(
    one_pair: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = await one_pair.complete("the ferry", max_tokens=4)

    def refuse(*given: object) -> NoReturn:
        raise AssertionError("it is read in the router's own process")

    monkeypatch.setattr(text_endpoints, "parse_object", refuse)
    monkeypatch.setattr(ServedModel, "tokenized", lambda *given: given[1])
    body = b'{"prompt": "the ferry", "max_tokens": 4}' + PADDING
    large = await one_pair.http.post("/v1/completions", content=body)
    assert large.json()["choices"] == small.json()["choices"]
    assert large.json()["usage"]["prompt_tokens"] == small.json()["usage"]["prompt_tokens"]
    text = "the ferry carries " * 5000
    for call in (
        one_pair.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text))),
        collect(one_pair.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text=text)))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        reasons = dict(caught.value.trailing_metadata() or ())
        assert reasons["ferryman-reason"] == ContextLengthExceeded.__name__


def test_who_dies_while_it_reads_has_a_successor(reader: ReaderProcess) -> None:
    asked = prompt_message(TextPrompt("the ferry"), MAX_TOKENS)
    (before,) = tokens_of(reader.ask(asked))
    first = reader.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    (after,) = tokens_of(reader.ask(asked))  # it died idle: nothing was lost
    assert reader.process_id != first
    assert _values(before) == _values(after)


@pytest.mark.parametrize("script", [DIES, SPEAKS_NONSENSE, HANGS], ids=["dies", "lies", "hangs"])
def test_the_body_that_it_dies_of_may_be_sent_again(script: str) -> None:
    with closing(_python(script, max_silent_seconds=20 if script != HANGS else 0.5)) as dying:
        lives = set()
        for _ in range(2):
            with pytest.raises(Unavailable, match="again") as caught:
                dying.ask(ReaderMessage({}, (PADDING,) * 16))
            assert caught.type is Unavailable
            lives.add(dying.process_id)
        assert len(lives) == 2, "each time another one was asked"


async def test_callers_whose_body_it_dies_of_hear_it_and_others_go_on(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReaderProcess, "for_model", lambda *model: _python(DIES))
    async with cluster(nats_url, folder) as made:
        body = b'{"prompt": "the ferry"}' + PADDING
        broken = await made.http.post("/v1/completions", content=body)
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "unavailable")
        prompt = pb.Prompt(text="the ferry carries " * 5000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.stub.Tokenize(pb.TokenizeRequest(prompt=prompt))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await made.complete("the ferry", max_tokens=2)).status_code == 200


def test_a_process_that_cannot_be_started_is_no_bug() -> None:
    with closing(ReaderProcess(("/no/such/program",))) as reader, pytest.raises(Unavailable):
        reader.ask(ReaderMessage({}))


def test_a_bug_fails_one_body_and_says_nothing_of_itself(reader: ReaderProcess) -> None:
    tokens_of(reader.ask(prompt_message(TextPrompt("the ferry"), MAX_TOKENS)))
    before = reader.process_id
    with pytest.raises(FerrymanError, match="log has the details") as caught:
        tokens_of(reader.ask(ReaderMessage({"kind": "text prompt"})))
    assert caught.type is FerrymanError
    assert reader.process_id == before


def test_an_error_that_says_too_much_is_cut() -> None:
    said = failure_of(InvalidRequest("é" * MAX_HEAD_BYTES, "messages"))
    message = failure_message(said)
    assert len(json.dumps(message.head)) < MAX_HEAD_BYTES
    with pytest.raises(InvalidRequest, match="éé") as caught:
        tokens_of(message)
    assert caught.value.param == "messages"


def test_closing_ends_the_process_and_tells_who_waits() -> None:
    reader = _python(HANGS)
    reader.start()
    pid = reader.process_id
    assert pid is not None
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(reader.ask, ReaderMessage({}, (PADDING,) * 64))
        reader.close()
        with pytest.raises(Unavailable):
            asking.result()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with pytest.raises(Stopping):
        reader.ask(ReaderMessage({}))


def test_it_stands_back_and_ends_with_the_router(reader: ReaderProcess, folder: Path) -> None:
    tokens_of(reader.ask(prompt_message(TextPrompt("the ferry"), MAX_TOKENS)))
    assert reader.process_id is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(reader.process_id, number)  # the router is meant, and may be draining
    before = reader.process_id
    tokens_of(reader.ask(prompt_message(TextPrompt("the ferry"), MAX_TOKENS)))
    assert reader.process_id == before
    niceness = os.getpriority(os.PRIO_PROCESS, reader.process_id)
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    ours, theirs = socket.socketpair()
    command = (sys.executable, "-m", "ferryman_router.intake.reader", str(folder), "tiny")
    with theirs, ours:
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    assert process.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_inherits_no_setting_and_so_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_ROUTER_API_KEYS", "a-secret")
    with closing(ReaderProcess.for_model(folder, "tiny")) as reader:
        tokens_of(reader.ask(prompt_message(TextPrompt("the ferry"), MAX_TOKENS)))
        inherited = Path(f"/proc/{reader.process_id}/environ").read_bytes()
    assert b"PATH=" in inherited
    assert b"FERRYMAN_" not in inherited


async def test_who_waits_for_it_too_long_hears_of_the_deadline() -> None:
    with closing(_python(HANGS)) as reader, closing(Intake(reader)) as intake:
        holding = asyncio.ensure_future(intake.ask(ReaderMessage({}), within=60))
        with pytest.raises(DeadlineExceeded):
            await intake.ask(ReaderMessage({}), within=0.01)
        await asyncio.to_thread(reader.close)
        with pytest.raises(Unavailable):
            await holding

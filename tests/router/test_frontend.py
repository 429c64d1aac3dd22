"""Readers who leave and come back: how long a request waits for them, and what they then read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from tests.cluster_keys import KEY
from tests.doubles.memory_bus import MemoryBus
from tests.doubles.memory_index import MemoryIndex
from tests.skipped_time import SkippedTime, skipped_time

from ferryman.errors import Cancelled, InvalidRequest
from ferryman.ids import make_epoch
from ferryman.runtime.background import Background
from ferryman.runtime.membership import Membership
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.security.state_signatures import StateSigner
from ferryman.settings.router import LimitSettings
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.hostcache.unit_seals import UnitSeals
from ferryman.wire.nats.sender_proof import believe_all
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import GenerateFinished, TokenChunk, TokenPrompt
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.values import Usage
from ferryman_router.components import StateKeys, Transports, make_components
from ferryman_router.intake.body_intake import Intake, ReaderProcess
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed, OutputLog
from ferryman_router.routing.generate_request import (
    PUBLIC,
    Caller,
    GenerateRequest,
    RequestedSampling,
)
from ferryman_router.routing.quotas import Quotas
from ferryman_router.served_model import ServedModel

LINGER_SECONDS = 100.0
NEVER = 1e6
LIMITS = LimitSettings(
    linger_seconds=LINGER_SECONDS, no_worker_seconds=NEVER, deadline_seconds=NEVER
)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> SkippedTime:
    return skipped_time(monkeypatch)


@pytest.fixture
async def frontend(folder: Path) -> AsyncIterator[Frontend]:
    """A router without workers: requests are under way, because they wait for one."""
    member = Membership("router", "router-1", make_epoch(), MemoryBus(), Subjects("test"))
    model = ServedModel.load(folder, "tiny", 0)
    async with Channels() as channels, Background() as background:
        lifecycle, index = member.lifecycle(), MemoryIndex()
        signatures = RouterSignatures(OPEN_TO_ALL)
        states = StateKeys(StateSigner(KEY), UnitSeals(KEY))
        ways = Transports(
            member, channels, lifecycle, index, believe_all, signatures, background, states
        )
        with closing(Intake(ReaderProcess(()))) as intake:
            yield make_components(LIMITS, model, ways, intake, Quotas()).frontend


async def _open(frontend: Frontend, request_id: str = "request") -> RequestRunner:
    prompt = TokenPrompt(np.arange(5, 15, dtype="<u4"))
    caller = Caller(request_id, PUBLIC, NEVER, "")
    return await frontend.open(
        GenerateRequest(
            caller, "", prompt, RequestedSampling(SamplingParams()), frontend.ctx.clock()
        )
    )


def _visit(frontend: Frontend, runner: RequestRunner) -> ExitStack:
    """A reader; closing it is leaving."""
    stack = ExitStack()
    stack.enter_context(frontend.listening(runner, asyncio.Event()))
    return stack


async def test_a_request_ends_when_its_reader_does_not_come_back(
    frontend: Frontend, time: SkippedTime
) -> None:
    runner = await _open(frontend)
    _visit(frontend, runner).close()
    await time.skip(LINGER_SECONDS - 10)
    assert runner.output_log.end is None
    await time.skip(20)
    assert isinstance(runner.output_log.end, OutputFailed)
    assert isinstance(runner.output_log.end.error, Cancelled)
    assert "client_gone" in str(runner.output_log.end.error)
    assert len(frontend.requests) == 0


async def test_a_reader_who_comes_back_in_time_keeps_the_request(
    frontend: Frontend, time: SkippedTime
) -> None:
    runner = await _open(frontend)
    _visit(frontend, runner).close()
    await time.skip(LINGER_SECONDS - 10)
    with _visit(frontend, runner):
        await time.skip(3 * LINGER_SECONDS)
        assert runner.output_log.end is None


async def test_each_time_a_reader_leaves_the_patience_begins_anew(
    frontend: Frontend, time: SkippedTime
) -> None:
    runner = await _open(frontend)
    _visit(frontend, runner).close()
    await time.skip(LINGER_SECONDS - 10)
    _visit(frontend, runner).close()
    await time.skip(LINGER_SECONDS - 10)  # the first patience has ended in between
    assert runner.output_log.end is None
    with _visit(frontend, runner):
        await time.skip(3 * LINGER_SECONDS)
        assert runner.output_log.end is None


async def test_a_request_goes_on_for_the_reader_who_stays(
    frontend: Frontend, time: SkippedTime
) -> None:
    runner = await _open(frontend)
    with _visit(frontend, runner):
        _visit(frontend, runner).close()
        await time.skip(3 * LINGER_SECONDS)
        assert runner.output_log.end is None


async def test_an_answer_that_ends_within_the_patience_stays_whole(
    frontend: Frontend, time: SkippedTime
) -> None:
    runner = await _open(frontend)
    _visit(frontend, runner).close()
    end = GenerateFinished(FinishReason.STOP, Usage(10))
    runner.output_log.close(end)
    await time.skip(3 * LINGER_SECONDS)
    assert runner.output_log.end is end


CHUNKS = [
    TokenChunk(0, (5, 6), "ab", ({}, {})),
    TokenChunk(2, (7,), "", ({},)),
    TokenChunk(3, (8, 9, 10), "cde", ({}, {}, {})),
]


def test_a_reader_goes_on_at_any_chunk_and_nowhere_else() -> None:
    output_log = OutputLog()
    assert output_log.chunk_index(0) == 0
    for chunk in CHUNKS:
        output_log.add(chunk)
    assert [output_log.chunk_index(offset) for offset in (0, 2, 3, 6)] == [0, 1, 2, 3]
    for offset in (1, 4, 5, 7):
        with pytest.raises(InvalidRequest, match="no chunk"):
            output_log.chunk_index(offset)


def test_the_first_end_counts() -> None:
    output_log = OutputLog()
    first = GenerateFinished(FinishReason.STOP, Usage(1), "held back")
    output_log.close(first)
    output_log.close(OutputFailed(Cancelled("late"), "decoding", 3))
    assert output_log.end is first


def test_every_listener_hears_of_chunks_and_of_the_end() -> None:
    output_log, one, other = OutputLog(), asyncio.Event(), asyncio.Event()
    output_log.listen(one)
    output_log.listen(other)
    output_log.add(CHUNKS[0])
    assert one.is_set()
    assert other.is_set()
    one.clear()
    output_log.leave(other)
    other.clear()
    output_log.close(GenerateFinished(FinishReason.STOP, Usage(1)))
    assert one.is_set()
    assert not other.is_set()

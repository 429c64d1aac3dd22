"""Between Commit and its answer prefill cannot know the request's owner, so it never ends it.

Row 50 of the catalogue. Each fault counts when it takes effect.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.harness.pair import WorkerPair, expected, pair_of_workers, request
from tests.waiting import until

from ferryman.errors import CorruptState, Stale, Unavailable
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import decode_pb2
from ferryman.worker import decode_client
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.server import DecodeServicer

PROMPT = [3] * 21
PLANES = [
    "grpc",
    "auto",
    pytest.param("nixl-unlocked", marks=pytest.mark.skipif(not has_nixl(), reason="not installed")),
]


def ends_of(pair: WorkerPair) -> list[str]:
    """The events by which prefill reported the end of the attempt, with repetitions."""
    names = ("handed_off", "failed", "cancelled")
    return [name for name in names for _ in pair.prefill.facts(name)]


async def the_answer_is_whole(pair: WorkerPair) -> None:
    tokens, _ = await pair.read_tokens("r1")
    assert tokens == expected(request("r1", PROMPT, max_tokens=40))
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()


class LosesAnswers(DecodeServicer):
    """Carries out Commit, but loses the answers to the first `num_to_lose` calls."""

    num_to_lose = 1

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self.num_lost = 0

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        answer = await super().Commit(request, context)
        if self.num_lost < self.num_to_lose:
            self.num_lost += 1
            raise Unavailable("the answer was lost")
        return answer


class LosesAllAnswers(LosesAnswers):
    num_to_lose = 1_000_000


@pytest.mark.parametrize("planes", PLANES)
async def test_a_lost_answer_to_commit_is_asked_for_again(planes: PlaneChoice) -> None:
    async with pair_of_workers(LosesAnswers, planes=planes) as pair:
        progress = await pair.run_prefill(pair.order(request("r1", PROMPT, max_tokens=40)))
        assert pair.decode.service.num_lost == 1
        assert progress[-1].HasField("handed_off")
        assert ends_of(pair) == ["handed_off"]
        await the_answer_is_whole(pair)


@pytest.mark.parametrize("planes", PLANES)
async def test_prefill_learns_from_its_own_abort_that_the_request_was_committed(
    planes: PlaneChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Commit is ever answered; the writer's word that it is done is."""
    monkeypatch.setattr(decode_client, "UNKNOWN_SECONDS", 0.0)
    async with pair_of_workers(LosesAllAnswers, planes=planes) as pair:
        pair.decode.hold()
        progress = await pair.run_prefill(pair.order(request("r1", PROMPT, max_tokens=40)))
        assert pair.decode.service.num_lost >= 1
        assert pair.decode.engine.scheduler.statistics().decoding == 1
        assert progress[-1].HasField("handed_off")
        assert ends_of(pair) == ["handed_off"]
        pair.decode.go_on()
        await the_answer_is_whole(pair)


async def test_a_beat_has_the_seconds_from_a_computed_prompt_to_decode_s_word() -> None:
    async with pair_of_workers() as pair:
        prefill = pair.prefill.service
        assert prefill.load().handoff_seconds == 0.0
        progress = await pair.run_prefill(pair.order(request("r1", PROMPT, max_tokens=4)))
        handed_off = progress[-1].handed_off
        assert 0.0 < prefill.load().handoff_seconds < handed_off.seconds


class AnswersLate(DecodeServicer):
    """Carries Commit out, and answers when `may_answer` is set."""

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self.may_answer = asyncio.Event()
        self.num_held = 0

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        answer = await super().Commit(request, context)
        self.num_held += 1
        await self.may_answer.wait()
        return answer


async def test_a_prefill_that_is_cancelled_before_the_answer_comes_says_handed_off() -> None:
    """The router has its tokens and cancels the call before prefill has the commit's answer."""
    async with pair_of_workers(AnswersLate) as pair:
        pair.decode.hold()
        order = pair.order(request("r1", PROMPT, max_tokens=40))
        running = asyncio.create_task(pair.run_prefill(order))
        await until(lambda: pair.decode.service.num_held == 1)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: bool(ends_of(pair)))
        assert ends_of(pair) == ["handed_off"]
        assert pair.decode.engine.scheduler.statistics().decoding == 1
        pair.decode.go_on()
        await the_answer_is_whole(pair)


class CommitsNothing(DecodeServicer):
    """Refuses every Commit without looking; `error` is what it says."""

    error: Exception = Unavailable("no way to it")
    num_refused = 0

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        self.num_refused += 1
        raise self.error


async def test_what_was_never_committed_is_given_up_and_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_client, "UNKNOWN_SECONDS", 0.3)
    async with pair_of_workers(CommitsNothing) as pair:
        with pytest.raises(Unavailable):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert pair.decode.service.num_refused >= 2
        assert ends_of(pair) == ["failed"]
        await until(lambda: not pair.leased())


@pytest.mark.parametrize(
    "error", [CorruptState("gaps"), Stale("another life")], ids=["data", "epoch"]
)
async def test_what_decode_itself_says_of_a_commit_is_not_asked_for_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommitsNothing, "error", error)
    async with pair_of_workers(CommitsNothing) as pair:
        with pytest.raises(type(error)):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert pair.decode.service.num_refused == 1
        assert ends_of(pair) == ["failed"]

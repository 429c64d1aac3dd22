"""The return of a retracted request is published once, with the way in which it really resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.harness.pair import fake_engine, parts_of, request
from tests.waiting import until
from tests.worker.test_reuse import plan_of, unit

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView
from ferryman.cache.units import Tier
from ferryman.schedule.events import Finished, LoadCorrupt, LoadsDone, Retracted, SequenceAdmitted
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.sequence import Goal
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.client import HostLease
from ferryman.worker.host import NoHostTier
from ferryman.worker.preempted import PreemptedRequests

ASKED = request("r1", [3] * 21)
BY_HOST = plan_of(20, 0, unit(Kind.FULL, 4, Tier.HOST), unit(Kind.RECURRENT, 4, Tier.HOST))
COMPUTED = plan_of(0, 0)

NAME = ASKED.request_id


class WaitingHost(NoHostTier):
    """Has a lease for every request that is retracted, and notes how leases end."""

    def __init__(self) -> None:
        self.released: list[bool] = []

    async def offload_retracted(self, request: Request, tags: CallTags) -> HostLease:
        return HostLease("kept", 1, 5, HostView())

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        self.released.append(was_corrupt)


@asynccontextmanager
async def away(host: WaitingHost) -> AsyncIterator[PreemptedRequests]:
    """A request that was retracted, waits in line, and has its lease."""
    with fake_engine() as engine:
        async with parts_of("decode", engine) as parts:
            preempted = PreemptedRequests(
                host, engine.scheduler, parts.background.start, parts.wake.set
            )
            engine.scheduler.submit(ASKED, Goal.DECODE, HostView())
            assert preempted.on_event(Retracted(NAME, 0, ASKED), NO_TAGS) is None
            await until(lambda: not parts.background)
            assert host.released == [], "the lease is for when it comes back"
            yield preempted


async def test_a_request_is_back_when_its_loads_are_there() -> None:
    host = WaitingHost()
    async with away(host) as preempted:
        assert preempted.on_event(SequenceAdmitted(NAME, BY_HOST, True), NO_TAGS) is None
        assert preempted.on_event(LoadsDone(NAME), NO_TAGS) is BY_HOST
        assert host.released == [False]
        assert preempted.on_event(LoadsDone(NAME), NO_TAGS) is None


async def test_a_request_whose_load_was_spoilt_is_back_by_its_next_plan() -> None:
    host = WaitingHost()
    async with away(host) as preempted:
        assert preempted.on_event(SequenceAdmitted(NAME, BY_HOST, True), NO_TAGS) is None
        assert preempted.on_event(LoadCorrupt(NAME), NO_TAGS) is None
        assert host.released == [True]
        assert preempted.on_event(SequenceAdmitted(NAME, COMPUTED, False), NO_TAGS) is COMPUTED
        assert host.released == [True]


async def test_a_request_that_needs_no_loads_is_back_at_once() -> None:
    host = WaitingHost()
    async with away(host) as preempted:
        assert preempted.on_event(SequenceAdmitted(NAME, COMPUTED, True), NO_TAGS) is COMPUTED
        assert host.released == [False]


async def test_who_was_never_away_does_not_come_back() -> None:
    host = WaitingHost()
    async with away(host) as preempted:
        assert preempted.on_event(SequenceAdmitted("r2", COMPUTED, False), NO_TAGS) is None
        assert preempted.on_event(Finished(NAME, FinishReason.CANCELLED, 0), NO_TAGS) is None
        assert host.released == [False]
        assert preempted.on_event(SequenceAdmitted(NAME, COMPUTED, False), NO_TAGS) is None, (
            "it has ended"
        )

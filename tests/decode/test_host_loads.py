"""Units that decode loads from its host tier while prefill sends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.engine.host_fed import HostMemory
from tests.harness.pair import (
    MANIFEST,
    PATIENT_SECONDS,
    WorkerPair,
    expected,
    pair_of_workers,
    request,
)
from tests.waiting import until

from ferryman.cache.units import Tier
from ferryman.engine.memory.copy_stream import AtOnce
from ferryman.errors import CorruptState, FerrymanError, LeaseLost, OutOfSlots, Stale
from ferryman.schedule.request import Request
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import MISS, HostLease
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.values import RouterAbort
from ferryman.worker.host import NoHostTier
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.server import DecodeServicer

T = TypeVar("T")

PROMPT = [3] * 21  # five full pages, of which the window of six needs the last; and one token
FIVE_PAGES = {"full": 5, "window": 1}


class ReceivingHost(NoHostTier):
    """A host tier as decode's Reserve sees it. Lookups wait until `may_answer` is set."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.granted: list[int] = []
        self.released: list[bool] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def lease_for_receive(
        self, request: Request, tags: CallTags, *, seconds_left: float
    ) -> HostLease:
        view = self.memory.view(request.keys)
        self.granted.append(len(view.units))
        await self.may_answer.wait()
        return HostLease(f"lease-{len(self.granted)}", 1, 0, view) if view.units else MISS

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        if lease is not MISS:
            self.released.append(was_corrupt)


class HeldCopies(AtOnce):
    """Copies that run when the test says so."""

    def __init__(self) -> None:
        self._held: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._held.append((job, future))
        return future

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def run(self) -> None:
        held, self._held = self._held, []
        for job, future in held:
            future.set_result(job())


class NotesCommits(DecodeServicer):
    """Says when a commit has come."""

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self.commit_came = asyncio.Event()

    async def Commit(self, request: decode_pb2.CommitRequest, context: Any) -> Any:
        self.commit_came.set()
        return await super().Commit(request, context)


@asynccontextmanager
async def pair_with(host: ReceivingHost, num_slots: int = 60) -> AsyncIterator[WorkerPair]:
    """Decode's host tier has the state of PROMPT, and its device has nothing."""

    def make_decode(parts: WorkerContext) -> DecodeServicer:
        return NotesCommits(replace(parts, host=host))

    async with pair_of_workers(make_decode, num_slots) as pair:
        first = request("first", PROMPT)
        await pair.run_prefill(pair.order(first))
        await pair.read_tokens("first")
        await nothing_is_held(pair)
        engine = pair.decode.engine
        for unit in engine.scheduler.chain_units(first.keys):
            content = bytes(engine.transfer.read(unit.kind, unit.handle.slot))
            host.memory.put(unit.kind, unit.page_index, unit.key, content, Tier.STORAGE)
        attach(pair, host)
        assert engine.scheduler.flush() > 0
        host.granted.clear()
        yield pair


def attach(pair: WorkerPair, host: ReceivingHost) -> None:
    pair.decode.engine.host_tier.attach(memoryview(bytes(host.memory.arena)))


def spoil(pair: WorkerPair, host: ReceivingHost) -> None:
    """One bit of the last full page."""
    unit = host.memory.view(request("any", PROMPT).keys).units[MANIFEST.kinds[0], 4]
    host.memory.arena[unit.offset] ^= 1
    attach(pair, host)


def hold_copies(pair: WorkerPair) -> HeldCopies:
    held = HeldCopies()
    pair.decode.engine.host_tier._copies = held
    return held


async def nothing_is_held(pair: WorkerPair) -> None:
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()


async def test_what_the_host_tier_has_is_loaded_and_not_sent() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked))
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)
        (loaded,) = pair.decode.facts("loaded")
        assert loaded["units"] == FIVE_PAGES
        assert loaded["tiers"] == {"storage": 6}
        first, second = pair.prefill.facts("handed_off")
        assert second["superfluous"] == 6
        sent = [MANIFEST.layout(kind).slot_bytes for kind in MANIFEST.kinds]
        assert second["bytes"] == sum(sent), "the partial page of each kind, and the state"
        assert int(str(first["bytes"])) > int(str(second["bytes"]))
        assert host.released == [False]
        await nothing_is_held(pair)
        text = pair.decode.parts.metrics.render().decode()
        assert 'loaded_units_total{kind="full",tier="storage"} 5.0' in text


async def test_a_unit_that_was_spoilt_is_sent_by_the_next_attempt() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        spoil(pair, host)
        asked = request("r1", PROMPT)
        with pytest.raises((CorruptState, LeaseLost)):
            await pair.run_prefill(pair.order(asked))
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["load_failed"]
        assert host.released == [True], "the host-cache is told"
        await nothing_is_held(pair)
        reading = asyncio.create_task(pair.read_tokens("r1", attempt=2))
        await pair.run_prefill(pair.order(asked, attempt=2))
        tokens, _ = await reading
        assert tokens == expected(asked)
        assert len(host.granted) == 1, "a second attempt loads nothing"
        first, second = pair.prefill.facts("handed_off")
        assert second["bytes"] == first["bytes"]
        await nothing_is_held(pair)


async def test_a_commit_waits_for_the_loads() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        held, asked = hold_copies(pair), request("r1", PROMPT)
        pair.decode.service.commit_came.clear()
        running = asyncio.create_task(pair.run_prefill(pair.order(asked)))
        await pair.decode.service.commit_came.wait()
        await until(lambda: held.is_holding)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(pair.decode.facts("verified")) == 1, "that of the first request"
        assert host.released == []
        held.run()
        await running
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)
        assert host.released == [False]
        await nothing_is_held(pair)


async def test_a_commit_that_waits_for_a_load_that_fails_is_refused() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        spoil(pair, host)
        held = hold_copies(pair)
        pair.decode.service.commit_came.clear()
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        await pair.decode.service.commit_came.wait()
        await until(lambda: held.is_holding)
        held.run()
        with pytest.raises(CorruptState):
            await running
        assert host.released == [True]
        await nothing_is_held(pair)


@pytest.mark.parametrize("cause", ["abort", "lease", "newer attempt"])
async def test_slots_that_are_loaded_into_are_not_given_back(cause: str) -> None:
    """However the reservation ends: another request must not get a slot that a load writes to."""
    host = ReceivingHost()
    async with pair_with(host) as pair:
        held, wish = hold_copies(pair), pair.wish(request("r1", PROMPT))
        await pair.reserve(wish)
        await until(lambda: held.is_holding)
        ledger = pair.decode.engine.scheduler.ledgers
        taken = {kind: dict(found.by_role) for kind, found in ledger().items()}
        match cause:
            case "abort":
                await pair.abort(RouterAbort("r1", 1, "client_gone", "router-1"))
            case "lease":
                pair.decode.clock.ahead = PATIENT_SECONDS + 1
                await until(lambda: not pair.decode.service.receiver.table.writers())
            case _:
                pair.prefill.hold()
                await pair.reserve(pair.wish(request("r1", PROMPT), attempt=2))
                await pair.abort(RouterAbort("r1", 2, "client_gone", "router-1"))
                pair.prefill.go_on()
        assert {kind: dict(found.by_role) for kind, found in ledger().items()} == taken
        assert host.released == []
        held.run()
        await nothing_is_held(pair)
        assert host.released == [False]
        assert pair.decode.facts("loaded") == [], "the request had ended"


async def test_of_two_reserves_at_once_one_holds_the_units() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        held, wish = hold_copies(pair), pair.wish(request("r1", PROMPT))
        host.may_answer.clear()
        both = [asyncio.create_task(pair.reserve(wish)) for _ in range(2)]
        await until(lambda: len(host.granted) == 2)
        host.may_answer.set()
        first, second = await asyncio.gather(*both)
        assert first == second
        assert host.released == [False]
        assert await pair.reserve(wish) == first
        assert len(host.granted) == 2, "what is promised is not looked up again"
        held.run()
        await until(lambda: len(host.released) == 2)


async def test_a_reserve_that_is_refused_holds_no_units() -> None:
    host = ReceivingHost()
    async with pair_with(host, num_slots=8) as pair:
        await pair.reserve(pair.wish(request("other", [4] * 21)))
        with pytest.raises(OutOfSlots):
            await pair.reserve(pair.wish(request("r1", PROMPT)))
        assert host.released == [False]


async def test_a_reserve_that_was_cancelled_meanwhile_holds_no_units() -> None:
    host = ReceivingHost()
    async with pair_with(host) as pair:
        host.may_answer.clear()
        late = asyncio.create_task(pair.reserve(pair.wish(request("r1", PROMPT))))
        await until(lambda: len(host.granted) == 1)
        await pair.abort(RouterAbort("r1", 1, "client_gone", "router-1"))
        host.may_answer.set()
        with pytest.raises(Stale):
            await late
        assert host.released == [False]
        assert not pair.decode.leased()


async def test_a_load_that_cannot_begin_gives_the_reservation_up() -> None:
    """As the copy stream refuses one that is full, or closed."""
    host = ReceivingHost()
    async with pair_with(host) as pair:

        def refuse(_loads: object) -> Future[None]:
            raise RuntimeError("no copies any more")

        pair.decode.engine.host_tier.load = refuse  # type: ignore[assignment,method-assign]
        with pytest.raises(FerrymanError):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert [facts["reason"] for facts in pair.decode.facts("aborted")] == ["load_failed"]
        await nothing_is_held(pair)
        assert host.released == [True]

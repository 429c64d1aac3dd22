"""Known ways to get a hand-off wrong, in the services' own code: rows 8, 9, 28, 31, 33, 34, 35, 47.

Rows 28 to 33 are tried on the tables alone in `tests/handoff/test_handoff_defects.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.defects.pair import Pair, engine_of, fence_of, pair_of, write_unit
from tests.defects.test_schedule_rows import HOSTS, worker_for
from tests.defects.watch import ALL_KINDS, HYBRID, WatchedWorker, books, is_all_cached
from tests.schedule.cluster import request

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Role
from ferryman.errors import CorruptState, FerrymanError, LeaseLost, Stale, Unavailable
from ferryman.handoff.usage import CachedTokens
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.runtime.background import Background
from ferryman.schedule.events import Cached
from ferryman.schedule.request import Request
from ferryman.wire.codec.pieces import Piece
from ferryman.wire.data_plane import OutgoingUnit
from ferryman.wire.host_client import NO_TAGS, HostCacheClient, HostLease, UnitSource
from ferryman.wire.rpc import CallTags
from ferryman.wire.values import Usage
from ferryman.worker.host import HostTier, NoHostTier
from ferryman_prefill.outgoing import Outgoing
from ferryman_router.usage import settled_usage


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of(worker_for(ALL_KINDS), worker_for(ALL_KINDS)) as both:
        yield both


async def hand_off(pair: Pair, asked: Request, host: NoHostTier | None = None) -> Usage:
    """One request from queue to commit; what decode was told of its prompt."""
    attempt, side = pair.attempt(asked, host)
    running = asyncio.create_task(attempt.run(0))
    for _ in range(20):
        await pair.step()
    await running
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)
    (commit,) = side.commits
    return commit.usage


# Rows 8 and 9: units are paired by absolute name, and a reservation is a value.

UNITS = st.sets(st.tuples(st.sampled_from([Kind.FULL, Kind.WINDOW]), st.integers(0, 9)))


@given(UNITS, st.integers(0, 40), st.integers(1, 40))
def test_rows_8_and_9_what_leaves_is_what_was_wanted_once_and_by_name(
    names: set[tuple[Kind, int]], position: int, prompt_len: int
) -> None:
    wanted = tuple(WantedUnit(kind, index, 7) for kind, index in sorted(names))
    reservation = Reservation("res", 9, 1, (*wanted, WantedUnit(Kind.RECURRENT, prompt_len, 7)), 5)
    for _ in range(2):  # a retry finds the reservation as it was
        outgoing = Outgoing(reservation, 4)
        early = outgoing.up_to(position)
        assert {unit.name for unit in early} == {
            (kind, index)
            for kind, index in names
            if kind is Kind.FULL and 4 * index + 4 <= position
        }
        assert outgoing.up_to(position) == []
        lacking = {unit.name for unit in wanted} - {unit.name for unit in early}
        if any(4 * index >= prompt_len for _, index in lacking):
            with pytest.raises(CorruptState, match="decode wants"):
                outgoing.rest(prompt_len)
            continue
        rest = outgoing.rest(prompt_len)
        assert {unit.name for unit in rest} == lacking | {(Kind.RECURRENT, prompt_len)}
        assert rest[-1].kind is Kind.RECURRENT, "the state goes last"
        assert outgoing.num_waiting == 0


async def test_row_8_lists_of_different_length_pair_equal_pages(pair: Pair) -> None:
    """Prefill has everything, decode wants what lies beyond its own prefix."""
    await hand_off(pair, request(ALL_KINDS, "r0", [1] * 10, 3))
    await hand_off(pair, request(ALL_KINDS, "r1", [1] * 10 + [2] * 11, 3))
    await hand_off(pair, request(ALL_KINDS, "r2", [1] * 10 + [2] * 11 + [1] * 6, 3))


# Rows 28 and 31: a writer that comes late.


async def test_rows_28_and_31_a_late_write_never_reaches_the_slots_next_tenant(pair: Pair) -> None:
    """The first attempt's bytes arrive when another request has its slots."""
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 14, 3))
    side.arrives.clear()
    running = asyncio.create_task(attempt.run(0))
    for _ in range(6):
        await pair.step()
    assert side.offered, "a unit is on its way"
    (reservation,) = side.reservations
    pair.receiving.carry_out(pair.receiving.table.abort("r0", 1, pair.now).effects)
    other, next_side = pair.attempt(request(ALL_KINDS, "r1", [2] * 14, 3))
    answer = await next_side.reserve(1.0)
    mine = {unit.name: unit for unit in answer.reservation.wanted}
    before = {kind: pair.decode.engine.slabs.stamps(kind).copy() for kind in Kind}
    unit, content = side.offered[0]
    late = OutgoingUnit(unit.unit, memoryview(content))
    with pytest.raises(LeaseLost):
        write_unit(pair.receiving, fence_of(reservation), late)
    with pytest.raises(Stale, match="generation"):
        write_unit(pair.receiving, fence_of(answer.reservation), late)
    assert mine[unit.unit.name].slot_generation == unit.unit.slot_generation + 1
    for kind, stamps in before.items():
        assert (pair.decode.engine.slabs.stamps(kind) == stamps).all()
    side.arrives.set()
    with pytest.raises(FerrymanError):
        await _unwrapped(running)
    assert other.name in pair.attempts


async def test_row_28_prefill_keeps_its_slots_until_decode_has_answered(pair: Pair) -> None:
    """Sent and still unread by decode: neither the end of the prompt nor eviction frees them."""
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 14, 3))
    side.arrives.clear()
    running = asyncio.create_task(attempt.run(0))
    for _ in range(6):
        await pair.step()
    offered = [unit for unit, _ in side.offered]
    assert offered
    sending = [h for h, holders in books(pair.prefill).items() if _is_leaving(holders)]
    pair.prefill.scheduler.cancel(attempt.name, pair.now)
    pair.prefill.scheduler.flush()
    assert all(_is_leaving(books(pair.prefill)[handle]) for handle in sending)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert is_all_cached(pair.prefill)
    assert is_all_cached(pair.decode)


def _is_leaving(holders: Sequence[Holder]) -> bool:
    return any(holder.role is Role.TRANSFER_OUT for holder in holders)


async def _unwrapped(running: asyncio.Task[None]) -> None:
    """Awaits an attempt; of a group of errors, raises the first."""
    try:
        await running
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


# Row 33: every end on one side is heard on the other.


# After four steps the prompt is held: then the schedule has done its part.
ENDS = [("caller goes away", n) for n in range(6)] + [("decode gives up", n) for n in range(6)]
ENDS += [("schedule gives up", n) for n in range(4)]


@pytest.mark.parametrize(("end", "steps"), ENDS)
async def test_row_33_an_end_on_one_side_frees_the_other(pair: Pair, end: str, steps: int) -> None:
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 25, 9))
    running = asyncio.create_task(attempt.run(0))
    side.arrives.clear()
    await pair.settle()
    for _ in range(steps):
        await pair.step()
    if end == "caller goes away":
        running.cancel()
    elif end == "schedule gives up":
        pair.prefill.scheduler.cancel(attempt.name, pair.now)
    else:
        pair.receiving.carry_out(pair.receiving.table.abort("r0", 1, pair.now).effects)
    side.arrives.set()
    for _ in range(8):
        await pair.step()
    assert running.done()
    with pytest.raises((asyncio.CancelledError, FerrymanError)):
        await _unwrapped(running)
    assert len(side.aborts) == 1, "decode hears of it"
    assert is_all_cached(pair.prefill)
    assert books(pair.decode) == {}


# Row 34: cached tokens are counted once.


async def test_row_34_cached_tokens_stay_within_the_prompt_when_both_sides_have_it(
    pair: Pair,
) -> None:
    for index, prompt in enumerate([[1] * 17, [1] * 17, [1] * 17 + [2] * 9, [1] * 21]):
        usage = await hand_off(pair, request(ALL_KINDS, f"r{index}", prompt, 2))
        assert usage.prompt_tokens == len(prompt)
        assert usage.cached.total < len(prompt), "one token at least is computed"
        assert usage.cached.total == (0 if index == 0 else 16)


@given(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_row_34_a_count_beyond_the_prompt_is_never_shown(
    prompt_len: int, device: int, host: int, storage: int
) -> None:
    """A retry may count tokens of an answer as its prompt; the client's prompt is shorter."""
    counted = Usage(500, cached=CachedTokens(device, host, storage))
    shown = settled_usage(counted, prompt_len, 3)
    assert shown.prompt_tokens == prompt_len
    assert shown.cached.total == min(prompt_len, device + host + storage)


# Row 35: what a load is still writing is not sent.


class HostOfOne(NoHostTier):
    """Grants what another worker wrote through."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.releases: list[bool] = []

    async def lease_for(self, request: Request, tags: CallTags) -> HostLease:
        return HostLease("lease", 1, 0, HOSTS["all kinds"].view(request.keys, self._how))

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        self.releases.append(was_corrupt)


@pytest.mark.parametrize("how", ["host", "corrupt"])
@pytest.mark.parametrize("tail", [1, 6, 20])
async def test_row_35_pages_that_a_load_is_writing_are_not_sent_before_it_is_done(
    pair: Pair, tail: int, how: str
) -> None:
    """Admission is heard of before the step with the loads has run."""
    pair.prefill.engine.host_tier.attach(memoryview(bytes(HOSTS["all kinds"].arena)))
    asked = request(ALL_KINDS, "r0", [1] * 17 + [2] * tail, 3)
    attempt, side = pair.attempt(asked, host := HostOfOne(how))
    running = asyncio.create_task(attempt.run(0))
    await pair.settle()
    pair.prefill.plan()
    await pair.settle()
    (step,) = pair.prefill.queued
    assert step.ops.loads, "a load is under way"
    assert side.offered == [], "and nothing of it is offered"
    for _ in range(20):
        await pair.step()
    await running
    for unit, content in side.offered:
        assert bytes(unit.content) == content, f"{unit.unit} changed after it was offered"
    assert host.releases[0] is (how == "corrupt")
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)


async def test_row_35_a_device_prefix_below_a_load_goes_early(pair: Pair) -> None:
    """What the tree holds was written long ago: it is offered on admission, the loads are not."""
    pair.prefill.engine.host_tier.attach(memoryview(bytes(HOSTS["all kinds"].arena)))
    pair.prefill.submit(request(ALL_KINDS, "warm", [1] * 6, 1))
    pair.prefill.drain()
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 17 + [2] * 6, 3), HostOfOne("host"))
    running = asyncio.create_task(attempt.run(0))
    await pair.settle()
    pair.prefill.plan()
    await pair.settle()
    (step,) = pair.prefill.queued
    loading = {(load.unit.kind, load.unit.page_index) for load in step.ops.loads}
    assert loading
    assert [unit.unit.name for unit, _ in side.offered] == [(Kind.FULL, 0)]
    for _ in range(20):
        await pair.step()
    await running
    pair.decode.drain()
    assert pair.decode.tokens[attempt.name] == pair.decode.expected(attempt.name)


# Row 47 (and 48): a page that is being copied out stays as it is until the copy has ended.


class SlowHost(HostCacheClient):
    """A host-cache whose stores wait for the test, and then copy or give up."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.is_away = False
        self.stored: dict[tuple[Kind, int], bytes] = {}

    async def store(
        self, keys: Sequence[PageKey], units: Sequence[UnitSource], *, tags: CallTags = NO_TAGS
    ) -> int:
        await self.may_go_on.wait()
        if self.is_away:
            raise Unavailable("the host-cache is away")
        for unit in units:
            room = bytearray(HYBRID.layout(unit.kind).slot_bytes)
            unit.copy(memoryview(room))
            self.stored[unit.kind, unit.page_index] = bytes(room)
        return len(units)


@pytest.mark.parametrize("is_away", [False, True], ids=["copied", "host away"])
async def test_rows_47_and_48_a_slot_that_is_copied_out_is_not_reused_until_the_copy_ends(
    is_away: bool,
) -> None:
    worker = WatchedWorker(HYBRID, {Kind.FULL: 8, Kind.RECURRENT: 6})
    with engine_of(worker) as engine:
        async with Background() as background:
            client = SlowHost()
            client.is_away = is_away
            tier = HostTier(engine, client, background, lambda: None)
            worker.submit(request(HYBRID, "r0", [1] * 9, 1))
            worker.drain()
            held = {
                (unit.kind, unit.page_index): bytes(engine.transfer.read(unit.kind, slot.slot))
                for event in worker.seen(Cached)
                for unit in event.units
                for slot in (unit.handle,)
            }
            for event in worker.seen(Cached):
                tier.write_through(event, NO_TAGS)
            await asyncio.sleep(0)
            # Another prompt needs every slot there is, and gets those that are not being copied.
            worker.scheduler.flush()
            worker.submit(request(HYBRID, "r1", [2] * 15, 3))
            worker.drain()
            client.may_go_on.set()
            await background.finish()
        assert client.stored == ({} if is_away else held)
        worker.scheduler.flush()
        assert books(worker) == {}, "the copies have let go, and eviction goes on"


# A piece in the wrong generation stays out even when its reservation is the right one (row 31).


async def test_row_31_a_piece_for_an_earlier_generation_is_refused(pair: Pair) -> None:
    _, side = pair.attempt(request(HYBRID, "r0", [1] * 14, 3))
    answer = await side.reserve(1.0)
    unit = answer.reservation.wanted[0]
    stale = replace(unit, slot_generation=unit.slot_generation - 1)
    with pytest.raises(Stale):
        pair.receiving.write(fence_of(answer.reservation), Piece(stale, 0, bytes(8)))

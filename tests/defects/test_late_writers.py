"""Rows 28 and 31 of the catalogue: a writer that comes late finds its slots kept or itself refused.

The tables alone are tried in `tests/handoff/test_handoff_defects.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.harness.pair import StampedPair, unwrapped, write_unit
from tests.harness.schedule import ALL_KINDS, HYBRID, books, is_all_cached, request

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Role
from ferryman.errors import FerrymanError, LeaseLost, Stale
from ferryman.handoff.effects import fence_of
from ferryman.wire.codec.pieces import Piece
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.plane_values import GrpcOnly

# Rows 28 and 31: a writer that comes late.


async def test_rows_28_and_31_a_late_write_never_reaches_the_slots_next_tenant(
    pair: StampedPair,
) -> None:
    """The first attempt's bytes arrive when another request has its slots."""
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 14, 3))
    side.arrives.clear()
    running = asyncio.create_task(attempt.run(0))
    for _ in range(6):
        await pair.step()
    assert side.offered, "a unit is on its way"
    (reservation,) = side.reservations
    pair.receiver.carry_out(pair.receiver.table.abort("r0", 1, pair.now).effects)
    other, next_side = pair.attempt(request(ALL_KINDS, "r1", [2] * 14, 3))
    answer = await next_side.reserve(GrpcOnly(), 1.0)
    mine = {unit.name: unit for unit in answer.reservation.wanted}
    before = {kind: pair.decode.engine.slabs.stamps(kind).copy() for kind in Kind}
    unit, content = side.offered[0]
    late = OutgoingUnit(unit.unit, memoryview(content))
    with pytest.raises(LeaseLost):
        write_unit(pair.receiver, fence_of(reservation), late)
    with pytest.raises(Stale, match="generation"):
        write_unit(pair.receiver, fence_of(answer.reservation), late)
    assert mine[unit.unit.name].slot_generation == unit.unit.slot_generation + 1
    for kind, stamps in before.items():
        assert (pair.decode.engine.slabs.stamps(kind) == stamps).all()
    side.arrives.set()
    with pytest.raises(FerrymanError):
        await unwrapped(running)
    assert other.name in pair.attempts


async def test_row_28_prefill_keeps_its_slots_until_decode_has_answered(pair: StampedPair) -> None:
    """Sent and still unread by decode: neither the end of the prompt nor eviction frees them."""
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 14, 3))
    side.arrives.clear()
    running = asyncio.create_task(attempt.run(0))
    for _ in range(6):
        await pair.step()
    offered = [unit for unit, _ in side.offered]
    assert offered
    sending = [h for h, holders in books(pair.prefill).items() if _is_leaving(holders)]
    assert len(sending) >= len(offered)
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


# A piece in the wrong generation stays out even when its reservation is the right one (row 31).


async def test_row_31_a_piece_for_an_earlier_generation_is_refused(pair: StampedPair) -> None:
    _, side = pair.attempt(request(HYBRID, "r0", [1] * 14, 3))
    answer = await side.reserve(GrpcOnly(), 1.0)
    unit = answer.reservation.wanted[0]
    stale = replace(unit, slot_generation=unit.slot_generation - 1)
    with pytest.raises(Stale):
        pair.receiver.write(fence_of(answer.reservation), Piece(stale, 0, bytes(8)))

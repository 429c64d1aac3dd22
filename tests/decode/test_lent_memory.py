"""Writers into lent memory that are late, stopped or dead: no slot waits for them, and none of a
later request is changed by them.

The other side of `test_quarantine.py`: decode itself copies, so there is nothing to recall.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import xxhash
from tests.harness.pair import (
    MANIFEST,
    PATIENT_SECONDS,
    PairWorker,
    expected,
    pair_of_workers,
    paired,
    request,
    worker,
)
from tests.harness.pair.lone import Lone, lone_worker
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError, InvalidRequest
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.grpc.rpc import channel, ending
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff import grpc_plane, memory_plane
from ferryman.wire.handoff.lent_memory import FRAME_BYTES, LENT_BYTES
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import prefill_pb2_grpc
from ferryman.wire.values import PrefillOrder, RequestContext, RouterAbort, WorkerAddress
from ferryman_decode.handoff_receiver import ArrivedBytes
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

PROMPT = [3] * 21


def order_for(prefill: WorkerAddress, decode: WorkerAddress) -> PrefillOrder:
    context = RequestContext("r1", 1, 60.0)
    return PrefillOrder(
        context, prefill.epoch, decode, "router-1", request("r1", PROMPT), MANIFEST.digest
    )


async def run_order(order: PrefillOrder, address: str) -> None:
    async with channel(address) as connection:
        await connection.channel_ready()
        stub = prefill_pb2_grpc.PrefillServiceStub(connection)
        with typed_errors(), ending(stub.Prefill(prefill_order_to_wire(order))) as call:
            async for _ in call:
                pass


@asynccontextmanager
async def half_landed() -> AsyncIterator[tuple[Lone, PairWorker, asyncio.Task[None]]]:
    """A prefill process whose first chunk lies in this process, and that holds."""
    with lone_worker("prefill", "auto", num_steps=2) as prefill:
        async with worker("decode", DecodeServicer, planes="auto") as decode:
            here = WorkerAddress(decode.parts.worker_id, decode.address, decode.parts.epoch)
            running = asyncio.create_task(
                run_order(order_for(prefill.where, here), prefill.where.address)
            )
            table = decode.service.receiver.table
            await until(lambda: any(each.received for each in table._live.values()))
            assert decode.facts("reserved")[-1]["path"] == "memory"
            assert decode.service.lender.statistics().lent == 1
            try:
                yield prefill, decode, running
            finally:
                running.cancel()
                await asyncio.wait([running])


async def test_a_stopped_writer_holds_no_slot_and_changes_none_when_it_goes_on() -> None:
    async with half_landed() as (prefill, decode, running), paired(decode, decode) as pair:
        os.kill(prefill.process.pid, signal.SIGSTOP)
        decode.clock.ahead = 2 * PATIENT_SECONDS
        await until(lambda: not decode.leased())
        promise = await pair.reserve(pair.wish(request("r2", [5] * 21)))
        slots = decode.service.receiver._slots[promise.reservation_id]
        transfer = decode.engine.transfer
        before = {name: transfer.digest(name[0], at.slot) for name, at in slots.items()}
        os.kill(prefill.process.pid, signal.SIGCONT)
        prefill.say("go")
        with pytest.raises(FerrymanError):
            await running
        assert before == {name: transfer.digest(name[0], at.slot) for name, at in slots.items()}
        await pair.abort(RouterAbort("r2", 1, "client_gone", "router-1"))
        await until(lambda: not decode.leased())
        decode.engine.scheduler.check_integrity()


async def test_a_killed_writer_s_loan_ends_with_it_and_its_slots_with_their_lease() -> None:
    async with half_landed() as (prefill, decode, running):
        prefill.process.kill()
        await until(lambda: decode.service.lender.statistics().lent == 0)
        with pytest.raises(FerrymanError):
            await running
        decode.clock.ahead = 2 * PATIENT_SECONDS
        await until(lambda: not decode.leased())
        decode.engine.scheduler.check_integrity()


async def test_a_killed_lender_costs_its_writer_the_attempt_and_nothing_else() -> None:
    with lone_worker("decode", "auto", num_steps=1) as decode:
        async with worker("prefill", PrefillServicer, planes="auto") as prefill:
            here = WorkerAddress(prefill.parts.worker_id, prefill.address, prefill.parts.epoch)
            memories = prefill.service._transport.memories
            running = asyncio.create_task(run_order(order_for(here, decode.where), prefill.address))
            await until(lambda: bool(memories._stores))
            (store,) = memories._stores.values()
            decode.process.kill()
            await asyncio.wait([running])
            await until(lambda: not prefill.leased())
            assert store.num_free == LENT_BYTES // FRAME_BYTES
            await until(lambda: store.memory.is_over)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_workers_of_which_one_uses_grpc_use_it_together(role: str) -> None:
    planes = {"prefill": "auto", "decode": "auto", role: "grpc"}
    async with (
        worker("prefill", PrefillServicer, planes=planes["prefill"]) as prefill,  # type: ignore[arg-type]
        worker("decode", DecodeServicer, planes=planes["decode"]) as decode,  # type: ignore[arg-type]
        paired(prefill, decode) as pair,
    ):
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked))
        assert prefill.facts("handed_off")[-1]["path"] == "grpc"
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)


async def test_a_lender_whose_socket_is_gone_is_written_to_by_grpc() -> None:
    async with pair_of_workers(planes="auto") as pair:
        lender = pair.decode.service.lender
        (SHARED_MEMORY / lender._name).unlink()
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked))
        (facts,) = pair.prefill.facts("handed_off")
        assert facts["path"] == "grpc"
        assert facts["why"] == "prefill: decode's memory is out of reach"
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)


async def test_hand_offs_of_one_writer_share_one_loan() -> None:
    async with pair_of_workers(planes="auto") as pair:
        for number in range(3):
            asked = request(f"r{number}", [number + 1] * 21)
            await pair.run_prefill(pair.order(asked))
            tokens, _ = await pair.read_tokens(f"r{number}")
            assert tokens == expected(asked)
        assert pair.decode.service.lender.statistics().lent == 1
        (store,) = pair.prefill.service._transport.memories._stores.values()
        assert store.num_free == LENT_BYTES // FRAME_BYTES


@pytest.mark.parametrize("planes", ["grpc", "auto"])
async def test_a_unit_of_several_frames_is_verified_whole(
    planes: PlaneChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode takes its digest piece by piece, of what lies in the slot."""
    monkeypatch.setattr(grpc_plane, "MAX_FRAME_BYTES", 24)
    monkeypatch.setattr(memory_plane, "FRAME_BYTES", 24)
    assert min(MANIFEST.layout(kind).slot_bytes for kind in MANIFEST.kinds) > 2 * 24
    async with pair_of_workers(planes=planes) as pair:
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked))
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)


def test_a_unit_that_comes_again_is_hashed_anew_and_two_streams_of_it_are_refused() -> None:
    arrived, page = ArrivedBytes(), (Kind.FULL, 3)
    for offset, content in ((0, b"half"), (0, b"whole"), (5, b"ness")):
        arrived.hasher("res-1", page, offset).update(content)
    assert arrived.digest("res-1", page) == xxhash.xxh3_128_digest(b"wholeness")
    with pytest.raises(InvalidRequest, match="two streams bring full unit 3"):
        arrived.hasher("res-1", page, 4)

"""A prompt that takes longer than a lease is handed off: both sides renew it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.harness.pair import (
    PATIENT_SECONDS,
    WorkerPair,
    expected,
    pair_of_workers,
    read_to_the_end,
    request,
    stream_of,
)
from tests.waiting import until

from ferryman.wire.v1 import decode_pb2
from ferryman.worker import handoff_writer
from ferryman_decode.server import DecodeServicer

PROMPT = [3] * 21
NUM_LEASES = 3


class CountsRenewals(DecodeServicer):
    num_renewed = 0

    def has_renewed(self, num_times: int, running: asyncio.Task[Any]) -> Callable[[], bool]:
        """Also true of an attempt that has ended, which renews no more."""
        return lambda: self.num_renewed >= num_times or running.done()

    async def Renew(self, request: Any, context: Any) -> decode_pb2.RenewResponse:
        answer = await super().Renew(request, context)
        self.num_renewed += 1
        return answer


async def let_leases_pass(pair: WorkerPair, running: asyncio.Task[Any]) -> None:
    """Moves both clocks in steps shorter than a lease; after each step the leases are renewed."""
    decode = pair.decode.service
    for _ in range(2 * NUM_LEASES):
        for side in (pair.prefill, pair.decode):
            side.clock.ahead += PATIENT_SECONDS / 2
        # Prefill asks for the second renewal after the answer to the first.
        await until(decode.has_renewed(decode.num_renewed + 2, running))
        assert not running.done(), running
        pair.prefill.service._send_leases.expire()
        table = decode.receiver.table
        decode.receiver.carry_out(table.expire(pair.decode.clock()))


async def test_a_prompt_that_is_computed_for_longer_than_the_lease_is_handed_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_writer, "RENEWALS_PER_LEASE", 100 * PATIENT_SECONDS)
    # Decode ends the requests of a router without a stream, by the clock that is put forward.
    async with pair_of_workers(CountsRenewals) as pair, stream_of(pair, "router-1") as stream:
        pair.prefill.hold()
        asked = request("r1", PROMPT)
        running = asyncio.create_task(pair.run_prefill(pair.order(asked, deadline=600.0)))
        await until(pair.decode.service.has_renewed(1, running))
        await let_leases_pass(pair, running)
        pair.prefill.go_on()
        progress = await running
        assert progress[-1].HasField("handed_off")
        tokens, _ = await read_to_the_end(stream)
        assert tokens == expected(asked)
        await until(lambda: not pair.leased())

"""Attempts whose router has gone."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tests.harness.pair import pair_of_workers, request
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import PrefillOrder
from ferryman.worker.decode_client import DecodeClient
from ferryman_prefill.server import PrefillAttempt, PrefillServicer

PROMPT = [3] * 21


class FailsWhenCancelled(PrefillAttempt):
    """Something fails in the moment in which its router is lost."""

    error: Exception

    async def _run(self, lease: HostLease) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise self.error from None


class LosesBoth(PrefillServicer):
    """Each attempt fails as its router goes."""

    error: Exception

    def _attempt(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> FailsWhenCancelled:
        manifest = self._ctx.engine.manifest
        decode = DecodeClient(order, self._channels, self._me, manifest, self._transport)
        attempt = FailsWhenCancelled(order, decode, self._ctx, grammar)
        attempt.error = self.error
        return attempt


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        pytest.param(Unavailable("decode is gone"), [], id="its decode worker"),
        pytest.param(ZeroDivisionError(), ["a task failed name=r1.1"], id="a bug"),
    ],
)
async def test_a_failure_after_the_router_left_is_an_error_in_the_log_only_if_it_is_a_bug(
    error: Exception, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair_of_workers(make_prefill=LosesBoth) as pair:
        pair.prefill.service.error = error
        call = pair.prefill_stub.Prefill(prefill_order_to_wire(pair.order(request("r1", PROMPT))))
        assert (await call.read()).WhichOneof("progress") == "queued"
        call.cancel()
        await until(lambda: bool(pair.prefill.facts("failed")))
        await until(lambda: not pair.prefill.service.prompts_outside())
        gc.collect()  # a task says so when nobody can ask for its error any more
        await asyncio.sleep(0)
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == lines

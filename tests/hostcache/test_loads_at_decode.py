"""Decode loads from a real host-cache what prefill then need not send, and answers as the cold run.

With real models in float64: recurrent state beside pages, and windows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.harness.pair import (
    WorkerPair,
    check,
    hand_off,
    pair_of_engines,
    worker_options,
)
from tests.hostcache.conftest import StartHostCache
from tests.model.telling import save_telling
from tests.waiting import until
from tests.worker.test_hand_off_of_families import GREEDY, PROMPT

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.engine.engine import build_engine
from ferryman.errors import CorruptState, LeaseLost
from ferryman.llm import Completion
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import DEFAULT_WISH
from ferryman.tiers.write_policy import write_policy_named
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.client import HostCacheClient, host_cache_client
from ferryman.worker.host import host_tier_of
from ferryman_decode.server import DecodeServicer

NUM_PAGES = len(PROMPT) // PAGE_SIZE
FAMILIES = ("granite", "gemma3")


@dataclass(frozen=True)
class WithHostTier:
    """Two workers; decode's device has lost what its host-cache holds of PROMPT."""

    pair: WorkerPair
    client: HostCacheClient
    cold: Completion
    host_cache: AsyncExitStack

    async def second(self, attempt: int = 1) -> None:
        """Hands the prompt off again, and checks the answer."""
        await self.pair.run_prefill(self.pair.order(self.request("second"), attempt))
        answer, _ = await self.pair.read_answer("second", attempt)
        assert tuple(answer.token_ids) == self.cold.token_ids
        for found, right in zip(answer.logprobs, self.cold.logprobs, strict=True):
            assert found == pytest.approx(right, abs=1e-12, rel=0)

    def request(self, name: str) -> Request:
        manifest, ids = self.pair.decode.engine.manifest, as_token_ids(PROMPT)
        keys = page_keys(root_key(manifest), ids, manifest.page_size)
        return Request(name, ids, keys, GREEDY)

    def bytes_sent(self) -> list[int]:
        return [int(str(facts["bytes"])) for facts in self.pair.prefill.facts("handed_off")]


@asynccontextmanager
async def with_host_tier(
    family: str, folder: Path, start_host_cache: StartHostCache
) -> AsyncIterator[WithHostTier]:
    save_telling(folder, family, PAGE_SIZE, 64, num_ranks=1)
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([PROMPT], GREEDY)[0]
    async with AsyncExitStack() as stack:
        for_prefill = stack.enter_context(build_engine(worker_options(folder, 32, 1)))
        for_decode = stack.enter_context(build_engine(worker_options(folder, 64, 1)))

        async def attach(arena: memoryview) -> None:
            tier = for_decode.host_tier
            await asyncio.wrap_future(for_decode.stream.call(lambda: tier.attach(arena)))

        alive = await stack.enter_async_context(AsyncExitStack())
        host_cache = await alive.enter_async_context(start_host_cache(memory_bytes=16 << 20))
        asked = HostCacheOptions(host_cache.address, "decode-00000001", 7, call_seconds=10.0)
        policy = write_policy_named("write_through")
        client = await stack.enter_async_context(
            host_cache_client(asked, for_decode.manifest, attach)
        )
        tier = await stack.enter_async_context(
            host_tier_of(for_decode, client, policy, DEFAULT_WISH, lambda: None)
        )
        pair = await stack.enter_async_context(
            pair_of_engines(
                for_prefill,
                for_decode,
                make_decode=lambda parts: DecodeServicer(replace(parts, host=tier)),
            )
        )
        await client.attachment.attached()
        found = WithHostTier(pair, client, cold, alive)
        await hand_off(pair, "first", PROMPT, GREEDY)
        await check(pair, "first", cold)
        keys = found.request("any").keys
        store = host_cache.host.store
        await until(lambda: len(store.lookup(keys).pages.get(Kind.FULL, ())) == NUM_PAGES)
        await until(lambda: not pair.decode.leased())
        for_decode.scheduler.flush()
        assert for_decode.scheduler.allocator.tree.match_depth(keys) == 0
        yield found
        await until(lambda: not pair.leased())
        for worker in (pair.prefill, pair.decode):
            worker.engine.scheduler.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prompt_that_was_loaded_answers_as_the_cold_run(
    family: str, tmp_path: Path, start_host_cache: StartHostCache
) -> None:
    async with with_host_tier(family, tmp_path / "model", start_host_cache) as here:
        await here.second()
        (loaded,) = here.pair.decode.facts("loaded")
        units = loaded["units"]
        assert isinstance(units, dict)
        assert units["full"] == NUM_PAGES
        first, second = here.bytes_sent()
        assert first - second == loaded["bytes"]
        await here.client.attachment.released()


async def test_a_unit_spoilt_in_the_arena_is_sent_by_the_second_attempt(
    tmp_path: Path, start_host_cache: StartHostCache
) -> None:
    async with with_host_tier("granite", tmp_path / "model", start_host_cache) as here:
        asked = here.request("second")
        lease = await here.client.acquire(asked.keys, asked.prompt_len, 0)
        unit, link = lease.view.units[Kind.FULL, 1], here.client.attachment.link
        assert link is not None
        link.arena.memory[unit.offset] ^= 1
        here.client.release(lease)
        with pytest.raises((CorruptState, LeaseLost)):
            await here.pair.run_prefill(here.pair.order(asked))
        assert [facts["reason"] for facts in here.pair.decode.facts("aborted")] == ["load_failed"]
        await here.client.attachment.released()
        await here.second(attempt=2)
        first, second = here.bytes_sent()
        assert second == first, "all of it was sent"
        assert here.pair.decode.facts("loaded") == []


async def test_without_its_host_cache_decode_is_sent_everything(
    tmp_path: Path, start_host_cache: StartHostCache
) -> None:
    async with with_host_tier("granite", tmp_path / "model", start_host_cache) as here:
        await here.host_cache.aclose()
        await here.second()
        first, second = here.bytes_sent()
        assert second == first
        assert here.pair.decode.facts("loaded") == []

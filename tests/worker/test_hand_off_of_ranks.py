"""A model of every kind of state, handed off by NIXL where workers have two ranks.

It answers as one process that computes everything, in float64 to 1e-12, and a byte that changes at
any rank is noticed.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.host_fed import Cell, engine
from tests.harness.pair import (
    WorkerPair,
    check,
    hand_off,
    pair_on,
    pair_with,
    worker_options,
)
from tests.native import ALL_KINDS, native_config, save_native
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import UnitDigest
from ferryman.schedule.request import SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.v1 import decode_pb2
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.server import DecodeServicer

pytestmark = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True)
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_native(tmp_path_factory.mktemp("native"), native_config(ALL_KINDS), 0)


@pytest.mark.parametrize(
    "ranks", [pytest.param(pair, id=f"{pair[0]} to {pair[1]}") for pair in ((1, 2), (2, 1), (2, 2))]
)
async def test_what_went_rank_to_rank_answers_as_the_cold_run(
    folder: Path, ranks: tuple[int, int]
) -> None:
    prompts = (PROMPT, [*PROMPT[:66], 5])
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate(list(prompts), GREEDY)
    async with pair_on(folder, "nixl-unlocked", ranks) as pair:
        assert set(pair.decode.engine.manifest.kinds) == set(Kind)
        for index, prompt in enumerate(prompts):
            await hand_off(pair, f"r{index}", prompt, GREEDY)
            await check(pair, f"r{index}", cold[index])
        assert {facts["path"] for facts in pair.prefill.facts("handed_off")} == {"nixl"}
        await until(lambda: not pair.leased())


class SpoilsOneRank(DecodeServicer):
    """When all has landed, a byte changes: of the next kind in turn, at the next rank in turn."""

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self.turns = [(kind, rank) for kind in Kind for rank in range(RANKS)]

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        fence = WriteFence(request.epoch, request.reservation_id, request.context.attempt)
        await self.receiver.verify_all(fence)
        kind, rank = self.turns.pop(0)
        slots = self.receiver._slots[request.reservation_id]
        name, slot = next((name, at.slot) for name, at in slots.items() if name[0] is kind)
        served = self._parts.engine
        at = served.places[kind].ranks[rank].address_of(slot)
        ctypes.c_uint8.from_address(at).value ^= 1
        digest = UnitDigest(*name, served.transfer.digest(kind, slot))
        self.receiver.table.record(fence, digest, self._parts.clock())
        return await super().Commit(request, context)


@asynccontextmanager
async def pair_that_spoils(folder: Path) -> AsyncIterator[WorkerPair]:
    prefills = worker_options(folder, chunk_tokens=32, tp_size=RANKS, decodes=False)
    decodes = worker_options(folder, tp_size=RANKS)
    async with pair_with(prefills, decodes, "nixl-unlocked", make_decode=SpoilsOneRank) as pair:
        yield pair


async def test_a_byte_that_changed_at_any_rank_is_noticed(folder: Path) -> None:
    async with pair_that_spoils(folder) as pair:
        for nth in range(len(pair.decode.service.turns)):
            with pytest.raises(CorruptState, match="other bytes"):
                await hand_off(pair, f"r{nth}", PROMPT, GREEDY)
        assert not pair.decode.service.turns
        assert not pair.decode.facts("verified")
        await until(lambda: not pair.leased())

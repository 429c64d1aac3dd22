"""A request that leaves its decode worker answers as the cold run, in every kind of state.

In float64, to 1e-12; with FERRYMAN_TEST_ALL_CELLS set, in every family.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.harness.pair import (
    PairAnswer,
    WorkerPair,
    hand_off,
    pair_on,
    paired,
    request_of,
    worker_on,
    worker_options,
)
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.telling import ALL_FAMILIES, save_telling
from tests.planes import plane_of
from tests.waiting import until

from ferryman.cache.keys import page_keys, root_key
from ferryman.engine.engine import build_engine
from ferryman.llm import Completion
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.handoff import hand_off_order_to_wire
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.values import Failure, RequestContext
from ferryman_decode.server import DecodeServicer

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=64, temperature=0.9, seed=7, logprobs=3, frequency_penalty=0.5, ignore_eos=True
)
# Mamba-2, a window, the delta rule, latents: each kind of state once.
IN_CI = ("granite", "gpt_oss", "qwen3_next", "deepseek_v3")
PLANES: tuple[PlaneChoice, ...] = ("grpc", "auto", *(("nixl-unlocked",) if has_nixl() else ()))
FAMILIES = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else IN_CI


@asynccontextmanager
async def three_workers(
    folder: Path, planes: PlaneChoice = "grpc", **both: Any
) -> AsyncIterator[tuple[WorkerPair, WorkerPair]]:
    """One prefill worker, with each of two decode workers."""
    with build_engine(worker_options(folder, **both)) as for_taker:
        async with (
            pair_on(folder, planes, **both) as pair,
            worker_on(for_taker, "decode", DecodeServicer, planes) as taker,
            paired(pair.prefill, taker) as taken,
        ):
            yield pair, taken


async def detached(source: WorkerPair, sampling: SamplingParams) -> PairAnswer:
    """The tokens that its first decode worker draws before the request stands still."""
    await hand_off(source, "r1", PROMPT, sampling)
    epoch = source.decode.parts.epoch
    with typed_errors():
        await source.decode_stub.Detach(
            decode_pb2.DetachRequest(
                request_id="r1", attempt=1, router_id="router-1", worker_epoch=epoch
            )
        )
    drawn, last = await source.read_answer("r1")
    assert isinstance(last.ending, Failure)
    assert last.ending.reason == "RequestDetached"
    return drawn


async def move(
    source: WorkerPair, taker: WorkerPair, drawn: PairAnswer, sampling: SamplingParams
) -> None:
    """By the router's order, behind all tokens it was told."""
    ids, manifest = (
        np.array([*PROMPT, *drawn.token_ids], dtype="<u4"),
        source.decode.engine.manifest,
    )
    behind = replace(
        request_of(source, "r1", PROMPT, sampling),
        token_ids=ids,
        keys=page_keys(root_key(manifest), ids, manifest.page_size),
        num_generated=len(drawn.token_ids),
    )
    order = replace(
        taker.order(behind),
        context=RequestContext("r1", 2, 60.0),
        worker_epoch=source.decode.parts.epoch,
    )
    with typed_errors():
        async for _ in source.decode_stub.HandOff(hand_off_order_to_wire(order)):
            pass


async def check_moved(
    pair: WorkerPair,
    taken: WorkerPair,
    cold: Completion,
    sampling: SamplingParams = GREEDY,
    planes: PlaneChoice = "grpc",
) -> None:
    """Tokens and log probabilities, the repeated one's too, are those of the cold run."""
    drawn = await detached(pair, sampling)
    await move(pair, taken, drawn, sampling)
    base = len(drawn.token_ids) - 1
    rest, _ = await taken.read_answer("r1", 2, base)
    assert 0 <= base < len(cold.token_ids) - 1
    assert rest.token_ids[0] == drawn.token_ids[-1]
    assert (*drawn.token_ids[:-1], *rest.token_ids) == cold.token_ids
    for found, right in zip((*drawn.logprobs[:-1], *rest.logprobs), cold.logprobs, strict=True):
        assert found == pytest.approx(right, abs=1e-12, rel=0)
    assert taken.decode.engine.scheduler.statistics().prefill_steps == 0
    (handed_off,) = pair.decode.facts("handed_off")
    assert handed_off["path"] == plane_of(planes), handed_off
    await until(lambda: not pair.decode.leased() | taken.decode.leased())
    for side in (pair.decode, taken.decode):
        side.engine.scheduler.check_integrity()


def cold_answer(folder: Path, sampling: SamplingParams = GREEDY) -> Completion:
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        (cold,) = llm.generate([PROMPT], sampling)
    return cold


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_request_that_moved_answers_as_the_cold_run(
    family: str, planes: PlaneChoice, tmp_path: Path
) -> None:
    folder = save_telling(tmp_path, family, PAGE_SIZE, 64)
    cold = cold_answer(folder)
    async with three_workers(folder, planes) as (pair, taken):
        await check_moved(pair, taken, cold, planes=planes)


async def test_penalties_and_draws_go_on_where_they_were(tmp_path: Path) -> None:
    folder = save_telling(tmp_path, "granite", PAGE_SIZE, 64)
    cold = cold_answer(folder, DRAWN)
    async with three_workers(folder) as (pair, taken):
        await check_moved(pair, taken, cold, DRAWN)


async def test_a_request_whose_tokens_are_drafted_moves_between_two_steps(tmp_path: Path) -> None:
    """A model that drafts for itself is always right, if its state came along whole."""
    folder = save_telling(tmp_path, "granite", PAGE_SIZE, 64)
    cold = cold_answer(folder)
    async with three_workers(folder, draft=str(folder), draft_tokens=3) as (pair, taken):
        await check_moved(pair, taken, cold)
        drafts = taken.decode.engine.scheduler.statistics().drafts
        assert drafts.accepted == drafts.drafted > 0

"""A prefill and a decode worker on real models, and a hand-off between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.host_fed import PAGE_SIZE
from tests.planes import plane_of
from tests.worker.pair import WorkerPair, paired, until, worker_on

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.engine.engine import build_engine
from ferryman.llm import Completion
from ferryman.schedule.request import Request, SamplingParams
from ferryman.settings.engine import EngineOptions
from ferryman.wire.plane_values import PlaneChoice
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer


@asynccontextmanager
async def pair_on(
    folder: Path, planes: PlaneChoice, ranks: tuple[int, int] = (1, 1), **both: Any
) -> AsyncIterator[WorkerPair]:
    """A prefill worker that takes small chunks, and a decode worker, with options of `both`."""
    prefills = worker_options(folder, chunk_tokens=32, tp_size=ranks[0], decodes=False, **both)
    decodes = worker_options(folder, chunk_tokens=64, tp_size=ranks[1], **both)
    async with pair_with(prefills, decodes, planes) as pair:
        yield pair


@asynccontextmanager
async def pair_with(
    prefills: EngineOptions, decodes: EngineOptions, planes: PlaneChoice
) -> AsyncIterator[WorkerPair]:
    """A prefill and a decode worker with options of their own, once hand-offs can travel."""
    with build_engine(prefills) as for_prefill, build_engine(decodes) as for_decode:
        async with (
            worker_on(for_prefill, "prefill", PrefillServicer, planes) as prefill,
            worker_on(for_decode, "decode", DecodeServicer, planes) as decode,
            paired(prefill, decode) as pair,
        ):
            sides = prefill.service, decode.service
            await until(lambda: all(side.load().planes[0] == plane_of(planes) for side in sides))
            yield pair


def worker_options(
    folder: Path, chunk_tokens: int = 64, tp_size: int = 1, **others: Any
) -> EngineOptions:
    return EngineOptions(
        model=folder,
        dtype="float64",
        page_size=PAGE_SIZE,
        chunk_tokens=chunk_tokens,
        max_running=4,
        max_prealloc=4,
        max_waiting=8,
        memory_bytes=64 << 20,
        recurrent_slots=0,
        prefix_cache=True,
        overlap=True,
        num_threads=1,
        tp_size=tp_size,
        **others,
    )


async def hand_off(
    pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams
) -> None:
    await pair.run_prefill(pair.order(request_of(pair, name, prompt, sampling)))


def request_of(pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams) -> Request:
    """With the page keys of decode's model."""
    manifest, ids = pair.decode.engine.manifest, as_token_ids(prompt)
    keys = page_keys(root_key(manifest), ids, manifest.page_size)
    return Request(name, ids, keys, sampling)


async def check(pair: WorkerPair, name: str, cold: Completion) -> None:
    answer, _ = await pair.read_answer(name)
    assert tuple(answer.token_ids) == cold.token_ids
    for found, right in zip(answer.logprobs, cold.logprobs, strict=True):
        assert found == pytest.approx(right, abs=1e-9, rel=0)

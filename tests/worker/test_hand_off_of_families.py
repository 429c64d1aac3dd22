"""Every family, handed off between two workers, answers as one process that computes everything.

In float64, to 1e-9. In CI each family goes by one plane, not all by the same; with
FERRYMAN_TEST_ALL_CELLS set, by both; with FERRYMAN_TEST_RANKS set, by gRPC between workers of one
rank and of two: 1 → 2, 2 → 1, 2 → 2.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.telling import ALL_FAMILIES, save_telling
from tests.worker.pair import Pair, paired, until, worker_on

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.engine.assembly import EngineOptions, running_engine
from ferryman.engine.drafting import DraftOptions
from ferryman.llm import Completion
from ferryman.schedule.request import Request, SamplingParams
from ferryman.wire.nixl_agent import has_nixl
from ferryman.wire.planes import PlaneChoice
from ferryman_decode.server import Decode
from ferryman_prefill.server import Prefill

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
FORKS = ([*PROMPT[:66], 5], PROMPT[:17], [*PROMPT[:-1], 9])
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5, ignore_eos=True)
PLANES: tuple[PlaneChoice, ...] = ("grpc", "nixl") if has_nixl() else ("grpc",)


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and what it answers cold to the prompt and its forks."""

    folder: Path
    cold: list[Completion]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = tmp_path_factory.mktemp(request.param)
    folder = save_telling(path, request.param, PAGE_SIZE, 64, num_ranks=max(map(max, RANKS)))
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        return Served(folder, llm.generate([PROMPT, *FORKS], GREEDY))


RANKS = ((1, 2), (2, 1), (2, 2)) if "FERRYMAN_TEST_RANKS" in os.environ else ((1, 1),)
"""Of prefill and decode."""


DRAFTED = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else ALL_FAMILIES[-1:]


def planes_of(family: str) -> tuple[PlaneChoice, ...]:
    if RANKS != ((1, 1),):
        return ("grpc",)
    index = ALL_FAMILIES.index(family) % len(PLANES)
    return PLANES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else PLANES[index : index + 1]


@pytest.mark.parametrize(
    ("served", "planes"),
    [
        pytest.param(family, plane, id=f"{family}, {plane}")
        for family in ALL_FAMILIES
        for plane in planes_of(family)
    ],
    indirect=["served"],
)
@pytest.mark.parametrize("ranks", RANKS, ids="{0[0]} to {0[1]}".format)
async def test_what_was_handed_off_answers_as_the_cold_run(
    served: Served, planes: PlaneChoice, ranks: tuple[int, int]
) -> None:
    async with pair_on(served.folder, planes, ranks) as pair:
        for name in ("first", "again"):
            await hand_off(pair, name, PROMPT)
            await check(pair, name, served.cold[0])
        first, again = (facts["bytes"] for facts in pair.prefill.facts("handed_off"))
        assert int(str(again)) < int(str(first)), "decode asks only for what it lacks"
        async with asyncio.TaskGroup() as at_once:
            for index, fork in enumerate(FORKS):
                at_once.create_task(hand_off(pair, f"fork-{index}", fork))
        for index, cold in enumerate(served.cold[1:]):
            await check(pair, f"fork-{index}", cold)
        assert {facts["path"] for facts in pair.prefill.facts("handed_off")} == {planes}
        await until(lambda: not pair.prefill.leased() | pair.decode.leased())


@pytest.mark.parametrize("served", DRAFTED, indirect=True)
async def test_a_draft_models_state_is_handed_off_with_the_models(served: Served) -> None:
    """A model that drafts for itself is always right, if its state came along whole."""
    async with pair_on(served.folder, "grpc", RANKS[0], num_drafts=3) as pair:
        turns = (("first", PROMPT, 0), ("again", PROMPT, 0), ("fork", FORKS[0], 1))
        for name, prompt, which in turns:
            await hand_off(pair, name, prompt)
            await check(pair, name, served.cold[which])
        drafts = pair.decode.engine.scheduler.statistics().drafts
        assert drafts.accepted == drafts.drafted > 30


@asynccontextmanager
async def pair_on(
    folder: Path, planes: PlaneChoice, ranks: tuple[int, int], *, num_drafts: int = 0
) -> AsyncIterator[Pair]:
    """A prefill worker that takes small chunks, and a decode worker; the model drafts for itself
    if there are to be drafts."""
    by = str(folder) if num_drafts else ""
    prefills = options(folder, chunk_tokens=32, tp_size=ranks[0], draft=DraftOptions(by, 0))
    decodes = options(folder, chunk_tokens=64, tp_size=ranks[1], draft=DraftOptions(by, num_drafts))
    with running_engine(prefills) as for_prefill, running_engine(decodes) as for_decode:
        async with (
            worker_on(for_prefill, "prefill", Prefill, planes) as prefill,
            worker_on(for_decode, "decode", Decode, planes) as decode,
            paired(prefill, decode) as pair,
        ):
            sides = prefill.service, decode.service
            await until(lambda: all(side.load().planes[0] == planes for side in sides))
            yield pair


def options(folder: Path, chunk_tokens: int, tp_size: int, draft: DraftOptions) -> EngineOptions:
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
        device="cpu",
        num_threads=1,
        tp_size=tp_size,
        draft=draft,
    )


async def hand_off(pair: Pair, name: str, prompt: list[int]) -> None:
    manifest, ids = pair.decode.engine.manifest, as_token_ids(prompt)
    keys = page_keys(root_key(manifest), ids, manifest.page_size)
    await pair.run_prefill(pair.order(Request(name, ids, keys, GREEDY)))


async def check(pair: Pair, name: str, cold: Completion) -> None:
    answer, _ = await pair.read_answer(name)
    assert tuple(answer.token_ids) == cold.token_ids
    for found, right in zip(answer.logprobs, cold.logprobs, strict=True):
        assert found == pytest.approx(right, abs=1e-9, rel=0)

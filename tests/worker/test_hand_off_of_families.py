"""Every family, handed off between two workers, answers as one process that computes everything.

In float64, to 1e-12. In CI each family goes by one plane, not all by the same; with
FERRYMAN_TEST_ALL_CELLS set, by both; with FERRYMAN_TEST_RANKS set, by both between workers of one
rank and of two: 1 → 2, 2 → 1, 2 → 2. One family goes from 1 to 2 and from 2 to 1 in CI too.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.engine.watched_drafts import WatchedDrafts
from tests.harness.pair import check, hand_off, pair_on
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.mtp_checkpoint import CASES, MtpFormula, save_with_mtp
from tests.model.telling import ALL_FAMILIES, save_telling
from tests.planes import plane_of
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.llm import Completion
from ferryman.schedule.request import SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
FORKS = ([*PROMPT[:66], 5], PROMPT[:17], [*PROMPT[:-1], 9])
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5, ignore_eos=True)
PLANES: tuple[PlaneChoice, ...] = ("grpc", "auto", *(("nixl-unlocked",) if has_nixl() else ()))


@dataclass(frozen=True, slots=True)
class HandedOffByFamily:
    """A model, and what it answers cold to the prompt and its forks."""

    folder: Path
    cold: list[Completion]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> HandedOffByFamily:
    """A model of a family that can be divided among the given number of ranks."""
    family, num_ranks = request.param
    path = tmp_path_factory.mktemp(family)
    folder = save_telling(path, family, PAGE_SIZE, 64, num_ranks=num_ranks)
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        return HandedOffByFamily(folder, llm.generate([PROMPT, *FORKS], GREEDY))


Ranks = tuple[int, int]
"""Of prefill and decode."""

DIFFERENT: tuple[Ranks, ...] = ((1, 2), (2, 1))
WITH_RANKS = "FERRYMAN_TEST_RANKS" in os.environ
# What CI hands off between different numbers of ranks: it has pages and recurrent states.
CUT_FAMILY = "granite"

RANKS: tuple[Ranks, ...] = (*DIFFERENT, (2, 2)) if WITH_RANKS else ((1, 1),)
DRAFTED = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else ALL_FAMILIES[-1:]
# Pages alone beside the hidden state, and a recurrent model's; the others by hand.
MTP_IN_CI = ("deepseek_v3", "qwen3_next")
MTP_HANDED_OFF = tuple(CASES) if "FERRYMAN_TEST_ALL_CELLS" in os.environ else MTP_IN_CI


def planes_of(family: str) -> tuple[PlaneChoice, ...]:
    if WITH_RANKS:
        return PLANES
    index = ALL_FAMILIES.index(family) % len(PLANES)
    return PLANES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else PLANES[index : index + 1]


def ways() -> Iterator[tuple[str, PlaneChoice, Ranks]]:
    """Each family by its planes; one of them, or each, between different numbers of ranks too."""
    for family in ALL_FAMILIES:
        yield from ((family, plane, ranks) for plane in planes_of(family) for ranks in RANKS)
    if not WITH_RANKS:
        yield from ((CUT_FAMILY, plane, ranks) for plane in PLANES for ranks in DIFFERENT)


@pytest.mark.parametrize(
    ("served", "planes", "ranks"),
    [
        pytest.param(
            (family, max(ranks)), plane, ranks, id=f"{family}, {plane}, {ranks[0]} to {ranks[1]}"
        )
        for family, plane, ranks in ways()
    ],
    indirect=["served"],
)
async def test_what_was_handed_off_answers_as_the_cold_run(
    served: HandedOffByFamily, planes: PlaneChoice, ranks: tuple[int, int]
) -> None:
    async with pair_on(served.folder, planes, ranks) as pair:
        for name in ("first", "again"):
            await hand_off(pair, name, PROMPT, GREEDY)
            await check(pair, name, served.cold[0])
        first, again = (facts["bytes"] for facts in pair.prefill.facts("handed_off"))
        has_pages = Kind.FULL in pair.decode.engine.manifest.kinds  # a window slid on meanwhile
        sent = int(str(first)) - int(str(again))
        assert (sent > 0) is has_pages, "decode asks only for the pages that it lacks"
        async with asyncio.TaskGroup() as at_once:
            for index, fork in enumerate(FORKS):
                at_once.create_task(hand_off(pair, f"fork-{index}", fork, GREEDY))
        for index, cold in enumerate(served.cold[1:]):
            await check(pair, f"fork-{index}", cold)
        assert {facts["path"] for facts in pair.prefill.facts("handed_off")} == {plane_of(planes)}
        await until(lambda: not pair.leased())


@pytest.mark.parametrize(
    "served",
    [pytest.param((family, max(RANKS[0])), id=family) for family in DRAFTED],
    indirect=True,
)
async def test_a_draft_models_state_is_handed_off_with_the_models(
    served: HandedOffByFamily,
) -> None:
    """A model that drafts for itself is always right, if its state came along whole."""
    itself = str(served.folder)
    async with pair_on(served.folder, "grpc", RANKS[0], draft=itself, draft_tokens=3) as pair:
        turns = (("first", PROMPT, 0), ("again", PROMPT, 0), ("fork", FORKS[0], 1))
        for name, prompt, which in turns:
            await hand_off(pair, name, prompt, GREEDY)
            await check(pair, name, served.cold[which])
        drafts = pair.decode.engine.scheduler.statistics().drafts
        assert drafts.accepted == drafts.drafted > 30


@pytest.mark.parametrize("family", MTP_HANDED_OFF)
async def test_a_drafting_layers_state_is_handed_off_with_the_models(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_mtp(tmp_path, family, num_ranks=max(RANKS[0]))
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([PROMPT, FORKS[0]], GREEDY)
    formula, rng = MtpFormula(folder, family), random.Random(4)
    # A replaced draft would be unknown to a second rank.
    watch = WatchedDrafts(monkeypatch, rng if RANKS[0][1] == 1 else None)
    async with pair_on(folder, "grpc", RANKS[0], draft="mtp", draft_tokens=3) as pair:
        turns = (("first", PROMPT, 0), ("again", PROMPT, 0), ("fork", FORKS[0], 1))
        for name, prompt, which in turns:
            watch.expect([(prompt, cold[which].token_ids)])
            await hand_off(pair, name, prompt, GREEDY)
            await check(pair, name, cold[which])
            watch.check(formula)

"""One worker that does both answers as two that hand over, and as one process that is cold.

In float64, to 1e-12: prompts among running requests, cold, reused and forked, with drafts from the
text, from a layer and from a model, with adapters, and drawn at random.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.both.violations import violations
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.engine.watched_drafts import WatchedDrafts
from tests.harness.pair import (
    WorkerPair,
    check,
    hand_off,
    one_worker_on,
    pair_on,
    request_of,
    worker_options,
)
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.mtp_checkpoint import MtpFormula, save_with_mtp
from tests.model.telling import ALL_FAMILIES, NATIVE, save_telling
from tests.waiting import until
from tests.worker.test_hand_off_of_families import FORKS, GREEDY, PROMPT
from tests.worker.test_lora_handed_off import AdaptedFolders, adapted, order

from ferryman.engine.engine import build_engine
from ferryman.llm import Completion
from ferryman.schedule.request import SamplingParams

assert adapted, "a fixture"
# Pages, windows and states in one model; a hybrid with experts; and windows beside pages.
IN_CI = (NATIVE, "granite", "gpt_oss")
FAMILIES = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else IN_CI
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, seed=11, logprobs=5, ignore_eos=True)
LONG = [(5 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(150)]
Asked = Sequence[tuple[list[int], SamplingParams]]


@asynccontextmanager
async def worker_of(folder: Path, **options: Any) -> AsyncIterator[WorkerPair]:
    """One worker on a real model; nothing is leased at its end."""
    chosen = worker_options(folder, chunk_tokens=32, **options)
    with build_engine(chosen.model_copy(update={"takes_turns": True})) as built:
        async with one_worker_on(built) as pair:
            yield pair
            await until(lambda: not pair.decode.leased())


async def ask_at_once(pair: WorkerPair, asked: Asked, *, name: str) -> list[str]:
    names = [f"{name}-{index}" for index in range(len(asked))]
    async with asyncio.TaskGroup() as calls:
        for one, (prompt, sampling) in zip(names, asked, strict=True):
            calls.create_task(hand_off(pair, one, prompt, sampling))
    return names


async def check_all(pair: WorkerPair, names: Sequence[str], cold: Sequence[Completion]) -> None:
    for name, expected in zip(names, cold, strict=True):
        await check(pair, name, expected)


@pytest.mark.parametrize("family", FAMILIES)
async def test_prompts_among_running_requests_are_exact(family: str, tmp_path: Path) -> None:
    folder = save_telling(tmp_path, family, PAGE_SIZE, 64)
    asked = [(prompt, GREEDY) for prompt in (PROMPT, *FORKS, LONG)] + [(PROMPT, DRAWN)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([prompt for prompt, _ in asked], [how for _, how in asked])
    async with worker_of(folder) as pair:
        for turn in ("cold", "again"):
            names = await ask_at_once(pair, asked, name=turn)
            await check_all(pair, names, cold)
        positions = [facts["position"] for facts in pair.decode.facts("admitted")]
        assert max(int(str(each)) for each in positions) > 0, "prompts are reused"
        finished = [f"{turn}-{i}" for turn in ("cold", "again") for i in range(len(asked))]
        assert not violations(pair, *finished)


async def test_one_worker_and_two_give_the_same_numbers(tmp_path: Path) -> None:
    """Tokens, and log probabilities to 1e-12, side by side without an oracle between them."""
    folder = save_telling(tmp_path, NATIVE, PAGE_SIZE, 64)
    asked = [(PROMPT, GREEDY), (LONG, DRAWN), (FORKS[0], GREEDY)]
    found = []
    async with pair_on(folder, "grpc") as apart, worker_of(folder) as one:
        for pair in (apart, one):
            names = await ask_at_once(pair, asked, name="r")
            found.append([(await pair.read_answer(name))[0] for name in names])
    for two, alone in zip(*found, strict=True):
        assert alone.token_ids == two.token_ids
        for mine, theirs in zip(alone.logprobs, two.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12, rel=0)


@pytest.mark.parametrize("draft", ["ngram", "itself"])
async def test_drafts_are_verified_between_chunks(draft: str, tmp_path: Path) -> None:
    folder = save_telling(tmp_path, NATIVE, PAGE_SIZE, 64)
    repeats = [*PROMPT[:12]] * 5
    asked = [(PROMPT, GREEDY), (repeats, GREEDY), (LONG, GREEDY)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([prompt for prompt, _ in asked], GREEDY)
    by = str(folder) if draft == "itself" else draft
    async with worker_of(folder, draft=by, draft_tokens=3) as pair:
        await check_all(pair, await ask_at_once(pair, asked, name="r"), cold)
        drafts = pair.decode.engine.scheduler.statistics().drafts
        assert drafts.drafted > 0
        assert draft == "ngram" or drafts.accepted == drafts.drafted, "its own state came along"


async def test_a_drafting_layer_reads_the_prompts_last_state_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_mtp(tmp_path, "qwen3_next", num_ranks=1)
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([PROMPT, FORKS[0]], GREEDY)
    formula, watch = MtpFormula(folder, "qwen3_next"), WatchedDrafts(monkeypatch, random.Random(4))
    async with worker_of(folder, draft="mtp", draft_tokens=3) as pair:
        for name, prompt, which in (
            ("first", PROMPT, 0),
            ("again", PROMPT, 0),
            ("fork", FORKS[0], 1),
        ):
            watch.expect([(prompt, cold[which].token_ids)])
            await hand_off(pair, name, prompt, GREEDY)
            await check(pair, name, cold[which])
            watch.check(formula)


async def test_adapters_are_mixed_in_one_worker(adapted: AdaptedFolders) -> None:
    lora = ",".join(f"{name}={folder}" for name, folder in adapted.adapters.items())
    async with worker_of(adapted.base, lora=lora) as pair:
        async with asyncio.TaskGroup() as calls:
            for name in ("", "one", "two"):
                calls.create_task(pair.run_prefill(order(pair, f"r-{name}", name)))
        for name in ("", "one", "two"):
            await check(pair, f"r-{name}", adapted.merged[name])


async def test_choices_of_one_answer_share_the_pages_of_their_prompt(tmp_path: Path) -> None:
    folder = save_telling(tmp_path, NATIVE, PAGE_SIZE, 64)
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = llm.generate([PROMPT], GREEDY)[0]
    async with worker_of(folder) as pair:
        await pair.run_prefill(pair.order(request_of(pair, "first", PROMPT, GREEDY)))
        names = await ask_at_once(pair, [(PROMPT, GREEDY)] * 3, name="sibling")
        await check_all(pair, ["first", *names], [cold] * 4)
        reused = [facts["position"] for facts in pair.decode.facts("admitted")][1:]
        assert reused == [PAGE_SIZE * (len(PROMPT) // PAGE_SIZE)] * 3

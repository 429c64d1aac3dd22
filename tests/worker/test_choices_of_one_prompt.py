"""The choices of one answer: their prompt crosses once, stands once at decode, and each of them is
what it is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, engine
from tests.harness.pair import PAGE_SIZE as PAGE
from tests.harness.pair import (
    PairWorker,
    WorkerPair,
    check,
    expected,
    pair_of_workers,
    pair_on,
    request,
    request_of,
)
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.telling import NATIVE, save_telling
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.schedule import prompt_copies
from ferryman.schedule.request import Request, SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.values import RouterAbort

NUM_CHOICES = 4
PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine siblings come late."""
    monkeypatch.setattr(prompt_copies, "KEPT_SECONDS", 3600.0)


async def handed_off(
    pair: WorkerPair, first: Request, *siblings: Request, num_siblings: int = 0
) -> list[int]:
    """Bytes that crossed for each, as prefill tells the router. The siblings come together."""
    first = replace(first, num_siblings=num_siblings or len(siblings))
    told = await pair.run_prefill(pair.order(first))
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(pair.run_prefill(pair.order(one))) for one in siblings]
    return [each[-1].handed_off.num_bytes for each in (told, *(call.result() for call in calls))]


def pages_in_use(pair: WorkerPair) -> int:
    return pair.decode.engine.scheduler.ledgers()[Kind.FULL].leased


@contextmanager
def no_steps(worker: PairWorker) -> Iterator[None]:
    """Nothing is planned, so nothing grows while it is counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.engine.scheduler, "plan", lambda _now: None)
        yield
    worker.parts.wake.set()


@pytest.mark.parametrize("prompt_len", [3, 12, 14], ids=["no page", "whole pages", "a part more"])
async def test_the_prompt_crosses_once_and_its_pages_stand_once(prompt_len: int) -> None:
    prompt = list(range(1, prompt_len + 1))
    choices = [request(f"c{index}", prompt, 3 + 2 * index) for index in range(NUM_CHOICES)]
    async with pair_of_workers() as pair:
        with no_steps(pair.decode):
            one, none = await handed_off(pair, request("alone", [900, *prompt[1:]], 3)), [0, 0, 0]
            before = pages_in_use(pair)
            assert await handed_off(pair, *choices) == [*one, *none]
            whole, rest = divmod(prompt_len, PAGE)
            told = [facts.get("copied", 0) for facts in pair.decode.facts("reserved")]
            window = resume_set(pair.decode.engine.manifest, prompt_len).window.num_pages
            assert told == [0, 0, *[window + bool(rest) + 1] * 3]
            # Each has a copy of the last page where the prompt fills it in part; the frozen one
            # goes with the steps that copy it.
            assert before == whole + bool(rest)
            assert pages_in_use(pair) - before == whole + (NUM_CHOICES + 1) * bool(rest)
        for choice in choices:
            assert (await pair.read_tokens(choice.request_id))[0] == expected(choice)
        await pair.read_tokens("alone")
        await until(lambda: not pair.leased())


async def test_choices_that_are_aborted_leave_the_others_their_prompt() -> None:
    choices = [request(f"c{index}", [1] * 14, 9) for index in range(NUM_CHOICES)]
    async with pair_of_workers() as pair:
        with no_steps(pair.decode):
            await handed_off(pair, choices[0], num_siblings=3)
            await pair.reserve(pair.wish(choices[1]))
            # One ends before any step of it has run, the other before it is handed off.
            for name in ("c0", "c1"):
                await pair.abort(RouterAbort(name, 1, "client_gone", "router-1"))
            assert [*await handed_off(pair, choices[2]), *await handed_off(pair, choices[3])] == [
                0,
                0,
            ]
        for choice in choices[2:]:
            assert (await pair.read_tokens(choice.request_id))[0] == expected(choice)
        await until(lambda: not pair.leased())


def sampling_of(index: int) -> SamplingParams:
    """As a router makes them for one call: seeds by choice, everything else alike; but lengths."""
    return SamplingParams(
        max_tokens=4 + 9 * index,
        temperature=1.2,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=40 + index,
        logprobs=5,
        ignore_eos=True,
    )


PLANES: tuple[PlaneChoice, ...] = ("grpc", "auto", *(("nixl-unlocked",) if has_nixl() else ()))
WAYS = [
    pytest.param(NATIVE, PLANES[-1], {}, id="windows"),
    pytest.param("granite", "grpc", {"draft_tokens": 3}, id="a draft model"),
]


@pytest.mark.parametrize(("family", "planes", "options"), WAYS)
async def test_each_choice_is_what_it_is_alone(
    family: str, planes: PlaneChoice, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_telling(tmp_path, family, PAGE_SIZE, 64)
    samplings = [sampling_of(index) for index in range(NUM_CHOICES)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        cold = [llm.generate([PROMPT], sampling)[0] for sampling in samplings]
    assert len({answer.token_ids[:4] for answer in cold}) == NUM_CHOICES, "the seeds tell"
    drafting = {"draft": str(folder), **options} if options else {}
    async with pair_on(folder, planes, **drafting) as pair:
        choices = [
            request_of(pair, f"c{index}", PROMPT, sampling)
            for index, sampling in enumerate(samplings)
        ]
        sent = await handed_off(pair, *choices)
        assert sent[0] > 0
        assert sent[1:] == [0, 0, 0]
        for one, answer in zip(choices, cold, strict=True):
            await check(pair, one.request_id, answer)
        await until(lambda: not pair.leased())

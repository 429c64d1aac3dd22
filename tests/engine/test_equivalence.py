"""Ways to arrive at the same answer: every cell equals the cold run, in float64, to 1e-9.

{cold, device hit, partial hit, fork} × {chunkings} × {overlap on, off} × {retracted or not} ×
{alone, in a mixed batch}, in one process. Counters prove that each feature really happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tiny_models import save_tiny_model

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.llm import LLM, Completion
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams

MEGABYTE = 1 << 20
PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["granite_moe", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@dataclass(frozen=True)
class Cell:
    """One way to run: how prompts are cut, and what the engine does at once."""

    chunk_tokens: int
    overlap: bool
    prefix_cache: bool = True
    memory_bytes: int = 64 * MEGABYTE
    max_running: int = 6
    recurrent_slots: int = 0


def engine(folder: Path, cell: Cell) -> LLM:
    return LLM(
        folder,
        dtype="float64",
        page_size=16,
        chunk_tokens=cell.chunk_tokens,
        max_running=cell.max_running,
        memory_bytes=cell.memory_bytes,
        recurrent_slots=cell.recurrent_slots,
        prefix_cache=cell.prefix_cache,
        overlap=cell.overlap,
    )


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Completion]:
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        yield llm.generate([PROMPT], GREEDY)[0]


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, abs=1e-9, rel=0)


CELLS = [
    pytest.param(Cell(chunk, overlap), id=f"chunks of {chunk}, overlap {overlap}")
    for chunk in (16, 48, 1024)
    for overlap in (False, True)
]


@pytest.mark.parametrize("cell", CELLS)
def test_cold_then_hit_then_fork_then_mixed_are_exact(
    folder: Path, cold: Completion, cell: Cell
) -> None:
    with engine(folder, cell) as llm:
        assert_same(llm.generate([PROMPT], GREEDY)[0], cold)

        hit = llm.generate([PROMPT], GREEDY)[0]
        assert hit.cached_tokens == {"device": 64, "host": 0, "storage": 0}
        assert_same(hit, cold)

        forks = [[*PROMPT[:66], *tail] for tail in ([5], [9] * 20, PROMPT[66:])]
        forked = llm.generate(forks, GREEDY)
        assert [one.cached_tokens["device"] for one in forked] == [64, 64, 64]
        assert_same(forked[2], cold)

        others = [PROMPT[:n] for n in (1, 16, 17, 40)]
        mixed = llm.generate([*others, PROMPT], GREEDY)
        assert_same(mixed[-1], cold)
        llm.check_integrity()
        assert all(set(ledger.by_role) <= {"tree"} for ledger in llm.ledgers().values())


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
def test_a_partial_hit_resumes_at_the_junction_and_is_exact(
    folder: Path, cold: Completion, overlap: bool
) -> None:
    with engine(folder, Cell(32, overlap)) as llm:
        llm.generate([[*PROMPT[:40], *[4] * 40]], GREEDY)
        first = llm.generate([PROMPT], GREEDY)[0]
        assert first.cached_tokens["device"] == 0
        assert first.uncached_reasons["no_snapshot"] == 2
        assert_same(first, cold)
        junction = llm.generate([[*PROMPT[:33], 6, 6]], GREEDY)[0]
        assert junction.cached_tokens["device"] == 32, "the junction left a snapshot"


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
def test_retracted_and_resumed_is_exact(folder: Path, cold: Completion, overlap: bool) -> None:
    prompts = [[*PROMPT[:-1], tail] for tail in (9, 10, 11)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        expected = llm.generate(prompts, GREEDY)
    scarce = Cell(64, overlap, memory_bytes=scarce_bytes(folder), max_running=4, recurrent_slots=12)
    with engine(folder, scarce) as llm:
        found = llm.generate([PROMPT, *prompts], GREEDY)
        assert llm.counts.retractions > 0, "the pools were meant to run out"
        llm.check_integrity()
    for one, other in zip(found, [cold, *expected], strict=True):
        assert_same(one, other)


def scarce_bytes(folder: Path) -> int:
    """Room for 14 pages, where four requests that share 4 need 16 at their ends."""
    manifest = load_model(folder, "float64", page_size=16).manifest
    slot_bytes = {kind: manifest.layout(kind).slot_bytes for kind in manifest.kinds}
    return 14 * slot_bytes[Kind.FULL] + 12 * slot_bytes[Kind.RECURRENT]


def test_penalties_and_seeds_survive_overlap_and_retraction(folder: Path) -> None:
    sampling = [
        SamplingParams(
            max_tokens=24,
            temperature=0.8,
            top_p=0.9,
            seed=seed,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            ignore_eos=True,
        )
        for seed in range(4)
    ]
    prompts: Sequence[Sequence[int]] = [PROMPT[: 30 + seed] for seed in range(4)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        alone = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, sampling, strict=True)]
    with engine(folder, Cell(32, overlap=True)) as llm:
        together = [one.token_ids for one in llm.generate(prompts, sampling)]
        again = [one.token_ids for one in llm.generate(prompts, sampling)]
    assert together == alone == again


def test_bad_prompts_are_refused_before_any_work(folder: Path) -> None:
    with engine(folder, Cell(64, overlap=True)) as llm:
        for prompt in ([], [200], [-1], [3] * 2000):
            with pytest.raises(InvalidRequest):
                llm.generate([PROMPT, prompt], GREEDY)
        assert llm.counts.prefill_steps == 0

"""Ways to arrive at the same answer: every cell equals the cold run, in float64, to 1e-12.

{cold, device hit, host hit, one kind loaded, partial hit, fork} × {chunkings} × {overlap on, off} ×
{retracted or not} × {alone, in a mixed batch}, in one process; and a hit at every position, from
the device and from the host, equals what is recomputed. Counters prove that each feature really
happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.host_fed import (
    PAGE_SIZE,
    Cell,
    PutsAway,
    assert_same,
    engine,
    engine_of,
)
from tests.tiny_models import save_tiny_model

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.llm import LLM, Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import TokenRules

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["granite_moe", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Completion]:
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        yield llm.generate([PROMPT], GREEDY)[0]


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

        ranks = [PROMPT[:n] for n in (1, 16, 17, 40)]
        mixed = llm.generate([*ranks, PROMPT], GREEDY)
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
@pytest.mark.parametrize(
    ("lost", "on_device"), [(None, 0), (Kind.RECURRENT, 64)], ids=["all", "the snapshot alone"]
)
def test_what_is_loaded_from_the_host_is_exact(
    folder: Path, cold: Completion, lost: Kind | None, on_device: int, overlap: bool
) -> None:
    with engine(folder, Cell(48, overlap)) as llm:
        llm.generate([PROMPT], GREEDY)
        llm.write_through(PROMPT)
        assert llm.forget(lost) > 0
        found = llm.generate([PROMPT], GREEDY)[0]
        assert found.cached_tokens["device"] == on_device
        assert sum(found.cached_tokens.values()) == 64
        assert_same(found, cold)
        llm.check_integrity()


LONG = [(5 * i * i + 11 * i) % 120 + 3 for i in range(300)]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)


def test_at_every_prefix_length_a_hit_equals_what_is_recomputed(folder: Path) -> None:
    """Snapshots at every page's end: a prompt of n tokens resumes at the last one before n."""
    prefixes = [LONG[:length] for length in range(1, len(LONG) + 1)]
    with engine(folder, Cell(1024, overlap=True, prefix_cache=False)) as llm:
        expected = llm.generate(prefixes, ONE_TOKEN)
    with engine(folder, Cell(1024, overlap=True, recurrent_slots=120, snapshot_grid=16)) as llm:
        llm.generate([LONG], ONE_TOKEN)
        llm.write_through(LONG)
        for found, right in zip(llm.generate(prefixes, ONE_TOKEN), expected, strict=True):
            position = (len(found.prompt_token_ids) - 1) // 16 * 16
            assert found.cached_tokens == {"device": position, "host": 0, "storage": 0}
            assert_same(found, right)
        for prefix, right in zip(prefixes, expected, strict=True):
            llm.forget()
            found = llm.generate([prefix], ONE_TOKEN)[0]
            position = (len(prefix) - 1) // 16 * 16
            assert found.cached_tokens == {"device": 0, "host": position, "storage": 0}
            assert_same(found, right)


SIBLINGS = [[*PROMPT[:-1], tail] for tail in (9, 10, 11)]


@pytest.fixture(scope="module")
def family(folder: Path, cold: Completion) -> list[Completion]:
    """The cold answers to the prompt and its siblings."""
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        return [cold, *llm.generate(SIBLINGS, GREEDY)]


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
def test_retracted_and_resumed_is_exact(
    folder: Path, family: list[Completion], overlap: bool
) -> None:
    with engine(folder, scarce(folder, 64, overlap)) as llm:
        found = llm.generate([PROMPT, *SIBLINGS], GREEDY)
        assert llm.counts.retractions > 0, "the pools were meant to run out"
        llm.check_integrity()
    for one, other in zip(found, family, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
@pytest.mark.parametrize("chunk_tokens", [16, 1024])
def test_retracted_and_resumed_through_the_host_is_exact(
    folder: Path, family: list[Completion], chunk_tokens: int, overlap: bool
) -> None:
    with engine_of(PutsAway, folder, scarce(folder, chunk_tokens, overlap)) as llm:
        found = llm.generate([PROMPT, *SIBLINGS], GREEDY)
        from_host = [plan for plan in llm.resumed if plan.loads]
        assert from_host, "the device was to have forgotten what was retracted"
        assert all(plan.prompt_len - plan.position <= PAGE_SIZE for plan in from_host)
        llm.check_integrity()
    for one, other in zip(found, family, strict=True):
        assert_same(one, other)


def scarce(folder: Path, chunk_tokens: int, overlap: bool) -> Cell:
    memory = scarce_bytes(folder)
    return Cell(chunk_tokens, overlap, memory_bytes=memory, max_running=4, recurrent_slots=12)


def scarce_bytes(folder: Path, num_states: int = 12) -> int:
    """Room for 14 pages, where four requests that share 4 need 16 at their ends."""
    manifest = load_model(folder, LoadOptions("float64", page_size=16)).manifest
    slot_bytes = {kind: manifest.layout(kind).slot_bytes for kind in manifest.kinds}
    return 14 * slot_bytes[Kind.FULL] + num_states * slot_bytes[Kind.RECURRENT]


WEIGHED = [
    SamplingParams(
        max_tokens=40,
        temperature=0.8,
        top_p=0.9,
        seed=seed,
        repetition_penalty=1.3,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        logprobs=3,
        ignore_eos=True,
        stop_token_ids=tuple(range(3, 40)),
        rules=TokenRules(
            min_tokens=30,
            logit_bias=((50 + seed, 4.0), (60, -100.0)),
            allowed_token_ids=tuple(range(3, 125)) if seed % 2 else (),
            bad_words=((70,), (50 + seed, 50 + seed)),
        ),
    )
    for seed in range(4)
]


@pytest.mark.parametrize(
    ("prefix_cache", "overlap", "draft"),
    [
        pytest.param(False, False, "ngram", id="no cache, one step at a time, drafts"),
        pytest.param(True, False, "", id="cache, one step at a time"),
        pytest.param(False, True, "", id="no cache, overlap"),
        pytest.param(True, True, "ngram", id="cache, overlap, drafts"),
    ],
)
def test_penalties_and_seeds_survive_retraction(
    folder: Path, prefix_cache: bool, overlap: bool, draft: str
) -> None:
    """Generated tokens that come back as prompt still count as output."""
    prompts = [[(5 * i + 17 * n) % 120 + 3 for i in range(40 + n)] for n in range(4)]
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        alone = [llm.generate([p], w)[0] for p, w in zip(prompts, WEIGHED, strict=True)]
    with LLM(
        folder,
        dtype="float64",
        page_size=PAGE_SIZE,
        max_running=4,
        memory_bytes=scarce_bytes(folder, num_states=40),
        recurrent_slots=40,
        prefix_cache=prefix_cache,
        overlap=overlap,
        draft=draft,
        draft_tokens=3,
    ) as llm:
        together = llm.generate(prompts, WEIGHED)
        assert llm.counts.retractions > 0, "the pages were meant to run out"
        assert bool(draft) == (llm.counts.drafts.drafted > 0)
    for found, wanted in zip(together, alone, strict=True):
        assert_same(found, wanted)


def test_bad_prompts_are_refused_before_any_work(folder: Path) -> None:
    with engine(folder, Cell(64, overlap=True)) as llm:
        for prompt in ([], [200], [-1], [3] * 2000):
            with pytest.raises(InvalidRequest):
                llm.generate([PROMPT, prompt], GREEDY)
        assert llm.counts.prefill_steps == 0

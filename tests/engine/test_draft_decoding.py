"""Draft decoding says what plain decoding says, on every family: greedy and drawn, token for token.

FERRYMAN_TEST_DRAFTS raises the number of prompts of each family: 17 make 204 greedy ones.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.model.comparison import FAMILIES, random_config, swept
from tests.model.families.shapes import VOCAB_SIZE
from tests.tiny_models import save_random, save_tiny_model

from ferryman.cache.keys import as_token_ids, page_keys
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.llm import LLM, Completion
from ferryman.schedule.drafting import DraftCounts
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import TokenRules

NUM_PROMPTS = int(os.environ.get("FERRYMAN_TEST_DRAFTS", "2"))
PAGE_SIZE = 8
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True)


def a_prompt(rng: random.Random, repeats: int) -> list[int]:
    """A few tokens over and over, and a tail of their beginning."""
    period = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
    return [*period * rng.randint(1, repeats), *period[: rng.randint(0, 4)]]


def a_way_to_sample(rng: random.Random) -> SamplingParams:
    """Greedy in half of the cases, else with options that depend on earlier tokens."""
    options: dict[str, float] = {}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.3, 1.0]), "top_p": rng.choice([0.7, 1.0])}
        options |= {"repetition_penalty": rng.choice([1.0, 1.3])}
        options |= {"presence_penalty": rng.choice([0.0, 0.6])}
    rules = TokenRules()
    if rng.random() < 0.3:
        some = [rng.randrange(3, VOCAB_SIZE) for _ in range(4)]
        rules = TokenRules(rng.randint(0, 24), ((some[0], 3.0),), (), ((some[1],), tuple(some[2:])))
    return SamplingParams(
        rules=rules,
        max_tokens=rng.randint(1, 24),
        seed=rng.randrange(100),
        logprobs=rng.choice([0, 2]),
        ignore_eos=rng.random() < 0.8,
        **{"temperature": 0.0, **options},  # type: ignore[arg-type]
    )


def run(
    folder: Path,
    asked: Sequence[tuple[list[int], SamplingParams]],
    *,
    draft: str | Path = "",
    draft_tokens: int = 4,
    overlap: bool = True,
    prefix_cache: bool = True,
    memory_bytes: int = 1 << 23,
) -> tuple[list[Completion], DraftCounts, int]:
    """The answers, the draft counts and the number of retractions; checks that nothing leaks."""
    with LLM(
        folder,
        dtype="float64",
        page_size=PAGE_SIZE,
        chunk_tokens=32,
        max_running=6,
        overlap=overlap,
        prefix_cache=prefix_cache,
        memory_bytes=memory_bytes,
        draft=draft,
        draft_tokens=draft_tokens,
    ) as llm:
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        llm.check_integrity()
        assert all(set(ledger.by_role) <= {"tree"} for ledger in llm.ledgers().values())
        return answers, llm.counts.drafts, llm.counts.retractions


def assert_same(found: Sequence[Completion], plain: Sequence[Completion]) -> None:
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        for given, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert near(given, expected)


def tell(what: str, counts: DraftCounts) -> None:
    """Shown by `pytest -s`."""
    sys.stdout.write(
        f"{what}: {counts.accepted} of {counts.drafted} accepted ({counts.acceptance:.0%}), "
        f"{steps_per_token(counts):.2f} steps a token\n"
    )


def steps_per_token(counts: DraftCounts) -> float:
    """1 for plain decoding: each step of a request brings one token and the accepted drafts."""
    return counts.steps / (counts.steps + counts.accepted)


def near(given: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    return given.keys() == expected.keys() and all(
        abs(given[token] - value) < 1e-12 for token, value in expected.items()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@cache
def model_of(folders: Path, family: str, seed: int) -> Path:
    folder = folders / f"{family}-{seed}"
    folder.mkdir()
    return save_random(folder, random_config(family, seed), seed)


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_drafts_change_no_token_of_any_family(family: str, folders: Path) -> None:
    """First the text drafts, then the model for itself: greedy, all of its drafts are right."""
    folder, rng = model_of(folders, family, 1), random.Random(f"drafts {family}")
    greedy = [(a_prompt(rng, 6), GREEDY) for _ in range(NUM_PROMPTS)]
    drawn = [(a_prompt(rng, 6), a_way_to_sample(rng)) for _ in range(NUM_PROMPTS)]
    plain, nothing, _ = run(folder, greedy + drawn)
    assert nothing.drafted == 0
    found, counts, _ = run(folder, greedy + drawn, draft="ngram")
    assert_same(found, plain)
    tell(f"{family} drafted by its text", counts)
    found, counts, _ = run(folder, greedy, draft=folder, draft_tokens=rng.randint(1, 9))
    assert_same(found, plain[:NUM_PROMPTS])
    tell(f"{family} drafted by itself", counts)
    assert counts.accepted == counts.drafted > 0


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])
@pytest.mark.parametrize("draft_family", ["llama", "granite"])
def test_a_draft_model_of_another_family_changes_no_token(
    draft_family: str, overlap: bool, prefix_cache: bool, folders: Path
) -> None:
    """Pages alone beside recurrent slots, and both beside both."""
    folder, draft = model_of(folders, "bamba", 1), model_of(folders, draft_family, 2)
    rng = random.Random(f"{draft_family} {overlap}")
    asked = [(a_prompt(rng, 5), a_way_to_sample(rng)) for _ in range(8)]
    plain, _, _ = run(folder, asked, overlap=overlap, prefix_cache=prefix_cache)
    found, counts, _ = run(
        folder, asked, draft=draft, overlap=overlap, prefix_cache=prefix_cache, draft_tokens=3
    )
    assert counts.drafted > 20
    assert_same(found, plain)


@pytest.mark.parametrize("lengths", [(5, 40), (40, 5)], ids=str)
def test_a_draft_model_with_a_window_of_another_length_changes_no_token(
    lengths: tuple[int, int], tmp_path: Path
) -> None:
    """Pages of both windows are freed together, behind the longer one."""
    folders, rng = [], random.Random(3)
    for length in lengths:
        config = random_config("gemma3", 1)
        config.sliding_window = length
        folders.append(save_random(tmp_path / str(length), config, 1))
    prompts = [a_prompt(rng, 6) for _ in range(4)]
    asked = [(prompt, GREEDY) for prompt in [*prompts, *prompts]]
    plain, _, _ = run(folders[0], asked)
    found, counts, _ = run(folders[0], asked, draft=folders[1])
    assert_same(found, plain)
    assert counts.drafted > 0


def test_repetitive_text_takes_less_than_a_step_a_token(tmp_path: Path) -> None:
    """This model soon repeats itself; then the text predicts the next tokens."""
    folder, rng = save_tiny_model(tmp_path, "granite_nope"), random.Random(1)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    asked = [(a_prompt(rng, 6), params) for _ in range(6)]
    plain, _, _ = run(folder, asked)
    found, counts, _ = run(folder, asked, draft="ngram")
    assert_same(found, plain)
    tell("repetitive text", counts)
    assert steps_per_token(counts) < 0.7


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_what_is_retracted_comes_back_and_says_the_same(draft: str, folders: Path) -> None:
    folder, rng = model_of(folders, "granite", 1), random.Random(5)
    params = SamplingParams(max_tokens=70, temperature=0.8, seed=4, ignore_eos=True)
    asked = [(a_prompt(rng, 4), params) for _ in range(6)]
    plain, _, _ = run(folder, asked)
    chosen = str(folder) if draft == "itself" else draft
    found, counts, retractions = run(
        folder, asked, draft=chosen, memory_bytes=least_memory(folder, chosen) + 4096
    )
    assert retractions > 0, "the pools were meant to run out"
    assert counts.drafted > 20
    assert_same(found, plain)


def least_memory(folder: Path, draft: str | Path) -> int:
    """The least memory, in bytes, according to the error."""
    with pytest.raises(ConfigError, match="is too little") as raised:
        run(folder, [], draft=draft, memory_bytes=1)
    return int(str(raised.value).split(": ")[1].split()[0])


# Snapshots.


def snapshots(llm: LLM, token_ids: Sequence[int]) -> dict[int, NDArray[np.float64]]:
    """The states in the tree by position, as numbers."""
    engine = llm._engine
    keys = page_keys(llm._root, as_token_ids(token_ids), PAGE_SIZE)
    return {
        (unit.page_index + 1) * PAGE_SIZE: np.frombuffer(
            bytes(engine.transfer.read(unit.kind, unit.handle.slot)), np.float64
        )
        for unit in engine.scheduler.chain_units(keys)
        if unit.kind is Kind.RECURRENT
    }


@pytest.mark.parametrize("max_tokens", range(8, 24, 3))
@pytest.mark.parametrize("draft_tokens", [2, 9])
def test_snapshots_are_those_of_plain_decoding(
    max_tokens: int, draft_tokens: int, folders: Path
) -> None:
    """The snapshots are at the same page ends with the same state, wherever a run has the end."""
    folder, prompt = model_of(folders, "granite", 1), [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    kept = []
    for draft in ("", "ngram"):
        options = {"page_size": PAGE_SIZE, "overlap": False, "memory_bytes": 1 << 23}
        with LLM(folder, dtype="float64", draft=draft, draft_tokens=draft_tokens, **options) as llm:
            (answer,) = llm.generate([prompt], params)
            kept.append(snapshots(llm, [*prompt, *answer.token_ids]))
    plain, drafted = kept
    assert list(plain) == list(drafted)
    assert max(plain) == (len(prompt) + max_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    for position, state in plain.items():
        assert np.allclose(drafted[position], state, rtol=1e-12, atol=1e-12), position


# Refused.


def test_a_draft_model_with_another_vocabulary_is_refused(folders: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, "granite_nope")
    with pytest.raises(ConfigError, match="vocabulary of 131 tokens, the model one of 97"):
        run(model_of(folders, "granite", 1), [], draft=other)


@pytest.mark.parametrize("draft_tokens", [-1, 65])
def test_a_number_of_drafts_that_means_nothing_is_refused(draft_tokens: int, folders: Path) -> None:
    with pytest.raises(ConfigError, match=f"draft_tokens={draft_tokens}: should be"):
        run(model_of(folders, "granite", 1), [], draft="ngram", draft_tokens=draft_tokens)

"""The sampler against the same rules in plain Python, and its guarantees."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ferryman.model.sampling.inverse_cdf import NUM_LIKELIEST, Filters
from ferryman.model.sampling.sampler import (
    greedy,
    log_probabilities,
    penalise,
    sample,
    uniform,
    uniform_bits,
)
from ferryman_kernels.elementwise.token_penalties import EarlierTokens, PenaltyStrengths

VOCAB = 40


@dataclass(frozen=True, slots=True)
class SamplerCase:
    """One row: the parameters of its draw, and the tokens before it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def some_case(rng: random.Random) -> SamplerCase:
    return SamplerCase(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 1, 5, 100, 300]),
        top_p=rng.choice([1.0, 0.95, 0.5, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        repetition=rng.choice([1.0, 1.3, 0.7]),
        presence=rng.choice([0.0, 0.5, -1.0]),
        frequency=rng.choice([0.0, 0.25, -0.5]),
        seed=rng.randrange(-(2**63), 2**63),
        prompt=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))],
        output=[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 12))],
    )


def naive_penalised(logits: Sequence[float], case: SamplerCase) -> list[float]:
    said, counts = {*case.prompt, *case.output}, Counter(case.output)
    found = []
    for token, logit in enumerate(logits):
        if token in said:
            logit = logit / case.repetition if logit > 0 else logit * case.repetition
        logit -= case.frequency * counts[token] + case.presence * (counts[token] > 0)
        found.append(logit)
    return found


def naive_token(logits: Sequence[float], case: SamplerCase) -> int:
    """Sorts, filters, and adds up weights until they pass the uniform number."""
    logits = naive_penalised(logits, case)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if case.temperature == 0.0:
        return ranked[0]
    top = logits[ranked[0]]
    weights = [math.exp((logits[token] - top) / case.temperature) for token in ranked]
    kept = weights[: case.top_k or len(weights)]
    by_min = sum(weight >= case.min_p for weight in weights)
    kept = kept[: min(naive_nucleus(kept, case.top_p), by_min)]
    target, so_far = uniform(case.seed, case.position) * sum(kept), 0.0
    for token, weight in zip(ranked, kept, strict=False):
        so_far += weight
        if so_far > target:
            return token
    return ranked[len(kept) - 1]


def naive_nucleus(weights: Sequence[float], top_p: float) -> int:
    """The number of weights that reach the share `top_p`."""
    so_far, enough = 0.0, top_p * sum(weights)
    for count, weight in enumerate(weights, start=1):
        so_far += weight
        if so_far >= enough:
            return count
    return len(weights)


def penalised(logits: Tensor, cases: Sequence[SamplerCase]) -> Tensor:
    longest = max(case.position for case in cases)
    rows = [[*case.prompt, *case.output] for case in cases]
    # Places after a row's own tokens belong to another request and must not count.
    token_ids = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int32)
    prompt_lens = torch.tensor([len(case.prompt) for case in cases])
    past = EarlierTokens(token_ids, prompt_lens, torch.tensor([case.position for case in cases]))
    penalties = [[case.repetition, case.presence, case.frequency] for case in cases]
    return penalise(logits, past, PenaltyStrengths(*torch.tensor(penalties, dtype=torch.float64).T))


def tokens(logits: Tensor, cases: Sequence[SamplerCase]) -> list[int]:
    drawn = [index for index, case in enumerate(cases) if case.temperature > 0]
    hot = [cases[index] for index in drawn]
    bits = torch.tensor([uniform_bits(case.seed, case.position) for case in hot])
    filters = Filters(
        indices=torch.tensor(drawn, dtype=torch.long),
        uniforms=bits.double() / 2.0**53,
        temperatures=torch.tensor([case.temperature for case in hot], dtype=torch.float64),
        top_k=torch.tensor([case.top_k for case in hot], dtype=torch.long),
        top_p=torch.tensor([case.top_p for case in hot], dtype=torch.float64),
        min_p=torch.tensor([case.min_p for case in hot], dtype=torch.float64),
    )
    found: list[int] = sample(penalised(logits, cases), filters).tolist()
    return found


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20)


def test_every_draw_equals_the_plain_inverse_cdf(rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        cases = [some_case(rng) for _ in range(8)]
        # Rounding to halves makes ties, which have an order too.
        logits = (torch.randn(8, VOCAB, generator=generator, dtype=torch.float64) * 6).round() / 2
        expected = [
            naive_token(row, case) for row, case in zip(logits.tolist(), cases, strict=True)
        ]
        assert tokens(logits, cases) == expected


def test_the_likeliest_few_choose_what_the_whole_vocabulary_would(rng: random.Random) -> None:
    """Flat and steep rows, ties across the edge of the few, draws that fall beyond it."""
    generator, vocab = torch.Generator().manual_seed(5), 4 * NUM_LIKELIEST
    for scale in (0.0, 0.05, 1.0, 6.0):
        cases = [some_case(rng) for _ in range(40)]
        logits = torch.randn(40, vocab, generator=generator, dtype=torch.float64)
        logits = (logits * 8).round() / 8 * scale
        expected = [
            naive_token(row, case) for row, case in zip(logits.tolist(), cases, strict=True)
        ]
        assert tokens(logits, cases) == expected
        assert [tokens(logits[i : i + 1], cases[i : i + 1])[0] for i in range(40)] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rows_token_does_not_depend_on_its_batch(rng: random.Random, dtype: torch.dtype) -> None:
    cases = [some_case(rng) for _ in range(24)]
    logits = torch.randn(24, VOCAB, dtype=torch.float64).to(dtype) * 3
    together = tokens(logits, cases)
    alone = [tokens(logits[i : i + 1], cases[i : i + 1])[0] for i in range(24)]
    order = rng.sample(range(24), 24)
    shuffled = tokens(logits[order], [cases[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_neutral_penalties_change_no_bit(rng: random.Random) -> None:
    logits = torch.randn(3, VOCAB)
    neutral = SamplerCase(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, [1, 2], [2, 3, 3])
    assert torch.equal(penalised(logits, [neutral] * 3), logits)


def test_repetition_weighs_the_prompt_but_presence_and_frequency_only_the_output() -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]], dtype=torch.float64)
    case = SamplerCase(0.0, 0, 1.0, 0.0, 2.0, 0.5, 0.25, 0, [0, 2], [1, 1])
    assert penalised(logits, [case]).tolist() == [[1.0, 1.0 - 0.5 - 0.5, -4.0, 2.0]]


def test_the_lowest_token_id_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 7.0]])
    assert greedy(logits).tolist() == [1]
    case = SamplerCase(1.0, 1, 1.0, 0.0, 1.0, 0.0, 0.0, 5, [0], [])
    assert tokens(logits, [case]) == [1]
    assert log_probabilities(logits, torch.tensor([0]), 2).token_ids.tolist() == [[0, 1, 2]]


def test_logprobs_hold_the_chosen_token_first_and_then_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 9.0]], dtype=torch.float64)
    found = log_probabilities(logits, torch.tensor([3, 3]), 2)
    assert found.token_ids.tolist() == [[3, 1, 2], [3, 3, 0]]
    assert torch.equal(found.values, logits.log_softmax(-1).gather(1, found.token_ids))


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    found = log_probabilities(torch.zeros(1, 3), torch.tensor([2]), 20)
    assert found.token_ids.tolist() == [[2, 0, 1, 2]]


def test_uniform_is_a_pure_function_of_seed_and_position() -> None:
    assert uniform(7, 100) == uniform(7, 100)
    draws = {uniform(seed, position) for seed in (-1, 0, 1) for position in range(1000)}
    assert len(draws) == 3000
    assert 0.0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1.0
    # Literal values: a request resumed by a later release must draw the same tokens.
    assert uniform_bits(0, 0) == 2896202227987086
    assert uniform_bits(-5, 2048) == 6122927368071074


def test_a_uniform_number_next_to_one_stays_within_what_is_kept() -> None:
    filters = Filters(
        indices=torch.tensor([0]),
        uniforms=torch.tensor([1 - 2.0**-53], dtype=torch.float64),
        temperatures=torch.tensor([1.0], dtype=torch.float64),
        top_k=torch.tensor([3]),
        top_p=torch.tensor([1.0], dtype=torch.float64),
        min_p=torch.tensor([0.0], dtype=torch.float64),
    )
    assert sample(torch.arange(10.0)[None], filters).tolist() == [7]

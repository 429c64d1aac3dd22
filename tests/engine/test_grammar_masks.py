"""Masks on logits: what is masked is never drawn, and no other row changes by a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.text.folders import write_folder
from torch import Tensor

from ferryman.engine.forward.draw_tensors import DrawTensors, pack_draws, unpack_draws
from ferryman.engine.forward.grammar_masks import (
    GrammarMasks,
    GuidedDraw,
    bits_of,
    guided_draws,
    unpacked,
)
from ferryman.engine.forward.packed_step import StepViews
from ferryman.engine.forward.token_source import Sampler
from ferryman.errors import GrammarTooSlow
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import GrammarMatcher
from ferryman.grammar.vocabulary import GrammarVocabulary
from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.schedule.batch import NO_CHOICE, NO_TOKEN, SampleRequest
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import SamplingParams
from ferryman.text.tokenizer import Tokenizer

VOCAB, ROWS, LONGEST = 400, 5, 32
YES_NO = OutputGrammar.choice(["yes", "no"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("masks")))


@pytest.fixture
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(GrammarMasks(GrammarCompiler.for_tokenizer(tokenizer, VOCAB)))


def draws_of(*guided: GuidedDraw, filters: Filters | None = None) -> DrawTensors:
    rows = torch.arange(3)
    return DrawTensors(rows, rows, rows, 2, 0, filters, guided=guided)


def history() -> Tensor:
    return torch.full((ROWS, LONGEST), -1, dtype=torch.int32)


def some_logits(seed: int) -> Tensor:
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_guided_draw_is_the_likeliest_allowed_and_others_are_as_without(
    seed: int, sampler: Sampler, tokenizer: Tokenizer
) -> None:
    logits = some_logits(seed)
    begins = {"n", "no", "y"}
    allowed = [
        i for i in range(384) if tokenizer.token_bytes(i).decode("utf-8", "replace") in begins
    ]
    drawn = sampler.tokens(logits, draws_of(GuidedDraw(1, 4, 3, 3, YES_NO)), history()).token_ids
    assert drawn[1] == max(allowed, key=lambda i: float(logits[1, i]))
    assert drawn[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()


def test_the_output_is_read_from_the_history_behind_the_prompt(
    sampler: Sampler, tokenizer: Tokenizer
) -> None:
    said = history()
    first = tokenizer.encode("y").tolist()
    said[2, 7 : 7 + len(first)] = torch.tensor(first, dtype=torch.int32)
    guided = [GuidedDraw(0, 2, 7, 7 + len(first), YES_NO), GuidedDraw(2, 3, 1, 1, YES_NO)]
    drawn = sampler.tokens(some_logits(1), draws_of(*guided), said).token_ids
    assert tokenizer.token_bytes(int(drawn[0])).startswith(b"e")
    assert tokenizer.token_bytes(int(drawn[2]))[:1] in (b"y", b"n")


def test_a_row_of_another_request_is_no_matter(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """A row goes from one request to the next, with another grammar or the same one."""
    said = history()
    for text, grammar, expected in (
        ("y", YES_NO, b"e"),
        ("", YES_NO, b"yn"),
        ("n", YES_NO, b"o"),
        ("", OutputGrammar.choice(["x"]), b"x"),
        ("ye", YES_NO, b"s"),
    ):
        token_ids = tokenizer.encode(text).tolist() if text else []
        said[0, 5 : 5 + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        draw = GuidedDraw(0, 0, 5, 5 + len(token_ids), grammar)
        drawn = sampler.tokens(some_logits(2), draws_of(draw), said).token_ids
        assert tokenizer.token_bytes(int(drawn[0]))[0] in expected, text


def test_a_matcher_that_failed_half_way_is_not_used_again(
    sampler: Sampler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, (first, *_) = history(), tokenizer.encode("y").tolist()
    said[0, 5] = first
    whole, consumed = GrammarMatcher._consume, list[int]()

    def half_way(matcher: GrammarMatcher, new: list[int]) -> None:
        whole(matcher, new)
        consumed.extend(matcher._consumed)
        matcher._consumed.clear()
        raise RuntimeError("half-way")

    with monkeypatch.context() as patched:
        patched.setattr(GrammarMatcher, "_consume", half_way)
        with pytest.raises(RuntimeError, match="half-way"):
            sampler.tokens(some_logits(2), draws_of(GuidedDraw(0, 0, 5, 6, YES_NO)), said)
    assert consumed == [first], "it had moved on"
    drawn = sampler.tokens(some_logits(2), draws_of(GuidedDraw(0, 0, 5, 5, YES_NO)), said)
    assert tokenizer.token_bytes(int(drawn.token_ids[0]))[:1] in (b"y", b"n")


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_a_masked_token_is_never_drawn(
    temperature: float, sampler: Sampler, tokenizer: Tokenizer
) -> None:
    """Not even by the largest uniform number, with filters that keep more than are allowed."""
    for uniform in (0.0, 0.5, 1 - 2**-53):
        ones = torch.ones(1, dtype=torch.float64)
        for top_k in (0, 5, 400):
            filters = Filters(
                torch.tensor([1]),
                ones * uniform,
                ones * temperature,
                torch.tensor([top_k]),
                ones,
                ones * 0.0,
            )
            draws = draws_of(GuidedDraw(1, 1, 0, 0, YES_NO), filters=filters)
            for seed in range(3):
                drawn = sampler.tokens(some_logits(seed), draws, history()).token_ids
                assert tokenizer.token_bytes(int(drawn[1]))[:1] in (b"y", b"n")


def test_a_dead_end_and_a_row_without_numbers_are_told_apart(tmp_path: Path) -> None:
    vocabulary = GrammarVocabulary((b"a", b"b", b""), {2: "</s>"}, frozenset({2}), lambda _: [])
    sampler = Sampler(GrammarMasks(GrammarCompiler(lambda: vocabulary)))
    grammar, said = OutputGrammar.regex("a(b|c)z"), history()
    said[0, :2] = torch.tensor([0, 1])
    said[1, :1] = 0
    logits = some_logits(3)
    logits[2] = torch.nan
    guided = [GuidedDraw(i, i, 0, (2, 1, 0)[i], grammar) for i in range(3)]
    drawn = sampler.tokens(logits, draws_of(*guided), said).token_ids
    assert drawn.tolist() == [NO_CHOICE, 1, NO_TOKEN]


def test_both_ways_to_unpack_bits_agree() -> None:
    mask = np.random.default_rng(0).integers(0, 2**32, (4, 13), dtype=np.uint32)
    expected = [[bool(int(row[i // 32]) >> (i % 32) & 1) for i in range(VOCAB)] for row in mask]
    assert unpacked(mask, VOCAB, torch.device("cpu")).tolist() == expected
    assert bits_of(torch.from_numpy(mask.view(np.int32)), VOCAB).tolist() == expected


def test_only_draws_with_a_grammar_are_guided_and_a_rows_come_in_order() -> None:
    guided = SamplingParams(grammar=YES_NO)
    draws = [
        SampleRequest(2, 9, 4, guided, arrival=7),
        SampleRequest(1, 5, 4, SamplingParams()),
        SampleRequest(0, 7, 4, guided),
        SampleRequest(2, 10, 4, guided),
    ]
    found = [
        (draw.index, draw.row, draw.start, draw.position, draw.arrival)
        for draw in guided_draws(draws)
    ]
    assert found == [(2, 0, 4, 7, 0), (0, 2, 4, 9, 7), (3, 2, 4, 10, 0)]


class SteppedClock:
    """Moves on by the next of `steps` at each reading, or not at all."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, list[float]()

    def __call__(self) -> float:
        self.now += self.steps.pop(0) if self.steps else 0.0
        return self.now


def a_step(position: int, arrival: int = 0, num_rows: int = 3) -> DrawTensors:
    """Draws of some rows, all but the second under a grammar, behind a prompt of one token."""
    requests = tuple(
        SampleRequest(
            row,
            position,
            1,
            SamplingParams() if row == 1 else SamplingParams(grammar=YES_NO),
            arrival=arrival,
        )
        for row in range(num_rows)
    )
    packed = pack_draws(requests)
    return unpack_draws(StepViews(packed, torch.from_numpy(packed.buffer)), requests)


def test_a_grammar_that_holds_up_the_step_ends_alone(tokenizer: Tokenizer) -> None:
    clock, said = SteppedClock(), history()
    sampler = Sampler(GrammarMasks(GrammarCompiler.for_tokenizer(tokenizer, VOCAB), clock))
    first = sampler.tokens(some_logits(0), a_step(1), said).token_ids
    said[:3, 0], said[:3, 1] = 0, first.int()
    undisturbed = sampler.tokens(some_logits(1), a_step(2), said).token_ids
    # The second makes no step too long, so it owes nothing; the first and the third do.
    for slow in (0.2, 0.24, 0.3, 0.26):
        clock.steps = [0.0, slow, 0.01]
        drawn = sampler.tokens(some_logits(1), a_step(2), said)
        assert drawn.token_ids.tolist() == undisturbed.tolist()
        assert not drawn.errors
    ended = sampler.tokens(some_logits(1), a_step(2), said)
    assert {index: type(error) for index, error in ended.errors.items()} == {0: GrammarTooSlow}
    assert "shorten its constants" in str(ended.errors[0])
    assert ended.token_ids[1:].tolist() == undisturbed[1:].tolist()
    # A decode worker's first draw has an output before it, whose first token prefill drew.
    again = sampler.tokens(some_logits(1), a_step(2, arrival=1), said)
    assert not again.errors, "another output of that grammar owes nothing"
    assert again.token_ids.tolist() == undisturbed.tolist()


def test_an_output_that_was_begun_elsewhere_is_replayed_at_no_charge(tokenizer: Tokenizer) -> None:
    clock, said = SteppedClock(), history()
    sampler = Sampler(GrammarMasks(GrammarCompiler.for_tokenizer(tokenizer, VOCAB), clock))
    first = sampler.tokens(some_logits(0), a_step(1), said).token_ids
    said[:3, 0], said[:3, 1] = 0, first.int()
    clock.steps = [0.0, 9.0, 0.01]
    assert not sampler.tokens(some_logits(1), a_step(2, arrival=1), said).errors
    assert not sampler.tokens(some_logits(1), a_step(2, arrival=1), said).errors
    clock.steps = [0.0, 9.0, 0.01]
    assert not sampler.tokens(some_logits(1), a_step(2, arrival=1), said).errors
    assert sampler.tokens(some_logits(1), a_step(2, arrival=1), said).errors, "each later one"


def test_many_masks_that_are_not_slow_end_no_output(tokenizer: Tokenizer) -> None:
    clock, num_rows = SteppedClock(), 100
    sampler = Sampler(GrammarMasks(GrammarCompiler.for_tokenizer(tokenizer, VOCAB), clock))
    logits, said = torch.zeros(num_rows, VOCAB), torch.zeros(num_rows, 4, dtype=torch.int32)
    for _ in range(300):
        clock.steps = [0.0, *[0.004] * num_rows]
        assert not sampler.tokens(logits, a_step(1, num_rows=num_rows), said).errors


def test_a_grammar_counts_with_what_its_masks_added(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler.for_tokenizer(tokenizer, VOCAB)
    before, peaks = compiler.compiled(YES_NO).num_bytes, iter((100, 350, 350, 350))
    monkeypatch.setattr("ferryman.engine.forward.grammar_masks.peak_bytes", lambda: next(peaks))
    Sampler(GrammarMasks(compiler)).tokens(some_logits(0), a_step(1), history())
    assert compiler.compiled(YES_NO).num_bytes == before + 250


def test_a_grammar_whose_requests_have_ended_makes_room_for_a_new_one(tokenizer: Tokenizer) -> None:
    """Its row is as the last request left it."""
    compiler = GrammarCompiler.for_tokenizer(tokenizer, VOCAB)
    compiler.compiled(YES_NO).grew(3 << 30)
    sampler = Sampler(GrammarMasks(compiler))
    sampler.tokens(some_logits(0), a_step(1), history())
    assert compiler.compiled(OutputGrammar.regex("new")) is not None
    assert compiler.known(YES_NO) is None

"""A place in a grammar: what may come next is right, and follows from the output's tokens alone."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.guided_model import GUIDES, ORDER, Guide
from tests.grammar.walks import NUM_WORDS, allowed, walk

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import GrammarMatcher
from ferryman.grammar.vocabulary import GrammarVocabulary
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.text.tokenizer import Tokenizer

PATTERNS = (
    r"[a-f]{2,5}-([0-9][0-9])?é",
    r"(the|then|there) ferry( carries)? (state|stones)+",
    r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?",
    r"(ab|a)(bc|c)?[^ü-\U0010FFFF]{0,3}",
)


def matcher_of(compiler: GrammarCompiler, grammar: OutputGrammar) -> GrammarMatcher:
    return compiler.compiled(grammar).matcher()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_token_is_allowed_where_another_engine_says_that_the_text_may_go_on(
    pattern: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Partial matches of the `regex` package over bytes as text. Where the text is forced, one
    token of it is allowed and not each of its beginnings."""
    oracle, rng = regex.compile(pattern), random.Random(pattern)
    for _ in range(5):
        matcher = matcher_of(compiler, OutputGrammar.regex(pattern))
        token_ids: list[int] = []
        while True:
            matcher.move_to(token_ids)
            found = allowed(matcher)
            text = b"".join(tokenizer.token_bytes(i) for i in token_ids)
            possible = {
                i
                for i in range(tokenizer.vocab_size)
                if may_follow(oracle, text + tokenizer.token_bytes(i)) and piece(tokenizer, i)
            }
            may_end = is_whole(oracle, text)
            assert tokenizer.eos_token_ids.issubset(found) is may_end
            found -= tokenizer.eos_token_ids
            assert found == possible or (len(found) == 1 and found < possible and not may_end)
            if not found or (may_end and rng.random() < 0.4):
                break
            token_ids = [*token_ids, rng.choice(sorted(found))]


def piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    assert tokenizer.pieces is not None
    return tokenizer.pieces[token_id]


def may_follow(oracle: regex.Pattern[str], text: bytes) -> bool:
    """Whether some text that begins with these bytes matches. Cut characters are completed."""
    try:
        whole, rest = text.decode(), b""
    except UnicodeDecodeError as error:
        whole, rest = text[: error.start].decode(), text[error.start :]
        if error.reason != "unexpected end of data":
            return False
    if not rest:
        return oracle.fullmatch(whole, partial=True) is not None
    return any(
        oracle.fullmatch(whole + character, partial=True) is not None
        for character in map(chr, [*range(0x80, 0x900), 0x65E5, 0x1F600])
        if character.encode().startswith(rest)
    )


def is_whole(oracle: regex.Pattern[str], text: bytes) -> bool:
    try:
        return oracle.fullmatch(text.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_walk_along_the_masks_is_of_the_grammar(
    guide: Guide, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    rng = random.Random(5)
    for _ in range(20):
        token_ids = walk(matcher_of(compiler, guide.grammar), tokenizer, rng)
        text = b"".join(tokenizer.token_bytes(i) for i in token_ids).decode()
        assert guide.is_right(text), text


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_place_follows_from_the_tokens_whatever_was_before(
    compiler: GrammarCompiler, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Drafts, rejections, ends and other rows' tokens, in any order: as if replayed anew."""
    guide = data.draw(st.sampled_from(GUIDES))
    rng = random.Random(data.draw(st.integers(0, 999)))
    outputs = [walk(matcher_of(compiler, guide.grammar), tokenizer, rng) for _ in range(2)]
    moved = matcher_of(compiler, guide.grammar)
    for _ in range(data.draw(st.integers(1, 8))):
        output = data.draw(st.sampled_from(outputs))
        kept = output[: data.draw(st.integers(0, len(output)))]
        wrong = data.draw(st.lists(st.integers(0, 399), max_size=2))
        token_ids = [*kept, *wrong]
        moved.move_to(token_ids)
        anew = matcher_of(compiler, guide.grammar)
        anew.move_to(token_ids)
        masks = np.zeros((2, NUM_WORDS), np.uint32)
        assert moved.fill(masks[0]) == anew.fill(masks[1])
        assert masks[0].tolist() == masks[1].tolist()


def test_behind_an_end_or_a_token_that_is_not_allowed_nothing_is(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = matcher_of(compiler, OutputGrammar.choice(["no"]))
    no = tokenizer.encode("no").tolist()
    (end,) = tokenizer.eos_token_ids
    allowed(matcher)
    for output in ([*no, end], [*no, end, 7], [5], [399], [*no, 5, 6], [end]):
        matcher.move_to(output)
        assert not matcher.fill(np.zeros(NUM_WORDS, np.uint32)), output
    matcher.move_to(no)
    assert allowed(matcher) == {end}


def test_ids_beyond_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, OutputGrammar.regex("[^x]+"))
    matcher.move_to([20])
    assert max(allowed(matcher)) < 384


def test_control_tokens_are_no_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    free = matcher_of(compiler, OutputGrammar.regex("(?s:.*)"))
    control = {i for i in range(tokenizer.vocab_size) if not piece(tokenizer, i)}
    assert allowed(free) & control == tokenizer.eos_token_ids


def test_forced_text_is_written_as_the_tokenizer_writes_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"the ferry": {"const": 1}},
        "required": ["the ferry"],
    }
    text = '{"the ferry": 1}'
    matcher = matcher_of(
        compiler, OutputGrammar.json_schema({**schema, "additionalProperties": False})
    )
    token_ids: list[int] = []
    for _ in range(40):
        matcher.move_to(token_ids)
        (forced,) = allowed(matcher)
        if forced in tokenizer.eos_token_ids:
            break
        token_ids.append(forced)
    assert tokenizer.decode(token_ids) == text
    assert token_ids == tokenizer.encode(text).tolist()


def test_where_no_token_can_follow_is_a_dead_end() -> None:
    """A vocabulary that can begin a word of the grammar and cannot end it."""
    vocabulary = GrammarVocabulary((b"a", b"b", b""), {2: "</s>"}, frozenset({2}), lambda _: [])
    matcher = GrammarCompiler(lambda: vocabulary).compiled(OutputGrammar.regex("a(b|c)z")).matcher()
    mask = np.zeros(1, np.uint32)
    matcher.move_to([0])
    assert matcher.fill(mask)
    assert mask.tolist() == [2]
    matcher.move_to([0, 1])
    assert not matcher.fill(mask)


def test_properties_come_in_the_order_of_the_schema_with_one_space(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    token_ids = walk(
        matcher_of(compiler, OutputGrammar.json_schema(ORDER)), tokenizer, random.Random(1)
    )
    text = tokenizer.decode(token_ids)
    assert re.match(r'\{"id": \d+, "state": "\w+", "lines": \[\{"sku": ', text), text


def test_a_mask_is_written_whole(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, OutputGrammar.choice(["no"]))
    dirty = np.full(NUM_WORDS, 0xFFFFFFFF, np.uint32)
    clean = np.zeros(NUM_WORDS, np.uint32)
    assert matcher.fill(dirty)
    assert matcher.fill(clean)
    assert dirty.tolist() == clean.tolist()


# Of the kind that coding agents send for the input of a tool, in OpenAI's Lark: common terminals,
# aliases, a rule that refers to several others.
PATCH = """
start: begin part+ end
begin: "== Begin" LF
end: "== End" LF?
part: added | moved
added: "== Add: " name LF line+
moved: "== Move: " name LF -> renamed
name: /[a-z.]+/
line: "+" /[^\\n]*/ LF -> kept
%import common.LF
"""
A_PATCH = re.compile(
    r"== Begin\n(== Add: [a-z.]+\n(\+[^\n]*\n)+|== Move: [a-z.]+\n)+== End\n?", re.ASCII
)


@pytest.mark.parametrize("seed", range(5))
def test_the_grammar_of_an_agents_tool_is_held(
    seed: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = matcher_of(compiler, OutputGrammar.context_free(PATCH))
    text = tokenizer.decode(walk(matcher, tokenizer, random.Random(seed)))
    assert A_PATCH.fullmatch(text), text

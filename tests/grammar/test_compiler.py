"""Grammars of callers: refused by name where they cannot be served, bounded, compiled once."""

from __future__ import annotations

import gc
import json
import random
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.grammar.walks import allowed
from tests.text.folders import write_folder

from ferryman.errors import DeadlineExceeded, InvalidRequest, QueueFull
from ferryman.grammar.compiler import BackgroundCompiler, GrammarCompiler
from ferryman.grammar.vocabulary import GrammarVocabulary
from ferryman.schedule.output_grammar import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    GrammarKind,
    OutputGrammar,
)
from ferryman.schedule.request import SamplingParams
from ferryman.text.tokenizer import Tokenizer

DEEP = '{"not": ' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH
UNREADABLE = (
    (GrammarKind.JSON_SCHEMA, "{", "not valid JSON"),
    (GrammarKind.JSON_SCHEMA, "[]", "must be an object"),
    (GrammarKind.JSON_SCHEMA, DEEP, "nested deeper"),
    (GrammarKind.JSON_SCHEMA, "[" * 30_000, "not valid JSON"),
    (GrammarKind.REGEX, "", "1 to"),
    (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), "1 to"),
    (GrammarKind.REGEX, "\ud800", "Unicode"),
    (GrammarKind.CHOICE, "[]", "1 to"),
    (GrammarKind.CHOICE, '{"a": 1}', "1 to"),
    (GrammarKind.CHOICE, '["a", ""]', "not empty"),
    (GrammarKind.CHOICE, '["a", 1]', "a string"),
    (GrammarKind.CHOICE, json.dumps(["a"] * (MAX_CHOICES + 1)), "1 to"),
)


@pytest.mark.parametrize(("kind", "text", "word"), UNREADABLE)
def test_a_text_that_is_no_grammar_of_its_kind_is_refused(
    kind: GrammarKind, text: str, word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word) as raised:
        OutputGrammar(kind, text)
    assert raised.value.param == kind


def a_wide_object(count: int) -> dict[str, object]:
    names = [f"name_{i}" for i in range(count)]
    options = [{"type": "object", "properties": {n: {}}, "required": [n]} for n in names]
    return {"allOf": [{"anyOf": options}] * 8}


REFUSED = (
    ("lookaround", OutputGrammar.regex("a(?=b)"), "look-around"),
    ("back reference", OutputGrammar.regex(r"(a)\1"), "backreferences"),
    ("no regex", OutputGrammar.regex("("), "unclosed"),
    ("no lark", OutputGrammar.context_free('start: "a'), "lexer error"),
    ("no start", OutputGrammar.context_free('end: "a"'), "start"),
    ("unknown rule", OutputGrammar.context_free("root ::= a"), "'a'"),
    ("keyword", OutputGrammar.json_schema({"not": {"type": "null"}}), "not"),
    ("unique", OutputGrammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ("remote", OutputGrammar.json_schema({"$ref": "http://x.test/a"}), "x.test"),
    ("pattern", OutputGrammar.json_schema({"type": "string", "pattern": "("}), "unclosed"),
    (
        "never",
        OutputGrammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}),
        "greater",
    ),
    ("huge", OutputGrammar.json_schema(a_wide_object(9)), "large"),
    ("number", OutputGrammar(GrammarKind.JSON_SCHEMA, '{"const": NaN}'), "expected value"),
    ("only itself", OutputGrammar.json_schema({"$ref": "#"}), "refers to itself"),
    ("itself in all", OutputGrammar.json_schema({"allOf": [{"$ref": "#"}]}), "refers to itself"),
    (
        "a circle",
        OutputGrammar.json_schema(
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        ),
        "refers to itself",
    ),
    ("rule of itself", OutputGrammar.context_free("start: start"), "refers to itself"),
)


@pytest.mark.parametrize(("name", "grammar", "word"), REFUSED, ids=[one[0] for one in REFUSED])
def test_what_cannot_be_served_is_refused_and_says_why(
    name: str, grammar: OutputGrammar, word: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=word) as raised:
        compiler.compiled(grammar)
    assert raised.value.param == grammar.kind
    assert len(str(raised.value)) < 500
    assert compiler.known(grammar) is None


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "array", "items": {"$ref": "#"}}, id="in its items"),
        pytest.param({"anyOf": [{"$ref": "#"}, {"type": "array", "maxItems": 0}]}, id="or not"),
    ],
)
def test_a_schema_may_refer_to_itself_on_the_way_into_a_value(
    schema: dict[str, object], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compiled(OutputGrammar.json_schema(schema)).matcher()
    written: list[int] = []
    for token in tokenizer.encode("[]").tolist():
        assert token in allowed(matcher)
        matcher.move_to(written := [*written, token])
    assert tokenizer.eos_token_ids & allowed(matcher)


def test_a_schema_cannot_change_how_json_is_written(compiler: GrammarCompiler) -> None:
    """`x-guidance` is the library's own keyword; a caller's has no effect on what all have."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    options = {"whitespace_flexible": True, "item_separator": ";+"}
    matcher = compiler.compiled(
        OutputGrammar.json_schema({**schema, "x-guidance": options})
    ).matcher()
    plain = compiler.compiled(OutputGrammar.json_schema(schema)).matcher()
    assert allowed(matcher) == allowed(plain)


def test_a_grammar_and_ignore_eos_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="exclude") as raised:
        SamplingParams(ignore_eos=True, grammar=OutputGrammar.json_object())
    assert raised.value.param == "ignore_eos"


def test_a_grammar_stays_while_it_is_held_and_the_last_ones_stay_anyway(
    tokenizer: Tokenizer,
) -> None:
    compiler = GrammarCompiler(
        lambda: GrammarVocabulary.of(tokenizer, tokenizer.vocab_size), max_kept=2
    )
    first, *others = [OutputGrammar.regex(f"a{i}") for i in range(4)]
    held = compiler.compiled(first)
    for grammar in others:
        compiler.compiled(grammar)
    gc.collect()
    assert compiler.known(first) is held
    assert [compiler.known(grammar) is not None for grammar in others] == [False, True, True]
    assert compiler.compiled(first) is held


def test_the_last_ones_stay_as_far_as_there_is_room_for_their_bytes(tokenizer: Tokenizer) -> None:
    vocabulary = GrammarVocabulary.of(tokenizer, tokenizer.vocab_size)
    small, large = OutputGrammar.regex("a1"), OutputGrammar.choice(["a" * 30_000])
    sizes = {g: GrammarCompiler(lambda: vocabulary).compiled(g).num_bytes for g in (small, large)}
    assert sizes[large] > sizes[small]
    compiler = GrammarCompiler(lambda: vocabulary, max_kept_bytes=sizes[large])
    for grammar in (small, large):
        compiler.compiled(grammar)
    gc.collect()
    assert [compiler.known(grammar) is not None for grammar in (small, large)] == [False, True]


def test_grammars_that_are_held_are_bounded_too(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = compiler.compiled(OutputGrammar.regex("held"))
    monkeypatch.setattr("ferryman.grammar.compiler.MAX_HELD_BYTES", held.num_bytes - 1)
    with pytest.raises(QueueFull, match="MB"):
        compiler.compiled(OutputGrammar.regex("one more"))
    assert compiler.compiled(OutputGrammar.regex("held")) is held


@pytest.mark.parametrize(
    "max_kept_bytes",
    [
        pytest.param(1 << 20, id="beyond what is kept"),
        pytest.param(8 << 30, id="within it"),
    ],
)
def test_grammars_that_no_request_has_make_room(max_kept_bytes: int, tokenizer: Tokenizer) -> None:
    """They grow while they are used, and so after they were found to fit."""
    vocabulary = GrammarVocabulary.of(tokenizer, tokenizer.vocab_size)
    compiler = GrammarCompiler(lambda: vocabulary, max_kept_bytes=max_kept_bytes)
    idle = OutputGrammar.regex("idle")
    compiler.compiled(idle).grew(3 << 30)
    gc.collect()
    assert compiler.compiled(OutputGrammar.regex("new")) is not None
    gc.collect()
    assert compiler.known(idle) is None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_few_bytes_of_a_regex_cost_no_memory(compiler: GrammarCompiler) -> None:
    """Each took 46 MB, and stayed."""
    compiler.compiled(OutputGrammar.regex("a"))
    before = resident_bytes()
    for number in range(12):
        with pytest.raises(InvalidRequest, match="too long; shorten its constants"):
            compiler.compiled(OutputGrammar.regex(f"((e{{{80 + number}}}){{99}}){{9}}"))
    assert resident_bytes() - before < 100 << 20


LONG = "".join(random.Random(5).choices("abc de", k=20_000))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        pytest.param("((e{9}){9}){9}f", "e" * 729, id="a repetition"),
        pytest.param("e{3000}f", "e" * 3000, id="a long one"),
        pytest.param("[xy]+e{9000}f", "xyx" + "e" * 9000, id="one behind a choice"),
        pytest.param("(quick brown foxes ){500}f", "quick brown foxes " * 500, id="of words"),
        pytest.param(f"{LONG}f", LONG, id="a text that is written out"),
    ],
)
def test_a_text_that_is_forced_is_followed_to_its_end(
    pattern: str, text: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """At once, as an output that is taken over, and token by token at its end."""
    matcher = compiler.compiled(OutputGrammar.regex(pattern)).matcher()
    written = tokenizer.encode(text).tolist()
    for number in (len(written) - 3, len(written) - 2, len(written) - 1, len(written)):
        matcher.move_to(written[:number])
        begins = {tokenizer.token_bytes(token)[:1] for token in allowed(matcher)}
        assert begins, number
    assert begins == {b"f"}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"\p{L}{1,300} \p{N}{1,30}", id="letters of all scripts"),
        pytest.param(r"(\p{L}+|\p{Lu}\p{Ll}+|\p{S})+", id="several classes"),
        pytest.param("|".join(f"option {i} of many words" for i in range(2500)), id="60 KB"),
    ],
)
def test_a_grammar_that_needs_much_fuel_gets_it(pattern: str, compiler: GrammarCompiler) -> None:
    assert allowed(compiler.compiled(OutputGrammar.regex(pattern)).matcher())


def test_a_grammar_that_is_slow_from_its_beginning_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman.grammar.compiler.MAX_FIRST_SECONDS", -1.0)
    with pytest.raises(InvalidRequest, match="for one token; shorten its constants"):
        compiler.compiled(OutputGrammar.regex("slow"))


def test_outputs_of_one_grammar_do_not_spoil_each_other(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a lexer, which has a limit: an output that has used it up must not end those
    that need no more than they have."""
    monkeypatch.setattr("ferryman.grammar.compiler.MAX_LEXER_STATES", 150)
    compiled = GrammarCompiler.for_tokenizer(tokenizer, tokenizer.vocab_size).compiled(
        OutputGrammar.regex("(xy|.*a.{60}b.*)")
    )
    hungry, modest = compiled.matcher(), compiled.matcher()
    mask, rng, output = np.zeros(13, np.uint32), random.Random(0), list[int]()
    while hungry.fill(mask) and len(output) < 500:
        output.append(rng.choice(tokenizer.encode("ab").tolist()))
        hungry.move_to(output)
    assert len(output) < 500, "it was to become too complex"
    modest.move_to(tokenizer.encode("x").tolist())
    assert modest.fill(mask)
    hungry.move_to(output[:3])
    assert hungry.fill(mask)


@pytest.mark.parametrize(("kind", "word"), [("byte_window", "bytes"), ("word_piece", "bytes")])
def test_a_model_without_bytes_of_tokens_serves_no_grammar(
    kind: str, word: str, tmp_path: Path
) -> None:
    compiler = GrammarCompiler.for_folder(write_folder(tmp_path, kind), 400)
    compiler.warm_up()
    with pytest.raises(InvalidRequest, match=word):
        compiler.compiled(OutputGrammar.json_object())


def test_a_model_without_an_end_or_a_tokenizer_serves_no_grammar(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "endless")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    with pytest.raises(InvalidRequest, match="end token"):
        GrammarCompiler.for_folder(folder, 400).compiled(OutputGrammar.json_object())
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        GrammarCompiler.for_folder(tmp_path, 400).compiled(OutputGrammar.json_object())


async def test_a_door_is_bounded_and_heeds_the_deadline(tokenizer: Tokenizer) -> None:
    may_read = threading.Event()

    def read() -> GrammarVocabulary:
        assert may_read.wait(60)
        return GrammarVocabulary.of(tokenizer, tokenizer.vocab_size)

    door = BackgroundCompiler(GrammarCompiler(read), max_waiting=1)
    some, other = OutputGrammar.regex("a"), OutputGrammar.regex("b")
    with pytest.raises(DeadlineExceeded, match="compiled"):
        await door.checked(some, within=0.0)
    full = BackgroundCompiler(GrammarCompiler(read), max_waiting=0)
    with pytest.raises(QueueFull):
        await full.checked(other, within=9.0)
    may_read.set()
    assert await door.checked(None, within=0.0) is None
    compiled = await door.checked(some, within=60.0)
    assert compiled is not None
    assert await full.checked(None, within=9.0) is None
    assert await door.checked(some, within=0.0) is compiled, "what is known takes no time"
    door.close()
    full.close()

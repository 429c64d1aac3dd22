"""Grammars compiled within limits, and kept while they are in use or were used lately.

The text of a caller is hostile until the contrary is shown. Its size was bounded when it was read;
what it may unfold to is bounded here, at compiling and at each mask. Router and workers compile
alike, so none has to trust another.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from ferryman.errors import ConfigError, DeadlineExceeded, InvalidRequest, QueueFull
from ferryman.grammar.matcher import GrammarMatcher
from ferryman.grammar.vocabulary import GrammarVocabulary
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.schedule.schemas.json_schema import JSON_STYLE, fitted
from ferryman.text.tokenizer import Tokenizer

MAX_KEPT = 64
MAX_KEPT_BYTES = 256 << 20  # of grammars that no request has any more
MAX_HELD_BYTES = 2 << 30  # of all
MAX_WAITING = 64
# A lexer spends fuel before the first token, and some seven units for each byte of a text that is
# forced from there on: a regex of 16 bytes that stands for 88,000 letters took 46 MB, and each mask
# 0.1 s. A text that is written out in the grammar has its fuel, so has a repetition of 4,000
# letters. Of 22 schemas of agents, up to 11 KB long, none needs more than 10,000, several classes
# of Unicode take 30,000: what cannot even be read gets more.
LEAST_FUEL, FUEL_OF_CHARACTER, MOST_FUEL, FUEL_STEP = 32_000, 10, 500_000, 4
BYTES_OF_FUEL = 100
# Of the processor, for the mask before the first token.
MAX_FIRST_SECONDS = 0.25
_NO_FUEL = ("too big", "fuel exhausted", "initial_lexer_fuel")
_LONG_TEXT = "too many expressions constructed"
MAX_SAID = 300  # characters of the library's complaint
# The library's name for its reason to stop before the first character, and a caller's.
_NO_BEGINNING = "NoExtensionBias"
NO_BEGINNING = (
    "it refers to itself before anything of the output; let a $ref of a schema back to itself pass"
    " through properties or items, and a rule of a grammar begin with a text"
)
SHORTER = "shorten its constants and repetitions, or leave them to the prompt"
# With 128 Ki tokens on one core a usual mask takes 0.02 ms. Grammars made to be slow took 400 ms at
# the library's own limits, and 130 ms at tighter ones.
# A lexer of all its states takes some 50 MB.
MAX_LEXER_STATES = 40_000


def limits(fuel: int) -> LLParserLimits:
    """The limits of a grammar whose lexer may spend so much fuel before the first token."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=fuel,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class CompiledGrammar:
    """A grammar that may be served. Any thread may ask it for a matcher. It takes up to
    `num_bytes`: those before it is used, and those by which it was seen to grow."""

    def __init__(self, grammar: OutputGrammar, vocabulary: GrammarVocabulary) -> None:
        """Compiles. Raises InvalidRequest, with the kind as `param`, for what is no grammar, for
        features that are not supported, and beyond the limits."""
        if grammar.kind is GrammarKind.EITHER:
            # One of them that cannot be served is refused as it would be alone: beside others it
            # would only never be written.
            for alternative in grammar.alternatives:
                CompiledGrammar(alternative, vocabulary)
        self._vocabulary = vocabulary
        self._source = _source(grammar)
        self._lock = threading.RLock()
        self._start = self._within_least_fuel(grammar)
        self.num_bytes = BYTES_OF_FUEL * self._fuel

    def _within_least_fuel(self, grammar: OutputGrammar) -> LLMatcher:
        for fuel in _fuels(len(self._source)):
            self._fuel = fuel
            start = _compiled(self._vocabulary, self._source, self._fuel)
            if not (start.is_error() and _lacks_fuel(start)):
                break
        # The first mask unfolds what every output begins with: what is too much even for that is
        # refused now and not in the middle of a step.
        trial, begun = start.deep_copy(), time.thread_time()
        trial.compute_bitmask()
        if forced := trial.compute_ff_tokens()[:1]:
            trial.consume_tokens(forced)
        seconds = time.thread_time() - begun
        for matcher in (start, trial):
            if matcher.is_error():
                message = f"the {grammar.kind} cannot be served: {_complaint(matcher)}"
                raise InvalidRequest(message, grammar.kind)
        if seconds > MAX_FIRST_SECONDS:
            message = f"the {grammar.kind} takes {seconds:.1f} s for one token; {SHORTER}"
            raise InvalidRequest(message, grammar.kind)
        return start

    def grew(self, num_bytes: int) -> None:
        """Masks have added to its lexer."""
        self.num_bytes += num_bytes

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All tokens that end an output."""
        return self._vocabulary.eos_token_ids

    def matcher(self) -> GrammarMatcher:
        """At the beginning of an output. It does not hold this grammar."""
        compiled = partial(_compiled, self._vocabulary, self._source, self._fuel)
        return GrammarMatcher(self._start, compiled, self._vocabulary, self._lock)


def _compiled(vocabulary: GrammarVocabulary, source: str, fuel: int) -> LLMatcher:
    return LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits(fuel))


def peak_bytes() -> int:
    """The most memory that this process has had: it tells in a microsecond whether it grew."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _fuels(num_characters: int) -> Iterator[int]:
    """The fuel of a grammar of this length, in the order in which it is tried."""
    fuel = LEAST_FUEL + FUEL_OF_CHARACTER * num_characters
    while fuel < MOST_FUEL:
        yield fuel
        fuel *= FUEL_STEP
    yield MOST_FUEL


def _lacks_fuel(matcher: LLMatcher) -> bool:
    error = matcher.get_error()
    return any(words in error for words in _NO_FUEL)


def _complaint(matcher: LLMatcher) -> str:
    message = matcher.get_error().split("<non-verbose")[0].strip()[:MAX_SAID]
    if _LONG_TEXT in message:
        return f"it forces a text that is too long; {SHORTER}"
    return NO_BEGINNING if message == _NO_BEGINNING else message


class GrammarCompiler:
    """The grammars of one model, by their text.

    `read` gives the model's vocabulary, once, when the first grammar comes. A grammar stays while
    it is referenced, and the last `max_kept` stay anyway, as far as they fit `max_kept_bytes`.
    """

    def __init__(
        self,
        read: Callable[[], GrammarVocabulary],
        max_kept: int = MAX_KEPT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._read, self._max_kept, self._max_kept_bytes = read, max_kept, max_kept_bytes
        self._vocabulary: GrammarVocabulary | None = None
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._known = weakref.WeakValueDictionary[OutputGrammar, CompiledGrammar]()
        self._kept = OrderedDict[OutputGrammar, CompiledGrammar]()

    @classmethod
    def for_folder(cls, folder: Path, num_logits: int) -> GrammarCompiler:
        """The compiler for a model folder, whose tokenizer is read when it is needed."""

        def read() -> GrammarVocabulary:
            try:
                tokenizer = Tokenizer.load(folder)
            except ConfigError as error:
                # Prompts of token ids need no tokenizer here: the worker serves all but grammars.
                raise InvalidRequest(f"no grammar is served: {error}", "grammar") from None
            return GrammarVocabulary.of(tokenizer, num_logits)

        return cls(read)

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, num_logits: int) -> GrammarCompiler:
        """The compiler for a tokenizer that is loaded already."""
        return cls(lambda: GrammarVocabulary.of(tokenizer, num_logits))

    def warm_up(self) -> None:
        """Reads the vocabulary before anything is served: for 128 Ki tokens it holds the
        interpreter's lock for two seconds. A model that serves no grammar is no error."""
        with suppress(InvalidRequest):
            _ = self.vocabulary

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """Raises InvalidRequest for a model that cannot be held to a grammar."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read()
                _ = self._vocabulary.tokenizer  # under the lock: it is large
            return self._vocabulary

    def compiled(self, grammar: OutputGrammar) -> CompiledGrammar:
        """May take a second, and lets other threads run meanwhile. Raises InvalidRequest, and
        QueueFull while the grammars of running requests take too much memory."""
        compiled = self.known(grammar)
        if compiled is None:
            self._check_room()
            compiled = CompiledGrammar(grammar, self.vocabulary)
        self._keep(grammar, compiled)
        return compiled

    def known(self, grammar: OutputGrammar) -> CompiledGrammar | None:
        """At once: None when it is not compiled here."""
        with self._lock:
            return self._known.get(grammar)

    def _keep(self, grammar: OutputGrammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._known[grammar] = self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            # The last one stays in any case: its caller is about to use it.
            self._evict(self._max_kept_bytes, least=1)

    def _evict(self, max_bytes: int, least: int) -> None:
        """Keeps as many of the last ones as fit, and `least` in any case."""
        num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        while len(self._kept) > least and (
            len(self._kept) > self._max_kept or num_bytes > max_bytes
        ):
            num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _check_room(self) -> None:
        """Makes room by what is merely kept, which has grown since it was: only what requests have
        counts against them."""
        with self._lock:
            self._evict(self._max_kept_bytes, least=0)
            if self._num_held_bytes() > MAX_HELD_BYTES:
                self._evict(-1, least=0)
            held = self._num_held_bytes()
        if held > MAX_HELD_BYTES:
            megabytes = held >> 20
            raise QueueFull(f"grammars of running requests take {megabytes} MB here; try later")

    def _num_held_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._known.values())


def _source(grammar: OutputGrammar) -> str:
    """The library's form of it. Raises InvalidRequest for JSON that only Python reads."""
    try:
        return _translated(grammar)
    except ValueError as error:
        message = f"the {grammar.kind} cannot be read: {str(error)[:MAX_SAID]}"
        raise InvalidRequest(message, grammar.kind) from None


def _translated(grammar: OutputGrammar) -> str:
    parts = [_part(alternative) for alternative in grammar.alternatives]
    if len(parts) == 1:
        return json.dumps({"grammars": parts})
    named = [{"name": f"part_{index}", **part} for index, part in enumerate(parts)]
    start = "start: " + " | ".join(f"@{part['name']}" for part in named)
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def _part(grammar: OutputGrammar) -> dict[str, Any]:
    """The grammar in the library's form: each kind is named, so that nothing is guessed."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = fitted(json.loads(grammar.text))
            return {"json_schema": {**schema, "x-guidance": dict(JSON_STYLE)}}
        case GrammarKind.REGEX:
            # In ASCII: by a digit a caller does not mean the digits of all scripts.
            source = LLMatcher.grammar_from_regex(regex_to_lark(grammar.text, "dws"))
            (part,) = json.loads(source)["grammars"]
            return dict(part)
        case GrammarKind.CHOICE:
            return {"lark_grammar": _choice(json.loads(grammar.text))}
        case GrammarKind.GRAMMAR:
            return {"lark_grammar": _lark(grammar.text)}
    raise AssertionError("alternatives are of the kinds above")


def _choice(options: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(option) for option in options)


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises errors of any type
        message = f"the grammar is no GBNF: {str(error)[:MAX_SAID]}"
        raise InvalidRequest(message, GrammarKind.GRAMMAR) from None


class BackgroundCompiler:
    """Grammars at a door: compiled, or refused before anything is computed.

    Compiles one grammar at a time in a thread of its own; the loop and the forward stream keep
    the interpreter's lock meanwhile. Used from one event loop.
    """

    def __init__(self, compiler: GrammarCompiler, max_waiting: int = MAX_WAITING) -> None:
        self._compiler, self._max_waiting = compiler, max_waiting
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._num_waiting = 0

    async def checked(
        self, grammar: OutputGrammar | None, *, within: float
    ) -> CompiledGrammar | None:
        """The grammar compiled, or None for a request without one. A caller that holds it keeps it
        compiled for the engine.

        Raises InvalidRequest for what cannot be served, QueueFull with too many before it, and
        DeadlineExceeded after so many seconds.
        """
        if grammar is None:
            return None
        cached = self._compiler.known(grammar)
        return cached if cached is not None else await self._compiled(grammar, within)

    async def _compiled(self, grammar: OutputGrammar, within: float) -> CompiledGrammar:
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} grammars wait to be compiled here")
        loop, compiled = asyncio.get_running_loop(), self._compiler.compiled
        self._num_waiting += 1
        try:
            async with asyncio.timeout(within):
                return await loop.run_in_executor(self._thread, compiled, grammar)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the grammar was compiled") from None
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Compiles nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

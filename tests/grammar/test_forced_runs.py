"""Forced runs as drafts: what is proposed is what the masks force, and nothing else is held up."""

from __future__ import annotations

import threading

from tests.grammar.walks import allowed

from ferryman.cache.keys import as_token_ids
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.forced_runs import ForcedRunDrafting
from ferryman.schedule.drafting import NO_DRAFTS, NOTHING_PROPOSED, PromptLookup
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import Request, SamplingParams
from ferryman.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"the ferry": {"type": "boolean"}, "the river": {"const": "again"}},
    "required": ["the ferry", "the river"],
    "additionalProperties": False,
}
GRAMMAR = OutputGrammar.json_schema(SCHEMA)


def request(token_ids: list[int], num_generated: int = 0, *, guided: bool = True) -> Request:
    sampling = SamplingParams(max_tokens=99, grammar=GRAMMAR if guided else None)
    return Request("r", as_token_ids(token_ids), (), sampling, num_generated=num_generated)


def test_a_forced_run_is_what_the_masks_allow_one_by_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    drafting = ForcedRunDrafting(PromptLookup(8), compiler)
    compiled = compiler.compiled(GRAMMAR)
    assert drafting.num_tokens == 8
    proposals = drafting.begin(request([5, 6, 7]))
    drawn: list[int] = []
    num_forced = 0
    for _ in range(60):
        forced = proposals.propose(drawn, 8)
        matcher = compiled.matcher()
        for token in forced:
            matcher.move_to(drawn)
            assert allowed(matcher) == {token}
            drawn.append(token)
        num_forced += len(forced)
        matcher.move_to(drawn)
        following = sorted(allowed(matcher))
        if tokenizer.eos_token_ids & set(following):
            break
        drawn.append(following[0])
    assert tokenizer.decode(drawn) in (
        '{"the ferry": true, "the river": "again"}',
        '{"the ferry": false, "the river": "again"}',
    )
    assert num_forced > len(drawn) * 2 // 3


def test_what_came_before_this_attempt_counts(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    compiled = compiler.compiled(GRAMMAR)
    output = tokenizer.encode('{"the ferry": true').tolist()
    behind = ForcedRunDrafting(PromptLookup(8), compiler).begin(
        request([5, 6, *output], num_generated=len(output))
    )
    assert tokenizer.decode(behind.propose([], 8)).startswith(', "the river')
    assert compiled is compiler.known(GRAMMAR)


def test_where_nothing_is_forced_the_others_propose(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    compiled = compiler.compiled(GRAMMAR)
    start = tokenizer.encode('{"the ferry": ').tolist()
    text = [40, 41, 42, *start, 43, 44]
    guided = ForcedRunDrafting(PromptLookup(8), compiler).begin(request(text))
    plain = PromptLookup(8).begin(request(text))
    guided.propose([], 8)
    plain.propose([], 0)
    assert list(guided.propose(start, 2)) == list(plain.propose(start, 2)) == [43, 44]
    assert guided.propose(start, 0) == ()
    assert compiled is compiler.known(GRAMMAR)


def test_requests_without_a_grammar_and_workers_without_drafts_are_as_before(
    compiler: GrammarCompiler,
) -> None:
    compiled = compiler.compiled(GRAMMAR)
    drafting = ForcedRunDrafting(NO_DRAFTS, compiler)
    assert drafting.begin(request([5], guided=False)) is NOTHING_PROPOSED
    assert compiled is compiler.known(GRAMMAR)


def test_nobody_waits_for_a_thread_that_computes_masks(compiler: GrammarCompiler) -> None:
    matcher = compiler.compiled(GRAMMAR).matcher()
    assert matcher.forced([])
    holds, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with matcher._lock:
            holds.set()
            may_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(30)
    assert matcher.forced([]) == ()
    may_go.set()
    thread.join()
    assert matcher.forced([])

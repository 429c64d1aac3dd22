"""The grammar of an answer that may be a call of a tool beside the form that a body prescribes.

Clients send tools and a schema with every turn: the model calls until it knows the answer, and then
gives it. Under the schema's grammar alone it could never call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.tool_calls.call_forms import CallWords, literal
from ferryman.text.tool_calls.formats import (
    FormAlone,
    FormOrCall,
    FreeTools,
    NoTools,
    OutputSyntax,
    ToolUse,
)
from ferryman_router.bodies.parsed_request import ParsedRequest

# Grammars of callers in these kinds may begin as they like, also with the rest of a thought.
_OPEN_KINDS = (GrammarKind.REGEX, GrammarKind.GRAMMAR)


def with_calls(body: ParsedRequest, syntax: OutputSyntax, tokenizer: Tokenizer) -> ParsedRequest:
    """The body, whose prescribed form leaves room for calls in the model's own format."""
    grammar, use = body.sampling.params.grammar, body.answer.tools.use
    if grammar is None or syntax.tools is None or not isinstance(use, FreeTools):
        return body
    words = CallWords(tuple(use.parameters), partial(_mark, tokenizer))
    calls = OutputGrammar.context_free(syntax.tools.form(words))
    params = replace(body.sampling.params, grammar=OutputGrammar.either((calls, grammar)))
    return replace(body, sampling=replace(body.sampling, params=params))


def _mark(tokenizer: Tokenizer, text: str) -> str:
    """A mark in Lark. Grammars know control tokens by their ids: these stand for no bytes."""
    token_id = tokenizer.encoder.token_to_id(text)
    is_control = token_id is not None and text in tokenizer.control_tokens
    return f"<[{token_id}]>" if is_control else literal(text)


def tool_use(body: ParsedRequest) -> ToolUse:
    """The tools of a body as a parser of the answer takes them: an answer under a grammar is of
    its form from the first token on."""
    grammar, use = body.sampling.params.grammar, body.answer.tools.use
    if grammar is None:
        return use
    if isinstance(use, FreeTools):
        return FormOrCall(use.parameters)
    is_form = isinstance(use, NoTools) and grammar.kind not in _OPEN_KINDS
    return FormAlone() if is_form else use

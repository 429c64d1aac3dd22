"""Tools beside a form of the answer, as agents send both with every turn: the model calls, or gives
the answer, and either is held to its form."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.walks import may_write
from tests.harness.router import RouterCluster
from tests.router.protocols import PROTOCOLS, Protocol, sent
from tests.router.tool_folders import says, tool_cluster

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman_router.intake.body_intake import LARGE_BYTES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["name", "degrees"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLED = [("get_weather", '{"city": "Paris"}')]
ANSWER = '{"name": "Paris", "degrees": 12}'
FORMS: dict[str, dict[str, Any]] = {
    "chat": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    },
    "responses": {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
NO_CALL: dict[str, Any] = {"chat": "none", "responses": "none", "messages": {"type": "none"}}


@pytest.fixture
async def answering(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, CALL) as made:
        yield made


def last_grammar(made: RouterCluster) -> OutputGrammar:
    grammar = made.prefills[0].orders[-1].request.sampling.grammar
    assert grammar is not None
    return grammar


async def both(made: RouterCluster, protocol: Protocol, **more: Any) -> tuple[Any, Any]:
    """Text and calls of a whole answer, and of a streamed one."""
    body = {**protocol.asks, protocol.limit: 120, **more}
    whole = await made.post(protocol.path, **body)
    assert whole.status_code == 200, whole.text
    stream = await made.post(protocol.path, **body, stream=True)
    return protocol.shown(whole.json()), protocol.streamed(sent(stream.text))


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_the_model_calls_or_answers(answering: RouterCluster, name: str) -> None:
    protocol, form = PROTOCOLS[name], FORMS[name]
    assert await both(answering, protocol, **form) == (("", CALLED), ("", CALLED))
    says(answering, ANSWER)
    assert await both(answering, protocol, **form) == ((ANSWER, []), (ANSWER, []))
    grammar = last_grammar(answering)
    assert grammar.alternatives[1] == OutputGrammar.json_schema(SCHEMA)
    tokenizer = answering.router.components.frontend.ctx.model.tokenizer
    compiled = GrammarCompiler.for_tokenizer(tokenizer, tokenizer.vocab_size).compiled(grammar)
    for text, is_right in (
        (CALL, True),
        (f"{CALL}\n{CALL}", True),
        (ANSWER, True),
        (CALL.replace("get_weather", "get_time"), False),
        ('{"name": "Paris"}', False),
        (f"{ANSWER}\n{CALL}", False),
        ("Sunny.", False),
    ):
        assert may_write(compiled.matcher(), tokenizer, text) == is_right, text


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_nothing_is_shown_of_a_call_that_was_cut_in_its_marks(
    answering: RouterCluster, name: str
) -> None:
    protocol, form = PROTOCOLS[name], FORMS[name]
    quoting = json.dumps({"name": f"I may write {CALL}.", "degrees": 1})
    for limit in (3, 6, 20):
        cut = {**form, protocol.limit: limit}
        says(answering, CALL)
        assert await both(answering, protocol, **cut) == (("", []), ("", []))
        says(answering, quoting)
        shown, streamed = await both(answering, protocol, **cut)
        assert shown == streamed
        assert shown[0]
        assert quoting.startswith(shown[0])
    assert await both(answering, protocol, **form, **{protocol.limit: 170}) == (
        (quoting, []),
        (quoting, []),
    )


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_without_calls_to_make_the_form_is_all(answering: RouterCluster, name: str) -> None:
    protocol, form = PROTOCOLS[name], FORMS[name]
    says(answering, ANSWER)
    fewer: tuple[dict[str, Any], ...] = ({"tool_choice": NO_CALL[name]}, {"tools": []})
    for more in fewer:
        assert await both(answering, protocol, **form, **more) == ((ANSWER, []), (ANSWER, []))
        assert last_grammar(answering) == OutputGrammar.json_schema(SCHEMA)


OTHERS: dict[str, tuple[dict[str, Any], OutputGrammar]] = {
    "any object": ({"response_format": {"type": "json_object"}}, OutputGrammar.json_object()),
    "a regex": ({"structured_outputs": {"regex": "a+"}}, OutputGrammar.regex("a+")),
    "a choice": ({"guided_choice": ["a", "b"]}, OutputGrammar.choice(["a", "b"])),
    "a grammar": ({"ebnf": 'root ::= "a"'}, OutputGrammar.context_free('root ::= "a"')),
}


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(("form", "expected"), OTHERS.values(), ids=OTHERS.keys())
async def test_so_it_is_with_every_form_and_body(
    answering: RouterCluster, form: dict[str, Any], expected: OutputGrammar, size: int
) -> None:
    chat = PROTOCOLS["chat"]
    body = {**chat.asks, chat.limit: 120, **form}
    content = json.dumps(body).encode() + b" " * size
    answer = (await answering.http.post(chat.path, content=content)).json()
    assert chat.shown(answer) == ("", CALLED)
    grammar = last_grammar(answering)
    assert grammar.kind is GrammarKind.EITHER
    assert grammar.alternatives[1] == expected


async def test_an_answer_of_a_form_is_no_thought(answering: RouterCluster) -> None:
    """The template may have begun one: under a grammar the answer begins with its form."""
    says(answering, ANSWER)
    chat = PROTOCOLS["chat"]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    tools: tuple[dict[str, Any], ...] = ({}, {"tools": []})
    for more in tools:
        form = {**FORMS["chat"], **thinking, **more}
        assert await both(answering, chat, **form) == ((ANSWER, []), (ANSWER, []))


async def test_what_a_form_beside_tools_cannot_be_is_refused(answering: RouterCluster) -> None:
    chat = PROTOCOLS["chat"]
    for schema in ({"uniqueItems": True, "type": "array"}, {"$ref": "#"}):
        form = {"guided_json": schema}
        response = await answering.post(chat.path, **chat.asks, **form)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "json_schema")
    assert answering.prefills[0].orders == []


async def test_a_large_schema_beside_tools_is_joined_beside_the_loop(
    answering: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined_by: list[int] = []

    def noted(*alternatives: Any) -> OutputGrammar:
        joined_by.append(threading.get_ident())
        return either(*alternatives)

    either = OutputGrammar.either
    monkeypatch.setattr(OutputGrammar, "either", noted)
    chat, words = PROTOCOLS["chat"], [f"word {index}" for index in range(2000)]
    for schema in (SCHEMA, {"type": "object", "properties": {"a": {"enum": words}}}):
        body = {**chat.asks, chat.limit: 120, "guided_json": schema}
        assert chat.shown((await answering.post(chat.path, **body)).json()) == ("", CALLED)
    small, large = joined_by
    assert small == threading.get_ident() != large
